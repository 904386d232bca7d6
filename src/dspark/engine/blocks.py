"""Cache blocks: who holds which. One block table serves the target's cache and the drafter's."""

from collections.abc import Iterable

from dspark.errors import ConfigError


class BlockAllocator:
    """Hands out the blocks 1..num_blocks-1; block 0 takes the writes of padding rows and belongs to nobody.

    Blocks of one request are consecutive whenever the pool allows it, so that a batch of one reads its keys and values
    as a view. A new request starts in the middle of the largest free run (or at its start when nothing lies before it),
    which leaves room for its neighbour and for itself to grow.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks is {num_blocks}: block 0 is reserved, so give at least 2")
        self._free = bytearray([0] + [1] * (num_blocks - 1))
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1

    def extend(self, table: list[int], num_blocks: int) -> bool:
        """Grow a block table in place to `num_blocks` blocks; False, and nothing taken, if there are too few."""
        missing = num_blocks - len(table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = table[-1] + 1 if table else self._start(num_blocks)
            if block >= self.num_blocks or not self._free[block]:
                block = self._start(num_blocks - len(table))
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
        """The first block for a run of `wanted` more blocks."""
        start, length = max(self._free_runs(), key=lambda run: run[1])
        return start if start == 1 else start + (length - wanted) // 2 if length > wanted else start

    def _free_runs(self) -> list[tuple[int, int]]:
        """(first block, length) of every maximal run of free blocks."""
        runs, block = [], self._free.find(1)
        while block >= 0:
            end = self._free.find(0, block)
            end = self.num_blocks if end < 0 else end
            runs.append((block, end - block))
            block = self._free.find(1, end)
        return runs
