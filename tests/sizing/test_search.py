"""The search for the highest rate: what it finds, and when it says that there is none."""

import dataclasses
import itertools

import pytest

from rayserve_paged.core.config import BatchConfig
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.build import describe_cluster
from rayserve_paged.sizing.load import Load, alike
from rayserve_paged.sizing.search import (
    Prober,
    find_highest_rate,
    find_rate_of_all,
    find_replicas,
)
from rayserve_paged.sizing.slo import Slo, read_slo


def load(num_replicas: int = 1) -> Load:
    return alike(60 * num_replicas, 200, 20, seed=0)


def prober(slo: Slo, max_num_seqs: int = 8) -> Prober:
    spec = describe_cluster(
        num_replicas=1,
        gpu="L40S",
        tensor_parallel_size=1,
        model_shape="llama-8b",
        block_size=16,
        batch=BatchConfig(max_num_seqs=max_num_seqs, max_decode_steps=1024),
    )
    return Prober(spec, slo)


LOOSE = Slo(ttft_s=0.3, itl_s=0.2)


def test_the_rate_found_meets_the_objective_and_one_that_is_5_percent_higher_does_not() -> None:
    tight = Slo(ttft_s=0.1, itl_s=0.2)
    probes = prober(tight)
    found = find_highest_rate(probes, load(), tight)
    assert found.best.is_met
    unmet = [run.rate_per_s for run in probes.runs if not run.is_met]
    assert found.best.rate_per_s < min(unmet) <= 1.05 * found.best.rate_per_s
    assert max(run.rate_per_s for run in probes.runs if run.is_met) == found.best.rate_per_s
    assert found.best.rate_per_s < found.at_once.requests_per_s
    assert found.alone.ttft_p99_s is not None
    assert found.best.ttft_p99_s is not None
    assert found.alone.ttft_p99_s < found.best.ttft_p99_s <= 0.1


def test_no_rate_is_found_that_is_above_what_can_be_served() -> None:
    # So few requests that they would be served in time however fast they came.
    anything = Slo(ttft_s=1000.0, itl_s=None)
    probes = prober(anything)
    found = find_highest_rate(probes, load(), anything)
    assert found.at_once.is_met
    assert found.best.rate_per_s == found.at_once.requests_per_s
    assert len(probes.runs) == 3


def test_a_tighter_objective_has_a_lower_rate() -> None:
    rates = [
        find_highest_rate(prober(slo), load(), slo).best.rate_per_s
        for slo in (Slo(0.1, None), Slo(0.2, None), Slo(0.4, None))
    ]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_the_same_seed_finds_the_same_rate() -> None:
    first, second = (find_highest_rate(prober(LOOSE), load(), LOOSE).best for _ in range(2))
    assert dataclasses.replace(first, wall_s=0) == dataclasses.replace(second, wall_s=0)


def test_an_objective_that_no_request_meets_even_alone_is_refused_with_what_would_do() -> None:
    slo = Slo(ttft_s=1e-4, itl_s=0.2)
    probes = prober(slo)
    with pytest.raises(InvalidInputError, match=r"ttft=0.0001,itl=0.2.* served alone") as refused:
        find_highest_rate(probes, load(), slo)
    (alone,) = probes.runs
    assert f"ttft of {alone.ttft_p99_s:.3g} s" in str(refused.value)


def test_requests_that_cannot_be_served_meet_no_objective() -> None:
    too_long = alike(4, 131072, 20, seed=0)
    with pytest.raises(InvalidInputError, match="4 of them failed"):
        find_highest_rate(prober(LOOSE), too_long, LOOSE)


def test_as_few_replicas_as_meet_the_objective_are_found_for_a_rate() -> None:
    of_one = find_highest_rate(prober(LOOSE), load(), LOOSE).best.rate_per_s
    probes = prober(LOOSE)
    run = find_replicas(probes, load, 2.5 * of_one, of_one)
    assert run.is_met
    assert run.rate_per_s == 2.5 * of_one
    assert run.num_replicas in (2, 3, 4)
    fewer = [r for r in probes.runs if r.num_replicas < run.num_replicas]
    assert not any(r.is_met for r in fewer)
    # However wrong the first guess is.
    for guess in (of_one * 2, of_one / 2):
        assert find_replicas(prober(LOOSE), load, 2.5 * of_one, guess).num_replicas == (
            run.num_replicas
        )


def test_a_rate_that_would_take_thousands_of_replicas_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at most 4,096: 4096 replicas"):
        find_replicas(prober(LOOSE), load, 5000.0, 1.0)


def test_several_replicas_take_about_as_many_times_the_rate_of_one() -> None:
    of_one = find_highest_rate(prober(LOOSE), load(), LOOSE).best.rate_per_s
    run = find_rate_of_all(prober(LOOSE), load(3), 3, of_one)
    assert run.is_met
    assert 2 * of_one < run.rate_per_s <= 3 * of_one


def test_the_same_requests_come_at_every_rate() -> None:
    requests = load()
    slow, fast = list(requests.at(2.0)), list(requests.at(8.0))
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])
    assert (len(slow) - 1) / slow[-1].arrival_s == pytest.approx(2.0)
    for one, other in zip(slow, fast, strict=True):
        assert dataclasses.replace(one, arrival_s=0) == dataclasses.replace(other, arrival_s=0)
    lengths = {(r.num_prompt_tokens, r.num_output_tokens) for r in slow}
    assert lengths == {(200, 20)}
    assert (requests.mean_tokens, requests.longest) == (220, 220)
    assert len(set(itertools.chain(*(r.segments for r in slow)))) == 60


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=2.0,itl=0.05", Slo(2.0, 0.05)),
        (" itl = 0.05 ", Slo(None, 0.05)),
        ("ttft=1e-3", Slo(0.001, None)),
    ],
)
def test_an_objective_is_read(text: str, slo: Slo) -> None:
    assert read_slo(text) == slo
    assert read_slo(str(slo)) == slo


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=", "ttft=x", "tpot=1", "ttft=1,ttft=2", "ttft=0", "itl=nan", "itl=inf"],
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"ttft=2\.0,itl=0\.05"):
        read_slo(text)


def test_what_there_is_no_time_of_keeps_every_bound() -> None:
    assert Slo(1.0, 1.0).is_met_by(None, None)
    assert Slo(1.0, None).is_met_by(1.0, 9.0)
    assert not Slo(1.0, 1.0).is_met_by(0.5, 1.1)
