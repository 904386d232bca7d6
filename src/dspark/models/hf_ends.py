"""Embedding, final norm and LM head of a transformers model, read out of its files without the layers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.errors import CheckpointError
from dspark.log import get_logger
from dspark.models.ends import Ends
from dspark.models.hf import HuggingFaceCausalLM, refuse_biases
from dspark.models.weights import SafetensorsFiles, text_name

_log = get_logger(__name__)


def skeleton(path: Path, name: str) -> HuggingFaceCausalLM:
    """Make the model in a directory without values; `name` stands in errors. Raises `CheckpointError`."""
    try:
        with torch.device("meta"):
            factory: Any = AutoModelForCausalLM
            return HuggingFaceCausalLM(
                factory.from_config(AutoConfig.from_pretrained(path, local_files_only=True)), name
            )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name}: transformers cannot make its model ({error})") from None


def load_hf_ends(path: Path, name: str, dtype: torch.dtype) -> Ends:
    """Load the ends of a model; `name` stands in errors. Raises `CheckpointError`.

    Where its files do not name their tensors as transformers does, or a part keeps more than parameters, the whole
    model is loaded and the layers are dropped.
    """
    if path.suffix == ".gguf":
        return Ends.of(HuggingFaceCausalLM.load(path, dtype))
    source = skeleton(path, name)
    parts: tuple[nn.Module, ...] = (source.embed_tokens, source.norm, source.head)
    values = _values(path, source, parts)
    if values is None or any(True for part in parts for _ in part.buffers()):
        _log.info("%s: its files are not laid out as its model is: loading all of it", name)
        return Ends.of(HuggingFaceCausalLM.load(path, dtype))
    made = {key: nn.Parameter(value.to(dtype), requires_grad=False) for key, value in values.items()}
    for part in parts:
        for module in part.modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, leaf, made[id(parameter)])
    refuse_biases(source.head, name)
    return Ends.of(source)


def _values(path: Path, source: HuggingFaceCausalLM, parts: tuple[nn.Module, ...]) -> dict[int, Tensor] | None:
    """The stored values of the parts' parameters, by the id of each; None where it is not plain which they are.

    A shared parameter has several names, and files may hold it without the base model's prefix, or under a name of
    long ago: then it is the one tensor outside the layers that is left over and has its shape.
    """
    names: dict[int, list[str]] = {id(p): [] for part in parts for p in part.parameters()}
    shapes = {id(p): tuple(p.shape) for part in parts for p in part.parameters()}
    for name, parameter in source.model.named_parameters(remove_duplicate=False):
        bare = name.removeprefix(f"{source.model.base_model_prefix}.")
        names.get(id(parameter), []).extend((text_name(name), text_name(bare)))
    try:
        files = SafetensorsFiles(path, _outside_layers)
    except CheckpointError:
        return None
    there = set(filter(_outside_layers, files.names()))
    found = {key: next((name for name in spellings if name in there), None) for key, spellings in names.items()}
    left_over = there - set(found.values())
    for key in [key for key, name in found.items() if name is None]:
        alike = [name for name in left_over if files.shape(name) == shapes[key]]
        if len(alike) != 1:
            return None
        found[key] = alike[0]
    return {key: files.read(name) for key, name in found.items() if name is not None}


def _outside_layers(name: str) -> bool:
    """Whether no part of a tensor's name is a number."""
    return not any(part.isdigit() for part in name.split("."))
