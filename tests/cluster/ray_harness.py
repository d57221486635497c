"""What the tests of the Ray shell share: small deployments, streams, and what is left behind."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from rayserve_cluster.launch import connect, disconnect
from rayserve_cluster.placement import actors_of, groups_of
from rayserve_paged.consumer_loop import ConsumerLoop
from rayserve_paged.core.config import (
    CacheConfig,
    DeploymentConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    TimeoutConfig,
)
from rayserve_paged.core.errors import NoReplicaError
from rayserve_paged.core.ids import Attempt, ConsumerId, RequestId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.deployment import Deployment

PATIENCE_S = 120.0
"""How long a condition may take on a busy machine; never what a test measures."""


def deployment_config(
    name: str,
    *,
    ranks: int = 1,
    replicas: int = 1,
    model: str = "fingerprint",
    keep_alive: bool = False,
    timeouts: dict[str, float] | None = None,
    restart: bool = True,
) -> DeploymentConfig:
    return DeploymentConfig(
        name=name,
        model=ModelConfig(model=model),
        cache=CacheConfig(block_size=16, num_blocks=256),
        parallel=ParallelConfig(tensor_parallel_size=ranks, num_replicas=replicas),
        timeouts=TimeoutConfig.model_validate(timeouts or {}),
        recovery=RecoveryConfig(restart=restart),
        keep_alive=keep_alive,
    )


def request(name: str, prompt: Sequence[int], max_tokens: int, consumer: str = "reader") -> Request:
    return Request(
        request_id=RequestId(name),
        consumer_id=ConsumerId(consumer),
        attempt=Attempt(0),
        prompt_token_ids=TokenIds.of(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0),
    )


def prompts(count: int) -> list[list[int]]:
    """Prompts of several lengths; every other one shares its first 40 tokens."""
    shared = [(7 * place) % 900 for place in range(40)]
    own = [[(index + 3) * place % 900 for place in range(5 + 9 * index)] for index in range(count)]
    return [shared + tail if index % 2 else tail for index, tail in enumerate(own)]


async def read_all(
    deployment: Deployment, requests: Sequence[Request], consumer: str = "reader"
) -> list[list[StreamUpdate]]:
    """Stream requests of one consumer side by side, each to its end."""
    loop = ConsumerLoop(deployment, ConsumerId(consumer))

    async def read(one: Request) -> list[StreamUpdate]:
        updates: list[StreamUpdate] = []
        try:
            async for update in loop.stream(one):
                updates.append(update)  # noqa: PERF401 (what came before an error is kept)
        except NoReplicaError as error:
            end = (one.request_id, 0, None, (), (), 0, FinishReason.ERROR, str(error))
            updates.append(StreamUpdate(*end))
        return updates

    try:
        return list(await asyncio.gather(*map(read, requests)))
    finally:
        await loop.close()


async def read_all_after(
    deployment: Deployment, requests: Sequence[Request], act: Callable[[], object]
) -> list[list[StreamUpdate]]:
    """Stream requests to their ends, and do something once the first of them is served."""
    reading = asyncio.create_task(read_all(deployment, requests))
    while not any(ledger.unique_live_tokens for _, ledger in await deployment.accounting()):
        await asyncio.sleep(0.01)
    act()
    return await reading


def undisturbed(requests: Sequence[Request]) -> list[list[int]]:
    """What requests give on one rank in this process, where nothing happens to them."""
    from rayserve_paged.inprocess import InProcessShell  # Takes seconds, and drivers import this.

    oracle = InProcessShell(deployment_config("oracle"))
    try:
        return [tokens(updates) for updates in asyncio.run(read_all(oracle, requests))]
    finally:
        oracle.shutdown()


def tokens(updates: Sequence[StreamUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.02)


def holdings(deployment: str) -> list[str]:
    """Actors and placement groups of a deployment on the connected cluster."""
    return [*actors_of(deployment), *groups_of(deployment)]


def environment() -> dict[str, str]:
    """Environment of a driver in a process of its own, which imports what this one does.

    Nothing that this process told its own Ray is in it.
    """
    fresh = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_"))}
    roots = [str(Path(__file__).parents[2] / root) for root in ("", "kernels", "cluster")]
    return {**fresh, "PYTHONPATH": os.pathsep.join([*roots, str(Path(__file__).parent)])}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster that the tests of one file join; gives its address."""
    connection = connect("tests", None)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        disconnect(connection)
