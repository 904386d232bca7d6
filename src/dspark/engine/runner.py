"""The two networks and their caches: one forward of the target, one draft of the drafter, one injection.

Shapes: B requests, T rows a request, H hidden, m tapped layers, V vocabulary, G drafts a round.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.engine.config import EngineSettings
from dspark.engine.request import Request
from dspark.models.attention import AttentionBatch, PackedBatch
from dspark.models.decoder import Decoder, DecoderOutput
from dspark.spec.layout import PackedRows, pack, row_tier
from dspark.spec.sampling import round_seed
from dspark.spec.types import Acceptance, DraftBlock, SamplingRows


class Window(NamedTuple):
    """The requests of one round, and where each of them stands."""

    requests: list[Request]
    starts: list[int]  # seq_len of each: the position of its first row
    positions: Tensor  # i64 [B], the same
    anchors: Tensor  # i64 [B]
    rows: SamplingRows

    @property
    def block_tables(self) -> list[list[int]]:
        """One table a request."""
        return [request.block_table for request in self.requests]

    def first(self, count: int) -> "Window":
        """The first requests of it alone."""
        if count == len(self.requests):
            return self
        rows = SamplingRows(*(column[:count] for column in self.rows))
        return Window(self.requests[:count], self.starts[:count], self.positions[:count], self.anchors[:count], rows)

    def rest(self, count: int) -> "Window":
        """All but the first requests of it."""
        rows = SamplingRows(*(column[count:] for column in self.rows))
        return Window(self.requests[count:], self.starts[count:], self.positions[count:], self.anchors[count:], rows)


class Forward(NamedTuple):
    """What the target made of the rows it ran: in places [B, T], or packed in [1, P]."""

    is_packed: bool
    positions: Tensor  # i64 [B, T]
    slots: Tensor  # i64 [B, T], where keys and values went, and where the drafter's context goes
    hidden: Tensor  # [B, T, H], before the final norm
    features: Tensor  # [B, T, m, H]; m = 0 when nothing was captured
    ran: PackedRows  # the real rows, request by request

    @property
    def states(self) -> Tensor:
        """The hidden states [N, H] of the real rows, request by request."""
        hidden = self.hidden.flatten(0, 1)
        if self.is_packed:
            return hidden[: self.ran.num_real]
        return hidden if len(hidden) == self.ran.num_real else hidden[self.ran.flat(self.hidden.shape[1])]


class Epilogue(NamedTuple):
    """How a round of greedy requests may end on the device: see `engine.graphs`."""

    verify_lens: list[int]
    gives_context: list[bool]  # whose committed rows the drafter is given


class Verified(NamedTuple):
    """What the target says of one round."""

    forward: Forward
    logits: Tensor | None  # [N, V] of the real rows, request by request; None where the round has judged itself
    acceptance: Acceptance | None = None  # where it has, and has given the drafter its context


class Runner:
    """Runs target and drafter over the same block tables. All rows are provisional until committed and injected."""

    def __init__(self, decoder: Decoder, drafter: Drafter | None, settings: EngineSettings, num_blocks: int) -> None:
        self.decoder = decoder
        self.drafter = drafter
        self.block_size = settings.block_size
        self.device = decoder.embed_tokens.weight.device
        self.cache = decoder.new_cache(num_blocks, settings.block_size)
        self.cache.attention = settings.attention
        self.num_drafts = 0
        if drafter is not None:
            self.draft_cache = drafter.new_cache(num_blocks, settings.block_size)
            self.draft_cache.attention = self.cache.attention
            self.num_drafts = min(drafter.config.num_drafts, settings.num_draft_tokens or drafter.config.num_drafts)

    def forward(
        self, window: Window, token_ids: Tensor, query_lens: list[int], capture: bool, compact: bool = False
    ) -> Forward:
        """Run token_ids [B, T] from each request's start on, causal; rows t >= query_lens[b] are padding.

        compact: run the real rows alone, packed, where that saves any.
        """
        size, width = token_ids.shape
        positions = window.positions[:, None] + torch.arange(width, device=self.device)
        batch: AttentionBatch | PackedBatch
        batch = AttentionBatch.build(positions, query_lens, window.block_tables, self.block_size)
        num_rows = row_tier(sum(query_lens))
        compact = compact and num_rows < size * width
        ran = pack(torch.tensor(query_lens, device=self.device), num_rows if compact else 0)
        if compact:
            batch = PackedBatch.build(batch, ran)
            token_ids = batch.collect(token_ids)
        taps = self.drafter.config.target_layer_ids if capture and self.drafter is not None else ()
        output = self.run(token_ids, batch, taps)
        return Forward(compact, batch.positions, batch.slots, output.hidden, output.taps, ran)

    def verify(
        self,
        window: Window,
        block: DraftBlock,
        lens: list[int],
        compact: bool,
        epilogue: Epilogue | None = None,
    ) -> Verified:
        """Run the first lens[b] rows of each request, its anchor and then its drafts, causal.

        The block has drafts of the first requests. An epilogue is for runners that record: here nothing comes of it.
        """
        drafted, width = len(block.tokens), max(lens)
        token_ids = window.anchors.new_zeros(len(lens), width)
        token_ids[:, 0] = window.anchors
        token_ids[:drafted, 1:] = block.tokens[:, : width - 1]
        capture = any(request.speculates for request in window.requests)
        forward = self.forward(window, token_ids, lens, capture, compact)
        return Verified(forward, self.logits(forward.states))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        return self.decoder.logits(hidden)

    def draft(self, window: Window) -> DraftBlock:
        """One block of drafts per request."""
        assert self.drafter is not None
        batch = self.drafter.draft_batch(window.starts, window.block_tables, self.block_size)
        rows = window.rows._replace(seed=round_seed(window.rows.seed, window.positions))
        return self.propose(window.anchors, batch, rows, window.positions)

    def inject(self, forward: Forward, requests: list[Request], num_rows: list[int]) -> None:
        """Give the drafter the first num_rows[b] rows of each request, committed, and the tokens that follow them."""
        assert self.drafter is not None
        lens = torch.tensor(num_rows, device=self.device)
        if forward.is_packed:
            keep = forward.ran.among_first(lens)[None]  # [1, P]
        else:
            keep = torch.arange(forward.features.shape[1], device=self.device) < lens[:, None]  # [B, T]
        following = [r.ids(r.seq_len + 1 - count, r.seq_len + 1) for r, count in zip(requests, num_rows, strict=True)]
        next_ids = torch.tensor([token for ids in following for token in ids], device=self.device)
        index = keep.flatten().nonzero().squeeze(1)
        features, positions, slots = (
            table.flatten(0, 1).index_select(0, index) for table in (forward.features, forward.positions, forward.slots)
        )
        self.write_context(features, next_ids, positions, slots)

    def wipe(self, blocks: list[int]) -> None:
        """Make blocks zero that a broken request leaves: whoever gets them may multiply what is masked by zero."""
        for cache in (self.cache, self.draft_cache) if self.drafter is not None else (self.cache,):
            cache.wipe(blocks)

    # The calls of the networks, on tensors alone: what several processes that share them make together.

    def run(self, token_ids: Tensor, batch: AttentionBatch | PackedBatch, taps: tuple[int, ...]) -> DecoderOutput:
        """The target over token_ids [B, T] or [1, P]: see `Decoder.forward`."""
        output: DecoderOutput = self.decoder(token_ids, batch, self.cache, taps)
        return output

    def propose(
        self, anchors: Tensor, batch: AttentionBatch, rows: SamplingRows | None, positions: Tensor
    ) -> DraftBlock:
        """The drafter's block behind anchors [B] at positions [B]: see `Drafter.propose`."""
        assert self.drafter is not None
        return self.drafter.propose(anchors, batch, self.draft_cache, rows, positions, self.num_drafts)

    def write_context(self, features: Tensor, next_ids: Tensor, positions: Tensor, slots: Tensor) -> None:
        """The drafter's context of committed rows: see `Drafter.inject`."""
        assert self.drafter is not None
        self.drafter.inject(features, next_ids, positions, slots, self.draft_cache)


