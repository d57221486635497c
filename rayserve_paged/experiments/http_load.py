"""Load over HTTP: many clients of an endpoint on Ray, of which some leave, while processes die.

Every answer is compared with what its request gives undisturbed, and that, where it is greedy, with
the model itself: one that says that it is whole has to be right, and one that was cut off has to be
a beginning, and must not look whole. Only an ingress that dies may cut off anything.
"""

import asyncio
import dataclasses
import itertools
import random
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.experiments.http_cases import MODEL, Case, draw_bodies, learn_cases
from rayserve_paged.experiments.http_client import Answer, complete
from rayserve_paged.experiments.http_kills import LOOK_S, PATIENCE_S, Killer, resident_mb
from rayserve_paged.experiments.kill_times import KillTimes
from rayserve_paged.load_config import load_config_as
from rayserve_paged.serve.endpoint import ray_endpoint
from rayserve_paged.serve.serve_config import EndpointConfig

_NUM_CASES: Final = 60
_CUT_AFTER_S: Final = 5.0
"""Whatever an ingress had open is cut off so soon after its death."""
_AGAIN_S: Final = 0.2
_NUM_MEMORY_LOOKS: Final = 4


@dataclasses.dataclass(frozen=True, slots=True)
class HttpLoadConfig:
    """What is served, and what dies meanwhile.

    Args:
        num_clients: Clients, each with one request open at a time.
        duration_s: How long requests are begun.
        disconnect_share: Of the requests whose clients leave before their end.
        num_kills: Kills, in turn of ranks, whole replicas and the controller.
        num_ingress_kills: Kills of ingress replicas.
        num_replicas: Replicas.
        tensor_parallel_size: Ranks of each.
        num_ingress_replicas: Processes that answer HTTP.
        max_num_seqs: Sequences that each replica runs at once; others wait there.
        seed: Of requests and victims.
    """

    num_clients: int = 200
    duration_s: float = 300.0
    disconnect_share: float = 0.1
    num_kills: int = 0
    num_ingress_kills: int = 0
    num_replicas: int = 2
    tensor_parallel_size: int = 1
    num_ingress_replicas: int = 2
    max_num_seqs: int = 96
    seed: int = 0


@dataclasses.dataclass(slots=True)
class LoadVerdict:
    """What came of it.

    Args:
        counts: Requests by their ends: "whole", "left", "cut off", "refused with 500".
        num_tokens: Output tokens that clients read of whole answers.
        seconds: How long it took.
        ttft_s: Time to the first text of each whole stream, in seconds.
        itl_s: Times between texts that were not written together, of all streams, in seconds.
        stall_s: The longest of them in each, in seconds.
        kills: Each kill and its times, in their order.
        rss_mb: Resident memory of proxy, ingresses and controller by name, at equal times.
        problems: What did not hold; empty where all did.
    """

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    num_tokens: int = 0
    seconds: float = 0.0
    ttft_s: list[float] = dataclasses.field(default_factory=list)
    itl_s: list[float] = dataclasses.field(default_factory=list)
    stall_s: list[float] = dataclasses.field(default_factory=list)
    kills: list[KillTimes] = dataclasses.field(default_factory=list)
    rss_mb: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def run_http_load(
    config: HttpLoadConfig, on_kill: Callable[[KillTimes], object] | None = None
) -> LoadVerdict:
    """Serve on a Ray cluster of its own, load it, kill parts of it, and look at what is left.

    Args:
        config: What is served, and what dies.
        on_kill: Called with each kill once what died serves again.

    Raises:
        DeploymentError: The endpoint cannot be started.
    """
    flags = {
        "name": f"load-{secrets.token_hex(3)}",
        "model.model": MODEL,
        "cache.num_blocks": 4096,
        "batch.max_num_seqs": config.max_num_seqs,
        "parallel.num_replicas": config.num_replicas,
        "parallel.tensor_parallel_size": config.tensor_parallel_size,
        # Kills follow each other so closely that pauses would be most of the run.
        "recovery.max_restart_delay_s": 0.0,
        "serve.num_ingress_replicas": config.num_ingress_replicas,
        "serve.drain_timeout_s": 30.0,
    }
    endpoint = load_config_as(EndpointConfig, flags=flags, environ={})
    with ray_endpoint(endpoint, "127.0.0.1", 0, None) as url:
        shell = RayShell(endpoint.deployment(), "auto", is_shared=True)
        killer = Killer(
            endpoint.name,
            shell,
            num_replicas=config.num_replicas,
            num_ingress_replicas=config.num_ingress_replicas,
            seed=config.seed,
            on_kill=on_kill,
        )
        run = _Load(config, url, shell, killer)
        try:
            asyncio.run(run.run())
        finally:
            shell.shutdown()
    return run.verdict


