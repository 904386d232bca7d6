"""The one loop of serving: prefill once, then rounds of draft, plan, verify, accept, commit.

Plain decoding is the same round with no drafts, and requests of both kinds share it: those drafted for stand first.
Between rounds a request carries its anchor (put out, but without KV) and `seq_len`: both caches are valid for exactly
[0, seq_len), and everything beyond is provisional.

Shapes: B requests, b of them drafted for, G drafts, T = G + 1 verify rows, V vocabulary.
"""

import time
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.engine.config import EngineSettings
from dspark.engine.context import MOST_HELD, catch_up, hold
from dspark.engine.edits import edit_logits
from dspark.engine.grammar import Grammars
from dspark.engine.logprobs import token_logprobs
from dspark.engine.planning import Planner, RoundPlan
from dspark.engine.request import Origin, Request, RoundRecord, TokenLogprob
from dspark.engine.runner import Epilogue, Forward, Runner, Verified, Window, may_judge_itself, window_of
from dspark.engine.scheduler import Chunk
from dspark.engine.stats import AcceptanceWatch, EngineStats
from dspark.spec.accept import accept, emitted
from dspark.spec.layout import scatter
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
        self, runner: Runner, planner: Planner, stats: EngineStats, settings: EngineSettings, grammars: Grammars
    ) -> None:
        self.runner = runner
        self.planner = planner
        self.stats = stats
        self.watch = AcceptanceWatch()
        self.rows_per_request = 1.0 + runner.num_drafts  # that the last round ran
        self.settings = settings
        self.grammars = grammars

    def decode(self, requests: list[Request]) -> list[Emission]:
        """One round."""
        with self.stats.phase("plan"):
            begun = self.begin(requests)
        with self.stats.phase("draft"):
            window = window_of([requests[i] for i in begun.order], self.runner.device)
            begun = self.prepare(begun, window.requests)
            block = self.propose(window, begun.num_drafting)
        with self.stats.phase("plan"):
            round_plan = self.planner.plan(begun, block.confidence_logits)
            round_plan = self.hold_to_thresholds(round_plan, window.requests, block)
            plan = self.verify_plan(round_plan)
            self._count_rows(window.requests, plan)
        with self.stats.phase("verify"):
            num_held = len(requests) - begun.num_drafting if self.planner.adapts else 0
            verified = self.verify(window, block, plan, num_held)
        with self.stats.phase("accept"):
            judged = self.judge_all(window, block, plan, verified)
        with self.stats.phase("commit"):
            emissions = self.commit(verified, window.requests, judged.tokens, judged.logprobs, num_held=num_held)
            self._record(emissions, plan, block)
            if self.settings.record_rounds:
                keep_records(emissions, window, block, plan, judged.acceptance)
        with self.stats.phase("plan"):
            correct_len = judged.acceptance.correct_len[: begun.num_drafting]
            self.planner.end(round_plan, correct_len.cpu().numpy(), int(plan.num_rows.sum()))
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
                last_rows = list(accumulate(chunk.num_rows for chunk in chunks))
                last = forward.states[[last_rows[i] - 1 for i in ends]]  # [b, H]
                judged = self._first_tokens([requests[i] for i in ends], last)
                for i, token, entry in zip(ends, judged.tokens, judged.logprobs, strict=True):
                    tokens[i], logprobs[i] = token, entry
            lens = [chunk.num_rows for chunk in chunks]
            return self.commit(Verified(forward, None), requests, tokens, logprobs, lens)

    def begin(self, requests: list[Request]) -> RoundPlan:
        """Choose whom to draft for. Verify lengths end where a request wants or may hold no more tokens."""
        wanted = torch.tensor([request.max_rows for request in requests])
        room = torch.tensor([request.limit - request.seq_len for request in requests])
        speculates = torch.tensor([request.speculates for request in requests])
        longest = static_plan(len(requests), self.runner.num_drafts, wanted, room).verify_lens
        greedy = np.array([request.params.temperature == 0 for request in requests])
        return self.planner.begin(requests, torch.where(speculates, longest, 1).numpy(), greedy)

    def prepare(self, begun: RoundPlan, requests: list[Request]) -> RoundPlan:
        """Give the drafter the context it lacks of those it drafts for; a round's time does not count what is late."""
        started = time.perf_counter()
        catch_up(self.runner, requests[: begun.num_drafting])
        return replace(begun, begun=begun.begun + time.perf_counter() - started)

    def propose(self, window: Window, count: int) -> DraftBlock:
        """One block of drafts for each of the first `count` requests."""
        if count:
            return self.runner.draft(window.first(count))
        return DraftBlock.empty(0, self.runner.device)

    def hold_to_thresholds(self, round_plan: RoundPlan, requests: list[Request], block: DraftBlock) -> RoundPlan:
        """Trim further where requests ask for a confidence."""
        asked = [request.params.draft_threshold or 0.0 for request in requests[: round_plan.num_drafting]]
        if block.confidence_logits is None or not any(asked):
            return round_plan
        return self.planner.hold_to(round_plan, block.confidence_logits, np.array(asked))

    def verify_plan(self, round_plan: RoundPlan) -> VerifyPlan:
        """The verify lengths as a plan of all requests, and the rows that run where more of them do: on the host."""
        lens = torch.from_numpy(round_plan.verify_lens)
        if self.settings.verify_rows != "cap_accept":
            return VerifyPlan(lens)
        whole = torch.from_numpy(round_plan.max_lens).clone()
        whole[round_plan.num_drafting :] = 1
        return VerifyPlan(lens, whole)

    def verify(self, window: Window, block: DraftBlock, plan: VerifyPlan, num_held: int) -> Verified:
        """Run anchors and drafts through the target, causal; row i judges draft i + 1 (from 1).

        Where nobody wants the logits the device may judge as well, and give the context that is not held back.
        """
        epilogue, num_ready = None, len(window.requests) - num_held
        if may_judge_itself(window.requests):
            gives = [request.speculates and i < num_ready for i, request in enumerate(window.requests)]
            epilogue = Epilogue(plan.verify_lens.tolist(), gives)
        compact = self.settings.verify_rows == "compact"
        return self.runner.verify(window, block, plan.num_rows.tolist(), compact, epilogue)

    def logits(self, block: DraftBlock, plan: VerifyPlan, verified: Verified) -> tuple[Tensor, Tensor]:
        """The logits of requests with drafts, [b, T, V], zero in rows that did not run, and of others [B - b, 1, V]."""
        logits, drafted = verified.logits, len(block.tokens)
        assert logits is not None
        num_rows, judged = block.num_drafts + 1, int(plan.num_rows[:drafted].sum())
        if judged == drafted * num_rows:
            judged_logits = logits[:judged].view(drafted, num_rows, logits.shape[-1])
        else:
            judged_logits = scatter(logits[:judged], verified.forward.ran.first(judged), drafted, num_rows)
        return judged_logits, logits[judged:, None]

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

    def judge_all(self, window: Window, block: DraftBlock, plan: VerifyPlan, verified: Verified) -> Judged:
        """Judge the drafts of the first requests, and draw the next token of the others."""
        drafted, count = len(block.tokens), len(window.requests)
        if verified.acceptance is not None:
            padded = block._replace(tokens=F.pad(block.tokens, (0, 0, 0, count - drafted)))
            return Judged(verified.acceptance, outputs(padded, verified.acceptance), [[] for _ in range(count)])
        parts = []
        logits, plain_logits = self.logits(block, plan, verified)
        if drafted:
            some, lens = window.first(drafted), VerifyPlan(plan.verify_lens[:drafted].to(self.runner.device))
            parts.append(self.judge(some.requests, block, logits, lens, some.rows, some.positions))
        if drafted < count:
            some, lens = window.rest(drafted), VerifyPlan(plan.verify_lens[drafted:].to(self.runner.device))
            none = DraftBlock.empty(len(some.requests), self.runner.device)
            parts.append(self.judge(some.requests, none, plain_logits, lens, some.rows, some.positions))
        acceptance = Acceptance(*(torch.cat(column) for column in zip(*(p.acceptance for p in parts), strict=True)))
        return Judged(acceptance, [t for p in parts for t in p.tokens], [t for p in parts for t in p.logprobs])

    def commit(
        self,
        verified: Verified,
        requests: list[Request],
        tokens: list[list[int]],
        logprobs: list[list[TokenLogprob]],
        chunk_lens: list[int] | None = None,
        num_held: int = 0,
    ) -> list[Emission]:
        """Put tokens out up to the first stop, then advance by just those: KV length, counters, the drafter's context.

        The input rows that become history are the known ones (of a prompt's chunk, or the anchor) and the accepted
        drafts; the last token put out has no KV yet and is the next anchor. The context of the last `num_held` requests
        waits until somebody drafts for them.
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
            num_committed = 0 if failed else known + max(count - 1, 0)
            request.seq_len += num_committed
            num_rows.append(num_committed if request.speculates else 0)
            request.logprobs += logprobs[i][:count]
            emissions.append(Emission(request, new[:count], text, origins[:count], logprobs[i][:count]))
        if verified.forward.features.shape[2]:
            self._give_context(verified, requests, num_rows, num_held)
        return emissions

    def _give_context(self, verified: Verified, requests: list[Request], num_rows: list[int], num_held: int) -> None:
        """Inject the committed rows, or hold them back; an ended request's go to the prefix cache."""
        forward, num_ready = verified.forward, len(requests) - num_held
        ready = num_rows[:num_ready] + [0] * num_held
        if any(ready) and verified.acceptance is None:
            self.runner.inject(forward, requests, ready)
        if num_held:
            hold(forward, requests, num_rows, num_held)
            ended = ("stop", "length") if self.settings.prefix_cache else ()
            late = [r for r in requests[num_ready:] if r.finish_reason in ended or len(r.held) >= MOST_HELD]
            catch_up(self.runner, late)

    def _run_chunks(self, window: Window, chunks: list[Chunk]) -> Forward:
        """The target over the chunks' rows, packed where they are not alike."""
        lens = [chunk.num_rows for chunk in chunks]
        self.stats.prompt_tokens += sum(lens)
        width = max(lens)
        rows = [r.ids(r.seq_len, r.seq_len + n) + [0] * (width - n) for r, n in chunks]
        capture = any(request.speculates for request in window.requests)
        return self.runner.forward(window, torch.tensor(rows, device=self.runner.device), lens, capture, compact=True)

    def _first_tokens(self, requests: list[Request], hidden: Tensor) -> Judged:
        """The token after each prompt, from the states [B, H] of the last rows; [-1] where no logit is finite."""
        positions = torch.tensor([request.num_known - 1 for request in requests], device=self.runner.device)
        block = DraftBlock.empty(len(requests), self.runner.device)
        rows = window_of(requests, self.runner.device).rows
        logits = self.runner.logits(hidden)[:, None]
        return self.judge(requests, block, logits, VerifyPlan(torch.ones_like(positions)), rows, positions)

    def _count_rows(self, requests: list[Request], plan: VerifyPlan) -> None:
        """What a request that speculates ran, for the next step's budget. Without a planner it is known: all it may."""
        speculating = sum(request.speculates for request in requests)
        if speculating and self.planner.adapts:
            self.rows_per_request = 1 + (int(plan.num_rows.sum()) - len(requests)) / speculating

    def _record(self, emissions: list[Emission], plan: VerifyPlan, block: DraftBlock) -> None:
        """Count the round for the engine and for each request that speculates, with drafts in this round or without."""
        self.stats.steps += 1
        judged = committed = 0
        for i, (emission, verify_len) in enumerate(zip(emissions, plan.verify_lens.tolist(), strict=True)):
            request, num_output = emission.request, len(emission.token_ids)
            if not request.speculates:
                continue
            num_proposed = block.num_drafts if i < len(block.tokens) else 0
            num_accepted = emission.origins.count("accepted")
            request.figures.record_round(num_proposed, verify_len, num_accepted, num_output)
            self.stats.record_round(num_proposed, verify_len, num_accepted, num_output)
            if verify_len > 1:
                judged += 1
                committed += num_output
        self.watch.record(judged, committed)


def outputs(block: DraftBlock, acceptance: Acceptance) -> list[list[int]]:
    """The round's tokens of each request: its accepted drafts, then the bonus (-1 where the request can not go on)."""
    rows, lens = emitted(block.tokens, acceptance).tolist(), acceptance.commit_len.tolist()
    return [row[:count] for row, count in zip(rows, lens, strict=True)]


def keep_records(
    emissions: list[Emission], window: Window, block: DraftBlock, plan: VerifyPlan, acceptance: Acceptance
) -> None:
    """Append this round to the records of each request that speculates; without drafts it has none of them."""
    drafted, logits = len(block.tokens), block.confidence_logits
    confidence = [] if logits is None else logits.tolist()
    lens, correct = plan.verify_lens.tolist(), acceptance.correct_len.tolist()
    for i, (request, token_ids, *_) in enumerate(emissions):
        if not request.speculates:
            continue
        num_drafts = block.num_drafts if i < drafted else 0
        of_drafts = tuple(confidence[i]) if i < len(confidence) else ()
        request.round_records.append(
            RoundRecord(window.starts[i], lens[i], num_drafts, correct[i], len(token_ids), of_drafts)
        )
