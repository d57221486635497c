import pytest

from rayserve_paged.core.block_pool import Allocation, BlockPool, BlockState
from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ids import BlockId


def allocate(pool: BlockPool, num_blocks: int) -> Allocation:
    allocation = pool.allocate(num_blocks)
    assert allocation is not None
    return allocation


def ids(*block_ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


def cache(pool: BlockPool, num_blocks: int) -> list[BlockId]:
    """Allocate, seal and release blocks."""
    block_ids = allocate(pool, num_blocks).block_ids
    for block_id in block_ids:
        pool.seal(block_id)
    pool.release(block_ids)
    return block_ids


def test_blocks_are_handed_out_in_ascending_order() -> None:
    pool = BlockPool(4)
    assert allocate(pool, 3) == ([0, 1, 2], [])
    assert allocate(pool, 1) == ([3], [])


def test_a_free_order_seeds_which_blocks_come_first() -> None:
    pool = BlockPool(7, free_order=[5, 1, 6, 3, 0, 2, 4])
    assert allocate(pool, 3).block_ids == [5, 1, 6]
    assert allocate(pool, 1).block_ids == [3]


@pytest.mark.parametrize("free_order", [[0, 0], [0], [0, 2], [1, 0, 2]])
def test_a_free_order_that_is_no_permutation_is_refused(free_order: list[int]) -> None:
    with pytest.raises(ValueError, match=r"not a permutation of 0\.\.1"):
        BlockPool(2, free_order=free_order)


def test_a_shortage_grants_nothing_and_changes_nothing() -> None:
    pool = BlockPool(3)
    cache(pool, 1)
    allocate(pool, 1)
    before = pool.free_ids, pool.cached_ids
    assert pool.allocate(3) is None
    assert (pool.free_ids, pool.cached_ids) == before
    assert pool.allocate(0) == ([], [])


def test_the_warmest_free_block_is_reused_first() -> None:
    pool = BlockPool(4)
    block_ids = allocate(pool, 3).block_ids
    pool.release([block_ids[1]])
    pool.release([block_ids[0]])
    assert allocate(pool, 3).block_ids == [0, 1, 3]


def test_cached_blocks_are_evicted_only_when_none_is_free_the_longest_unused_first() -> None:
    pool = BlockPool(4)
    first = cache(pool, 1)
    second = allocate(pool, 1).block_ids
    pool.seal(second[0])
    assert second != first
    pool.release(second)
    assert pool.cached_ids == (*first, *second)
    allocation = allocate(pool, 3)
    assert allocation.evicted == first
    assert allocation.block_ids[-1:] == first
    assert pool.cached_ids == tuple(second)
    assert not pool.is_sealed(first[0])


def test_the_tail_of_a_released_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    chain = cache(pool, 3)
    assert allocate(pool, 1).evicted == chain[2:]
    assert allocate(pool, 1).evicted == chain[1:2]


def test_sharing_a_cached_block_makes_it_the_newest_again() -> None:
    pool = BlockPool(2)
    first, second = cache(pool, 2)[::-1]
    assert pool.cached_ids == (first, second)
    pool.share([first])
    assert pool.state(first) is BlockState.HELD
    pool.release([first])
    assert pool.cached_ids == (second, first)


def test_a_block_moves_through_its_states() -> None:
    pool = BlockPool(1)
    (block_id,) = ids(0)
    assert pool.state(block_id) is BlockState.FREE
    allocate(pool, 1)
    pool.share([block_id])
    assert (pool.state(block_id), pool.count(block_id)) == (BlockState.HELD, 2)
    pool.seal(block_id)
    pool.release([block_id])
    assert pool.state(block_id) is BlockState.HELD
    pool.release([block_id])
    assert (pool.state(block_id), pool.count(block_id)) == (BlockState.CACHED, 0)
    pool.unseal(block_id)
    assert pool.state(block_id) is BlockState.FREE


def test_the_counts_always_add_up_to_the_capacity() -> None:
    pool = BlockPool(5)
    cache(pool, 2)
    held = allocate(pool, 1).block_ids
    pool.share(held)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 2, 1)
    assert pool.num_available == 4


def test_blocks_of_several_chains_are_released_one_by_one() -> None:
    pool = BlockPool(4)
    first, second = cache(pool, 2)
    plain = allocate(pool, 1).block_ids
    pool.share([second])
    pool.release_each([second, *plain])
    assert pool.cached_ids == (first, second)
    assert pool.num_free == 2
    with pytest.raises(LedgerError, match="nobody holds it"):
        pool.release_each(plain)


def test_a_double_free_is_refused() -> None:
    pool = BlockPool(2)
    block_ids = allocate(pool, 1).block_ids
    pool.release(block_ids)
    with pytest.raises(LedgerError, match="block 0 is released and nobody holds it"):
        pool.release(block_ids)
    assert pool.num_free == 2


def test_a_free_block_can_be_neither_shared_nor_sealed() -> None:
    pool = BlockPool(1)
    with pytest.raises(LedgerError, match="FREE"):
        pool.share(ids(0))
    with pytest.raises(LedgerError, match="not HELD"):
        pool.seal(BlockId(0))


def test_unsealing_a_held_block_makes_it_free_once_it_is_released() -> None:
    pool = BlockPool(1)
    block_ids = allocate(pool, 1).block_ids
    pool.seal(block_ids[0])
    pool.unseal(block_ids[0])
    pool.release(block_ids)
    assert pool.free_ids == (0,)
    pool.unseal(block_ids[0])
    assert pool.free_ids == (0,)


def test_frozen_blocks_are_evicted_before_sealed_ones_the_longest_unused_first() -> None:
    pool = BlockPool(6)
    sealed = cache(pool, 2)
    frozen = allocate(pool, 3).block_ids
    for block_id in frozen:
        pool.freeze(block_id)
        pool.release([block_id])
    assert allocate(pool, 1).evicted == []
    assert pool.cached_ids == (*frozen, *sealed[::-1])
    assert allocate(pool, 2).evicted == frozen[:2]
    assert [pool.is_frozen(block_id) for block_id in frozen] == [False, False, True]
    # What is left of the frozen ones does not do: a sealed one goes with it.
    assert allocate(pool, 2).evicted == [frozen[2], sealed[1]]
    assert pool.cached_ids == (sealed[0],)


def test_blocks_that_sharing_would_take_from_the_available_are_counted() -> None:
    pool = BlockPool(3)
    cached = cache(pool, 1)
    held = allocate(pool, 1).block_ids
    assert pool.num_cached_of([*cached, *held]) == 1
