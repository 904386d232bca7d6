"""Random access to the samples of a target cache, memory-mapped."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.cache.format import (
    HAS_LOG_NORMALIZER,
    INDEX_NAME,
    QUANTISED,
    Layout,
    Manifest,
    Sample,
    crc32c,
    record_flags,
)
from dspark.cache.quantise import dequantise
from dspark.errors import CacheError

Bytes = NDArray[np.uint8]


class TokenRow(NamedTuple):
    """A training row without the target's states."""

    token_ids: Tensor  # i32 [S]
    loss_mask: Tensor  # u8 [S]


class CacheReader:
    """The samples of a finished cache, in the order of their ids.

    Reading copies nothing: the tensors are views of the files, and writing to them changes this process's copy only.
    States stored as int8 are the exception: they come back as new bfloat16 tensors.
    With `verify`, the checksum of a sample is compared when it is read for the first time (version 3).
    Raises `CacheError` when files are missing or disagree, and for a damaged sample naming it and its shard.
    """

    def __init__(self, path: str | Path, verify: bool = True) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        self._records = _read_index(self.path, self.manifest)
        self._shards = ShardFiles(self.path, self.manifest.hidden_size, len(self.manifest.target_layer_ids))
        self._names = [shard.file_name for shard in self.manifest.shards]
        self._verify = verify and self.manifest.version == 3
        self._verified = bytearray(len(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Sample:
        record = self._records[index]  # IndexError beyond the end
        verify = self._verify and not self._verified[index]
        sample = self._shards.read(self._names[record["shard_id"]], record, verify)
        self._verified[index] = True
        return sample._replace(post_norm=self.manifest.last_hidden == "post_norm")

    def row(self, index: int) -> TokenRow:
        """The tokens and mask of a sample; its states are not read."""
        record = self._records[index]
        return self._shards.row(self._names[record["shard_id"]], record)

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers of a data loader open the files again instead of copying them."""
        return CacheReader, (self.path, self._verify)

    @property
    def seq_lens(self) -> NDArray[np.uint32]:
        """Tokens of each sample, without reading the shards."""
        lengths: NDArray[np.uint32] = self._records["seq_len"]
        return lengths


class ShardFiles:
    """Shards of one cache directory, each mapped at its first use."""

    def __init__(self, path: Path, hidden_size: int, num_layers: int) -> None:
        self._path = path
        self._hidden_size = hidden_size
        self._num_layers = num_layers
        self._maps: dict[str, Bytes] = {}

    def read(self, name: str, record: np.void, verify: bool) -> Sample:
        """Return the sample that `record` locates in the shard `name`."""
        seq_len, m, H = int(record["seq_len"]), self._num_layers, self._hidden_size
        layout, data = self._located(name, record)
        flags, starts = record_flags(record), layout.starts
        if verify and crc32c(data[starts[0] : layout.end]) != record["crc32c"]:
            where = f"{self._path / name}: sample {record['sample_id']}"
            raise CacheError(f"{where} is damaged (its checksum differs): build the cache again")
        stored = torch.int8 if flags & QUANTISED else torch.bfloat16
        features = _view(data, starts[3], seq_len * m * H, stored).view(seq_len, m, H)
        last_hidden = _view(data, starts[4], seq_len * H, stored).view(seq_len, H)
        if flags & QUANTISED:
            scales = _view(data, layout.scales, seq_len * (m + 1), torch.float32).view(seq_len, m + 1)
            features, last_hidden = dequantise(features, scales[:, :-1]), dequantise(last_hidden, scales[:, -1])
        has_normalizer = flags & HAS_LOG_NORMALIZER
        return Sample(
            sample_id=int(record["sample_id"]),
            token_ids=_view(data, starts[0], seq_len, torch.int32),
            attention_mask=_view(data, starts[1], seq_len, torch.uint8),
            loss_mask=_view(data, starts[2], seq_len, torch.uint8),
            features=features,
            last_hidden=last_hidden,
            log_normalizer=_view(data, layout.log_normalizer, seq_len, torch.float32) if has_normalizer else None,
        )

    def row(self, name: str, record: np.void) -> TokenRow:
        """Return the tokens and mask of a sample, unchecked."""
        layout, data = self._located(name, record)
        ids = _view(data, layout.starts[0], int(record["seq_len"]), torch.int32)
        return TokenRow(ids, _view(data, layout.starts[2], int(record["seq_len"]), torch.uint8))

    def _located(self, name: str, record: np.void) -> tuple[Layout, Bytes]:
        """Where a sample lies, and the bytes of its shard, which reach to its end."""
        layout = Layout.of_record(record, self._num_layers, self._hidden_size)
        data = self._map(name, layout.end)
        if len(data) < layout.end:
            raise CacheError(
                f"{self._path / name}: sample {record['sample_id']} is truncated ({len(data)} bytes, needs "
                f"{layout.end}): build the cache again"
            )
        return layout, data

    def _map(self, name: str, size: int) -> Bytes:
        """The bytes of a shard, mapped again when it has grown to hold `size` of them since."""
        data = self._maps.get(name)
        if data is None or len(data) < size:
            try:
                data = np.memmap(self._path / name, dtype=np.uint8, mode="c")
            except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
                raise CacheError(f"{self._path / name}: cannot be read ({error})") from None
            self._maps[name] = data
        return data


def _read_index(path: Path, manifest: Manifest) -> NDArray[np.void]:
    file = path / INDEX_NAME
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CacheError(f"{file}: cannot be read ({error.strerror}): build the cache again") from None
    if len(raw) != manifest.num_samples * manifest.record.itemsize:
        raise CacheError(
            f"{file}: holds {len(raw)} bytes, and {manifest.num_samples} samples of the manifest need "
            f"{manifest.num_samples * manifest.record.itemsize}: build the cache again"
        )
    records: NDArray[np.void] = np.frombuffer(raw, dtype=manifest.record)
    if len(records) and records["shard_id"].max() >= manifest.num_shards:
        raise CacheError(f"{file}: names a shard beyond the manifest's {manifest.num_shards}: build the cache again")
    return records


def _view(data: Bytes, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` values of `dtype` at byte `start`, without a copy where the address allows it."""
    part = data[start : start + count * dtype.itemsize]
    if part.ctypes.data % dtype.itemsize:  # public caches pack arrays without gaps
        part = part.copy()
    return torch.from_numpy(part).view(dtype)
