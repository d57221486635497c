"""Blocks that filled after another one of equal content was published, by two who began at once."""

from collections.abc import Sequence

import pytest

from rayserve_paged.core import invariants
from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.partial_index import BlockContent
from rayserve_paged.core.retention import RetentionPlan, RetentionRange

ROOT = BlockKey(b"root".ljust(8))
KEYS = [BlockKey(bytes([end]).ljust(8)) for end in range(1, 5)]
DROP = RetentionPlan((RetentionRange(priority=10),), 2)
DROP_5_S = RetentionPlan((RetentionRange(priority=10, duration_s=5.0),), 2)
KEEP_5_S = RetentionPlan((RetentionRange(priority=80, duration_s=5.0),), 2)


def make_manager(num_blocks: int, *, partial_reuse: bool = False) -> KVManager:
    kv = KVManager(BlockPool(num_blocks), 2, partial_reuse=partial_reuse)
    kv.retention.advance(0.0)
    return kv


def content_at(place: int, num_tokens: int = 2) -> BlockContent:
    parent = KEYS[place - 1] if place else ROOT
    return BlockContent(parent, [2 * place, 2 * place + 1][:num_tokens])


def fill(
    kv: KVManager,
    num_blocks: int,
    plan: RetentionPlan | None = None,
    windows: Sequence[AttentionWindow] = ONE_FULL_GROUP,
    num_named: int = 2,
) -> BlockTable:
    """Compute blocks of two tokens that nobody else's are matched for."""
    table = kv.open([], windows=windows, retention=plan)
    assert kv.grow(table, 2 * num_blocks) is not None
    for place, block_id in enumerate(table.block_ids):
        is_new = kv.seal(block_id, KEYS[place], content_at(place, num_named))
        if is_new and plan is not None:
            kv.retention.seal(block_id, place, plan)
    return table


def lose_cached(kv: KVManager) -> None:
    """Have somebody take all that can be had, and give it back."""
    table = kv.open([])
    assert kv.grow(table, 2 * kv.pool.num_available) is not None
    kv.close(table)


@pytest.mark.parametrize(("plan", "after_5_s"), [(DROP, 10), (DROP_5_S, 35)])
def test_one_that_is_published_late_is_kept_no_longer_than_its_request_asks_for(
    plan: RetentionPlan, after_5_s: int
) -> None:
    kv = make_manager(8)
    first, second = fill(kv, 2), fill(kv, 2, plan)
    kv.close(first)
    lose_cached(kv)
    kv.close(second, plan)
    assert kv.match(KEYS, 5) == [2, 3]
    invariants.check_retention(invariants.PoolView(kv.pool), kv)
    assert [kv.pool.priority(BlockId(each)) for each in (2, 3)] == [10, 10]
    kv.retention.advance(5.0)
    assert [kv.pool.priority(BlockId(each)) for each in (2, 3)] == [after_5_s] * 2


def test_one_that_is_published_late_is_kept_as_long_as_its_request_asks_for() -> None:
    kv = make_manager(8)
    first, second = fill(kv, 2), fill(kv, 2, KEEP_5_S)
    kv.close(first)
    lose_cached(kv)
    kv.retention.advance(100.0)
    kv.close(second, KEEP_5_S)
    assert [kv.pool.priority(BlockId(each)) for each in (2, 3)] == [80, 80]
    kv.retention.advance(105.0)
    assert [kv.pool.priority(BlockId(each)) for each in (2, 3)] == [35, 35]


@pytest.mark.parametrize(
    ("first_plan", "second_plan", "priority"),
    [(DROP, None, 35), (None, DROP, 35), (DROP, DROP, 10), (DROP, KEEP_5_S, 80)],
)
@pytest.mark.parametrize("window", [None, AttentionWindow(1)])
def test_the_published_block_is_kept_for_both_requests(
    window: AttentionWindow | None,
    first_plan: RetentionPlan | None,
    second_plan: RetentionPlan | None,
    priority: int,
) -> None:
    windows = ONE_FULL_GROUP if window is None else (window,)
    kv = make_manager(8)
    first, second = fill(kv, 3, first_plan), fill(kv, 3, second_plan, windows)
    assert len(kv.duplicates) == 3
    # What the second lets go of behind its window it trades at once.
    kv.trim(second, 6, second_plan)
    assert len(second.block_ids) == (3 if window is None else 1)
    kv.close(second, second_plan)
    kv.close(first, first_plan)
    invariants.check_retention(invariants.PoolView(kv.pool), kv)
    assert kv.match(KEYS, 7) == [0, 1, 2]
    assert [kv.pool.priority(BlockId(each)) for each in range(3)] == [priority] * 3


def test_slots_of_one_that_is_published_late_can_be_copied() -> None:
    kv = make_manager(8, partial_reuse=True)
    first, second = fill(kv, 2), fill(kv, 2)
    kv.close(first)
    lose_cached(kv)
    assert kv.match_partly(BlockContent(KEYS[0], [2, 9])) is None
    kv.close(second)
    found = kv.match_partly(BlockContent(KEYS[0], [2, 9]))
    assert found is not None
    assert (found.block_ids, found.num_tokens) == ((3,), 1)


def test_no_slots_of_one_are_copied_whose_tokens_stand_for_attached_content() -> None:
    kv = make_manager(8, partial_reuse=True)
    first, second = fill(kv, 2, num_named=0), fill(kv, 2, num_named=0)
    kv.close(first)
    lose_cached(kv)
    kv.close(second)
    assert kv.match(KEYS, 5) == [2, 3]
    assert kv.partials is not None
    assert list(kv.partials.items()) == []
