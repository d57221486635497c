"""After a reset nothing of before is found, and whoever runs goes on over its own blocks."""

import dataclasses

import pytest
from cluster_driver import ClusterDriver
from replica_driver import ReplicaDriver, make_limits, make_request, prompt_keys

from rayserve_paged.core.ids import BlockKey
from rayserve_paged.core.replica_messages import ResetCache
from rayserve_paged.core.request import Request
from rayserve_paged.sim.fingerprint_rank import oracle


def make_driver(num_blocks: int = 16, block_size: int = 4, **options: int) -> ReplicaDriver:
    limits = make_limits(num_blocks, block_size, vocab_size=200)
    return ReplicaDriver(limits, **options)  # type: ignore[arg-type]


def num_reusable(driver: ReplicaDriver, request: Request) -> int:
    keys = prompt_keys(request, driver.scope)
    return len(driver.replica.kv.match(keys, len(request.prompt_token_ids)))


def test_b09_other_weights_find_nothing_that_the_old_ones_computed() -> None:
    driver = make_driver(block_size=16)
    request = make_request(range(48), 1)
    driver.generate(request)
    assert num_reusable(driver, request) == 2
    updated = dataclasses.replace(driver.scope, model_fingerprint=b"toy, second version")
    assert driver.replica.kv.match(prompt_keys(request, updated), 48) == []


def test_b09_after_a_reset_neither_the_replica_nor_the_router_finds_anything() -> None:
    cluster = ClusterDriver([make_limits(16, 16, vocab_size=200)])
    driver = next(iter(cluster.drivers.values()))
    request = make_request(range(48), 1)
    cluster.submit(request)
    cluster.run()
    known: set[BlockKey] = set()
    for report in driver.reports:
        known = (known | set(report.published)) - set(report.evicted)
    assert known == set(prompt_keys(request, driver.scope))
    assert num_reusable(driver, request) == 2
    commands = driver.send(ResetCache())
    assert num_reusable(driver, request) == 0
    (report,) = commands
    assert set(report.evicted) == known  # type: ignore[union-attr]
    pool = driver.replica.kv.pool
    assert (pool.num_cached, pool.num_free) == (0, 16)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_b09_a_reset_leaves_a_running_request_alone_and_caches_nothing_of_it(
    pipeline_depth: int,
) -> None:
    driver = make_driver(block_size=16, pipeline_depth=pipeline_depth)
    request = make_request(range(48), 20)
    stream = driver.submit(request)
    driver.step()
    held = driver.sequence(request).table.block_ids[:3]
    driver.send(ResetCache())
    assert driver.sequence(request).table.block_ids[:3] == held
    assert num_reusable(driver, request) == 0
    driver.run()
    assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert (driver.replica.kv.pool.num_free, len(driver.replica.kv.index)) == (16, 0)
    (again,) = driver.generate(
        dataclasses.replace(request, request_id=make_request([1]).request_id)
    )
    assert (again.num_cached_tokens, again.token_ids) == (0, stream.token_ids)


def test_what_starts_after_a_reset_is_cached_beside_what_runs_from_before() -> None:
    driver = make_driver()
    old, new = make_request(range(9), 12), make_request(range(9), 4, request_id="q1")
    driver.submit(old)
    driver.step()
    driver.send(ResetCache())
    stream = driver.submit(new)
    driver.run()
    assert stream.num_cached_tokens == 0
    assert num_reusable(driver, new) == 2
    assert stream.token_ids == oracle(new, driver.limits).token_ids
    assert driver.replica.kv.pool.num_cached == 3


def test_nobody_waits_for_a_prefix_that_will_not_be_cached() -> None:
    driver = make_driver(max_num_batched_tokens=4)
    first, second = make_request(range(24), 1), make_request(range(24), 1, request_id="q1")
    driver.submit(first)
    driver.submit(second)
    driver.step()
    assert list(driver.replica.batcher.prefix_waits.parked)
    driver.send(ResetCache())
    driver.step()
    assert not driver.replica.batcher.prefix_waits.parked
    driver.run()


def test_a_request_that_was_preempted_is_cached_again_once_it_resumes() -> None:
    driver = make_driver(num_blocks=8)
    streams = [driver.submit(make_request([i] * 9, 12, request_id=f"q{i}")) for i in range(2)]
    driver.step()
    driver.step()
    assert len(driver.replica.batcher.running) == 2
    driver.send(ResetCache())
    driver.run()
    assert driver.replica.batcher.num_preemptions == 1
    assert [len(stream.token_ids) for stream in streams] == [12, 12]
    # The first ran on as it was, the second was computed anew: 20 tokens fill 5 blocks.
    assert driver.replica.kv.pool.num_cached == 5
    assert num_reusable(driver, make_request([1] * 9, 1)) == 2


def test_a_sample_that_is_forked_after_a_reset_caches_nothing() -> None:
    driver = make_driver(max_num_batched_tokens=5)
    request = make_request(range(9), 8, n=2, temperature=1.0)
    driver.submit(request)
    driver.step()
    driver.send(ResetCache())
    driver.run()
    assert len(driver.reader().siblings) == 1
    assert driver.replica.kv.pool.num_free == 16


def test_leading_slots_of_before_are_not_copied_after_a_reset() -> None:
    driver = make_driver(partial_reuse=True)
    driver.generate(make_request(range(7), 1))
    assert driver.replica.kv.pool.num_cached == 2
    running = driver.submit(make_request(range(50, 56), 8, request_id="q1"))
    driver.step()
    driver.send(ResetCache())
    assert driver.replica.kv.pool.num_cached == 0
    driver.run()
    assert len(running.token_ids) == 8
    assert driver.replica.kv.pool.num_cached == 0, "nor its tail, which is frozen otherwise"
    (stream,) = driver.generate(make_request(range(7), 1, request_id="q2"))
    assert stream.num_cached_tokens == 0
