"""Tries faults: each in a fork of one pytest session, which has collected the tests of the core.

A first fork runs all tests and records what each runs of the faulty modules. A fault's fork then
runs only the tests that run its place, the shortest first, until one fails.
"""

import gc
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
from faults import Fault
from forks import Fork, HarnessError, Tell
from planting import plant
from reach import Reach, Recorder, shortest_first

ROOT = Path(__file__).parents[2]
CORE = Path("rayserve_paged/core")

# A fault may turn a loop into an endless one.
_SPARE_S, _TIMES_AS_LONG = 5.0, 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Args:
        fault: The fault.
        caught_by: The first test that failed; None where none did.
        num_tests: How many tests run its place.
        seconds: How long it took to find out.
    """

    fault: Fault
    caught_by: str | None
    num_tests: int
    seconds: float


class Trials:
    """Plugin of pytest that tries faults instead of running the tests once.

    Args:
        faults: The faults.
        num_workers: How many are tried at a time.
        report: Takes each outcome.
    """

    def __init__(
        self, faults: Sequence[Fault], num_workers: int, report: Callable[[Outcome], None]
    ) -> None:
        self._faults = faults
        self._num_workers = num_workers
        self._report = report
        self._has_failed = False
        self.error: HarnessError | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        self._has_failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try the faults with the tests that were collected."""
        # What is there already is not looked at, and so not copied, in any fork.
        gc.freeze()
        try:
            if session.testsfailed:
                raise HarnessError("the tests cannot be collected")
            self._try_all(session.items, self._reaches(session.items))
        except HarnessError as error:
            self.error = error
        return True

    def _reaches(self, items: list[pytest.Item]) -> list[Reach]:
        """Return what each test runs of the modules that have faults."""
        fork = Fork(lambda tell: self._record(items, tell))
        _pid, status = os.waitpid(fork.pid, 0)
        failed, told = fork.end(status)
        if failed is not None:
            raise HarnessError(f"the tests fail without a fault: {failed}")
        reaches: list[Reach] = pickle.loads(told)
        return reaches

    def _try_all(self, items: list[pytest.Item], reaches: list[Reach]) -> None:
        waiting = iter(self._faults)
        running: dict[int, tuple[Fork, Fault, int]] = {}
        try:
            while True:
                for fault in waiting:
                    numbers = shortest_first(reaches, fault)
                    tests = {items[number]: reaches[number].seconds for number in numbers}
                    fork = Fork(lambda tell: self._try(fault, tests, tell))  # noqa: B023
                    running[fork.pid] = fork, fault, len(tests)
                    if len(running) == self._num_workers:
                        break
                if not running:
                    return
                pid, status = os.wait()
                fork, fault, num_tests = running.pop(pid)
                failed, _told = fork.end(status)
                self._report(Outcome(fault, failed, num_tests, fork.seconds))
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _record(self, items: list[pytest.Item], tell: Tell) -> bool:
        recorder = Recorder(ROOT, {fault.path for fault in self._faults})
        reaches = []
        for item, following in zip_longest(items, items[1:]):
            tell(item.nodeid.encode())
            reaches.append(recorder.record(lambda: _run(item, following)))  # noqa: B023
            if self._has_failed:
                return False
        tell(pickle.dumps(reaches))
        return True

    def _try(self, fault: Fault, tests: dict[pytest.Item, float], tell: Tell) -> bool:
        plant(fault.path, fault.text, fault.function)
        items = list(tests)
        for item, following in zip_longest(items, items[1:]):
            tell(item.nodeid.encode())
            # Ends the process where nothing else does.
            signal.setitimer(signal.ITIMER_PROF, _SPARE_S + _TIMES_AS_LONG * tests[item])
            _run(item, following)
            if self._has_failed:
                return False
        return True


def _run(item: pytest.Item, following: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def collect_and_try(trials: Trials, files: list[Path]) -> None:
    """Collect the fast tests of some files, and try the faults with them.

    Raises:
        HarnessError: They cannot be collected, fail without a fault, or a fault has no place.
    """
    signal.signal(signal.SIGTERM, lambda _number, _frame: pytest.exit("told to end"))
    options = ["-qqs", "--no-summary", "-p", "no:cacheprovider", "--timeout=0"]
    options += ["-m", "not slow and not prove and not gpu", "--rootdir", str(ROOT)]
    options += ["--hypothesis-profile=no-shrinking"]
    status = pytest.main([*options, *map(str, files)], plugins=[trials])
    if trials.error is not None or status:
        raise trials.error or HarnessError(f"pytest ended with {status!r}")
