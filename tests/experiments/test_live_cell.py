"""The same YAML live: real requests on a real model, in the columns of a simulated run."""

from pathlib import Path

import polars as pl
import pytest
from small_experiment import SMALL, write

from rayserve_paged.experiments.cell_result import TABLES, CellResult
from rayserve_paged.experiments.config import SloConfig
from rayserve_paged.experiments.live_cell import run_live
from rayserve_paged.experiments.matrix import read_experiment
from rayserve_paged.experiments.simulated_cell import run_simulated
from rayserve_paged.experiments.summary import figures_of


def both(folder: Path, **changes: object) -> tuple[CellResult, CellResult]:
    """Run one cell live and in simulation."""
    changes = {"axes": None, "seeds": [0], "model": {"model": "fingerprint"}} | changes
    (cell,) = read_experiment(write(folder, **changes)).cells
    return run_live(cell.config, cell.seed), run_simulated(cell.config, cell.seed)


def test_a_live_run_serves_what_a_simulated_one_does_and_has_its_columns(tmp_path: Path) -> None:
    live, simulated = both(tmp_path)
    for table in TABLES:
        assert getattr(live, table).schema == getattr(simulated, table).schema
    told = ["request", "num_prompt_tokens", "num_output_tokens", "finish", "error"]
    assert live.requests.select(told).equals(simulated.requests.select(told))
    assert (live.requests["ttft_s"] > 0).all()
    assert live.gaps["count"].sum() <= 12 * 7
    assert live.facts["num_blocks"] == simulated.facts["num_blocks"] == 64
    loads = live.loads
    blocks = loads["num_free_blocks"] + loads["num_cached_blocks"] + loads["num_held_blocks"]
    assert set(blocks) == {64}
    last = loads.filter(pl.col("time_s") == loads["time_s"].max())
    assert last["num_held_blocks"].to_list() == last["num_running"].to_list() == [0, 0]
    figures = figures_of(live, SloConfig())
    assert figures["num_finished"] == 12
    assert figures["num_preemptions"] is None


def test_requests_come_live_when_the_workload_says(tmp_path: Path) -> None:
    live, simulated = both(tmp_path)
    late = live.requests["arrival_s"] - simulated.requests["arrival_s"]
    # The clock of an event loop may ring earlier by its resolution.
    assert (late > -1e-6).all()
    assert live.requests["arrival_s"].is_sorted()


def test_a_request_that_is_refused_is_an_error_in_both(tmp_path: Path) -> None:
    workload = {
        "synthetic": SMALL["workload"]["synthetic"]
        | {"num_requests": 3, "prompt_tokens": {"median": 5000}}
    }
    for result in both(tmp_path, workload=workload):
        assert set(result.requests["finish"]) == {"error"}
        assert result.requests["error"].str.contains("tokens").all()
        assert result.requests["replica"].null_count() == 3
        figures = figures_of(result, SloConfig())
        assert (figures["num_failed"], figures["slo_share"]) == (3, 0)
        assert figures["ttft_s_p50"] is None


@pytest.mark.slow
@pytest.mark.ray
def test_a_live_run_on_ray_serves_the_same(tmp_path: Path) -> None:
    live, simulated = both(tmp_path, live={"shell": "ray"})
    told = ["request", "num_prompt_tokens", "num_output_tokens", "finish", "error"]
    assert live.requests.select(told).equals(simulated.requests.select(told))


def test_the_logs_of_a_live_run_are_a_workload_of_both(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    recorded, _simulated = both(tmp_path, event_log_dir=str(logs))
    # Behind the one that warmed the deployment up.
    lengths = ["num_prompt_tokens", "num_output_tokens"]
    served = recorded.requests.select(lengths).rows()
    for result in both(tmp_path, workload={"trace": "logs"}):
        assert result.requests.select(lengths).rows()[1:] == served
        assert set(result.requests["finish"]) == {"length"}
    # The same logs are the same cell, and others are another.
    path = write(tmp_path, axes=None, seeds=[0], workload={"trace": "logs"})
    (cell,), (again,) = (read_experiment(path).cells for _ in range(2))
    assert cell.digest == again.digest
    (logs / "r1.0.jsonl").unlink()
    (changed,) = read_experiment(path).cells
    assert changed.digest != cell.digest
