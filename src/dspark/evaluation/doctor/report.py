"""What the doctor found: ordered checks, and of the failed ones the first. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]
Fault = Literal[
    "unusable file",
    "damaged file",
    "missing tensor",
    "other tokenizer",
    "scaled rope",
    "other target",
    "target states",
    "wrong layer",
    "norm skipped",
    "serving path",
    "dtype",
    "wrong slot convention",
    "causal mask",
    "shifted position",
    "wrong mask id",
    "swapped head",
    "weak drafter",
]


@dataclass(frozen=True)
class Check:
    """One comparison: its outcome in a sentence, the figures behind it and, where it failed, what to change."""

    name: str
    status: Status
    finding: str
    figures: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    change: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All checks, in the order of the path from files to acceptance: what fails first explains what fails after it."""

    target: str
    drafter: str
    checks: Sequence[Check]

    @property
    def first(self) -> Check | None:
        """The first place where things part; None when the pair is healthy."""
        return next((check for check in self.checks if check.status == "failed"), None)

    @property
    def exit_code(self) -> int:
        """0 when healthy, 1 when a fault was found."""
        return 0 if self.first is None else 1

    def as_dict(self) -> dict[str, Any]:
        """What --json prints."""
        first = self.first
        return {
            "target": self.target,
            "drafter": self.drafter,
            "healthy": first is None,
            "fault": None if first is None else first.fault,
            "place": None if first is None else first.name,
            "change": None if first is None else first.change,
            "checks": [asdict(check) for check in self.checks],
        }


def passed(name: str, finding: str, figures: dict[str, Any] | None = None) -> Check:
    """A check that found nothing wrong."""
    return Check(name, "ok", finding, figures or {})


def skipped(name: str, reason: str) -> Check:
    """A check that could not be made."""
    return Check(name, "skipped", reason)
