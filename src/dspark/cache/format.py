"""The files of a target cache, version 3 (ours) and version 2 (public DeepSpec caches, read only).

A directory holds `manifest.json`, written last; `samples.idx`, one little-endian record a sample; and the shards
`shard-NNNNN.bin`. A record says where the arrays of a sample begin in its shard. A version 3 sample begins at a
multiple of 64 bytes, its arrays follow one another, and its checksum covers all of them. States are bfloat16, or int8
with a float32 scale for each token and layer (`quantise.py`).

Shapes: S tokens, m tapped layers, H hidden size.
"""

import json
from pathlib import Path
from typing import Literal, NamedTuple, Self

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from torch import Tensor

from dspark.cache.quantise import quantise
from dspark.errors import CacheError
from dspark.files import atomic_path

HiddenDtype = Literal["bfloat16", "int8"]

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "samples.idx"
SAMPLE_ALIGNMENT = 64  # bytes
HAS_LOG_NORMALIZER, QUANTISED = 1, 2  # bits of the record's flags

OFFSETS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")
_FIELDS_V2 = [("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"), *((name, "<u8") for name in OFFSETS)]
RECORD_V2 = np.dtype(_FIELDS_V2)
RECORD_V3 = np.dtype([*_FIELDS_V2, ("crc32c", "<u4"), ("flags", "<u4")])


class Sample(NamedTuple):
    """One training row with the target's states. Arrays read from a cache are views of the file: copy to change them.

    `last_hidden` is the residual stream before the final norm, or after it with `post_norm` (version 2 caches).
    `log_normalizer` is the logsumexp of the target's logits over its whole vocabulary, NaN where the next token is not
    supervised.
    """

    sample_id: int
    token_ids: Tensor  # i32 [S]
    attention_mask: Tensor  # u8 [S]
    loss_mask: Tensor  # u8 [S]
    features: Tensor  # bf16 [S, m, H]
    last_hidden: Tensor  # bf16 [S, H]
    log_normalizer: Tensor | None  # f32 [S]
    post_norm: bool = False


class Shard(BaseModel):
    """One shard file of the manifest."""

    shard_id: int
    file_name: str


class Manifest(BaseModel):
    """`manifest.json`. Other keys of a file are ignored: public caches have some of their own."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[2, 3] = 3
    num_samples: int = 0
    num_shards: int = 0
    target_layer_ids: tuple[int, ...]
    hidden_dtype: HiddenDtype = "bfloat16"
    token_dtype: Literal["int32"] = "int32"
    mask_dtype: Literal["uint8"] = "uint8"
    index_record_size: int = RECORD_V3.itemsize
    hidden_size: int
    shards: tuple[Shard, ...] = ()
    target_model_name_or_path: str
    last_hidden: Literal["pre_norm", "post_norm"] = "pre_norm"
    tokenizer_digest: str | None = None  # this and what follows: None in version 2
    chat_template_digest: str | None = None
    target_revision: str | None = None
    ends_digest: str | None = None  # of its embedding, final norm and LM head; None in caches of before
    vocab_size: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _version_2_states(cls, data: object) -> object:
        """Public caches store transformers' `last_hidden_state`, which is after the final norm."""
        if isinstance(data, dict) and data.get("version") == 2:
            return {**data, "last_hidden": "post_norm"}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.index_record_size != self.record.itemsize:
            raise ValueError(f"index_record_size must be {self.record.itemsize} in version {self.version}")
        if [shard.shard_id for shard in self.shards] != list(range(self.num_shards)):
            raise ValueError("shards must list the shard ids 0..num_shards - 1 in order")
        if not self.target_layer_ids or self.hidden_size < 1:
            raise ValueError("target_layer_ids and hidden_size must not be empty")
        return self

    @property
    def record(self) -> np.dtype[np.void]:
        """The layout of one index record."""
        return RECORD_V3 if self.version == 3 else RECORD_V2

    @classmethod
    def read(cls, path: Path, name: str = MANIFEST_NAME) -> Self:
        """Read the manifest of the cache directory `path`. Raises `CacheError` naming the file and the field."""
        file = path / name
        try:
            return cls.model_validate(json.loads(file.read_bytes()))
        except FileNotFoundError:
            raise CacheError(f"{path}: no {name}: not a target cache, or its build was cut off") from None
        except OSError as error:
            raise CacheError(f"{file}: cannot be read ({error.strerror})") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise CacheError(f"{file}: {field or 'manifest'}: {first['msg']}") from None
        except ValueError as error:
            raise CacheError(f"{file}: not valid JSON: {error}") from None

    def write(self, path: Path, name: str = MANIFEST_NAME) -> None:
        """Write the manifest into the cache directory `path`, whole or not at all."""
        with atomic_path(path / name) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


