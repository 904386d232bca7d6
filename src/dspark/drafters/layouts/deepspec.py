"""The DeepSpec release layout, which is also our own: a flat config.json and one safetensors file.

The public files carry copies of the target's embedding and LM head; ours leave them out, and those that are there must
be the target's. Our extra fields stand under `dspark` in the config, our extra tensors are the d2t/t2d vocabulary maps.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.factory import make_drafter
from dspark.drafters.layouts.eagle import ARCHITECTURE as EAGLE_ORIGINAL
from dspark.drafters.layouts.eagle import is_original, original_name, parse_original
from dspark.errors import CheckpointError, ConfigError
from dspark.files import atomic_path
from dspark.models.config import DecoderConfig
from dspark.models.ends import TargetEnds
from dspark.models.families import config_from_hf, config_to_hf
from dspark.models.weights import read_json

WEIGHTS_NAME = "model.safetensors"
PICKLE_NAME = "pytorch_model.bin"  # what most EAGLE-3 originals are published as
ARCHITECTURES = {
    "Qwen3DSparkModel": "dspark",
    "Qwen3DFlashModel": "dflash",
    "Qwen3Eagle3Model": "eagle3",
    "Gemma4DSparkModel": "dspark",  # DFlash too: with markov_rank 0 and no confidence head
    "Gemma4Eagle3Model": "eagle3",
}
DECODERS = {"qwen3": "Qwen3ForCausalLM", "gemma4": "Gemma4ForCausalLM"}  # by layer style: whose config a file has
OWN_FIELDS = (
    "sample_from_anchor", "block_attention", "draft_vocab_size", "final_logit_softcapping", "qk_norm", "own_lm_head",
)  # fmt: skip
BLOCK_FIELDS = (
    "block_size", "mask_token_id", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
CHAIN_FIELDS = ("ttt_length", "step_loss_decay")
SHARED_FIELDS = ("num_target_layers", *BLOCK_FIELDS, *CHAIN_FIELDS)
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")


class TensorProblems(NamedTuple):
    """What of a drafter's tensors does not fit its config, by stored name."""

    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]  # "name is (..), expected (..)"

    def lines(self) -> list[str]:
        """All problems, the gravest kind first."""
        named = [f"missing tensor {name}" for name in self.missing]
        return [*named, *(f"unexpected tensor {name}" for name in self.unexpected), *self.misshapen]


class StoredDrafter(NamedTuple):
    """A drafter's files as read for one target, before the tensors are checked and loaded."""

    directory: Path
    drafter: Drafter  # with untrained weights
    tensors: dict[str, Tensor]  # by stored name, without vocabulary maps and copies of the target's
    names: dict[str, str]  # parameter -> stored name
    provenance: dict[str, Any]  # what `write_drafter` was told; empty in the public files

    def problems(self) -> TensorProblems:
        """Compare the tensors with what the config asks for."""
        expected = {self.names[name]: p.shape for name, p in self.drafter.named_parameters()}
        return TensorProblems(
            missing=sorted(expected.keys() - self.tensors.keys()),
            unexpected=sorted(self.tensors.keys() - expected.keys()),
            misshapen=[
                f"{name} is {tuple(self.tensors[name].shape)}, expected {tuple(shape)}"
                for name, shape in expected.items()
                if name in self.tensors and self.tensors[name].shape != shape
            ],
        )

    def load(self) -> Drafter:
        """Fill the drafter. Raises CheckpointError naming the first tensor at fault."""
        if lines := self.problems().lines():
            raise CheckpointError(f"{self.directory}: {lines[0]} ({len(lines)} in all)")
        self.drafter.load_state_dict({name: self.tensors[stored] for name, stored in self.names.items()})
        return self.drafter


