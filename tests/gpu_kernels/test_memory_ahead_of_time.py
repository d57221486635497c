"""The kernels that write and copy the cache, compiled for GPUs: wide accesses, no spills."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "compile_memory.py"
GPUS = ("sm80", "sm90", "sm100", "gfx942")
ORDERS = ("block_major", "nhd", "hnd", "vectorised")
# Of vectors and pool, with the bytes of an element of the pool.
DTYPES = {
    ("bfloat16", "bfloat16"): 2,
    ("float32", "float32"): 4,
    ("float32", "float16"): 2,
    ("bfloat16", "int8"): 1,
    ("float16", "float8_e4m3fn"): 1,
}


def compile_all(cases: list[dict[str, Any]], cache: Path) -> list[list[dict[str, Any]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(
        command, input=lines, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_writes_store_as_wide_as_a_thread_can(gpu: str, tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"gpu": gpu, "kernel": "write", "dtype": dtype, "stored": stored, "order": order}
        | {"block_size": block_size, "head_dim": head_dim}
        for dtype, stored in DTYPES
        for order, block_size, head_dim in zip(
            ORDERS, (16, 8, 24, 16), (128, 64, 96, 80), strict=True
        )
        # No fp8 before compute capability 8.9.
        if (gpu, stored) != ("sm80", "float8_e4m3fn")
    ]
    for case, kernels in zip(cases, compile_all(cases, tmp_path), strict=True):
        (kernel,) = kernels
        num_bytes = DTYPES[case["dtype"], case["stored"]]
        # A thread has 16 adjacent elements, or 8 where there are twice as many threads.
        wanted = min(16, num_bytes * (8 if gpu == "gfx942" else 16))
        scales = {4} if num_bytes == 1 else set()
        assert kernel["spills"] == 0, (case, kernel)
        stores = set(kernel["stores"]) - scales
        if (gpu, case["order"]) == ("gfx942", "vectorised"):
            # Keys in fp32 are stored one by one there.
            assert wanted in stores, (case, kernel)
        else:
            assert stores == {wanted}, (case, kernel)
        assert 16 in kernel["loads"], (case, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_copies_move_128_bits_at_a_time(gpu: str, tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"gpu": gpu, "kernel": "copy", "stored": stored, "order": order}
        | {"block_size": block_size, "head_dim": 48}
        for stored in ("bfloat16", "int8")
        for order in ORDERS
        # Runs that are multiples of 16 bytes, but not of 64.
        for block_size in (16, 7)
    ]
    for case, kernels in zip(cases, compile_all(cases, tmp_path), strict=True):
        assert len(kernels) == 3
        for kernel in kernels:
            assert kernel["spills"] == 0, (case, kernel)
            assert set(kernel["stores"]) == {16}, (case, kernel)
            # Besides ids.
            assert kernel["loads"].count(16) == len(kernel["stores"]), (case, kernel)
