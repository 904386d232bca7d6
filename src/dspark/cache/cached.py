"""Training samples from finished caches, ours or version 2."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark.cache.capture import Capture
from dspark.cache.check import check_foreign
from dspark.cache.format import Sample
from dspark.cache.reader import CacheReader, TokenRow
from dspark.errors import CacheError
from dspark.log import get_logger
from dspark.models.target import Target

_log = get_logger(__name__)

_SHARED = ("target_layer_ids", "hidden_size", "last_hidden", "target_revision", "tokenizer_digest")


class CachedSamples:
    """Several caches as one. Raises `CacheError` when they tap different layers or targets."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._readers = [CacheReader(path) for path in paths]
        first = self._readers[0].manifest
        for reader in self._readers:
            for name in _SHARED:
                if getattr(reader.manifest, name) != getattr(first, name):
                    raise CacheError(
                        f"{reader.path}: its {name} is not that of {paths[0]}; caches trained on together must agree"
                    )
        self.target_layer_ids = first.target_layer_ids
        self._starts = np.cumsum([0] + [len(reader) for reader in self._readers])

    @property
    def target_digest(self) -> str | None:
        """The digest of the whole target, where its two ends alone can be checked; None for caches of before."""
        first = self._readers[0].manifest
        known = all(reader.manifest.ends_digest is not None for reader in self._readers)
        return first.target_revision if known else None

    def check(self, target: Target) -> None:
        """Refuse caches of another target. Raises `CacheError`.

        Version 2 does not say which weights it is of: there the states of a sample are compared, which the whole
        target makes.
        """
        for reader in self._readers:
            manifest = reader.manifest
            if manifest.target_revision is None:
                _log.info("%s: a version 2 cache of %s", reader.path, manifest.target_model_name_or_path)
                capture = Capture(target.states(), self.target_layer_ids, log_normalizer=False)
                if len(reader):
                    check_foreign(reader[0], capture, str(reader.path))
                continue
            stored = (manifest.target_revision, manifest.ends_digest or target.ends_digest)
            if stored != (target.digest, target.ends_digest):
                raise CacheError(
                    f"{reader.path}: is of {manifest.target_model_name_or_path} ({' '.join(stored)}), the recipe's "
                    f"target is {target.name} ({target.digest} {target.ends_digest}): name that one or build the "
                    "cache again"
                )

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Token counts of all samples: [n]."""
        return np.concatenate([reader.seq_lens.astype(np.int64) for reader in self._readers])

    def row(self, index: int) -> TokenRow:
        """Tokens and mask of a sample; its states are not read."""
        reader, place = self._place(index)
        return reader.row(place)

    def load(self, indices: Sequence[int]) -> list[Sample]:
        """Samples with their states, views of the files."""
        return [reader[place] for reader, place in map(self._place, indices)]

    def _place(self, index: int) -> tuple[CacheReader, int]:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._readers[part], index - int(self._starts[part])
