"""Log lines and progress bars, all on stderr: stdout belongs to results."""

import logging
import sys
from typing import Never, TextIO

from tqdm import tqdm

_QUIET_INTERVAL = 10.0  # seconds between two states of a bar that nobody watches live


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (pass `__name__`). Everything hangs under the logger `dspark`."""
    return logging.getLogger(name)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at the moment: a live line takes its place, so that log lines stand above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: int = logging.INFO) -> None:
    """Send dspark's log lines of at least `level` to stderr. Called once, by the command line."""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("dspark")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def progress(
    total: int | None,
    desc: str,
    unit: str = "it",
    *,
    initial: int = 0,
    unit_scale: bool = False,
    leave: bool = True,
) -> "tqdm[Never]":
    """Open a progress bar on stderr; use it as a context manager and call `update(n)`.

    `initial` is what an earlier run had done; `unit_scale` prints 12.3M for large counts (bytes, tokens).
    Away from a terminal the bar prints a state every ten seconds only, so that log files stay readable.
    """
    interval = 0.1 if sys.stderr.isatty() else _QUIET_INTERVAL
    return tqdm(
        total=total,
        desc=desc,
        unit=unit,
        initial=initial,
        unit_scale=unit_scale,
        leave=leave,
        file=sys.stderr,
        mininterval=interval,
        maxinterval=max(interval, 10.0),
        dynamic_ncols=True,
    )
