"""Kills of parts of an endpoint on Ray Serve: ranks, replicas, controller, ingresses."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil
from ray import serve

from rayserve_cluster.controller_actor import ControllerStatus
from rayserve_cluster.ray_shell import RayShell
from rayserve_cluster.worker import RankStats
from rayserve_paged.core.errors import ControllerAwayError
from rayserve_paged.experiments.kill_times import KillTimes

PATIENCE_S: Final = 180.0
"""How long anything may take that must come; never what is measured."""
LOOK_S: Final = 0.05

_CALM_S: Final = 1.0
_VICTIMS: Final = ("rank", "replica", "rank", "controller")
_INGRESS_PROCESS: Final = "ServeReplica"


class Killer:
    """Kills parts of an endpoint one after the other, each once what died before serves again.

    Args:
        application: Of the endpoint.
        shell: Of its deployment.
        num_replicas: Of the deployment.
        num_ingress_replicas: Of the endpoint.
        seed: Of the victims.
        on_kill: Called with each kill once what died serves again.
    """

    def __init__(
        self,
        application: str,
        shell: RayShell,
        *,
        num_replicas: int,
        num_ingress_replicas: int,
        seed: int,
        on_kill: Callable[[KillTimes], object] | None = None,
    ) -> None:
        self._application = application
        self._shell = shell
        self._num_replicas = num_replicas
        self._num_ingress_replicas = num_ingress_replicas
        self._seed = seed
        self._on_kill = on_kill
        self.kills: list[KillTimes] = []
        self.ingress_kills: list[KillTimes] = []

    async def kill_parts(self, num_kills: int, duration_s: float) -> None:
        """Kill ranks, replicas and the controller in turn, spread over a time.

        Raises:
            TimeoutError: Something does not come back.
        """
        drawn = random.Random(self._seed)
        for number in range(num_kills):
            await asyncio.sleep(duration_s / (num_kills + 1))
            status = await self.await_calm()
            victim = _VICTIMS[number % len(_VICTIMS)]
            if victim == "controller":
                kill = await self._kill_controller(status)
            else:
                ranks = sorted(
                    (await self._shell.stats()).ranks, key=lambda one: (one.replica_id, one.rank)
                )
                kill = await self._kill_ranks(status, ranks, drawn.choice(ranks), victim)
            self._told(kill)

    async def kill_ingresses(self, num_kills: int, duration_s: float) -> None:
        """Kill ingress replicas, spread over a time.

        Raises:
            TimeoutError: One does not come back.
        """
        drawn = random.Random(self._seed + 1)
        for _ in range(num_kills):
            await asyncio.sleep(duration_s / (num_kills + 1))
            await self.await_ingresses()
            victim = drawn.choice(sorted(ingress_pids()))
            kill = KillTimes("SIGKILL of an ingress", time.monotonic(), 0)
            self.ingress_kills.append(kill)
            _kill(victim)
            await self.await_ingresses(without=victim)
            kill.restart_s = time.monotonic() - kill.at
            self._told(kill)

    def _told(self, kill: KillTimes) -> None:
        if self._on_kill is not None:
            self._on_kill(kill)

    async def _kill_ranks(
        self,
        status: ControllerStatus,
        ranks: Sequence[RankStats],
        victim: RankStats,
        kind: str,
    ) -> KillTimes:
        replica_id = victim.replica_id
        what = f"rank {victim.rank}" if kind == "rank" else "all ranks"
        kill = KillTimes(f"SIGKILL of {what} of {replica_id}", time.monotonic(), 0)
        self.kills.append(kill)
        gang = [one for one in ranks if one.replica_id == replica_id]
        for one in [victim] if kind == "rank" else gang:
            _kill(one.pid)
        killed = status.replicas[replica_id]
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            now = await self.status()
            life = None if now is None else now.replicas.get(replica_id)
            if now is not None and life != killed and kill.detect_s is None:
                kill.detect_s = time.monotonic() - kill.at
            if life is not None and life > killed:
                kill.restart_s = time.monotonic() - kill.at
                return kill
            await asyncio.sleep(LOOK_S)
        raise TimeoutError(f"{replica_id} does not come back")

    async def _kill_controller(self, status: ControllerStatus) -> KillTimes:
        kill = KillTimes("SIGKILL of the controller", time.monotonic(), 0)
        self.kills.append(kill)
        _kill(status.pid)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            now = await self.status()
            if now is not None and now.term > status.term:
                if kill.detect_s is None:
                    kill.detect_s = time.monotonic() - kill.at
                if dict(now.replicas) == dict(status.replicas):
                    kill.restart_s = time.monotonic() - kill.at
                    return kill
            await asyncio.sleep(LOOK_S)
        raise TimeoutError("the controller does not come back")

    async def status(self) -> ControllerStatus | None:
        """Return what the controller says of itself; None while there is none."""
        try:
            return await self._shell.status()
        except ControllerAwayError:
            return None

    async def await_calm(self) -> ControllerStatus:
        """Wait until all replicas have been there for a while.

        Raises:
            TimeoutError: They do not come.
        """
        since = begin = time.monotonic()
        while time.monotonic() - begin < PATIENCE_S:
            status = await self.status()
            if status is None or len(status.replicas) < self._num_replicas:
                since = time.monotonic()
            elif time.monotonic() - since >= _CALM_S:
                return status
            await asyncio.sleep(LOOK_S)
        raise TimeoutError("replicas do not come back")

    async def await_ingresses(self, without: int | None = None) -> None:
        """Wait until Ray Serve has all ingress replicas.

        Args:
            without: A process that is not to be one of them any more.

        Raises:
            TimeoutError: They do not come.
        """
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pids = ingress_pids()
            if without not in pids and len(pids) >= self._num_ingress_replicas:
                num_running = await asyncio.to_thread(self._num_running_ingresses)
                if num_running == self._num_ingress_replicas:
                    return
            await asyncio.sleep(LOOK_S)
        raise TimeoutError("an ingress does not come back")

    def _num_running_ingresses(self) -> int:
        application = serve.status().applications[self._application]
        return sum(
            count
            for deployment in application.deployments.values()
            for state, count in deployment.replica_states.items()
            if state == "RUNNING"
        )


def ingress_pids() -> set[int]:
    """Return the processes of ingress replicas below this one."""
    return set(_processes(_INGRESS_PROCESS))


def resident_mb() -> dict[str, float]:
    """Return the resident memory of proxies, ingresses and controller below this process."""
    sizes: dict[str, float] = {}
    for part in ("ProxyActor", _INGRESS_PROCESS, "ControllerActor"):
        sizes[part] = 0.0
        for process in _processes(part).values():
            with contextlib.suppress(psutil.Error):  # It has ended meanwhile.
                sizes[part] += process.memory_info().rss / 2**20
    return sizes


def _processes(title: str) -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if title in (" ".join(process.cmdline()) or process.name()):
                found[process.pid] = process
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
