import pytest
from replica_driver import make_scope

from rayserve_paged.core.block_identity import extend_chain
from rayserve_paged.core.block_pool import BlockPool, BlockState
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.kv_manager import KVManager

KEYS = extend_chain(make_scope().root(), list(range(16)), 4)


def make_manager(num_blocks: int) -> KVManager:
    return KVManager(BlockPool(num_blocks), block_size=4)


def fill(manager: KVManager, num_blocks: int) -> BlockTable:
    """Compute and seal the first blocks of the chain, and hold them."""
    table = manager.open([])
    assert manager.grow(table, num_blocks * 4) is not None
    for block_id, key in zip(table.block_ids, KEYS, strict=False):
        manager.seal(block_id, key)
    return table


def test_at_most_all_tokens_but_the_last_come_from_the_cache() -> None:
    manager = make_manager(4)
    fill(manager, 3)
    matches = [len(manager.match(KEYS, num_tokens)) for num_tokens in (0, 1, 4, 5, 8, 9, 12, 13)]
    assert matches == [0, 0, 0, 1, 1, 2, 2, 3]


def test_a_match_holds_nothing_until_it_is_opened() -> None:
    manager = make_manager(4)
    manager.close(fill(manager, 2))
    matched = manager.match(KEYS, 9)
    assert manager.pool.num_held == 0
    table = manager.open(matched)
    assert table.block_ids == matched == [0, 1]
    assert manager.pool.num_held == 2


def test_a_table_grows_by_what_it_lacks() -> None:
    manager = make_manager(3)
    table = manager.open([])
    assert manager.grow(table, 5) == [0, 1]
    assert manager.grow(table, 8) == []
    assert manager.grow(table, 9) == [2]


def test_a_shortage_changes_neither_table_nor_pool() -> None:
    manager = make_manager(2)
    table = manager.open([])
    manager.grow(table, 4)
    assert manager.grow(table, 12) is None
    assert table.block_ids == [0]
    assert manager.pool.num_available == 1


def test_a_block_is_matched_only_once_it_is_sealed() -> None:
    manager = make_manager(2)
    table = manager.open([])
    manager.grow(table, 4)
    assert manager.match(KEYS, 5) == []
    manager.seal(table.block_ids[0], KEYS[0])
    assert manager.match(KEYS, 5) == [0]


def test_a_duplicate_of_a_sealed_block_is_free_once_it_is_released() -> None:
    manager = make_manager(2)
    first, second = fill(manager, 1), fill(manager, 1)
    manager.close(second)
    assert manager.pool.state(BlockId(1)) is BlockState.FREE
    manager.close(first)
    assert manager.pool.state(BlockId(0)) is BlockState.CACHED


def test_what_follows_a_duplicate_is_cached_behind_the_published_block() -> None:
    manager = make_manager(8)
    first, second = fill(manager, 2), fill(manager, 4)
    assert (first.block_ids, second.block_ids) == ([0, 1], [2, 3, 4, 5])
    assert manager.duplicates == {2: KEYS[0], 3: KEYS[1]}
    manager.close(first)
    manager.close(second)
    # Not from the head that lay there before on: block 1, 0, 5, 4.
    assert manager.pool.cached_ids == (5, 4, 1, 0)
    assert manager.duplicates == {}
    assert manager.match(KEYS, 17) == [0, 1, 4, 5]


def test_a_duplicate_is_published_where_the_block_of_its_key_was_evicted() -> None:
    manager = make_manager(5)
    first, second = fill(manager, 1), fill(manager, 2)
    manager.close(first)
    assert manager.grow(manager.open([]), 12) == [3, 4, 0]
    assert manager.match(KEYS, 9) == []
    manager.close(second)
    assert manager.match(KEYS, 9) == [1, 2]
    assert manager.pool.cached_ids == (2, 1)


def test_a_duplicate_that_forks_share_is_traded_by_each() -> None:
    manager = make_manager(8)
    first, second = fill(manager, 1), fill(manager, 2)
    child = manager.fork(second)
    manager.close(second)
    assert manager.duplicates == {1: KEYS[0]}
    assert [manager.pool.count(BlockId(block_id)) for block_id in (0, 1, 2)] == [1, 1, 1]
    manager.close(child)
    manager.close(first)
    assert manager.duplicates == {}
    assert manager.pool.cached_ids == (2, 0)
    assert manager.pool.num_held == 0


@pytest.mark.parametrize(("resumes", "expected"), [(False, (1, 0, 2, 3)), (True, (0, 1, 2, 3))])
def test_a_block_that_requests_found_lasts_longer_and_one_that_was_resumed_on_does_not(
    resumes: bool, expected: tuple[int, ...]
) -> None:
    manager = make_manager(8)
    manager.close(fill(manager, 1))
    for _ in range(3):
        manager.close(manager.open(manager.match(KEYS, 5), resumes=resumes))
    tables = [manager.open([]) for _ in range(3)]
    for number, table in enumerate(tables):
        manager.grow(table, 4)
        (key,) = extend_chain(make_scope().root(), [50 + number] * 4, 4)
        manager.seal(table.block_ids[0], key)
    for table in tables:
        manager.close(table)
    # Found three times, at an age of 3 it is worth as much as an unused one of 3 / sqrt(3 + 1).
    assert manager.pool.cached_ids == expected


