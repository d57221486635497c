"""Runs the fast tests of the core on copies of the package that have one fault each.

Each copy has a process of its own, forked from this one, which has loaded all that the tests need
but the package itself.
"""

import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.stateful
import numpy.typing
import pydantic
import pytest
from faults import Fault

ROOT = Path(__file__).parents[2]
CORE = Path("rayserve_paged/core")
CPU_LIMIT_S = 120
"""A fault may turn a loop into an endless one; without one the tests take 30 s of a core."""

_MAX_MEMORY_BYTES = 4 << 30
_WARM = (hypothesis.stateful, numpy.typing, pydantic)
_POLL_S = 0.02

# After the tests of the module itself: those that see most first, and the long ones last.
_FIRST = (
    "test_kv_manager",
    "test_batcher",
    "test_ledger_machine",
    "test_known_faults_forks",
    "test_known_faults_in_flight",
    "test_known_faults_ledger",
    "test_known_faults_identity",
    "test_known_faults_scheduling",
    "test_partial_reuse",
    "test_replica",
    "test_several_steps",
    "test_pool_machine",
)
_LAST = ("test_known_faults_requests", "test_replica_machine")
# Run where the fault is in what they are about.
_ABOUT_OTHER_THINGS = (
    "test_config",
    "test_consumer",
    "test_controller",
    "test_controller_machine",
    "test_directory",
    "test_errors",
    "test_eviction",
    "test_mutants",
    "test_outbox",
    "test_purity",
    "test_request",
)
# Collecting takes longer than most tests: few files first.
_FIRST_STAGE = 4


@dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Args:
        fault: The fault; None for the package as it is.
        caught_by: The first test that failed; None where none did.
        seconds: How long that took.
        output: What pytest printed last.
    """

    fault: Fault | None
    caught_by: str | None
    seconds: float
    output: str = field(repr=False)


def stages_of(module: str) -> list[list[str]]:
    """The fast tests of the core, those that catch a fault of this module soonest first."""
    names = {path.stem for path in (ROOT / "tests/core").glob("test_*.py")}
    own = sorted(name for name in names if name.startswith(f"test_{module}"))
    others = sorted(names - {*own, *_FIRST, *_LAST, *_ABOUT_OTHER_THINGS})
    order = [name for name in dict.fromkeys([*own, *_FIRST, *others, *_LAST]) if name in names]
    return [order[:_FIRST_STAGE], order[_FIRST_STAGE:]]


def copy_tree(target: Path) -> None:
    """Copy what the tests of the core need, compiled files included."""
    ignored = shutil.ignore_patterns(".hypothesis", ".pytest_cache")
    for name in ("rayserve_paged", "tests/core"):
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in ("tests/conftest.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, target / name)


def sow(fault: Fault, target: Path) -> None:
    """Write the faulty module over its copy."""
    path = target / fault.path
    path.write_text(fault.text)
    # Of the same size and second: the compiled right module would be taken for it.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def run_all(
    faults: Iterable[Fault | None], workers: int, tests: list[str] | None = None
) -> Iterator[Outcome]:
    """Try faults; yield what became of each as it ends.

    Args:
        faults: The faults; None for the package as it is.
        workers: How many are tried at a time.
        tests: Names of the test files; None for those that are about the faulty module.
    """
    # An end by signal shall take the trials along.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    waiting = iter(faults)
    running: dict[int, _Trial] = {}
    exhausted = False
    try:
        while running or not exhausted:
            while len(running) < workers and not exhausted:
                fault = next(waiting, _END)
                if isinstance(fault, _End):
                    exhausted = True
                else:
                    trial = _Trial(fault, tests)
                    running[trial.begin()] = trial
            for pid, trial in list(running.items()):
                if trial.has_ended(pid):
                    del running[pid]
                    yield trial.outcome()
            time.sleep(_POLL_S)
    finally:
        for pid, trial in running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            trial.folder.cleanup()


class _End:
    pass


_END = _End()


class _Trial:
    """One fault in one process."""

    def __init__(self, fault: Fault | None, tests: list[str] | None) -> None:
        self._fault = fault
        module = "kv_manager" if fault is None else fault.path.stem
        self._stages = stages_of(module) if tests is None else [tests]
        self.folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self._target = Path(self.folder.name)
        self._output = self._target / "output"
        self._start = time.monotonic()
        self._status = 0

    def begin(self) -> int:
        copy_tree(self._target)
        if self._fault is not None:
            sow(self._fault, self._target)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._run()
        return pid

    def has_ended(self, pid: int) -> bool:
        ended, self._status = os.waitpid(pid, os.WNOHANG)
        return ended == pid

    def outcome(self) -> Outcome:
        output = self._output.read_text(errors="replace")
        self.folder.cleanup()
        failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/core/)?(\S+)", output, re.MULTILINE)
        caught_by = None
        if os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == signal.SIGXCPU:
            caught_by = f"the clock: no end after {CPU_LIMIT_S} s of a core"
        elif self._status:
            caught_by = failed[0] if failed else f"pytest, which ended with {self._status}"
        return Outcome(self._fault, caught_by, time.monotonic() - self._start, output[-4000:])

    def _run(self) -> None:
        """Run the tests and end the process; never returns."""
        code = 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 5))
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self._target)
            os.environ["PYTHONPATH"] = str(self._target)
            os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self._target / ".hypothesis")
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(self._target))
            for names in self._stages:
                code = _pytest([f"tests/core/{name}.py" for name in names])
                if code:
                    break
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            os._exit(code)


def _pytest(files: list[str]) -> int:
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    options += ["-m", "not slow and not prove and not gpu", "--timeout=0"]
    options += ["--hypothesis-profile=no-shrinking"]
    # What is loaded before the fork cannot have its assertions rewritten, and has none of ours.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *files]))
