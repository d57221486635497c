"""Plants faults in the core and shows that its fast tests catch each: `make mutants`."""

import argparse
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from equivalents import EQUIVALENTS
from faults import Fault, choose
from mutation_choice import every_place, without_equivalents
from trials import ROOT, HarnessError, Outcome, Trials, collect_and_try


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
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at a time")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Fault]:
    faults = without_equivalents(every_place())
    if options.only:
        return [f for f in faults if any(fnmatch(f.name, each) for each in options.only)]
    return faults if options.all else choose(faults, options.count, options.seed)


def describe(fault: Fault) -> str:
    place = f"{fault.path.name}:{fault.line}"
    return f"{fault.name:60} {place}: {fault.before[:60]} -> {fault.after[:60]}"


def files_of(options: argparse.Namespace) -> list[Path]:
    if options.tests is None:
        return [ROOT / "tests/core"]
    return [ROOT / f"tests/core/{name}.py" for name in options.tests]


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
    faults = chosen(options)
    if options.list:
        for fault in faults:
            print(describe(fault))
        print(f"{len(faults)} faults of {len({f.rule for f in faults})} rules")
        return 0
    if not faults:
        print(f"no fault is named {options.only}")
        return 2
    start = time.monotonic()
    report = Report(len(faults))
    try:
        collect_and_try(Trials(faults, options.workers, report.add), files_of(options))
    except HarnessError as error:
        print(error)
        return 2
    report.sum_up(time.monotonic() - start)
    return 1 if report.survivors else 0


if __name__ == "__main__":
    sys.exit(main())
