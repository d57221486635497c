"""Many requests in a pool that is far too small: each gives what it gives alone."""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from model_driver import ModelDriver, drawn
from replica_driver import Stream, make_limits, make_request

from rayserve_paged.core.request import FinishReason, ModelLimits, Request

MAX_NUM_SEQS = 24
BLOCK_SIZE = 4
SHARE_OF_NEED = 0.3
BIG_POOL = 320


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, the step before which it comes, and after how many steps it is cancelled."""

    request: Request
    step: int
    cancelled_after: int | None


@dataclasses.dataclass
class Outcome:
    """What a run left.

    Args:
        streams: Of each request its samples.
        peak_held_blocks: Most blocks held after a step.
        num_preemptions: Sequences that gave way.
        num_hit_tokens: Prompt tokens that were found in the cache.
    """

    streams: list[list[Stream]]
    peak_held_blocks: int
    num_preemptions: int
    num_hit_tokens: int


def workload(seed: int, num_requests: int) -> list[Arrival]:
    """Requests of three tenants that share prefixes of every length."""
    draw = random.Random(seed)
    stories = [[draw.randrange(256) for _ in range(24)] for _ in range(4)]
    arrivals = []
    for number in range(num_requests):
        own = [draw.randrange(256) for _ in range(draw.randint(1, 6))]
        num_samples, best_of = draw.choice([(1, None), (1, None), (2, None), (3, None), (1, 3)])
        max_tokens = draw.randint(1, 16)
        request = make_request(
            draw.choice(stories)[: draw.randint(0, 24)] + own,
            max_tokens,
            request_id=f"q{number}",
            tenant_salt=draw.choice([None, "one", "two"]),
            priority=draw.choice([0, 0, 0, 1, -1]),
            temperature=draw.choice([0.0, 1.0, 1.3]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.randrange(1 << 62),
            n=num_samples,
            best_of=best_of,
            stop_token_ids=(draw.randrange(256),),
        )
        cancelled_after = draw.randint(0, 20) if draw.random() < 0.15 else None
        arrivals.append(Arrival(request, draw.randint(0, num_requests // 8), cancelled_after))
    return arrivals


def limits_of(num_blocks: int) -> ModelLimits:
    return make_limits(
        num_blocks, BLOCK_SIZE, vocab_size=256, max_model_len=64, max_num_seqs=MAX_NUM_SEQS
    )


def run(arrivals: Sequence[Arrival], num_blocks: int, **batch: int) -> Outcome:
    """Run all requests in one pool, and leave nothing held."""
    driver = ModelDriver(limits_of(num_blocks), MAX_NUM_SEQS, 48, **batch)
    coming = sorted(arrivals, key=lambda arrival: arrival.step)
    to_cancel: list[tuple[int, Request]] = []
    step = peak = 0
    while coming or driver.plans:
        while coming and (coming[0].step <= step or not driver.plans):
            arrival = coming.pop(0)
            driver.submit(arrival.request)
            if arrival.cancelled_after is not None:
                to_cancel.append((step + arrival.cancelled_after, arrival.request))
        for when, request in to_cancel:
            if when == step:
                driver.cancel(request)
        driver.step()
        driver.poll()
        peak = max(peak, driver.replica.kv.pool.num_held)
        step += 1
    driver.run()
    assert driver.num_free == num_blocks, "blocks are held at the end"
    assert driver.replica.accounting().allocated_slots == 0
    batcher = driver.replica.batcher
    reader = driver.reader()
    return Outcome(
        [
            [reader.stream(each.request, s) for s in range(each.request.params.num_siblings)]
            for each in arrivals
        ],
        peak,
        batcher.num_preemptions,
        batcher.num_hit_tokens,
    )


def alone(request: Request) -> list[tuple[int, ...]]:
    """Run one request in a pool of its own that is big enough."""
    (streams,) = run([Arrival(request, 0, None)], 32).streams
    return [stream.token_ids for stream in streams]


def check(arrivals: Sequence[Arrival], outcome: Outcome) -> Counter[FinishReason | None]:
    """Compare every sample with the same request alone and with the model without a cache."""
    finishes: Counter[FinishReason | None] = Counter()
    for arrival, streams in zip(arrivals, outcome.streams, strict=True):
        request = arrival.request
        expected = alone(request)
        for sibling, stream in enumerate(streams):
            whole = expected[sibling]
            assert whole == drawn(request.prompt_token_ids, request.params, sibling)
            finishes[stream.finish] += 1
            if stream.finish is FinishReason.CANCELLED:
                assert arrival.cancelled_after is not None
                assert stream.token_ids == whole[: len(stream.token_ids)]
                continue
            assert stream.token_ids == whole
            stopped = whole[-1] in request.params.stop_token_ids
            assert stream.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    return finishes


def run_under_pressure(
    seed: int, num_requests: int, **batch: int
) -> tuple[Outcome, Counter[FinishReason | None], int]:
    """Run a workload in a pool of 30% of what it holds where there is enough."""
    arrivals = workload(seed, num_requests)
    need = run(arrivals, BIG_POOL, **batch)
    assert need.num_preemptions == 0
    num_blocks = int(SHARE_OF_NEED * need.peak_held_blocks)
    outcome = run(arrivals, num_blocks, **batch)
    return outcome, check(arrivals, outcome), num_blocks


def test_two_hundred_requests_at_30_percent_of_their_need_are_each_as_alone() -> None:
    outcome, finishes, _ = run_under_pressure(1, 200, pipeline_depth=2)
    assert outcome.num_preemptions > 20
    assert outcome.num_hit_tokens > 200
    assert finishes[FinishReason.CANCELLED] > 5
    assert finishes[FinishReason.LENGTH] > 200


@pytest.mark.prove
@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", [{"pipeline_depth": 2}, {"max_decode_steps": 8}])
@pytest.mark.parametrize("seed", range(10, 15))
def test_a_thousand_requests_at_30_percent_of_their_need_are_each_as_alone(
    seed: int, batch: dict[str, int]
) -> None:
    outcome, finishes, num_blocks = run_under_pressure(seed, 1000, **batch)
    print(
        f"\nseed {seed}, {batch}: {finishes.total()} samples in {num_blocks} blocks, "
        f"{outcome.num_preemptions} preemptions, {outcome.num_hit_tokens} tokens found, "
        f"{finishes[FinishReason.CANCELLED]} cancelled"
    )
    assert outcome.num_preemptions > 20
