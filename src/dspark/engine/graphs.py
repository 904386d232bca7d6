"""Rounds from recordings: what a round runs on the device, in a few fixed sizes, replayed instead of launched anew.

A round of greedy requests is two replays: the drafts (network, sequential head, confidence) and their verification,
which ends with the acceptance and with the drafter's context of the committed rows if nobody wants to see the logits.
Whatever does not fit runs as `Runner` runs it; results are the same either way. Prompts always do.

Sizes are rounded up, so that there are few: requests to powers of two, verify rows of a request to 1 or all, rows in
all to 8, 12, 16, 24, 32 and so on, keys to powers of two of cache blocks. What the rounding adds writes to a scratch
block that no table lists and nobody reads: block 0, which stands where tables have no block, must stay zero.

Shapes: B requests, T verify rows of each at most, G = T - 1 drafts, P packed rows, K blocks of a table, m tapped
layers, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.engine.config import EngineSettings
from dspark.engine.recording import Recorder
from dspark.engine.runner import Epilogue, Forward, Runner, Verified, Window, are_greedy, num_window_positions
from dspark.errors import ConfigError
from dspark.models.attention import AttentionBatch, PackedBatch
from dspark.models.decoder import Decoder
from dspark.spec.accept import accept_choices, choices, emitted
from dspark.spec.layout import PackedRows
from dspark.spec.types import Acceptance, DraftBlock

MOST_RECORDINGS = 96  # each keeps its outputs; rounds of further sizes are not recorded
LEAST_BLOCKS, LEAST_ROWS = 8, 8  # of a table and in all: smaller sizes would be more recordings for little
_PAD = (1, 0, 0, 1, 0)  # what columns of a request hold that is nobody's: see `Numbers`


class Size(NamedTuple):
    """What is fixed in a recording."""

    num_requests: int  # B
    num_blocks: int  # K
    width: int = 0  # T
    num_rows: int = 0  # P
    judges: bool = False  # whether acceptance and context are part of it


class Numbers(NamedTuple):
    """What a recorded function knows of its requests: the columns of one matrix i64 [B, 5 + K]."""

    starts: Tensor  # i64 [B], seq_len
    anchors: Tensor  # i64 [B]
    lens: Tensor  # i64 [B], rows that run; 0 for a request that is nobody's
    verify_lens: Tensor  # i64 [B]
    gives_context: Tensor  # i64 [B], 0 or 1
    tables: Tensor  # i64 [B, K]

    @classmethod
    def of(cls, matrix: Tensor) -> Numbers:
        """Views of the matrix."""
        starts, anchors, lens, verify_lens, gives_context = matrix[:, : len(_PAD)].unbind(1)
        return cls(starts, anchors, lens, verify_lens, gives_context, matrix[:, len(_PAD) :])


class Ran(NamedTuple):
    """What a recorded verification gives, row by row as they are packed."""

    hidden: Tensor  # [1, P, H]
    features: Tensor  # [1, P, m, H]
    positions: Tensor  # i64 [1, P]
    slots: Tensor  # i64 [1, P]
    requests: Tensor  # i64 [P]
    offsets: Tensor  # i64 [P]
    logits: Tensor | None  # [P, V], unless the round has been judged
    correct_len: Tensor | None = None  # i64 [B], if it has
    bonus: Tensor | None = None  # i64 [B]


class RecordedRunner(Runner):
    """A runner that drafts and verifies by recordings where it can."""

    def __init__(self, decoder: Decoder, drafter: Drafter | None, settings: EngineSettings, num_blocks: int) -> None:
        super().__init__(decoder, drafter, settings, num_blocks + 1)
        self.scratch = num_blocks * settings.block_size  # a slot of the block that the allocator does not know
        self.recorder = Recorder(self.device, MOST_RECORDINGS)
        self.num_judged = 0  # rounds that judged themselves
        self._taps = () if drafter is None else drafter.config.target_layer_ids
        self._max_batch = settings.max_batch
        self._window = num_window_positions(drafter)
        self._max_blocks = settings.blocks_for(settings.max_length + self._window)
        self._proposed: DraftBlock | None = None  # the last block that came from a recording

    def draft(self, window: Window) -> DraftBlock:
        """See `Runner.draft`. Sampled drafts are not recorded: their filters read values back."""
        size = self._size(window.starts, self._window)
        self._proposed = None
        if not (are_greedy(window.requests) and self.recorder.takes(size)):
            return super().draft(window)
        count = len(window.requests)
        numbers = self._numbers(size, window, [[1] * count])
        block = self.recorder.run(size, self.draft_recorded, (numbers,), DraftBlock)
        # Copies, since the verification that they go into is a recording as well.
        tokens, confidence = block.tokens[:count].clone(), block.confidence_logits
        confidence = None if confidence is None else confidence[:count].clone()
        self._proposed = DraftBlock(tokens, block.probs[:count], block.token_ids, confidence)
        return self._proposed

    def verify(
        self, window: Window, block: DraftBlock, lens: list[int], compact: bool, epilogue: Epilogue | None = None
    ) -> Verified:
        """See `Runner.verify`. With an epilogue the round judges itself, if its drafts come from a recording too."""
        judges = epilogue is not None and (not len(block.tokens) or block is self._proposed)
        size = self._size(window.starts, max(lens))
        width = 1 if max(lens) == 1 else 1 + self.num_drafts
        num_rows = size.num_requests * width
        if compact:
            num_rows = min(num_rows, row_size(sum(lens)))
        size = size._replace(width=width, num_rows=num_rows, judges=judges)
        if not self.recorder.takes(size):
            return super().verify(window, block, lens, compact)
        rest = [epilogue.verify_lens, list(map(int, epilogue.gives_context))] if epilogue else []
        numbers = self._numbers(size, window, [lens, *rest])
        drafts = block.tokens.new_zeros(size.num_requests, width - 1)
        drafts[: len(block.tokens)] = block.tokens[:, : width - 1]
        ran = self.recorder.run(
            size, lambda matrix, tokens: self.verify_recorded(size, matrix, tokens), (numbers, drafts), Ran
        )
        rows = PackedRows(ran.requests, ran.offsets, sum(lens))
        forward = Forward(True, ran.positions, ran.slots, ran.hidden, ran.features, rows)
        if ran.correct_len is None or ran.bonus is None:
            assert ran.logits is not None
            return Verified(forward, ran.logits[: rows.num_real])
        self.num_judged += 1
        count = len(window.requests)
        return Verified(forward, None, Acceptance(ran.correct_len[:count], ran.bonus[:count]))

    # What is recorded: functions of tensors that read nothing back.

    def draft_recorded(self, matrix: Tensor) -> DraftBlock:
        """The drafts of greedy requests."""
        assert self.drafter is not None
        numbers = Numbers.of(matrix)
        positions, visible_end = self.drafter.draft_rows(numbers.starts)
        real = (numbers.lens > 0)[:, None].expand_as(positions)
        batch = self._lay_out(positions, visible_end, real, numbers.tables)
        return self.propose(numbers.anchors, batch, None, numbers.starts)

    def verify_recorded(self, size: Size, matrix: Tensor, drafts: Tensor) -> Ran:
        """The verification of drafts [B, G]."""
        numbers = Numbers.of(matrix)
        offsets = torch.arange(size.width, device=self.device)
        positions = numbers.starts[:, None] + offsets
        real = offsets < numbers.lens[:, None]
        dense = self._lay_out(positions, positions + 1, real, numbers.tables)
        rows, is_real = pack_static(numbers.lens, size.num_rows)
        batch = self._pack(dense, rows, is_real)
        token_ids = batch.collect(torch.cat([numbers.anchors[:, None], drafts], dim=1))
        output = self.run(token_ids, batch, self._taps)
        logits = self.logits(output.hidden[0])  # [P, V]
        ran = Ran(output.hidden, output.taps, batch.positions, batch.slots, rows.requests, rows.offsets, logits)
        if not size.judges:
            return ran
        best = choices(logits)[batch.rows].view(positions.shape)  # what no row stands for lies behind verify_lens
        acceptance = accept_choices(drafts, best, numbers.verify_lens)
        if self.drafter is not None:
            self._give_context(ran, is_real, numbers, drafts, acceptance)
        return ran._replace(logits=None, correct_len=acceptance.correct_len, bonus=acceptance.bonus)

    def _give_context(
        self, ran: Ran, is_real: Tensor, numbers: Numbers, drafts: Tensor, acceptance: Acceptance
    ) -> None:
        """Inject the rows of anchors and accepted drafts; all others go to the scratch block.

        Where a stop cuts what is put out, rows behind it are injected too. Their request has ended, and blocks are kept
        for others up to its last committed row alone.
        """
        committed = is_real & (ran.offsets <= acceptance.correct_len[ran.requests])
        committed &= numbers.gives_context[ran.requests] > 0
        following = emitted(drafts, acceptance)[ran.requests, ran.offsets].clamp_min(0)
        slots = torch.where(committed, ran.slots[0], self.scratch)
        self.write_context(ran.features[0], following, ran.positions[0], slots)

    def _lay_out(self, positions: Tensor, visible_end: Tensor, real: Tensor, tables: Tensor) -> AttentionBatch:
        """`AttentionBatch.build` with nothing read back: positions, visible_end and real [B, T], tables [B, K]."""
        size, num_keys = self.block_size, tables.shape[1] * self.block_size
        positions, visible_end = torch.where(real, positions, 0), torch.where(real, visible_end, 1)
        first = tables * size
        slots = first.gather(1, positions // size) + positions % size
        key = torch.arange(num_keys, device=self.device)
        kv_slots = first.repeat_interleave(size, dim=1) + key % size
        kv_slots = torch.where(key < visible_end.amax(dim=1, keepdim=True), kv_slots, 0)
        return AttentionBatch(
            positions=positions,
            slots=torch.where(real, slots, self.scratch),
            visible_end=visible_end,
            num_keys=num_keys,
            contiguous=None,
            kv_slots=kv_slots.flatten(),
            real_rows=None,
            causal_from_zero=False,
            tables=tables,
            is_static=True,
        )

    def _pack(self, dense: AttentionBatch, rows: PackedRows, is_real: Tensor) -> PackedBatch:
        """`PackedBatch.build` likewise: rows that own no request are written too, to the scratch block."""
        B, T = dense.positions.shape
        places = torch.where(is_real, rows.requests * T + rows.offsets, 0)
        standing = torch.where(is_real, places, B * T)
        inverse = places.new_zeros(B * T + 1).scatter(0, standing, torch.arange(len(places), device=self.device))
        positions = torch.where(is_real, dense.positions.flatten()[places], 0)
        slots = torch.where(is_real, dense.slots.flatten()[places], self.scratch)
        return PackedBatch(dense, positions[None], slots[None], rows.num_real, places, inverse[: B * T])

    def _size(self, starts: list[int], num_positions: int) -> Size:
        """Requests and blocks, rounded up."""
        needed = -(-(max(starts) + num_positions) // self.block_size)
        num_blocks = max(min(power_of_two(needed), self._max_blocks), LEAST_BLOCKS)
        return Size(min(power_of_two(len(starts)), self._max_batch), num_blocks)

    def _numbers(self, size: Size, window: Window, columns: list[list[int]]) -> Tensor:
        """The matrix of `Numbers`, on the host."""
        matrix = np.zeros((size.num_requests, len(_PAD) + size.num_blocks), dtype=np.int64)
        matrix[:, : len(_PAD)] = _PAD
        count = len(window.requests)
        anchors = [request.token_ids[-1] for request in window.requests]
        for i, column in enumerate([window.starts, anchors, *columns]):
            matrix[:count, i] = column
        for row, table in zip(matrix[:, len(_PAD) :], window.block_tables, strict=False):
            row[: len(table)] = table[: size.num_blocks]
        return torch.from_numpy(matrix)


def records(settings: EngineSettings, decoder: Decoder) -> bool:
    """Whether an engine over this decoder records its rounds. Raises ConfigError where it is told to and can not."""
    if settings.graphs == "off":
        return False
    if decoder.config.moe is not None:
        raise ConfigError("graphs on needs a target without experts, whose rows the host deals out: set it to off")
    if settings.attention == "flex" and decoder.embed_tokens.weight.device.type != "cuda":
        raise ConfigError("graphs on records flex attention on CUDA devices alone: set attention to sdpa")
    return True


def pack_static(lens: Tensor, num_rows: int) -> tuple[PackedRows, Tensor]:
    """`spec.layout.pack` with nothing read back: the rows, all P of them, and which are real, bool [P]."""
    ends, row = lens.cumsum(0), torch.arange(num_rows, device=lens.device)
    is_real = row < ends[-1]
    requests = torch.where(is_real, torch.searchsorted(ends, row, right=True), 0)
    offsets = torch.where(is_real, row - (ends - lens)[requests], 0)
    return PackedRows(requests, offsets, num_rows), is_real


def row_size(num_rows: int) -> int:
    """The next power of two, or the half between two of them."""
    whole = power_of_two(max(num_rows, LEAST_ROWS))
    return whole if num_rows > whole * 3 // 4 or whole == LEAST_ROWS else whole * 3 // 4


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
