"""Known faults of other runtimes: validation, neighbours, books. Ids are those of the docs.

The numbers are the cases' own. "Free" is FREE + CACHED.
"""

import dataclasses
import math
import random
from typing import Any

import pytest
from cluster_driver import ClusterDriver
from replica_driver import (
    ReplicaDriver,
    make_limits,
    make_request,
)

from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.errors import CapacityError, DuplicateRequestError, InvalidInputError
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.request import FinishReason, admit
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.sim.fingerprint_rank import oracle

# --- validation -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_b85_max_tokens_below_1_is_refused(max_tokens: int) -> None:
    with pytest.raises(InvalidInputError) as refused:
        SamplingParams(max_tokens=max_tokens)
    assert (refused.value.field, refused.value.value) == ("max_tokens", max_tokens)


def test_b85_max_tokens_is_clamped_to_what_the_model_limit_leaves() -> None:
    limits = make_limits(num_blocks=4, block_size=8, max_model_len=32)
    driver = ReplicaDriver(limits)
    (stream,) = driver.generate(make_request([1] * 31, 10))
    assert (len(stream.token_ids), stream.finish) == (1, FinishReason.LENGTH)
    (stream,) = driver.generate(make_request([1] * 20, None))
    assert len(stream.token_ids) == 12
    for num_prompt in (32, 33):
        with pytest.raises(InvalidInputError, match="at most 31 tokens"):
            admit(make_request([1] * num_prompt, 10), limits)


def test_b85_a_smaller_pool_is_the_limit_that_is_advertised() -> None:
    limits = make_limits(num_blocks=3, block_size=8, max_model_len=32)
    assert limits.served_len == 24
    for max_tokens in (None, 1, 10):
        with pytest.raises(CapacityError):
            admit(make_request([1] * 25, max_tokens), limits)
    (stream,) = ReplicaDriver(limits).generate(make_request([1] * 24, None))
    assert len(stream.token_ids) == 1


@pytest.mark.parametrize("bad", [100, 2**31 - 1])
def test_b86_prompt_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    cluster = ClusterDriver([make_limits(vocab_size=100)])
    cluster.submit(make_request([5, bad], request_id="bad"))
    (error,) = cluster.rejected.values()
    assert isinstance(error, InvalidInputError)
    assert (error.field, error.value) == ("prompt_token_ids", bad)
    stream = cluster.submit(make_request([5, 99], request_id="good"))
    cluster.run()
    assert stream.finish is FinishReason.LENGTH


@pytest.mark.parametrize("bad", [-1, 2**31, 2**63 - 1, True, 3.0])
def test_b86_what_is_an_id_of_no_vocabulary_is_in_no_request(bad: int) -> None:
    with pytest.raises(InvalidInputError) as refused:
        make_request([5, bad])
    assert (refused.value.field, refused.value.value) == ("prompt_token_ids", bad)


def test_b87_stop_ids_outside_the_vocabulary_are_refused() -> None:
    limits = make_limits(vocab_size=100)
    request = make_request([5], 10, stop_token_ids=(100,), min_tokens=5)
    with pytest.raises(InvalidInputError) as refused:
        admit(request, limits)
    assert refused.value.field == "stop_token_ids"
    with pytest.raises(InvalidInputError):
        SamplingParams(stop_token_ids=[-1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {100: 5}),
        ("logit_bias", {-1: 5}),
        ("allowed_token_ids", [100]),
        ("allowed_token_ids", []),
    ],
)
def test_b87_biased_and_allowed_ids_outside_the_vocabulary_are_refused(
    field: str,
    value: Any,  # noqa: ANN401
) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidInputError) as refused:
        admit(make_request([5], 10, **fields), make_limits(vocab_size=100))
    assert refused.value.field == field


def test_b87_a_field_that_does_not_exist_is_refused() -> None:
    fields: dict[str, Any] = {"logprob_token_ids": [-1]}
    with pytest.raises(TypeError, match="logprob_token_ids"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1),
        ("temperature", 1e308),
        pytest.param("temperature", 10**400, id="temperature-huge"),
        ("temperature", "NaN"),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", math.nan),
        ("top_p", 0),
        ("top_p", -1),
        ("top_p", 1.1),
        ("top_p", "1"),
        ("top_k", 0.5),
        ("top_k", -2),
        ("logprobs", -1),
        ("logprobs", 21),
        ("seed", -1),
        ("seed", 2**63),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", None),
        ("stop_token_ids", "12"),
        ("ignore_eos", 1),
    ],
)
def test_b88_nonsense_sampling_numbers_are_refused(field: str, value: Any) -> None:  # noqa: ANN401
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidInputError) as refused:
        SamplingParams(**fields)
    assert refused.value.field == field
    assert f"{field}={value!r}"[:200] in str(refused.value)


