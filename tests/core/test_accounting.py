from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.accounting import account, block_map
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.ids import BlockId


def test_two_sequences_that_share_a_prefix_are_counted_once_where_they_share() -> None:
    pool = BlockPool(7, free_order=[5, 1, 6, 3, 0, 2, 4])
    first = pool.allocate(3)
    assert first is not None
    assert first.block_ids == [5, 1, 6]
    pool.share([BlockId(5)])
    second = pool.allocate(1)
    assert second is not None
    tables = [(first.block_ids, 10), ([BlockId(5), *second.block_ids], 7)]
    assert tables[1][0] == [5, 3]
    figures = account(tables, pool, block_size=4)
    assert figures.allocated_slots == 16
    assert figures.unique_live_tokens == 13
    assert figures.internal_fragmentation_slots == 3
    assert figures.prefix_sharing_saved_slots == 4
    assert (figures.num_held_blocks, figures.num_shared_blocks) == (4, 1)
    assert figures.block_map == ".#.#.=#"


def test_an_empty_pool_has_no_figures() -> None:
    figures = account([], BlockPool(3), block_size=4)
    assert (figures.allocated_slots, figures.unique_live_tokens) == (0, 0)
    assert (figures.num_free_blocks, figures.block_map) == (3, "...")


def test_the_map_shows_free_held_shared_and_cached() -> None:
    pool = BlockPool(4)
    allocation = pool.allocate(3)
    assert allocation is not None
    held, shared, cached = allocation.block_ids
    pool.share([shared])
    pool.seal(cached)
    pool.release([cached])
    assert block_map(pool) == "#=o."
    assert pool.count(held) == 1


def test_a_replica_accounts_for_the_tokens_that_its_step_in_flight_writes() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8))
    driver.submit(make_request(range(10), 4))
    figures = driver.replica.accounting()
    assert (figures.unique_live_tokens, figures.allocated_slots) == (10, 12)
    driver.submit(make_request([*range(8), 50, 51, 52], 4, request_id="q1"))
    driver.step()
    figures = driver.replica.accounting()
    assert figures.unique_live_tokens == 11 + 3
    assert figures.allocated_slots == 16
    assert figures.internal_fragmentation_slots == 2
    assert figures.prefix_sharing_saved_slots == 8
    assert figures.num_shared_blocks == 2
    driver.run()
    figures = driver.replica.accounting()
    assert (figures.num_held_blocks, figures.unique_live_tokens) == (0, 0)
    assert figures.num_free_blocks + figures.num_cached_blocks == 8
