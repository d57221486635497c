"""Eviction by value: its order, what it remembers, and that it never cuts a chain."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest
from eviction_oracle import EvictionOracle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.eviction import ValueEviction
from rayserve_paged.core.ids import BlockId


def ids(*block_ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


def order_of(*chains: Sequence[int], num_blocks: int = 100) -> ValueEviction:
    """Chains that came in one after the other; the content of a block is its id."""
    order = ValueEviction(num_blocks, lambda block_id: block_id)
    for chain in chains:
        order.released(ids(*chain))
    return order


def use(order: ValueEviction, *chain: int, at_end: Sequence[int] = ()) -> None:
    """Let a request find a cached chain, compute what it adds and end."""
    order.used(ids(*chain))
    order.taken(ids(*chain))
    order.released(ids(*chain, *at_end))


def release_one_by_one(order: ValueEviction, block_ids: Sequence[int]) -> None:
    for block_id in block_ids:
        order.released(ids(block_id))


def test_chains_that_nobody_used_again_leave_the_oldest_first_and_each_from_its_tail() -> None:
    order = order_of([0, 1, 2], [3, 4], [5])
    assert list(order) == [2, 1, 0, 4, 3, 5]
    assert order.evict(4) == [2, 1, 0, 4]
    assert (len(order), BlockId(3) in order, BlockId(4) in order) == (2, True, False)
    assert order.evict(2) == [3, 5]
    assert len(order) == 0


def test_a_chain_that_was_used_lasts_longer_by_the_root_of_its_uses() -> None:
    order = order_of([0])
    for _ in range(3):
        use(order, 0)
    release_one_by_one(order, range(1, 100))
    # It came back at once, so the scale is 0. At an age of 99 it is worth as much as an unused one
    # of 99 / sqrt(3 + 1) = 49.5, which block 49 is over and block 50 is not.
    assert list(order).index(BlockId(0)) == 49


def test_uses_beyond_the_seventh_are_not_told_apart() -> None:
    order = order_of([0], [1], [2])
    for block_id, num_uses in ((0, 8), (1, 6), (2, 5), (0, 1), (1, 1), (2, 1)):
        for _ in range(num_uses):
            use(order, block_id)
    release_one_by_one(order, range(10, 40))
    # Ages of 32, 31 and 30 and a scale of 2. 0 and 1 count as used seven times: 34 / sqrt(8) = 12.0
    # and 33 / sqrt(8). 2 was used six times: 32 / sqrt(7) = 12.1.
    assert [block_id for block_id in order if block_id < 10] == [2, 0, 1]


def test_the_newest_chains_go_first_where_chains_come_back_late() -> None:
    order = order_of(*([block_id] for block_id in range(50)))
    use(order, 0)  # 49 blocks after it came in: the scale is 49.
    release_one_by_one(order, range(50, 60))
    # Block 0 has an age of 10: (10 + 49) / sqrt(2) = 41.7. The newest one costs 0 + 49.
    assert list(order)[-2:] == [59, 0]


def test_where_chains_come_back_at_once_a_newcomer_outlives_one_used_long_ago() -> None:
    order = order_of([0])
    use(order, 0)
    release_one_by_one(order, range(1, 60))
    # At an age of 59 it is worth as much as an unused one of 59 / sqrt(2) = 41.7.
    assert list(order).index(BlockId(0)) == 17


def test_the_age_at_a_first_use_counts_once_for_a_run() -> None:
    order = order_of([0, 1, 2, 3, 4, 5], [6], [7], [8], [9])
    for block_id in (7, 8, 9):
        use(order, block_id)  # At an age of 2 each.
    use(order, 0, 1, 2, 3, 4, 5)  # At an age of 7: the lower quartile of all four is 2.
    release_one_by_one(order, range(20, 40))
    # The run costs (20 + 2) / sqrt(2) = 15.6, as an unused block of an age of 13.6 does. With a
    # scale of 7 it would cost 19.1, as one of 12.1.
    assert list(order).index(BlockId(5)) == len([6, 7, 8, 9, 20, 21, 22, 23, 24, 25])


def test_blocks_that_come_in_change_which_run_is_worth_least() -> None:
    order = order_of([0, 1])
    use(order, 0, 1)
    release_one_by_one(order, [10, 11])
    # Ages of 2 and 1: 2 / sqrt(2) is more than 1.
    assert order.evict(1) == [1]
    order.released(ids(12, 13, 14, 15))
    # And 6 / sqrt(2) is less than 5.
    assert order.evict(1) == [10]


def test_a_chain_that_comes_back_after_eviction_has_the_uses_that_it_had() -> None:
    order = order_of([0, 1, 2])
    use(order, 0, 1, 2)
    use(order, 0, 1, 2)
    assert order.evict(3) == [2, 1, 0]
    order.released(ids(0, 1, 2, 3))
    release_one_by_one(order, range(10, 20))
    # The three have been used three times now and at an age of 10 are worth as much as an unused
    # one of 5, so that five go before them. Block 3 is new, and goes before what it follows.
    assert list(order) == [3, 10, 11, 12, 13, 14, 2, 1, 0, 15, 16, 17, 18, 19]


def test_an_evicted_tail_is_remembered_by_its_own_first_block() -> None:
    order = order_of([0, 1])
    use(order, 0, 1, at_end=[2, 3])
    assert order.evict(2) == [3, 2]
    use(order, 0, 1, at_end=[2, 3, 4])
    release_one_by_one(order, range(10, 20))
    # Block 4 is new, the tail has come back once and its head has been used twice: at an age of 10
    # they are worth as much as unused ones of 10, 10 / sqrt(2) = 7.1 and 10 / sqrt(3) = 5.8.
    assert list(order)[:9] == [4, 10, 11, 3, 2, 12, 13, 1, 0]


@pytest.mark.parametrize("comes_back_together", [True, False])
def test_what_comes_back_is_worth_no_more_than_what_precedes_it(comes_back_together: bool) -> None:
    order = order_of([0, 1])
    for _ in range(7):
        use(order, 0, 1)
    order.evict(2)
    # Their ghost has more uses than block 5, which they follow now.
    order.released(ids(5))
    order.used(ids(5))
    order.taken(ids(5))
    if comes_back_together:
        order.released(ids(5, 0, 1))
    else:
        order.released(ids(0, 1), before=ids(5))
        order.released(ids(5))
    release_one_by_one(order, range(10, 40))
    assert [block_id for block_id in order if block_id < 10] == [1, 0, 5]


@pytest.mark.parametrize("comes_back_together", [True, False])
def test_a_tail_that_outlived_its_head_is_worth_no_more_than_the_new_head(
    comes_back_together: bool,
) -> None:
    # Block 2 was HELD with three uses while what precedes it was evicted and computed anew.
    order = order_of([2])
    order.used(ids(2))
    order.used(ids(2))
    order.used(ids(2))
    order.taken(ids(2))
    if comes_back_together:
        order.released(ids(0, 1, 2))
    else:
        order.released(ids(2), before=ids(0, 1))
        order.released(ids(0, 1))
    assert list(order) == [2, 1, 0]


def test_a_block_that_was_taken_alone_comes_back_with_the_uses_that_it_had() -> None:
    order = order_of([0, 1])
    use(order, 0, 1)
    order.evict(1)
    order.taken(ids(0))
    order.put_back(BlockId(0))
    release_one_by_one(order, range(10, 20))
    # Used once, at an age of 10 it is worth as much as an unused one of 10 / sqrt(2) = 7.1.
    assert list(order).index(BlockId(0)) == len([10, 11])


def test_nothing_is_remembered_without_fingerprints() -> None:
    order = ValueEviction(8, None)
    order.released(ids(0))
    use(order, 0)
    assert order.evict(1) == [0]
    order.released(ids(0))
    release_one_by_one(order, [1, 2])
    assert list(order) == [0, 1, 2]


@pytest.mark.parametrize(("other", "expected"), [(11, [2, 3, 4, 5]), (12, [3, 2, 4, 5])])
def test_a_ghost_is_forgotten_when_another_one_takes_its_slot(
    other: int, expected: list[int]
) -> None:
    # 3 and 11 share one slot of 8, 3 and 12 do not. Block 2 has the content that block 0 had.
    contents = {0: 3, 1: other, 2: 3, 3: 21, 4: 22, 5: 23}
    order = ValueEviction(8, lambda block_id: contents[block_id])
    for block_id in (0, 1):
        order.released(ids(block_id))
        use(order, block_id)
        order.evict(1)
    release_one_by_one(order, [2, 3, 4, 5])
    # With two uses, block 2 is worth as much at an age of 3 as an unused one of 3 / sqrt(3).
    assert list(order) == expected


def test_taking_the_head_of_a_run_leaves_its_tail_and_taking_its_middle_cuts_it() -> None:
    order = order_of([0, 1, 2, 3, 4, 5])
    order.taken(ids(0, 1))
    assert list(order) == [5, 4, 3, 2]
    order.taken(ids(3, 4))
    assert list(order) == [5, 2]
    assert [block_id for block_id in range(6) if BlockId(block_id) in order] == [2, 5]
    assert order.evict(2) == [5, 2]


def test_a_gap_in_what_is_taken_stays() -> None:
    order = order_of([0, 1, 2, 3, 4])
    order.taken(ids(0, 1, 3))
    assert list(order) == [4, 2]


def test_a_branch_takes_no_more_of_a_run_than_its_own_blocks() -> None:
    order = order_of([0, 1, 2, 3], [10])
    order.taken(ids(0, 1, 10))
    assert list(order) == [3, 2]


def test_a_forgotten_block_is_gone_with_its_uses() -> None:
    order = order_of([0, 1, 2], [3])
    order.used(ids(0, 1, 2))
    order.forget(BlockId(1))
    assert list(order) == [2, 0, 3]
    order.forget(BlockId(0))
    order.forget(BlockId(0))
    order.released(ids(0))
    release_one_by_one(order, range(10, 20))
    assert list(order)[:4] == [2, 3, 0, 10]


def test_more_than_is_cached_cannot_be_evicted_or_taken() -> None:
    order = order_of([0, 1])
    with pytest.raises(LedgerError, match="3 blocks to evict, and 2 are CACHED"):
        order.evict(3)
    assert list(order) == [1, 0]
    with pytest.raises(LedgerError, match="block 2 is not CACHED"):
        order.taken(ids(0, 1, 2))
    assert len(order) == 0
    order.released([])
    assert order.evict(0) == []


@pytest.mark.parametrize(("run_length", "most_bytes"), [(16, 30), (1, 60)])
def test_a_block_takes_few_bytes(run_length: int, most_bytes: int) -> None:
    num_blocks = 8_000
    block_ids = ids(*range(num_blocks))
    tracemalloc.start()
    order = ValueEviction(num_blocks, lambda block_id: block_id)
    for start in range(0, num_blocks, run_length):
        order.released(block_ids[start : start + run_length])
    for _ in range(num_blocks // run_length):
        order.released(order.evict(run_length))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order) == num_blocks
    assert num_bytes < most_bytes * num_blocks


class EvictionMachine(RuleBasedStateMachine):
    """A pool of blocks whose sequences come and go, beside an oracle that looks at every block."""

    @initialize(num_blocks=st.sampled_from([7, 12, 24]))
    def start(self, num_blocks: int) -> None:
        self.free = ids(*range(num_blocks))
        self.content: dict[BlockId, tuple[int, ...]] = {}
        self.block_of: dict[tuple[int, ...], BlockId] = {}
        self.sequences: list[list[BlockId]] = []
        self.counts: Counter[BlockId] = Counter()
        self.order = ValueEviction(num_blocks, self.fingerprint_of)
        self.oracle = EvictionOracle(num_blocks, lambda block: self.fingerprint_of(BlockId(block)))

    def fingerprint_of(self, block_id: BlockId) -> int:
        fingerprint = 1
        for token in self.content[block_id]:
            fingerprint = fingerprint * 2 + token
        return fingerprint

    def evict_blocks(self, num_blocks: int) -> None:
        expected = list(self.order)[:num_blocks]
        assert self.oracle.evict(num_blocks) == expected
        assert self.order.evict(num_blocks) == expected
        for block_id in expected:
            del self.block_of[self.content.pop(block_id)]
            self.free.append(block_id)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        is_resumed=st.sampled_from([False, False, True]),
    )
    def begin(self, tokens: list[int], is_resumed: bool) -> None:
        paths = [tuple(tokens[: end + 1]) for end in range(len(tokens))]
        table = []
        for path in paths:
            if path not in self.block_of:
                break
            table.append(self.block_of[path])
        cached = [block_id for block_id in table if block_id in self.order]
        num_new = len(paths) - len(table)
        if num_new > len(self.free) + len(self.order) - len(cached):
            return
        for order in (self.order, self.oracle):
            if not is_resumed:
                order.used(table)
            order.taken(cached)
        self.evict_blocks(max(0, num_new - len(self.free)))
        for path in paths[len(table) :]:
            block_id = self.free.pop()
            self.content[block_id] = path
            self.block_of[path] = block_id
            table.append(block_id)
        self.counts.update(table)
        self.sequences.append(table)

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        table = self.sequences.pop(pick % len(self.sequences))
        self.counts.subtract(table)
        let_go = [block_id for block_id in table if not self.counts[block_id]]
        num_held = len(table) - len(let_go)
        self.order.released(let_go, table[:num_held])
        if let_go:
            self.oracle.released(let_go, table[num_held - 1] if num_held else None)

    @rule(num_blocks=st.integers(1, 4))
    def evict(self, num_blocks: int) -> None:
        self.evict_blocks(min(num_blocks, len(self.order)))

    @precondition(lambda self: len(self.order) > 0)
    @rule(pick=st.integers(0, 99))
    def forget_a_leaf(self, pick: int) -> None:
        inner = {path[:-1] for path in self.block_of}
        leaves = [block_id for block_id in self.order if self.content[block_id] not in inner]
        block_id = leaves[pick % len(leaves)]
        self.order.forget(block_id)
        self.oracle.forget(block_id)
        del self.block_of[self.content.pop(block_id)]
        self.free.append(block_id)

    @invariant()
    def both_have_the_same_order(self) -> None:
        assert list(self.order) == self.oracle.order()
        assert len(self.order) == len(self.oracle.entries)

    @invariant()
    def no_chain_is_cut(self) -> None:
        for path in self.block_of:
            assert len(path) == 1 or path[:-1] in self.block_of
        seen: set[tuple[int, ...]] = set()
        for block_id in self.order:
            seen.add(self.content[block_id])
            followers = {path for path in self.block_of if path[:-1] == self.content[block_id]}
            assert followers <= seen, "a block comes before one that follows it in its chain"


EvictionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestEvictionMachine = EvictionMachine.TestCase
