"""What event logs tell of a live run: its steps, its messages, and how tables fit them."""

import asyncio
import itertools

import numpy as np
import pytest

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.experiments.open_loop import serve_open_loop
from rayserve_paged.experiments.stream_times import StreamTimes, user_figures
from rayserve_paged.inprocess import InProcessShell
from rayserve_paged.profiling.live import even_ratios, fit_served, message_times
from rayserve_paged.profiling.served_run import (
    ServedRun,
    ServedStep,
    predict_steps,
    read_served_run,
)
from rayserve_paged.sim.profile import (
    DecodeSteps,
    EmptySteps,
    PrefillSteps,
    Profile,
    StepTable,
)
from rayserve_paged.sim.profiled_cost import ProfiledCost
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.token_streams import Segment


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[StreamTimes, ServedRun]:
    folder = tmp_path_factory.mktemp("logs")
    config = DeploymentConfig.model_validate(
        {
            "model": {"model": "fingerprint"},
            "cache": {"num_blocks": 200, "block_size": 8},
            "parallel": {"num_replicas": 2},
            "event_log_dir": str(folder),
        }
    )
    requests = [
        SimRequest(0.02 * n, (Segment(n % 3, 24), Segment(100 + n, 5 + n)), 6 + n, seed=n)
        for n in range(12)
    ]
    too_long = SimRequest(0.3, (Segment(7, 2000),), 5, seed=9)
    shell = InProcessShell(config)
    try:
        times = asyncio.run(serve_open_loop(shell, [*requests, too_long]))
    finally:
        shell.shutdown()
    return times, read_served_run(folder)


def test_every_request_is_served_to_its_length_and_a_refused_one_says_why(
    served: tuple[StreamTimes, ServedRun],
) -> None:
    times, _run = served
    *good, refused = times.requests.values()
    assert [len(request.token_s) for request in good] == [6 + n for n in range(12)]
    assert {request.finish for request in good} == {FinishReason.LENGTH}
    assert refused.finish is FinishReason.ERROR
    assert refused.error
    arrivals = np.array([request.arrival_s for request in times.requests.values()])
    assert (np.diff(arrivals)[:11] > 0).all()
    for request in good:
        assert request.arrival_s < request.token_s[0]
        assert (np.diff(request.token_s) >= 0).all()
    figures = user_figures(times, sum(29 + n for n in range(12)) + 2000)
    assert (figures.num_requests, figures.num_failed) == (13, 1)
    assert figures.ttft_mean_s > 0
    assert figures.output_tokens_per_s > 0
    assert 0 < figures.token_hit_rate < 1


def test_the_logs_give_each_step_and_each_answer_its_time(
    served: tuple[StreamTimes, ServedRun],
) -> None:
    times, run = served
    assert {step.replica for step in run.steps} == {"r0", "r1"}
    # Every token of every prompt and answer but the last was computed once, or found.
    computed = sum(int(step.num_tokens.sum()) for step in run.steps)
    cached = sum(request.num_cached_tokens for request in times.requests.values())
    assert computed + cached == sum((29 + n) + (6 + n) - 1 for n in range(12))
    for replica in ("r0", "r1"):
        own = [step for step in run.steps if step.replica == replica]
        assert all(step.seconds > 0 for step in own)
        assert all(b.begin_s >= a.end_s for a, b in itertools.pairwise(own))
    for request_id, request in times.requests.items():
        for index, came_s in enumerate(request.token_s):
            assert run.answered_s[request_id, index] <= came_s
    messages = message_times(times, run)
    assert 0 < messages.submit_s < 10
    assert 0 < messages.assign_s < 10
    assert 0 < messages.deliver_s < 10


def flat_cost(alone_s: float, together_s: float) -> ProfiledCost:
    tables = [
        StepTable(
            num_active=number,
            empty=EmptySteps(num_tokens=[1, 2], seconds=[seconds] * 2),
            decode=DecodeSteps(
                num_sequences=[1, 2], num_context_tokens=[0, 1], seconds=[[seconds] * 2] * 2
            ),
            prefill=PrefillSteps(
                num_tokens=[2, 4], num_context_tokens=[0, 1], seconds=[[seconds] * 2] * 2
            ),
        )
        for number, seconds in ((1, alone_s), (2, together_s))
    ]
    return ProfiledCost(Profile(model="flat", dtype="fp32", device="none", tables=tables))


def test_a_step_is_predicted_for_as_many_replicas_as_ran_meanwhile() -> None:
    one = np.ones(1, np.int32)
    steps = [
        ServedStep("r0", 0.0, 4.0, one, one),
        ServedStep("r1", 1.0, 3.0, one, one),
        ServedStep("r0", 10.0, 12.0, one, one),
        ServedStep("r1", 20.0, 21.0, one, one),
        ServedStep("r0", 20.0, 22.0, one, one),
    ]
    predicted = predict_steps(steps, flat_cost(1.0, 2.0))
    assert predicted.tolist() == pytest.approx([1.5, 2.0, 1.0, 2.0, 1.5])


def test_served_steps_are_fitted_by_a_line_that_keeps_their_mean() -> None:
    predicted = np.array([0.05, 0.1, 0.2, 0.4])
    fitted = fit_served(predicted, 1.2 * predicted + 0.003)
    assert (fitted.scale, fitted.extra_s) == (pytest.approx(1.2), pytest.approx(0.003))
    through_zero = fit_served(predicted, 1.5 * predicted - 0.01)
    assert through_zero.extra_s == 0.0
    assert through_zero.scale * predicted.sum() == pytest.approx((1.5 * predicted - 0.01).sum())
    alike = fit_served(np.full(3, 0.1), np.array([0.1, 0.2, 0.3]))
    assert alike.scale * 0.1 + alike.extra_s == pytest.approx(0.2)


def test_few_ratios_are_spread_as_many_are_and_one_on_average() -> None:
    many = np.random.default_rng(0).permutation(np.linspace(0.5, 2.5, 10_001))
    few = even_ratios(many)
    assert len(few) == 64
    assert sum(few) / 64 == pytest.approx(1.0)
    # Of means of 1.5; the outermost are in the middle of their 64ths.
    assert few[0] == pytest.approx((0.5 + 2.0 * 0.5 / 64) / 1.5)
    assert np.percentile(few, [10, 50, 90]) == pytest.approx([0.7 / 1.5, 1.0, 2.3 / 1.5], rel=0.02)


def test_users_see_first_tokens_gaps_and_throughput() -> None:
    times = StreamTimes()
    for number, (arrival, tokens) in enumerate([(0.0, [1.0, 1.5, 2.5]), (1.0, [4.0, 4.1])]):
        name = RequestId(f"q{number}")
        times.arrive(name, arrival)
        times.requests[name].token_s = tokens
        times.requests[name].finish = FinishReason.LENGTH
    times.requests[RequestId("q1")].num_cached_tokens = 5
    figures = user_figures(times, 20)
    assert figures.ttft_mean_s == pytest.approx(2.0)
    assert figures.ttft_p90_s == pytest.approx(2.8)
    assert figures.itl_mean_s == pytest.approx((0.5 + 1.0 + 0.1) / 3)
    assert figures.output_tokens_per_s == pytest.approx(5 / 4.1)
    assert figures.token_hit_rate == 0.25
    assert figures.num_failed == 0
