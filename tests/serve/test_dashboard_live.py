"""The dashboard's figures of a live deployment: who holds what, how far each is, what happened."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import pytest

from rayserve_paged import RequestOptions, SamplingParams
from rayserve_paged.core.cluster_view import ClusterView
from rayserve_paged.core.config import (
    CacheConfig,
    DeploymentConfig,
    ModelConfig,
    ParallelConfig,
    TimeoutConfig,
)
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.running_request import RequestStage
from rayserve_paged.front_end import FrontEnd
from rayserve_paged.inprocess import InProcessShell
from rayserve_paged.model.tokenizer import ByteTokenizer
from rayserve_paged.serve.dashboard_state import Reader, Totals, cell_state, dashboard_state

READER = Reader("", sees_all=True)
CONFIG = DeploymentConfig(
    model=ModelConfig(model="fingerprint"),
    cache=CacheConfig(block_size=4, num_blocks=1024),
    parallel=ParallelConfig(num_replicas=2),
    timeouts=TimeoutConfig(poll_timeout_s=0.2),
)


@pytest.fixture
def shell() -> Iterator[InProcessShell]:
    shell = InProcessShell(CONFIG)
    yield shell
    shell.shutdown()


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30.0):
        while not await is_so():
            await asyncio.sleep(0.01)


async def holders(
    shell: InProcessShell, front_end: FrontEnd, replica: ReplicaId
) -> tuple[set[str], ClusterView]:
    """Return who holds a block of the replica, and the view in which it was found."""
    view = await shell.cluster_view()
    (blocks,) = [each.blocks for each in view.replicas if each.replica_id == replica]
    at = (replica, blocks.cells.index("#"))
    cell = cell_state(await shell.cluster_view(at), front_end.running(), reader=READER)
    assert cell is not None
    assert cell.replica == replica
    return {holder.name for holder in cell.holders}, view


def test_a_live_request_is_named_at_its_blocks_and_its_recovery_is_told(
    shell: InProcessShell,
) -> None:
    async def test() -> None:
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        params = SamplingParams(max_tokens=3900, temperature=0.0, ignore_eos=True)
        options = RequestOptions(request_id="mine")
        job = front_end.prepare(list(range(1, 40)), params, options, streaming=True)
        assert front_end.running() == ()
        async with contextlib.aclosing(front_end.stream(job)) as chunks:
            await anext(chunks)
            (request,) = front_end.running()
            assert (request.name, request.stage) == ("mine", RequestStage.DECODE)
            assert request.num_prompt_tokens == 39
            assert 0 < request.num_output_tokens <= 3900
            assert request.max_output_tokens == 3900
            assert request.age_s > 0
            replica = ReplicaId(request.replica or "")
            names, view = await holders(shell, front_end, replica)
            assert names == {"mine"}
            assert [each.replica_id for each in view.replicas] == ["r0", "r1"]
            shell.kill_replica(replica, "for the test")

            async def has_gone_on() -> bool:
                await anext(chunks)
                (now,) = front_end.running()
                return now.num_recoveries == 1 and now.replica not in (None, replica)

            await until(has_gone_on)

            async def is_back() -> bool:
                return len((await shell.cluster_view()).replicas) == 2

            await until(is_back)
            view, running = await shell.cluster_view(), front_end.running()
            state = dashboard_state(view, running, Totals(), model="fingerprint", reader=READER)
            kinds = [event.kind for event in state.events]
            assert kinds[:3] == ["replica started", "replica started", "replica lost"]
            assert {"recovery", "replica starting"} <= set(kinds[3:])
            assert {(each.replica, each.incarnation) for each in state.replicas} == {
                ("r0", int(replica == "r0")),
                ("r1", int(replica == "r1")),
            }
        assert front_end.running() == ()
        await front_end.close()

    asyncio.run(test())
