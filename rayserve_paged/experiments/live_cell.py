"""Runs a cell for real: its requests go to a deployment of a model at the times of the workload.

Everything is measured at the consumer: a token is there when its delivery is, and the tokens of
one delivery are taken to have come evenly since the one before. Replicas tell no more than their
ledgers, so how many requests run and wait on each is counted from the requests themselves: one
waits until its first token has come, and runs from then on.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.request import FinishReason, ModelLimits
from rayserve_paged.deployment import Deployment
from rayserve_paged.experiments.cell_result import (
    CellResult,
    deaths_frame,
    gaps_frame,
    requests_frame,
)
from rayserve_paged.experiments.config import CellConfig
from rayserve_paged.experiments.open_loop import serve_open_loop
from rayserve_paged.experiments.simulated_cell import workload_of
from rayserve_paged.experiments.stream_times import RequestTimes, StreamTimes
from rayserve_paged.shells import start_deployment, with_absolute_paths
from rayserve_paged.sim.histogram import LogHistogram
from rayserve_paged.sim.report import OpenRequest, RequestLog
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.token_streams import Segment

_WARM_UP = SimRequest(0.0, (Segment(1, 8),), 2, seed=0)


@dataclasses.dataclass(slots=True)
class _Served:
    """What was seen of a live run: the ledgers with their times, and the streams."""

    limits: ModelLimits
    ledgers: list[tuple[float, ReplicaId, Accounting]]
    times: StreamTimes


def run_live(config: CellConfig, seed: int) -> CellResult:
    """Serve a cell's workload on a deployment that is started for it, and warmed up before.

    Raises:
        InvalidInputError: The workload or the model is not accepted.
        DeploymentError: The deployment cannot be started.
    """
    workload = workload_of(config, seed)
    requests = list(workload.requests)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    own = DeploymentConfig(
        **{name: getattr(config, name) for name in DeploymentConfig.model_fields}
    )
    deployment = start_deployment(with_absolute_paths(own), config.live.shell, config.live.address)
    try:
        served = asyncio.run(_serve(deployment, requests, config.sample_every_s))
    finally:
        deployment.shutdown()
    effort = {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
    }
    num_replicas = config.parallel.num_replicas
    streams = list(served.times.requests.values())
    pairs = zip(streams, requests, strict=True)
    # None came before its time.
    zero_s = min(stream.arrival_s - request.arrival_s for stream, request in pairs)
    table = _requests_frame(requests, streams, zero_s)
    return CellResult(
        table,
        _loads_frame(served.ledgers, table, zero_s),
        _replicas_frame(num_replicas),
        gaps_frame(_gaps(streams)),
        deaths_frame(()),
        {
            "num_replicas": num_replicas,
            "num_blocks": served.limits.num_blocks,
            "block_size": served.limits.block_size,
            "num_skipped_rows": workload.num_skipped,
            "num_events": None,
            "num_network_bytes": None,
        },
        effort,
    )


async def _serve(
    deployment: Deployment, requests: Sequence[SimRequest], sample_every_s: float
) -> _Served:
    # No request pays for the first step of a process, or finds what was computed in it.
    await serve_open_loop(deployment, [_WARM_UP])
    await deployment.reset_cache()
    ledgers: list[tuple[float, ReplicaId, Accounting]] = []

    async def look() -> None:
        seen = await deployment.accounting()
        now = time.monotonic()
        ledgers.extend((now, replica_id, ledger) for replica_id, ledger in seen)

    async def watch() -> None:
        while True:
            await look()
            await asyncio.sleep(sample_every_s)

    watching = asyncio.create_task(watch())
    try:
        times = await serve_open_loop(deployment, requests)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    await look()
    return _Served(deployment.limits, ledgers, times)


def _requests_frame(
    requests: Sequence[SimRequest], streams: Sequence[RequestTimes], zero_s: float
) -> pl.DataFrame:
    log = RequestLog()
    for number, (request, stream) in enumerate(zip(requests, streams, strict=True)):
        assert stream.end_s is not None, "all streams have been read to their ends"
        first_s = stream.token_s[0] - zero_s if stream.token_s else None
        replica = None if stream.replica_id is None else _index_of(stream.replica_id)
        opened = OpenRequest(
            number,
            stream.arrival_s - zero_s,
            request.num_prompt_tokens,
            first_s,
            len(stream.token_s),
            stream.num_cached_tokens,
            replica,
        )
        if stream.error is not None:
            log.errors[number] = stream.error
        log.add(opened, stream.end_s - zero_s, stream.finish or FinishReason.ERROR)
    frame = requests_frame(log.columns(), log.errors)
    return frame.with_columns(pl.lit(None, pl.Int64).alias("num_attempts"))


def _gaps(streams: Sequence[RequestTimes]) -> LogHistogram:
    gaps = LogHistogram()
    for stream in streams:
        when, num_tokens = np.unique(np.array(stream.token_s), return_counts=True)
        later = num_tokens[1:]
        gaps.add(np.repeat(np.diff(when) / later, later))
    return gaps


def _index_of(replica: ReplicaId) -> int:
    return int(replica.removeprefix("r"))


def _loads_frame(
    ledgers: Sequence[tuple[float, ReplicaId, Accounting]], requests: pl.DataFrame, zero_s: float
) -> pl.DataFrame:
    arrival, end = requests["arrival_s"].to_numpy(), requests["end_s"].to_numpy()
    # A comparison with NaN is false: without a first token it never runs.
    first = requests["first_token_s"].fill_null(np.nan).to_numpy()
    served_by = requests["replica"].fill_null(-1).to_numpy()
    rows = []
    for monotonic_s, replica_id, ledger in ledgers:
        time_s, index = monotonic_s - zero_s, _index_of(replica_id)
        is_open: npt.NDArray[np.bool_] = (arrival <= time_s) & (end > time_s) & (served_by == index)
        num_running = int((is_open & (first <= time_s)).sum())
        rows.append(
            {
                "time_s": time_s,
                "replica": index,
                "num_running": num_running,
                "num_waiting": int(is_open.sum()) - num_running,
                "num_free_blocks": ledger.num_free_blocks,
                "num_cached_blocks": ledger.num_cached_blocks,
                "num_held_blocks": ledger.num_held_blocks,
                "num_open_slots": ledger.internal_fragmentation_slots,
                "num_preemptions": None,
                "num_queried_tokens": None,
                "num_hit_tokens": None,
                "num_steps": None,
            }
        )
    types = {name: pl.Int64 for name in rows[0] if name != "time_s"}
    return pl.DataFrame(rows, schema_overrides=types)


def _replicas_frame(num_replicas: int) -> pl.DataFrame:
    """What replicas do not tell is absent."""
    unknown = [None] * num_replicas
    return pl.DataFrame(
        {
            "replica": pl.Series(range(num_replicas), dtype=pl.Int64),
            "busy_s": pl.Series(unknown, dtype=pl.Float64),
            "num_steps": pl.Series(unknown, dtype=pl.Int64),
            "num_preemptions": pl.Series(unknown, dtype=pl.Int64),
            "num_computed_tokens": pl.Series(unknown, dtype=pl.Int64),
        }
    )
