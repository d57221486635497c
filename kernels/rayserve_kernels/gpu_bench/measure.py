"""Measure one case: the kernels, a device copy and other implementations, in turn."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rayserve_kernels import block_copy
from rayserve_kernels.gpu import block_copy as triton_copy
from rayserve_kernels.gpu.backend import TritonBackend
from rayserve_kernels.gpu.configs import DECODE_QUERIES, LaunchTable, width_of
from rayserve_kernels.gpu.launch import decode_config
from rayserve_kernels.gpu_bench.cases import TARGET, TARGET_SHARE
from rayserve_kernels.gpu_bench.rivals import RIVALS, Attend
from rayserve_kernels.gpu_bench.step import Step
from rayserve_kernels.gpu_bench.timing import Call, Samples, one_line, take_turns
from rayserve_kernels.gpu_bench.traffic import Case, flops_of, traffic_of
from rayserve_kernels.layout import KVLayout, Order

Result = dict[str, Any]
"""Figures of one case, as they are printed; under "samples_us" the raw ones."""

# Far above what rounding does to outputs, and far below what another computation makes of them.
_MOST_DIFFERENCE = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """What all cases of a run are measured with.

    Args:
        device: To measure on.
        gpu: Its family, as the table of launch configurations names it.
        table: Launch configurations.
        num_rounds: Samples of each contestant.
        time_us: Times a call in microseconds.
        source: Copied to `target`: what others are compared with.
        target: Of the same size.
    """

    device: torch.device
    gpu: str
    table: LaunchTable
    num_rounds: int
    time_us: Callable[[Callable[[], object]], float]
    source: torch.Tensor
    target: torch.Tensor

    @functools.cached_property
    def backend(self) -> TritonBackend:
        """The kernels."""
        return TritonBackend(self.gpu, self.table)

    @property
    def copied_bytes(self) -> int:
        """Bytes that the device copy reads and writes."""
        return 2 * self.source.nbytes

    def split_tokens(self, case: Case) -> int | None:
        """Positions of a split where a case is decoded, otherwise None."""
        if case.num_queries > DECODE_QUERIES:
            return None
        width = width_of(case.queries, case.slots)
        group_size = case.num_q_heads // case.num_kv_heads
        return decode_config(self.table, self.gpu, case.head_dim, width, group_size).split_tokens

    def samples(self, contestants: Mapping[str, Call], num_layers: int) -> Samples:
        """Time contestants, and in the same rounds the device copy, as `copy`."""
        everyone = {"copy": lambda _layer: self.target.copy_(self.source), **contestants}
        return take_turns(everyone, num_layers, self.num_rounds, self.time_us)


def measure_attention(bench: Bench, case: Case, rivals: Iterable[str] = tuple(RIVALS)) -> Result:
    """Measure decoding or prefill of a case beside rivals, and over blocks in their order."""
    step = Step.build(case, bench.device)
    own = _attend(bench, step)
    contestants: dict[str, Call] = {
        "paged": own,
        "in_order": lambda layer: bench.backend.attend(
            step.pool, layer, step.queries, step.in_order, step.scale
        ),
    }
    errors: dict[str, str] = {}
    for name in rivals:
        try:
            rival = RIVALS[name](step)
            _check_agreement(own(0), rival(0))
        except Exception as error:
            errors[name] = one_line(error)
        else:
            contestants[name] = rival
    samples = bench.samples(contestants, step.num_layers)
    samples = Samples(samples.us, {**errors, **samples.errors})
    return attention_result(case, samples, bench.split_tokens(case), bench.copied_bytes)


def measure_cascade(bench: Bench, case: Case) -> Result:
    """Measure a decode whose shared prefix is read once, beside one that reads it for each."""
    step = Step.build(case, bench.device)
    metadata, layout = step.metadata, step.pool.layout
    shared = bench.backend.find_shared_prefixes(
        layout,
        case.num_q_heads,
        case.queries,
        step.tables,
        [case.num_tokens - case.num_queries] * case.batch_size,
        [case.num_queries] * case.batch_size,
        bench.device,
    )
    if shared is None:
        raise ValueError(f"{case}: expected a prefix that pays")
    sharing = dataclasses.replace(metadata, shared_prefixes=shared)
    contestants: dict[str, Call] = {
        "paged": lambda layer: bench.backend.attend(
            step.pool, layer, step.queries, sharing, step.scale
        ),
        "unshared": _attend(bench, step),
    }
    samples = bench.samples(contestants, step.num_layers)
    return attention_result(case, samples, bench.split_tokens(case), bench.copied_bytes)


def measure_copies(bench: Bench, order: Order, num_blocks: int, num_layers: int = 32) -> Result:
    """Measure copies of whole blocks, scattered over a pool, and gathering them into a buffer.

    Args:
        bench: To measure with.
        order: Of the pool: bf16, 8 KV heads of 128, blocks of 16.
        num_blocks: To copy; the pool has twice as many.
        num_layers: Of the pool.
    """
    layout = KVLayout(num_layers, 8, 16, 128, torch.bfloat16, order)
    pool = layout.allocate(2 * num_blocks, bench.device)
    ids = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    sources, targets = ids[:num_blocks], ids[num_blocks:]
    staging = pool.payload.new_empty(num_blocks, layout.block_bytes)
    contestants: dict[str, Call] = {
        "copy_blocks": lambda _layer: block_copy.copy_blocks(pool, sources, targets),
        "triton_copy_blocks": lambda _layer: triton_copy.copy_blocks(pool, sources, targets),
        "triton_gather": lambda _layer: triton_copy.gather_blocks(pool, sources, staging),
    }
    samples = bench.samples(contestants, 1)
    moved = 2 * num_blocks * layout.block_bytes
    result: Result = {
        "order": order,
        "num_blocks": num_blocks,
        "needed_bytes": moved,
        **_times(samples, bench.copied_bytes),
        "errors": dict(samples.errors),
    }
    result["share_of_copy"] = {
        name: _share(moved, us, result["copy_gb_per_s"])
        for name, us in result["median_us"].items()
        if name != "copy"
    }
    return {**result, "samples_us": _rounded(samples)}


def attention_result(
    case: Case, samples: Samples, split_tokens: int | None, copied_bytes: int
) -> Result:
    """Put the figures of a case together.

    Args:
        case: What was measured.
        samples: Of `copy`, `paged` and others.
        split_tokens: As `traffic_of`.
        copied_bytes: That the copy reads and writes.

    Returns:
        Medians; `share_of_copy`, needed bytes per second as a share of the copy's;
        `over_paged`, how many times as long as `paged` each other takes; for prefill
        `tflop_per_s`; for the target whether it `meets_target`.
    """
    traffic = traffic_of(case, split_tokens)
    result: Result = {
        **dataclasses.asdict(case),
        "needed_bytes": traffic.needed,
        "total_bytes": traffic.total,
        **_times(samples, copied_bytes),
        "errors": dict(samples.errors),
    }
    paged_us = samples.median_us("paged")
    if paged_us is not None:
        share = _share(traffic.needed, paged_us, result["copy_gb_per_s"])
        result["gb_per_s"] = round(traffic.needed / paged_us / 1e3, 1)
        result["share_of_copy"] = share
        result["over_paged"] = {
            name: round(us / paged_us, 3)
            for name, us in result["median_us"].items()
            if name not in ("copy", "paged")
        }
        if case.num_queries > DECODE_QUERIES:
            result["tflop_per_s"] = round(flops_of(case) / paged_us / 1e6, 1)
        if case == TARGET and share is not None:
            result["meets_target"] = share >= TARGET_SHARE
    return {**result, "samples_us": _rounded(samples)}


def _attend(bench: Bench, step: Step) -> Attend:
    return lambda layer: bench.backend.attend(
        step.pool, layer, step.queries, step.metadata, step.scale
    )


def _check_agreement(own: torch.Tensor, other: torch.Tensor) -> None:
    difference = float((own.float() - other.float()).abs().max())
    most = _MOST_DIFFERENCE * float(own.float().abs().max())
    # Not > alone: NaN compares false either way.
    if not difference <= most:
        raise ValueError(f"computes something else: it differs by {difference:.3g}")


def _times(samples: Samples, copied_bytes: int) -> Result:
    copy_us = samples.median_us("copy")
    medians = {name: samples.median_us(name) for name in samples.us}
    return {
        "median_us": {name: round(us, 2) for name, us in medians.items() if us is not None},
        "copy_gb_per_s": None if copy_us is None else round(copied_bytes / copy_us / 1e3, 1),
    }


def _rounded(samples: Samples) -> dict[str, list[float]]:
    return {name: [round(us, 2) for us in own] for name, own in samples.us.items()}


def _share(needed: int, us: float, copy_gb_per_s: float | None) -> float | None:
    return None if copy_gb_per_s is None else round(needed / us / 1e3 / copy_gb_per_s, 3)