class _Load:
    """One run: the clients, and the killer beside them."""

    def __init__(self, config: HttpLoadConfig, url: str, shell: RayShell, killer: Killer) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._config = config
        self._shell = shell
        self._killer = killer
        self._cases: list[Case] = []
        self._is_over = False
        # Answers that only the death of an ingress explains.
        self._cut: list[tuple[str, Answer]] = []
        self.verdict = LoadVerdict()

    async def run(self) -> None:
        """Load until the time is over and there were all kills; then wait until all is idle."""
        config = self._config
        bodies = draw_bodies(random.Random(config.seed), _NUM_CASES)
        self._cases = await learn_cases(self._address, bodies)
        await self._shell.reset_cache()
        begin = time.monotonic()
        clients = [asyncio.create_task(self._serve(number)) for number in range(config.num_clients)]
        watching = asyncio.create_task(self._watch())
        await asyncio.gather(
            self._look_at_memory(),
            self._killer.kill_parts(config.num_kills, config.duration_s),
            self._killer.kill_ingresses(config.num_ingress_kills, config.duration_s),
        )
        self._is_over = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*clients)
        self.verdict.seconds = time.monotonic() - begin
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        kills = [*self._killer.kills, *self._killer.ingress_kills]
        self.verdict.kills = sorted(kills, key=lambda kill: kill.at)
        self._judge_cuts()
        await self._check_idle()

    # --- clients ----------------------------------------------------------------------------

    async def _serve(self, client: int) -> None:
        drawn = random.Random(self._config.seed * 10_000 + client)
        for turn in itertools.count():
            if self._is_over:
                return
            case = drawn.choice(self._cases)
            stream = drawn.random() < 0.8
            extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            leave_after = leave_after_s = None
            if leaves := drawn.random() < self._config.disconnect_share:
                # While it waits or is computed, at any time; or with so many events read.
                leave_after_s = drawn.random() * 2.0
                leave_after = drawn.randint(1, 20) if stream and drawn.random() < 0.5 else None
            begin = time.monotonic()
            answer = await complete(*self._address, case.body | extra, leave_after, leave_after_s)
            self._judge(f"{client}.{turn}", case, answer, leaves=leaves)
            if answer.is_whole:
                self._time(answer, begin)
            elif not leaves:
                await asyncio.sleep(_AGAIN_S)  # As a client that tries again.

    def _judge(self, name: str, case: Case, answer: Answer, *, leaves: bool) -> None:
        verdict = self.verdict
        problem = case.problem(answer)
        if problem is None and answer.is_whole and answer.num_tokens != case.num_tokens:
            problem = f"counts {answer.num_tokens} tokens, and undisturbed {case.num_tokens}"
        if problem is not None:
            self._complain(f"request {name} {problem}")
        if answer.is_whole:
            verdict.counts["whole"] += 1
            verdict.num_tokens += case.num_tokens
        elif leaves and answer.error is None:
            verdict.counts["left"] += 1
        else:
            is_refused = answer.status not in (None, 200)
            verdict.counts[f"refused with {answer.status}" if is_refused else "cut off"] += 1
            self._cut.append((name, answer))

    def _complain(self, problem: str) -> None:
        self.verdict.problems.append(problem[:400])

    def _time(self, answer: Answer, begin: float) -> None:
        times = answer.times_s
        if len(times) < 2:
            return
        for kill in (*self._killer.kills, *self._killer.ingress_kills):
            if times[0] < kill.at < times[-1]:
                kill.num_hit += 1
                kill.continue_s.append(next(at for at in times if at > kill.at) - kill.at)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        self.verdict.ttft_s.append(times[0] - begin)
        self.verdict.itl_s += gaps
        self.verdict.stall_s.append(max(gaps))

    def _judge_cuts(self) -> None:
        """Complain of what was cut off or refused, and no ingress has died shortly before."""
        for name, answer in self._cut:
            hits = [
                kill
                for kill in self._killer.ingress_kills
                if kill.at <= answer.ended_at_s <= kill.at + _CUT_AFTER_S
            ]
            if not hits:
                self._complain(f"request {name} failed ({answer.status}): {answer.error}")
                continue
            after_s = answer.ended_at_s - hits[-1].at
            detect_s = hits[-1].detect_s
            hits[-1].detect_s = after_s if detect_s is None else min(detect_s, after_s)

    # --- beside them ------------------------------------------------------------------------

    async def _watch(self) -> None:
        """See that no stream goes on elsewhere while nothing dies."""
        while not self._killer.kills:
            for report in await self._shell.owner_reports():
                moved = [one for one in report.running if one.num_recoveries]
                if moved and not self._killer.kills:
                    self._complain(f"{len(moved)} streams went on elsewhere, such as {moved[0]}")
                    return
            await asyncio.sleep(1.0)

    async def _look_at_memory(self) -> None:
        sizes = self.verdict.rss_mb
        for number in range(_NUM_MEMORY_LOOKS + 1):
            for name, size in (await asyncio.to_thread(resident_mb)).items():
                sizes.setdefault(name, []).append(size)
            if number < _NUM_MEMORY_LOOKS:
                await asyncio.sleep(self._config.duration_s / _NUM_MEMORY_LOOKS)

    async def _check_idle(self) -> None:
        """Wait until nothing is open and no block held, and see that none is missing."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = await self._killer.await_calm()
            ledgers = dict(await self._shell.accounting())
            held = {name: one.num_held_blocks for name, one in ledgers.items()}
            num_open = sum(len(report.running) for report in await self._shell.owner_reports())
            num_left = num_open + status.num_requests
            if not any(held.values()) and not num_left and len(held) == self._config.num_replicas:
                break
            if time.monotonic() > deadline:
                self._complain(
                    f"{num_open} requests are open at ingresses and {status.num_requests} at the "
                    f"controller, and blocks are held: {held}"
                )
                break
            await asyncio.sleep(LOOK_S)
        for name, one in ledgers.items():
            counted = one.num_free_blocks + one.num_cached_blocks + one.num_held_blocks
            if counted != one.num_blocks:
                self._complain(f"{name} accounts for {counted} of {one.num_blocks} blocks")


def as_fields(verdict: LoadVerdict) -> dict[str, Any]:
    """Return what is printed as JSON."""
    return {
        "num_requests": sum(verdict.counts.values()),
        "counts": dict(verdict.counts),
        "num_tokens": verdict.num_tokens,
        "tokens_per_s": round(verdict.num_tokens / verdict.seconds, 1),
        "ttft_s": quantiles(verdict.ttft_s),
        "itl_s": quantiles(verdict.itl_s),
        "stall_s": quantiles(verdict.stall_s),
        "kills": [str(kill) for kill in verdict.kills],
        "rss_mb": {name: [round(x) for x in sizes] for name, sizes in verdict.rss_mb.items()},
        "problems": verdict.problems,
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest of some values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 4),
        "max": round(ordered[-1], 4),
    }
