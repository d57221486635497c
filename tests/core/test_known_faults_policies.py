"""Known faults of other runtimes: who goes first. Ids are those of the docs.

The numbers are the cases' own.
"""

import pytest
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.sequence import Phase
from rayserve_paged.sim.fingerprint_rank import oracle


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_b43_an_urgent_request_starts_by_the_next_step_where_sequences_are_the_limit(
    pipeline_depth: int,
) -> None:
    limits = make_limits(num_blocks=520, max_model_len=4096)
    driver = ReplicaDriver(limits, max_num_seqs=2, pipeline_depth=pipeline_depth)
    lows = [make_request([i], 1000, request_id=f"low{i}", priority=1) for i in (0, 1)]
    streams = [driver.submit(low) for low in lows]
    sequences = [driver.sequence(low) for low in lows]
    while len(driver.rank.history) < 10 - pipeline_depth:
        driver.step()
    assert driver.plan is not None
    assert driver.plan.step_id == 9, "the tenth is in flight"
    urgent = make_request([7] * 5, 5, request_id="urgent")
    urgent_stream = driver.submit(urgent)
    assert driver.sequence(urgent).phase is Phase.WAITING
    while len(driver.rank.history) < 10:
        driver.step()
    eleventh = driver.plans[0]
    assert eleventh.step_id == 10
    assert driver.sequence(urgent).row in eleventh.rows.tolist()
    while len(driver.rank.history) < 12 - pipeline_depth:
        driver.step()
    equal = make_request([8] * 5, 5, request_id="equal", priority=1)
    equal_stream = driver.submit(equal)
    driver.run()
    assert sum(sequence.num_preemptions for sequence in sequences) == 1
    assert driver.replica.batcher.num_preemptions == 1
    assert (urgent_stream.token_ids, urgent_stream.finish) == oracle(urgent, limits)
    assert (equal_stream.token_ids, equal_stream.finish) == oracle(equal, limits)
    for low, stream in zip(lows, streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(low, limits)


def test_b43_an_urgent_request_starts_by_the_next_step_where_blocks_are_the_limit() -> None:
    limits = make_limits(num_blocks=12, block_size=4)
    driver = ReplicaDriver(limits, max_num_seqs=4)
    lows = [make_request([i] * 8, 12, request_id=f"low{i}", priority=1) for i in (0, 1)]
    streams = [driver.submit(low) for low in lows]
    for _ in range(10):
        driver.step()
    urgent = make_request([7] * 17, 4, request_id="urgent")
    urgent_stream = driver.submit(urgent)
    assert driver.sequence(urgent).phase is Phase.WAITING
    driver.step()
    assert driver.sequence(urgent).phase is Phase.RUNNING
    assert [driver.sequence(low).phase for low in lows].count(Phase.WAITING) == 1
    driver.run()
    assert (urgent_stream.token_ids, urgent_stream.finish) == oracle(urgent, limits)
    for low, stream in zip(lows, streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(low, limits)
