"""Compile for GPUs that are not here what the launchers would compile there; run as a program.

Reads cases as JSON from standard input, one a line, and writes what each of its kernels needs, one
line a case. The launch runs as in production up to the point where the compiled kernel would start,
so that argument types, alignments and options are those of a real call. Triton must not interpret
here: the environment must not hold TRITON_INTERPRET.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rayserve_kernels.gpu.configs import LaunchTable
from rayserve_kernels.gpu.launch import LayerView, attend_layer
from rayserve_kernels.gpu.prefix_groups import SharedPrefixes
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout
from rayserve_kernels.metadata import AttentionMetadata

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm86": GPUTarget("cuda", 86, 32),
    "sm89": GPUTarget("cuda", 89, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
Kernel = Any
"""What Triton makes of a kernel, which has no type worth the name."""
Case = dict[str, Any]
_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTIONS = {
    "HMMA": r"\bHMMA\.",
    "HGMMA": r"\bHGMMA\.",
    "UTCMMA": r"\bUTC\w*MMA",
    "LDGSTS.128": r"\bLDGSTS[.\w]*\.128",
    "LDG.128": r"\bLDG[.\w]*\.128",
    "spill": r"\b(?:STL|LDL)\b",
}
KERNELS = {
    "decode": ("decode", "join_splits"),
    "decode_wide": ("decode", "join_splits"),
    "shared": ("attend_shared",),
    "prefill": ("prefill",),
}
# Shapes under which each kind of batch is launched: query heads, KV heads, computed, new.
BATCHES = {
    "decode": (8, 2, 2048, 1),
    "decode_wide": (64, 1, 2048, 1),
    "shared": (8, 2, 2048, 1),
    "prefill": (8, 2, 512, 256),
}


class Compiler:
    """Stands where the driver of a GPU would, and keeps what is compiled for it."""

    def __init__(self, table: LaunchTable) -> None:
        self.table = table
        self.gpu = ""
        self.kernels: dict[str, Kernel] = {}
        launch = JITFunction.run

        def run(
            function: JITFunction, *args: object, grid: object, warmup: bool, **options: object
        ) -> None:
            if function.__name__ in self.kernels:
                kernel: Kernel = launch(function, *args, grid=grid, warmup=True, **options)
                self.kernels[function.__name__] = kernel

        JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]
        driver.set_active(self)  # pyright: ignore[reportArgumentType]

    def get_current_device(self) -> str:
        return self.gpu

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.gpu]

    def compile(self, case: Case) -> list[dict[str, Any]]:
        """Compile the kernels that a case is about, and tell what they need."""
        self.gpu, self.kernels = case["gpu"], dict.fromkeys(KERNELS[case["kind"]])
        _attend(case, self.table)
        return [
            {"kernel": name, "shared": kernel.metadata.shared, **_resources(kernel)}
            for name, kernel in self.kernels.items()
        ]


def _attend(case: Case, table: LaunchTable) -> None:
    num_q_heads, num_kv_heads, computed, new = BATCHES[case["kind"]]
    dtype, slots = getattr(torch, case["dtype"]), getattr(torch, case["slots"])
    block_size, head_dim = case["block_size"], case["head_dim"]
    is_scaled = slots in SCALED_DTYPES
    layout = KVLayout(1, num_kv_heads, block_size, head_dim, slots, case["order"], is_scaled)
    pool = layout.allocate(2)
    num_seqs = 3
    tables = np.zeros((num_seqs, (computed + new) // block_size + 1), np.int32)
    shared = SharedPrefixes.for_step(
        tables,
        [computed] * num_seqs,
        [new] * num_seqs,
        block_size=block_size,
        split_tokens=512,
        most_queries=new,
        least_saved_tokens=0,
    )
    metadata = AttentionMetadata.for_step(
        tables,
        [computed] * num_seqs,
        [new] * num_seqs,
        block_size,
        windows=np.full(num_seqs, 9, np.int32) if case["window"] else None,
        num_sinks=np.full(num_seqs, 4, np.int32) if case["window"] else None,
    )
    attend_layer(
        LayerView.of(pool, 0),
        torch.empty(num_seqs * new, num_q_heads, head_dim, dtype=dtype),
        dataclasses.replace(metadata, shared_prefixes=shared if case["kind"] == "shared" else None),
        0.1,
        gpu=case["gpu"],
        table=table,
        soft_cap=50.0 if case["soft_cap"] else None,
        alibi_slopes=torch.ones(num_q_heads) if case["alibi"] else None,
    )


def _resources(kernel: Kernel) -> dict[str, Any]:
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        return {
            "registers": int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0]),
            "spills": int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0]),
            "found": {"MFMA": len(re.findall(r"\bv_mfma_", text))},
        }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        sass = _output("nvdisasm", "-c", file.name)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    found = {name: len(re.findall(pattern, sass)) for name, pattern in INSTRUCTIONS.items()}
    return {"registers": int(registers), "spills": int(stack) + found.pop("spill"), "found": found}


def _output(program: str, *arguments: str) -> str:
    command = [str(_BINARIES / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    compiler = Compiler(LaunchTable.read())
    for line in sys.stdin:
        print(json.dumps(compiler.compile(json.loads(line))), flush=True)
