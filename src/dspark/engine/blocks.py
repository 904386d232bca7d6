"""Cache blocks: who holds which. One block table serves the target's cache and the drafter's."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import takewhile

from dspark.engine.prefix import PrefixIndex
from dspark.errors import ConfigError


class BlockAllocator:
    """Hands out the blocks 1..num_blocks-1; block 0 takes the writes of padding rows and belongs to nobody.

    A block may stand in several tables: `share` adds one. Once nobody holds it, it is free, or idle if the index knows
    its content; idle blocks can be shared again until they are taken for new content.

    Blocks of one request are consecutive whenever the pool allows it, so that a batch of one reads its keys and values
    as a view: a new request starts where a free run holds all it may need, behind the room of the one before it. Where
    no such run is left it starts at the block that has been idle longest, and goes on with its neighbours as long as
    they are stale, given back in the older half of the time since then.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks is {num_blocks}: block 0 is reserved, so give at least 2")
        self.num_blocks = num_blocks
        self.index = index
        self._free = bytearray([0] + [1] * (num_blocks - 1) + [0])  # the last one ends every run
        self._num_free = num_blocks - 1
        self._idle: OrderedDict[int, int] = OrderedDict()  # block -> the release that gave it back; oldest first
        self._num_releases = 0
        self._holders = [0] * num_blocks
        self._next = 1  # where the room of the request that started last ends

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Those of them whose content is known."""
        return len(self._idle)

    def extend(self, table: list[int], num_blocks: int, expected: int = 0) -> bool:
        """Grow a block table in place to `num_blocks` blocks; False, and nothing taken, if there are too few.

        `expected` is the size that the table of a new request may reach, a hint for where to start it.
        """
        if num_blocks - len(table) > self.num_free:
            return False
        needed = num_blocks - len(table)
        sizes = (max(expected - len(table), needed), needed, 1)
        while len(table) < num_blocks:
            after = table[-1] + 1 if table else 0
            block = self._place(after, sizes, starts=expected > 0)
            if not self._free[block]:
                del self._idle[block]
                self.index.forget(block)
            else:
                self._free[block] = 0
                self._num_free -= 1
            self._holders[block] = 1
            table.append(block)
            expected = 0
        return True

    def share(self, table: list[int], blocks: list[int]) -> None:
        """Append blocks whose content the index knows to a table."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)
        table += blocks

    def release(self, table: list[int]) -> None:
        """Take back all blocks of a table and empty it."""
        self._num_releases += 1
        for block in reversed(table):  # what begins a prefix outlives what continues it
            assert self._holders[block], f"block {block} was released twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self.index:
                self._idle[block] = self._num_releases
            else:
                self._free[block] = 1
                self._num_free += 1
        table.clear()

    def num_holders(self, block: int) -> int:
        """In how many tables a block stands."""
        return self._holders[block]

    def num_released_by(self, tables: Iterable[list[int]]) -> int:
        """How many blocks nobody would hold any more if all these tables were released."""
        held = Counter(block for table in tables for block in table)
        return sum(self._holders[block] == count for block, count in held.items())

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Assert that every block is free, idle, or held by just those of the live tables that list it."""
        held = Counter(block for table in tables for block in table)
        free = [block for block in range(self.num_blocks) if self._free[block]]
        assert len(free) == self._num_free, f"{self._num_free} blocks counted free, {len(free)} marked"
        assert sorted([*held, *free, *self._idle]) == list(range(1, self.num_blocks)), "a block is lost or reserved"
        assert all(held[block] == count for block, count in enumerate(self._holders)), "a block's holders are off"
        shared = {block for block, count in held.items() if count > 1}
        assert shared <= self.index.blocks, "blocks of unknown content are shared"
        assert self._idle.keys() <= self.index.blocks <= held.keys() | self._idle.keys(), "the index has other blocks"

    def _place(self, after: int, sizes: tuple[int, int, int], starts: bool) -> int:
        """The block to take next: `after`, which stands behind the table's last one, if that does no harm.

        A request that starts looks for a free run of the first of the sizes; one that grows stays in its run even at
        the price of a stale block.
        """
        if self._free[after] or (not starts and self._is_stale(after)):
            return after
        if run := self._free_run(sizes[0]):
            return run
        if self._is_stale(after):
            return after
        return next(run for size in sizes if (run := self._free_run(size) or self._stale_run(size)))

    def _free_run(self, size: int) -> int:
        """The first block of a free run of that size; 0 if there is none."""
        if self._num_free == self.num_blocks - 1:
            self._next = 1
        for begin in (self._next, 1):
            start = self._free.find(b"\1" * size, begin)
            if start > 0:
                self._next = start + size
                return start
        return 0

    def _stale_run(self, size: int) -> int:
        """The first block of a run of free and stale blocks, best of that round the one idle longest; 0 if none is."""
        usable = bytearray(self._free)
        for block in takewhile(self._is_stale, self._idle):
            usable[block] = 1
        begin = usable.rfind(b"\0", 0, next(iter(self._idle), 1)) + 1
        run = b"\1" * size
        return max(usable.find(run, begin), 0) or max(usable.find(run), 0)

    def _is_stale(self, block: int) -> bool:
        """Whether a block was given back before half of the time since the oldest idle one was."""
        released = self._idle.get(block)
        if released is None:
            return False
        oldest = next(iter(self._idle.values()))
        return 2 * (released - oldest) <= self._num_releases - oldest
