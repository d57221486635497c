"""`rayserve-paged experiment`: what it leaves, again and again, and after it was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
from small_experiment import write

from rayserve_paged import cli
from rayserve_paged.experiments.matrix import COLUMNS


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["rayserve-paged", "experiment", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_tables_have_a_row_for_each_request_cell_replica_and_gap(out: Path) -> None:
    requests = pl.read_parquet(out / "results.parquet")
    assert len(requests) == 8 * 12
    assert requests.columns[:4] == ["cell", "placement", "workload.time_scale", "seed"]
    keys = requests.select("placement", "workload.time_scale", "seed").unique()
    assert len(keys) == 8
    assert set(requests["workload.time_scale"]) == {1, 0.25}
    assert (requests["ttft_s"] > 0).all()
    assert (requests["end_s"] >= requests["first_token_s"]).all()
    assert requests["num_output_tokens"].to_list() == [8] * len(requests)
    assert requests["error"].null_count() == len(requests)

    cells = pl.read_parquet(out / "cells.parquet")
    assert len(cells) == 8
    assert cells["num_requests"].to_list() == [12] * 8
    assert cells["num_blocks"].to_list() == [64] * 8
    by_cell = requests.group_by("cell").agg(pl.col("meets_slo").mean().alias("share"))
    joined = cells.join(by_cell, on="cell")
    assert joined["slo_share"].to_list() == pytest.approx(joined["share"].to_list())
    assert 0 < joined["share"].mean() < 1  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]

    loads = pl.read_parquet(out / "timeseries.parquet")
    blocks = loads["num_free_blocks"] + loads["num_cached_blocks"] + loads["num_held_blocks"]
    assert set(blocks) == {64}
    gaps = pl.read_parquet(out / "token_gaps.parquet")
    assert gaps["count"].sum() == len(requests) * 7
    assert len(pl.read_parquet(out / "replicas.parquet")) == 8 * 2
    for file in out.glob("*.parquet"):
        if file.name != "cells.parquet":
            own = set(pl.read_parquet(file).columns) - {"placement", "workload.time_scale"}
            assert own <= COLUMNS


def test_the_summary_has_every_cell_and_its_points_span_the_seeds(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    assert [len(summary[part]) for part in ("cells", "points", "seeds")] == [8, 4, 2]
    for index, point in enumerate(summary["points"]):
        cells = summary["cells"][2 * index : 2 * index + 2]
        assert [cell["labels"] for cell in cells] == [point["labels"]] * 2
        values = [cell["figures"]["ttft_s_p50"] for cell in cells]
        spread = point["figures"]["ttft_s_p50"]
        assert spread == {"mean": sum(values) / 2, "min": min(values), "max": max(values)}


def test_the_same_file_gives_the_same_bytes_and_other_figures_need_no_other_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path, tmp_path: Path
) -> None:
    before = {name: (out / name).read_bytes() for name in ("summary.json", "report.html")}
    status, printed, _err = run(
        monkeypatch, capsys, str(write(tmp_path)), "--out", str(tmp_path / "again"), "--jobs", "2"
    )
    assert status == 0
    for name, content in before.items():
        assert (tmp_path / "again" / name).read_bytes() == content
        assert str(tmp_path / "again" / name) in printed

    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").glob("cells/*")}
    other = write(tmp_path, slo={"ttft_s": 1e-9})
    status, _out, err = run(monkeypatch, capsys, str(other), "--out", str(tmp_path / "again"))
    assert "8 runs have results" in err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "again").glob("cells/*")} == written
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert {cell["figures"]["slo_share"] for cell in summary["cells"]} == {0}


def test_an_unreadable_result_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = str(write(tmp_path, axes=None, seeds=[0]))
    assert run(monkeypatch, capsys, config, "--out", str(tmp_path / "out"))[0] == 0
    (cell,) = (tmp_path / "out" / "cells").iterdir()
    (cell / "gaps.parquet").write_bytes(b"nothing")
    status, _out, err = run(monkeypatch, capsys, config, "--out", str(tmp_path / "out"))
    assert status == 2
    assert "remove the folder to run it again" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "--out=None"),
        (("--out", "/dev/null/x"), "--out='/dev/null/x'"),
        (("--check", "--jobs", "0"), "--jobs=0"),
        (("--check", "--set", "placement"), "--set='placement'"),
        (("--check", "--set", "cache.block_size=["), "--set cache.block_size='['"),
        (("--check", "--set", "cache.block_size=0"), "cache.block_size=0"),
        (("--check", "--mode", "dream"), "mode='dream'"),
        (("--check", "--trace", "none.csv"), "workload.trace="),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    args: tuple[str, ...],
    words: str,
) -> None:
    status, out, err = run(monkeypatch, capsys, str(write(tmp_path)), *args)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_check_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, _err = run(monkeypatch, capsys, str(write(tmp_path)), "--check")
    assert (status, "8 runs" in out) == (0, True)
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was_and_leaves_no_process(
    out: Path, tmp_path: Path
) -> None:
    config = str(write(tmp_path))
    command = [sys.executable, "-m", "rayserve_paged.cli", "experiment", config]
    command += ["--out", str(tmp_path / "out"), "--jobs", "1"]
    killed = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    finished = finished_cells(tmp_path / "out", at_least=2)
    children = psutil.Process(killed.pid).children(recursive=True)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert children
    assert not psutil.wait_procs(children, timeout=60)[1]
    finished = finished_cells(tmp_path / "out", at_least=2)
    assert len(finished) < 8

    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"{len(finished)} runs have results" in again.stderr
    assert finished.items() <= finished_cells(tmp_path / "out", at_least=8).items()
    assert (tmp_path / "out" / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
    assert not list((tmp_path / "out" / "cells").glob(".draft-*"))


def finished_cells(out: Path, at_least: int) -> dict[str, Any]:
    """Wait for so many cells; return when each was written."""
    for _ in range(3000):
        cells = [path for path in out.glob("cells/*") if not path.name.startswith(".")]
        if len(cells) >= at_least:
            return {path.name: path.stat().st_mtime_ns for path in cells}
        time.sleep(0.02)
    raise AssertionError(f"fewer than {at_least} cells")
