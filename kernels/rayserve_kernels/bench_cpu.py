"""How fast decoding attends on this CPU: the native kernel beside what torch has, and a plain read.

All run in turn, layer after layer over more memory than caches hold, and the ratios are of medians.
Beside int8, torch attends over bf16.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rayserve_kernels.attention import AttentionBackend, TorchBackend
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout, KVPool, Order
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.native_build import Width, build_library, compiler_version, widest
from rayserve_kernels.native_cpu import NativeBackend

_BLOCK_SIZE = 16
_MIN_BYTES = 256 << 20
_CONTEXT = 1024
_BATCH_SIZES = (8, 32)
_HEADS = ((9, 3, 64), (32, 8, 128))
# How the pool stores keys and values, and the dtype of queries and of torch's attention beside it.
_DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of decoding: a query for each sequence, all of one length."""

    dtype: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    batch_size: int
    num_tokens: int = _CONTEXT

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the step must read in each layer, scales included."""
        vectors = 2 * self.batch_size * self.num_tokens * self.num_kv_heads
        stored = _DTYPES[self.dtype][0]
        scale_bytes = 4 if stored in SCALED_DTYPES else 0
        return vectors * (self.head_dim * stored.itemsize + scale_bytes)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one case took, in microseconds: samples of each contestant, in the order of rounds."""

    case: Case
    native_us: Sequence[float]
    contiguous_sdpa_us: Sequence[float]
    gather_sdpa_us: Sequence[float]
    read_us: Sequence[float]

    def as_dict(self) -> dict[str, Any]:
        """Medians and their ratios, as they are printed: more is better for `native`."""
        native, sdpa, gather, read = (statistics.median(one) for one in self.samples().values())
        return {
            **dataclasses.asdict(self.case),
            "native_us": round(native, 1),
            "contiguous_sdpa_us": round(sdpa, 1),
            "gather_sdpa_us": round(gather, 1),
            "read_us": round(read, 1),
            "over_contiguous_sdpa": round(sdpa / native, 2),
            "over_gather_sdpa": round(gather / native, 2),
            "share_of_read_rate": round(read / native, 2),
            "native_gb_per_s": round(self.case.kv_bytes / native / 1000, 2),
        }

    def samples(self) -> dict[str, Sequence[float]]:
        """By contestant."""
        return {
            "native_us": self.native_us,
            "contiguous_sdpa_us": self.contiguous_sdpa_us,
            "gather_sdpa_us": self.gather_sdpa_us,
            "read_us": self.read_us,
        }


def all_cases() -> Iterator[Case]:
    """The cases of a run."""
    for dtype in _DTYPES:
        for heads in _HEADS:
            for batch_size in _BATCH_SIZES:
                yield Case(dtype, *heads, batch_size)


def measure(
    case: Case,
    backend: AttentionBackend,
    order: Order,
    num_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Figures:
    """Time one case.

    Args:
        case: The case.
        backend: The native kernel.
        order: Of the pool.
        num_rounds: Samples of each contestant.
        clock: Seconds.
    """
    _stored, dtype = _DTYPES[case.dtype]
    num_layers = max(2, -(-_MIN_BYTES // case.kv_bytes))
    pool, metadata = _pool(case, order, num_layers)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(case.batch_size, case.num_q_heads, case.head_dim, generator=generator).to(
        dtype
    )
    shape = (num_layers, 2, case.batch_size, case.num_kv_heads, case.num_tokens, case.head_dim)
    contiguous = torch.full(shape, 0.5, dtype=dtype)
    words = torch.ones(num_layers, case.kv_bytes // 8, dtype=torch.int64)
    grouped = queries.unflatten(1, (case.num_kv_heads, -1))
    scale = case.head_dim**-0.5
    plain = TorchBackend()

    def sdpa(layer: int) -> torch.Tensor:
        keys, values = contiguous[layer]
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scale)

    contestants: tuple[Callable[[int], torch.Tensor], ...] = (
        lambda layer: backend.attend(pool, layer, queries, metadata, scale),
        sdpa,
        lambda layer: plain.attend(pool, layer, queries, metadata, scale),
        lambda layer: words[layer].sum(),
    )
    with torch.inference_mode():
        return Figures(case, *_samples_us(contestants, num_layers, num_rounds, clock))


def _pool(case: Case, order: Order, num_layers: int) -> tuple[KVPool, AttentionMetadata]:
    """A pool of scattered blocks, all written, and the step."""
    blocks_per_sequence = -(-case.num_tokens // _BLOCK_SIZE)
    num_blocks = case.batch_size * blocks_per_sequence
    stored = _DTYPES[case.dtype][0]
    is_scaled = stored in SCALED_DTYPES
    layout = KVLayout(
        *(num_layers, case.num_kv_heads, _BLOCK_SIZE, case.head_dim, stored, order),
        scaled=is_scaled,
    )
    pool = layout.allocate(num_blocks)
    if pool.key_scales is not None and pool.value_scales is not None:
        pool.payload.fill_(1)
        pool.key_scales.fill_(0.5)
        pool.value_scales.fill_(0.5)
    else:
        pool.payload.view(stored).fill_(0.5)
    tables = np.random.default_rng(2).permutation(num_blocks).astype(np.int32)
    metadata = AttentionMetadata.for_step(
        tables.reshape(case.batch_size, -1),
        [case.num_tokens - 1] * case.batch_size,
        [1] * case.batch_size,
        _BLOCK_SIZE,
    )
    return pool, metadata


def _samples_us(
    contestants: tuple[Callable[[int], torch.Tensor], ...],
    num_layers: int,
    num_rounds: int,
    clock: Callable[[], float],
) -> list[list[float]]:
    """Samples of each; they take turns, so that what else the machine does strikes all alike."""
    times: list[list[float]] = [[] for _ in contestants]
    for round_index in range(num_rounds + 1):
        layer = round_index % num_layers
        for contestant, own in zip(contestants, times, strict=True):
            start = clock()
            contestant(layer)
            own.append((clock() - start) * 1e6)
    # The first round warms up.
    return [own[1:] for own in times]


def machine(width: Width) -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "processor": _processor(),
        "instruction_set": width,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": compiler_version(),
    }


def _settings(chosen: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in ("order", "rounds", "cpu_time")}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run(chosen: argparse.Namespace) -> None:
    """Run the cases and print them.

    Args:
        chosen: As `rayserve_kernels.bench` parses it.
    """
    width: Width = chosen.width or widest()
    if chosen.cpu_time:
        chosen.threads = 1
    clock = time.thread_time if chosen.cpu_time else time.perf_counter
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        backend = NativeBackend(build_library(Path(folder), width), width)
        about = {**machine(width), **_settings(chosen)}
        results: list[dict[str, Any]] = []
        samples: list[dict[str, Sequence[float]]] = []
        for case in all_cases():
            figures = measure(case, backend, chosen.order, chosen.rounds, clock)
            results.append(figures.as_dict())
            samples.append(
                {name: [round(us, 1) for us in of] for name, of in figures.samples().items()}
            )
            if not chosen.json:
                print(*(f"{name}={value}" for name, value in results[-1].items()), flush=True)
        if chosen.json:
            cases = [{**one, "samples": raw} for one, raw in zip(results, samples, strict=True)]
            json.dump({"machine": about, "cases": cases}, sys.stdout, indent=1)
            print()
        else:
            print(*(f"{name}={value}" for name, value in about.items()), sep="\n")
