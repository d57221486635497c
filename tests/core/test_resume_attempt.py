"""Attempts that go on with what attempts before have delivered, as if never interrupted."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.delivered import DeliveredSample, check_delivered
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.ids import Attempt
from rayserve_paged.core.replica_messages import CancelRequest
from rayserve_paged.core.request import FinishReason, Request, admit
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.sim.fingerprint_rank import Expected, oracle, prompt_oracle


def resumed(request: Request, *samples: DeliveredSample, attempt: int = 1) -> Request:
    return dataclasses.replace(request, attempt=Attempt(attempt), delivered=samples)


def cut(request: Request, expected: list[Expected], lengths: list[int]) -> Request:
    """Resume samples after so many tokens each."""
    samples = [
        DeliveredSample(sibling, expected[sibling].token_ids[:length])
        for sibling, length in enumerate(lengths)
    ]
    return resumed(request, *samples)


def test_b112_a_retry_has_the_budget_and_the_minimum_that_are_left() -> None:
    """Prompt 10, max_tokens 20, min_tokens 10; one replica dies after 7 tokens, the next after 3
    more. The second attempt has 17 tokens, up to 13 to go and at least 3; the third 20, 10 and 0.
    """
    limits = make_limits(num_blocks=32)
    request = make_request(range(10), 20, min_tokens=10)
    expected = oracle(request, limits)
    assert len(expected.token_ids) == 20
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    for attempt, (num_known, most, fewest) in enumerate([(10, 20, 10), (17, 13, 3), (20, 10, 0)]):
        driver = ReplicaDriver(limits)
        retry = request if attempt == 0 else resumed(request, DeliveredSample(0, tokens))
        stream = driver.submit(dataclasses.replace(retry, attempt=Attempt(attempt)))
        sequence = driver.sequence(request)
        assert sequence.num_known == num_known
        assert sequence.max_known - num_known == most
        assert sequence.min_known - num_known == fewest
        for _ in range((7, 3, 99)[attempt]):
            driver.step()
        driver.poll()
        tokens += stream.token_ids
        finish = stream.finish
    assert tokens == expected.token_ids
    assert finish is FinishReason.LENGTH


@given(st.data())
def test_samples_go_on_wherever_they_were_cut(data: st.DataObject) -> None:
    draw = data.draw
    groups = draw(st.sampled_from([ONE_FULL_GROUP, (AttentionWindow(3), AttentionWindow(None))]))
    limits = make_limits(
        num_blocks=draw(st.integers(14, 40)),
        block_size=draw(st.integers(1, 5)),
        vocab_size=13,
        eos_token_ids=(0,),
        layer_groups=groups,
    )
    params: dict[str, Any] = {
        "n": draw(st.integers(1, 3)),
        "temperature": 1.0,
        "seed": draw(st.integers(0, 9)),
        "min_tokens": draw(st.integers(0, 3)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([(), (5,)])),
    }
    request = make_request(
        draw(st.lists(st.integers(0, 12), min_size=1, max_size=6)),
        draw(st.integers(3, 5)),
        adapter=draw(st.sampled_from([None, Adapter("a", "1")])),
        window=draw(st.sampled_from([None, 4])),
        **params,
    )
    expected = [oracle(request, limits, sibling) for sibling in range(params["n"])]
    # Finished samples are not named, and nothing is computed for them.
    lengths = [draw(st.integers(0, len(each.token_ids))) for each in expected]
    samples = tuple(
        DeliveredSample(sibling, each.token_ids[:length])
        for sibling, (each, length) in enumerate(zip(expected, lengths, strict=True))
        if draw(st.booleans())
    )
    if not samples:
        return
    driver = ReplicaDriver(
        limits,
        pipeline_depth=draw(st.integers(1, 2)),
        max_num_batched_tokens=draw(st.integers(2, 20)),
        max_decode_steps=draw(st.sampled_from([1, 4])),
        partial_reuse=groups == ONE_FULL_GROUP and draw(st.booleans()),
    )
    if draw(st.booleans()):
        driver.generate(dataclasses.replace(request, request_id="before"))
    driver.submit(retry := resumed(request, *samples))
    driver.run()
    wanted = {sample.sibling: sample for sample in samples}
    for sibling, each in enumerate(expected):
        stream = driver.reader().stream(retry, sibling)
        if sibling in wanted:
            assert wanted[sibling].token_ids + stream.token_ids == each.token_ids
            assert stream.finish is each.finish
        else:
            assert (stream.token_ids, stream.finish) == ((), None)
    assert driver.replica.kv.pool.num_held == 0
    assert driver.reports[-1].finished == (("q0", 1),)


def test_what_was_delivered_is_found_in_the_cache_like_after_a_preemption() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32))
    request = make_request(range(9), 30)
    driver.submit(request)
    for _ in range(15):
        driver.step()
    driver.cancel(request)
    driver.run()
    expected = oracle(request, driver.limits)
    batcher = driver.replica.batcher
    counts = batcher.num_queried_tokens, batcher.num_hit_tokens
    first = len(driver.rank.history)
    driver.submit(cut(request, [expected], [14]))
    driver.step()
    # 23 known tokens, of which five whole blocks are cached: three are computed, at once.
    ((row,),) = driver.rank.history[first:]
    assert (row.num_computed, row.num_tokens) == (20, 3)
    # It says nothing of how often prompts are found.
    assert (batcher.num_queried_tokens, batcher.num_hit_tokens) == counts
    assert batcher.num_resumed_tokens == 20


@pytest.mark.parametrize(("ends_at", "finish"), [(None, "length"), (6, "stop")])
def test_an_attempt_that_lacks_only_the_notice_of_its_end_ends_without_a_step(
    ends_at: int | None, finish: str
) -> None:
    limits = make_limits()
    request = make_request(range(5), 8)
    tokens = oracle(request, limits).token_ids
    if ends_at is not None:
        tokens = tokens[:ends_at]
        request = make_request(range(5), 8, min_tokens=ends_at, stop_token_ids=tokens[-1:])
    driver = ReplicaDriver(limits)
    stream = driver.submit(resumed(request, DeliveredSample(0, tokens)))
    assert driver.plan is None
    driver.poll()
    assert (stream.token_ids, stream.finish) == ((), finish)
    assert driver.reports[-1].finished == (("q0", 1),)
    assert driver.num_free == 16


def test_samples_without_tokens_share_one_prefill_and_finished_ones_get_nothing() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64))
    request = make_request(range(9), 4, n=4, temperature=1.0, prompt_logprobs=1)
    retry = resumed(request, DeliveredSample(1), DeliveredSample(3))
    driver.submit(retry)
    driver.run()
    assert [[row.num_tokens for row in step] for step in driver.rank.history][:2] == [[9], [1, 1]]
    for sibling in range(4):
        stream = driver.reader().stream(retry, sibling)
        got = stream.token_ids, stream.finish
        wanted = sibling in (1, 3)
        assert got == (oracle(request, driver.limits, sibling) if wanted else ((), None))
    assert driver.reader().stream(retry, 1).prompt_logprobs == prompt_oracle(request)


def test_each_sample_that_goes_on_can_be_cancelled_alone() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64))
    request = make_request(range(9), 12, n=3, temperature=1.0)
    expected = [oracle(request, driver.limits, sibling) for sibling in range(3)]
    retry = cut(request, expected, [2, 5, 3])
    driver.submit(retry)
    driver.step()
    driver.send(CancelRequest(retry.request_id, retry.attempt, 1))
    driver.run()
    streams = [driver.reader().stream(retry, sibling) for sibling in range(3)]
    assert streams[1].finish is FinishReason.CANCELLED
    for sibling, start in ((0, 2), (2, 3)):
        assert streams[sibling].token_ids == expected[sibling].token_ids[start:]


def test_a_search_begins_anew_and_withdrawn_outputs_stay_withdrawn() -> None:
    limits = make_limits(num_blocks=64)
    request = make_request(range(5), 6, n=3, beam_width=4)
    first = ReplicaDriver(limits)
    first.submit(request)
    first.run()
    driver = ReplicaDriver(limits)
    retry = resumed(request, DeliveredSample(0), DeliveredSample(2))
    driver.submit(retry)
    driver.run()
    for rank in range(3):
        stream = driver.reader().stream(retry, rank)
        whole = first.reader().stream(request, rank)
        assert stream.token_ids == (() if rank == 1 else whole.token_ids)


@pytest.mark.parametrize(
    ("samples", "params", "message"),
    [
        ([DeliveredSample(1)], {}, r"delivered.sibling=1 .*samples from 0 to 0"),
        ([DeliveredSample(-1)], {}, r"delivered.sibling=-1 "),
        ([DeliveredSample(0), DeliveredSample(0)], {"n": 2}, r"delivered.sibling=0 .*each once"),
        ([DeliveredSample(1), DeliveredSample(0)], {"n": 2}, r"delivered.sibling=0 .*their order"),
        ([DeliveredSample(0, (97,))], {}, r"delivered.token_ids=97 .*from 0 to 96"),
        ([DeliveredSample(0, (-1,))], {}, r"delivered.token_ids=-1 "),
        ([DeliveredSample(0, (1, 2, 3, 4, 5))], {}, r"'5 tokens' .*at most max_tokens=4"),
        ([DeliveredSample(0, (1, 9, 3))], {}, r"'3 tokens' .*none after token 1 of sample 0"),
        ([DeliveredSample(0, (7, 9))], {"stop_token_ids": (7,)}, r"none after token 0"),
        ([DeliveredSample(0, (1,))], {"beam_width": 2}, r"token_ids=\(1,\) .*none with beam_width"),
        ([DeliveredSample(0, (1,))], {"prompt_logprobs": 0}, r"prompt_logprobs=0 .*expected None"),
        ([(0, (1,))], {}, r"delivered=\(0, \(1,\)\) .*a DeliveredSample"),
    ],
)
def test_what_no_attempt_can_have_delivered_is_refused(
    samples: list[DeliveredSample], params: dict[str, Any], message: str
) -> None:
    limits = make_limits(eos_token_ids=(9,))
    request = resumed(make_request([1, 2], 4, **params), *samples)
    with pytest.raises(InvalidInputError, match=message):
        admit(request, limits)


def test_a_token_that_would_end_a_sample_before_its_minimum_may_have_been_delivered() -> None:
    limits = make_limits(eos_token_ids=(9,))
    request = resumed(make_request([1, 2], 4, min_tokens=3), DeliveredSample(0, (9, 9)))
    assert admit(request, limits).delivered == request.delivered


def test_nothing_is_behind_a_token_that_ends_a_sample_once_it_has_its_fewest() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2)
    for token_ids in ((5, 1, 3), (1, 3, 5), (1, 5)):
        check_delivered((DeliveredSample(0, token_ids),), params, {5}, 97)
    with pytest.raises(InvalidInputError, match="none after token 1 of sample 0, which ends it"):
        check_delivered((DeliveredSample(0, (1, 5, 3)),), params, {5}, 97)
