"""What the stages of one round hand to each other.

Shape legend: B requests, G drafts per round, T = G + 1 verify rows (the anchor row counted), Vd draft vocabulary.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor


class SamplingRows(NamedTuple):
    """Sampling parameters of the requests in a batch, one entry a request, all on the logits' device."""

    temperature: Float32[Tensor, " B"]  # 0 = greedy
    top_k: Int64[Tensor, " B"]  # 0 = off
    top_p: Float32[Tensor, " B"]  # 1 = off
    min_p: Float32[Tensor, " B"]  # 0 = off
    seed: Int64[Tensor, " B"]  # see sampling.fold_seed

    @property
    def greedy(self) -> Bool[Tensor, " B"]:
        """Which requests take the argmax."""
        return self.temperature == 0

    def select(self, requests: Int64[Tensor, " b"] | Bool[Tensor, " B"]) -> "SamplingRows":
        """The parameters of some of the requests, by index or by mask."""
        return SamplingRows(*(field[requests] for field in self))


class DraftBlock(NamedTuple):
    """The drafts of one round.

    `probs[b, i]` is the exact law that `tokens[b, i]` was drawn from: after the sequential head, at the request's
    temperature and filters, in the same rounding. Rows of greedy requests are never read, so they may hold anything,
    and a batch of greedy requests alone may leave Vd = 0.
    """

    tokens: Int64[Tensor, "B G"]  # target ids
    probs: Float32[Tensor, "B G Vd"]
    token_ids: Int64[Tensor, " Vd"] | None = None  # draft index -> target id, no id twice; None = same vocabulary
    # Logits of P(draft accepted | all drafts before it accepted), as the confidence head gives them: not calibrated.
    confidence_logits: Float32[Tensor, "B G"] | None = None

    @property
    def num_drafts(self) -> int:
        """G."""
        return self.tokens.shape[1]

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str = "cpu") -> "DraftBlock":
        """A block without drafts: plain decoding, one token a round."""
        tokens = torch.empty(batch_size, 0, dtype=torch.long, device=device)
        return cls(tokens, torch.empty(batch_size, 0, 0, device=device))


class VerifyPlan(NamedTuple):
    """How many verify rows each request gets."""

    verify_lens: Int64[Tensor, " B"]  # 1..T: the rows that may decide what is committed
    run_lens: Int64[Tensor, " B"] | None = None  # rows that run, where more of them do

    @property
    def num_rows(self) -> Int64[Tensor, " B"]:
        """Rows that run, of each request."""
        return self.verify_lens if self.run_lens is None else self.run_lens


class Acceptance(NamedTuple):
    """The outcome of one round: `correct_len` drafts, then `bonus`, are the round's output.

    `bonus` is -1 where the deciding row had no finite logit: that request can not go on, the others can.
    """

    correct_len: Int64[Tensor, " B"]  # drafts accepted, 0..G
    bonus: Int64[Tensor, " B"]  # target id, or -1

    @property
    def commit_len(self) -> Int64[Tensor, " B"]:
        """Tokens the round commits, 1..T: the anchor and the accepted drafts get their KV, the bonus is next."""
        return self.correct_len + 1