# --- neighbours -------------------------------------------------------------------------------


@pytest.mark.parametrize(("pipeline_depth", "max_decode_steps"), [(1, 1), (2, 1), (1, 8)])
def test_b80_cancels_at_and_between_steps_leave_the_rest_of_the_batch_alone(
    pipeline_depth: int, max_decode_steps: int
) -> None:
    driver = ReplicaDriver(
        make_limits(num_blocks=80),
        max_num_seqs=4,
        pipeline_depth=pipeline_depth,
        max_decode_steps=max_decode_steps,
    )
    requests = [make_request([i] * 5, 50, request_id=f"q{i}") for i in range(5)]
    streams = [driver.submit(request) for request in requests[:4]]
    while driver.sequence(requests[1]).num_outputs < 3:
        driver.step()
    driver.cancel(requests[1])
    result = driver.execute()
    driver.cancel(requests[3])
    streams.append(driver.submit(requests[4]))
    driver.finish(result)
    driver.run()
    for index in (0, 2, 4):
        assert (streams[index].token_ids, streams[index].finish) == oracle(
            requests[index], driver.limits
        )
    assert streams[1].finish is streams[3].finish is FinishReason.CANCELLED
    assert driver.num_free == 80


def test_b92_a_name_in_use_is_refused_and_can_be_used_again_after_its_end() -> None:
    limits = make_limits()
    cluster = ClusterDriver([limits, limits])
    first = make_request(range(5), 6, request_id="same")
    stream = cluster.submit(first)
    for other in (
        make_request(range(9), 6, request_id="same", consumer_id="c1"),
        make_request(range(5), 6, request_id="same", consumer_id="c1", tenant_salt="other"),
    ):
        cluster.submit(other)
        assert isinstance(cluster.rejected.pop(other.request_id), DuplicateRequestError)
        cluster.poll(cluster.placed[first.request_id])
        cluster.step(cluster.placed[first.request_id])
    cluster.run()
    assert (stream.token_ids, stream.finish) == oracle(first, limits)
    again = make_request(range(20, 29), 3, request_id="same")
    stream = cluster.submit(again)
    cluster.run()
    assert (stream.token_ids, stream.finish) == oracle(again, limits)
    assert cluster.rejected == {}


@pytest.mark.parametrize("draw", [0, 1, 5])
def test_b93_a_poisoned_request_fails_alone(draw: int) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), max_num_seqs=9, poison=[(666, draw)])
    good = [make_request([i, 3, 5], 12, request_id=f"q{i}", seed=i) for i in range(8)]
    bad = make_request([66, 6], 12, request_id="bad", seed=666)
    streams = driver.generate(*good[:4], bad, *good[4:])
    failed = streams.pop(4)
    assert failed.finish is FinishReason.ERROR
    assert failed.token_ids == oracle(bad, driver.limits).token_ids[:draw]
    for request, stream in zip(good, streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)
    assert driver.num_free == 64


@pytest.mark.parametrize(
    "change",
    [
        {"priority": "high"},
        {"priority": math.nan},
        {"scope": RequestScope(5)},  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        {"scope": None},
        {"prompt_token_ids": TokenIds.of([])},
    ],
)
def test_b93_a_request_that_admission_cannot_use_is_refused_alone(
    change: dict[str, Any],
) -> None:
    cluster = ClusterDriver([make_limits()])
    good = make_request([1, 2, 3], request_id="good")
    stream = cluster.submit(good)
    bad = dataclasses.replace(make_request([1], request_id="bad"), **change)
    cluster.submit(bad)
    assert isinstance(cluster.rejected[bad.request_id], InvalidInputError)
    cluster.run()
    assert (stream.token_ids, stream.finish) == oracle(good, make_limits())


