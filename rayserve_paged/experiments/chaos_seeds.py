"""Whether seeds of simulated chaos break anything, and the smallest part of each that does."""

import dataclasses

import yaml

from rayserve_paged.experiments.chaos import run_case
from rayserve_paged.experiments.chaos_case import ChaosCase, draw_case
from rayserve_paged.experiments.chaos_shrink import shrink


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one seed.

    Args:
        seed: The seed.
        violation: What does not hold; None where all does.
        requests: Numbers of the requests with which it fails.
        plan_yaml: The faults with which it fails.
        num_events: Of the simulation.
        num_checks: How often a replica's invariants were checked.
        num_tokens: Accepted.
        num_lives: Of replicas.
    """

    seed: int
    violation: str | None
    requests: tuple[int, ...] = ()
    plan_yaml: str = ""
    num_events: int = 0
    num_checks: int = 0
    num_tokens: int = 0
    num_lives: int = 0


def try_seed(seed: int) -> Verdict:
    """Run a seed, and make it small where it fails."""
    return try_case(draw_case(seed))


def try_case(case: ChaosCase) -> Verdict:
    """Run a case, and make it small where it fails."""
    try:
        outcome = run_case(case)
    except Exception as error:  # Whatever a state machine raises is what is looked for.
        violation = _name(error)
    else:
        return Verdict(
            case.seed,
            None,
            num_events=outcome.num_events,
            num_checks=outcome.num_checks,
            num_tokens=outcome.num_tokens,
            num_lives=outcome.num_lives,
        )
    small = shrink(case, _fails)
    plan = yaml.safe_dump(small.plan.model_dump(mode="json"), sort_keys=False)
    return Verdict(case.seed, violation, tuple(one.number for one in small.requests), plan)


def _fails(case: ChaosCase) -> bool:
    try:
        run_case(case)
    except Exception:  # As above.
        return True
    return False


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
