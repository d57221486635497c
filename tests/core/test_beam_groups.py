"""Beams on a replica: forks of one table that start, go on and end together."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from batcher_driver import BatcherDriver
from beam_checks import ENDINGS, check_streams, searches_of
from beam_oracle import toy_beams
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.beam_streams import beam_items
from rayserve_paged.core.ids import Attempt, RequestId
from rayserve_paged.core.replica_messages import CancelRequest, FenceReplica
from rayserve_paged.core.request import FinishReason
from rayserve_paged.sim.fingerprint_rank import prompt_oracle


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("width", range(1, 7))
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_search_finds_what_one_over_lists_of_tokens_finds(
    width: int, ending: tuple[float, bool | str], pipeline_depth: int
) -> None:
    limits = make_limits(num_blocks=64, vocab_size=31, eos_token_ids=(0,))
    driver = ReplicaDriver(limits, pipeline_depth=pipeline_depth, max_decode_steps=4)
    requests = [
        make_request(
            range(1, num_prompt + 1),
            10,
            request_id=f"q{num_prompt}",
            n=width,
            beam_width=width,
            length_penalty=ending[0],
            early_stopping=ending[1],
        )
        for num_prompt in range(1, 10)
    ]
    for request in requests:
        driver.generate(request)
    check_streams(driver, *requests)


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 6},
        {"stop_token_ids": (1, 2, 3, 4, 5)},
        {"ignore_eos": True},
        {"allowed_token_ids": (0, 3)},
        {"allowed_token_ids": (0, 3, 4, 9), "min_tokens": 4},
        {"allowed_token_ids": (4, 5)},
    ],
)
def test_what_ends_an_output_and_what_may_be_in_it_holds_for_beams(
    params: dict[str, Any],
) -> None:
    limits = make_limits(num_blocks=64, vocab_size=31, eos_token_ids=(0,))
    driver = ReplicaDriver(limits)
    requests = [
        make_request([1, 2, end], 8, request_id=f"q{end}", n=2, beam_width=4, **params)
        for end in range(8)
    ]
    driver.generate(*requests)
    check_streams(driver, *requests)


def test_hypotheses_come_with_their_log_probabilities_all_at_once() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64, vocab_size=31))
    request = make_request(range(6), 7, n=3, beam_width=4)
    driver.submit(request)
    num_updates = Counter[int]()
    consumer = driver.reader().consumer
    totals = {}
    while driver.step():
        driver.send(consumer.poll(driver.replica.replica_id, driver.incarnation, driver.now))
        for answer in driver.answers:
            for update in consumer.deliver(answer.delivery, driver.now):
                num_updates[update.sibling] += 1
                assert len(update.token_ids) == len(update.logprobs) == 7
                totals[update.sibling] = sum(p.logprob for p in update.logprobs)
        driver.answers = []
    assert num_updates == {0: 1, 1: 1, 2: 1}
    found, _num_steps = toy_beams(request, driver.limits)
    assert [totals[rank] for rank in range(3)] == [one.cumulative for one in found]
    assert totals[0] >= totals[1] >= totals[2]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_search_tells_the_log_probabilities_of_its_prompt_once(num_steps: int) -> None:
    limits = make_limits(num_blocks=64, vocab_size=31)
    request = make_request(range(6), 7, n=2, beam_width=3, prompt_logprobs=2)
    run = BatcherDriver(request, limits, budget=4)
    search = run.first.beam
    assert search is not None
    for _ in range(num_steps):
        run.step()
    if num_steps:
        run.batcher.preempt(search.first)
    while search.finish is None:
        run.step()
    items = beam_items(search)
    assert items[0].prompt_logprobs == prompt_oracle(request)
    assert items[1].prompt_logprobs == ()


# --- blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_share_all_that_they_have_in_common_and_copy_unsealed_tails_alone(
    num_prompt: int, width: int
) -> None:
    block_size = 4
    driver = ReplicaDriver(make_limits(num_blocks=64, block_size=block_size, vocab_size=31))
    driver.submit(make_request(range(num_prompt), 14, n=1, beam_width=width))
    num_copies = 0
    while driver.replica.sequences:
        beams = driver.replica.batcher.running
        plan = driver.plan
        assert plan is not None
        parents = {tuple(beam.tokens[:-1]) for beam in beams}
        if len(beams) > 1:
            num_computed = beams[0].num_known - 1
            partial = num_computed % block_size
            # One copy for each beam that writes behind a partial tail, but the last to do so.
            assert len(plan.copies) == (len(beams) - len(parents) if partial else 0)
            assert set(plan.copies[:, 2].tolist()) <= {partial}
            num_copies += len(plan.copies)
        distinct = {
            tuple(beam.tokens[: min(end, beam.num_known)])
            for beam in beams
            for end in range(block_size, beam.num_known + block_size, block_size)
        }
        assert driver.replica.kv.pool.num_held == len(distinct)
        driver.step()
    assert num_copies > 0
    assert driver.replica.kv.pool.num_held == 0


@pytest.mark.parametrize("budget", [64, 5, 2])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_prompt_is_computed_once_for_all_beams(budget: int, pipeline_depth: int) -> None:
    driver = ReplicaDriver(
        make_limits(num_blocks=64, vocab_size=31),
        max_num_batched_tokens=budget,
        pipeline_depth=pipeline_depth,
    )
    request = make_request(range(11), 6, n=4, beam_width=4)
    driver.generate(request)
    check_streams(driver, request)
    # Four beams compute each token but the last.
    assert sum(row.num_tokens for step in driver.rank.history for row in step) == 11 + 4 * 5


def test_a_cached_prompt_is_not_computed_at_all() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64, vocab_size=31))
    first = make_request(range(13), 6, n=4, beam_width=4)
    driver.generate(first)
    num_steps = len(driver.rank.history)
    again = make_request(range(13), 6, request_id="again", n=2, beam_width=3)
    (stream,) = driver.generate(again)
    check_streams(driver, again)
    assert stream.num_cached_tokens == 12
    computed = sum(row.num_tokens for step in driver.rank.history[num_steps:] for row in step)
    # The hits go on where the beams of the first search went.
    assert computed == 1 + 3 * 5


# --- all or nothing -------------------------------------------------------------------------


def test_a_search_waits_until_there_is_a_row_for_each_beam() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64, vocab_size=31), max_num_seqs=4)
    other = make_request([20, 21], 6, request_id="other")
    search = make_request(range(8), 6, beam_width=4)
    late = make_request([22], 3, request_id="late")
    for request in (other, search, late):
        driver.submit(request)
    numbers = set()
    while driver.plan is not None:
        running = [s for s in driver.replica.batcher.running if s.beam is not None]
        if running:
            numbers.add(len(running) + driver.replica.batcher.num_reserved_rows)
            assert len(running) == driver.replica.batcher.num_running
        driver.step()
    assert numbers == {4}
    driver.run()
    check_streams(driver, other, search, late)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("ends", ["cancel", "lease", "poison", "fence"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_search_ends_with_all_of_its_streams_and_blocks(
    ends: str, num_steps: int, pipeline_depth: int
) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32, vocab_size=31), pipeline_depth=pipeline_depth)
    request = make_request(range(6), 9, seed=7, n=3, beam_width=4)
    beside = make_request([9, 8], 12, request_id="beside", temperature=1.0, n=2)
    if ends == "poison":
        driver.rank.poison.add((7, num_steps))
    driver.submit(beside)
    driver.submit(request)
    for _ in range(num_steps):
        driver.step()
    if ends == "lease":
        driver.tick(10.0)
    elif ends == "fence":
        driver.send(FenceReplica("lost"))
    elif ends == "cancel":
        driver.cancel(request)
    driver.run()
    finish = FinishReason.ERROR if ends == "poison" else FinishReason.CANCELLED
    goes_on = ends in ("lease", "fence")
    assert driver.goes_on(request) == goes_on
    streams = [driver.reader().stream(request, rank) for rank in range(3)]
    ended = (None, ()) if goes_on else (finish, ())
    assert {(stream.finish, stream.token_ids) for stream in streams} == {ended}
    if ends in ("poison", "cancel"):
        check_streams(driver, beside)
    assert driver.num_free == 32
    finished = [name for report in driver.reports for name in report.finished]
    assert finished.count((RequestId("q0"), Attempt(0))) == (ends != "fence")


def test_a_search_that_waits_is_cancelled_as_a_whole() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32, vocab_size=31), max_num_seqs=4)
    first = make_request(range(6), 9, beam_width=4, request_id="first")
    second = make_request(range(6), 9, n=2, beam_width=4)
    driver.submit(first)
    driver.submit(second)
    assert driver.replica.batcher.num_waiting == 1
    driver.cancel(second)
    assert driver.replica.batcher.num_waiting == 0
    driver.run()
    check_streams(driver, first)
    assert driver.reader().stream(second, 1).finish is FinishReason.CANCELLED


@pytest.mark.parametrize("rank", [0, 1])
def test_one_output_of_a_search_can_be_cancelled_and_the_others_come(rank: int) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32, vocab_size=31))
    request = make_request(range(6), 9, n=2, beam_width=3)
    driver.submit(request)
    for _ in range(3):
        driver.step()
    for sibling in (rank, rank, 2):  # Twice is once, and there is no third.
        driver.send(CancelRequest(request.request_id, request.attempt, sibling))
    driver.run()
    found, _num_steps = toy_beams(request, driver.limits)
    cancelled = driver.reader().stream(request, rank)
    assert (cancelled.finish, cancelled.token_ids) == (FinishReason.CANCELLED, ())
    other = driver.reader().stream(request, 1 - rank)
    assert other.token_ids == found[1 - rank].token_ids
    assert driver.replica.kv.pool.num_held == 0


def test_a_search_whose_outputs_are_all_cancelled_ends() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32, vocab_size=31))
    request = make_request(range(6), 9, n=2, beam_width=3)
    driver.submit(request)
    driver.step()
    for sibling in (1, 0):
        driver.send(CancelRequest(request.request_id, request.attempt, sibling))
    assert driver.replica.sequences == ()
    driver.run()
    streams = [driver.reader().stream(request, rank) for rank in (0, 1)]
    assert {stream.finish for stream in streams} == {FinishReason.CANCELLED}
    assert driver.replica.kv.pool.num_held == 0


def test_a_search_whose_deadline_comes_ends_as_a_whole() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32, vocab_size=31))
    request = dataclasses.replace(make_request(range(6), 9, n=2, beam_width=3), deadline_s=1.0)
    driver.submit(request)
    for _ in range(3):
        driver.step()
    driver.tick(1.0)
    assert driver.replica.sequences == ()
    driver.run()
    streams = [driver.reader().stream(request, rank) for rank in (0, 1)]
    assert {(s.finish, s.token_ids) for s in streams} == {(FinishReason.DEADLINE, ())}
    assert driver.replica.kv.pool.num_held == 0


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_search_gives_way_to_an_urgent_request_as_a_whole_and_ends_right(
    pipeline_depth: int,
) -> None:
    driver = ReplicaDriver(
        make_limits(num_blocks=13, vocab_size=31), max_num_seqs=4, pipeline_depth=pipeline_depth
    )
    search = make_request(range(6), 9, n=2, beam_width=4, priority=1)
    urgent = make_request([9, 8], 6, request_id="urgent", temperature=1.0, n=2)
    driver.submit(search)
    for _ in range(4):
        driver.step()
    driver.submit(urgent)
    driver.run()
    check_streams(driver, search, urgent)
    assert driver.replica.batcher.num_preemptions == 1


def test_random_searches_part_early_and_late() -> None:
    # The tests above mean little if the beams of the toy rank never part or never die.
    limits = make_limits(num_blocks=64, vocab_size=31)
    draw = random.Random(1)
    numbers = set()
    for index in range(20):
        driver = ReplicaDriver(limits)
        prompt = [draw.randint(1, 30) for _ in range(5)]
        driver.submit(make_request(prompt, 12, request_id=f"q{index}", beam_width=4))
        while driver.step():
            for search in searches_of(driver):
                outputs = [tuple(s.tokens[5:]) for s in search.sequences]
                if len(outputs) == 4 and len(outputs[0]) > 2:
                    numbers.add(len({tokens[:-2] for tokens in outputs}))
    assert numbers >= {1, 2, 3}
