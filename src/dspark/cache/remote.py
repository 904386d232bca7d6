"""Training samples whose states a process of its own makes, while this one trains."""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.cache.format import Sample
from dspark.cache.link import TargetLink
from dspark.cache.reader import TokenRow
from dspark.cache.streamed import RowTable
from dspark.errors import CacheError


class RemoteSamples:
    """The rows of `table` with the states that come through `link`, as `StreamedSamples` gives them.

    Use as a context manager: at its end the other process is told that nothing more will be asked.
    """

    def __init__(self, table: RowTable, link: TargetLink, target_layer_ids: tuple[int, ...], hidden_size: int) -> None:
        self.target_layer_ids = target_layer_ids
        self._table, self._link, self._hidden_size = table, link, hidden_size
        self._order: Iterator[Sequence[int]] = iter(())
        self._stop: Callable[[], None] | None = None
        self._ahead: tuple[int, ...] | None = None  # asked for before it was wanted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._ahead is not None:
                self._receive(self._ahead)
            self._link.close()
        except CacheError:
            if error is None:
                raise

    def __len__(self) -> int:
        return len(self._table)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Token counts of all samples: [n]."""
        return self._table.lengths

    def row(self, index: int) -> TokenRow:
        """Tokens and mask of a sample; nothing is asked for."""
        return self._table[index]

    def follow(self, order: Iterator[Sequence[int]], stop: Callable[[], None]) -> None:
        """From now on ask for each micro-batch of `order` while the one before it is trained on.

        `stop` is called once the target's process has been asked to stop.
        """
        self._order, self._stop = order, stop
        self._look_ahead()

    def load(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of these rows; of none: just hear whether to stop.

        Raises `CacheError` for states that no target has, and when its process is gone.
        """
        wanted, asked = tuple(indices), self._ahead
        samples: list[Sample] = []
        if asked is not None:
            samples = self._receive(asked)
        if asked != wanted:
            self._link.ask(wanted)
            samples = self._receive(wanted)
        self._look_ahead()
        return samples

    def _look_ahead(self) -> None:
        following = next(self._order, None)
        if following is not None:
            self._link.ask(following)
            self._ahead = tuple(following)

    def _receive(self, indices: tuple[int, ...]) -> list[Sample]:
        self._ahead = None
        rows = [self._table[index] for index in indices]
        lengths = [len(row.token_ids) for row in rows]
        states, normalizers, stop = self._link.answer(sum(lengths), len(self.target_layer_ids), self._hidden_size)
        if stop and self._stop is not None:
            self._stop()
        parts = zip(indices, rows, torch.split(states, lengths), torch.split(normalizers, lengths), strict=True)
        return [
            Sample(
                sample_id=index,
                token_ids=row.token_ids,
                attention_mask=torch.ones(len(row.token_ids), dtype=torch.uint8),
                loss_mask=row.loss_mask,
                features=states[:, :-1],
                last_hidden=states[:, -1],
                log_normalizer=normalizer,
            )
            for index, row, states, normalizer in parts
        ]
