"""Writing a target cache so that a build killed at any moment continues without losing or doubling a sample.

Order of a write: the sample's bytes go to the end of the last shard, then its record to the end of the index. The
manifest comes last of all. What a killed build leaves behind is at most one sample without a record, or a part of a
record: both are cut off when the build is opened again.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from dspark.cache.format import (
    INDEX_NAME,
    MANIFEST_NAME,
    OFFSETS,
    RECORD_V3,
    SAMPLE_ALIGNMENT,
    Manifest,
    Sample,
    Shard,
    align,
    crc32c,
    pack_sample,
    shard_name,
)
from dspark.cache.reader import ShardFiles
from dspark.cache.recovery import recover, write_index
from dspark.errors import CacheError
from dspark.files import lock

LOCK_NAME = ".lock"
BUILD_NAME = "build.json"  # what a build is for: the manifest without its counts


class CacheWriter:
    """Appends samples to the cache in `path`, whether new, unfinished or finished.

    `identity` is the manifest without counts and shards; a directory begun with another one is refused. Use as a
    context manager, and call `finish` at the end. Raises `CacheError`, and `ConfigError` where another process writes.
    """

    def __init__(self, path: str | Path, identity: Manifest, shard_bytes: int = 2 << 30) -> None:
        assert identity.version == 3, "older versions are read only"
        self.path = Path(path)
        self._identity = identity
        self._shard_bytes = shard_bytes
        num_layers, hidden_size = len(identity.target_layer_ids), identity.hidden_size
        self._sample_shape = (num_layers, hidden_size)
        self._files = ShardFiles(self.path, hidden_size, num_layers)
        with self._writing(), ExitStack() as held:
            self.path.mkdir(parents=True, exist_ok=True)
            lock(held.enter_context((self.path / LOCK_NAME).open("wb")), self.path)
            self._claim()
            records = recover(self.path, hidden_size, num_layers)
            self._records = {int(record["sample_id"]): record for record in records}
            self._shard_id = int(records["shard_id"].max(initial=0))
            self._shard: BinaryIO = (self.path / shard_name(self._shard_id)).open("ab")
            self._index: BinaryIO = (self.path / INDEX_NAME).open("ab")
            self._lock = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shard.close()
        self._index.close()
        self._lock.close()

    def __contains__(self, sample_id: int) -> bool:
        return sample_id in self._records

    @property
    def sample_ids(self) -> list[int]:
        """Ids of the samples written so far, ascending."""
        return sorted(self._records)

    def read(self, sample_id: int) -> Sample:
        """Read a sample back from the file, its checksum compared."""
        record = self._records[sample_id]
        return self._files.read(shard_name(record["shard_id"]), record, verify=True)

    def write(self, sample: Sample) -> None:
        """Append one sample; its id must be new."""
        assert sample.sample_id not in self._records
        assert sample.features.shape[1:] == self._sample_shape
        assert not sample.post_norm
        data, layout, flags = pack_sample(sample, self._identity.hidden_dtype)
        record = np.zeros(1, dtype=RECORD_V3)
        record["sample_id"], record["seq_len"] = sample.sample_id, len(sample.token_ids)
        record["crc32c"], record["flags"] = crc32c(data), flags
        with self._writing():
            (self.path / MANIFEST_NAME).unlink(missing_ok=True)
            self._make_room(len(data))
            start = align(self._shard.tell(), SAMPLE_ALIGNMENT)
            self._shard.write(bytes(start - self._shard.tell()))
            self._shard.write(data.data)
            self._shard.flush()
            record["shard_id"] = self._shard_id
            for field, offset in zip(OFFSETS, layout.starts, strict=True):
                record[field] = start + offset
            self._index.write(record.tobytes())
            self._index.flush()
        self._records[sample.sample_id] = record[0]

    def finish(self) -> Manifest:
        """Put the index in the order of the ids and write the manifest: from now on the cache can be read.

        The writer takes no more samples; open another one to add to the cache.
        """
        with self._writing():
            os.fsync(self._shard.fileno())
            self._shard.close()
            self._index.close()
            records = np.array([self._records[i] for i in self.sample_ids], dtype=RECORD_V3)
            write_index(self.path, records)
            num_shards = int(records["shard_id"].max()) + 1 if len(records) else 0
            shards = tuple(Shard(shard_id=i, file_name=shard_name(i)) for i in range(num_shards))
            counts = {"num_samples": len(records), "num_shards": num_shards, "shards": shards}
            manifest = self._identity.model_copy(update=counts)
            manifest.write(self.path)
        return manifest

    def _make_room(self, num_bytes: int) -> None:
        """Begin a new shard when the last one has no room left; the full one is put on the disk first."""
        if self._shard.tell() and self._shard.tell() + num_bytes > self._shard_bytes:
            os.fsync(self._shard.fileno())
            self._shard.close()
            self._shard_id += 1
            self._shard = (self.path / shard_name(self._shard_id)).open("ab")

    def _claim(self) -> None:
        """Write what this build is for, or compare it with what the directory was begun for."""
        if (self.path / BUILD_NAME).exists():
            begun = Manifest.read(self.path, BUILD_NAME)
            if begun.ends_digest is None:  # of a build of before; the revision names the target all the same
                begun = begun.model_copy(update={"ends_digest": self._identity.ends_digest})
            changed = [k for k in type(begun).model_fields if getattr(begun, k) != getattr(self._identity, k)]
            if changed:
                raise CacheError(f"{self.path}: was begun with another {', '.join(changed)}: choose another directory")
        elif any(not file.name.startswith(".") for file in self.path.iterdir()):
            raise CacheError(f"{self.path}: is not empty and holds no build of ours: choose another directory")
        else:
            self._identity.write(self.path, BUILD_NAME)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Report a full disk or a missing permission; what was written before stays usable."""
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"{self.path}: cannot be written ({error.strerror}): mend that and run again, the build continues"
            ) from None
