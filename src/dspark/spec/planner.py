"""How many rows of a draft block each request has verified."""

import torch
from jaxtyping import Int64
from torch import Tensor

from dspark.spec.types import VerifyPlan


def static_plan(batch_size: int, num_drafts: int, wanted: Int64[Tensor, " B"], room: Int64[Tensor, " B"]) -> VerifyPlan:
    """Verify the whole block, less at the ends of range.

    wanted: tokens the request may still output; no more rows than that are worth running, and one always runs.
    room: positions left in the model, the anchor's counted, at least 1.
    """
    assert wanted.shape == room.shape == (batch_size,), "one entry a request"
    verify_lens = torch.minimum(wanted.clamp_min(1), room).clamp_max(num_drafts + 1)
    return VerifyPlan(verify_lens)
