"""The algorithm of speculative decoding as pure functions over tensors: no model, no file, no global state."""
