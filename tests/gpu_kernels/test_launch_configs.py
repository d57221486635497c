"""The table of launch configurations: looked up, written, read, and what it refuses."""

import dataclasses
from pathlib import Path

import pytest
import torch

from rayserve_kernels.gpu.configs import (
    Key,
    LaunchConfig,
    LaunchTable,
    check_support,
    gpu_family,
    width_of,
)

SMALL, LARGE = LaunchConfig(16, 32, 64, 4, 2), LaunchConfig(64, 64, None, 8, 3)


def test_a_gpu_has_its_own_row_or_that_of_any() -> None:
    table = LaunchTable(
        {
            Key("any", 64, "half", "prefill"): SMALL,
            Key("any", 128, "half", "prefill"): SMALL,
            Key("sm90", 128, "half", "prefill"): LARGE,
        }
    )
    assert table.look_up("sm90", 128, "half", "prefill") == LARGE
    assert table.look_up("sm90", 80, "half", "prefill") == LARGE
    assert table.look_up("sm90", 64, "half", "prefill") == SMALL
    assert table.look_up("sm90", 16, "half", "prefill") == SMALL
    assert table.look_up("sm75", 96, "half", "prefill") == SMALL
    with pytest.raises(ValueError, match=r"head_dim=129: .* ends at 128"):
        table.look_up("sm90", 129, "half", "prefill")


def test_a_table_survives_its_file_and_names_what_it_holds(tmp_path: Path) -> None:
    shipped = LaunchTable.read()
    path = tmp_path / "table.json"
    shipped.write(path)
    again = LaunchTable.read(path)
    assert again.rows == shipped.rows
    assert again.digest == shipped.digest
    key = Key("sm90", 128, "half", "decode")
    other = {**shipped.rows, key: dataclasses.replace(shipped.rows[key], split_tokens=1024)}
    assert LaunchTable(other).digest != shipped.digest


def test_every_split_holds_whole_tiles_of_the_kernel_that_shares_it() -> None:
    rows = LaunchTable.read().rows
    for key, row in rows.items():
        assert (row.split_tokens is None) == (key.kind in ("prefill", "shared"))
        if row.split_tokens is not None:
            assert row.split_tokens % row.block_n == 0
            assert row.split_tokens % rows[key._replace(kind="shared")].block_n == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_m": 8}, "block_m=8: expected a power of two"),
        ({"block_n": 48}, "block_n=48: expected a power of two"),
        ({"split_tokens": 80}, "split_tokens=80: expected a multiple of block_n=32"),
        ({"split_tokens": 0}, "split_tokens=0: expected a multiple of block_n=32"),
    ],
)
def test_a_configuration_that_is_none_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **fields)


def test_dtypes_have_a_width_or_are_refused() -> None:
    assert width_of(torch.float32, torch.float32) == "fp32"
    assert width_of(torch.float32, torch.int8) == "fp32"
    assert width_of(torch.bfloat16, torch.bfloat16) == "half"
    assert width_of(torch.float16, torch.float8_e4m3fn) == "scaled"
    assert width_of(torch.float16, torch.bfloat16) == "half"
    assert width_of(torch.float16, torch.float32) == "fp32"
    for queries, slots in (
        (torch.float64, torch.float64),
        (torch.float16, torch.float8_e5m2),
        (torch.int8, torch.int8),
    ):
        with pytest.raises(ValueError, match=r"queries of torch\.\w+ over a pool of torch\.\w+"):
            width_of(queries, slots)


def test_fp8_needs_a_gpu_that_has_it() -> None:
    for gpu in ("sm80", "sm86"):
        with pytest.raises(ValueError, match=f"on {gpu}: expected compute capability 8.9"):
            check_support(gpu, torch.float8_e4m3fn)
        check_support(gpu, torch.int8)
    for gpu in ("sm89", "sm90", "sm100", "gfx942", "interpreter"):
        check_support(gpu, torch.float8_e4m3fn)
    assert gpu_family(torch.device("cpu")) == "interpreter"
