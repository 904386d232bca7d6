"""The block pool: consecutive where possible, never lost, shared on purpose alone."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark.engine.blocks import BlockAllocator
from dspark.engine.prefix import PrefixIndex
from dspark.engine.request import Request, SamplingParams
from dspark.engine.text import TextStream
from dspark.errors import ConfigError

BLOCK = 2  # tokens


def pool(num_blocks: int) -> BlockAllocator:
    return BlockAllocator(num_blocks, PrefixIndex(BLOCK))


def request(ids: list[int]) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request("r", ids, params, 0, 1000, frozenset(), TextStream(lambda ids: ""), speculates=False)


def serve(allocator: BlockAllocator, ids: list[int], expected: int = 0) -> tuple[Request, int]:
    """Prefill a prompt: the request, and how many blocks it found."""
    one = request(ids)
    found = allocator.index.match(one)
    allocator.share(one.block_table, found)
    one.num_listed = len(found)
    assert allocator.extend(one.block_table, -(-len(ids) // BLOCK), expected)
    one.seq_len = len(ids)
    allocator.index.add(one)
    return one, len(found)


def consecutive(table: list[int]) -> bool:
    return table == list(range(table[0], table[0] + len(table)))


def test_a_single_request_grows_in_one_run():
    allocator = pool(20)
    table: list[int] = []
    for size in range(1, 20):
        assert allocator.extend(table, size)
    assert consecutive(table)
    assert allocator.num_free == 0
    assert not allocator.extend(table, 20)
    allocator.check_integrity([table])


def test_two_requests_have_room_to_grow_side_by_side():
    allocator = pool(41)
    first: list[int] = []
    second: list[int] = []
    for size in range(1, 20):
        assert allocator.extend(first, size, expected=20)
        assert allocator.extend(second, size, expected=20)
    assert consecutive(first)
    assert consecutive(second)


def test_nothing_is_taken_when_there_are_too_few():
    allocator = pool(5)
    table: list[int] = []
    assert allocator.extend(table, 3)
    assert not allocator.extend(table, 5)
    assert len(table) == 3
    assert allocator.num_free == 1


def test_a_pool_needs_a_block_beside_the_reserved_one():
    with pytest.raises(ConfigError, match="num_blocks"):
        pool(1)


def test_what_was_used_last_is_kept_longest():
    allocator = pool(17)
    for i in (1, 2, 3):  # five blocks each, four of them full
        allocator.release(serve(allocator, [i] * 9)[0].block_table)
    again, found = serve(allocator, [1] * 9)
    assert found == 4
    allocator.release(again.block_table)
    taker: list[int] = []
    assert allocator.extend(taker, 5)
    assert [len(allocator.index.match(request([i] * 9))) for i in (1, 2, 3)] == [4, 0, 4]
    assert allocator.extend(taker, 16)
    assert allocator.num_free == allocator.num_idle == 0
    allocator.check_integrity([taker])


def test_one_after_the_other_each_has_one_run_of_blocks():
    """A batch of one reads its keys as a view even when the whole pool keeps prefixes."""
    allocator = pool(120)
    for i in range(40):
        one, found = serve(allocator, [i, *range(1, 9 + i % 5)], expected=14)
        assert not found
        for size in range(len(one.block_table), 13):
            assert allocator.extend(one.block_table, size)
        assert consecutive(one.block_table), i
        one.seq_len = 2 * len(one.block_table)
        one.prompt_ids += [7] * (one.seq_len - len(one.prompt_ids))
        allocator.index.add(one)
        allocator.check_integrity([one.block_table])
        allocator.release(one.block_table)
    assert allocator.num_idle > 80


def test_a_conversation_goes_on_in_its_run():
    allocator = pool(40)
    ids = [1, 2, 3, 4, 5]
    for turn in range(6):
        one, found = serve(allocator, ids, expected=20)
        assert found == 2 * turn
        assert consecutive(one.block_table)
        allocator.release(one.block_table)
        ids = ids + [turn] * 4


class Pool(RuleBasedStateMachine):
    """Any order of growth, sharing and release: every block stays where it belongs, and what is found is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = pool(24)
        self.live: list[Request] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=13), expected=st.integers(0, 12))
    def serve(self, ids: list[int], expected: int) -> None:
        if -(-len(ids) // BLOCK) > self.allocator.num_free:
            return
        one, found = serve(self.allocator, ids, expected)
        for i, block in enumerate(one.block_table):
            prefix = tuple(ids[: (i + 1) * BLOCK])
            if i < found:
                assert self.content[block] == prefix, "another prefix was found"
                assert len(prefix) < len(ids), "the last token was left out"
            self.content[block] = prefix
        self.live.append(one)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), more=st.integers(1, 9))
    def extend(self, which: int, more: int) -> None:
        table = self.live[which % len(self.live)].block_table
        before, free = list(table), self.allocator.num_free
        assert self.allocator.extend(table, len(table) + more) == (more <= free)
        assert table[: len(before)] == before

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), bad=st.booleans())
    def release(self, which: int, bad: bool) -> None:
        table = self.live.pop(which % len(self.live)).block_table
        if bad:
            for block in table:
                self.allocator.index.forget(block)
        before = self.allocator.num_free
        freed = self.allocator.num_released_by([table])
        self.allocator.release(table)
        assert not table
        assert self.allocator.num_free == before + freed

    @invariant()
    def integrity(self) -> None:
        tables = [one.block_table for one in self.live]
        held = [block for table in tables for block in table]
        bad = {block for block in held if held.count(block) > 1 and block not in self.allocator.index}
        if not bad:  # a block found bad while it is shared stays shared
            self.allocator.check_integrity(tables)


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase
