"""A real tokenizer of bytes, for tests of several packages."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Id 0 ends a text, ids 1..256 are single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": EOS} | {symbol: i for i, symbol in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
