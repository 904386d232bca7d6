"""The target side: one decoder for all families, its files, its KV cache and its tokenizer."""
