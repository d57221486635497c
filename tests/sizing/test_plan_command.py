"""`rayserve-paged plan`: a table or one JSON object; one line for whatever cannot be had."""

import json
import sys
from pathlib import Path

import pytest

from rayserve_paged import cli

DATA = Path(__file__).parent.parent / "sim" / "data"
SMALL = ("--model", "smollm2-135m", "--gpu", "L40S", "--prompt-tokens", "64")
FEW = ("--output-tokens", "8", "--requests", "40", "--slo", "ttft=0.5,itl=0.05")


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["rayserve-paged", "plan", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_memory_alone_needs_no_simulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", "llama-70b", "--gpu", "H200", "--tp", "8", "--json")
    status, out, err = run(monkeypatch, capsys, *args)
    assert (status, err) == (0, "")
    got = json.loads(out)
    assert got["weight_bytes"] == 141_104_775_168
    assert got["kv_bytes_per_token"] == 320 * 2**10
    assert got["num_blocks"] == 150_588
    assert got["num_gpus"] == 8
    assert got["dtype"] == got["kv_dtype"] == "bf16"
    assert got["serve_command"] == (
        "rayserve-paged serve --model MODEL --dtype bf16 --tp 8 --replicas 1"
    )
    assert "runs" not in got


def test_the_table_says_what_the_json_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", "llama-70b", "--tp", "8", "--kv-dtype", "fp8", "--max-num-seqs", "256")
    status, out, _err = run(monkeypatch, capsys, *args)
    assert status == 0
    for text in ("141.1 GB", "165 KiB per replica", "131,072 tokens", "256 run at once"):
        assert text in out
    assert "RAYSERVE_BATCH__MAX_NUM_SEQS=256 rayserve-paged serve" in out
    assert "--kv-dtype fp8" in out


def test_replicas_for_a_rate_are_found_and_each_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (*SMALL, *FEW, "--replicas", "2", "--rate", "700", "--json")
    status, out, err = run(monkeypatch, capsys, *args)
    assert status == 0
    got = json.loads(out)
    assert len(got["runs"]) == err.count("\n") == err.count("simulated ")
    assert got["best"]["is_met"]
    assert got["of_all"]["num_replicas"] == 2
    assert got["of_all"]["num_requests"] == 80
    assert got["for_rate"]["is_met"]
    assert got["for_rate"]["rate_per_s"] == 700
    assert got["num_replicas"] == got["num_gpus"] == got["for_rate"]["num_replicas"]
    assert f"--replicas {got['num_replicas']}" in got["serve_command"]


@pytest.mark.parametrize("trace", ["mooncake_conversation.jsonl", "azure_conv.csv"])
def test_requests_may_come_from_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    args = ("--model", "llama-8b", "--trace", str(DATA / trace), "--requests", "20")
    status, out, _err = run(monkeypatch, capsys, *args, "--slo", "ttft=20", "--json")
    assert status == 0
    got = json.loads(out)
    assert got["mean_prompt_tokens"] != 1000
    assert got["best"]["num_requests"] == 20


def test_a_file_configures_what_is_planned_and_flags_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "endpoint.yaml"
    path.write_text(
        "model: {model: llama-8b, dtype: fp16}\n"
        "cache: {block_size: 64}\n"
        "parallel: {tensor_parallel_size: 2, num_replicas: 4}\n"
        "serve: {num_ingress_replicas: 2}\n"
    )
    status, out, _err = run(monkeypatch, capsys, "--config", str(path), "--tp", "4", "--json")
    assert status == 0
    got = json.loads(out)
    assert (got["tensor_parallel_size"], got["num_replicas"], got["block_size"]) == (4, 4, 64)
    assert got["dtype"] == "fp16"


def test_an_objective_that_cannot_be_met_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (*SMALL, *FEW[:-1], "itl=0.00001")
    status, out, err = run(monkeypatch, capsys, *args)
    assert (status, out) == (2, "")
    assert "--slo='itl=1e-05' is not accepted: expected ttft of " in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--model", "llama-70b"), "parallel.tensor_parallel_size=1"),
        (("--model", "llama-70b", "--tp", "0"), "parallel.tensor_parallel_size=0"),
        (("--model", "gpt"), "model.model='gpt'"),
        ((), "model.model=None"),
        ((*SMALL, "--gpu", "V100"), "--gpu='V100'"),
        ((*SMALL, "--dtype", "fp32"), "model.dtype='fp32'"),
        ((*SMALL, "--kv-dtype", "int4"), "model.kv_dtype='int4'"),
        ((*SMALL, "--block-size", "0"), "cache.block_size=0"),
        ((*SMALL, "--cache-memory", "much"), "cache.memory='much'"),
        ((*SMALL, "--slo", "tpot=1"), "--slo='tpot=1'"),
        ((*SMALL, "--rate", "3"), "--rate=3.0"),
        ((*SMALL, *FEW, "--rate", "0"), "--rate=0.0"),
        ((*SMALL, "--requests", "1"), "--requests=1"),
        ((*SMALL, "--output-tokens", "0"), "--output-tokens=0"),
        ((*SMALL, "--output-tokens", "8192"), "longest request=8256"),
        ((*SMALL, "--trace", "none.csv"), "trace='none.csv'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    field: str,
) -> None:
    status, out, err = run(monkeypatch, capsys, *args)
    assert (status, out) == (2, "")
    assert field in err
    assert err.count("\n") == 1
