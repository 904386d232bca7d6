"""The target: model, tokenizer and what identifies them, from any name or path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from dspark.errors import CheckpointError
from dspark.log import get_logger
from dspark.models.config import CaptureName, DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.ends import Ends
from dspark.models.hub import resolve_model
from dspark.models.linear import multiplies_bfloat16, pack_linears
from dspark.models.quantized import WeightsName, quantize_linears, quantized_digest
from dspark.models.states import DecoderStates, StateSource
from dspark.models.tokenizer import Tokenizer, chat_template_digest, load_tokenizer, tokenizer_digest
from dspark.models.weights import (
    ends_digest,
    load_config,
    load_decoder,
    load_ends,
    parameters_digest,
    read_hf_config,
    stored_dtype,
    weights_digest,
)

if TYPE_CHECKING:
    from dspark.models.hf import HuggingFaceCausalLM

_log = get_logger(__name__)

DtypeName = Literal["auto", "bfloat16", "float32"]
DTYPES: dict[str, torch.dtype | None] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Target:
    """A loaded target. Digests are 16 hex digits; `digest` covers config and weights, whatever their file or dtype.

    Quantised weights have a `digest` of their own; `stored_digest` is then that of the files, which drafters name.

    `model` is our decoder; for capture and training alone it may be transformers' model of an architecture that we do
    not decode, or just the two ends that training on cached states needs.
    """

    name: str
    model: Decoder | HuggingFaceCausalLM | Ends
    tokenizer: Tokenizer
    digest: str
    tokenizer_digest: str
    chat_template_digest: str
    ends_digest: str
    stored_digest: str | None = None

    @property
    def config(self) -> DecoderConfig:
        """The model's config."""
        return self.model.config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, as the model's config and generation config list them."""
        return self.config.eos_token_ids

    @property
    def decoder(self) -> Decoder:
        """The decoder, to generate with. Raises `CheckpointError` where transformers runs the model."""
        assert not isinstance(self.model, Ends), "loaded without its layers"
        if not isinstance(self.model, Decoder):
            raise CheckpointError(
                f"{self.name}: {self.config.architecture} is captured through transformers: a drafter can be trained "
                "for it, but dspark cannot decode with it"
            )
        return self.model

    def without_layers(self) -> Target:
        """The target's ends alone; its layers are freed with the target itself."""
        return replace(self, model=Ends.of(self.model))

    def states(self) -> StateSource:
        """The model as a source of hidden states."""
        assert not isinstance(self.model, Ends), "loaded without its layers"
        return DecoderStates(self.model) if isinstance(self.model, Decoder) else self.model


def load_target(
    name_or_path: str | Path,
    dtype: DtypeName = "auto",
    pack: bool = True,
    capture: CaptureName = "decoder",
    weights: WeightsName = "stored",
) -> Target:
    """Load a built-in model, a Hugging Face directory or hub id, or a GGUF file.

    `dtype` "auto" keeps the stored one, but takes float32 for bfloat16 where the CPU does not compute in it: several
    rows then cost the same, and the numbers are exact. `pack` lays the weights out for fast inference on this machine;
    without it they stay plain `nn.Linear`, as training needs them. `weights` "int8" rounds those of linear layers to 8
    bits, for inference on the CPU. `capture` other than "decoder" allows models that
    transformers runs, for their states alone. Raises `CheckpointError`.
    """
    path, name = resolve_model(name_or_path), str(name_or_path)
    if capture == "transformers" or (capture == "auto" and not decodes(path)):
        return _load_foreign(path, name, dtype)
    wanted = {"auto": None if multiplies_bfloat16() else torch.float32} | DTYPES
    decoder = load_decoder(path, wanted[dtype])
    digests = weights_digest(decoder), ends_digest(decoder)
    if weights == "int8":
        quantize_linears(decoder)
    elif pack:
        pack_linears(decoder)
    target = _target(name, decoder, path, *digests)
    if weights == "stored":
        return target
    return replace(target, digest=quantized_digest(target.digest, weights), stored_digest=target.digest)


def load_target_ends(name_or_path: str | Path, dtype: Literal["bfloat16", "float32"], digest: str) -> Target:
    """Load a target without its layers; their files are not opened.

    `digest` is the whole target's, which cannot be told from its ends: of a cache, or of a process that has the whole.
    Raises `CheckpointError`.
    """
    path, wanted = resolve_model(name_or_path), DTYPES[dtype]
    assert wanted is not None
    if decodes(path):
        ends = load_ends(path, wanted)
    else:
        from dspark.models.hf_ends import load_hf_ends  # takes seconds

        ends = load_hf_ends(path, str(name_or_path), wanted)
    return _target(str(name_or_path), ends, path, digest, ends_digest(ends))


def decodes(path: Path) -> bool:
    """Whether our decoder knows the model at `path`; the reason why not is logged."""
    try:
        load_config(path)
    except CheckpointError as error:
        _log.info(
            "our decoder does not know this model (%s): trying transformers, for capture and training alone", error
        )
        return False
    return True


def _load_foreign(path: Path, name: str, dtype: DtypeName) -> Target:
    from dspark.models.hf import HuggingFaceCausalLM  # takes seconds

    wanted = DTYPES.get(dtype)
    if wanted is None:
        stored = torch.float32 if path.suffix == ".gguf" else stored_dtype(read_hf_config(path))
        wanted = stored if multiplies_bfloat16() else torch.float32
    try:
        decoder = load_decoder(path)
    except CheckpointError:
        model = HuggingFaceCausalLM.load(name, wanted)
        return _target(
            name, model, path, parameters_digest(model.named_parameters(), model.config.digest()), ends_digest(model)
        )
    # Drafters and caches of a model that we decode name it in our way, whatever runs it.
    digests = weights_digest(decoder), ends_digest(decoder)
    return _target(name, HuggingFaceCausalLM.load(name, wanted, config=decoder.config), path, *digests)


def _target(
    name: str, model: Decoder | HuggingFaceCausalLM | Ends, path: Path, digest: str, digest_of_ends: str
) -> Target:
    tokenizer = load_tokenizer(path)
    return Target(
        name=name,
        model=model,
        tokenizer=tokenizer,
        digest=digest,
        tokenizer_digest=tokenizer_digest(tokenizer),
        chat_template_digest=chat_template_digest(tokenizer),
        ends_digest=digest_of_ends,
    )
