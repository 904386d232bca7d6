"""The figures of a run, by setting: tasks, categories, all together, and their spread over context, script and mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dspark.evaluation.confidence import ConfidenceReport, confidence_report
from dspark.evaluation.rows import Row, Setting
from dspark.evaluation.stats import Estimate, Figures, figures

FIRST_EDGE = 128  # tokens of context; each further bucket is twice as long
ALL = "all"
CONTEXT = "context length"


class SettingFigures(NamedTuple):
    """What was measured in one setting. `spread` is of all tasks: by context length, and by script."""

    setting: Setting
    tasks: dict[str, Figures]
    categories: dict[str, Figures]
    everything: Figures
    spread: dict[str, dict[str, Figures]]
    confidence: ConfidenceReport | None  # of all tasks; None without a confidence head

    @property
    def groups(self) -> dict[str, Figures]:
        """Tasks, then categories, then all of them; what holds a single part is not told twice."""
        categories = {name: part for name, part in self.categories.items() if part not in self.tasks.values()}
        everything = {ALL: self.everything} if len(self.categories) > 1 else {}
        return self.tasks | categories | everything


def summarise(rows: Iterable[Row]) -> list[SettingFigures]:
    """The figures of each setting, greedy first; rows that hold an error are left out."""
    good = [row for row in rows if row.error is None]
    drafted = [row for row in good if row.drafted]
    plain = {row.pair: row for row in good if not row.drafted}

    def group(part: list[Row], key: Callable[[Row], str]) -> dict[str, Figures]:
        names = dict.fromkeys(key(row) for row in part)  # in the order of their first row
        return {name: figures([row for row in part if key(row) == name], plain) for name in names}

    found = []
    for setting in settings_of(drafted):
        part = [row for row in drafted if row.setting == setting]
        spread = {
            CONTEXT: by_context(part),
            "script of the prompt": group(part, lambda row: row.prompt_script),
            "script of the answer": group(part, lambda row: row.answer_script),
        }
        tasks, categories = group(part, lambda row: row.task), group(part, lambda row: row.category)
        confidence = confidence_report(record for row in part for record in row.rounds)
        found.append(SettingFigures(setting, tasks, categories, figures(part, plain), spread, confidence))
    return found


def settings_of(rows: Iterable[Row]) -> list[Setting]:
    """The settings that rows were measured in, greedy first."""
    return sorted({row.setting for row in rows}, key=lambda s: (s.temperature, str(s.thinking)))


def by_context(rows: Sequence[Row]) -> dict[str, Figures]:
    """Figures of the rounds whose context length, in tokens, lies in each bucket. Speeds are of whole answers, so
    buckets have none."""
    longest = max((r.position for row in rows for r in row.rounds), default=0)
    found, low, high = {}, 0, FIRST_EDGE
    while low <= longest:
        keep = _between(low, high)
        inside = [row for row in rows if any(low <= r.position < high for r in row.rounds)]
        if inside:
            whole = figures(inside, {}, keep)
            found[f"{low}–{high - 1}"] = whole._replace(tokens_per_second=Estimate(None))
        low, high = high, 2 * high
    return found


def _between(low: int, high: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda positions: (low <= positions) & (positions < high)
