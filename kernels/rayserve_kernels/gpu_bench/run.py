"""Run all cases on a GPU and print what was measured, with what and on what."""

import argparse
import functools
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from rayserve_kernels.gpu.configs import LaunchTable, check_support, gpu_family
from rayserve_kernels.gpu_bench.cases import cascade_cases, decode_cases, prefill_cases
from rayserve_kernels.gpu_bench.measure import (
    Bench,
    Result,
    measure_attention,
    measure_cascade,
    measure_copies,
)
from rayserve_kernels.gpu_bench.rivals import RIVALS
from rayserve_kernels.gpu_bench.timing import EventTimer, one_line
from rayserve_kernels.gpu_bench.traffic import Case
from rayserve_kernels.layout import Order

_COPY_BYTES = 512 << 20
_COPIED_BLOCKS = 1024
_COPY_ORDERS: tuple[Order, ...] = ("block_major", "hnd")
_CARD_FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")

Measurement = tuple[str, dict[str, Any], Callable[[], Result]]
"""A part of the run, what identifies the case, and what measures it."""


def run(chosen: argparse.Namespace) -> None:
    """Measure, print, and exit with 1 if one of this package's own kernels raised.

    Args:
        chosen: As `rayserve_kernels.bench` parses it.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    gpu, table = gpu_family(device), LaunchTable.read()
    timer = EventTimer(device)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    bench = Bench(device, gpu, table, chosen.rounds, timer, source, torch.empty_like(source))
    about = {**describe(device), "launch_table": table.digest, "rounds": chosen.rounds}
    results: list[Result] = []
    with torch.inference_mode():
        for part, identity, measure in measurements(bench, chosen.full):
            if chosen.only not in (None, part):
                continue
            late = timer.num_late
            try:
                result = measure()
            except (torch.OutOfMemoryError, ValueError) as error:
                result = {**identity, "errors": {"case": one_line(error)}}
            result = {"part": part, **result, "late_samples": timer.num_late - late}
            results.append(result)
            torch.cuda.empty_cache()
            if not chosen.json:
                print(line(result), flush=True)
    about["clocks_after"] = card(device)
    if chosen.json:
        json.dump({"machine": about, "cases": results}, sys.stdout, indent=1)
        print()
    else:
        print(*(f"{name}={value}" for name, value in about.items()), sep="\n")
    sys.exit(any(has_failed(result) for result in results))


def measurements(bench: Bench, is_full: bool) -> Iterator[Measurement]:
    """All measurements of a run, but those of dtypes that the GPU cannot read."""

    def of(case: Case) -> dict[str, Any]:
        return {"case": str(case)}

    def takes(case: Case) -> bool:
        try:
            check_support(bench.gpu, case.slots)
        except ValueError:
            return False
        return True

    for case in filter(takes, decode_cases(is_full)):
        # Others take no codes of this kind; those that read blocks take these orders.
        has_rivals = not case.is_scaled and case.order in ("nhd", "hnd")
        rivals = tuple(RIVALS) if has_rivals else ()
        yield "decode", of(case), functools.partial(measure_attention, bench, case, rivals)
    for case in filter(takes, cascade_cases()):
        yield "cascade", of(case), functools.partial(measure_cascade, bench, case)
    for case in filter(takes, prefill_cases()):
        rivals = () if case.is_scaled else ("sdpa", "flex")
        if case.order == "nhd":
            rivals = tuple(RIVALS)
        yield "prefill", of(case), functools.partial(measure_attention, bench, case, rivals)
    for order in _COPY_ORDERS:
        copies = functools.partial(measure_copies, bench, order, _COPIED_BLOCKS)
        yield "copies", {"order": order}, copies


def has_failed(result: Result) -> bool:
    """Whether one of this package's own kernels raised, or came to nothing."""
    own = {"paged", "in_order", "unshared", "copy_blocks", "copy"}
    own |= {"triton_copy_blocks", "triton_gather"}
    return not own.isdisjoint(result["errors"])


def line(result: Result) -> str:
    """Say in one line what a case came to, and in one more each what went wrong."""
    names = ("batch_size", "num_tokens", "num_queries", "shared_tokens", "dtype", "order")
    text = [result["part"], *(f"{name}={result[name]}" for name in names if name in result)]
    text += [f"{name}={us:.1f}us" for name, us in result.get("median_us", {}).items()]
    figures = ("share_of_copy", "tflop_per_s", "over_paged", "meets_target")
    text += [f"{name}={result[name]}" for name in figures if name in result]
    if result.get("late_samples"):
        text.append(f"late_samples={result['late_samples']}")
    if "case" in result:
        text.append(result["case"])
    errors = (f"\n  {name}: {error}" for name, error in result["errors"].items())
    return " ".join(text) + "".join(errors)


def describe(device: torch.device) -> dict[str, Any]:
    """What figures hold for."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "family": gpu_family(device),
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "card": card(device),
        "runtime": torch.version.hip or torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def card(device: torch.device) -> dict[str, str] | None:
    """Driver, clocks and limits, where nvidia-smi tells them."""
    command = [
        "nvidia-smi",
        f"--id={_card_id(device)}",
        f"--query-gpu={','.join(_CARD_FIELDS)}",
        "--format=csv,noheader",
    ]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in told.stdout.strip().splitlines()[0].split(",")]
    return dict(zip(_CARD_FIELDS, values, strict=True))


def _card_id(device: torch.device) -> str:
    """Name the card, since its number among the visible ones is not that of the tool."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
