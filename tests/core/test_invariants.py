"""The checker itself: a ledger that was tampered with is found out."""

import pytest
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core import invariants
from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.sequence import SequenceState


@pytest.fixture
def driver() -> ReplicaDriver:
    driver = ReplicaDriver(make_limits(num_blocks=8))
    driver.generate(make_request(range(8), 1))
    driver.submit(make_request(range(10), 9))
    driver.submit(make_request(range(50, 55), 9, request_id="q1"))
    driver.step()
    invariants.check(driver.replica)
    return driver


def first(driver: ReplicaDriver) -> SequenceState:
    return driver.replica.batcher.running[0]


def test_a_holder_that_nobody_knows_is_found(driver: ReplicaDriver) -> None:
    driver.replica.kv.pool.share(first(driver).table.block_ids[:1])
    with pytest.raises(LedgerError, match="has count 2 and 1 holders"):
        invariants.check(driver.replica)


def test_a_block_that_was_let_go_and_is_still_listed_is_found(driver: ReplicaDriver) -> None:
    driver.replica.kv.pool.release(first(driver).table.block_ids[-1:])
    with pytest.raises(LedgerError, match="has count 0 and 1 holders"):
        invariants.check(driver.replica)


def test_a_block_listed_twice_is_found(driver: ReplicaDriver) -> None:
    table = first(driver).table
    table.append(table.block_ids[:1])
    with pytest.raises(LedgerError, match="lists a block twice"):
        invariants.check(driver.replica)


def test_a_key_without_a_sealed_block_is_found(driver: ReplicaDriver) -> None:
    driver.replica.kv.pool.unseal(first(driver).table.block_ids[0])
    with pytest.raises(LedgerError, match="has a key and is not sealed"):
        invariants.check(driver.replica)


def test_a_key_of_a_free_block_is_found(driver: ReplicaDriver) -> None:
    free = driver.replica.kv.pool.free_ids[0]
    driver.replica.kv.index.publish(BlockKey(b"k" * 32), free)
    with pytest.raises(LedgerError, match=f"block {free} has a key and is not sealed"):
        invariants.check(driver.replica)


def test_a_table_with_a_block_too_many_is_found(driver: ReplicaDriver) -> None:
    sequence = first(driver)
    driver.replica.kv.grow(sequence.table, sequence.table.num_slots + 1)
    with pytest.raises(LedgerError, match="wastes"):
        invariants.check(driver.replica)


def test_a_sequence_out_of_order_is_found(driver: ReplicaDriver) -> None:
    first(driver).arrival = 99
    with pytest.raises(LedgerError, match="out of order"):
        invariants.check(driver.replica)


def test_a_sequence_over_its_length_is_found(driver: ReplicaDriver) -> None:
    first(driver).max_known = 3
    with pytest.raises(LedgerError, match="longer than allowed"):
        invariants.check(driver.replica)


def test_a_step_over_budget_is_found(driver: ReplicaDriver) -> None:
    driver.replica.batcher.max_num_batched_tokens = 1
    with pytest.raises(LedgerError, match="over budget"):
        invariants.check(driver.replica)


def test_a_cached_block_without_a_key_is_found() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8))
    driver.generate(make_request(range(8), 1))
    driver.replica.kv.index.remove([BlockId(0)])
    with pytest.raises(LedgerError, match="are CACHED, have no key"):
        invariants.check(driver.replica)
