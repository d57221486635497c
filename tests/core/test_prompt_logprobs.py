import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import ReplicaDriver, Stream, make_limits, make_request

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.replica_messages import CancelRequest, StepFinished
from rayserve_paged.core.request import Request
from rayserve_paged.sim.fingerprint_rank import oracle, prompt_oracle


def assert_right(driver: ReplicaDriver, request: Request, stream: Stream) -> None:
    assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert stream.prompt_logprobs == prompt_oracle(request)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("partial_reuse", [False, True])
def test_b59_a_cached_prompt_is_scored_whole_and_in_chunks(
    pipeline_depth: int, partial_reuse: bool
) -> None:
    driver = ReplicaDriver(
        make_limits(32, 16),
        max_num_batched_tokens=10,
        pipeline_depth=pipeline_depth,
        partial_reuse=partial_reuse,
    )
    first = make_request(range(33), prompt_logprobs=2)
    again = dataclasses.replace(first, request_id="q1")
    other = make_request([*range(32), 90], request_id="q2", prompt_logprobs=2)
    for request in (first, again, other):
        (stream,) = driver.generate(request)
        assert stream.num_cached_tokens == 0
        assert len(stream.prompt_logprobs) == 32
        assert_right(driver, request, stream)
    # Their blocks are found by whoever asks for no scores.
    (plain,) = driver.generate(make_request(range(33), request_id="q3"))
    assert (plain.num_cached_tokens, plain.prompt_logprobs) == (32, ())


def test_a_request_that_asks_for_no_scores_has_none_planned() -> None:
    driver = ReplicaDriver(make_limits())
    driver.submit(make_request(range(9), logprobs=None))
    assert driver.plan is not None
    assert driver.plan.scored is None


def test_a_step_scores_what_it_computes_but_the_last_prompt_token() -> None:
    driver = ReplicaDriver(make_limits(), max_num_batched_tokens=7)
    driver.submit(make_request([50, 51, 52], 20, request_id="plain"))
    driver.step()
    driver.submit(make_request(range(10, 18), 2, prompt_logprobs=0))
    seen = []
    while driver.plan is not None:
        scored = driver.plan.scored
        if scored is not None:
            seen.append((scored.indices.tolist(), scored.targets.tolist()))
        driver.step()
    # One of seven tokens is the other row's; eight prompt tokens take two steps.
    assert seen == [([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]), ([1], [17])]


def test_whoever_enters_the_row_of_a_cancelled_prompt_is_not_scored() -> None:
    driver = ReplicaDriver(make_limits(max_num_seqs=1), max_num_batched_tokens=4)
    scored = make_request(range(12), prompt_logprobs=0)
    driver.submit(scored)
    driver.step()
    driver.cancel(scored)
    driver.run()
    (stream,) = driver.generate(make_request(range(20, 32), request_id="q1"))
    assert stream.prompt_logprobs == ()


def test_a_prompt_of_one_token_has_no_scores() -> None:
    driver = ReplicaDriver(make_limits())
    (stream,) = driver.generate(make_request([5], prompt_logprobs=3))
    assert stream.prompt_logprobs == ()
    assert len(stream.token_ids) == 4


def test_samples_of_one_prompt_get_its_scores_once_with_the_first() -> None:
    driver = ReplicaDriver(make_limits(32), max_num_batched_tokens=6)
    request = make_request(range(10), n=3, temperature=1.0, prompt_logprobs=1)
    (stream,) = driver.generate(request)
    assert stream.prompt_logprobs == prompt_oracle(request)
    reader = driver.reader()
    assert all(reader.stream(request, sibling).prompt_logprobs == () for sibling in (1, 2))


def test_scores_go_to_the_first_sample_that_is_not_cancelled() -> None:
    driver = ReplicaDriver(make_limits(32), max_num_batched_tokens=6)
    request = make_request(range(10), n=3, temperature=1.0, prompt_logprobs=1)
    driver.submit(request)
    driver.send(CancelRequest(request.request_id, request.attempt, 0))
    driver.run()
    reader = driver.reader()
    scores = [reader.stream(request, sibling).prompt_logprobs for sibling in range(3)]
    assert scores == [(), prompt_oracle(request), ()]


