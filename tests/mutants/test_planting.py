"""Faulty code takes the place of the right one, and what a test runs is noted by statement."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from faults import Edit, Fault, Rule, Source, faults_of, nodes
from planting import plant
from reach import Reach, Recorder, shortest_first

PATH = Path("planted_sample.py")
SAMPLE = '''
from __future__ import annotations

import functools


class Parent:
    def __init__(self) -> None:
        self.level = 1


class Child(Parent):
    """Has one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.level += 1

    @property
    def twice(self) -> int:
        return self.level * 2

    @functools.cached_property
    def thrice(self) -> int:
        return self.level * 3

    @classmethod
    def make(cls) -> Child:
        return cls()


@functools.cache
def half(number: int) -> int:
    return number // 2


def sign(number: int) -> int:
    if (
        number
        > 0
    ):
        return 1
    return 0 if number == 0 else -1
'''


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / PATH).write_text(SAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(PATH.stem)
    del sys.modules[PATH.stem]


@pytest.mark.parametrize(
    ("right", "wrong", "read", "value"),
    [
        ("level += 1", "level += 5", "Child().level", 6),
        ("super().__init__()", "self.level = 7", "Child().level", 8),
        ("level * 2", "level * 4", "Child().twice", 8),
        ("level * 3", "level * 5", "Child().thrice", 10),
        ("cls()", "Parent()", "make().level", 1),
        ("return 1", "return 9", "sign(3)", 9),
        ("number // 2", "number // 3", "half(12)", 4),
    ],
)
def test_whoever_has_a_function_runs_its_planted_code(
    sample: ModuleType, right: str, wrong: str, read: str, value: int
) -> None:
    names = {**vars(sample), "make": sample.Child.make}
    assert eval(read, names) != value
    plant(PATH, SAMPLE.replace(right, wrong))
    assert eval(read, names) == value


def test_only_the_function_that_is_named_is_planted(sample: ModuleType) -> None:
    wrong = SAMPLE.replace("level * 2", "level * 4").replace("return 1", "return 9")
    plant(PATH, wrong, "sign")
    assert (sample.sign(3), sample.Child().twice) == (9, 4)
    with pytest.raises(LookupError, match="planted_sample has no function Child"):
        plant(PATH, wrong, "Child.half")


def fault_of(tmp_path: Path, place: str) -> Fault:
    """Return a fault in the comparison that this text is."""

    def edits(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
        for node in nodes(function):
            if isinstance(node, ast.Compare) and source.of(node) == place:
                yield Edit(node, "False")

    (fault,) = faults_of(PATH, tmp_path, [Rule("none", "no rule", r"\.sign$", edits)])
    return fault


def test_a_test_is_known_to_run_a_fault_by_the_statement_that_the_fault_is_in(
    sample: ModuleType, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path, [PATH])
    condition = fault_of(tmp_path, "number\n        > 0")
    choice = fault_of(tmp_path, "number == 0")
    of_three = recorder.record(lambda: sample.sign(3))
    of_none = recorder.record(lambda: sample.sign(0))
    nothing = recorder.record(lambda: None)
    assert [each.includes(condition) for each in (of_three, of_none, nothing)] == [
        True,
        True,
        False,
    ]
    assert [each.includes(choice) for each in (of_three, of_none, nothing)] == [False, True, False]


def test_a_function_is_known_to_be_run_by_each_test_that_asks_for_what_it_remembers(
    sample: ModuleType, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path, [PATH])
    (line,) = [i for i, each in enumerate(SAMPLE.splitlines(), 1) if "number // 2" in each]
    reaches = [recorder.record(lambda: sample.half(12)) for _ in range(2)]
    assert [reach.lines[PATH] for reach in reaches] == [{line}] * 2


def test_the_shortest_of_the_tests_that_run_a_fault_is_tried_first(
    sample: ModuleType, tmp_path: Path
) -> None:
    fault = fault_of(tmp_path, "number == 0")
    lines = {PATH: frozenset({fault.statement_line})}
    reaches = [Reach(3.0, lines), Reach(0.1, {PATH: frozenset()}), Reach(2.0, lines)]
    assert shortest_first(reaches, fault) == [2, 0]
