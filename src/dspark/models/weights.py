"""Model files: Hugging Face directories of safetensors and GGUF files, read strictly; directories written whole."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dspark.errors import CheckpointError
from dspark.files import atomic_path
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder, new_ends
from dspark.models.ends import Ends, TargetEnds
from dspark.models.families import config_from_hf, config_to_hf, text_config, token_ids
from dspark.models.gguf import GgufFile
from dspark.models.layers import PlusOneRMSNorm
from dspark.models.tokenizer import Tokenizer

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
_LANGUAGE_MODEL = "language_model."
_END_NAMES = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
_SAMPLES = 64  # values of each tensor that enter the digest


class TensorSource(Protocol):
    """Named tensors, read one at a time. Names and values are Hugging Face's, without what stands before `layers.`."""

    where: str

    def names(self) -> set[str]: ...

    def read(self, name: str) -> Tensor: ...


class SafetensorsFiles:
    """The safetensors of a directory: one file, or several that an index lists. Tensors are memory-mapped.

    Of a multi-modal model only the text part is there, which its files keep under `language_model`.
    """

    def __init__(self, directory: Path, wanted: Callable[[str], bool] | None = None) -> None:
        """Open the files that hold a tensor with a `wanted` name; None: all. Raises `CheckpointError`."""
        self.where = str(directory)
        stored: dict[str, Any] = {}  # name in the files -> open file
        for path in _weight_files(directory, wanted):
            try:
                file = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(f"{path}: missing; fetch the model again") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: damaged or truncated ({error}); remove it and fetch it again") from None
            for name in file.keys():  # type: ignore[no-untyped-call] # noqa: SIM118
                stored[name] = file
        names = _text_names(stored)
        self._tensors = {ours: (stored[theirs], theirs) for ours, theirs in names.items()}

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str) -> Tensor:
        file, stored_name = self._tensors[name]
        tensor: Tensor = file.get_tensor(stored_name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        file, stored_name = self._tensors[name]
        return tuple(file.get_slice(stored_name).get_shape())


def load_decoder(path: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """Load a decoder from a Hugging Face directory or a GGUF file, frozen and ready for inference.

    `dtype` converts the weights; None keeps the stored one (a GGUF file is dequantised to bfloat16).
    Raises `CheckpointError` naming the file, field or tensor at fault.
    """
    config, source, stored = _open(Path(path))
    return build_decoder(config, source, dtype or stored)


def load_ends(path: str | Path, dtype: torch.dtype | None = None) -> Ends:
    """Load the two ends of a decoder as `load_decoder` does, and nothing else: other files need not be there."""
    config, source, stored = _open(Path(path), _END_NAMES.__contains__)
    with torch.device("meta"):
        ends = new_ends(config)
    _require({name for name, _ in ends.named_parameters()}, source)
    _fill(ends, source, dtype or stored)
    return ends.requires_grad_(False)


def load_config(path: Path) -> DecoderConfig:
    """Return a decoder's config; no tensor is read. Raises `CheckpointError`."""
    if path.suffix == ".gguf":
        return config_from_hf(GgufFile(path).hf_config(), str(path))
    return config_from_hf(read_hf_config(path), str(path / "config.json"))


def _open(path: Path, wanted: Callable[[str], bool] | None = None) -> tuple[DecoderConfig, TensorSource, torch.dtype]:
    """Return a model's config, its tensors (at least the wanted ones) and the dtype that they are to have."""
    if path.suffix == ".gguf":
        file = GgufFile(path)
        return config_from_hf(file.hf_config(), str(path)), file, torch.bfloat16
    hf = read_hf_config(path)
    return config_from_hf(hf, str(path / "config.json")), SafetensorsFiles(path, wanted), stored_dtype(hf)


def build_decoder(config: DecoderConfig, source: TensorSource, dtype: torch.dtype) -> Decoder:
    """Fill a decoder from `source`: every tensor must be there with its shape, and none may be left over."""
    with torch.device("meta"):
        decoder = Decoder(config)
    shapes = {name: parameter.shape for name, parameter in decoder.named_parameters()}  # a tied head is not repeated
    expected = {part for name, shape in shapes.items() for part in stored_parts(name, shape, config)}
    names = source.names()
    _require(expected, source)
    optional = {"lm_head.weight"} | {name for name in names if name.endswith("rotary_emb.inv_freq")}
    if left_over := sorted(names - expected - optional):
        raise CheckpointError(f"{source.where}: unexpected {_named(left_over)}; the files do not fit their config")
    _fill(decoder, source, dtype)
    return decoder.requires_grad_(False).eval()


def _require(expected: set[str], source: TensorSource) -> None:
    if missing := sorted(expected - source.names()):
        raise CheckpointError(f"{source.where}: missing {_named(missing)}; the files do not fit their config")


def _fill(model: Decoder | Ends, source: TensorSource, dtype: torch.dtype) -> None:
    """Give every parameter the value that its parts have in the files, converted; a tied head stays tied."""
    plus_one, state = _plus_one_norms(model), {}
    for name, parameter in model.named_parameters():
        value = _read(source, name, parameter.shape, model.config)
        state[name] = value.float() + 1 if name in plus_one else value.to(dtype)
    model.load_state_dict(state, strict=False, assign=True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight


def save_decoder(decoder: Decoder, tokenizer: Tokenizer | None, path: str | Path) -> None:
    """Write a decoder (not packed) as a Hugging Face directory, with its tokenizer; replaces `path` in one step."""
    tensors, plus_one = {}, _plus_one_norms(decoder)
    for name, parameter in decoder.named_parameters():
        value = (parameter - 1).to(decoder.dtype) if name in plus_one else parameter
        parts = stored_parts(name, parameter.shape, decoder.config)
        rows = value.flatten(0, -2) if value.ndim > 2 else value
        for part, piece in zip(parts, torch.split(rows, list(parts.values())), strict=True):
            tensors[part if part == "lm_head.weight" else f"model.{part}"] = piece.detach().contiguous()
    hf = config_to_hf(decoder.config, str(decoder.dtype).removeprefix("torch."))
    with atomic_path(path) as directory:
        directory.mkdir(parents=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(directory))
        (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})


def weights_digest(decoder: Decoder) -> str:
    """Return 16 hex digits that identify a model by its config and a sample of every tensor, rounded to bfloat16.

    The same for all file layouts and dtypes of one model, and cheap for large ones. Take it before packing.
    """
    return parameters_digest(decoder.named_parameters(), decoder.config.digest())


def ends_digest(ends: TargetEnds) -> str:
    """Return 16 hex digits that identify a model's config, embedding, final norm and LM head, as `weights_digest`."""
    norm = ((f"norm.{name}", parameter) for name, parameter in ends.norm.named_parameters())
    parts = [("embed_tokens.weight", ends.embed_tokens.weight), *norm, ("lm_head.weight", ends.lm_head_weight)]
    return parameters_digest(parts, ends.config.digest())


def parameters_digest(parameters: Iterable[tuple[str, Tensor]], more: str) -> str:
    """Return 16 hex digits that identify `more` and a sample of every named parameter, rounded to bfloat16."""
    digest = hashlib.sha256(more.encode())
    for name, parameter in parameters:
        flat = parameter.detach().flatten()
        index = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
        sample = flat[index.to(flat.device)].to(torch.bfloat16).cpu().view(torch.int16)
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Return the text model's config, the eos ids of generation_config.json joined in. Raises `CheckpointError`."""
    hf = text_config(read_json(directory / "config.json"))
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = {*token_ids(hf.get("eos_token_id")), *token_ids(read_json(generation).get("eos_token_id"))}
        hf["eos_token_id"] = sorted(eos)
    return hf


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `CheckpointError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; a model directory needs it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def stored_parts(name: str, shape: torch.Size, config: DecoderConfig) -> dict[str, int]:
    """Return the checkpoint tensors that make up a parameter, in order, and the rows that each of them gives.

    Our fused projections and stacked experts are stored apart.
    """
    if ".qkv_proj." in name:
        layer = int(name.split(".")[1])
        head_dim, kv_heads = config.head_dim_of(layer), config.kv_heads_of(layer)
        heads = {"q_proj": config.num_attention_heads, "k_proj": kv_heads}
        heads |= {"v_proj": kv_heads} if config.has_values(layer) else {}
        return {name.replace("qkv_proj", part): count * head_dim for part, count in heads.items()}
    if ".experts." in name:
        stem, _, kind = name.rpartition(".")
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        rows = shape[1] // len(kinds)
        return {f"{stem}.{expert}.{part}.weight": rows for expert in range(shape[0]) for part in kinds}
    if ".gate_up_proj." in name:
        return {name.replace("gate_up_proj", part): shape[0] // 2 for part in ("gate_proj", "up_proj")}
    return {name: shape[0]}


def _read(source: TensorSource, name: str, shape: torch.Size, config: DecoderConfig) -> Tensor:
    tensors = []
    for part, rows in stored_parts(name, shape, config).items():
        tensor, expected = source.read(part), (rows, *shape[1:][-1:])
        if tuple(tensor.shape) != expected:
            raise CheckpointError(f"{source.where}: {part} has shape {tuple(tensor.shape)}, the config asks {expected}")
        tensors.append(tensor)
    return torch.cat(tensors).view(shape) if len(tensors) > 1 else tensors[0]


def _plus_one_norms(model: nn.Module) -> set[str]:
    """Return the parameters whose checkpoint tensors hold one less."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, PlusOneRMSNorm)}


def _text_names(stored: Iterable[str]) -> dict[str, str]:
    """Map our names to those of the files: `layers.0...` to `model.layers.0...`, `model.language_model.layers.0...`."""
    names = list(stored)
    if any(_LANGUAGE_MODEL in name for name in names):
        names = [name for name in names if _LANGUAGE_MODEL in name or name == "lm_head.weight"]
    return {text_name(name): name for name in names}


def text_name(stored: str) -> str:
    """Return a tensor's name without what stands before `layers.` in the files."""
    return stored.removeprefix("model.").removeprefix(_LANGUAGE_MODEL).removeprefix("model.")


def _weight_files(directory: Path, wanted: Callable[[str], bool] | None) -> list[Path]:
    if (directory / INDEX_NAME).exists():
        weight_map = read_json(directory / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{directory / INDEX_NAME}: weight_map missing; fetch it again")
        if wanted is not None:
            kept = {theirs for ours, theirs in _text_names(weight_map).items() if wanted(ours)}
            weight_map = {name: file for name, file in weight_map.items() if name in kept}
        return sorted({directory / str(file) for file in weight_map.values()})
    if not (directory / WEIGHTS_NAME).exists():
        raise CheckpointError(f"{directory}: holds neither {WEIGHTS_NAME} nor {INDEX_NAME}; only safetensors are read")
    return [directory / WEIGHTS_NAME]


def stored_dtype(hf: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a config names; bfloat16 stands in for float16."""
    name = hf.get("dtype") or hf.get("torch_dtype")
    return {"bfloat16": torch.bfloat16, "float16": torch.bfloat16}.get(str(name), torch.float32)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
