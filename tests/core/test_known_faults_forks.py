"""Known faults of other runtimes: parallel samples. Ids are those of the docs.

The numbers are the cases' own. "Free" is FREE + CACHED.
"""

import pytest
from batcher_driver import BatcherDriver
from replica_driver import ReplicaDriver, Stream, make_limits, make_request

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.ids import Attempt, BlockId, RequestId
from rayserve_paged.core.replica_messages import FenceReplica
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.sequence import Phase, SequenceState
from rayserve_paged.sim.fingerprint_rank import oracle

Q0 = (RequestId("q0"), Attempt(0))


def samples_of(driver: ReplicaDriver, request: Request) -> list[Stream]:
    reader = driver.reader(request.consumer_id)
    return [reader.stream(request, sibling) for sibling in range(request.params.n)]


def sequences_of(driver: ReplicaDriver, request: Request) -> list[SequenceState]:
    found = [s for s in driver.replica.sequences if s.request.request_id == request.request_id]
    return sorted(found, key=lambda sequence: sequence.sibling)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("budget", [64, 1])
def test_b10_a_forked_table_behind_a_window_frees_each_block_once(
    budget: int, pipeline_depth: int
) -> None:
    limits = make_limits(num_blocks=16, block_size=4)
    driver = ReplicaDriver(limits, max_num_batched_tokens=budget, pipeline_depth=pipeline_depth)
    request = make_request(range(8), 12, temperature=1.0, seed=5, n=2, window=8)
    driver.submit(request)
    running: list[tuple[int, ...]] = []
    while driver.step():
        running.append(tuple(s.sibling for s in driver.replica.sequences))
        for sequence in driver.replica.sequences:
            listed = sequence.table.block_ids
            assert len(set(listed)) == len(listed) <= 4
    driver.poll()
    # With a budget of one token they take turns, and the first one ends before the second.
    assert ((1,) in running) == (budget == 1)
    for sibling, stream in enumerate(samples_of(driver, request)):
        assert stream.token_ids == oracle(request, limits, sibling).token_ids
        assert len(stream.token_ids) == 12
    pool = driver.replica.kv.pool
    assert pool.num_free + pool.num_cached == 16
    assert {pool.count(BlockId(block)) for block in range(16)} == {0}
    assert sorted((*pool.free_ids, *pool.cached_ids)) == list(range(16))


def test_b13_a_fork_copies_the_partly_filled_block_once_and_shares_the_full_ones() -> None:
    request = make_request(range(6), 8, temperature=1.0, seed=3, n=2)
    expected = [oracle(request, make_limits(), sibling).token_ids for sibling in (0, 1)]
    assert expected[0][0] != expected[1][0]
    run = BatcherDriver(request, make_limits(num_blocks=8))
    parent, child = run.step()
    assert parent.table.block_ids == child.table.block_ids
    b0, b1 = parent.table.block_ids
    run.step()
    assert [(target, count) for _source, target, count in run.copies] == [
        (child.table.block_ids[1], 2)
    ]
    assert parent.table.block_ids == [b0, b1], "the last to write alone writes in place"
    assert (run.pool.num_held, run.pool.count(b0)) == (3, 2)
    run.step()
    run.step()
    assert [run.batcher.num_computed(sequence) for sequence in (parent, child)] == [9, 9]
    assert (run.pool.num_held, len(run.copies)) == (5, 1)
    assert child.row is not None
    before = run.rank.read(child.row, 9).tolist()
    run.batcher.end(parent, FinishReason.CANCELLED)
    assert run.pool.num_held == 3
    while child.phase is Phase.RUNNING:
        assert run.rank.read(child.row, 9).tolist() == before
        run.step()
    assert tuple(child.tokens[6:]) == expected[1]
    assert tuple(parent.tokens[6:]) == expected[0][:4]
    assert run.pool.num_available == 8


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 6, 8])
def test_b13_samples_are_those_of_separate_runs(num_prompt: int, pipeline_depth: int) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), pipeline_depth=pipeline_depth)
    request = make_request(range(num_prompt), 9, temperature=1.0, seed=3, n=4)
    driver.generate(request)
    for sibling, stream in enumerate(samples_of(driver, request)):
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits, sibling)
    assert sum(row.num_tokens for row in driver.rank.history[0]) == num_prompt
    assert [sum(row.num_tokens for row in step) for step in driver.rank.history[1:]] == [4] * 8
    assert driver.num_free == 32


