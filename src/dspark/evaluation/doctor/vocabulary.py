"""Whether the target's tokenizer is the one that its weights, and the drafter, were trained with.

Shapes: S tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.errors import RequestError
from dspark.evaluation.doctor.pair import Pair
from dspark.evaluation.doctor.report import Check, passed
from dspark.models.states import DecoderStates
from dspark.models.tokenizer import Tokenizer, vocabulary_digest

NAME = "vocabulary"
MIN_TOKENS = 16  # of prompts, for a verdict on how they surprise the target
CHANGE = "restore the tokenizer files that came with the target's weights"


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a user's message as the target answers it. Raises RequestError when it is empty."""
    if not prompt.strip():
        raise RequestError("prompt is empty: write something to answer")
    return ChatTemplate(tokenizer).prompt_ids_or_plain([Message("user", prompt)])


def check_vocabulary(pair: Pair, prompts: Sequence[str]) -> Check:
    """Size, special ids, a round trip and, where the drafter recorded it, the vocabulary itself."""
    tokenizer, config = pair.target.tokenizer, pair.target.config
    ids = list(tokenizer(prompts[0], add_special_tokens=False)["input_ids"])
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    text = str(tokenizer.decode(ids))
    recorded, found = pair.provenance.get("vocabulary_digest"), vocabulary_digest(tokenizer)
    figures: dict[str, Any] = {
        "tokens": len(tokenizer),
        "vocab_size": config.vocab_size,
        "eos_tokens": [tokenizer.convert_ids_to_tokens(index) for index in config.eos_token_ids],
        "round_trip": text.strip() == prompts[0].strip(),
        "vocabulary_digest": found,
        "recorded_digest": recorded,
    }
    if len(tokenizer) > config.vocab_size:
        finding = f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary {config.vocab_size}"
        return Check(NAME, "failed", finding, figures, "other tokenizer", CHANGE)
    if recorded is not None:
        if recorded != found:
            finding = f"the drafter was trained with another vocabulary ({recorded}) than the tokenizer's ({found})"
            return Check(NAME, "failed", finding, figures, "other tokenizer", CHANGE)
        return passed(NAME, f"{len(tokenizer)} tokens, as when the drafter was trained", figures)
    if special and config.eos_token_ids and not special.intersection(config.eos_token_ids):
        finding = f"the target ends its turns with {figures['eos_tokens']}, which are ordinary words in this tokenizer"
        return Check(NAME, "failed", finding, figures, "other tokenizer", CHANGE)
    texts = [list(tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in prompts]
    if sum(map(len, texts)) >= MIN_TOKENS:
        nats, uniform = _surprise(pair, texts), math.log(config.vocab_size)
        figures |= {"nats_per_token": round(nats, 3), "uniform_nats": round(uniform, 3)}
        if nats > uniform + 1:
            finding = f"the prompts surprise the target more ({nats:.1f} nats a token) than random ids ({uniform:.1f})"
            return Check(NAME, "failed", finding, figures, "other tokenizer", CHANGE)
    return passed(NAME, f"{len(tokenizer)} tokens; the drafter's files do not tell which they were made for", figures)


@torch.inference_mode()
def _surprise(pair: Pair, texts: Sequence[list[int]]) -> float:
    """Mean -log p of the target over the tokens of texts, the first of each left out, in nats."""
    decoder, found = pair.target.decoder, []
    for ids in texts:
        states = DecoderStates(decoder)([ids], ())[0]
        logits = decoder.logits(states.last_hidden[:-1]).float()
        found.append(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none"))
    return float(torch.cat(found).mean())
