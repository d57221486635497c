"""`rayserve-paged chaos`, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = """\
faults:
- kind: kill-replica
  at_s: 2.5
  replica: r0
- kind: disturb-messages
  from_s: 1.0
  until_s: 6.0
  lost: 0.2
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rayserve_paged.cli", "chaos", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_seeds_are_run_in_parallel_and_counted() -> None:
    done = run("--simulate", "--seeds", "0..5", "--jobs", "2", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["num_seeds"] == 6
    assert figures["violations"] == []
    assert figures["num_checks"] > 100
    assert figures["seeds_per_minute"] > 0


def test_a_plan_of_ones_own_and_some_of_the_requests(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    done = run("--simulate", "--seeds", "3", "--plan", str(path), "--requests", "0,1,2")
    assert done.returncode == 0, done.stderr
    assert "1 seeds, 0 with a violation" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seeds", "0..3"], "--simulate"),
        (["--simulate", "--seeds", "5..3"], "--seeds='5..3'"),
        (["--simulate", "--seeds", "x"], "--seeds='x'"),
        (["--simulate", "--seeds", "-1"], "--seeds='-1'"),
        (["--simulate", "--seeds", "1", "--jobs", "0"], "--jobs=0"),
        (["--simulate", "--seeds", "1", "--requests", "a"], "--requests='a'"),
        (["--simulate", "--seeds", "1", "--requests", "0,99"], "--requests=99"),
        (["--simulate", "--seeds", "1", "--plan", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: list[str], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_plan_that_names_nobody_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("r0", "r7"))
    done = run("--simulate", "--seeds", "3", "--plan", str(path))
    assert done.returncode == 2
    assert "faults.0.replica='r7'" in done.stderr
