"""Records which lines of some modules a test runs, and how long it takes."""

import ast
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from faults import Fault
from planting import forget_results, loaded, plant

_LINES = "lines_that_were_run"


class Reach(NamedTuple):
    """What a test runs.

    Args:
        seconds: Of a core.
        lines: Of each module, by its path, the first lines of the statements that were run.
    """

    seconds: float
    lines: dict[Path, frozenset[int]]

    def includes(self, fault: Fault) -> bool:
        """Return whether the test runs the statement that a fault changes."""
        return fault.statement_line in self.lines[fault.path]


class Recorder:
    """Makes the functions of loaded modules note each statement that they run.

    Args:
        root: Parent of the package.
        paths: The modules, relative to it.
    """

    def __init__(self, root: Path, paths: Iterable[Path]) -> None:
        self._seen: dict[Path, dict[int, None]] = {}
        for path in paths:
            self._seen[path] = vars(loaded(path))[_LINES] = {}
            plant(path, with_notes((root / path).read_text()))

    def record(self, run: Callable[[], None]) -> Reach:
        """Run a test."""
        for path, seen in self._seen.items():
            seen.clear()
            forget_results(path)
        start = time.process_time()
        run()
        seconds = time.process_time() - start
        return Reach(seconds, {path: frozenset(seen) for path, seen in self._seen.items()})


def with_notes(text: str) -> ast.Module:
    """Return a module in whose functions a note of its line goes before each statement."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in {each for function in functions for each in ast.walk(function)}:
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [each for old in statements for each in (_note(old), old)])
    return tree


def _note(statement: ast.stmt) -> ast.stmt:
    (note,) = ast.parse(f"{_LINES}[{statement.lineno}] = None").body
    for node in ast.walk(note):
        ast.copy_location(node, statement)
    return note


def shortest_first(reaches: Sequence[Reach], fault: Fault) -> list[int]:
    """Return which tests run the place of a fault, by their numbers, the shortest first."""
    those = [number for number, reach in enumerate(reaches) if reach.includes(fault)]
    return sorted(those, key=lambda number: reaches[number].seconds)
