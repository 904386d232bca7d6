"""Who runs next: admission, growth of block tables, preemption when blocks run out."""

from collections import deque
from collections.abc import Iterator

from dspark.engine.blocks import BlockAllocator
from dspark.engine.config import EngineSettings
from dspark.engine.request import Request


class Scheduler:
    """A queue and a running batch over one pool of blocks.

    First come, first served. When the pool runs dry the youngest running request gives its blocks back and waits at the
    head of the queue; its answer so far is kept, and a new prefill brings its keys and values back. The oldest request
    always advances, so the engine never stands still.
    """

    def __init__(self, settings: EngineSettings, allocator: BlockAllocator, window: int) -> None:
        self.settings = settings
        self.allocator = allocator
        self.window = window  # positions from seq_len on that one round may write
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        """All live requests."""
        yield from self.running
        yield from self.waiting

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the pool, all to itself, holds the longest possible answer."""
        return self._blocks(request.max_positions) < self.allocator.num_blocks

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that finished or was aborted; its blocks come back."""
        self.allocator.release(request.block_table)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def admit(self) -> list[Request]:
        """Move waiting requests into the batch, as many as one prefill step takes; each gets its first window.

        One block a running request stays free, so that a newcomer is not thrown out again at once.
        """
        admitted: list[Request] = []
        longest = 0
        while self.waiting and len(self.running) < self.settings.max_batch:
            request = self.waiting[0]
            longest = max(longest, len(request.known_ids))
            if admitted and longest * (len(admitted) + 1) > self.settings.prefill_tokens:
                break
            needed = self._blocks(len(request.known_ids))
            if needed + len(self.running) > self.allocator.num_free:
                break
            self.allocator.extend(request.block_table, needed, expected=self._blocks(request.max_positions))
            self.running.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def grow(self) -> list[Request]:
        """Give every running request the blocks of its next window, oldest first; preempt the youngest if need be.

        Returns the requests that run this round.
        """
        served = 0
        while served < len(self.running):
            request = self.running[served]
            if self.allocator.extend(request.block_table, self._blocks(request.seq_len)):
                served += 1
            else:
                self._preempt(self.running[-1])
        return list(self.running)

    def _preempt(self, request: Request) -> None:
        self.allocator.release(request.block_table)
        request.seq_len = 0
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _blocks(self, num_positions: int) -> int:
        """Blocks for that many committed positions and one window after them."""
        return self.settings.blocks_for(num_positions + self.window)
