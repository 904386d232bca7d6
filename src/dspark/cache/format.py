"""The files of a target cache, version 3 (ours) and version 2 (public DeepSpec caches, read only).

A directory holds `manifest.json`, written last; `samples.idx`, one little-endian record a sample; and the shards
`shard-NNNNN.bin`. A record says where the arrays of a sample begin in its shard. A version 3 sample begins at a
multiple of 64 bytes, its arrays follow one another, and its checksum covers all of them.

Shapes: S tokens, m tapped layers, H hidden size.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, Self

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from torch import Tensor

from dspark.errors import CacheError
from dspark.files import atomic_path

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "samples.idx"
SAMPLE_ALIGNMENT = 64  # bytes
HAS_LOG_NORMALIZER = 1  # bit of the record's flags

OFFSETS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")
_FIELDS_V2 = [("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"), *((name, "<u8") for name in OFFSETS)]
RECORD_V2 = np.dtype(_FIELDS_V2)
RECORD_V3 = np.dtype([*_FIELDS_V2, ("crc32c", "<u4"), ("flags", "<u4")])


class Sample(NamedTuple):
    """One training row with the target's states. Arrays read from a cache are views of the file: copy to change them.

    `last_hidden` is the residual stream before the final norm (in version 2 caches after it: see
    `Manifest.last_hidden`). `log_normalizer` is the logsumexp of the target's logits over its whole vocabulary, NaN
    where the next token is not supervised.
    """

    sample_id: int
    token_ids: Tensor  # i32 [S]
    attention_mask: Tensor  # u8 [S]
    loss_mask: Tensor  # u8 [S]
    features: Tensor  # bf16 [S, m, H]
    last_hidden: Tensor  # bf16 [S, H]
    log_normalizer: Tensor | None  # f32 [S]


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
    hidden_dtype: Literal["bfloat16"] = "bfloat16"
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
    log_normalizer: int
    end: int

    @classmethod
    def of(cls, seq_len: int, num_layers: int, hidden_size: int, log_normalizer: bool) -> Self:
        """Lay out one sample."""
        state = 2 * seq_len * hidden_size  # bytes of one layer's states
        sizes = (4 * seq_len, seq_len, seq_len, num_layers * state, state)
        starts = tuple(sum(sizes[:i]) for i in range(len(sizes)))
        normalizer = log_normalizer_start(starts[-1], seq_len, hidden_size)
        end = normalizer + 4 * seq_len if log_normalizer else starts[-1] + state
        return cls(starts, normalizer, end)


def shard_name(shard_id: int) -> str:
    """File name of a shard."""
    return f"shard-{shard_id:05d}.bin"


def log_normalizer_start(last_hidden_start: int, seq_len: int, hidden_size: int) -> int:
    """Where the log normalizer begins: after the last hidden states, at a multiple of four bytes."""
    return align(last_hidden_start + 2 * seq_len * hidden_size, 4)


def align(size: int, to: int) -> int:
    """Round `size` up to a multiple of `to`."""
    return -(-size // to) * to


def pack_sample(sample: Sample) -> tuple[NDArray[np.uint8], Layout, int]:
    """Turn a sample into its bytes, their layout and the record's flags."""
    seq_len, num_layers, hidden_size = sample.features.shape
    layout = Layout.of(seq_len, num_layers, hidden_size, sample.log_normalizer is not None)
    arrays = [
        (layout.starts[0], sample.token_ids, torch.int32),
        (layout.starts[1], sample.attention_mask, torch.uint8),
        (layout.starts[2], sample.loss_mask, torch.uint8),
        (layout.starts[3], sample.features, torch.bfloat16),
        (layout.starts[4], sample.last_hidden, torch.bfloat16),
    ]
    if sample.log_normalizer is not None:
        arrays.append((layout.log_normalizer, sample.log_normalizer, torch.float32))
    data = np.zeros(layout.end, dtype=np.uint8)
    for start, tensor, dtype in arrays:
        raw = tensor.detach().to("cpu", dtype).contiguous().view(torch.uint8).flatten().numpy()
        data[start : start + len(raw)] = raw
    return data, layout, HAS_LOG_NORMALIZER if sample.log_normalizer is not None else 0


def crc32c(data: NDArray[np.uint8]) -> int:
    """CRC-32C (Castagnoli) of some bytes."""
    checksum: int = google_crc32c.value(data)
    return checksum


def sample_end(record: np.void, hidden_size: int) -> int:
    """Where the bytes of a record's sample end in its shard."""
    seq_len, last = int(record["seq_len"]), int(record[OFFSETS[-1]])
    if "flags" in (record.dtype.names or ()) and record["flags"] & HAS_LOG_NORMALIZER:
        return log_normalizer_start(last, seq_len, hidden_size) + 4 * seq_len
    return last + 2 * seq_len * hidden_size


def estimate_bytes(seq_lens: Iterable[int], num_layers: int, hidden_size: int, log_normalizer: bool = True) -> int:
    """Size of a version 3 cache of samples of these lengths, in bytes, manifest left out."""
    return sum(
        align(Layout.of(seq_len, num_layers, hidden_size, log_normalizer).end, SAMPLE_ALIGNMENT) + RECORD_V3.itemsize
        for seq_len in seq_lens
    )