def test_b93_a_salt_that_is_no_valid_unicode_is_a_tenant_like_any_other() -> None:
    cluster = ClusterDriver([make_limits()])
    stream = cluster.submit(make_request([1, 2, 3], tenant_salt="\ud800"))
    cluster.run()
    assert stream.finish is FinishReason.LENGTH


def test_b100_a_seeded_stream_does_not_depend_on_its_neighbours() -> None:
    limits = make_limits(num_blocks=64)
    seeded = make_request([1, 2, 3], 16, temperature=0.8, seed=42)
    expected = oracle(seeded, limits).token_ids
    others = [
        make_request([i], 16, request_id=f"n{i}", temperature=0.8, seed=i) for i in range(1, 8)
    ]
    for batch in ([], others[:1], others):
        for position in {0, len(batch)}:
            requests = [*batch[:position], seeded, *batch[position:]]
            streams = ReplicaDriver(limits).generate(*requests)
            assert streams[position].token_ids == expected
    cluster = ClusterDriver([limits, limits])
    cluster.submit(others[0])
    stream = cluster.submit(seeded)
    assert cluster.placed[seeded.request_id] == "r1"
    cluster.run()
    assert stream.token_ids == expected


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_b100_the_samples_of_a_seeded_request_are_reproducible_and_different(
    pipeline_depth: int,
) -> None:
    limits = make_limits(num_blocks=64)
    single = make_request([1, 2, 3], 16, temperature=0.8, seed=42)
    pair = make_request([1, 2, 3], 16, temperature=0.8, seed=42, n=2)
    expected = [oracle(pair, limits, sibling).token_ids for sibling in (0, 1)]
    assert expected[0] == oracle(single, limits).token_ids
    assert expected[0] != expected[1]
    others = [
        make_request([i], 16, request_id=f"n{i}", temperature=0.8, seed=i, n=1 + i % 2)
        for i in range(1, 5)
    ]
    for before, after in ([], []), (others[:1], []), (others, []), ([], others):
        driver = ReplicaDriver(limits, max_num_seqs=12, pipeline_depth=pipeline_depth)
        driver.generate(*before, pair, *after)
        got = [driver.reader().stream(pair, sibling).token_ids for sibling in (0, 1)]
        assert got == expected


def test_b100_a_seeded_stream_goes_on_after_a_preemption_as_without_one() -> None:
    limits = make_limits(num_blocks=9)
    pair = make_request([1, 2, 3], 16, temperature=0.8, seed=42, n=2)
    driver = ReplicaDriver(limits)
    driver.submit(pair)
    while driver.replica.sequences[0].num_outputs < 8:
        driver.step()
    # Takes the blocks of what is served last, from the eighth token on.
    urgent = make_request(range(16), 14, request_id="urgent", priority=-1)
    driver.submit(urgent)
    driver.run()
    assert driver.replica.batcher.num_preemptions > 0
    got = [driver.reader().stream(pair, sibling).token_ids for sibling in (0, 1)]
    assert got == [oracle(pair, limits, sibling).token_ids for sibling in (0, 1)]


@pytest.mark.slow
def test_b107_the_books_are_at_zero_after_10000_requests_and_two_deaths() -> None:
    draw = random.Random(0)
    limits = make_limits(num_blocks=4)
    cluster = ClusterDriver([limits] * 4)
    names = list(cluster.all_limits)
    deaths = {3000: names[1], 7000: names[2]}
    for number in range(10_000):
        request = make_request([number % 90, 1, 2], 1, request_id=f"q{number}")
        if draw.random() < 0.05:
            request = make_request([97], 1, request_id=f"q{number}")
        cluster.submit(request)
        if draw.random() < 0.2:
            cluster.withdraw(request)
        served = draw.choice(names)
        cluster.step(served)
        cluster.poll(served)
        if number in deaths:
            cluster.lose_replica(deaths[number])
            cluster.start_replica(deaths[number], 1)
        for name in names:
            assert cluster.controller.num_requests(name) >= 0
            assert cluster.controller.num_pending_tokens(name) >= 0
            assert cluster.controller.num_queued_tokens(name) >= 0
        if number % 50 == 0:
            cluster.tick(0.1)
    cluster.run()
    for name in names:
        assert cluster.controller.num_requests(name) == 0
        assert cluster.controller.num_pending_tokens(name) == 0
        assert cluster.controller.num_queued_tokens(name) == 0
        assert cluster.drivers[ReplicaId(name)].replica.kv.pool.num_held == 0
