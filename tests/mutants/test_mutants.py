"""The mutator itself: what its rules write, what they find, and how it judges."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from equivalents import EQUIVALENTS
from fault_rules import RULES
from faults import Fault, choose, faults_of
from mutation_choice import MODULES, every_place, without_equivalents
from recovery_faults import RECOVERY_FAULTS
from trials import ROOT

SAMPLE = '''
class Pool:
    """A pool."""

    def give(self, blocks: list[int], num_tokens: int) -> tuple[int, int]:
        """Give."""
        assert self.count >= 0
        if num_tokens < self.limit:
            self.count -= 1
        self.index.remove(blocks)
        self.pool.release(reversed(blocks))
        first, last = blocks[0], -(-num_tokens // self.size)
        return first, last
'''

# (rule, what stands there, what is written)
EXPECTED = {
    ("ignored-case", "num_tokens < self.limit", "False"),
    ("always", "num_tokens < self.limit", "True"),
    ("edge", "num_tokens < self.limit", "(num_tokens <= self.limit)"),
    ("no-decrement", "self.count -= 1", "pass"),
    ("wrong-sign", "self.count -= 1", "self.count += 1"),
    ("keep-key", "self.index.remove(blocks)", "pass"),
    ("forget-to-free", "self.pool.release(reversed(blocks))", "pass"),
    (
        "twice",
        "self.pool.release(reversed(blocks))",
        "self.pool.release(reversed(blocks)) self.pool.release(reversed(blocks))",
    ),
    ("other-order", "reversed(blocks)", "list(blocks)"),
    ("other-end", "0", "-1"),
    ("floor-for-ceil", "-(-num_tokens // self.size)", "(num_tokens // self.size)"),
    ("half", "-num_tokens // self.size", "(-num_tokens)"),
    ("swapped", "first, last", "(last, first)"),
}


def test_the_rules_find_every_place_of_a_sample(tmp_path: Path) -> None:
    (tmp_path / "block_pool.py").write_text(SAMPLE)
    faults = faults_of(Path("block_pool.py"), tmp_path, RULES)
    assert {(fault.rule, fault.before, fault.after) for fault in faults} == EXPECTED
    assert {fault.name.split(":")[0] for fault in faults} == {"block_pool.Pool.give"}


CLUSTER_SAMPLE = """
class Controller:
    def lose(self, incarnation: int) -> list[Command]:
        if self.incarnation != incarnation:
            return []
        return [Fence(incarnation), Stop(incarnation)]
"""


def test_the_rules_find_messages_and_lives_in_what_serves_requests(tmp_path: Path) -> None:
    (tmp_path / "controller.py").write_text(CLUSTER_SAMPLE)
    faults = faults_of(Path("controller.py"), tmp_path, RULES)
    assert {(fault.rule, fault.after) for fault in faults} == {
        ("any-life", "False"),
        ("ignored-case", "False"),
        ("always", "True"),
        ("lost-command", "[Stop(incarnation)]"),
        ("lost-command", "[Fence(incarnation)]"),
    }


def test_a_fault_changes_its_own_place_alone(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(SAMPLE)
    (fault,) = [
        fault
        for fault in faults_of(Path("sample.py"), tmp_path, RULES)
        if fault.rule == "no-decrement"
    ]
    assert fault.text == SAMPLE.replace("self.count -= 1", "pass")
    assert fault.line == SAMPLE[: SAMPLE.index("self.count -=")].count("\n") + 1


@pytest.fixture(scope="module")
def places() -> list[Fault]:
    return every_place()


def test_every_fault_of_the_core_is_another_program(places: list[Fault]) -> None:
    faults = places
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in choose(faults, 90, seed=0):
        right = ast.dump(ast.parse((ROOT / fault.path).read_text()))
        assert ast.dump(ast.parse(fault.text)) != right, fault.name


def test_every_rule_has_places_and_every_module_has_faults(places: list[Fault]) -> None:
    faults = without_equivalents(places)
    assert {fault.rule for fault in faults} == {rule.name for rule in RULES}
    assert {fault.path.stem for fault in faults} == set(MODULES)


def test_a_choice_is_repeatable_and_takes_from_every_rule(places: list[Fault]) -> None:
    faults = without_equivalents(places)
    chosen = choose(faults, 90, seed=3)
    assert chosen == choose(faults, 90, seed=3)
    assert chosen != choose(faults, 90, seed=4)
    assert len({fault.name for fault in chosen}) == 90
    assert {fault.rule for fault in chosen} == {rule.name for rule in RULES}
    assert len(choose(faults, 10**6, seed=3)) == len(faults)


def test_each_equivalent_names_a_place_that_is_still_there(places: list[Fault]) -> None:
    stale = [each for each in EQUIVALENTS if not any(each.covers(fault) for fault in places)]
    assert stale == []


def test_each_fault_of_the_recovery_names_one_place(places: list[Fault]) -> None:
    faults = without_equivalents(places)
    found = [[one.is_it(fault) for fault in faults].count(True) for one in RECOVERY_FAULTS]
    assert found == [1] * len(RECOVERY_FAULTS)
    assert len(found) >= 12


@pytest.mark.parametrize(
    ("name", "seeds", "status", "verdict"),
    [
        ("restarts.Restarts.take_due:off-by-one:0", 20, 0, "found within 2 seeds: ChaosError: li"),
        ("fleet.Fleet.why_none:always:1", 2, 1, "SURVIVED 2 seeds"),
    ],
)
def test_a_fault_is_found_by_a_seed_that_it_breaks_and_else_survives(
    name: str, seeds: int, status: int, verdict: str
) -> None:
    command = [sys.executable, str(ROOT / "tests/mutants"), "--by", "chaos", "--only", name]
    done = subprocess.run(
        [*command, "--seeds", str(seeds)], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert verdict in done.stdout


@pytest.mark.parametrize(
    ("tests", "status", "verdict"),
    [
        ("test_kv_manager", 0, "caught by test_kv_manager.py::test_"),
        ("test_block_table", 1, "SURVIVED kv_manager.KVManager._release:forget-to-free:0"),
    ],
)
def test_a_fault_is_caught_by_a_test_that_fails_and_else_survives(
    tests: str, status: int, verdict: str
) -> None:
    command = [sys.executable, str(ROOT / "tests/mutants"), "--by", "tests", "--tests", tests]
    done = subprocess.run(
        [*command, "--only", "kv_manager.KVManager._release:forget-to-free:0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert verdict in done.stdout