def num_window_positions(drafter: Drafter | None) -> int:
    """Positions from seq_len on that one round may write, in either cache: the block's rows and the verify rows."""
    return 1 if drafter is None else max(drafter.config.num_drafts + 1, drafter.config.query_rows)


def are_greedy(requests: list[Request]) -> bool:
    """Whether nobody samples."""
    return all(request.params.temperature == 0 for request in requests)


def may_judge_itself(requests: list[Request]) -> bool:
    """Whether a round of these requests may end on the device: greedy, and nobody edits the logits or reads them."""
    return are_greedy(requests) and all(r.edits is None and r.params.logprobs is None for r in requests)


def window_of(requests: list[Request], device: torch.device) -> Window:
    """Gather what a batch carries from round to round."""
    starts = [request.seq_len for request in requests]
    anchors = [request.token_ids[-1] if request.token_ids else 0 for request in requests]
    params = [request.params for request in requests]

    numbers = [starts, anchors, [p.top_k for p in params], [request.seed for request in requests]]
    shares = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    positions, anchor_ids, top_k, seed = torch.tensor(numbers, dtype=torch.long, device=device).unbind()
    temperature, top_p, min_p = torch.tensor(shares, dtype=torch.float32, device=device).unbind()
    return Window(requests, starts, positions, anchor_ids, SamplingRows(temperature, top_k, top_p, min_p, seed))
