"""`rayserve-paged plan`: what fits on so many GPUs, and what load they take."""

import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.serve.serve_config import EndpointConfig
    from rayserve_paged.sizing.load import Load
    from rayserve_paged.sizing.memory import MemoryPlan
    from rayserve_paged.sizing.search import HighestRate, Prober, Run

_MAX_DECODE_STEPS = 1024
"""Of one event of a simulation; what comes of it is the same."""

_Model = Annotated[
    str | None,
    typer.Option(
        help="smollm2-135m, llama-8b, llama-70b, llama-405b, or a directory with a config.json."
    ),
]
_Gpu = Annotated[str, typer.Option(help="Of each rank: A100, H100, H200, B200 or L40S.")]
_Config = Annotated[
    Path | None, typer.Option(help="YAML file of a deployment or an endpoint to plan for.")
]
_Tp = Annotated[int | None, typer.Option("--tp", help="Ranks of each replica (1).")]
_Replicas = Annotated[int | None, typer.Option(help="Replicas (1).")]
_Dtype = Annotated[str | None, typer.Option(help="bf16 or fp16 (bf16).")]
_KvDtype = Annotated[str | None, typer.Option(help="fp32, bf16, fp16, int8 or fp8.")]
_BlockSize = Annotated[int | None, typer.Option(help="Slots per block (16).")]
_Memory = Annotated[
    str | None, typer.Option(help="Bytes of each rank's pool; absent: as a rank chooses.")
]
_MaxModelLen = Annotated[int | None, typer.Option(help="Most prompt and output tokens.")]
_MaxSeqs = Annotated[int | None, typer.Option(help="Sequences that run at once (64).")]
_MaxTokens = Annotated[int | None, typer.Option(help="Token budget of a step (512).")]
_Slo = Annotated[
    str | None,
    typer.Option(help="Bounds on 99th percentiles in seconds, such as ttft=2.0,itl=0.05."),
]
_Trace = Annotated[
    Path | None,
    typer.Option(help="Requests to size by: a trace, event logs, or a synthetic workload's YAML."),
]
_Prompt = Annotated[int, typer.Option(help="Without a trace: tokens of every prompt.")]
_Output = Annotated[int, typer.Option(help="Without a trace: tokens of every answer.")]
_Rate = Annotated[
    float | None, typer.Option(help="Requests per second to find the number of replicas for.")
]
_Requests = Annotated[
    int | None,
    typer.Option(help="Requests per replica in each run; absent: 8 for each that runs at once."),
]
_Seed = Annotated[int, typer.Option(help="Of arrivals and tokens.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def plan(
    model: _Model = None,
    gpu: _Gpu = "H200",
    config: _Config = None,
    tp: _Tp = None,
    replicas: _Replicas = None,
    dtype: _Dtype = None,
    kv_dtype: _KvDtype = None,
    block_size: _BlockSize = None,
    cache_memory: _Memory = None,
    max_model_len: _MaxModelLen = None,
    max_num_seqs: _MaxSeqs = None,
    max_num_batched_tokens: _MaxTokens = None,
    slo: _Slo = None,
    trace: _Trace = None,
    prompt_tokens: _Prompt = 1000,
    output_tokens: _Output = 300,
    rate: _Rate = None,
    requests: _Requests = None,
    seed: _Seed = 0,
    as_json: _Json = False,
) -> None:
    """Size a deployment: memory, blocks, sequences at once, and the load that keeps an objective.

    Memory follows from the model's sizes by the rules of a rank; rates come from simulated runs of
    the real scheduler, on a virtual clock.
    """
    from rayserve_paged.sim.hardware import GPUS
    from rayserve_paged.sizing.load import alike, of_trace
    from rayserve_paged.sizing.memory import plan_memory
    from rayserve_paged.sizing.shape import find_shape

    _check(slo, rate, requests, gpu, GPUS)
    flags = {
        "model.model": model,
        "model.dtype": dtype,
        "model.kv_dtype": kv_dtype,
        "model.max_model_len": max_model_len,
        "cache.block_size": block_size,
        "cache.memory": cache_memory,
        "parallel.tensor_parallel_size": tp,
        "parallel.num_replicas": replicas,
        "batch.max_num_seqs": max_num_seqs,
        "batch.max_num_batched_tokens": max_num_batched_tokens,
    }
    chosen = _configured(config, flags)

    def make_load(num_requests: int | None) -> "Load":
        if trace is not None:
            return of_trace(trace, num_requests, chosen.cache.block_size, seed)
        return alike(num_requests or 2, prompt_tokens, output_tokens, seed)

    load = make_load(requests)
    shape = find_shape(chosen.model.model)
    memory = plan_memory(shape, GPUS[gpu], chosen, load.longest)
    report = _Report(chosen, memory, load, as_json)
    if slo is not None:
        num_each = requests or _num_requests(memory, load)
        _search(report, slo, rate, lambda num: make_load(num * num_each))
    report.print()


def _check(
    slo: str | None, rate: float | None, requests: int | None, gpu: str, gpus: Mapping[str, object]
) -> None:
    if gpu not in gpus:
        raise InvalidInputError("--gpu", gpu, ", ".join(gpus))
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidInputError("--rate", rate, "a number of requests per second above 0")
    if rate is not None and slo is None:
        raise InvalidInputError("--rate", rate, "an objective with it: --slo ttft=2.0,itl=0.05")
    if requests is not None and requests < 2:
        raise InvalidInputError("--requests", requests, "at least 2")


def _configured(path: Path | None, flags: Mapping[str, object]) -> "EndpointConfig":
    """Return the configuration that `serve` would have, but for the dtype's default: GPUs want 16
    bits.
    """
    from rayserve_paged.load_config import load_config_as
    from rayserve_paged.serve.serve_config import EndpointConfig

    config = load_config_as(EndpointConfig, path, flags)
    if "dtype" not in config.model.model_fields_set:
        config = load_config_as(EndpointConfig, path, {**flags, "model.dtype": "bf16"})
    return config


def _num_requests(memory: "MemoryPlan", load: "Load") -> int:
    # So many that they come for eight times as long as each stays: what is measured is then the
    # deployment at work, and not how it fills.
    return max(100, 8 * memory.num_at_once(load.mean_tokens))


def _search(
    report: "_Report", text: str, rate: float | None, make_load: Callable[[int], "Load"]
) -> None:
    """Find out what load the deployment takes, by simulation."""
    from rayserve_paged.sim.build import describe_cluster
    from rayserve_paged.sizing.search import (
        Prober,
        find_highest_rate,
        find_rate_of_all,
        find_replicas,
    )
    from rayserve_paged.sizing.slo import read_slo

    slo, config = read_slo(text), report.config
    batch = config.batch
    if "max_decode_steps" not in batch.model_fields_set:
        batch = batch.model_copy(update={"max_decode_steps": _MAX_DECODE_STEPS})
    spec = describe_cluster(
        num_replicas=1,
        gpu=report.memory.gpu.name,
        tensor_parallel_size=report.memory.num_ranks,
        model_shape=report.memory.shape,
        block_size=config.cache.block_size,
        batch=batch,
        num_blocks=report.memory.limits.num_blocks,
        placement=config.placement,
        timeouts=config.timeouts,
    )
    limits = dataclasses.replace(spec.limits, max_model_len=report.memory.limits.max_model_len)
    prober = Prober(dataclasses.replace(spec, limits=limits), slo, _print_run)
    load = make_load(1)
    found = find_highest_rate(prober, load, slo)
    report.slo, report.prober, report.highest, report.load = str(slo), prober, found, load
    of_one, num_replicas = found.best.rate_per_s, config.parallel.num_replicas
    if num_replicas > 1:
        report.of_all = find_rate_of_all(prober, make_load(num_replicas), num_replicas, of_one)
    if rate is not None:
        report.for_rate = find_replicas(prober, make_load, rate, of_one)


def _print_run(run: "Run") -> None:
    verdict = "met" if run.is_met else "not met"
    print(
        f"simulated {run.num_requests:,} requests on {run.num_replicas} replicas at "
        f"{_per_s(run.rate_per_s)}/s in {run.wall_s:.1f} s: p99 ttft {_seconds(run.ttft_p99_s)}, "
        f"itl {_seconds(run.itl_p99_s)}: {verdict}",
        file=sys.stderr,
    )


@dataclasses.dataclass(slots=True)
class _Report:
    """What was found, and how it is printed."""

    config: "EndpointConfig"
    memory: "MemoryPlan"
    load: "Load"
    as_json: bool
    slo: str | None = None
    prober: "Prober | None" = None
    highest: "HighestRate | None" = None
    of_all: "Run | None" = None
    for_rate: "Run | None" = None

    @property
    def num_replicas(self) -> int:
        """Replicas of the deployment that is recommended."""
        if self.for_rate is not None:
            return self.for_rate.num_replicas
        return self.config.parallel.num_replicas

    def print(self) -> None:
        """Print it."""
        if self.as_json:
            print(json.dumps(self._figures()))
        else:
            self._print_tables()

    def _figures(self) -> dict[str, object]:
        memory, load = self.memory, self.load
        figures: dict[str, object] = {
            "model": memory.shape.name,
            "gpu": memory.gpu.name,
            "tensor_parallel_size": memory.num_ranks,
            "num_replicas": self.num_replicas,
            "num_gpus": self.num_replicas * memory.num_ranks,
            "dtype": self.config.model.dtype,
            "kv_dtype": self.config.model.kv_dtype or self.config.model.dtype,
            "block_size": memory.layout.block_size,
            "gpu_memory_bytes": memory.gpu.memory_bytes,
            "weight_bytes": memory.shape.weight_bytes,
            "rank_weight_bytes": memory.rank_weight_bytes,
            "available_bytes": memory.available_bytes,
            "pool_bytes": memory.pool_bytes,
            "block_bytes": memory.layout.block_bytes,
            "num_blocks": memory.limits.num_blocks,
            "kv_bytes_per_token": memory.replica_kv_bytes_per_token,
            "rank_kv_bytes_per_token": memory.rank_kv_bytes_per_token,
            "longest_context": memory.limits.served_len,
            "mean_prompt_tokens": load.mean_prompt_tokens,
            "mean_output_tokens": load.mean_output_tokens,
            "num_that_fit": memory.num_that_fit(load.mean_tokens),
            "num_at_once": memory.num_at_once(load.mean_tokens),
            "serve_command": self.command,
        }
        if self.prober is not None and self.highest is not None:
            figures |= {
                "slo": self.slo,
                "rate_per_replica_per_s": self.highest.best.rate_per_s,
                "alone": dataclasses.asdict(self.highest.alone),
                "at_once": dataclasses.asdict(self.highest.at_once),
                "best": dataclasses.asdict(self.highest.best),
                "of_all": None if self.of_all is None else dataclasses.asdict(self.of_all),
                "for_rate": None if self.for_rate is None else dataclasses.asdict(self.for_rate),
                "runs": [dataclasses.asdict(run) for run in self.prober.runs],
            }
        return figures

    @property
    def command(self) -> str:
        """How this deployment is served."""
        from rayserve_paged.sim.hardware import MODEL_SHAPES

        config, batch = self.config, self.config.batch
        cache_fields = config.cache.model_fields_set
        given = {
            "--dtype": config.model.dtype,
            "--kv-dtype": config.model.kv_dtype,
            "--tp": self.memory.num_ranks,
            "--replicas": self.num_replicas,
            "--block-size": config.cache.block_size if "block_size" in cache_fields else None,
            "--cache-memory": config.cache.memory and int(config.cache.memory),
            "--max-model-len": config.model.max_model_len,
        }
        flags = [f"{flag} {value}" for flag, value in given.items() if value is not None]
        variables = [
            f"RAYSERVE_BATCH__{name.upper()}={getattr(batch, name)}"
            for name in ("max_num_seqs", "max_num_batched_tokens")
            if name in batch.model_fields_set
        ]
        # The name of a shape is none of a model.
        model = "MODEL" if config.model.model in MODEL_SHAPES else shlex.quote(config.model.model)
        return " ".join([*variables, "rayserve-paged serve --model", model, *flags])

    def _print_tables(self) -> None:
        from rich.console import Console
        from rich.table import Table

        memory = self.memory
        where = f"{memory.num_ranks} {memory.gpu.name} per replica"
        title = f"{memory.shape.name} in {self.config.model.dtype} on {where}"
        table = Table(title=title, show_header=False)
        for row in (*self._memory_rows(), *self._rate_rows()):
            table.add_row(*row)
        Console().print(table)
        print(f"\n  {self.command}")

    def _memory_rows(self) -> list[tuple[str, str]]:
        memory, limits, load = self.memory, self.memory.limits, self.load
        free = memory.available_bytes - memory.pool_bytes
        rank_kib = f"{memory.rank_kv_bytes_per_token / 2**10:,.4g} KiB per GPU"
        size = load.mean_tokens
        fit, at_once = memory.num_that_fit(size), memory.num_at_once(size)
        bound = " (batch.max_num_seqs)" if at_once < fit else ""
        return [
            (
                "memory per GPU",
                f"{_gb(memory.gpu.memory_bytes)} = {_gb(memory.rank_weight_bytes)} weights + "
                f"{_gb(memory.pool_bytes)} KV pool + {_gb(free)} for the rest",
            ),
            ("weights", f"{_gb(memory.shape.weight_bytes)} in all"),
            (
                "KV per token",
                f"{memory.replica_kv_bytes_per_token / 2**10:,.4g} KiB per replica, {rank_kib}",
            ),
            (
                "blocks",
                f"{limits.num_blocks:,} of {memory.layout.block_size} slots, "
                f"{memory.layout.block_bytes / 2**10:,.4g} KiB each on a GPU",
            ),
            ("longest context", f"{limits.served_len:,} tokens"),
            (
                f"sequences of {size:,} tokens",
                f"{fit:,} fit into the pool, {at_once:,} run at once{bound}",
            ),
        ]

    def _rate_rows(self) -> list[tuple[str, str]]:
        highest, load = self.highest, self.load
        if highest is None or self.prober is None:
            return []
        requests = f"{load.mean_prompt_tokens:,.4g} + {load.mean_output_tokens:,.4g} tokens"
        rows = [
            ("objective", f"p99 {self.slo} s, for requests of {requests}"),
            ("a request alone", _times(highest.alone)),
            ("all at once", f"{_rates(highest.at_once)} from one replica, at most"),
            ("highest rate", f"{_rate(highest.best)} on one replica: {_times(highest.best)}"),
        ]
        for name, run in (("all replicas", self.of_all), ("for the rate", self.for_rate)):
            if run is not None:
                num_gpus = run.num_replicas * self.memory.num_ranks
                on = f"{run.num_replicas} replicas ({num_gpus} GPUs)"
                rows.append((name, f"{_rate(run)} on {on}: {_times(run)}"))
        num_runs, wall_s = len(self.prober.runs), sum(run.wall_s for run in self.prober.runs)
        rows.append(("simulated", f"{num_runs} runs in {wall_s:.1f} s"))
        return rows


def _rate(run: "Run") -> str:
    return f"{_per_s(run.rate_per_s)} requests/s, {run.output_tokens_per_s:,.0f} tokens/s"


def _rates(run: "Run") -> str:
    return f"{_per_s(run.requests_per_s)} requests/s, {run.output_tokens_per_s:,.0f} tokens/s"


def _per_s(rate: float) -> str:
    return f"{rate:.3g}" if rate < 100 else f"{rate:,.0f}"


def _times(run: "Run") -> str:
    return f"p99 ttft {_seconds(run.ttft_p99_s)}, itl {_seconds(run.itl_p99_s)}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
