"""What the tuner tries, what it keeps, and how it writes that down."""

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

from rayserve_kernels import tune
from rayserve_kernels.gpu import tuning
from rayserve_kernels.gpu.configs import Key, Kind, LaunchConfig, LaunchTable, Width
from rayserve_kernels.gpu.tuning import Trial, candidates, choose, present

TABLE = LaunchTable.read()
DECODE = Key("sm90", 128, "half", "decode")
PREFILL = Key("sm90", 128, "half", "prefill")
ROW = LaunchConfig(16, 64, 512, 4, 3)
OTHER = LaunchConfig(16, 64, 512, 8, 2)
THIRD = LaunchConfig(16, 64, 512, 8, 3)


@pytest.mark.parametrize("kind", typing.get_args(Kind))
@pytest.mark.parametrize("width", typing.get_args(Width))
def test_tiles_and_splits_stay_unless_bits_may_change(width: Width, kind: Kind) -> None:
    key = Key("sm90", 128, width, kind)
    row, *others = candidates(TABLE, key)
    assert row == present(TABLE, key)
    assert others
    assert row not in others
    assert len(set(others)) == len(others)
    for config in others:
        assert (config.block_n, config.split_tokens) == (row.block_n, row.split_tokens)


def test_rows_of_a_decode_stay_since_they_decide_what_is_wide() -> None:
    row = present(TABLE, DECODE)
    for may_change_bits in (False, True):
        tried = candidates(TABLE, DECODE, may_change_bits)
        assert {config.block_m for config in tried} == {row.block_m}
        assert {config.num_warps for config in tried} == {4, 8}
        assert {config.num_stages for config in tried} == {1, 2, 3, 4}
    assert {config.block_m for config in candidates(TABLE, PREFILL)} == {16, 32, 64, 128}


@pytest.mark.parametrize("key", [DECODE, PREFILL])
def test_where_bits_may_change_splits_hold_whole_tiles_of_all_that_share_them(key: Key) -> None:
    tried = candidates(TABLE, key, may_change_bits=True)
    assert len({config.block_n for config in tried}) > 1
    assert len({config.split_tokens for config in tried}) == (4 if key == DECODE else 1)
    rows = [present(TABLE, key._replace(kind=kind)) for kind in typing.get_args(Kind)]
    for config in tried:
        for row in rows:
            if config.split_tokens is not None:
                assert config.split_tokens % row.block_n == 0
            elif row.split_tokens is not None:
                assert row.split_tokens % config.block_n == 0
    # A table in which that leaves something out.
    wide = {key: dataclasses.replace(row, block_n=512) for key, row in TABLE.rows.items()}
    wide[DECODE] = ROW
    tried = candidates(LaunchTable(wide), DECODE, may_change_bits=True)
    assert {config.split_tokens for config in tried} == {512, 1024, 2048}


def test_a_gpu_without_rows_has_the_keys_of_all_and_starts_from_what_it_runs_now() -> None:
    keys = tuning.keys_of(TABLE, "sm89")
    assert {key.gpu for key in keys} == {"sm89"}
    assert {key[1:] for key in keys} == {key[1:] for key in TABLE.rows}
    key = Key("sm89", 64, "fp32", "prefill")
    assert candidates(TABLE, key)[0] == TABLE.rows[key._replace(gpu="any")]


def test_the_fastest_that_is_sound_is_kept() -> None:
    trials = [
        Trial(ROW, None, (100.0, 10.0)),
        Trial(OTHER, None, (95.0, 9.0)),
        Trial(THIRD, "spills in decode"),
    ]
    assert choose(ROW, trials) == trials[1]
    assert choose(ROW, trials[:1]) == trials[0]
    assert choose(ROW, trials[2:]) is None


def test_a_short_case_counts_as_much_as_a_long_one() -> None:
    # 9% less of the long one do not make up for 25% more of the short one.
    trials = [Trial(ROW, None, (1000.0, 8.0)), Trial(OTHER, None, (910.0, 10.0))]
    assert choose(ROW, trials) == trials[0]


def test_the_present_row_stays_unless_another_is_clearly_faster_or_it_is_refused() -> None:
    close = [Trial(ROW, None, (100.0,)), Trial(OTHER, None, (98.0,))]
    assert choose(ROW, close) == close[0]
    clear = [Trial(ROW, None, (100.0,)), Trial(OTHER, None, (96.0,))]
    assert choose(ROW, clear) == clear[1]
    broken = [Trial(ROW, "differs from float64 by 0.5"), Trial(OTHER, None, (200.0,))]
    assert choose(ROW, broken) == broken[1]


def test_of_equals_the_smaller_is_kept_whatever_their_order() -> None:
    trials = [Trial(OTHER, None, (50.0,)), Trial(THIRD, None, (50.0,))]
    assert choose(ROW, trials) == choose(ROW, trials[::-1]) == trials[0]


def test_provenance_survives_its_file_and_its_bytes_follow_from_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "provenance.json"
    entry = {"torch": "2.11.0", "card": "NVIDIA H200", "driver": None}
    entries = {PREFILL: entry, DECODE: dict(reversed(entry.items()))}
    tuning.write_provenance(entries, path)
    first = path.read_bytes()
    assert tuning.read_provenance(path) == entries
    tuning.write_provenance(dict(reversed(entries.items())), path)
    assert path.read_bytes() == first
    tuning.write_provenance({}, path)
    assert path.read_text() == "[]\n"


def test_only_rows_of_the_table_are_said_to_be_measured() -> None:
    assert tuning.read_provenance().keys() <= TABLE.rows.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run"], "expected --gpu, such as --gpu sm90"),
        (["--gpu", "sm90"], "only with --dry-run"),
    ],
)
def test_what_the_tuner_cannot_do_is_refused(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments == ["--dry-run"] and torch.cuda.is_available():
        pytest.skip("here --dry-run lists the GPU's own keys")
    monkeypatch.setattr(sys, "argv", ["tune", *arguments])
    with pytest.raises(SystemExit) as caught:
        tune.main()
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_lists_candidates_without_a_gpu() -> None:
    command = [sys.executable, "-m", "rayserve_kernels.tune", "--dry-run", "--gpu", "sm90"]
    done = subprocess.run(
        [*command, "--head-dim", "128", "--width", "half"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    keys = [Key("sm90", 128, "half", kind) for kind in typing.get_args(Kind)]
    assert len(lines) == sum(len(candidates(TABLE, key)) for key in keys)
    assert sum(line.endswith("present") for line in lines) == len(keys)
    row = present(TABLE, DECODE)
    expected = f"sm90 128 half decode block_m={row.block_m} block_n={row.block_n} "
    assert any(line.startswith(expected) for line in lines)
