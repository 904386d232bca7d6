"""Parts that the planner's tests share: costs that stand still, and a drafter whose confidence follows its drafts."""

from collections.abc import Sequence

import numpy as np
import torch

from dspark.drafters.dspark import BlockDrafter
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.spec.types import DraftBlock


class FixedCosts:
    """Seconds by rows from a list, plus so much for each request drafted for; rounds teach it nothing."""

    def __init__(self, by_rows: Sequence[float], draft: float = 0.0, plain: float | None = None) -> None:
        self.by_rows, self.draft, self.plain = np.array(by_rows), draft, plain
        self.seen: list[tuple[int, int, int]] = []  # requests, drafted for, rows of each round

    def seconds(self, num_requests: int, num_drafting: np.ndarray, rows: np.ndarray) -> np.ndarray:
        seconds = self.by_rows[np.minimum(rows, len(self.by_rows) - 1)] + num_drafting * self.draft
        return seconds if self.plain is None else np.where(num_drafting > 0, seconds, self.plain)

    def observe(self, num_requests: int, num_drafting: int, num_rows: int, seconds: float) -> float:
        self.seen.append((num_requests, num_drafting, num_rows))
        return seconds


class TellingDrafter(BlockDrafter):
    """A real drafter whose confidence in a block's first two drafts is .7 and .98; in a later one it follows from the
    draft before it: .98 after an odd token, else .02.
    """

    def propose(self, anchors, batch, cache, rows, seq_lens, num_drafts) -> DraftBlock:
        block = super().propose(anchors, batch, cache, rows, seq_lens, num_drafts)
        logits = torch.where(block.tokens.roll(1, dims=1) % 2 == 1, 3.9, -3.9)
        logits[:, :2] = torch.tensor([0.85, 3.9])[:num_drafts]
        return block._replace(confidence_logits=logits)


def with_costs(engine: Engine, costs: FixedCosts) -> Engine:
    """The engine, planning by these costs."""
    engine._round.planner.costs = costs
    return engine


def planned_engine(pair, costs: FixedCosts, **changes: object) -> Engine:
    """An engine over (target, drafter) that plans by these costs."""
    return with_costs(Engine(*pair, EngineSettings.from_dict(changes, "test")), costs)
