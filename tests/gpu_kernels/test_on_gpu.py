"""The kernels compiled, under the configurations that are shipped, on the GPU that is here."""

import dataclasses
import json
import subprocess
import sys
import typing
from typing import Any

import numpy as np
import pytest
import torch
from paged_case import DEVICE
from pairwise import pairwise

from rayserve_kernels.gpu.backend import TritonBackend
from rayserve_kernels.gpu.configs import Key, Kind, LaunchTable, Width, check_support, gpu_family
from rayserve_kernels.gpu.tuning import present
from rayserve_kernels.gpu_bench.step import Step
from rayserve_kernels.gpu_bench.timing import EventTimer
from rayserve_kernels.gpu_bench.traffic import Case
from rayserve_kernels.gpu_bench.trials import Check, Trials, cases_of
from rayserve_kernels.layout import KVLayout
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.quantisation import dequantise, quantise
from rayserve_kernels.reference import dense_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type == "cpu" or not torch.cuda.is_available(), reason="no GPU"),
]
# Sizes that the interpreter would take hours for; (tokens, new ones, query heads, KV heads).
BATCHES = {
    "decode": (3000, 1, 32, 8),
    "speculative": (1301, 8, 8, 2),
    "many_heads": (1301, 1, 64, 1),
    "chunk": (2100, 517, 32, 8),
    "prompt": (1111, 1111, 8, 8),
}
AXES: dict[str, list[Any]] = {
    "batch": list(BATCHES),
    "dtype": ["fp32", "bf16", "fp16", "int8", "fp8"],
    "order": ["block_major", "nhd", "hnd", "vectorised"],
    "head_dim": [64, 80, 96, 128, 256],
    "block_size": [8, 16, 64],
}


def expected(step: Step, layer: int) -> torch.Tensor:
    """Float64 attention over what the pool was filled from: no pool, no table."""
    stored = step.contiguous[layer]
    if step.case.is_scaled:
        stored = dequantise(*quantise(stored, step.case.slots))
    keys, values = stored.double()
    queries = step.queries.double().unflatten(0, (step.case.batch_size, -1))
    rows = [
        dense_attention(queries[row], keys[row], values[row], step.scale)
        for row in range(step.case.batch_size)
    ]
    return torch.cat(rows)


def fault(step: Step, metadata: AttentionMetadata, layer: int = 0) -> str | None:
    check = Check(step, metadata, False, expected(step, layer))
    return check.fault(check.attend(backend(), layer))


def backend() -> TritonBackend:
    return TritonBackend.for_device(DEVICE)


def skip_what_the_gpu_cannot_read(case: Case) -> None:
    try:
        check_support(gpu_family(DEVICE), case.slots)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("choice", pairwise(AXES), ids=str)
def test_shipped_configurations_agree_with_float64(choice: dict[str, Any]) -> None:
    num_tokens, num_queries, num_q_heads, num_kv_heads = BATCHES[choice.pop("batch")]
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
    case = Case(3, num_tokens, num_queries=num_queries, **heads, **choice)
    skip_what_the_gpu_cannot_read(case)
    step = Step.build(case, DEVICE, num_layers=2)
    assert fault(step, step.metadata, layer=1) is None


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_shared_prefix_agrees_with_float64(dtype: typing.Literal["bf16", "int8"]) -> None:
    case = Case(20, 1301, dtype, shared_tokens=1024, num_q_heads=8, num_kv_heads=2)
    step = Step.build(case, DEVICE, num_layers=1)
    shared = backend().find_shared_prefixes(
        step.pool.layout, 8, case.queries, step.tables, [1300] * 20, [1] * 20, DEVICE
    )
    assert shared is not None
    assert fault(step, dataclasses.replace(step.metadata, shared_prefixes=shared)) is None


@pytest.mark.parametrize("num_queries", [1, 300])
def test_a_step_gives_the_same_bits_however_often_it_runs(num_queries: int) -> None:
    step = Step.build(Case(16, 4096, num_queries=num_queries), DEVICE, num_layers=1)
    kernels = backend()

    def attend() -> torch.Tensor:
        return kernels.attend(step.pool, 0, step.queries, step.metadata, step.scale)

    first = attend()
    for _ in range(50):
        assert torch.equal(attend(), first)


@pytest.mark.parametrize("kind", typing.get_args(Kind))
@pytest.mark.parametrize("width", typing.get_args(Width))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_tuner_finds_no_fault_with_shipped_rows(
    head_dim: int, width: Width, kind: Kind
) -> None:
    table, key = LaunchTable.read(), Key(gpu_family(DEVICE), head_dim, width, kind)
    trials = Trials(DEVICE, table, key, False, 1, EventTimer(DEVICE))
    (trial,) = trials.run([present(table, key)], [], cases_of(key)[1])
    assert trial.fault is None


def test_addresses_beyond_two_to_the_31_elements_are_reached() -> None:
    layout = KVLayout(1, 8, 16, 128, torch.bfloat16, "hnd")
    num_blocks = 2**31 // layout.run_elements + 100
    if torch.cuda.mem_get_info(DEVICE)[0] < 2 * num_blocks * layout.block_bytes:
        pytest.skip("needs 16 GiB of the GPU's memory")
    small = Step.build(Case(1, 1301, order="hnd"), DEVICE, num_layers=1)
    pool = layout.allocate(num_blocks, DEVICE)
    shift = num_blocks - small.pool.num_blocks
    pool.keys[0, shift:] = small.pool.keys[0]
    pool.values[0, shift:] = small.pool.values[0]
    tables = small.tables + np.int32(shift)
    metadata = AttentionMetadata.for_step(tables, [1300], [1], 16, DEVICE)
    far = dataclasses.replace(small, pool=pool)
    assert fault(far, metadata) is None


def test_a_sample_is_taken_by_running_the_call_and_is_of_the_device() -> None:
    calls: list[None] = []
    memory = torch.ones(1 << 26, device=DEVICE)

    def call() -> None:
        calls.append(None)
        memory.mul_(1.0)

    timer = EventTimer(DEVICE)
    assert timer(call) > 0
    assert calls


def test_the_benchmark_prints_what_it_measured_as_json() -> None:
    command = [sys.executable, "-m", "rayserve_kernels.bench", "--json", "--rounds", "3"]
    done = subprocess.run([*command, "--only", "copies"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["machine"]["family"] == gpu_family(DEVICE)
    for case in told["cases"]:
        assert len(case["samples_us"]["copy"]) == len(case["samples_us"]["copy_blocks"]) == 3
        assert 0 < case["share_of_copy"]["copy_blocks"] < 2
