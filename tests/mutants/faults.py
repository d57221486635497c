"""Seeded faults: rules that rewrite one place of one named function in the core's own source.

A rule looks at the syntax tree of a function and says which pieces of its text could be written
wrongly. It applies to every function whose name it matches, whoever adds that function.
"""

import ast
import dataclasses
import functools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """A node of the tree, and the text to put in its place."""

    node: ast.expr | ast.stmt
    text: str


class Source:
    """Text of a module, and the text of its nodes."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        self._encoded = text.encode()
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """First and last offset of a node, in bytes."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self._encoded[start:end].decode()

    def replaced(self, edit: Edit) -> str:
        start, end = self.span(edit.node)
        return (self._encoded[:start] + edit.text.encode() + self._encoded[end:]).decode()

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef]]:
        """Functions and methods with their qualified names."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                yield node.name, node
            elif isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef):
                        yield f"{node.name}.{member.name}", member


Edits = Callable[[ast.FunctionDef, Source], Iterator[Edit]]
"""Finds the places of a function that a rule applies to."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A way to write a line wrongly.

    Args:
        name: Short, for reports.
        fault: What it stands for.
        functions: Regular expression over `module.Class.function`; searched, not matched whole.
        edits: The places in a function and what to write there.
    """

    name: str
    fault: str
    functions: str
    edits: Edits


@dataclasses.dataclass(frozen=True)
class Fault:
    """One place that is written wrongly.

    Args:
        name: `module.Class.function:rule:number`.
        rule: Name of its rule.
        path: Of the module, relative to the package's parent.
        function: `Class.function`.
        line: Line number.
        statement_line: Of the innermost statement that the place is in.
        source_line: What stands in that line.
        before: What stands there.
        after: What stands there instead.
        text: The whole module with the fault.
    """

    name: str
    rule: str
    path: Path
    function: str
    line: int
    statement_line: int
    source_line: str
    before: str
    after: str
    text: str = dataclasses.field(repr=False)


@functools.lru_cache(maxsize=1)  # Each rule asks once more.
def nodes(function: ast.FunctionDef) -> tuple[ast.AST, ...]:
    """What a function does: without its signature, docstring, assertions and error messages."""
    found: list[ast.AST] = []
    queue: list[ast.AST] = list(reversed(function.body))
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Assert | ast.Raise):
            continue
        if isinstance(node, ast.Expr) and _says_nothing(node.value):
            continue
        found.append(node)
        children = ast.iter_child_nodes(node)
        queue += reversed([c for c in children if c is not getattr(node, "annotation", None)])
    return tuple(found)


def _says_nothing(value: ast.expr) -> bool:
    """Return whether a statement is a docstring, or where a `match` cannot come to."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "assert_never"
    return isinstance(value, ast.Constant)


def faults_of(path: Path, package_parent: Path, rules: Sequence[Rule]) -> list[Fault]:
    """Return every fault that the rules find in a module."""
    source = Source((package_parent / path).read_text())
    found: list[Fault] = []
    for name, function in source.functions():
        qualified = f"{path.stem}.{name}"
        statement_lines = _statement_lines(function)
        for rule in rules:
            if not re.search(rule.functions, qualified):
                continue
            for number, edit in enumerate(rule.edits(function, source)):
                found.append(
                    Fault(
                        name=f"{qualified}:{rule.name}:{number}",
                        rule=rule.name,
                        path=path,
                        function=name,
                        line=edit.node.lineno,
                        statement_line=statement_lines[edit.node.lineno],
                        source_line=source.lines[edit.node.lineno - 1].strip(),
                        before=" ".join(source.of(edit.node).split()),
                        after=" ".join(edit.text.split()),
                        text=source.replaced(edit),
                    )
                )
    return found


def _statement_lines(function: ast.FunctionDef) -> dict[int, int]:
    """Return for each line the first line of the innermost statement that it belongs to."""
    lines: dict[int, int] = {}
    # What is within another statement is walked later.
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and node.end_lineno is not None:
            lines |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.lineno)
    return lines


def choose(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """Choose so many faults by a seed: the rules take turns, and so do a rule's functions."""
    draw = random.Random(seed)
    by_rule: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_rule[fault.rule].append(fault)
    for of_rule in by_rule.values():
        draw.shuffle(of_rule)
        turns: dict[str, int] = defaultdict(int)
        places = {}
        for fault in of_rule:
            function = fault.name.split(":")[0]
            places[fault.name] = turns[function]
            turns[function] += 1
        of_rule.sort(key=lambda fault: places[fault.name])
    chosen: list[Fault] = []
    while len(chosen) < min(count, len(faults)):
        for of_rule in by_rule.values():
            if of_rule and len(chosen) < count:
                chosen.append(of_rule.pop(0))
    return chosen
