"""Many requests in a pool that is far too small: each gives what it gives alone."""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from beam_checks import ENDINGS
from beam_oracle import beam_search
from model_rank import drive
from replica_driver import Stream, make_request

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.model.fingerprint import FingerprintModel, FingerprintOracle
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.spec import FingerprintConfig

MAX_NUM_SEQS = 96
BLOCK_SIZE = 4
SHARE_OF_NEED = 0.3
SHARE_OF_SEARCHES = 0.2
MAX_OUTPUT_LEN = 32
BIG_POOL = 640
POOL_FOR_ONE = 160
FULL = FingerprintConfig(
    num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=256, max_model_len=64
)
# Two layer groups: one keeps all, the other a window and a sink.
MIXED = dataclasses.replace(
    FULL, num_layers=2, layer_windows=(FULL_ATTENTION, AttentionWindow(9, 2))
)


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
        gave_way: Requests of which a sequence gave way.
    """

    streams: list[list[Stream]]
    peak_held_blocks: int
    num_preemptions: int
    num_hit_tokens: int
    gave_way: set[RequestId]


@dataclasses.dataclass
class Tally:
    """What was compared.

    Args:
        finishes: How many samples ended in each way.
        whole_searches: Requests with beams that were not cancelled before they had ended.
    """

    finishes: Counter[FinishReason | None]
    whole_searches: list[Request]


def drawing(draw: random.Random) -> dict[str, Any]:
    """Parameters of a request whose samples are drawn."""
    num_samples, best_of = draw.choice([(1, None), (1, None), (2, None), (3, None), (1, 3)])
    return {
        "max_tokens": draw.randint(1, MAX_OUTPUT_LEN),
        "temperature": draw.choice([0.0, 1.0, 1.3]),
        "top_p": draw.choice([1.0, 0.9]),
        "seed": draw.randrange(1 << 62),
        "n": num_samples,
        "best_of": best_of,
        "stop_token_ids": (draw.randrange(256),),
    }


def searching(draw: random.Random) -> dict[str, Any]:
    """Parameters of a request whose outputs are searched for."""
    length_penalty, early_stopping = draw.choice(ENDINGS)
    return {
        "max_tokens": draw.randint(1, MAX_OUTPUT_LEN),
        "n": draw.randint(1, 2),
        "beam_width": draw.randint(2, 4),
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        # So many that beams end before their last token.
        "stop_token_ids": tuple(draw.sample(range(256), 24)),
    }


def workload(seed: int, num_requests: int) -> list[Arrival]:
    """Requests of three tenants that share prefixes of every length."""
    draw = random.Random(seed)
    stories = [[draw.randrange(256) for _ in range(24)] for _ in range(4)]
    arrivals = []
    for number in range(num_requests):
        own = [draw.randrange(256) for _ in range(draw.randint(1, 6))]
        window = draw.choice([None, None, None, 5, 12])
        is_search = draw.random() < SHARE_OF_SEARCHES
        # The beams of a search part after a short prompt, so that they outgrow the pool.
        num_shared = draw.randint(0, 10 if is_search else 24)
        request = make_request(
            draw.choice(stories)[:num_shared] + own,
            request_id=f"q{number}",
            # Of equally urgent ones rather others than beams give way.
            priority=draw.choice([-1, 0, 1] if is_search else [0, 1]),
            tenant_salt=draw.choice([None, "one", "two"]),
            window=window,
            num_sink_tokens=0 if window is None else draw.choice([0, 1, 4]),
            **(searching(draw) if is_search else drawing(draw)),
        )
        cancelled_after = draw.randint(0, 20) if draw.random() < 0.15 else None
        arrivals.append(Arrival(request, draw.randint(0, num_requests // 8), cancelled_after))
    return arrivals


def run(
    arrivals: Sequence[Arrival],
    num_blocks: int,
    config: FingerprintConfig = FULL,
    *,
    pipeline_depth: int = 1,
    max_decode_steps: int = 1,
) -> Outcome:
    """Run all requests in one pool, and leave nothing held."""
    driver, _rank = drive(
        FingerprintModel(config, SoloCollectives(), TorchBackend()),
        num_blocks,
        BLOCK_SIZE,
        max_num_batched_tokens=48,
        max_num_seqs=MAX_NUM_SEQS,
        pipeline_depth=pipeline_depth,
        max_decode_steps=max_decode_steps,
    )
    coming = sorted(arrivals, key=lambda arrival: arrival.step)
    to_cancel: list[tuple[int, Request]] = []
    gave_way: set[RequestId] = set()
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
        gave_way |= {s.request.request_id for s in driver.replica.sequences if s.num_preemptions}
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
        gave_way,
    )


def alone(request: Request, config: FingerprintConfig) -> list[tuple[int, ...]]:
    """Run one request in a pool of its own that is big enough."""
    (streams,) = run([Arrival(request, 0, None)], POOL_FOR_ONE, config).streams
    return [stream.token_ids for stream in streams]


def drawn(request: Request, config: FingerprintConfig, sibling: int) -> tuple[int, ...]:
    """Draw a sample from logits that are computed from its tokens alone, without a cache."""
    params, window = request.params, request.scope.window or FULL_ATTENTION
    sequence, sampler = FingerprintOracle(config, window=window), Sampler()
    for token_id in request.prompt_token_ids:
        sequence.append(token_id)
    outputs: list[int] = []
    assert params.max_tokens is not None
    while len(outputs) < params.max_tokens:
        logits = sequence.logits()
        if params.temperature == 0:
            token_id = int(torch.argmax(logits))
        else:
            row = SamplingRow(params, len(outputs), sibling=sibling)
            token_ids, _logprobs, errors = sampler.sample(logits[None], [row])
            assert not errors
            token_id = int(token_ids[0])
        outputs.append(token_id)
        if token_id in params.stop_token_ids:
            break
        sequence.append(token_id)
    return tuple(outputs)


def found(request: Request, config: FingerprintConfig) -> list[tuple[int, ...]]:
    """Search over log-probabilities that are computed from tokens alone, without a cache."""

    def next_logprobs(token_ids: Sequence[int]) -> list[float]:
        sequence = FingerprintOracle(config, window=request.scope.window or FULL_ATTENTION)
        for token_id in token_ids:
            sequence.append(token_id)
        return sequence.logits().double().log_softmax(-1).tolist()

    outputs, _num_steps = beam_search(next_logprobs, request.prompt_token_ids, request.params, ())
    return [output.token_ids for output in outputs[: request.params.n]]


def check(arrivals: Sequence[Arrival], outcome: Outcome, config: FingerprintConfig) -> Tally:
    """Compare every sample with the same request alone and with the model without a cache."""
    tally = Tally(Counter(), [])
    for arrival, streams in zip(arrivals, outcome.streams, strict=True):
        request = arrival.request
        expected = alone(request, config)
        if request.params.beam_width is not None:
            assert expected == found(request, config)
            # Nothing is told of a search before it has ended.
            if streams[0].finish is not FinishReason.CANCELLED:
                tally.whole_searches.append(request)
            else:
                assert all(stream.token_ids == () for stream in streams)
        else:
            siblings = range(request.params.num_siblings)
            assert expected == [drawn(request, config, sibling) for sibling in siblings]
        for whole, stream in zip(expected, streams, strict=True):
            tally.finishes[stream.finish] += 1
            if stream.finish is FinishReason.CANCELLED:
                assert arrival.cancelled_after is not None
                assert stream.token_ids == whole[: len(stream.token_ids)]
                continue
            assert stream.token_ids == whole
            stopped = whole[-1] in request.params.stop_token_ids
            assert stream.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    return tally


def run_under_pressure(
    seed: int, num_requests: int, config: FingerprintConfig, **batch: int
) -> tuple[Outcome, Tally, int]:
    """Run a workload in a pool of 30% of what it holds where there is enough."""
    arrivals = workload(seed, num_requests)
    need = run(arrivals, BIG_POOL, config, **batch)
    assert need.num_preemptions == 0
    num_blocks = int(SHARE_OF_NEED * need.peak_held_blocks)
    outcome = run(arrivals, num_blocks, config, **batch)
    return outcome, check(arrivals, outcome, config), num_blocks


@pytest.mark.parametrize("config", [FULL, MIXED], ids=["full", "mixed"])
def test_two_hundred_requests_at_30_percent_of_their_need_are_each_as_alone(
    config: FingerprintConfig,
) -> None:
    outcome, tally, _ = run_under_pressure(2, 200, config, pipeline_depth=2)
    assert outcome.num_preemptions > 5
    assert outcome.num_hit_tokens > 100
    assert tally.finishes[FinishReason.CANCELLED] > 5
    assert tally.finishes[FinishReason.LENGTH] > 200
    whole = tally.whole_searches
    assert len(whole) > 20
    assert any(request.request_id in outcome.gave_way for request in whole)
    assert sum(request.scope.window is not None for request in whole) > 3


@pytest.mark.prove
@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", [{"pipeline_depth": 2}, {"max_decode_steps": 8}])
@pytest.mark.parametrize("config", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("seed", range(10, 13))
def test_a_thousand_requests_at_30_percent_of_their_need_are_each_as_alone(
    seed: int, config: FingerprintConfig, batch: dict[str, int]
) -> None:
    outcome, tally, num_blocks = run_under_pressure(seed, 1000, config, **batch)
    print(
        f"\nseed {seed}, {batch}, {len(config.layer_windows or (1,))} layer groups: "
        f"{tally.finishes.total()} samples in {num_blocks} blocks, "
        f"{outcome.num_preemptions} preemptions, {outcome.num_hit_tokens} tokens found, "
        f"{tally.finishes[FinishReason.CANCELLED]} cancelled, "
        f"{len(tally.whole_searches)} whole searches, "
        f"{sum(r.request_id in outcome.gave_way for r in tally.whole_searches)} that gave way"
    )
    assert outcome.num_preemptions > 5