def read_drafter(path: str | Path, target: TargetEnds, target_digest: str | None = None) -> Drafter:
    """Load a drafter for `target`, strictly: every tensor must be there and none may be left over.

    `target_digest` is compared with the one the file was written for, where it names one. Raises CheckpointError
    naming the file and the field or tensor at fault.
    """
    return open_drafter(path, target, target_digest).load()


def open_drafter(path: str | Path, target: TargetEnds, target_digest: str | None = None) -> StoredDrafter:
    """Read a drafter's config and tensors without comparing the two; arguments and errors as for `read_drafter`."""
    directory = Path(path)
    raw = read_json(directory / "config.json")
    original, where = is_original(raw), str(directory / "config.json")
    config = parse_original(raw, where, target.config.num_hidden_layers) if original else parse_config(raw, where)
    provenance = raw.get("dspark", {})
    wanted = provenance.get("target_digest")
    if wanted and target_digest and wanted != target_digest:
        name = provenance.get("target", "another model")
        raise CheckpointError(f"{directory}: was trained for {name} ({wanted}), not for this target ({target_digest})")
    tensors = (
        _load_pickle(directory / PICKLE_NAME) if original and _pickled(directory) else _load(directory / WEIGHTS_NAME)
    )
    token_ids = _vocabulary_map(tensors, config, directory)
    drafter = make_drafter(config, target, token_ids)
    _check_copies(tensors, drafter, directory)
    names = {
        name: original_name(_stored(name)) if original else _stored(name) for name, _ in drafter.named_parameters()
    }
    return StoredDrafter(directory, drafter, tensors, names, provenance)


