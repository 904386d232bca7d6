"""Training samples from the target the first time and from a bounded disk cache afterwards.

Each process appends to a part of its own (`part-NNNNN`, a version 3 cache) and reads the parts of the others, whose
indices grow beside it. What does not fit is streamed every time.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.cache.format import (
    INDEX_NAME,
    RECORD_V3,
    HiddenDtype,
    Manifest,
    Sample,
    sample_flags,
    shard_name,
    stored_bytes,
)
from dspark.cache.quantise import dequantise, quantise
from dspark.cache.reader import ShardFiles, TokenRow
from dspark.cache.remote import RemoteSamples
from dspark.cache.streamed import StreamedSamples
from dspark.cache.writer import CacheWriter
from dspark.errors import CacheError
from dspark.log import get_logger

_log = get_logger(__name__)

_MANIFEST_BYTES = 8192  # kept free for the manifest


class HybridSamples:
    """`streamed` samples that are stored in `path` on first use, up to `max_bytes` over all processes.

    A run that was killed goes on with the samples that it had stored. Use as a context manager; at its end the part
    becomes a cache that others can read. Raises `CacheError` when the directory was begun for another target, layers
    or conversations.
    """

    def __init__(
        self,
        streamed: StreamedSamples | RemoteSamples,
        path: Path,
        identity: Manifest,
        max_bytes: int,
        place: tuple[int, int],
    ) -> None:
        """`identity` is the manifest without counts; `place` is (rank, number of processes)."""
        rank, world_size = place
        own = path / _part_name(rank)
        self.target_layer_ids = streamed.target_layer_ids
        self.streamed, self._identity = streamed, identity
        self._writer = CacheWriter(own, identity)
        present = {_part_name(i) for i in range(world_size)} | {p.name for p in path.glob("part-*")}
        self._others = [_OtherPart(path / name, identity) for name in sorted(present - {own.name})]
        abandoned = [p for p in path.glob("part-*") if p.name not in {_part_name(i) for i in range(world_size)}]
        self._room = (max_bytes - sum(map(_num_bytes, abandoned))) // world_size - _num_bytes(own) - _MANIFEST_BYTES
        self._told = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._writer:
            if kind is None:
                self._writer.finish()

    def __len__(self) -> int:
        return len(self.streamed)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Token counts of all samples: [n]."""
        return self.streamed.lengths

    def row(self, index: int) -> TokenRow:
        """Tokens and mask of a sample; the target does not run."""
        return self.streamed.row(index)

    def load(self, indices: Sequence[int]) -> list[Sample]:
        """Read what is stored, run the target on the rest, and store of that what fits."""
        found = {index: sample for index in indices if (sample := self._stored(index)) is not None}
        for sample in self.streamed.load([index for index in indices if index not in found]):
            found[sample.sample_id] = self._keep(sample)
        return [found[index] for index in indices]

    def _stored(self, index: int) -> Sample | None:
        parts = (part.find(index) for part in self._others)
        sample = self._writer.read(index) if index in self._writer else next((s for s in parts if s is not None), None)
        if sample is not None and not torch.equal(sample.token_ids, self.row(index).token_ids):
            raise CacheError(
                f"{self._writer.path.parent}: sample {index} was stored for another conversation: give the same "
                "conversations in the same order, or choose another directory"
            )
        return sample

    def _keep(self, sample: Sample) -> Sample:
        """Store a sample if there is room; returns it as reading gives it back, stored or not."""
        flags = sample_flags(self._identity.hidden_dtype, sample.log_normalizer is not None)
        seq_len, num_layers, hidden_size = sample.features.shape
        size = stored_bytes(seq_len, num_layers, hidden_size, flags)
        if size <= self._room and sample.sample_id not in self._writer:
            self._writer.write(sample)
            self._room -= size
        elif not self._told:
            self._told = True
            _log.info("%s: full; the remaining samples are streamed every time", self._writer.path)
        return _as_read(sample, self._identity.hidden_dtype)


class _OtherPart:
    """What another process stores: its index is read again when it has changed."""

    def __init__(self, path: Path, identity: Manifest) -> None:
        self._index = path / INDEX_NAME
        self._files = ShardFiles(path, identity.hidden_size, len(identity.target_layer_ids))
        self._records: dict[int, np.void] = {}
        self._size = -1

    def find(self, sample_id: int) -> Sample | None:
        """The sample, or None where it is not (wholly) there."""
        if sample_id not in self._records:
            self._refresh()
        record = self._records.get(sample_id)
        if record is None:
            return None
        try:
            return self._files.read(shard_name(record["shard_id"]), record, verify=True)
        except CacheError:  # cut off by a crash, or on its way to this machine
            return None

    def _refresh(self) -> None:
        try:
            size = self._index.stat().st_size
            if size == self._size:
                return
            raw = self._index.read_bytes()
        except FileNotFoundError:
            return
        self._size = size
        records = np.frombuffer(raw[: len(raw) - len(raw) % RECORD_V3.itemsize], dtype=RECORD_V3)
        self._records = {int(record["sample_id"]): record for record in records}


def _as_read(sample: Sample, hidden_dtype: HiddenDtype) -> Sample:
    """A sample with the rounding of its stored form, so that losses do not depend on what was stored when."""
    if hidden_dtype != "int8":
        return sample
    features, last = dequantise(*quantise(sample.features)), dequantise(*quantise(sample.last_hidden))
    return sample._replace(features=features, last_hidden=last)


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}"


def _num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
