"""Cache blocks: who holds which. One block table serves the target's cache and the drafter's."""

from collections.abc import Iterable

from dspark.errors import ConfigError


class BlockAllocator:
    """Hands out the blocks 1..num_blocks-1; block 0 takes the writes of padding rows and belongs to nobody.

    Blocks of one request are consecutive whenever the pool allows it, so that a batch of one reads its keys and values
    as a view: a new request starts where a free run holds all it may need, behind the room of the one before it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks is {num_blocks}: block 0 is reserved, so give at least 2")
        self._free = bytearray([0] + [1] * (num_blocks - 1))
        self._next = 1  # where the room of the request that started last ends
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1

    def extend(self, table: list[int], num_blocks: int, expected: int = 0) -> bool:
        """Grow a block table in place to `num_blocks` blocks; False, and nothing taken, if there are too few.

        `expected` is the size the table may reach, a hint for where to start a new one.
        """
        if num_blocks - len(table) > self.num_free:
            return False
        while len(table) < num_blocks:
            block = table[-1] + 1 if table else self.num_blocks
            if block >= self.num_blocks or not self._free[block]:
                block = self._start(max(expected, num_blocks) - len(table))
            self._free[block] = 0
            self.num_free -= 1
            table.append(block)
        return True

    def release(self, table: list[int]) -> None:
        """Take back all blocks of a table and empty it."""
        for block in table:
            assert not self._free[block], f"block {block} was released twice"
            self._free[block] = 1
        self.num_free += len(table)
        table.clear()

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Assert that the live tables hold every block that is not free, each exactly once."""
        held = sorted(block for table in tables for block in table)
        free = [block for block in range(self.num_blocks) if self._free[block]]
        assert len(free) == self.num_free, f"{self.num_free} blocks counted free, {len(free)} marked"
        assert sorted(held + free) == list(range(1, self.num_blocks)), "a block is lost, shared, or reserved block 0"

    def _start(self, wanted: int) -> int:
        """The first block of a free run of `wanted` blocks, or of any free run."""
        if self.num_free == self.num_blocks - 1:
            self._next = 1
        for size in (wanted, 1):
            for begin in (self._next, 1):
                start = self._free.find(b"\1" * size, begin)
                if start > 0:
                    self._next = start + size
                    return start
        raise AssertionError("no free block")
