"""Experiments in which replicas and the controller die."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from small_experiment import SMALL, write

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.experiments.cell_result import CellResult
from rayserve_paged.experiments.check import check_cells
from rayserve_paged.experiments.config import FailuresConfig, SloConfig
from rayserve_paged.experiments.failures import fault_plan
from rayserve_paged.experiments.matrix import read_experiment
from rayserve_paged.experiments.outcome import Outcome
from rayserve_paged.experiments.report.death_figures import death_answers, death_figures
from rayserve_paged.experiments.report.figures import FigureBuilder
from rayserve_paged.experiments.report.page import report_page
from rayserve_paged.experiments.simulated_cell import run_simulated
from rayserve_paged.experiments.summary import figures_of
from rayserve_paged.sim.faults import KillController, KillReplica

KILL = {"kind": "kill-replica", "at_s": 1.0, "replica": "r0"}
# Longer answers than those of the small experiment, so that some run when a replica dies.
WORKLOAD = {
    "synthetic": SMALL["workload"]["synthetic"]
    | {"num_requests": 24, "output_tokens": {"median": 96}}
}
AXES: dict[str, Any] = {
    "deaths": {
        "none": {"failures.plan": []},
        "one": {"failures.plan": [KILL]},
        "two": {"failures.plan": [KILL, KILL | {"at_s": 1.5, "replica": "r1"}]},
    }
}


def run(folder: Path, failures: Mapping[str, object], seed: int = 0) -> CellResult:
    path = write(folder, axes=None, seeds=[seed], workload=WORKLOAD, failures=failures)
    (cell,) = read_experiment(path).cells
    return run_simulated(cell.config, cell.seed)


# --- plans ----------------------------------------------------------------------------------


def test_deaths_at_random_come_from_the_seed_and_at_the_rate_that_was_asked_for() -> None:
    failures = FailuresConfig(replica_life_s=50.0, controller_life_s=200.0, controller_down_s=3.0)
    plan = fault_plan(failures, 8, seed=1, until_s=10_000.0)
    assert plan == fault_plan(failures, 8, seed=1, until_s=10_000.0)
    assert plan != fault_plan(failures, 8, seed=2, until_s=10_000.0)
    replicas = [fault for fault in plan.faults if isinstance(fault, KillReplica)]
    controllers = [fault for fault in plan.faults if isinstance(fault, KillController)]
    # 1,600 and 50 on average: five standard deviations.
    assert 1400 < len(replicas) < 1800
    assert 15 < len(controllers) < 85
    assert {fault.replica for fault in replicas} == {f"r{index}" for index in range(8)}
    assert {fault.down_s for fault in controllers} == {3.0}
    assert plan.end_s < 10_003.0


def test_what_dies_at_one_place_does_not_depend_on_how_many_there_are() -> None:
    failures = FailuresConfig(replica_life_s=50.0, plan=(KillController(at_s=1.0, down_s=1.0),))
    few, many = (fault_plan(failures, count, seed=1, until_s=500.0) for count in (2, 4))
    names = ("r0", "r1")
    kept = [fault for fault in many.faults if getattr(fault, "replica", "r0") in names]
    assert list(few.faults) == kept
    assert few.faults[0] == KillController(at_s=1.0, down_s=1.0)


# --- runs -----------------------------------------------------------------------------------


def test_a_death_costs_time_and_tokens_and_no_request(tmp_path: Path) -> None:
    quiet, one = run(tmp_path, {}), run(tmp_path, {"plan": [KILL], "start_s": 2.0})
    assert quiet.deaths.is_empty()
    assert one.deaths.to_dicts() == [
        {"time_s": 1.0, "died": "r0", "hangs": False, "back_s": pytest.approx(3.5)}
    ]
    for result in (quiet, one):
        assert set(result.requests["finish"]) == {"length"}
        assert result.gaps["count"].sum() == 24 * 95
    before, after = (figures_of(result, SloConfig()) for result in (quiet, one))
    assert [before[name] for name in ("num_deaths", "num_resumed", "num_recomputed_tokens")] == [
        0
    ] * 3
    assert after["num_deaths"] == 1
    moved = one.requests.filter(pl.col("num_attempts") > 1)
    assert after["num_resumed"] == len(moved) > 0
    lengths = int((moved["num_prompt_tokens"] + moved["num_output_tokens"]).sum())
    assert 0 < _number(after["num_recomputed_tokens"]) <= lengths
    assert _number(after["itl_s_max"]) > _number(before["itl_s_max"])
    # The longest mean time between tokens is that of one that paused.
    slowest = one.requests.sort("itl_s")["num_attempts"].to_list()[-1]
    assert slowest == 2


def _number(value: float | None) -> float:
    assert value is not None
    return value


def test_deaths_at_random_end_with_the_requests(tmp_path: Path) -> None:
    failures = {"replica_life_s": 0.5, "start_s": 0.2, "controller_life_s": 2.0}
    result = run(tmp_path, failures, seed=3)
    assert set(result.deaths["died"]) == {"r0", "r1", "controller"}
    last = result.requests["arrival_s"].to_numpy().max()
    assert result.deaths["time_s"].to_numpy().max() < last
    assert set(result.requests["finish"]) == {"length"}


def test_a_replica_that_hangs_is_noticed_by_its_silence(tmp_path: Path) -> None:
    timeouts = {"rank_liveness_s": 0.75}
    path = write(
        tmp_path,
        axes=None,
        seeds=[0],
        workload=WORKLOAD,
        timeouts=timeouts,
        recovery={"restart": False},
        failures={"plan": [KILL | {"hangs": True}]},
    )
    (cell,) = read_experiment(path).cells
    result = run_simulated(cell.config, cell.seed)
    moved = result.requests.filter(pl.col("num_attempts") > 1)
    assert len(moved)
    assert (moved["end_s"] > 1.75).all()
    # It is not started again, as the settings say.
    assert result.deaths["back_s"].to_list() == [None]


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failures": {"plan": [KILL]}, "mode": "live"}, ["failures", "mode=simulate"]),
        (
            {"failures": {"replica_life_s": 9}, "axes": {"mode": ["live", "simulate"]}},
            ["failures", "mode=simulate"],
        ),
        ({"failures": {"plan": [KILL | {"at_s": -1}]}}, ["failures.plan.0.at_s=-1"]),
        (
            {"failures": {"plan": [{"kind": "pin-blocks", "replica": "r0"}]}},
            ["failures.plan.0", "kill-replica"],
        ),
        ({"failures": {"replica_life_s": 0}}, ["failures.replica_life_s=0"]),
        ({"failures": {"life_s": 9}}, ["failures.life_s", "did you mean"]),
    ],
)
def test_failures_that_cannot_be_are_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read_experiment(write(tmp_path, **changes))
    for word in words:
        assert word in str(refused.value)


def test_a_replica_that_is_not_there_cannot_die(tmp_path: Path) -> None:
    failures = {"plan": [KILL, KILL | {"replica": "r2"}]}
    experiment = read_experiment(write(tmp_path, failures=failures))
    with pytest.raises(InvalidInputError, match=r"failures\.plan\.1\.replica='r2'.*one of r0, r1"):
        check_cells(experiment.cells)


def test_live_runs_have_failures_that_are_none(tmp_path: Path) -> None:
    failures = {"start_s": 5.0, "plan": []}
    cells = read_experiment(write(tmp_path, failures=failures, axes={"mode": ["live", "simulate"]}))
    assert {cell.config.mode for cell in cells.cells} == {"live", "simulate"}


# --- the report -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    path = write(tmp_path_factory.mktemp("deaths"), axes=AXES, seeds=[0], workload=WORKLOAD)
    experiment = read_experiment(path)
    results = [run_simulated(cell.config, cell.seed) for cell in experiment.cells]
    figures = [figures_of(result, experiment.slo) for result in results]
    return Outcome(experiment, results, figures)


def test_the_report_shows_what_deaths_cost_and_marks_them(outcome: Outcome) -> None:
    page = report_page(outcome)
    assert list(re.findall(r'<figure id="(\w+)">', page))[:3] == ["deaths", "slowest", "latency"]
    slowest = page.partition('<figure id="slowest">')[2].partition("</figure>")[0]
    assert re.findall(r">([^<]* dies?)<", slowest) == ["r0, r1 die"]
    builder = FigureBuilder(outcome)
    costs, over_time = death_figures(builder)
    assert [caption for caption, _svg in costs.panels] == [
        "Requests that went on elsewhere",
        "Tokens computed again",
        "Longest time between tokens",
    ]
    resumed = [row[1] for row in costs.table.rows]
    assert resumed[0] == "0"
    assert [row[1] for row in over_time.table.rows] == ["0", "1", "2"]
    assert any(
        answer.startswith("Tokens computed again: 0 with deaths none")
        for answer in death_answers(builder)
    )


def test_a_report_without_deaths_does_not_speak_of_them(outcome: Outcome) -> None:
    quiet = Outcome(outcome.experiment, [outcome.results[0]] * 3, [outcome.figures[0]] * 3)
    builder = FigureBuilder(quiet)
    assert death_figures(builder) == []
    assert death_answers(builder) == []
    assert '<figure id="deaths">' not in report_page(quiet)
