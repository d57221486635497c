"""Compile the kernels that write and copy the cache for GPUs that are not here; run as a program.

Reads cases as JSON from standard input, one a line, and writes for each what its kernels need and
how wide they load and store. The launch runs as in production up to the point where the compiled
kernel would start, so that alignments and strides are those of a real call. The environment must
not hold TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rayserve_kernels.gpu.block_copy import copy_blocks, gather_blocks, scatter_blocks
from rayserve_kernels.gpu.cache_write import write_kv
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
Kernel = Any
"""What Triton makes of a kernel, which has no type worth the name."""
_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiler:
    """Stands where the driver of a GPU would, and keeps what is compiled for it."""

    def __init__(self) -> None:
        self.gpu = ""
        self.kernels: list[Kernel] = []
        launch = JITFunction.run

        def run(
            function: JITFunction, *args: object, grid: object, warmup: bool, **options: object
        ) -> None:
            self.kernels.append(launch(function, *args, grid=grid, warmup=True, **options))

        JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]
        driver.set_active(self)  # pyright: ignore[reportArgumentType]

    def get_current_device(self) -> str:
        return self.gpu

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.gpu]

    def compile(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """Compile the kernels of a case, and tell what they need."""
        self.gpu, self.kernels = case["gpu"], []
        _launch(case)
        return [_resources(kernel) for kernel in self.kernels]


def _launch(case: dict[str, Any]) -> None:
    stored = getattr(torch, case["stored"])
    layout = KVLayout(
        2, 3, case["block_size"], case["head_dim"], stored, case["order"], stored in SCALED_DTYPES
    )
    pool = layout.allocate(4)
    if case["kernel"] == "write":
        # As attention projects them: keys and values side by side.
        fused = torch.empty(5, 6, layout.head_dim, dtype=getattr(torch, case["dtype"]))
        write_kv(pool, 1, fused[:, :3], fused[:, 3:], torch.arange(5))
        return
    copy_blocks(pool, [0], [1])
    staging = torch.empty(1, layout.block_bytes, dtype=torch.uint8)
    gather_blocks(pool, [0], staging)
    scatter_blocks(pool, [0], staging)


def _resources(kernel: Kernel) -> dict[str, Any]:
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        widths = {"": 4, "x2": 8, "x3": 12, "x4": 16}
        found = re.findall(r"\b(?:buffer|global)_(load|store)_dword(x\d)?\b", text)
        spills = re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s+(\d+)", text)
        accesses = [(kind, widths[suffix]) for kind, suffix in found]
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _output("cuobjdump", "-res-usage", file.name)
            code = _output("nvdisasm", "-c", file.name)
        spills = [*re.findall(r"STACK:(\d+)", usage), len(re.findall(r"\b(?:STL|LDL)\b", code))]
        accesses = []
        for kind, options in re.findall(r"\b(LDG|STG)([.\w]*)", code):
            bits = re.search(r"\.(?:U|S)?(8|16|64|128)\b", options)
            width = 4 if bits is None else int(bits[1]) // 8
            accesses.append(("load" if kind == "LDG" else "store", width))
    return {
        "spills": sum(map(int, spills)),
        "loads": [width for kind, width in accesses if kind == "load"],
        "stores": [width for kind, width in accesses if kind == "store"],
    }


def _output(program: str, *arguments: str) -> str:
    command = [str(_BINARIES / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    compiler = Compiler()
    for line in sys.stdin:
        print(json.dumps(compiler.compile(json.loads(line))), flush=True)
