"""Training samples straight from the target: rows in memory, states made when they are asked for, nothing on disk."""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.cache.build import CacheRow
from dspark.cache.capture import Capture, NumberedRow, batches
from dspark.cache.check import check_states
from dspark.cache.format import Sample
from dspark.cache.reader import TokenRow
from dspark.errors import CacheError
from dspark.log import progress


class RowTable:
    """Tokens and masks of all rows, in memory: five bytes a token. Raises `CacheError` when there is no row."""

    def __init__(self, rows: Iterable[CacheRow]) -> None:
        token_ids, loss_mask, ends = array("i"), bytearray(), [0]
        with progress(None, "read conversations", "row") as bar:
            for row in rows:
                token_ids.extend(row.token_ids)
                loss_mask.extend(row.loss_mask)
                ends.append(len(token_ids))
                bar.update(1)
        if len(ends) == 1:
            raise CacheError("conversations: there is no row to train on: see the skipped conversations above")
        self._token_ids = torch.from_numpy(np.frombuffer(token_ids, dtype=np.int32))
        self._loss_mask = torch.from_numpy(np.frombuffer(loss_mask, dtype=np.uint8))
        self._ends = np.array(ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> TokenRow:
        start, end = self._ends[index : index + 2]
        return TokenRow(self._token_ids[start:end], self._loss_mask[start:end])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Token counts of all rows: [n]."""
        return np.diff(self._ends)


class StreamedSamples:
    """The rows of `table` with the states that `capture` gives, in forwards of at most `batch_tokens`.

    Sample i is row i: what it holds depends on nothing but the conversations and the target. Float rounding alone may
    differ with the rows that run beside it.
    """

    def __init__(self, table: RowTable, capture: Capture, target_layer_ids: tuple[int, ...], batch_tokens: int) -> None:
        self.target_layer_ids = target_layer_ids
        self._table, self._capture, self._batch_tokens = table, capture, batch_tokens

    def __len__(self) -> int:
        return len(self._table)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Token counts of all samples: [n]."""
        return self._table.lengths

    def row(self, index: int) -> TokenRow:
        """Tokens and mask of a sample; the target does not run."""
        return self._table[index]

    def load(self, indices: Sequence[int]) -> list[Sample]:
        """Run the target on these rows. Raises `CacheError` for states that no target has (NaN, zeros)."""
        found = {}
        for batch in batches([self._numbered(index) for index in indices], self._batch_tokens):
            for sample in self._capture(batch):
                check_states(sample)
                found[sample.sample_id] = sample
        return [found[index] for index in indices]

    def _numbered(self, index: int) -> NumberedRow:
        row = self._table[index]
        return index, row.token_ids.tolist(), row.loss_mask.tolist()
