"""Tries faults with simulated chaos: each in a fork, seed after seed, until one is violated."""

import dataclasses
import gc
import json
import os
import signal
from collections.abc import Callable, Iterable

from faults import Fault
from forks import Fork, Tell
from planting import loaded, plant

from rayserve_paged.experiments.chaos import run_case
from rayserve_paged.experiments.chaos_case import draw_case

# A seed takes a tenth of a second or some; a fault may turn a loop into an endless one.
_SEED_S = 30.0


@dataclasses.dataclass(frozen=True)
class ChaosOutcome:
    """What became of a fault.

    Args:
        fault: The fault.
        num_seeds: How many seeds were run, the one that it broke included.
        violation: What broke; None where nothing did.
        seconds: How long it took to find out.
    """

    fault: Fault
    num_seeds: int
    violation: str | None
    seconds: float


def try_with_chaos(
    faults: Iterable[Fault], max_seeds: int, report: Callable[[ChaosOutcome], None]
) -> None:
    """Try each fault with the seeds from 0 on.

    Args:
        faults: The faults.
        max_seeds: After which a fault has survived.
        report: Takes each outcome.

    Raises:
        HarnessError: A fault has no place.
    """
    gc.freeze()
    for fault in faults:
        loaded(fault.path)
        fork = Fork(lambda tell: _try(fault, max_seeds, tell))  # noqa: B023
        _pid, status = os.waitpid(fork.pid, 0)
        seconds = fork.seconds
        failed, told = fork.end(status)
        num_seeds, violation = json.loads(told)
        if failed is not None and violation is None:
            violation = f"seed {num_seeds - 1}{failed.removeprefix(told.decode())}"
        report(ChaosOutcome(fault, num_seeds, violation, seconds))


def _try(fault: Fault, max_seeds: int, tell: Tell) -> bool:
    plant(fault.path, fault.text, fault.function)
    for seed in range(max_seeds):
        tell(json.dumps((seed + 1, None)).encode())
        # Ends the process where nothing else does.
        signal.setitimer(signal.ITIMER_PROF, _SEED_S)
        try:
            run_case(draw_case(seed))
        except Exception as error:  # Whatever a state machine raises is what is looked for.
            tell(json.dumps((seed + 1, f"{type(error).__name__}: {error}")).encode())
            return False
    return True
