"""Which cached blocks go first where requests have asked for priorities and durations."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayserve_paged.core import invariants
from rayserve_paged.core.block_pool import BlockPool, BlockState
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.eviction import ValueEviction
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.retention import RetentionPlan, RetentionRange

KEEP = RetentionRange(priority=80)
DROP = RetentionRange(priority=10)


def keys_of(path: Sequence[int]) -> list[BlockKey]:
    """A key for each leading part of a path; eight bytes of it are the fingerprint."""
    return [BlockKey(bytes(path[: end + 1]).ljust(8, b"\xff")) for end in range(len(path))]


def begin(kv: KVManager, path: Sequence[int], plan: RetentionPlan | None = None) -> BlockTable:
    """Start and compute a sequence with one token a block."""
    table = make_room(kv, path, [*kv.index.match(keys_of(path))], plan)
    compute(kv, path, table, plan)
    return table


def make_room(
    kv: KVManager, path: Sequence[int], matched: list[BlockId], plan: RetentionPlan | None
) -> BlockTable:
    table = kv.open(matched, retention=plan)
    assert kv.grow(table, len(path)) is not None
    return table


def compute(
    kv: KVManager, path: Sequence[int], table: BlockTable, plan: RetentionPlan | None
) -> None:
    for place, (block_id, key) in enumerate(zip(table.block_ids, keys_of(path), strict=True)):
        if kv.index.block_of(key) != block_id and kv.seal(block_id, key) and plan is not None:
            kv.retention.seal(block_id, place, plan)


def serve(kv: KVManager, path: Sequence[int], *ranges: RetentionRange) -> list[BlockId]:
    plan = RetentionPlan(ranges, 1) if ranges else None
    table = begin(kv, path, plan)
    block_ids = list(table.block_ids)
    kv.close(table, plan)
    return block_ids


def new_manager(num_blocks: int = 16) -> KVManager:
    kv = KVManager(BlockPool(num_blocks), 1)
    kv.retention.advance(0.0)
    return kv


def order(kv: KVManager) -> list[int]:
    invariants.check_retention(invariants.PoolView(kv.pool), kv)
    return list(kv.pool.cached_ids)


def test_lower_priorities_go_first_and_within_one_the_oldest() -> None:
    kv = new_manager()
    serve(kv, [1, 2], KEEP)  # 0, 1
    serve(kv, [3, 4])  # 2, 3
    serve(kv, [5, 6], DROP)  # 4, 5
    serve(kv, [7], KEEP)  # 6
    serve(kv, [8], DROP)  # 7
    assert order(kv) == [5, 4, 7, 3, 2, 1, 0, 6]
    table = kv.open([])
    assert kv.grow(table, 8 + 4) is not None
    assert order(kv) == [2, 1, 0, 6]


def test_within_a_priority_uses_count_as_they_do_without() -> None:
    kv = new_manager()
    serve(kv, [1], KEEP)  # 0
    for _ in range(3):
        serve(kv, [1], KEEP)
    for token in range(2, 7):
        serve(kv, [token], KEEP)  # 1 to 5
    serve(kv, [9])  # 6
    # An age of 6 and three uses are worth as much as an age of 3 and none, which block 3 has.
    assert order(kv) == [6, 1, 2, 3, 0, 4, 5]


def test_a_head_is_kept_for_the_tail_that_is() -> None:
    kv = new_manager()
    ranges = (RetentionRange(0, 1, 10), RetentionRange(1, 2, 80), RetentionRange(2, 3, 20))
    serve(kv, [1, 2, 3, 4], *ranges)  # 0 to 3; the last has the default, and so has the third.
    serve(kv, [5])  # 4
    assert order(kv) == [3, 2, 4, 1, 0]


def test_the_priority_falls_to_the_default_when_the_time_is_over_and_the_age_stays() -> None:
    kv = new_manager()
    serve(kv, [1])  # 0
    serve(kv, [2, 3], RetentionRange(priority=80, duration_s=10.0))  # 1, 2
    serve(kv, [4])  # 3
    kv.retention.advance(9.9)
    assert order(kv) == [0, 3, 2, 1]
    kv.retention.advance(10.0)
    assert order(kv) == [0, 2, 1, 3]
    assert len(kv.retention) == 0


def test_the_time_counts_from_the_release() -> None:
    kv = new_manager()
    plan = RetentionPlan((RetentionRange(priority=80, duration_s=10.0),), 1)
    table = begin(kv, [1], plan)
    serve(kv, [2])
    kv.retention.advance(100.0)
    kv.close(table, plan)
    kv.retention.advance(109.9)
    assert order(kv) == [1, 0]
    kv.retention.advance(110.0)
    assert order(kv) == [1, 0]
    serve(kv, [2])
    assert order(kv) == [0, 1]


def test_a_low_priority_rises_to_the_default_when_its_time_is_over() -> None:
    kv = new_manager()
    ranges = (RetentionRange(0, 1, 50), RetentionRange(1, None, 10, 5.0))
    serve(kv, [9])  # 0
    serve(kv, [1, 2, 3], *ranges)  # 1, 2, 3
    serve(kv, [8])  # 4
    assert order(kv) == [3, 2, 0, 4, 1]
    kv.retention.advance(5.0)
    assert order(kv) == [0, 3, 2, 4, 1]


def test_parts_of_a_chain_that_fall_one_after_the_other_stay_in_order() -> None:
    kv = new_manager()
    ranges = (
        RetentionRange(0, 1, 90, 30.0),
        RetentionRange(1, 2, 80, 20.0),
        RetentionRange(2, 3, 80, 10.0),
        RetentionRange(3, 4),
        RetentionRange(4, 5, 10, 25.0),
    )
    serve(kv, [1, 2, 3, 4, 5], *ranges)  # 0 to 4
    serve(kv, [9])  # 5
    assert order(kv) == [4, 3, 5, 2, 1, 0]
    kv.retention.advance(10.0)
    assert order(kv) == [4, 3, 2, 5, 1, 0]
    kv.retention.advance(20.0)
    assert order(kv) == [4, 3, 2, 1, 5, 0]
    kv.retention.advance(30.0)
    assert order(kv) == [4, 3, 2, 1, 0, 5]


@pytest.mark.parametrize(
    ("priorities", "before"),
    [
        ((90, 80, 70), [0, 6, 5, 4, 3, 2, 1]),
        ((70, 60, 50), [0, 6, 5, 4, 3, 2, 1]),
        ((30, 20, 10), [5, 4, 3, 2, 1, 0, 6]),
    ],
)
def test_parts_of_a_chain_that_change_at_once_stay_in_order(
    priorities: tuple[int, ...], before: list[int]
) -> None:
    kv = new_manager()
    serve(kv, [9])  # 0
    ends = (2, 3, 5)
    ranges = tuple(
        RetentionRange(start, end, priority, 5.0)
        for start, end, priority in zip((0, 2, 3), ends, priorities, strict=True)
    )
    serve(kv, [1, 2, 3, 4, 5], *ranges)  # 1 to 5
    serve(kv, [8])  # 6
    assert order(kv) == before
    kv.retention.advance(5.0)
    assert order(kv) == [0, 5, 4, 3, 2, 1, 6]


def test_the_highest_live_wish_counts_for_a_shared_block() -> None:
    kv = new_manager()
    serve(kv, [1], RetentionRange(priority=60, duration_s=20.0))
    serve(kv, [1], RetentionRange(priority=90, duration_s=10.0))
    serve(kv, [1], RetentionRange(priority=40))
    serve(kv, [1])
    assert kv.pool.priority(BlockId(0)) == 90
    kv.retention.advance(10.0)
    assert kv.pool.priority(BlockId(0)) == 60
    kv.retention.advance(20.0)
    assert kv.pool.priority(BlockId(0)) == 40
    assert order(kv) == [0]


def test_whoever_shares_a_block_and_asks_for_nothing_asks_for_the_default() -> None:
    kv = new_manager()
    serve(kv, [1, 2], DROP)  # 0, 1
    serve(kv, [3], DROP)  # 2
    serve(kv, [1])
    assert [kv.pool.priority(BlockId(each)) for each in range(3)] == [35, 10, 10]
    assert order(kv) == [1, 2, 0]


def test_whoever_shares_a_block_while_it_is_held_asks_for_the_default_as_well() -> None:
    kv = new_manager()
    plan = RetentionPlan((DROP,), 1)
    first = begin(kv, [1, 2], plan)
    serve(kv, [1])
    kv.close(first, plan)
    assert order(kv) == [1, 0]
    assert [kv.pool.priority(BlockId(each)) for each in range(2)] == [35, 10]


def test_whoever_computed_the_same_block_at_once_asks_for_the_default_as_well() -> None:
    kv = new_manager()
    plan = RetentionPlan((DROP,), 1)
    keys = keys_of([1])
    first, second = kv.open([], retention=plan), kv.open([])
    for table in (first, second):
        assert kv.grow(table, 1) is not None
    assert kv.seal(first.block_ids[0], keys[0])
    kv.retention.seal(first.block_ids[0], 0, plan)
    assert not kv.seal(second.block_ids[0], keys[0])
    kv.close(second)
    kv.close(first, plan)
    assert (order(kv), kv.pool.priority(BlockId(0))) == ([0], 35)


def test_a_low_block_stays_low_when_others_want_it_low() -> None:
    kv = new_manager()
    serve(kv, [1], DROP)
    serve(kv, [1], dataclasses.replace(DROP, priority=20))
    serve(kv, [2])
    assert kv.pool.priority(BlockId(0)) == 20
    assert order(kv) == [0, 1]


def test_an_evicted_or_reset_block_has_the_default_priority_again() -> None:
    kv = new_manager(2)
    serve(kv, [1, 2], dataclasses.replace(KEEP, duration_s=50.0))
    serve(kv, [3])  # Block 1 goes: all are kept, and one must.
    assert [kv.pool.priority(BlockId(each)) for each in range(2)] == [80, 35]
    assert order(kv) == [1, 0]
    kv.reset()
    assert len(kv.retention) == 0
    assert order(kv) == []


def test_what_is_discarded_is_not_kept() -> None:
    kv = new_manager()
    table = begin(kv, [1, 2], RetentionPlan((DROP,), 1))
    kv.discard(table)
    assert (order(kv), len(kv.retention)) == ([], 0)


def test_deadlines_of_blocks_that_are_gone_take_no_memory() -> None:
    kv = new_manager(2)
    for token in range(200):
        serve(kv, [token], RetentionRange(priority=80, duration_s=1000.0))
    assert len(kv.retention) == 2
    assert kv.retention.num_entries <= 12


def test_a_ghost_keeps_its_length_when_part_of_its_run_falls() -> None:
    eviction = ValueEviction(10, lambda block_id: block_id)
    block_ids = [BlockId(each) for each in range(4)]
    eviction.prioritize(dict.fromkeys(block_ids, 80))
    eviction.released(block_ids)
    assert eviction.evict(1) == [3]
    eviction.prioritize({BlockId(1): 35, BlockId(2): 35})
    assert eviction.evict(2) == [2, 1]
    # Its ghost is of three blocks that begin with block 1: all have one use when they come back.
    eviction.released([BlockId(1), BlockId(2), BlockId(3), BlockId(4)], before=[BlockId(0)])
    assert list(eviction) == [4, 3, 2, 1, 0]


class ForgetfulPool(BlockPool):
    """Counts no uses, neither of cached blocks nor of evicted ones."""

    def remember_evicted(self, fingerprint_of: Callable[[BlockId], int]) -> None:
        pass

    def used(self, block_ids: Sequence[BlockId]) -> None:
        pass


class RetentionMachine(RuleBasedStateMachine):
    """Sequences that ask for ranges, beside a model that looks at every wish for every block.

    Uses are not counted, so that within a priority the order is that of the releases.
    """

    @initialize(num_blocks=st.sampled_from([7, 12, 20]))
    def start(self, num_blocks: int) -> None:
        self.kv = KVManager(ForgetfulPool(num_blocks), 1)
        self.kv.retention.advance(0.0)
        self.now = 0.0
        self.live: list[tuple[tuple[int, ...], BlockTable, tuple[RetentionRange, ...]]] = []
        # Of each path: (until, priority) of those who have let go of it; and when that was.
        self.wishes: dict[tuple[int, ...], list[tuple[float, int]]] = {}
        self.released: dict[tuple[int, ...], tuple[int, int]] = {}
        self.num_releases = 0

    def path_of(self, block_id: BlockId) -> tuple[int, ...]:
        key = self.kv.index.key_of(block_id)
        assert key is not None
        return tuple(key.rstrip(b"\xff"))

    def sweep(self) -> None:
        """Forget the paths that are gone."""
        present = {self.path_of(block_id) for _key, block_id in self.kv.index.items()}
        for path in set(self.wishes) - present:
            del self.wishes[path]

    @rule(
        path=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        wishes=st.lists(
            st.tuples(
                st.integers(1, 3),
                st.sampled_from([0, 10, 35, 80, 100]),
                st.sampled_from([None, 1.0, 3.0]),
            ),
            max_size=4,
        ),
        at_once=st.booleans(),
    )
    def begin(
        self, path: list[int], wishes: list[tuple[int, int, float | None]], at_once: bool
    ) -> None:
        ranges: tuple[RetentionRange, ...] = ()
        start = 0
        for num_tokens, priority, duration_s in wishes:
            ranges += (RetentionRange(start, start + num_tokens, priority, duration_s),)
            start += num_tokens
        # One that began before anything of its path was published fills duplicates.
        matched = [] if at_once else [*self.kv.index.match(keys_of(path))]
        available = self.kv.pool.num_available - self.kv.pool.num_cached_of(matched)
        if len(path) - len(matched) > available:
            return
        plan = RetentionPlan(ranges, 1) if ranges else None
        table = make_room(self.kv, path, matched, plan)
        self.sweep()
        compute(self.kv, path, table, plan)
        self.live.append((tuple(path), table, ranges))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        path, table, ranges = self.live.pop(pick % len(self.live))
        wishes: list[tuple[float, int]] = []
        for place in range(len(path) - 1, -1, -1):
            named = [each for each in ranges if each.start <= place < (each.end or 99)]
            for each in named:
                until = 1e9 if each.duration_s is None else self.now + each.duration_s
                wishes.append((until, each.priority))
            if not named:
                wishes.append((1e9, 35))
            self.wishes.setdefault(path[: place + 1], []).extend(wishes)
        self.num_releases += 1
        self.kv.close(table, RetentionPlan(ranges, 1) if ranges else None)
        cached = {self.path_of(block_id) for block_id in self.kv.pool.cached_ids}
        for end in range(1, len(path) + 1):
            if path[:end] in cached:
                self.released[path[:end]] = (self.num_releases, -end)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.kv.retention.advance(self.now)

    def expected(self, path: tuple[int, ...]) -> int:
        return max(priority if self.now < until else 35 for until, priority in self.wishes[path])

    @invariant()
    def the_lowest_priority_goes_first_and_a_tail_before_its_head(self) -> None:
        invariants.check_retention(invariants.PoolView(self.kv.pool), self.kv)
        cached = [self.path_of(block_id) for block_id in self.kv.pool.cached_ids]
        for path in cached:
            block_id = self.kv.index.block_of(keys_of(path)[-1])
            assert block_id is not None
            assert self.kv.pool.state(block_id) is BlockState.CACHED
            assert self.kv.pool.priority(block_id) == self.expected(path)
        seen: set[tuple[int, ...]] = set()
        for path in cached:
            seen.add(path)
            followers = {other for other in cached if other[:-1] == path}
            assert followers <= seen, "a block comes before one that follows it in its chain"
        assert cached == sorted(cached, key=lambda path: (self.expected(path), self.released[path]))


RetentionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestRetentionMachine = RetentionMachine.TestCase