def test_scores_that_were_delivered_twice_are_taken_once() -> None:
    driver = ReplicaDriver(make_limits())
    request = make_request(range(9), 3, prompt_logprobs=1)
    stream = driver.submit(request)
    for _ in range(2):
        driver.step()
        driver.poll(lose_answers=True)
    assert stream.token_ids == ()
    driver.run()
    assert_right(driver, request, stream)


def test_a_resumed_prompt_reads_from_the_cache_what_it_has_scored() -> None:
    driver = ReplicaDriver(make_limits(16, 4), max_num_batched_tokens=6)
    request = make_request(range(22), 3, prompt_logprobs=1)
    stream = driver.submit(request)
    sequence = driver.sequence(request)
    # 12 tokens are computed and scored, which are 3 sealed blocks.
    driver.send(StepFinished(driver.execute()))
    result = driver.execute()
    driver.replica.batcher.commit(result)
    assert sequence.scores is not None
    assert sequence.scores.num_done == 12
    driver.replica.batcher.preempt(sequence)
    assert sequence.num_matchable == 13
    driver.submit(make_request([90], 1, request_id="wakes the batcher"))
    driver.run()
    assert driver.replica.batcher.num_resumed_tokens == 12
    assert_right(driver, request, stream)
    assert stream.num_cached_tokens == 0


def test_a_cancelled_request_delivers_no_part_of_its_scores() -> None:
    driver = ReplicaDriver(make_limits(), max_num_batched_tokens=4)
    request = make_request(range(12), prompt_logprobs=1)
    stream = driver.submit(request)
    driver.step()
    driver.send(CancelRequest(request.request_id, request.attempt))
    driver.run()
    assert (stream.token_ids, stream.prompt_logprobs) == ((), ())
    assert driver.num_free == 16


@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 14), st.sampled_from([None, 0, 2]), st.integers(1, 2)),
        min_size=1,
        max_size=6,
    ),
    num_blocks=st.integers(9, 20),
    partial_reuse=st.booleans(),
    budget=st.sampled_from([1, 3, 7, 64]),
    pipeline_depth=st.sampled_from([1, 2]),
)
def test_scores_are_right_under_any_pressure(
    prompts: list[tuple[int, int | None, int]],
    num_blocks: int,
    partial_reuse: bool,
    budget: int,
    pipeline_depth: int,
) -> None:
    driver = ReplicaDriver(
        make_limits(num_blocks, 2),
        max_num_batched_tokens=budget,
        pipeline_depth=pipeline_depth,
        max_decode_steps=3,
        partial_reuse=partial_reuse,
    )
    requests = [
        make_request(
            range(size), 4, request_id=f"q{i}", prompt_logprobs=count, n=n, temperature=1.0
        )
        for i, (size, count, n) in enumerate(prompts)
    ]
    for request, stream in zip(requests, driver.generate(*requests), strict=True):
        assert stream.token_ids == oracle(request, driver.limits).token_ids
        wanted = request.params.prompt_logprobs is not None
        assert stream.prompt_logprobs == (prompt_oracle(request) if wanted else ())


@pytest.mark.parametrize("value", [-1, 21, 1.0, True, "1"])
def test_a_number_of_logprobs_out_of_range_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match="an integer from 0 to 20, or None"):
        make_request([1], prompt_logprobs=value)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_who_wants_scores_waits_for_nobody_to_compute_its_prefix() -> None:
    driver = ReplicaDriver(make_limits(32, 4), max_num_batched_tokens=64)
    first = make_request(range(24), 2, prompt_logprobs=0)
    again = dataclasses.replace(first, request_id="q1")
    plain = make_request(range(24), 2, request_id="q2")
    streams = [driver.submit(request) for request in (first, again, plain)]
    driver.step()
    assert driver.sequence(again).row is not None
    driver.run()
    for request, stream in zip((first, again), streams, strict=False):
        assert_right(driver, request, stream)
    # Who wants none takes the blocks that they compute.
    assert [stream.num_cached_tokens for stream in streams] == [0, 0, 20]
