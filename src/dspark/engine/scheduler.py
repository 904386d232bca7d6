"""Who runs next: order, admission, growth of block tables, prompt chunks, preemption when room runs out."""

import math
import time
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from dspark.engine.blocks import BlockAllocator
from dspark.engine.config import EngineSettings
from dspark.engine.request import Request
from dspark.engine.stats import EngineStats

MOST_PADDING = 2  # the scores of one forward may be made for so many times as many rows as it runs
_rank = attrgetter("rank")


class Chunk(NamedTuple):
    """The next `num_rows` rows of a request's prompt, from its seq_len on."""

    request: Request
    num_rows: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.request.seq_len + self.num_rows == self.request.num_known


class Step(NamedTuple):
    """What runs in one step: a round for the decoding requests, and one forward over the chunks."""

    decoding: list[Request]
    chunks: list[Chunk]


class Scheduler:
    """A queue and a running batch over one pool of blocks.

    Everything goes by rank: a request of priority p has the rank of one of priority 0 that came p * `aging_steps` steps
    later, and among equals the first one comes first. So nobody can be overtaken for ever. No request runs while one of
    lower rank waits: a newcomer takes the places of those behind it if there is no other room, and when the pool runs
    dry the last one gives its blocks back. Its answer so far is kept, and running its tokens again, as far as the
    prefix cache lost them, brings its keys and values back. The first one always advances, so the engine never stands
    still.
    """

    def __init__(
        self,
        settings: EngineSettings,
        allocator: BlockAllocator,
        stats: EngineStats,
        num_drafts: int,
        window: int,
    ) -> None:
        self.settings = settings
        self.allocator = allocator
        self.stats = stats
        self.round_rows = 1.0 + num_drafts  # what a request that speculates is expected to run in a round
        self.window = window  # positions from seq_len on that one round may write
        self.waiting: list[Request] = []  # by rank, as is `running`
        self.running: list[Request] = []  # those that hold blocks
        self._num_steps = 0
        self._num_added = 0

    def __iter__(self) -> Iterator[Request]:
        """All live requests."""
        yield from self.running
        yield from self.waiting

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the pool, all to itself, holds the longest possible answer."""
        return self._blocks(request.max_positions) < self.allocator.num_blocks

    @property
    def is_full(self) -> bool:
        """Whether no further request may wait. Those that free places are left for do not count."""
        limit, num_places = self.settings.max_waiting, self.settings.max_batch - len(self.running)
        return limit is not None and len(self.waiting) >= limit + num_places

    def add(self, request: Request, priority: int) -> None:
        """Queue a new request."""
        self._num_added += 1
        request.rank = (self._num_steps + priority * self.settings.aging_steps, self._num_added)
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Forget a request that finished or was aborted; its blocks come back."""
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)

    def schedule(self) -> Step:
        """Choose what the next step runs, and take the blocks for it."""
        self._num_steps += 1
        decoding = self._grow()
        num_rows = sum(self.round_rows if request.speculates else 1 for request in decoding)
        chunks = self._chunks(max(self.settings.step_tokens - math.ceil(num_rows), self.settings.block_size))
        return Step([request for request in decoding if request.is_decoding], chunks)  # but those displaced since

    def list_blocks(self, request: Request) -> None:
        """A step has committed rows of a request: let others find the blocks that are full now.

        A request that failed leaves nothing behind, since what broke it may be in its blocks.
        """
        if request.finish_reason == "error":
            for block in request.block_table:
                self.allocator.index.forget(block)
        else:
            self.allocator.index.add(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away and put it back in the queue."""
        self.running.remove(request)
        self._release(request)
        insort(self.waiting, request, key=_rank)
        request.figures.preemptions += 1
        self.stats.preemptions += 1

    def check_integrity(self) -> None:
        """Assert that blocks, lengths and order are in step."""
        self.allocator.check_integrity(request.block_table for request in self)
        size = self.settings.block_size
        for request in self.waiting:
            assert not request.block_table, f"{request.request_id} waits and holds blocks"
            assert request.seq_len == request.reserved_len == request.num_listed == 0, f"{request.request_id} is not 0"
            assert not request.held, f"{request.request_id} waits and holds rows back"
        for request in self.running:
            table, name = request.block_table, request.request_id
            assert request.seq_len <= request.num_known, f"{name}: more is committed than known"
            assert request.seq_len <= request.reserved_len <= len(table) * size, f"{name}: rows without blocks"
            assert request.num_listed * size <= request.context_len, f"{name}: a block is listed without its context"
            assert len(table) == self.settings.blocks_for(request.reserved_len), f"{name}: blocks without use"
            first = (request.seq_len - request.is_decoding) // size  # a chain begins on the last committed row
            alone = [self.allocator.num_holders(block) == 1 for block in table[first:]]
            assert all(alone), f"{name}: writes where others read"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "the queue is out of order"

    def _grow(self) -> list[Request]:
        """Give every decoding request the blocks of its next window, the first one first; preempt the last if need be.

        Returns the decoding requests.
        """
        served = 0
        while served < len(self.running):
            request = self.running[served]
            if not request.is_decoding or self._reserve(request, request.seq_len):
                served += 1
            else:
                self.preempt(self.running[-1])
        return [request for request in self.running if request.is_decoding]

    def _chunks(self, num_rows: int) -> list[Chunk]:
        """As many prompt rows as fit; rows run packed, but scores are padded to the widest chunk."""
        chunks: list[Chunk] = []
        left, width = num_rows, 0
        for request in self._prompts():
            room = min(left, MOST_PADDING * num_rows // (len(chunks) + 1))
            chunks.append(Chunk(request, min(request.num_known - request.seq_len, room)))
            left -= chunks[-1].num_rows
            width = max(width, chunks[-1].num_rows)
            if not left or (len(chunks) + 1) * width > MOST_PADDING * num_rows:
                break
        return chunks

    def _prompts(self) -> Iterator[Request]:
        """The requests whose prompts are under way, and newcomers as they are admitted, by rank."""
        given: set[Request] = set()
        may_admit = True
        while True:
            request = next((r for r in self.running if not (r.is_decoding or r in given)), None)
            if may_admit and self.waiting and (request is None or self.waiting[0].rank < request.rank):
                request = self.waiting[0]
                may_admit = self._admit(request)
                if not may_admit:
                    continue
            if request is None:
                return
            given.add(request)
            yield request

    def _admit(self, request: Request) -> bool:
        """Move a waiting request into the batch with the blocks that the cache has of it, and new ones for the rest.

        One block a running request stays free, so that a newcomer is not thrown out again at once. A request waits for
        another one ahead of it that is just about to compute what it would look for in the cache.
        """
        index, found = self.allocator.index, self.allocator.index.match(request)
        if any(r.rank < request.rank and index.is_computing(request, len(found), r) for r in self.running):
            return False
        self.allocator.share(request.block_table, found)
        if not self._make_room(request):
            self.allocator.release(request.block_table)
            return False
        self.waiting.remove(request)
        request.seq_len = len(found) * self.settings.block_size
        request.num_listed = len(found)
        reserved = self._reserve(request, request.num_known, expected=self._blocks(request.max_positions))
        assert reserved, "room was made for it"
        insort(self.running, request, key=_rank)
        self._count_admission(request)
        return True

    def _make_room(self, request: Request) -> bool:
        """Whether there is a place and blocks for a newcomer, once those behind it give up theirs if they must."""
        needed = self._blocks(request.num_known) - len(request.block_table)
        victims: list[Request] = []
        while True:
            left = len(self.running) - len(victims)
            num_free = self.allocator.num_free + self.allocator.num_released_by(r.block_table for r in victims)
            if left < self.settings.max_batch and needed + left <= num_free:
                break
            if not left or self.running[left - 1].rank < request.rank:
                return False
            victims.append(self.running[left - 1])
        for victim in victims:
            self.preempt(victim)
        return True

    def _reserve(self, request: Request, num_positions: int, expected: int = 0) -> bool:
        """Take the blocks for that many committed positions and a window after them."""
        if not self.allocator.extend(request.block_table, self._blocks(num_positions), expected):
            return False
        request.reserved_len = max(request.reserved_len, num_positions + self.window)
        return True

    def _release(self, request: Request) -> None:
        self.allocator.release(request.block_table)
        request.held.clear()
        request.seq_len = request.reserved_len = request.num_listed = 0

    def _count_admission(self, request: Request) -> None:
        if request.figures.queue_seconds is None:
            request.figures.queue_seconds = time.perf_counter() - request.submitted_at
            request.figures.cached_tokens = request.seq_len
        self.stats.looked_up_tokens += request.num_known
        self.stats.cached_tokens += request.seq_len

    def _blocks(self, num_positions: int) -> int:
        """Blocks for that many committed positions and one window after them."""
        return self.settings.blocks_for(num_positions + self.window)
