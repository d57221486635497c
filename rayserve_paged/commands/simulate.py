"""`rayserve-paged simulate`: a trace on a simulated cluster, with the real scheduler."""

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from pydantic import ValidationError

from rayserve_paged.core.config import PlacementPolicy
from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.sim.cluster_spec import ClusterSpec
    from rayserve_paged.sim.requests import SimRequest

_Figures = dict[str, float | int | dict[str, float | int | None] | None]

_Trace = Annotated[
    Path,
    typer.Option(
        help="Mooncake's JSON lines, the CSV of Azure or of BurstGPT, event logs of a run, "
        "or the YAML of a synthetic workload."
    ),
]
_Replicas = Annotated[int, typer.Option(help="Replicas of the model.")]
_Gpu = Annotated[str, typer.Option(help="Of each rank: A100, H100, H200, B200 or L40S.")]
_Tp = Annotated[int, typer.Option(help="Ranks of a replica: tensor parallelism.")]
_Shape = Annotated[
    str, typer.Option(help="smollm2-135m, llama-8b, llama-70b or llama-405b; in bf16.")
]
_BlockSize = Annotated[int, typer.Option(help="Slots per block.")]
_Blocks = Annotated[
    int | None, typer.Option(help="Blocks of each replica; absent: what the memory holds.")
]
_Profile = Annotated[
    Path | None, typer.Option(help="Measured step times to use instead of the roofline.")
]
_MaxSeqs = Annotated[int, typer.Option(help="Sequences that run at once on a replica.")]
_MaxTokens = Annotated[int, typer.Option(help="Token budget of a step.")]
_DecodeSteps = Annotated[
    int, typer.Option(help="Decode steps that are one event; what comes of them is the same.")
]
_Consumers = Annotated[
    int, typer.Option(help="Processes that submit the requests in turn and read the streams.")
]
_Placement = Annotated[
    PlacementPolicy, typer.Option(help="Which replica takes a request; see docs/scheduling.md.")
]
_TimeScale = Annotated[
    float, typer.Option(help="Factor on the times of arrival: 0.5 doubles the load.")
]
_Sample = Annotated[float, typer.Option(help="Share of a trace's requests that are kept.")]
_Repeat = Annotated[int, typer.Option(help="Times that a trace is served, one after the other.")]
_Limit = Annotated[int | None, typer.Option(help="Only the first so many requests.")]
_Seed = Annotated[int, typer.Option(help="Another one gives other tokens.")]
_SkipInvalid = Annotated[
    bool, typer.Option("--skip-invalid", help="Count rows that make no sense instead of ending.")
]
_Log = Annotated[
    Path | None, typer.Option(help="Write every event of every state machine into this file.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def simulate(
    trace: _Trace,
    replicas: _Replicas = 8,
    gpu: _Gpu = "H200",
    tp: _Tp = 8,
    model_shape: _Shape = "llama-70b",
    block_size: _BlockSize = 64,
    num_blocks: _Blocks = None,
    profile: _Profile = None,
    max_num_seqs: _MaxSeqs = 256,
    max_num_batched_tokens: _MaxTokens = 8192,
    max_decode_steps: _DecodeSteps = 1024,
    consumers: _Consumers = 1,
    placement: _Placement = "prefix-aware",
    time_scale: _TimeScale = 1.0,
    sample: _Sample = 1.0,
    repeat: _Repeat = 1,
    limit: _Limit = None,
    seed: _Seed = 0,
    skip_invalid: _SkipInvalid = False,
    log: _Log = None,
    as_json: _Json = False,
) -> None:
    """Serve a trace on a simulated cluster, and print what its users would have seen."""
    from rayserve_paged.core.config import BatchConfig
    from rayserve_paged.sim.build import describe_cluster
    from rayserve_paged.sim.workload_file import TraceChanges, open_workload

    try:
        batch = BatchConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_decode_steps=max_decode_steps,
        )
    except ValidationError as error:
        first = error.errors()[0]
        accepted = first["msg"].removeprefix("Input should be ")
        raise InvalidInputError(str(first["loc"][0]), first["input"], accepted) from error
    spec = describe_cluster(
        num_replicas=replicas,
        gpu=gpu,
        tensor_parallel_size=tp,
        model_shape=model_shape,
        block_size=block_size,
        batch=batch,
        num_blocks=num_blocks,
        profile=profile,
        num_consumers=consumers,
        placement=placement,
    )
    changes = TraceChanges(time_scale=time_scale, sample=sample, repeat=repeat, limit=limit)
    workload = open_workload(trace, block_size, seed, changes, skip_invalid=skip_invalid)
    if log is not None and log.exists() and log.samefile(trace):
        raise InvalidInputError("--log", str(log), "another file than the trace")
    figures = _run(spec, workload.requests, log)
    if as_json:
        head = {
            "trace": str(trace),
            "num_requests": workload.num_requests,
            "num_skipped": workload.num_skipped,
            "num_replicas": replicas,
            "gpu": gpu,
            "tensor_parallel_size": tp,
            "model_shape": model_shape,
            "block_size": block_size,
            "placement": placement,
            "num_blocks": spec.limits.num_blocks,
            "time_scale": time_scale,
            "seed": seed,
        }
        print(json.dumps(head | figures))
    else:
        skipped = f", {workload.num_skipped} rows left out" if workload.num_skipped else ""
        size = f"{replicas} replicas of {model_shape} on {tp} {gpu} each"
        _print_table(f"{trace.name}: {workload.num_requests:,} requests{skipped}; {size}", figures)


def _run(spec: "ClusterSpec", requests: "Iterator[SimRequest]", log: Path | None) -> _Figures:
    """Return the figures of a simulation, and what it took to run it."""
    from rayserve_paged.core.event_log import to_line
    from rayserve_paged.sim.cluster import Cluster
    from rayserve_paged.sim.summary import summarize

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    if log is None:
        report = Cluster(spec).run(requests)
    else:
        with _open_log(log) as file:
            report = Cluster(spec, lambda entry: print(to_line(entry), file=file)).run(requests)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return summarize(report) | {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "events_per_s": report.num_events / wall_s,
        "us_per_output_token": _per_token_us(wall_s, report.num_output_tokens),
        "peak_memory_mb": _peak_memory_mb(),
    }


def _per_token_us(seconds: float, num_tokens: int) -> float | None:
    return seconds / num_tokens * 1e6 if num_tokens else None


def _peak_memory_mb() -> float:
    """Return the most memory that this process has had resident, in units of 2**20 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _open_log(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        accepted = f"a file that can be written ({error.strerror})"
        raise InvalidInputError("--log", str(path), accepted) from error


def _print_table(title: str, figures: _Figures) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for name, value in figures.items():
        if isinstance(value, dict):
            parts = (f"{part} {_number(number)}" for part, number in value.items())
            table.add_row(name, "  ".join(parts))
        else:
            table.add_row(name, _number(value))
    Console().print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