def write_drafter(
    drafter: Drafter, path: str | Path, dtype: torch.dtype = torch.bfloat16, provenance: dict[str, Any] | None = None
) -> None:
    """Write the drafter atomically; `provenance` (target name, digest, tokens seen …) goes under `dspark`.

    The training-time feature scale is folded into `fc`, so that readers need not know of it.
    """
    tensors = {_stored(name): value.detach().float() for name, value in drafter.named_parameters()}
    tensors["fc.weight"] = tensors["fc.weight"] * drafter.backbone.feature_scale
    stored = {name: value.to(dtype).contiguous() for name, value in tensors.items()}
    if drafter.token_ids is not None:
        vocabulary = drafter.config.vocab_size
        stored["d2t"] = drafter.token_ids - torch.arange(len(drafter.token_ids))
        stored["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, drafter.token_ids, True)
    config = dump_config(drafter.config, dtype) | {"dspark": provenance or {}}
    with atomic_path(path) as directory:
        directory.mkdir()
        save_file(stored, directory / WEIGHTS_NAME, metadata={"format": "pt"})
        (directory / WEIGHTS_NAME).chmod(0o644)  # safetensors makes it private
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def parse_config(raw: dict[str, Any], where: str) -> DrafterConfig:
    """config.json -> DrafterConfig. Raises CheckpointError naming the file and field."""
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, EAGLE_ORIGINAL))
        raise CheckpointError(f"{where}: architectures {names}: not a known drafter; known: {known}")
    style = "gemma4" if names[0].startswith("Gemma4") else "qwen3"
    shape = config_from_hf(raw | {"architectures": [DECODERS[style]]}, where)
    fields = {name: raw[name] for name in SHARED_FIELDS if raw.get(name) is not None}
    own = {name: raw[name] for name in OWN_FIELDS if name in raw}
    algorithm = ARCHITECTURES[names[0]]
    if algorithm == "dspark" and not (fields.get("markov_rank") or fields.get("enable_confidence_head")):
        algorithm = "dflash"
    try:
        return DrafterConfig.from_dict(
            {
                "algorithm": algorithm,
                "layer_style": style,
                **_network(shape, where),
                "target_layer_ids": raw.get("target_layer_ids", []),
                **fields,
                **own,
            },
            where,
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def dump_config(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """DrafterConfig -> the flat config.json of the release."""
    layers = config.layer_types or ("full_attention",) * config.num_hidden_layers
    shape = {name: getattr(config, name) for name in _DECODER_FIELDS if name != "layer_types"}
    if config.layer_style == "gemma4":
        shared = config.num_key_value_heads if config.attention_k_eq_v else None
        shape |= {"local_rope": config.rope, "global_head_dim": config.head_dim, "num_global_key_value_heads": shared}
    decoder = DecoderConfig(architecture=DECODERS[config.layer_style], layer_types=layers, **shape)
    kind = CHAIN_FIELDS if config.algorithm == "eagle3" else BLOCK_FIELDS
    fields = {name: getattr(config, name) for name in ("num_target_layers", *kind, *OWN_FIELDS)}
    style = config.layer_style
    algorithm = "dspark" if style == "gemma4" and config.algorithm == "dflash" else config.algorithm
    architecture = next(k for k, v in ARCHITECTURES.items() if v == algorithm and k.lower().startswith(style))
    return config_to_hf(decoder, str(dtype).removeprefix("torch.")) | {
        "architectures": [architecture],
        "target_layer_ids": list(config.target_layer_ids),
        **fields,
    }


_DECODER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope", "max_position_embeddings", "qk_norm",
    "attention_bias", "sliding_window", "layer_types", "attention_k_eq_v",
    "final_logit_softcapping",
)  # fmt: skip


def _network(shape: DecoderConfig, where: str) -> dict[str, Any]:
    """The draft layers' fields. In a Gemma 4 drafter all of them are shaped like the target's full-attention ones."""
    if shape.global_head_dim is not None and "sliding_attention" in shape.layer_types:
        raise CheckpointError(f"{where}: layer_types: a Gemma 4 drafter has full_attention layers only")
    return {name: getattr(shape, name) for name in _DECODER_FIELDS} | {
        "head_dim": shape.head_dim_of(0),
        "num_key_value_heads": shape.kv_heads_of(0),
    }


def _stored(name: str) -> str:
    return name.removeprefix("backbone.")


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; a drafter directory holds config.json and {WEIGHTS_NAME}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or truncated ({error}); fetch it again") from None


def _pickled(directory: Path) -> bool:
    return (directory / PICKLE_NAME).is_file() and not (directory / WEIGHTS_NAME).is_file()


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a pickled file; anything else in it is refused."""
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: damaged, or holds more than tensors ({error}); fetch it again") from None
    return tensors


def _vocabulary_map(tensors: dict[str, Tensor], config: DrafterConfig, where: Path) -> Tensor | None:
    """Take d2t and t2d out of `tensors` and return the target ids of the draft vocabulary, checked."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if config.draft_vocab_size is None:
        if d2t is not None:
            raise CheckpointError(f"{where}: has d2t but its config names no draft_vocab_size")
        return None
    if d2t is None:
        raise CheckpointError(f"{where}: draft_vocab_size is {config.draft_vocab_size} but tensor d2t is missing")
    ids = d2t.long() + torch.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{where}: d2t leaves the vocabulary or names a token twice")
    if t2d is not None and not (t2d.sum() == len(ids) and bool(t2d.bool()[ids].all())):
        raise CheckpointError(f"{where}: t2d and d2t disagree")
    return ids


def _check_copies(tensors: dict[str, Tensor], drafter: Drafter, where: Path) -> None:
    """Drop copies of the target's embedding and LM head after checking that they are the target's."""
    theirs = dict(zip(TARGET_COPIES, (drafter.embedding_weight, drafter.target_lm_head_weight), strict=True))
    if drafter.config.own_lm_head:
        del theirs["lm_head.weight"]
    for name in theirs:
        copy = tensors.pop(name, None)
        if copy is None:
            continue
        same = copy.shape == theirs[name].shape and torch.allclose(
            copy[:64].float(), theirs[name][:64].float(), rtol=0.02, atol=1e-3
        )
        if not same:
            raise CheckpointError(f"{where}: {name} is not the target's: this drafter is for another target")
