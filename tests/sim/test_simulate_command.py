"""`rayserve-paged simulate`: one JSON object or a table; one line for whatever cannot be had."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rayserve_paged import cli
from rayserve_paged.core.event_log import read_lines

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl"
AZURE = Path(__file__).parent / "data" / "azure_conv.csv"


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["rayserve-paged", "simulate", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def figures(out: str) -> dict[str, Any]:
    parsed = json.loads(out)
    assert isinstance(parsed, dict)
    return parsed


@pytest.mark.parametrize("trace", [TRACE, AZURE])
def test_a_trace_is_served_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    args = ("--trace", str(trace), "--replicas", "4", "--limit", "30", "--json")
    status, out, _err = run(monkeypatch, capsys, *args)
    assert status == 0
    got = figures(out)
    assert (got["num_requests"], got["num_finished"], got["num_failed"]) == (30, 30, 0)
    assert got["num_blocks"] == 41680
    assert 0 < got["ttft_s"]["p50"] <= got["ttft_s"]["p90"] <= got["ttft_s"]["p99"]
    assert got["events_per_s"] > 0
    again = figures(run(monkeypatch, capsys, *args)[1])
    assert got["peak_memory_mb"] > 10
    timings = ("wall_s", "cpu_s", "events_per_s", "us_per_output_token", "peak_memory_mb")
    assert {k: v for k, v in got.items() if k not in timings} == {
        k: v for k, v in again.items() if k not in timings
    }


def test_the_log_holds_every_event_and_the_table_the_same_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "events.jsonl"
    status, out, _err = run(
        monkeypatch, capsys, "--trace", str(TRACE), "--limit", "3", "--log", str(log)
    )
    assert status == 0
    assert "num_finished" in out
    with log.open() as file:
        machines = {entry.machine for entry in read_lines(file)}
    assert "controller" in machines
    assert "r0" in machines


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--gpu", "V100"), "gpu="),
        (("--model-shape", "gpt"), "model_shape="),
        (("--block-size", "48"), "block_size=48"),
        (("--block-size", "0"), "block_size=0"),
        (("--tp", "1"), "gpu="),
        (("--tp", "65"), "tensor_parallel_size=65"),
        (("--replicas", "0"), "num_replicas=0"),
        (("--max-num-seqs", "0"), "max_num_seqs=0"),
        (("--time-scale", "0"), "time_scale=0"),
        (("--limit", "0"), "limit=0"),
        (("--sample", "0"), "sample=0"),
        (("--repeat", "0"), "repeat=0"),
        (("--consumers", "0"), "num_consumers=0"),
        (("--profile", "none.json"), "profile="),
        (("--log", "/nowhere/log"), "--log="),
        (("--log", str(TRACE)), "--log="),
        (("--num-blocks", "0"), "num_blocks=0"),
        (("--num-blocks", "-1"), "num_blocks=-1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    field: str,
) -> None:
    status, out, err = run(monkeypatch, capsys, "--trace", str(TRACE), *args)
    assert (status, out) == (2, "")
    assert field in err
    assert err.count("\n") == 1
