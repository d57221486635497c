"""Made-up workloads: their statistics with fixed seeds, sessions that quote themselves, laziness.

The bounds are four standard errors, worked out beside each.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.synthetic import SyntheticWorkload, generate
from rayserve_paged.sim.token_streams import Segment, answer_stream

N = 20_000


def config(**changes: object) -> SyntheticWorkload:
    fields: dict[str, Any] = {
        "num_requests": N,
        "arrivals": {"kind": "poisson", "rate_per_s": 5.0},
        "prompt_tokens": {"median": 100},
        "output_tokens": {"median": 20},
    }
    return SyntheticWorkload.model_validate(fields | changes)


def requests(seed: int = 0, **changes: object) -> list[SimRequest]:
    return list(generate(config(**changes), seed))


def gaps_of(got: list[SimRequest]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.diff([request.arrival_s for request in got])


def test_poisson_gaps_have_the_mean_of_the_rate_and_a_deviation_as_large() -> None:
    gaps = gaps_of(requests())
    assert gaps.mean() == pytest.approx(0.2, rel=4 / math.sqrt(N))
    # The squared deviation of an exponential has a relative error of sqrt(8 / n).
    assert gaps.var() == pytest.approx(0.04, rel=4 * math.sqrt(8 / N))
    assert (gaps < 0.2 * math.log(2)).mean() == pytest.approx(0.5, abs=2 / math.sqrt(N))


@pytest.mark.parametrize("cv", [0.25, 3.0])
def test_gamma_gaps_have_the_mean_and_the_variation_that_was_asked_for(cv: float) -> None:
    gaps = gaps_of(requests(arrivals={"kind": "gamma", "rate_per_s": 5.0, "cv": cv}))
    assert gaps.mean() == pytest.approx(0.2, rel=4 * cv / math.sqrt(N))
    # Fourth moments of a gamma: kurtosis 3 + 6 cv^2.
    assert gaps.var() == pytest.approx((0.2 * cv) ** 2, rel=4 * math.sqrt((2 + 6 * cv**2) / N))


def test_on_off_arrivals_keep_the_rate_and_are_silent_while_off() -> None:
    arrivals = {"kind": "on_off", "rate_per_s": 5.0, "on_s": 2.0, "off_s": 8.0}
    gaps = gaps_of(requests(arrivals=arrivals))
    # About 400 cycles of 10 s, whose lengths and counts vary by about themselves.
    assert gaps.mean() == pytest.approx(0.2, rel=4 * math.sqrt(2 / 400))
    # While on, 25 a second: a gap of 1 s is a pause.
    pauses = gaps[gaps > 1.0]
    assert len(pauses) == pytest.approx(400 * math.exp(-1 / 8), rel=0.25)
    assert gaps[gaps <= 1.0].mean() == pytest.approx(1 / 25, rel=0.1)


def test_lengths_are_log_normal_within_their_bounds() -> None:
    got = requests(
        prompt_tokens={"median": 1000, "sigma": 0.5, "low": 300, "high": 3000},
        output_tokens={"median": 200, "sigma": 0.0},
    )
    prompts = np.array([request.num_prompt_tokens for request in got])
    # The median of n draws has a relative error of 1.25 sigma / sqrt(n).
    assert np.median(prompts) == pytest.approx(1000, rel=4 * 1.25 * 0.5 / math.sqrt(N))
    assert (prompts.min(), prompts.max()) == (300, 3000)
    inside = (prompts >= 1000 * math.exp(-0.5)) & (prompts <= 1000 * math.exp(0.5))
    assert inside.mean() == pytest.approx(0.6827, abs=2 / math.sqrt(N))
    assert {request.num_output_tokens for request in got} == {200}


def sessions_of(got: list[SimRequest]) -> dict[Segment, list[SimRequest]]:
    """By the first thing that a user says."""
    sessions: dict[Segment, list[SimRequest]] = {}
    for request in got:
        sessions.setdefault(request.segments[0], []).append(request)
    return sessions


def test_each_turn_quotes_all_that_was_said_and_answered_before() -> None:
    sessions = sessions_of(requests(mean_turns=4.0, think_s=10.0))
    pauses = []
    for turns in sessions.values():
        for earlier, later in itertools.pairwise(turns):
            answer = Segment(answer_stream(earlier.seed), earlier.num_output_tokens)
            assert later.segments[:-1] == (*earlier.segments, answer)
            pauses.append(later.arrival_s - earlier.arrival_s)
    assert np.mean(pauses) == pytest.approx(10.0, rel=4 / math.sqrt(len(pauses)))
    # Sessions that were over before the last requests came: geometric, of deviation sqrt(12).
    begun = [turns for turns in sessions.values() if turns[0].arrival_s < 800.0]
    lengths = [len(turns) for turns in begun]
    assert np.mean(lengths) == pytest.approx(4.0, abs=4 * math.sqrt(12 / len(lengths)))


def test_requests_come_in_order_and_each_has_a_seed_of_its_own() -> None:
    got = requests(mean_turns=3.0, think_s=2.0)
    assert len(got) == N
    assert (gaps_of(got) >= 0).all()
    assert len({request.seed for request in got}) == N


def test_a_session_ends_before_the_turn_that_would_be_too_long() -> None:
    got = requests(mean_turns=50.0, think_s=1.0, max_session_tokens=400)
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in got)
    assert longest == 100 + 20 + 100 + 20 + 100 + 20
    assert max(len(turns) for turns in sessions_of(got).values()) == 3
    (first, *_rest) = requests(max_session_tokens=1)
    assert first.num_prompt_tokens == 100


def test_sessions_share_system_prompts_in_the_shares_that_were_asked_for() -> None:
    got = requests(system_prompts={"count": 3, "num_tokens": 512, "share": 0.75, "zipf": 1.0})
    heads = [request.segments[0] for request in got if request.segments[0].num_tokens == 512]
    assert len(heads) / N == pytest.approx(0.75, abs=2 / math.sqrt(N))
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    # 1 : 1/2 : 1/3
    assert [count / len(heads) for count in counts] == pytest.approx(
        [6 / 11, 3 / 11, 2 / 11], abs=2 / math.sqrt(len(heads))
    )
    lengths = {(len(r.segments), r.num_prompt_tokens) for r in got}
    assert lengths == {(1, 100), (2, 612)}


def test_a_seed_gives_the_same_requests_and_another_gives_others() -> None:
    one, again, other = (requests(seed, num_requests=50) for seed in (1, 1, 2))
    assert one == again
    assert one[0] != other[0]


def test_other_lengths_leave_the_arrivals_as_they_are() -> None:
    one = requests(mean_turns=2.0)
    other = requests(mean_turns=2.0, output_tokens={"median": 50, "sigma": 1.0})
    assert [r.arrival_s for r in one] == [r.arrival_s for r in other]


def test_requests_are_made_as_they_are_taken() -> None:
    first = list(itertools.islice(generate(config(num_requests=10**12)), 3))
    assert first == requests()[:3]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_requests": 0},
        {"mean_turns": 0.5},
        {"arrivals": {"kind": "poisson", "rate_per_s": 0}},
        {"arrivals": {"kind": "uniform", "rate_per_s": 1}},
        {"arrivals": {"kind": "gamma", "rate_per_s": 1}},
        {"prompt_tokens": {"median": 10, "low": 20}},
        {"prompt_tokens": {"median": 10, "sigma": float("nan")}},
        {"system_prompts": {"count": 1, "num_tokens": 5, "share": 1.5}},
        {"more": 1},
    ],
)
def test_distributions_that_are_none_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**changes)
