"""The engine: requests in, tokens and text out, a step at a time."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from dspark.drafters.base import Drafter
from dspark.draws import draw_integer
from dspark.engine.blocks import BlockAllocator
from dspark.engine.calls import Line
from dspark.engine.config import EngineSettings
from dspark.engine.edits import make_edits
from dspark.engine.grammar import Grammars
from dspark.engine.parallel import make_runner
from dspark.engine.planning import Planner
from dspark.engine.prefix import PrefixIndex
from dspark.engine.profile import costs_of
from dspark.engine.request import Completion, Origin, Request, RoundRecord, SamplingParams, TokenLogprob
from dspark.engine.round import Emission, Round
from dspark.engine.runner import num_window_positions
from dspark.engine.scheduler import Scheduler
from dspark.engine.stats import EngineLoad, EngineStats
from dspark.engine.text import TextStream
from dspark.errors import OverloadError, RequestError
from dspark.models.target import Target
from dspark.spec.sampling import fold_seed


@dataclass(frozen=True)
class StepOutput:
    """What one answer put out in one step; `completion` is set with its last tokens."""

    request_id: str
    token_ids: list[int]
    text_delta: str
    origins: list[Origin]
    completion: Completion | None = None
    index: int = 0  # which of the request's n answers
    logprobs: list[TokenLogprob] | None = None  # one a token, where asked for
    round: RoundRecord | None = None  # of the round that put it out, where rounds are recorded

    @property
    def finished(self) -> bool:
        """Whether this is the answer's last output."""
        return self.completion is not None


