"""How a run is going, on stderr: one live line on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dspark.log import get_logger

_log = get_logger(__name__)

QUIET_SECONDS = 10.0  # at least so long between two log lines of a run that nobody watches live


class RunLine:
    """The state of a run of `total` steps, `done` of them by an earlier one; a context manager.

    On a terminal the line stays at the bottom, log lines stand above it, and leaving, also by an exception, shows the
    cursor again.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.step = total, done, done
        self.figures = ""
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None
        console = Console(stderr=True)
        if console.is_interactive and console.file.isatty():
            columns = TextColumn("train"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[text]}")
            self._bar = Progress(*columns, console=console, refresh_per_second=2, expand=True)
            self._task = self._bar.add_task("train", total=total, completed=done, text="")

    def advance(self) -> None:
        """One more step is done."""
        self.step += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.step, text=self.text)

    def report(self, results: Mapping[str, float]) -> None:
        """Figures averaged over the last steps, by their names in the metrics."""
        names = ("loss", "tau", "tokens_per_second", "data_wait_share")
        loss, tau, rate, waiting = (results.get(name, math.nan) for name in names)
        self.figures = f"loss {loss:.3f}, tau {tau:.2f}, {rate:,.0f} tokens/s, waiting {waiting:.1%}"
        if self._bar is None and (self.step == self.total or time.monotonic() - self._said >= QUIET_SECONDS):
            self._said = time.monotonic()
            _log.info("step %d of %d: %s", self.step, self.total, self.text)

    @property
    def text(self) -> str:
        """The figures, and the time left at the pace so far."""
        steps = self.step - self.done
        if not steps:
            return self.figures
        seconds = (time.monotonic() - self._began) / steps * (self.total - self.step)
        left = f"{timedelta(seconds=round(seconds))} left"
        return f"{self.figures}, {left}" if self.figures else left

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
