"""Runs a cell for real: its requests go to a deployment of a model at the times of the workload.

Everything is measured at the consumer: a token is there when its chunk is, and the tokens of one
chunk are taken to have come evenly since the chunk before. Replicas tell no more than their
ledgers, so how many requests run and wait on each is counted from the requests themselves: one
waits until its first token has come, and runs from then on.
"""

import asyncio
import contextlib
import time

import numpy as np
import polars as pl

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import PagedError
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.experiments.cell_result import CellResult, gaps_frame, requests_frame
from rayserve_paged.experiments.config import CellConfig
from rayserve_paged.experiments.simulated_cell import workload_of
from rayserve_paged.llm import LLM
from rayserve_paged.outputs import DeploymentAccounting, RequestOutput
from rayserve_paged.sim.histogram import LogHistogram
from rayserve_paged.sim.report import OpenRequest, RequestLog
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.token_streams import make_prompt

_WARM_UP = [1, 2, 3, 4, 5, 6, 7, 8]


def run_live(config: CellConfig, seed: int) -> CellResult:
    """Serve a cell's workload on a deployment that is started for it, and warmed up before.

    Raises:
        InvalidInputError: The workload or the model is not accepted.
        DeploymentError: The deployment cannot be started.
    """
    workload = workload_of(config, seed)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    own = {name: getattr(config, name) for name in DeploymentConfig.model_fields}
    live = config.live
    with LLM(config=DeploymentConfig(**own), shell=live.shell, address=live.address) as llm:
        # No request pays for the first step of a process, or finds what was computed in it.
        llm.generate(_WARM_UP, SamplingParams(max_tokens=2, ignore_eos=True))
        llm.reset_prefix_cache()
        replay = _Replay(llm, config.sample_every_s)
        asyncio.run(replay.run(list(workload.requests)))
        limits = llm.limits
    effort = {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
    }
    requests = requests_frame(replay.log.columns(), replay.log.errors)
    num_replicas = config.parallel.num_replicas
    return CellResult(
        requests,
        _loads_frame(replay.ledgers, requests),
        _replicas_frame(num_replicas),
        gaps_frame(replay.gaps),
        {
            "num_replicas": num_replicas,
            "num_blocks": limits.num_blocks,
            "block_size": limits.block_size,
            "num_skipped_rows": workload.num_skipped,
            "num_events": None,
            "num_network_bytes": None,
        },
        effort,
    )


class _Replay:
    """Submits requests when it is their time, and reads their streams.

    Args:
        llm: Serves them.
        sample_every_s: How often the ledgers are asked for.
    """

    def __init__(self, llm: LLM, sample_every_s: float) -> None:
        self.log = RequestLog()
        self.gaps = LogHistogram()
        self.ledgers: list[tuple[float, DeploymentAccounting]] = []
        self._llm = llm
        self._sample_every_s = sample_every_s
        self._begin_s = 0.0

    async def run(self, requests: list[SimRequest]) -> None:
        """Serve requests to their ends."""
        vocab_size = self._llm.limits.vocab_size
        # Made before the clock starts, so that none is late for it.
        prompts = [list(make_prompt(request.segments, vocab_size)) for request in requests]
        self._begin_s = time.monotonic()
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
                    await asyncio.sleep(max(0.0, request.arrival_s - self._now()))
                    group.create_task(self._serve(number, request, prompt))
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        self.ledgers.append((self._now(), await asyncio.to_thread(self._llm.accounting)))

    def _now(self) -> float:
        return time.monotonic() - self._begin_s

    async def _watch(self) -> None:
        while True:
            self.ledgers.append((self._now(), await asyncio.to_thread(self._llm.accounting)))
            await asyncio.sleep(self._sample_every_s)

    async def _serve(self, number: int, request: SimRequest, prompt: list[int]) -> None:
        opened = OpenRequest(number, self._now(), len(prompt))
        params = SamplingParams(
            max_tokens=request.num_output_tokens, seed=request.seed, ignore_eos=True
        )
        finish = FinishReason.ERROR
        try:
            output = await self._read(opened, prompt, params)
        except PagedError as error:
            self.log.errors[number] = str(error)
        else:
            finish = output.finish_reason
            opened.num_cached_tokens = output.num_cached_tokens
            if output.replica is not None:
                opened.replica = _index_of(output.replica)
        self.log.add(opened, self._now(), finish)

    async def _read(
        self, opened: OpenRequest, prompt: list[int], params: SamplingParams
    ) -> RequestOutput:
        last_s = 0.0
        async with contextlib.aclosing(self._llm.stream(prompt, params)) as chunks:
            async for chunk in chunks:
                now, num_new = self._now(), len(chunk.token_ids)
                if num_new and opened.first_token_s is None:
                    opened.first_token_s = now
                elif num_new:
                    self.gaps.add(np.full(num_new, (now - last_s) / num_new))
                if num_new:
                    last_s = now
                    opened.num_output_tokens += num_new
                if chunk.output is not None:
                    return chunk.output
        raise AssertionError("a stream ends with its output")


def _index_of(replica: str) -> int:
    return int(replica.removeprefix("r"))


def _loads_frame(
    ledgers: list[tuple[float, DeploymentAccounting]], requests: pl.DataFrame
) -> pl.DataFrame:
    arrival, end = requests["arrival_s"].to_numpy(), requests["end_s"].to_numpy()
    # A comparison with NaN is false: without a first token it never runs.
    first = requests["first_token_s"].fill_null(np.nan).to_numpy()
    served_by = requests["replica"].fill_null(-1).to_numpy()
    rows = []
    for time_s, accounting in ledgers:
        is_open = (arrival <= time_s) & (end > time_s)
        is_running = is_open & (first <= time_s)
        for replica_id, ledger in accounting.replicas.items():
            is_mine = served_by == _index_of(replica_id)
            num_running = int((is_running & is_mine).sum())
            rows.append(
                {
                    "time_s": time_s,
                    "replica": _index_of(replica_id),
                    "num_running": num_running,
                    "num_waiting": int((is_open & is_mine).sum()) - num_running,
                    "num_free_blocks": ledger.num_free_blocks,
                    "num_cached_blocks": ledger.num_cached_blocks,
                    "num_open_slots": ledger.internal_fragmentation_slots,
                    "num_preemptions": None,
                    "num_queried_tokens": None,
                    "num_hit_tokens": None,
                    "num_steps": None,
                    "num_held_blocks": ledger.num_held_blocks,
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
        }
    )
