"""Load over HTTP: many clients of an endpoint on Ray, of which some leave, while processes die.

The fingerprint model's outputs are known from the prompt alone, so every stream is compared with
what it gives undisturbed: one that says that it is whole has to be right, and one that was cut off
has to be a beginning, and must not look whole.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import secrets
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import psutil

from rayserve_cluster.controller_actor import ControllerStatus
from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.core.errors import ControllerAwayError
from rayserve_paged.experiments.http_client import Answer, complete
from rayserve_paged.experiments.kill_times import KillTimes
from rayserve_paged.load_config import load_config_as
from rayserve_paged.model.fingerprint import oracle
from rayserve_paged.model.tokenizer import ByteTokenizer
from rayserve_paged.serve.endpoint import ray_endpoint
from rayserve_paged.serve.serve_config import EndpointConfig

_MODEL: Final = "fingerprint"
_VOCAB_SIZE: Final = 1000
_NUM_PROMPTS: Final = 40
_SHARED_LEN: Final = 64
_PATIENCE_S: Final = 180.0
"""How long anything may take that must come; never what is measured."""
_LOOK_S: Final = 0.05
_CALM_S: Final = 1.0
_VICTIMS: Final = ("rank", "replica", "rank", "controller")


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
    seed: int = 0


@dataclasses.dataclass(slots=True)
class LoadVerdict:
    """What came of it.

    Args:
        counts: Requests by their ends: "whole", "left", "cut off", "refused".
        num_tokens: Output tokens that clients read of whole answers.
        seconds: How long it took.
        ttft_s: Time to the first text of each whole stream, in seconds.
        itl_s: Median time between the events of each, in seconds.
        stall_s: Longest time between two events of each, in seconds.
        kills: Each kill and its times.
        rss_mb: Resident memory of proxy, ingresses and controller before and after, by name.
        problems: What did not hold; empty where all did.
    """

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    num_tokens: int = 0
    seconds: float = 0.0
    ttft_s: list[float] = dataclasses.field(default_factory=list)
    itl_s: list[float] = dataclasses.field(default_factory=list)
    stall_s: list[float] = dataclasses.field(default_factory=list)
    kills: list[KillTimes] = dataclasses.field(default_factory=list)
    rss_mb: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
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
        "model.model": _MODEL,
        "cache.num_blocks": 4096,
        "batch.max_num_seqs": 256,
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
        run = _Load(config, url, shell, on_kill)
        try:
            asyncio.run(run.run())
        finally:
            shell.shutdown()
    return run.verdict


class _Load:
    """One run: the clients, and the killer beside them."""

    def __init__(
        self,
        config: HttpLoadConfig,
        url: str,
        shell: RayShell,
        on_kill: Callable[[KillTimes], object] | None,
    ) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._config = config
        self._shell = shell
        self._on_kill = on_kill
        self._drawn = random.Random(config.seed)
        self._cases = self._draw_cases()
        self._is_over = False
        self.verdict = LoadVerdict()

    def _draw_cases(self) -> list[tuple[list[int], int, str]]:
        """Draw prompts, lengths and texts; every other prompt shares its beginning."""
        draw, tokenizer = self._drawn.randrange, ByteTokenizer(_VOCAB_SIZE)
        shared = [draw(_VOCAB_SIZE) for _ in range(_SHARED_LEN)]
        cases = []
        for number in range(_NUM_PROMPTS):
            tail = [draw(_VOCAB_SIZE) for _ in range(draw(1, 80))]
            ids = shared + tail if number % 2 else tail
            num_tokens = draw(20, 240)
            cases.append((ids, num_tokens, tokenizer.decode(oracle(ids, num_tokens))))
        return cases

    async def run(self) -> None:
        """Load until the time is over and there were all kills; then wait until all is idle."""
        before = self._memory()
        begin = time.monotonic()
        clients = [
            asyncio.create_task(self._serve(number)) for number in range(self._config.num_clients)
        ]
        killers = [
            asyncio.create_task(self._kill_all()),
            asyncio.create_task(self._kill_ingresses()),
        ]
        await asyncio.sleep(self._config.duration_s)
        await asyncio.gather(*killers)
        self._is_over = True
        async with asyncio.timeout(_PATIENCE_S):
            await asyncio.gather(*clients)
        self.verdict.seconds = time.monotonic() - begin
        await self._check_idle()
        after = self._memory()
        self.verdict.rss_mb = {
            name: (before.get(name, 0.0), after.get(name, 0.0)) for name in before | after
        }

    # --- clients ----------------------------------------------------------------------------

    async def _serve(self, client: int) -> None:
        drawn = random.Random(self._config.seed * 10_000 + client)
        for turn in itertools.count():
            if self._is_over:
                return
            ids, num_tokens, text = drawn.choice(self._cases)
            num_samples = drawn.choice((1, 1, 1, 2))
            body = {
                "model": _MODEL,
                "prompt": ids,
                "max_tokens": num_tokens,
                "temperature": 0,
                "n": num_samples,
                "stream": drawn.random() < 0.8,
            }
            leaves = drawn.random() < self._config.disconnect_share
            leave_after = drawn.randrange(30) if leaves else None
            begin = time.monotonic()
            answer = await complete(*self._address, body, leave_after)
            name = f"{client}.{turn}"
            self._judge(name, answer, [text] * num_samples, leaves=leave_after is not None)
            if answer.is_whole:
                self.verdict.num_tokens += num_tokens * num_samples
                self._time(answer, begin)
            elif leave_after is None:
                await asyncio.sleep(0.2)  # As a client that tries again.

    def _judge(self, name: str, answer: Answer, texts: Sequence[str], *, leaves: bool) -> None:
        counts = self.verdict.counts
        if answer.is_whole:
            counts["whole"] += 1
            found = [answer.texts.get(index) for index in range(len(texts))]
            if found != list(texts):
                self._complain(f"request {name} gave {found}, and undisturbed {texts}")
            if set(answer.reasons.values()) != {"length"}:
                self._complain(f"request {name} ended with {answer.reasons}")
            return
        if leaves:
            counts["left"] += 1
        elif answer.status is not None and answer.status != 200:
            counts[f"refused with {answer.status}"] += 1
        else:
            counts["cut off"] += 1
            if not self._config.num_ingress_kills:
                self._complain(f"request {name} was cut off: {answer.error}")
        for index, text in answer.texts.items():
            if not texts[index].startswith(text):
                self._complain(f"request {name} gave {text!r}, and undisturbed {texts[index]!r}")

    def _complain(self, problem: str) -> None:
        self.verdict.problems.append(problem[:400])

    def _time(self, answer: Answer, begin: float) -> None:
        times = answer.times_s
        if len(times) < 3:
            return
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        self.verdict.ttft_s.append(times[0] - begin)
        self.verdict.itl_s.append(statistics.median(gaps))
        self.verdict.stall_s.append(max(gaps))

    # --- killers ----------------------------------------------------------------------------

    async def _kill_all(self) -> None:
        pause_s = self._config.duration_s / (self._config.num_kills + 1)
        for number in range(self._config.num_kills):
            await asyncio.sleep(pause_s)
            status = await self._await_calm()
            victim = _VICTIMS[number % len(_VICTIMS)]
            if victim == "controller":
                await self._kill_controller(status)
            else:
                await self._kill_ranks(status, whole=victim == "replica")
            if self._on_kill is not None:
                self._on_kill(self.verdict.kills[-1])

    async def _kill_ranks(self, status: ControllerStatus, *, whole: bool) -> None:
        ranks = sorted(
            (await self._shell.stats()).ranks, key=lambda one: (one.replica_id, one.rank)
        )
        victim = self._drawn.choice(ranks)
        gang = [one for one in ranks if one.replica_id == victim.replica_id]
        what = f"all ranks of {victim.replica_id}" if whole else f"rank {victim.rank}"
        kill = KillTimes(f"SIGKILL of {what} of {victim.replica_id}", time.monotonic(), 0)
        if whole:
            kill.what = f"SIGKILL of {what}"
        self.verdict.kills.append(kill)
        for one in gang if whole else [victim]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        killed = status.replicas[victim.replica_id]
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            now = await self._status()
            life = None if now is None else now.replicas.get(victim.replica_id)
            if now is not None and life != killed and kill.detect_s is None:
                kill.detect_s = time.monotonic() - kill.at
            if life is not None and life > killed:
                kill.restart_s = time.monotonic() - kill.at
                return
            await asyncio.sleep(_LOOK_S)
        self._complain(f"{victim.replica_id} does not come back")

    async def _kill_controller(self, status: ControllerStatus) -> None:
        kill = KillTimes("SIGKILL of the controller", time.monotonic(), 0)
        self.verdict.kills.append(kill)
        os.kill(status.pid, signal.SIGKILL)
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            now = await self._status()
            if now is not None and now.term > status.term:
                kill.detect_s = time.monotonic() - kill.at
                if dict(now.replicas) == dict(status.replicas):
                    kill.restart_s = time.monotonic() - kill.at
                    return
            await asyncio.sleep(_LOOK_S)
        self._complain("the controller does not come back")

    async def _kill_ingresses(self) -> None:
        count = self._config.num_ingress_kills
        pause_s = self._config.duration_s / (count + 1)
        for _ in range(count):
            await asyncio.sleep(pause_s)
            await self._await_ingresses()
            victim = self._drawn.choice(sorted(_ingress_pids()))
            kill = KillTimes("SIGKILL of an ingress", time.monotonic(), 0)
            self.verdict.kills.append(kill)
            os.kill(victim, signal.SIGKILL)
            await self._await_ingresses()
            kill.restart_s = time.monotonic() - kill.at
            if self._on_kill is not None:
                self._on_kill(kill)

    async def _await_ingresses(self) -> None:
        """Wait until all ingress replicas have told the controller that they are there."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if len(_ingress_pids()) >= self._config.num_ingress_replicas:
                return
            await asyncio.sleep(_LOOK_S)
        self._complain("an ingress does not come back")

    async def _await_calm(self) -> ControllerStatus:
        """Wait until all replicas have been there for a while.

        Raises:
            TimeoutError: They do not come.
        """
        since = begin = time.monotonic()
        while time.monotonic() - begin < _PATIENCE_S:
            status = await self._status()
            if status is None or len(status.replicas) < self._config.num_replicas:
                since = time.monotonic()
            elif time.monotonic() - since >= _CALM_S:
                return status
            await asyncio.sleep(_LOOK_S)
        raise TimeoutError("replicas do not come back")

    async def _status(self) -> ControllerStatus | None:
        try:
            return await self._shell.status()
        except ControllerAwayError:
            return None

    # --- the end ----------------------------------------------------------------------------

    async def _check_idle(self) -> None:
        """Wait until nothing is open and no block held, and see that none is missing."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            await self._await_calm()
            ledgers = dict(await self._shell.accounting())
            held = {name: one.num_held_blocks for name, one in ledgers.items()}
            num_open = sum(len(report.running) for report in await self._shell.owner_reports())
            if not any(held.values()) and not num_open and len(held) == self._config.num_replicas:
                break
            if time.monotonic() > deadline:
                self._complain(f"{num_open} requests are open and blocks are held: {held}")
                break
            await asyncio.sleep(_LOOK_S)
        for name, one in ledgers.items():
            counted = one.num_free_blocks + one.num_cached_blocks + one.num_held_blocks
            if counted != one.num_blocks:
                self._complain(f"{name} accounts for {counted} of {one.num_blocks} blocks")

    def _memory(self) -> dict[str, float]:
        sizes: Counter[str] = Counter()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = _title(process)
                for part in ("ProxyActor", "ServeReplica", "ControllerActor"):
                    if part in title:
                        sizes[part] += process.memory_info().rss
        return {name: size / 2**20 for name, size in sizes.items()}


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()) or process.name()


def _ingress_pids() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in _title(process):
                found.add(process.pid)
    return found


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
        "rss_mb": {name: [round(x) for x in pair] for name, pair in verdict.rss_mb.items()},
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
