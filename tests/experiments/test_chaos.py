"""Simulated chaos: nothing that must hold is broken, and what is broken on purpose is found."""

import dataclasses
import time

import pytest

from rayserve_paged.core.poll_log import PollLog
from rayserve_paged.core.request import FinishReason
from rayserve_paged.experiments.chaos import ChaosError, run_case
from rayserve_paged.experiments.chaos_case import ChaosCase, draw_case
from rayserve_paged.experiments.chaos_seeds import try_case, try_seed
from rayserve_paged.sim.faults import DisturbMessages, FaultPlan, Partition, PoisonRequest

SEEDS_AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, 200, SEEDS_AT_ONCE))
def test_random_faults_break_nothing(first: int) -> None:
    for seed in range(first, first + SEEDS_AT_ONCE):
        verdict = try_seed(seed)
        assert verdict.violation is None, verdict
        assert verdict.num_checks > 0


@pytest.mark.parametrize(
    "seed",
    [
        1057,  # A fenced replica took a pin.
        1518,  # A replica that nobody had polled for 9 s was lost with its next poll.
        1829,  # The same.
    ],
)
def test_seeds_that_once_broke_something_break_nothing(seed: int) -> None:
    assert try_seed(seed).violation is None


@pytest.mark.prove
def test_ten_thousand_seeds_break_nothing() -> None:
    num_tokens = num_lives = 0
    start = time.monotonic()
    for seed in range(10_000):
        verdict = try_seed(seed)
        assert verdict.violation is None, verdict
        num_tokens += verdict.num_tokens
        num_lives += verdict.num_lives
    per_minute = 60 * 10_000 / (time.monotonic() - start)
    print(f"{num_tokens:,} tokens, {num_lives:,} lives; {per_minute:,.0f} seeds per minute")


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in (3, 12, 27):
        case = draw_case(seed)
        assert case == draw_case(seed)
        assert run_case(case) == run_case(case)


def test_a_poisoned_request_fails_alone() -> None:
    """The request kills each replica that computes its first token; its neighbours run to their
    ends as if it were not there.
    """
    case = draw_case(12)
    poisoned = next(one for one in case.requests if one.request.params.n == 1)
    case = dataclasses.replace(
        case,
        requests=tuple(
            dataclasses.replace(
                one,
                cancel_at_s=None,
                request=dataclasses.replace(one.request, deadline_s=None),
            )
            for one in case.requests
        ),
        plan=FaultPlan(faults=(PoisonRequest(request=poisoned.number),)),
        recovery=case.recovery.model_copy(update={"poison_deaths": 2}),
    )
    outcome = run_case(case)
    failed = {
        name for name, stream in outcome.streams.items() if stream.finish is FinishReason.ERROR
    }
    assert failed == {(poisoned.request.request_id, 0)}
    error = outcome.streams[poisoned.request.request_id, 0].error
    assert error is not None
    assert "killed" in error
    # Once beside others, and twice on trial.
    assert outcome.num_lives == case.num_replicas + 3


@pytest.fixture
def acknowledges_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PollLog.poll

    def wrong(self: PollLog, source: object, now: float) -> object:
        ack, unwanted = right(self, source, now)  # type: ignore[arg-type]
        return ack + 1, unwanted

    monkeypatch.setattr(PollLog, "poll", wrong)


@pytest.mark.usefixtures("acknowledges_too_much")
def test_an_acknowledgement_of_what_never_came_is_found_and_its_plan_made_small() -> None:
    verdict = next(v for v in map(try_seed, range(100)) if v.violation is not None)
    assert 1 <= len(verdict.requests) < len(draw_case(verdict.seed).requests)
    assert "kind: disturb-messages" in verdict.plan_yaml or "kind: partition" in verdict.plan_yaml
    assert verdict.plan_yaml.count("kind:") < len(draw_case(verdict.seed).plan.faults)


def test_a_stream_that_is_wrong_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw_case(3)
    monkeypatch.setattr(
        "rayserve_paged.experiments.chaos.oracle", lambda *_: ((29, 29, 29), FinishReason.LENGTH)
    )
    with pytest.raises(ChaosError, match="alone"):
        run_case(case)
    assert "alone" in str(try_case(_with_one_request(case)).violation)


def _with_one_request(case: ChaosCase) -> ChaosCase:
    first = next(
        one
        for one in case.requests
        if one.request.params.beam_width is None and one.cancel_at_s is None
    )
    return dataclasses.replace(case, requests=(first,), plan=FaultPlan())


def test_plans_of_all_kinds_are_drawn() -> None:
    kinds = {fault.kind for seed in range(100) for fault in draw_case(seed).plan.faults}
    assert kinds == {
        "disturb-messages",
        "kill-controller",
        "kill-rank",
        "kill-replica",
        "partition",
        "pin-blocks",
        "poison-request",
        "reset-caches",
        "slow-replica",
    }


def test_the_network_of_a_plan_heals() -> None:
    plan = FaultPlan(
        faults=(
            DisturbMessages(from_s=0.0, until_s=20.0, lost=1.0),
            Partition(from_s=0.0, until_s=20.0, places=("controller",)),
        )
    )
    case = dataclasses.replace(draw_case(12), plan=plan)
    outcome = run_case(case)
    assert outcome.num_tokens > 0
