"""Plants faults in copies of the core and shows that the fast tests catch each: `make mutants`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch

from equivalents import EQUIVALENTS
from faults import Fault, choose
from mutation_choice import all_faults
from trials import Outcome, run_all


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which faults are chosen")
    parser.add_argument("--count", type=int, default=90, help="how many faults are chosen")
    parser.add_argument("--all", action="store_true", help="every fault instead of a choice")
    parser.add_argument(
        "--only", metavar="PATTERN", help="names to run, such as 'kv_manager.*' or '*:twice:*'"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="NAME", help="test files of the core to run, instead of all"
    )
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at a time")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Fault]:
    faults = all_faults()
    if options.only:
        return [fault for fault in faults if fnmatch(fault.name, options.only)]
    return faults if options.all else choose(faults, options.count, options.seed)


def describe(fault: Fault) -> str:
    place = f"{fault.path.name}:{fault.line}"
    return f"{fault.name:60} {place}: {fault.before[:60]} -> {fault.after[:60]}"


def report(number: int, total: int, fault: Fault, result: Outcome) -> None:
    verdict = f"caught by {result.caught_by}" if result.caught_by else "SURVIVED"
    print(f"{number:4}/{total} {result.seconds:5.1f} s  {describe(fault)}")
    print(f"{'':15} {verdict}", flush=True)


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
    survivors: list[Fault] = []
    number = 0
    # First the package as it is, whose tests must pass.
    for result in run_all([None, *faults], options.workers, options.tests):
        if result.fault is None:
            if result.caught_by is not None:
                print(f"{result.output}\nthe tests fail without a fault: {result.caught_by}")
                return 2
            continue
        number += 1
        report(number, len(faults), result.fault, result)
        if result.caught_by is None:
            survivors.append(result.fault)
    rules = Counter(fault.rule for fault in faults)
    print(
        f"{len(faults)} faults of {len(rules)} rules in {len({f.path for f in faults})} modules: "
        f"{len(faults) - len(survivors)} caught, {len(survivors)} survived; "
        f"{len(EQUIVALENTS)} places are left out, where a rule changes nothing; "
        f"{time.monotonic() - start:.0f} s"
    )
    for fault in survivors:
        print(f"SURVIVED {describe(fault)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
