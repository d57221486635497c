"""Every launch configuration that is shipped, compiled for its GPU: nothing spills, all fits.

Without a GPU. What runs where no family has rows of its own is compiled for compute capability 8.6
and 8.9, and must fit the smallest shared memory.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pairwise import Case, pairwise, product

from rayserve_kernels.gpu.configs import Key, LaunchTable

PROGRAM = Path(__file__).parent / "compile_ahead.py"
# Bytes of shared memory that a program may have.
SHARED_LIMITS = {
    "sm80": 163 * 1024,
    "sm90": 227 * 1024,
    "sm100": 227 * 1024,
    "gfx942": 64 * 1024,
    "any": 64 * 1024,
}
# Dtypes of queries and slots, by width.
DTYPES = {
    "fp32": [("float32", "float32"), ("float32", "int8"), ("bfloat16", "float32")],
    "half": [("bfloat16", "bfloat16"), ("float16", "float16"), ("float16", "bfloat16")],
    "scaled": [("bfloat16", "int8"), ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")],
}
ODD_HEAD_DIMS = {64: 64, 128: 96, 256: 160}
TABLE = LaunchTable.read()


def axes(gpu: str) -> dict[str, list[Any]]:
    return {
        "key": [key for key in sorted(TABLE.rows) if key.gpu == gpu],
        "dtypes": [0, 1],
        "window": [False, True],
        "scores": [False, True],
        "is_odd": [False, True],
    }


def case_of(choice: Case) -> dict[str, Any]:
    key: Key = choice["key"]
    dtype, slots = DTYPES[key.width][choice["dtypes"]]
    if key.gpu == "sm80" and slots == "float8_e4m3fn":
        slots = "int8"
    # Two that have no rows of their own; only the later one takes fp8.
    without_rows = "sm89" if slots == "float8_e4m3fn" else "sm86"
    return {
        "family": key.gpu,
        "gpu": without_rows if key.gpu == "any" else key.gpu,
        "kind": key.kind,
        "dtype": dtype,
        "slots": slots,
        "head_dim": ODD_HEAD_DIMS[key.head_dim] if choice["is_odd"] else key.head_dim,
        "order": "vectorised" if choice["is_odd"] else "hnd",
        "block_size": 24 if choice["is_odd"] else 16,
        "window": choice["window"],
        "soft_cap": choice["scores"],
        "alibi": choice["scores"],
    }


def compile_all(cases: Sequence[dict[str, Any]], cache: Path) -> list[list[dict[str, Any]]]:
    """Kernels of each case and what they need; two processes, in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)

    def run(share: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        lines = "".join(json.dumps(case) + "\n" for case in share)
        command = [sys.executable, str(PROGRAM)]
        done = subprocess.run(
            command, input=lines, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(2) as pool:
        even, odd = pool.map(run, (cases[::2], cases[1::2]))
    results = [*even, *odd]
    results[::2], results[1::2] = even, odd
    return results


def faults(case: dict[str, Any], kernel: dict[str, Any]) -> list[str]:
    """What is wrong with a kernel."""
    found, gpu = kernel["found"], case["gpu"]
    wrong = []
    if kernel["spills"]:
        wrong.append("spills")
    if kernel["shared"] > SHARED_LIMITS[case["family"]]:
        wrong.append("shared memory")
    if kernel["kernel"] == "join_splits":
        return wrong
    if gpu == "gfx942":
        return wrong if found["MFMA"] else [*wrong, "no MFMA"]
    is_half = case["dtype"] != "float32"
    if gpu == "sm90" and is_half and case["kind"] != "decode":
        has_products = found["HGMMA"]
    elif is_half or case["head_dim"] <= 128:
        has_products = found["HMMA"] or found["HGMMA"] or found["UTCMMA"]
    else:
        # fp32 in large heads is multiplied without tensor cores.
        has_products = True
    if not has_products:
        wrong.append("no tensor cores")
    if is_half and not found["LDGSTS.128"]:
        wrong.append("no asynchronous copies of 128 bits")
    return wrong


def check(cases: Sequence[dict[str, Any]], cache: Path) -> None:
    wrong = []
    for case, kernels in zip(cases, compile_all(cases, cache), strict=True):
        assert len(kernels) == (2 if case["kind"].startswith("decode") else 1)
        wrong += [(case, kernel, faults(case, kernel)) for kernel in kernels]
    wrong = [entry for entry in wrong if entry[2]]
    assert not wrong, f"{len(wrong)}: {wrong[:5]}"


@pytest.mark.slow
@pytest.mark.parametrize("gpu", SHARED_LIMITS)
def test_shipped_configurations_compile_without_spills(gpu: str, tmp_path: Path) -> None:
    check([case_of(choice) for choice in pairwise(axes(gpu))], tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("gpu", SHARED_LIMITS)
def test_every_variant_of_shipped_configurations_compiles(gpu: str, tmp_path: Path) -> None:
    check([case_of(choice) for choice in product({**axes(gpu), "dtypes": [0, 1, 2]})], tmp_path)


def test_each_family_has_rows_of_every_kind() -> None:
    per_family = {gpu: {key[1:] for key in TABLE.rows if key.gpu == gpu} for gpu in SHARED_LIMITS}
    assert {key.gpu for key in TABLE.rows} == set(SHARED_LIMITS)
    assert len(per_family["any"]) == 36
    assert all(rows == per_family["any"] for rows in per_family.values())
