"""What a cache would take, before a byte is written: rows are counted, and a few run through the target for speed."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark.cache.build import CacheRow, cache_identity
from dspark.cache.capture import Capture, NumberedRow, batches
from dspark.cache.config import CacheSettings
from dspark.cache.format import (
    HAS_LOG_NORMALIZER,
    QUANTISED,
    RECORD_V3,
    SAMPLE_ALIGNMENT,
    Layout,
    align,
    sample_flags,
)
from dspark.errors import CacheError
from dspark.log import progress
from dspark.models.target import Target

_WARM_UP_SECONDS = 10.0
_WARM_UP_BATCHES = 8


class CacheEstimate(NamedTuple):
    """A cache that has not been written."""

    num_samples: int
    num_tokens: int
    num_shards: int
    parts: dict[str, int]  # bytes by what they hold
    tokens_per_second: float  # of the target over the rows that were tried, without writing

    @property
    def num_bytes(self) -> int:
        """All of it, manifest left out."""
        return sum(self.parts.values())

    @property
    def seconds(self) -> float:
        """How long the target takes over all rows."""
        return self.num_tokens / self.tokens_per_second


def estimate(target: Target, rows: Iterable[CacheRow], settings: CacheSettings) -> CacheEstimate:
    """Count what `build_cache` would write, and try the target on some of the first rows.

    Raises `ConfigError` for layers or lengths that the target does not have, and `CacheError` when there are no rows.
    """
    cache_identity(target, settings)
    seq_lens: list[int] = []
    tried: list[NumberedRow] = []
    with progress(None, "count", "row") as bar:
        for number, row in enumerate(rows):
            seq_lens.append(len(row.token_ids))
            if number < settings.window:
                tried.append((number, row.token_ids, row.loss_mask))
            bar.update(1)
    if not seq_lens:
        raise CacheError("conversations: there is no row to store: see the skipped conversations above")
    lengths = np.array(seq_lens, dtype=np.int64)
    flags = sample_flags(settings.hidden_dtype, settings.log_normalizer)
    shape = (len(settings.target_layer_ids), target.config.hidden_size)
    return CacheEstimate(
        num_samples=len(lengths),
        num_tokens=int(lengths.sum()),
        num_shards=_num_shards(seq_lens, shape, flags, settings.shard_bytes),
        parts=part_bytes(lengths, *shape, flags),
        tokens_per_second=_speed(target, tried, settings),
    )


def part_bytes(seq_lens: NDArray[np.int64], num_layers: int, hidden_size: int, flags: int) -> dict[str, int]:
    """Bytes of a version 3 cache of samples of these lengths by what they hold, manifest left out."""
    tokens, one = int(seq_lens.sum()), 1 if flags & QUANTISED else 2
    ends = [_aligned_end(int(length), (num_layers, hidden_size), flags) for length in seq_lens]
    parts = {
        "tokens and masks": 6 * tokens,
        "features": one * tokens * num_layers * hidden_size,
        "last hidden states": one * tokens * hidden_size,
        "scales": 4 * tokens * (num_layers + 1) if flags & QUANTISED else 0,
        "log normalizers": 4 * tokens if flags & HAS_LOG_NORMALIZER else 0,
        "index": RECORD_V3.itemsize * len(seq_lens),
    }
    parts["alignment"] = sum(ends) + parts["index"] - sum(parts.values())
    return {name: size for name, size in parts.items() if size}


def _aligned_end(seq_len: int, shape: tuple[int, int], flags: int) -> int:
    return align(Layout.of(seq_len, *shape, flags).end, SAMPLE_ALIGNMENT)


def _num_shards(seq_lens: Sequence[int], shape: tuple[int, int], flags: int, shard_bytes: int) -> int:
    """Shards when samples come in this order; a build sorts them by length in windows, which changes little."""
    shards, used = 1, 0
    for seq_len in seq_lens:
        size = _aligned_end(seq_len, shape, flags)
        if used and used + size > shard_bytes:
            shards, used = shards + 1, 0
        used += size
    return shards


def _speed(target: Target, rows: list[NumberedRow], settings: CacheSettings) -> float:
    """Tokens a second of the target over batches of all lengths, after one that is not counted."""
    capture = Capture(target.states(), settings.target_layer_ids, settings.log_normalizer)
    grouped = list(batches(rows, settings.batch_tokens))
    grouped = grouped[:: -(-len(grouped) // _WARM_UP_BATCHES)]
    capture(grouped[0])
    tokens, start, elapsed = 0, time.perf_counter(), 0.0
    with progress(len(grouped), "try the target", "batch") as bar:
        for batch in grouped:
            capture(batch)
            tokens += sum(len(token_ids) for _, token_ids, _ in batch)
            elapsed = time.perf_counter() - start
            bar.update(1)
            if elapsed > _WARM_UP_SECONDS:
                break
    return tokens / elapsed
