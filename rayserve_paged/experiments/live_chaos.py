"""Live chaos: ranks and controllers of a deployment on Ray are killed while it serves.

Requests come one after the other on a number of streams, and each is compared with what it gives
undisturbed. On the fingerprint model that is computed from its tokens alone; any other model
serves every prompt once before the first kill.
"""

import asyncio
import dataclasses
import itertools
import os
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

from rayserve_cluster.controller_actor import ControllerStatus
from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.consumer_loop import ConsumerLoop
from rayserve_paged.core.config import (
    CacheConfig,
    DeploymentConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
)
from rayserve_paged.core.errors import ControllerAwayError, PagedError
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.experiments.kill_times import KillTimes
from rayserve_paged.experiments.leftovers import leftovers, take_stock

_BLOCK_SIZE: Final = 16
_NUM_BLOCKS: Final = 512
_NUM_PROMPTS: Final = 12
_SHARED_LEN: Final = 64
_LOOK_S: Final = 0.02
_PATIENCE_S: Final = 180.0
"""How long anything may take that must come; never what is measured."""
_CALM_S: Final = 1.0
"""How long all replicas serve before the next kill."""
_FINGERPRINT: Final = "fingerprint"


@dataclasses.dataclass(frozen=True, slots=True)
class LiveChaosConfig:
    """What is killed while what is served.

    Args:
        model: Its name, or the path of a model.
        num_kills: Kills, one after the other.
        kill_controller_every: Every so many-th kill is that of the controller; 0 for none.
        num_streams: Requests that are open at a time.
        num_replicas: Replicas.
        tensor_parallel_size: Ranks of each.
        seed: Of victims, signals and requests.
        address: A Ray cluster to join; None to start one.
    """

    model: str = _FINGERPRINT
    num_kills: int = 20
    kill_controller_every: int = 0
    num_streams: int = 6
    num_replicas: int = 2
    tensor_parallel_size: int = 2
    seed: int = 0
    address: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LiveVerdict:
    """What came of it.

    Args:
        kills: Each kill and its times.
        num_requests: Requests that were served.
        num_tokens: Their output tokens.
        num_recovered: Requests that were open on a replica when it was killed.
        problems: What did not hold; empty where all did.
    """

    kills: tuple[KillTimes, ...]
    num_requests: int
    num_tokens: int
    num_recovered: int
    problems: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that is being read: where its last tokens came from, and when.

    Args:
        replica_id: Who serves it, as far as is known.
        token_ids: Its tokens so far.
        hit: The kill that its replica died of, until it goes on.
    """

    replica_id: ReplicaId | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    hit: KillTimes | None = None


def run_live_chaos(
    config: LiveChaosConfig, on_kill: Callable[[KillTimes], object] | None = None
) -> LiveVerdict:
    """Start a deployment, kill parts of it while it serves, and look at what is left.

    Args:
        config: What is killed while what is served.
        on_kill: Called with each kill once all replicas serve again.

    Raises:
        InvalidInputError: The model, or a number, is not accepted.
        DeploymentError: The deployment cannot be started.
    """
    before = take_stock()
    own = DeploymentConfig(
        name=f"chaos-{secrets.token_hex(3)}",
        model=ModelConfig(model=config.model),
        cache=CacheConfig(block_size=_BLOCK_SIZE, num_blocks=_NUM_BLOCKS),
        parallel=ParallelConfig(
            tensor_parallel_size=config.tensor_parallel_size, num_replicas=config.num_replicas
        ),
        # Kills follow each other so closely that the pauses of a crash loop would be most of the
        # run, and the time to serve again would say little of the restart.
        recovery=RecoveryConfig(max_restart_delay_s=0.0),
    )
    shell = RayShell(own, config.address)
    run = _Run(config, shell, on_kill)
    try:
        asyncio.run(run.run())
    finally:
        shell.shutdown()
    left = leftovers(before, run.pids, owns_cluster=config.address is None)
    if left is not None:
        run.problems.append(left)
    return LiveVerdict(
        tuple(run.kills),
        run.num_requests,
        run.num_tokens,
        sum(kill.num_hit for kill in run.kills),
        tuple(run.problems),
    )


class _Run:
    """One run: the streams, and the killer beside them."""

    def __init__(
        self,
        config: LiveChaosConfig,
        shell: RayShell,
        on_kill: Callable[[KillTimes], object] | None,
    ) -> None:
        self._config = config
        self._on_kill = on_kill
        self._shell = shell
        self._drawn = random.Random(config.seed)
        self._consumer_id = ConsumerId(f"chaos-{secrets.token_hex(3)}")
        self._loop = ConsumerLoop(shell, self._consumer_id)
        self._prompts = self._draw_prompts()
        self._expected: dict[int, Sequence[int]] = {}
        self._open: dict[RequestId, _Open] = {}
        self._is_over = False
        self.kills: list[KillTimes] = []
        self.problems: list[str] = []
        self.num_requests = 0
        self.num_tokens = 0
        self.pids: set[int] = set()

    def _draw_prompts(self) -> list[tuple[TokenIds, int]]:
        """Draw prompts and the lengths of their outputs; every other one shares its beginning."""
        vocab_size = self._shell.limits.vocab_size
        # The first ids of real models are for special tokens.
        draw = self._drawn.randrange
        shared = [draw(vocab_size // 2, vocab_size) for _ in range(_SHARED_LEN)]
        prompts = []
        for number in range(_NUM_PROMPTS):
            tail = [draw(vocab_size // 2, vocab_size) for _ in range(draw(1, 60))]
            ids = shared + tail if number % 2 else tail
            prompts.append((TokenIds.of(ids, vocab_size), draw(60, 300)))
        return prompts

    async def run(self) -> None:
        """Serve and kill, until there were all kills and every stream has ended."""
        try:
            await self._learn()
            # None waits for the fault-free run's blocks.
            await self._shell.reset_cache()
            self.num_requests = self.num_tokens = 0
            streams = [
                asyncio.create_task(self._serve(number))
                for number in range(self._config.num_streams)
            ]
            killer = asyncio.create_task(self._kill_all())
            # A stream ends before only where it fails.
            await asyncio.wait({killer, *streams}, return_when="FIRST_COMPLETED")
            self._is_over = True
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.gather(killer, *streams)
            await self._check_ledgers()
        finally:
            await self._loop.close()

    async def _learn(self) -> None:
        """Find out what each prompt gives undisturbed."""
        if self._config.model == _FINGERPRINT:
            from rayserve_paged.model.fingerprint import oracle

            for number, (prompt, num_tokens) in enumerate(self._prompts):
                self._expected[number] = oracle(prompt, num_tokens)
            return
        numbers = range(len(self._prompts))
        streams = await asyncio.gather(*(self._read(number, "alone") for number in numbers))
        self._expected = dict(zip(numbers, streams, strict=True))

    async def _serve(self, stream: int) -> None:
        """Serve requests one after the other until it is over."""
        drawn = random.Random(self._config.seed * 1000 + stream)
        for turn in itertools.count():
            if self._is_over:
                return
            number = drawn.randrange(_NUM_PROMPTS)
            name = f"{stream}.{turn}"
            try:
                token_ids = await self._read(number, name)
            except PagedError as error:
                self.problems.append(f"request {name} failed: {error}")
                continue
            if list(token_ids) != list(self._expected[number]):
                self.problems.append(
                    f"request {name} gave {token_ids}, and undisturbed {self._expected[number]}"
                )

    async def _read(self, number: int, name: str) -> list[int]:
        """Serve one prompt to its end.

        Raises:
            PagedError: It failed.
        """
        prompt, num_tokens = self._prompts[number]
        request = Request(
            request_id=RequestId(f"{self._consumer_id}-{name}-{number}"),
            consumer_id=self._consumer_id,
            attempt=Attempt(0),
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=num_tokens, temperature=0.0, seed=number, ignore_eos=True
            ),
        )
        state = self._open[request.request_id] = _Open()
        try:
            async for update in self._loop.stream(request):
                state.token_ids += update.token_ids
                state.replica_id = update.replica_id
                if update.token_ids and state.hit is not None:
                    self._note_going_on(state, state.hit)
                if update.finish not in (None, FinishReason.LENGTH):
                    self.problems.append(f"request {name} ended with {update.finish}")
        finally:
            del self._open[request.request_id]
        self.num_requests += 1
        self.num_tokens += len(state.token_ids)
        return state.token_ids

    def _note_going_on(self, state: _Open, kill: KillTimes) -> None:
        # Until its death was noticed, what was on its way still comes.
        if kill.detect_s is not None:
            kill.continue_s.append(time.monotonic() - kill.at)
            state.hit = None

    # --- the killer -----------------------------------------------------------------------

    async def _kill_all(self) -> None:
        every = self._config.kill_controller_every
        status = await self._await_calm()
        for number in range(1, self._config.num_kills + 1):
            if every and number % every == 0:
                await self._kill_controller(status)
            else:
                await self._kill_rank(status)
            status = await self._await_calm()
            if self._on_kill is not None:
                self._on_kill(self.kills[-1])
        # All that were hit go on, or end, before the load does.
        async with asyncio.timeout(_PATIENCE_S):
            while any(state.hit is not None for state in self._open.values()):
                await asyncio.sleep(_LOOK_S)

    async def _await_calm(self) -> ControllerStatus:
        """Wait until all replicas have been there for a while, and some request is served."""
        since = time.monotonic()
        async for status in self._statuses():
            if len(status.replicas) < self._config.num_replicas or not self._serving():
                since = time.monotonic()
            elif time.monotonic() - since >= _CALM_S:
                return status
        raise AssertionError("statuses do not end")

    def _serving(self) -> set[ReplicaId]:
        """Return the replicas from which tokens of an open request have come."""
        states = self._open.values()
        return {state.replica_id for state in states if state.replica_id is not None}

    async def _statuses(self) -> AsyncIterator[ControllerStatus]:
        """Yield what the controller says, again and again.

        Raises:
            TimeoutError: Whoever waits for something has waited for too long.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                status = await self._shell.status()
            except ControllerAwayError:
                await asyncio.sleep(_LOOK_S)
                continue
            self.pids.add(status.pid)
            yield status
            await asyncio.sleep(_LOOK_S)
        raise TimeoutError(f"what is waited for has not come in {_PATIENCE_S:g} s")

    async def _kill_rank(self, status: ControllerStatus) -> None:
        ranks = (await self._shell.stats()).ranks
        self.pids.update(rank.pid for rank in ranks)
        serving = self._serving()
        victims = sorted(
            (rank for rank in ranks if rank.replica_id in serving),
            key=lambda rank: (rank.replica_id, rank.rank),
        )
        victim = self._drawn.choice(victims or ranks)
        sent = self._drawn.choice((signal.SIGKILL, signal.SIGSTOP))
        replica_id = victim.replica_id
        hit = [state for state in self._open.values() if state.replica_id == replica_id]
        kill = KillTimes(
            what=f"{sent.name} of rank {victim.rank} of {replica_id}",
            at=time.monotonic(),
            num_hit=len(hit),
        )
        self.kills.append(kill)
        os.kill(victim.pid, sent)
        for state in hit:
            state.hit = kill
        await self._await_next_life(kill, replica_id, status.replicas)

    async def _await_next_life(
        self, kill: KillTimes, replica_id: ReplicaId, lives: Mapping[ReplicaId, Incarnation]
    ) -> None:
        killed = lives[replica_id]
        async for status in self._statuses():
            incarnation = status.replicas.get(replica_id)
            if incarnation != killed and kill.detect_s is None:
                kill.detect_s = time.monotonic() - kill.at
            if incarnation is not None and incarnation > killed:
                kill.restart_s = time.monotonic() - kill.at
                return

    async def _kill_controller(self, status: ControllerStatus) -> None:
        kill = KillTimes(what="SIGKILL of the controller", at=time.monotonic(), num_hit=0)
        self.kills.append(kill)
        os.kill(status.pid, signal.SIGKILL)
        async for after in self._statuses():
            if after.term > status.term:
                kill.detect_s = kill.restart_s = time.monotonic() - kill.at
                if dict(after.replicas) != dict(status.replicas):
                    continue  # It still waits for their inventories.
                kill.continue_s.append(time.monotonic() - kill.at)
                return

    # --- the end --------------------------------------------------------------------------

    async def _check_ledgers(self) -> None:
        """Wait until no block is held, and see that none is missing."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            ledgers = dict(await self._shell.accounting())
            held = {name: one.num_held_blocks for name, one in ledgers.items()}
            if not any(held.values()) and len(held) == self._config.num_replicas:
                break
            if time.monotonic() > deadline:
                self.problems.append(f"blocks are still held: {held}")
                break
            await asyncio.sleep(_LOOK_S)
        for name, one in ledgers.items():
            counted = one.num_free_blocks + one.num_cached_blocks + one.num_held_blocks
            if counted != one.num_blocks:
                self.problems.append(f"{name} accounts for {counted} of {one.num_blocks} blocks")
