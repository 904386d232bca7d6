"""The one loop of serving: prefill once, then rounds of draft, plan, verify, accept, commit.

Plain decoding is the same round with no drafts. Between rounds a request carries its anchor (put out, but without KV)
and `seq_len`: both caches are valid for exactly [0, seq_len), and everything beyond is provisional.

Shapes: B requests, G drafts, T = G + 1 verify rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.engine.config import EngineSettings
from dspark.engine.edits import edit_logits
from dspark.engine.grammar import Grammars
from dspark.engine.logprobs import token_logprobs
from dspark.engine.request import Origin, Request, RoundRecord, TokenLogprob
from dspark.engine.runner import Forward, Runner, Window, window_of
from dspark.engine.scheduler import Chunk
from dspark.engine.stats import AcceptanceWatch, EngineStats
from dspark.spec.accept import accept
from dspark.spec.planner import static_plan
from dspark.spec.sampling import round_seed
from dspark.spec.types import Acceptance, DraftBlock, SamplingRows, VerifyPlan


class Emission(NamedTuple):
    """What one request puts out in one step."""

    request: Request
    token_ids: list[int]
    text: str
    origins: list[Origin]
    logprobs: list[TokenLogprob]  # one a token, or none where they are not asked for


class Judged(NamedTuple):
    """What a batch of verify rows came to."""

    acceptance: Acceptance
    tokens: list[list[int]]  # of each request: accepted drafts, then the bonus (-1 where the request can not go on)
    logprobs: list[list[TokenLogprob]]  # of these tokens, where asked for


class Round:
    """The verbs of a round over one runner. Requests that finish are marked, not removed: the engine does that."""

    def __init__(
        self, runner: Runner, stats: EngineStats, watch: AcceptanceWatch, settings: EngineSettings, grammars: Grammars
    ) -> None:
        self.runner = runner
        self.stats = stats
        self.watch = watch
        self.settings = settings
        self.grammars = grammars

    def decode(self, requests: list[Request]) -> list[Emission]:
        """One round for requests that all speculate, or that all do not."""
        speculative = requests[0].speculates
        with self.stats.phase("draft"):
            window = window_of(requests, self.runner.device)
            block = self.propose(window, speculative)
        with self.stats.phase("plan"):
            plan = self.plan(window, block)
        with self.stats.phase("verify"):
            forward, logits = self.verify(window, block, plan, speculative)
        with self.stats.phase("accept"):
            judged = self.judge(requests, block, logits, plan, window.rows, window.positions)
        with self.stats.phase("commit"):
            emissions = self.commit(forward, requests, judged.tokens, judged.logprobs)
            self._record(emissions, plan, block.num_drafts, speculative)
            if speculative and self.settings.record_rounds:
                keep_records(emissions, window, block, plan, judged.acceptance)
        return emissions

    def prefill(self, chunks: list[Chunk]) -> list[Emission]:
        """Run the next rows of prompts; the token after a prompt's last row becomes the anchor.

        A preempted request gets its KV back and no token: it has its anchor.
        """
        with self.stats.phase("prefill"):
            requests = [chunk.request for chunk in chunks]
            forward = self._run_chunks(window_of(requests, self.runner.device), chunks)
            tokens: list[list[int]] = [[] for _ in chunks]
            logprobs: list[list[TokenLogprob]] = [[] for _ in chunks]
            ends = [i for i, chunk in enumerate(chunks) if chunk.is_last and not chunk.request.token_ids]
            if ends:
                last = forward.hidden[ends, [chunks[i].num_rows - 1 for i in ends]]  # [b, H]
                judged = self._first_tokens([requests[i] for i in ends], last)
                for i, token, entry in zip(ends, judged.tokens, judged.logprobs, strict=True):
                    tokens[i], logprobs[i] = token, entry
            return self.commit(forward, requests, tokens, logprobs, [chunk.num_rows for chunk in chunks])

    def propose(self, window: Window, speculative: bool) -> DraftBlock:
        """One block of drafts per request, or none at all."""
        if speculative:
            return self.runner.draft(window)
        return DraftBlock.empty(len(window.requests), self.runner.device)

    def plan(self, window: Window, block: DraftBlock) -> VerifyPlan:
        """Verify lengths: full width, cut where a request wants or may hold fewer tokens."""
        wanted = [request.num_tokens_left for request in window.requests]
        room = [request.limit - request.seq_len for request in window.requests]
        device = self.runner.device
        return static_plan(
            len(wanted), block.num_drafts, torch.tensor(wanted, device=device), torch.tensor(room, device=device)
        )

    def verify(self, window: Window, block: DraftBlock, plan: VerifyPlan, capture: bool) -> tuple[Forward, Tensor]:
        """Run anchor and drafts through the target, causal; row i judges draft i + 1 (from 1). Logits are [B, T, V].

        Rows that the plan cuts do not run: their logits are zero.
        """
        lens = plan.verify_lens.tolist()
        width = max(lens)
        token_ids = torch.cat((window.anchors[:, None], block.tokens[:, : width - 1]), dim=1)
        forward = self.runner.forward(window, token_ids, lens, capture)
        if min(lens) == block.num_drafts + 1:
            return forward, self.runner.logits(forward.hidden)
        ran = torch.arange(block.num_drafts + 1, device=self.runner.device) < plan.verify_lens[:, None]  # [B, T]
        judged = self.runner.logits(forward.hidden[ran[:, :width]])
        logits = judged.new_zeros(*ran.shape, judged.shape[-1])
        logits[ran] = judged
        return forward, logits

    def judge(
        self,
        requests: list[Request],
        block: DraftBlock,
        logits: Tensor,
        plan: VerifyPlan,
        rows: SamplingRows,
        positions: Tensor,
    ) -> Judged:
        """Edit the rows [B, T, V] as each request asks, accept, and look up the log probabilities asked for."""
        edited = edit_logits(requests, block, plan, logits, self.grammars)
        if self.settings.verification == "block":  # noise of its own for every round: see accept
            rows = rows._replace(seed=round_seed(rows.seed, positions))
        acceptance = accept(block, edited, plan, rows, positions, self.settings.verification)
        tokens = outputs(block, acceptance)
        return Judged(acceptance, tokens, token_logprobs(requests, tokens, logits, edited, rows))

    def commit(
        self,
        forward: Forward,
        requests: list[Request],
        tokens: list[list[int]],
        logprobs: list[list[TokenLogprob]],
        chunk_lens: list[int] | None = None,
    ) -> list[Emission]:
        """Put tokens out up to the first stop, then advance by just those: KV length, counters, the drafter's context.

        The input rows that become history are the known ones (of a prompt's chunk, or the anchor) and the accepted
        drafts; the last token put out has no KV yet and is the next anchor.
        """
        emissions, num_rows = [], []
        for i, (request, new) in enumerate(zip(requests, tokens, strict=True)):
            known = chunk_lens[i] if chunk_lens else 1
            failed = bool(new) and new[-1] < 0
            origins: list[Origin] = ["accepted"] * (len(new) - 1)
            origins.append("prefill" if chunk_lens else "bonus")
            count, text = request.extend(new[:-1] if failed else new, origins)
            if failed and request.finish_reason is None:
                request.finish_reason = "error"
                text += request.stream.finish()
            # What follows a failed request's last row is not known, and nobody will ask for its context.
            num_rows.append(0 if failed else known + max(count - 1, 0))
            request.seq_len += num_rows[-1]
            request.logprobs += logprobs[i][:count]
            emissions.append(Emission(request, new[:count], text, origins[:count], logprobs[i][:count]))
        if forward.features.shape[2] and any(num_rows):
            self.runner.inject(forward, requests, num_rows)
        return emissions

    def _run_chunks(self, window: Window, chunks: list[Chunk]) -> Forward:
        """The target over the chunks' rows, padded on the right."""
        lens = [chunk.num_rows for chunk in chunks]
        self.stats.prompt_tokens += sum(lens)
        width = max(lens)
        rows = [r.ids(r.seq_len, r.seq_len + n) + [0] * (width - n) for r, n in chunks]
        capture = any(request.speculates for request in window.requests)
        return self.runner.forward(window, torch.tensor(rows, device=self.runner.device), lens, capture)

    def _first_tokens(self, requests: list[Request], hidden: Tensor) -> Judged:
        """The token after each prompt, from the states [B, H] of the last rows; [-1] where no logit is finite."""
        positions = torch.tensor([request.num_known - 1 for request in requests], device=self.runner.device)
        block = DraftBlock.empty(len(requests), self.runner.device)
        rows = window_of(requests, self.runner.device).rows
        logits = self.runner.logits(hidden)[:, None]
        return self.judge(requests, block, logits, VerifyPlan(torch.ones_like(positions)), rows, positions)

    def _record(self, emissions: list[Emission], plan: VerifyPlan, num_proposed: int, speculative: bool) -> None:
        """Count the round for the engine and for each request."""
        self.stats.steps += 1
        if not speculative:
            return
        judged = committed = 0
        for (request, token_ids, _, origins, _), verify_len in zip(emissions, plan.verify_lens.tolist(), strict=True):
            num_drafts, num_accepted = verify_len - 1, origins.count("accepted")
            request.figures.record_round(num_proposed, verify_len, num_accepted, len(token_ids))
            self.stats.record_round(num_proposed, verify_len, num_accepted, len(token_ids))
            if num_drafts:
                judged += 1
                committed += len(token_ids)
        self.watch.record(judged, committed)


def outputs(block: DraftBlock, acceptance: Acceptance) -> list[list[int]]:
    """The round's tokens of each request: its accepted drafts, then the bonus (-1 where the request can not go on)."""
    drafts, correct, bonus = block.tokens.tolist(), acceptance.correct_len.tolist(), acceptance.bonus.tolist()
    return [[*row[:count], last] for row, count, last in zip(drafts, correct, bonus, strict=True)]


def keep_records(
    emissions: list[Emission], window: Window, block: DraftBlock, plan: VerifyPlan, acceptance: Acceptance
) -> None:
    """Append this round to each request's records."""
    logits = block.confidence_logits
    confidence = [[]] * len(emissions) if logits is None else logits.tolist()
    lens, correct = plan.verify_lens.tolist(), acceptance.correct_len.tolist()
    for i, (request, token_ids, *_) in enumerate(emissions):
        request.round_records.append(
            RoundRecord(window.starts[i], lens[i], block.num_drafts, correct[i], len(token_ids), tuple(confidence[i]))
        )