def test_b14a_an_abort_after_one_sample_has_ended_leaves_none_behind() -> None:
    limits = make_limits(num_blocks=32)
    request = make_request(range(8), 9, temperature=1.0, seed=2, n=4)
    outputs = [oracle(request, limits, sibling).token_ids for sibling in range(4)]
    stop = outputs[1][1]
    assert [stop in tokens[:3] for tokens in outputs] == [False, True, False, False]
    request = make_request(range(8), 9, temperature=1.0, seed=2, n=4, stop_token_ids=(stop,))
    driver = ReplicaDriver(limits)
    driver.submit(request)
    while len(sequences_of(driver, request)) != 3:
        driver.step()
    driver.step()
    driver.cancel(request)
    assert sequences_of(driver, request) == []
    driver.run()
    streams = samples_of(driver, request)
    assert [stream.finish for stream in streams] == [
        FinishReason.CANCELLED,
        FinishReason.STOP,
        FinishReason.CANCELLED,
        FinishReason.CANCELLED,
    ]
    assert [len(stream.token_ids) for stream in streams] == [3, 2, 3, 3]
    assert driver.num_free == 32
    assert driver.replica.batcher.num_running == driver.replica.batcher.num_waiting == 0
    assert [name for report in driver.reports for name in report.finished] == [Q0]


def test_b14b_more_samples_than_rows_are_refused_at_the_door() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), max_num_seqs=3)
    with pytest.raises(InvalidInputError) as refused:
        driver.submit(make_request(range(8), 4, n=4))
    assert (refused.value.field, refused.value.value) == ("n", 4)
    assert "at most 3" in str(refused.value)
    assert driver.replica.sequences == ()


def test_b14b_a_group_waits_until_there_is_a_row_for_each_sample() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), max_num_seqs=4)
    other = make_request([50, 51], 6, request_id="other")
    group = make_request(range(8), 4, temperature=1.0, n=4)
    late = make_request([60], 3, request_id="late")
    driver.submit(other)
    driver.submit(group)
    driver.submit(late)
    numbers = set()
    while driver.plan is not None:
        mine = [s for s in driver.replica.batcher.running if s.request.request_id == "q0"]
        numbers.add(sum(1 + sequence.num_unborn for sequence in mine))
        assert driver.replica.batcher.num_running <= 4
        driver.step()
    assert numbers == {0, 4}, "all of a group run, or none"
    driver.run()
    for sibling, stream in enumerate(samples_of(driver, group)):
        assert (stream.token_ids, stream.finish) == oracle(group, driver.limits, sibling)


def test_b14b_blocks_for_three_samples_serve_four_in_turn() -> None:
    # Two blocks of prompt are shared; each sample needs two of its own: 8 of 10 blocks for three.
    driver = ReplicaDriver(make_limits(num_blocks=8), max_num_seqs=4)
    group = make_request(range(8), 9, temperature=1.0, n=4)
    driver.generate(group)
    for sibling, stream in enumerate(samples_of(driver, group)):
        assert (stream.token_ids, stream.finish) == oracle(group, driver.limits, sibling)
    assert driver.replica.batcher.num_preemptions > 0
    assert driver.num_free == 8


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("ends", ["cancel", "lease", "waiting", "poison", "fence"])
def test_b14c_a_group_that_ends_before_it_is_forked_ends_as_a_whole(
    ends: str, pipeline_depth: int
) -> None:
    driver = ReplicaDriver(
        make_limits(num_blocks=16), max_num_seqs=4, pipeline_depth=pipeline_depth
    )
    request = make_request(range(8), 9, temperature=1.0, seed=7, n=4)
    if ends == "poison":
        driver.rank.poison.add((7, 0, 2))
    if ends == "waiting":
        driver.submit(make_request([1], 4, request_id="other"))
    driver.submit(request)
    (leader,) = sequences_of(driver, request)
    assert leader.num_unborn == 3
    if ends == "lease":
        driver.tick(10.0)
    elif ends == "fence":
        driver.send(FenceReplica("lost"))
    elif ends != "poison":
        driver.cancel(request)
    driver.run()
    finish = FinishReason.ERROR if ends == "poison" else FinishReason.CANCELLED
    goes_on = ends in ("lease", "fence")
    assert driver.goes_on(request) == goes_on
    ended = (None, ()) if goes_on else (finish, ())
    assert {(s.finish, s.token_ids) for s in samples_of(driver, request)} == {ended}
    assert driver.replica.sequences == ()
    assert driver.replica.batcher.num_running == driver.replica.batcher.num_waiting == 0
    assert driver.num_free == 16
    finished = [name for report in driver.reports for name in report.finished]
    assert finished.count(Q0) == (ends != "fence")
    if ends != "fence":
        driver.rank.poison.clear()
        again = make_request(range(8), 9, temperature=1.0, request_id="again", n=4)
        driver.generate(again)
        for sibling, stream in enumerate(samples_of(driver, again)):
            assert (stream.token_ids, stream.finish) == oracle(again, driver.limits, sibling)


def test_b14_a_sample_that_fails_after_the_fork_fails_alone() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), poison=[(7, 3, 2)])
    request = make_request(range(6), 9, temperature=1.0, seed=7, n=4)
    driver.generate(request)
    streams = samples_of(driver, request)
    failed = streams.pop(2)
    assert (failed.finish, failed.error) == (FinishReason.ERROR, "draw 3 is poisoned")
    assert failed.token_ids == oracle(request, driver.limits, 2).token_ids[:3]
    for sibling, stream in zip((0, 1, 3), streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits, sibling)
    assert driver.num_free == 32
