"""Runs a cell in the simulator."""

import dataclasses
import time
from collections.abc import Iterator

import polars as pl

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.experiments.cell_result import (
    CellResult,
    deaths_frame,
    gaps_frame,
    requests_frame,
)
from rayserve_paged.experiments.config import CellConfig, WorkloadConfig
from rayserve_paged.experiments.failures import fault_plan
from rayserve_paged.sim.build import describe_cluster
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.cluster_spec import ClusterSpec
from rayserve_paged.sim.faults import FaultPlan
from rayserve_paged.sim.hardware import MODEL_SHAPES
from rayserve_paged.sim.report import SimReport
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.synthetic import generate
from rayserve_paged.sim.workload_file import OpenWorkload, TraceChanges, open_workload

_MAX_DECODE_STEPS = 1024
"""Of one event, where the settings say nothing: what comes of it is the same."""


def run_simulated(config: CellConfig, seed: int) -> CellResult:
    """Serve a cell's workload on its simulated cluster.

    Raises:
        InvalidInputError: Something that cannot be.
    """
    spec = cluster_of(config)
    workload = workload_of(config, seed)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    requests, until_s = workload.requests, 0.0
    if config.failures.has_rates:
        listed = list(requests)
        requests, until_s = iter(listed), listed[-1].arrival_s if listed else 0.0
    plan = fault_plan(config.failures, spec.num_replicas, seed, until_s)
    report = Cluster(spec, plan=plan, seed=seed).run(requests)
    effort = {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
    }
    return CellResult(
        requests_frame(report.requests, report.errors),
        _loads_frame(report),
        _replicas_frame(report),
        gaps_frame(report.token_gaps_s),
        deaths_frame(report.deaths),
        {
            "num_replicas": spec.num_replicas,
            "num_blocks": spec.limits.num_blocks,
            "block_size": spec.limits.block_size,
            "num_skipped_rows": workload.num_skipped,
            "num_events": report.num_events,
            "num_network_bytes": report.num_network_bytes,
        },
        effort,
    )


def cluster_of(config: CellConfig) -> ClusterSpec:
    """Return the cluster that a cell is simulated on.

    Raises:
        InvalidInputError: A name that is not known, a model that does not fit, a bad profile.
    """
    simulation, batch = config.simulation, config.batch
    if "max_decode_steps" not in batch.model_fields_set:
        batch = batch.model_copy(update={"max_decode_steps": _MAX_DECODE_STEPS})
    spec = describe_cluster(
        num_replicas=config.parallel.num_replicas,
        gpu=simulation.gpu,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        model_shape=simulation.model_shape,
        block_size=config.cache.block_size,
        batch=batch,
        num_blocks=_num_blocks(config),
        profile=simulation.profile,
        num_consumers=simulation.num_consumers,
        placement=config.placement,
        timeouts=config.timeouts,
    )
    failures = config.failures
    FaultPlan(faults=failures.plan).check_names(
        "failures.plan", spec.num_replicas, spec.num_consumers
    )
    max_pinned_blocks = int(spec.limits.num_blocks * config.cache.max_pinned_share)
    return dataclasses.replace(
        spec,
        limits=dataclasses.replace(spec.limits, max_pinned_blocks=max_pinned_blocks),
        load_interval_s=config.sample_every_s,
        recovery=config.recovery,
        partial_reuse=config.cache.partial_reuse,
        start_s=failures.start_s,
        notice_s=failures.notice_s,
    )


def _num_blocks(config: CellConfig) -> int | None:
    cache = config.cache
    shape = MODEL_SHAPES.get(config.simulation.model_shape)
    if cache.memory is None or shape is None:
        return cache.num_blocks
    block_bytes = cache.block_size * shape.kv_bytes_per_token(config.parallel.tensor_parallel_size)
    num_blocks = int(cache.memory) // block_bytes
    if not num_blocks:
        accepted = f"at least one block of {block_bytes} bytes"
        raise InvalidInputError("cache.memory", int(cache.memory), accepted)
    return num_blocks


def workload_of(config: CellConfig, seed: int) -> OpenWorkload:
    """Open a cell's workload.

    Raises:
        InvalidInputError: Naming what is wrong with it.
    """
    workload = config.workload
    opened = _open(workload, config.cache.block_size, seed)
    return dataclasses.replace(opened, requests=_scaled(opened.requests, workload.time_scale))


def _open(workload: WorkloadConfig, block_size: int, seed: int) -> OpenWorkload:
    if workload.synthetic is not None:
        synthetic = workload.synthetic
        if workload.limit is not None and workload.limit < synthetic.num_requests:
            synthetic = synthetic.model_copy(update={"num_requests": workload.limit})
        return OpenWorkload(generate(synthetic, seed), synthetic.num_requests, 0)
    assert workload.trace is not None, "it is one or the other"
    changes = TraceChanges(sample=workload.sample, repeat=workload.repeat, limit=workload.limit)
    return open_workload(
        workload.trace, block_size, seed, changes, skip_invalid=workload.skip_invalid
    )


def _scaled(requests: Iterator[SimRequest], factor: float) -> Iterator[SimRequest]:
    for request in requests:
        yield dataclasses.replace(request, arrival_s=request.arrival_s * factor)


def _loads_frame(report: SimReport) -> pl.DataFrame:
    fields = (field.name for field in dataclasses.fields(report.loads))
    return pl.DataFrame({name: getattr(report.loads, name) for name in fields})


def _replicas_frame(report: SimReport) -> pl.DataFrame:
    columns = report.replicas
    return pl.DataFrame(
        {
            "replica": range(len(columns.num_plans)),
            "busy_s": columns.busy_s,
            "num_steps": columns.num_steps,
            "num_preemptions": columns.num_preemptions,
            "num_computed_tokens": columns.num_computed_tokens,
        },
        schema_overrides={"replica": pl.Int64},
    )
