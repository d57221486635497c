"""Plants faults in the core, and shows that its fast tests catch each, and that simulated chaos
finds those of the recovery: `make mutants`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from chaos_trials import ChaosOutcome, try_with_chaos
from equivalents import EQUIVALENTS
from faults import Fault, choose
from forks import HarnessError
from mutation_choice import every_place, without_equivalents
from recovery_faults import RECOVERY_FAULTS
from trials import ROOT, Outcome, Trials, collect_and_try


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which faults are chosen")
    parser.add_argument("--count", type=int, default=90, help="how many faults are chosen")
    parser.add_argument("--all", action="store_true", help="every fault instead of a choice")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="names to run, such as 'kv_manager.*' or '*:twice:*'",
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="NAME", help="test files of the core to run, instead of all"
    )
    parser.add_argument(
        "--by",
        choices=["tests", "chaos"],
        help="what is to find them: the tests, or the seeds of simulated chaos; absent: the faults "
        "of the recovery by chaos, all that the other options choose by tests, and what survives "
        "these by chaos too",
    )
    parser.add_argument(
        "--seeds", type=int, default=1000, help="seeds of chaos that a fault has to survive"
    )
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at a time")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> tuple[list[Fault], list[Fault]]:
    """Return the faults to try with tests, and those to try with chaos."""
    faults = without_equivalents(every_place())
    recovery = [f for f in faults if any(one.is_it(f) for one in RECOVERY_FAULTS)]
    if options.only:
        named = [f for f in faults if any(fnmatch(f.name, each) for each in options.only)]
        return ([], named) if options.by == "chaos" else (named, [])
    if options.by == "chaos":
        return [], recovery
    some = faults if options.all else choose(faults, options.count, options.seed)
    return some, recovery if options.by is None else []


def describe(fault: Fault) -> str:
    place = f"{fault.path.name}:{fault.line}"
    return f"{fault.name:60} {place}: {fault.before[:60]} -> {fault.after[:60]}"


def files_of(options: argparse.Namespace) -> list[Path]:
    if options.tests is None:
        return [ROOT / "tests/core"]
    return [ROOT / f"tests/core/{name}.py" for name in options.tests]


class ChaosReport:
    """Prints which seed finds each fault, and counts.

    Args:
        num_faults: How many there are.
        max_seeds: With how many each is tried.
    """

    def __init__(self, num_faults: int, max_seeds: int) -> None:
        self.num_faults = num_faults
        self.max_seeds = max_seeds
        self.outcomes: list[ChaosOutcome] = []

    def add(self, outcome: ChaosOutcome) -> None:
        self.outcomes.append(outcome)
        place = f"{len(self.outcomes):4}/{self.num_faults}"
        print(f"{place} {outcome.seconds:5.1f} s  {describe(outcome.fault)}")
        for one in RECOVERY_FAULTS:
            if one.is_it(outcome.fault):
                print(f"{'':15} {one.meaning}")
        verdict = f"SURVIVED {outcome.num_seeds} seeds"
        if outcome.violation is not None:
            first_line = outcome.violation.splitlines()[0]
            verdict = f"found within {outcome.num_seeds} seeds: {first_line[:150]}"
        print(f"{'':15} {verdict}", flush=True)

    @property
    def survivors(self) -> list[Fault]:
        return [outcome.fault for outcome in self.outcomes if outcome.violation is None]

    def sum_up(self, seconds: float) -> None:
        counts = sorted(one.num_seeds for one in self.outcomes if one.violation is not None)
        print(
            f"{len(self.outcomes)} faults in "
            f"{len({one.fault.path for one in self.outcomes})} modules tried with simulated "
            f"chaos: {len(counts)} found within {self.max_seeds:,} seeds, "
            f"{len(self.survivors)} survived; {seconds:.0f} s"
        )
        if counts:
            print(f"seeds that it took: {', '.join(map(str, counts))}")
        for fault in self.survivors:
            print(f"SURVIVED {describe(fault)}")


class Report:
    """Prints what becomes of each fault, and counts."""

    def __init__(self, num_faults: int) -> None:
        self.num_faults = num_faults
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        place = f"{len(self.outcomes):4}/{self.num_faults}"
        print(f"{place} {outcome.seconds:5.1f} s  {describe(outcome.fault)}")
        verdict = "SURVIVED"
        if outcome.caught_by is not None:
            verdict = f"caught by {outcome.caught_by.removeprefix('tests/core/')}"
        print(f"{'':15} {verdict}, of {outcome.num_tests} tests that run it", flush=True)

    @property
    def survivors(self) -> list[Fault]:
        return [outcome.fault for outcome in self.outcomes if outcome.caught_by is None]

    def sum_up(self, seconds: float) -> None:
        faults = [outcome.fault for outcome in self.outcomes]
        print(
            f"{len(faults)} faults of {len({fault.rule for fault in faults})} rules "
            f"in {len({fault.path for fault in faults})} modules: "
            f"{len(faults) - len(self.survivors)} caught, {len(self.survivors)} survived; "
            f"{len(EQUIVALENTS)} places are left out, where a rule changes nothing; "
            f"{seconds:.0f} s"
        )
        for fault in self.survivors:
            print(f"SURVIVED {describe(fault)}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    by_tests, by_chaos = chosen(options)
    if options.list:
        for fault in by_tests + by_chaos:
            print(describe(fault))
        rules = {fault.rule for fault in by_tests + by_chaos}
        print(f"{len(by_tests) + len(by_chaos)} faults of {len(rules)} rules")
        return 0
    if not by_tests and not by_chaos:
        print(f"no fault is named {options.only}")
        return 2
    survivors: list[Fault] = []
    try:
        if by_chaos:
            survivors += run_chaos(by_chaos, options)
        if by_tests:
            left = run_tests(by_tests, options)
            if left and options.by is None:
                left = run_chaos(left, options)
            survivors += left
    except HarnessError as error:
        print(error)
        return 2
    return 1 if survivors else 0


def run_chaos(faults: list[Fault], options: argparse.Namespace) -> list[Fault]:
    """Try faults with simulated chaos; return those that survive."""
    start = time.monotonic()
    report = ChaosReport(len(faults), options.seeds)
    try_with_chaos(faults, options.seeds, report.add)
    report.sum_up(time.monotonic() - start)
    return report.survivors


def run_tests(faults: list[Fault], options: argparse.Namespace) -> list[Fault]:
    """Try faults with the tests that run them; return those that survive."""
    start = time.monotonic()
    report = Report(len(faults))
    collect_and_try(Trials(faults, options.workers, report.add), files_of(options))
    report.sum_up(time.monotonic() - start)
    return report.survivors


if __name__ == "__main__":
    sys.exit(main())
