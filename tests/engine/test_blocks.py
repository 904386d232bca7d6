"""The block pool: consecutive where possible, never lost, never shared."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dspark.engine.blocks import BlockAllocator
from dspark.errors import ConfigError


def consecutive(table: list[int]) -> bool:
    return table == list(range(table[0], table[0] + len(table)))


def test_a_single_request_grows_in_one_run():
    allocator = BlockAllocator(20)
    table: list[int] = []
    for size in range(1, 20):
        assert allocator.extend(table, size)
    assert consecutive(table)
    assert allocator.num_free == 0
    assert not allocator.extend(table, 20)
    allocator.check_integrity([table])


def test_two_requests_have_room_to_grow_side_by_side():
    allocator = BlockAllocator(41)
    first: list[int] = []
    second: list[int] = []
    for size in range(1, 20):
        assert allocator.extend(first, size, expected=20)
        assert allocator.extend(second, size, expected=20)
    assert consecutive(first)
    assert consecutive(second)


def test_nothing_is_taken_when_there_are_too_few():
    allocator = BlockAllocator(5)
    table: list[int] = []
    assert allocator.extend(table, 3)
    assert not allocator.extend(table, 5)
    assert len(table) == 3
    assert allocator.num_free == 1


def test_a_pool_needs_a_block_beside_the_reserved_one():
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockAllocator(1)


class Pool(RuleBasedStateMachine):
    """Any order of growth and release keeps every block in exactly one place."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(24)
        self.tables: list[list[int]] = [[] for _ in range(4)]

    @rule(which=st.integers(0, 3), more=st.integers(1, 9))
    def extend(self, which: int, more: int) -> None:
        table = self.tables[which]
        before, free = list(table), self.allocator.num_free
        assert self.allocator.extend(table, len(table) + more) == (more <= free)
        assert table[: len(before)] == before

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        self.allocator.release(self.tables[which])
        assert not self.tables[which]

    @invariant()
    def integrity(self) -> None:
        self.allocator.check_integrity(self.tables)


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase
