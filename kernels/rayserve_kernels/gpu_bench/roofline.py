"""How fast decoding can be at most, by its bytes and the vendors' figures; needs no GPU."""

from collections.abc import Iterator, Mapping
from typing import Final

from rayserve_kernels.gpu_bench.cases import TARGET, TARGET_SHARE
from rayserve_kernels.gpu_bench.traffic import Case, traffic_of

MEMORY_BYTES_PER_S: Final[Mapping[str, float]] = {
    "A100": 2.039e12,
    "H100": 3.35e12,
    "H200": 4.8e12,
    "MI300X": 5.3e12,
}
"""Peak bandwidth of memory by GPU. Sources: NVIDIA data sheets "A100 Tensor Core GPU" (80 GB, SXM),
"H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU"; AMD data sheet "Instinct MI300X"."""
NUM_LAYERS: Final = 32
"""Of the model whose tokens per second are told: that of an 8B model."""

_CASES: Final = (
    TARGET,
    Case(64, 4096, "int8"),
    Case(8, 32768),
    Case(256, 1024),
    Case(64, 4096, shared_tokens=3072),
)


def step_us(case: Case, bytes_per_s: float) -> float:
    """Microseconds of one layer at the target's share of a bandwidth."""
    return traffic_of(case).needed / (bytes_per_s * TARGET_SHARE) * 1e6


def table() -> str:
    """Lay the cases out by GPU, as a table in Markdown that ends without a newline."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield f"| batch, context, dtype | MB a layer | {' | '.join(MEMORY_BYTES_PER_S)} |"
    yield "|---|---|" + "---|" * len(MEMORY_BYTES_PER_S)
    yield "| " + " | ".join(["TB/s", "", *_bandwidths()]) + " |"
    for case in _CASES:
        cells = [_name(case), f"{traffic_of(case).needed / 1e6:,.1f}"]
        for bytes_per_s in MEMORY_BYTES_PER_S.values():
            us = step_us(case, bytes_per_s)
            tokens_per_s = case.batch_size / (NUM_LAYERS * us * 1e-6)
            cells.append(f"{us:,.1f} µs, {tokens_per_s:,.0f}/s")
        yield f"| {' | '.join(cells)} |"


def _bandwidths() -> list[str]:
    return [f"{bytes_per_s / 1e12:g}" for bytes_per_s in MEMORY_BYTES_PER_S.values()]


def _name(case: Case) -> str:
    name = f"{case.batch_size}, {case.num_tokens:,}, {case.dtype}"
    if case.shared_tokens:
        name += f", {case.shared_tokens:,} shared"
    return f"**{name}**" if case == TARGET else name
