"""A character-level tokenizer with any chat template: rendered masks can be read letter by letter."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.data.chat import ChatTemplate

SPECIALS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
)


@pytest.fixture
def make_chat() -> Callable[[str], ChatTemplate]:
    """Give a function from a template to a ChatTemplate whose tokenizer has one token a byte and the usual markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}

    def make(template: str, **variables: object) -> ChatTemplate:
        core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="</s>", extra_special_tokens=list(SPECIALS)
        )
        tokenizer.chat_template = template
        return ChatTemplate(tokenizer, variables)

    return make
