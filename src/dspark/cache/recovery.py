"""What an earlier, perhaps killed, build left behind: keep its whole samples and cut off the rest."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark.cache.format import INDEX_NAME, RECORD_V3, Layout, shard_name
from dspark.cache.reader import ShardFiles
from dspark.errors import CacheError
from dspark.files import atomic_path
from dspark.log import get_logger

_log = get_logger(__name__)


def recover(path: Path, hidden_size: int, num_layers: int) -> NDArray[np.void]:
    """Return the records of the whole samples in `path`, and make its files end with them.

    Shards before the last one were put on the disk when they were full. In the last one, a lost write shows as a
    missing end or a wrong checksum.
    """
    index = path / INDEX_NAME
    raw = index.read_bytes() if index.exists() else b""
    found = np.frombuffer(raw[: len(raw) - len(raw) % RECORD_V3.itemsize], dtype=RECORD_V3)
    last = int(found["shard_id"].max(initial=0))
    shards = ShardFiles(path, hidden_size, num_layers)
    records = found[[_is_whole(shards, record, record["shard_id"] == last) for record in found]]
    if records.nbytes != len(raw):
        _log.warning("%s: cut off what the earlier build had not finished writing", path)
        write_index(path, records)
    _cut_shards(path, records, hidden_size, num_layers)
    return records


def write_index(path: Path, records: NDArray[np.void]) -> None:
    """Replace the index of the cache in `path`."""
    with atomic_path(path / INDEX_NAME) as temporary:
        temporary.write_bytes(records.tobytes())


def _is_whole(shards: ShardFiles, record: np.void, verify: bool) -> bool:
    try:
        shards.read(shard_name(record["shard_id"]), record, bool(verify))
    except CacheError:
        return False
    return True


def _cut_shards(path: Path, records: NDArray[np.void], hidden_size: int, num_layers: int) -> None:
    """Make the last shard end with its last sample, and remove shards behind it."""
    last = int(records["shard_id"].max(initial=0))
    in_last = records[records["shard_id"] == last]
    end = max((Layout.of_record(record, num_layers, hidden_size).end for record in in_last), default=0)
    for file in path.glob("shard-*.bin"):
        if file.name > shard_name(last):
            file.unlink()
        elif file.name == shard_name(last) and file.stat().st_size > end:
            os.truncate(file, end)
