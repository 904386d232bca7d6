"""One place that knows the kinds of drafters."""

from __future__ import annotations

from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import BlockDrafter
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.models.ends import TargetEnds


def make_drafter(config: DrafterConfig, target: TargetEnds, token_ids: Tensor | None = None) -> Drafter:
    """The drafter that `config.algorithm` names, with untrained weights; arguments as for `Drafter`."""
    match config.algorithm:
        case "dspark" | "dflash":
            return BlockDrafter(config, target, token_ids)
        case "eagle3":
            return Eagle3Drafter(config, target, token_ids)