class Layout(NamedTuple):
    """Where the arrays of a version 3 sample lie, in bytes from its beginning, and where the last one ends."""

    starts: tuple[int, ...]  # in the order of OFFSETS
    scales: int
    log_normalizer: int
    end: int

    @classmethod
    def of(cls, seq_len: int, num_layers: int, hidden_size: int, flags: int) -> Self:
        """Lay out one sample."""
        state = (1 if flags & QUANTISED else 2) * seq_len * hidden_size  # bytes of one layer's states
        sizes = (4 * seq_len, seq_len, seq_len, num_layers * state)
        starts = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
        return cls(starts, *_tail(starts[-1] + state, seq_len, num_layers, flags))

    @classmethod
    def of_record(cls, record: np.void, num_layers: int, hidden_size: int) -> Self:
        """Where a record's sample lies in its shard."""
        seq_len, flags = int(record["seq_len"]), record_flags(record)
        starts = tuple(int(record[field]) for field in OFFSETS)
        state = (1 if flags & QUANTISED else 2) * seq_len * hidden_size
        return cls(starts, *_tail(starts[-1] + state, seq_len, num_layers, flags))


def _tail(end: int, seq_len: int, num_layers: int, flags: int) -> tuple[int, int, int]:
    """Where scales and log normalizers begin behind states that end at `end`, and where the sample ends."""
    scales = align(end, 4)
    if flags & QUANTISED:
        end = scales + 4 * seq_len * (num_layers + 1)
    normalizer = align(end, 4)
    return scales, normalizer, normalizer + 4 * seq_len if flags & HAS_LOG_NORMALIZER else end


def shard_name(shard_id: int) -> str:
    """File name of a shard."""
    return f"shard-{shard_id:05d}.bin"


def align(size: int, to: int) -> int:
    """Round `size` up to a multiple of `to`."""
    return -(-size // to) * to


def record_flags(record: np.void) -> int:
    """The flags of a record; version 2 has none."""
    return int(record["flags"]) if "flags" in (record.dtype.names or ()) else 0


def sample_flags(hidden_dtype: HiddenDtype, log_normalizer: bool) -> int:
    """The flags of a record."""
    return (QUANTISED if hidden_dtype == "int8" else 0) | (HAS_LOG_NORMALIZER if log_normalizer else 0)


def pack_sample(sample: Sample, hidden_dtype: HiddenDtype) -> tuple[NDArray[np.uint8], Layout, int]:
    """Turn a sample into its bytes, their layout and the record's flags."""
    flags = sample_flags(hidden_dtype, sample.log_normalizer is not None)
    seq_len, num_layers, hidden_size = sample.features.shape
    layout = Layout.of(seq_len, num_layers, hidden_size, flags)
    arrays = [
        (layout.starts[0], sample.token_ids.int()),
        (layout.starts[1], sample.attention_mask),
        (layout.starts[2], sample.loss_mask),
    ]
    if hidden_dtype == "int8":
        features, feature_scales = quantise(sample.features)
        last, last_scale = quantise(sample.last_hidden)
        arrays.append((layout.scales, torch.cat([feature_scales, last_scale[:, None]], dim=1)))
    else:
        features, last = sample.features.bfloat16(), sample.last_hidden.bfloat16()
    arrays += [(layout.starts[3], features), (layout.starts[4], last)]
    if sample.log_normalizer is not None:
        arrays.append((layout.log_normalizer, sample.log_normalizer))
    data = np.zeros(layout.end, dtype=np.uint8)
    for start, tensor in arrays:
        raw = tensor.detach().cpu().contiguous().view(torch.uint8).flatten().numpy()
        data[start : start + len(raw)] = raw
    return data, layout, flags


def crc32c(data: NDArray[np.uint8]) -> int:
    """CRC-32C (Castagnoli) of some bytes."""
    checksum: int = google_crc32c.value(data)
    return checksum


def stored_bytes(seq_len: int, num_layers: int, hidden_size: int, flags: int) -> int:
    """What a sample of this length takes at most: its arrays, the gap before it and its record."""
    return align(Layout.of(seq_len, num_layers, hidden_size, flags).end, SAMPLE_ALIGNMENT) + RECORD_V3.itemsize