class Engine:
    """Serves requests over one target, with a drafter or without.

    Not thread-safe: submit, step and abort from one thread, in any order.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        settings: EngineSettings | None = None,
        line: Line | None = None,
    ) -> None:
        """`line` leads to the processes that have the other shares of a divided pair."""
        self.settings = settings = settings or EngineSettings()
        self.target = target
        self.drafter = drafter if settings.speculate else None
        self.eos_token_ids = target.eos_token_ids
        self.limit = min(settings.max_length, target.config.max_position_embeddings)
        self.stats = EngineStats()
        window = num_window_positions(self.drafter)
        num_blocks = settings.num_blocks or 1 + settings.max_batch * settings.blocks_for(self.limit + window)
        runner = make_runner(line, target.decoder, self.drafter, settings, num_blocks)
        self._grammars = Grammars(target)
        planner = Planner(
            settings.planner,
            runner.num_drafts,
            settings.max_batch,
            costs_of(settings, target, self.drafter, line),
            has_confidence=self.drafter is not None and self.drafter.confidence_head is not None,
            temperatures=settings.confidence_temperatures,
        )
        self._round = Round(runner, planner, self.stats, settings, self._grammars)
        index = PrefixIndex(
            settings.block_size, self.drafter is not None and self.drafter.context_reads_next, settings.prefix_cache
        )
        self._scheduler = Scheduler(settings, BlockAllocator(num_blocks, index), self.stats, runner.num_drafts, window)
        # Not tokenizer.decode: its cleaning of blanks would change text that has been given out.
        self._decode: Callable[[list[int]], str] = target.tokenizer.backend_tokenizer.decode  # skips special tokens
        self._requests: dict[str, list[Request]] = {}  # the answers of each that are under way
        self._names = (f"request-{number}" for number in count())

    @property
    def load(self) -> EngineLoad:
        """Requests and cache blocks, as they stand between two steps."""
        scheduler, allocator = self._scheduler, self._scheduler.allocator
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=allocator.num_free,
            cached_blocks=allocator.num_idle,
            num_blocks=allocator.num_blocks - 1,
        )

    @property
    def round_time_errors(self) -> list[float]:
        """Of recent rounds that were planned by costs: |expected - measured| / measured seconds, oldest first."""
        return list(self._round.planner.time_errors)

    @property
    def no_thresholds(self) -> str | None:
        """Why requests can have no `draft_threshold` here; None where they can."""
        if self.drafter is None or self.drafter.confidence_head is None:
            return "it needs a drafter with a confidence head, which this engine has not: leave it out"
        if self.settings.verification == "block":
            return "verification block needs verify lengths that do not depend on the drafts: leave it out"
        return None

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> str:
        """Queue a request and return its id. A lower `priority` is served first (`EngineSettings.aging_steps`).

        All `params.n` answers carry the id, told apart by their index. Raises RequestError for a prompt that can not be
        served or parameters that do not fit the target, and OverloadError when `max_waiting` requests wait
        for a place.
        """
        if request_id is None:
            request_id = next(name for name in self._names if name not in self._requests)
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use: give each live request its own")
        prompt_ids = list(prompt_ids)
        self._check_prompt(prompt_ids)
        if params.draft_threshold is not None and (why := self.no_thresholds):
            raise RequestError(f"draft_threshold: {why}")
        answers = [self._request(prompt_ids, params, request_id, index) for index in range(params.n)]
        if not self._scheduler.can_ever_fit(answers[0]):
            raise RequestError(
                f"prompt of {len(prompt_ids)} tokens with max_tokens {params.max_tokens} never fits the cache: "
                "lower max_tokens or raise num_blocks"
            )
        if self._scheduler.is_full:
            raise OverloadError(
                f"{self.settings.max_waiting} requests wait for a place already (max_waiting): try again later"
            )
        self._requests[request_id] = answers
        for request in answers:
            self._scheduler.add(request, priority)
        return request_id

    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one round for the requests that decode, and the next rows of the prompts that are under way."""
        decoding, chunks = self._scheduler.schedule()
        emissions = self._round.decode(decoding) if decoding else []
        self._scheduler.round_rows = self._round.rows_per_request
        if chunks:
            emissions += self._round.prefill(chunks)
        return self._finish(emissions)

    def abort(self, request_id: str) -> Completion | None:
        """Drop a request, waiting or running, with all its answers that are still under way.

        Returns what the first of these has so far; None if the request is not (or no longer) live.
        """
        dropped = self._requests.pop(request_id, [])
        for request in dropped:
            self._scheduler.remove(request)
            self._round.planner.release(request)
            request.finish_reason = "abort"
            request.stream.finish()
        return self._complete(dropped[0]) if dropped else None

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Answer all prompts, in their order, and the n answers to one prompt one after the other.

        Raises as `submit` does, before any is started.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(each)} params: give one for all, or one each")
        ids: list[str] = []
        try:
            for prompt, param in zip(prompts, each, strict=True):
                ids.append(self.submit(prompt, param))
        except (RequestError, OverloadError):
            for request_id in ids:
                self.abort(request_id)
            raise
        wanted = [(request_id, index) for request_id, param in zip(ids, each, strict=True) for index in range(param.n)]
        done: dict[tuple[str, int], Completion] = {}
        while not done.keys() >= set(wanted):
            done |= {(out.request_id, out.index): out.completion for out in self.step() if out.completion is not None}
        return [done[answer] for answer in wanted]

    def check_integrity(self) -> None:
        """Assert that every cache block is free or held by live requests alone, and that lengths agree."""
        self._scheduler.check_integrity()
        live = {request for answers in self._requests.values() for request in answers}
        assert set(self._scheduler) == live, "a request is lost or dead but scheduled"

    def _finish(self, emissions: list[Emission]) -> list[StepOutput]:
        """Remove finished requests, and turn emissions into outputs."""
        outputs = []
        for request, token_ids, text, origins, logprobs in emissions:
            self._scheduler.list_blocks(request)
            if request.finish_reason == "error" and self.settings.attention == "flex":
                self._round.runner.wipe(
                    [b for b in request.block_table if self._scheduler.allocator.num_holders(b) == 1]
                )
            if token_ids and request.figures.first_token_seconds is None:
                request.figures.first_token_seconds = time.perf_counter() - request.submitted_at
            completion = None
            if request.finish_reason is not None:
                self._scheduler.remove(request)
                self._round.planner.release(request)
                self._requests[request.request_id].remove(request)
                if not self._requests[request.request_id]:
                    del self._requests[request.request_id]
                completion = self._complete(request)
            self.stats.output_tokens += len(token_ids)
            if token_ids or text or completion:
                asked = None if request.params.logprobs is None else logprobs
                decoded = bool(origins) and origins[-1] != "prefill"
                record = request.round_records[-1] if decoded and request.round_records else None
                outputs.append(
                    StepOutput(request.request_id, token_ids, text, origins, completion, request.index, asked, record)
                )
        return outputs

    def _complete(self, request: Request) -> Completion:
        request.figures.total_seconds = time.perf_counter() - request.submitted_at
        return request.completion()

    def _request(self, prompt_ids: list[int], params: SamplingParams, request_id: str, index: int) -> Request:
        """One answer to a prompt. The first has the seed given, the others seeds that follow from it."""
        stops = frozenset(params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self.eos_token_ids))
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            seed=fold_seed(draw_integer("answer", seed, index) if index else seed),
            limit=self.limit,
            stop_token_ids=stops,
            stream=TextStream(self._decode, params.stop, params.min_tokens),
            speculates=params.speculate and self.drafter is not None,
            index=index,
            edits=make_edits(params, prompt_ids, stops, self.target, self._grammars),
            submitted_at=time.perf_counter(),
        )

    def _check_prompt(self, prompt_ids: list[int]) -> None:
        if not prompt_ids:
            raise RequestError("prompt is empty: give at least one token")
        if len(prompt_ids) >= self.limit:
            raise RequestError(
                f"prompt has {len(prompt_ids)} tokens, and prompt and answer together may have {self.limit} "
                "(max_length, and the model's max_position_embeddings): shorten the prompt or raise max_length"
            )
        vocab_size = self.target.config.vocab_size
        if not (min(prompt_ids) >= 0 and max(prompt_ids) < vocab_size):
            raise RequestError(f"prompt has a token id outside 0..{vocab_size - 1}: use the target's own tokenizer")
