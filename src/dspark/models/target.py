"""The target: decoder, tokenizer and what identifies them, from any name or path."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.hub import resolve_model
from dspark.models.linear import multiplies_bfloat16, pack_linears
from dspark.models.tokenizer import Tokenizer, chat_template_digest, load_tokenizer, tokenizer_digest
from dspark.models.weights import load_decoder, weights_digest

DtypeName = Literal["auto", "bfloat16", "float32"]
DTYPES: dict[str, torch.dtype | None] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Target:
    """A loaded target. Digests are 16 hex digits; `digest` covers config and weights, whatever their file or dtype."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    digest: str
    tokenizer_digest: str
    chat_template_digest: str

    @property
    def config(self) -> DecoderConfig:
        """The decoder's config."""
        return self.decoder.config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, as the model's config and generation config list them."""
        return self.config.eos_token_ids


def load_target(name_or_path: str | Path, dtype: DtypeName = "auto", pack: bool = True) -> Target:
    """Load a built-in model, a Hugging Face directory or hub id, or a GGUF file.

    `dtype` "auto" keeps the stored one, but takes float32 for bfloat16 where the CPU does not compute in it: several
    rows then cost the same, and the numbers are exact. `pack` lays the weights out for fast inference on this machine;
    without it they stay plain `nn.Linear`, as training needs them. Raises `CheckpointError`.
    """
    path = resolve_model(name_or_path)
    wanted = {"auto": None if multiplies_bfloat16() else torch.float32} | DTYPES
    decoder = load_decoder(path, wanted[dtype])
    digest = weights_digest(decoder)
    tokenizer = load_tokenizer(path)
    if pack:
        pack_linears(decoder)
    return Target(
        name=str(name_or_path),
        decoder=decoder,
        tokenizer=tokenizer,
        digest=digest,
        tokenizer_digest=tokenizer_digest(tokenizer),
        chat_template_digest=chat_template_digest(tokenizer),
    )