def test_a_run_of_blocks_is_sealed_as_its_blocks_are() -> None:
    manager = make_manager(8)
    first, second = manager.open([]), manager.open([])
    for table in (first, second):
        manager.grow(table, 12)
    manager.seal_run(first.run(0, 2), KEYS[:2])
    assert manager.match(KEYS, 13) == [0, 1]
    assert not manager.duplicates
    # Two of these are there already; the third is not.
    manager.seal_run(second.run(0, 3), KEYS[:3])
    assert manager.match(KEYS, 13) == [0, 1, 5]
    assert list(manager.duplicates) == [3, 4]
    manager.seal_run(first.run(2, 2), [])
    manager.close(second)
    manager.close(first)
    assert manager.pool.num_cached == 3
    assert manager.match(KEYS, 13) == [0, 1, 5]


def test_a_run_with_a_block_that_nobody_holds_is_refused() -> None:
    manager = make_manager(4)
    with pytest.raises(LedgerError, match="block 3 is not HELD"):
        manager.seal_run([BlockId(3)], KEYS[:1])


def test_tables_grow_together_as_they_do_one_by_one() -> None:
    together, one_by_one = make_manager(6), make_manager(6)
    tables = [together.open([]) for _ in range(3)]
    singles = [one_by_one.open([]) for _ in range(3)]
    for lengths in ([4, 5, 0], [4, 8, 1], [5, 9, 2]):
        grown = [one_by_one.grow(*each) for each in zip(singles, lengths, strict=True)]
        assert together.grow_all(tables, lengths) == grown
    # One block is left, and two are missing: nobody gets any.
    before = [list(table.block_ids) for table in tables]
    together.close(tables.pop())
    before.pop()
    assert together.pool.num_free == 1
    assert together.grow_all(tables, [9, 13]) is None
    assert [table.block_ids for table in tables] == before
    assert together.pool.num_free == 1


def test_blocks_that_tables_get_by_eviction_cannot_be_matched_any_more() -> None:
    manager = make_manager(2)
    manager.close(fill(manager, 2))
    tables = [manager.open([]), manager.open([])]
    assert manager.grow_all(tables, [4, 4]) == [[1], [0]]
    assert manager.match(KEYS, 9) == []


def test_discarded_blocks_cannot_be_matched() -> None:
    manager = make_manager(2)
    table = fill(manager, 2)
    manager.discard(table)
    assert table.block_ids == []
    assert manager.match(KEYS, 9) == []
    assert manager.pool.num_free == 2
    assert not manager.index.has_changes


def test_a_discard_leaves_what_others_hold() -> None:
    manager = make_manager(3)
    table = fill(manager, 2)
    other = manager.open(manager.match(KEYS, 5))
    manager.discard(table)
    assert manager.match(KEYS, 9) == [0]
    manager.close(other)
    assert manager.pool.cached_ids == (0,)
    assert manager.pool.num_free == 2


def test_a_fork_shares_every_block_and_the_tail_is_replaced_by_a_new_one() -> None:
    manager = KVManager(BlockPool(4), block_size=4)
    table = manager.open([])
    manager.grow(table, 6)
    child = manager.fork(table)
    assert child.block_ids == table.block_ids == [0, 1]
    assert [manager.pool.count(block_id) for block_id in table.block_ids] == [2, 2]
    assert manager.replace(child, 1) == (1, 2)
    assert (table.block_ids, child.block_ids) == ([0, 1], [0, 2])
    assert manager.pool.count(BlockId(1)) == 2, "the old one is held until it was copied"
    manager.pool.release([BlockId(1)])
    manager.close(table)
    assert manager.pool.num_held == 2
    manager.close(child)
    assert manager.pool.num_free == 4


def test_a_block_is_not_replaced_where_none_is_available() -> None:
    manager = KVManager(BlockPool(2), block_size=4)
    table = manager.open([])
    manager.grow(table, 6)
    child = manager.fork(table)
    assert manager.replace(child, 1) is None
    assert child.block_ids == [0, 1]
    assert manager.pool.count(BlockId(1)) == 2


def test_a_block_that_is_evicted_to_replace_another_stops_being_matchable() -> None:
    manager = KVManager(BlockPool(3), block_size=4)
    (key,) = extend_chain(make_scope().root(), range(4), 4)
    old = manager.open([])
    manager.grow(old, 4)
    manager.seal(old.block_ids[0], key)
    manager.close(old)
    table = manager.open([])
    manager.grow(table, 6)
    child = manager.fork(table)
    assert manager.match([key], 5) == [0]
    assert manager.replace(child, 1) == (2, 0)
    assert manager.match([key], 5) == []


def test_what_is_discarded_of_a_fork_is_what_it_holds_alone() -> None:
    manager = KVManager(BlockPool(4), block_size=4)
    first, second = extend_chain(make_scope().root(), range(8), 4)
    table = manager.open([])
    manager.grow(table, 4)
    manager.seal(table.block_ids[0], first)
    child = manager.fork(table)
    manager.grow(child, 8)
    manager.seal(child.block_ids[1], second)
    manager.discard(child)
    assert manager.match([first, second], 9) == [0]
    assert manager.pool.num_free == 3
