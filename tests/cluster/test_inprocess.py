"""A whole deployment in one process: real shards, real collectives, no Ray."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deliveries import unfold

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.controller_messages import LoseReplica, Placed, Rejected, SubmitRequest
from rayserve_paged.core.errors import InvalidInputError, ReplicaLostError
from rayserve_paged.core.event_log import LoggedEvent
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replay import replay
from rayserve_paged.core.replica_messages import PollTokens, StepFinished
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.stream_messages import StreamItem
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.deployment import Deployment
from rayserve_paged.event_files import log_files, read_log
from rayserve_paged.inprocess import InProcessShell
from rayserve_paged.model.fingerprint import oracle

PROMPTS = [[(7 * i + k) % 256 for k in range(3 + 5 * i)] for i in range(6)]


def config(**sections: dict[str, Any]) -> DeploymentConfig:
    given: dict[str, dict[str, Any]] = {
        "model": {"model": "fingerprint"},
        "cache": {"num_blocks": 64, "block_size": 8},
        "timeouts": {"poll_timeout_s": 0.2, "consumer_lease_s": 60.0},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    return DeploymentConfig.model_validate(given)


def request(
    index: int, prompt: list[int], params: SamplingParams, consumer: str = "reader"
) -> SubmitRequest:
    return SubmitRequest(
        Request(
            request_id=RequestId(f"q{index}"),
            consumer_id=ConsumerId(consumer),
            attempt=Attempt(0),
            prompt_token_ids=TokenIds.of(prompt),
            params=params,
        )
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


async def submit(shell: Deployment, message: SubmitRequest) -> Placed:
    answer = await shell.submit(message)
    assert isinstance(answer, Placed), answer
    return answer


async def items(
    shell: Deployment, replica_id: ReplicaId, consumer: str = "reader"
) -> AsyncIterator[StreamItem]:
    """All that one replica delivers, each item once."""
    ack = poll_id = 0
    while True:
        poll_id += 1
        message = PollTokens(ConsumerId(consumer), poll_id, ack)
        delivery = await shell.poll(replica_id, Incarnation(0), message)
        ack = delivery.sequence
        for item in unfold(delivery):
            yield item


async def read_to_end(
    shell: Deployment, replica_id: ReplicaId, num_requests: int, consumer: str = "reader"
) -> dict[str, tuple[list[int], StreamItem]]:
    tokens: dict[str, list[int]] = {}
    ended: dict[str, tuple[list[int], StreamItem]] = {}
    async for item in items(shell, replica_id, consumer):
        tokens.setdefault(item.name.request_id, []).extend(item.token_ids)
        if item.finish is not None:
            ended[item.name.request_id] = (tokens[item.name.request_id], item)
        if len(ended) == num_requests:
            break
    return ended


def serve(shell: Deployment, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Run all prompts at once; return their tokens."""

    async def run() -> list[list[int]]:
        placed = [await submit(shell, request(i, p, params)) for i, p in enumerate(prompts)]
        replicas = [answer.replica_id for answer in placed]
        ended: dict[str, tuple[list[int], StreamItem]] = {}
        for replica_id in sorted(set(replicas)):
            ended |= await read_to_end(shell, replica_id, replicas.count(replica_id))
        assert {item.error for _, item in ended.values()} == {None}
        return [ended[f"q{i}"][0] for i in range(len(prompts))]

    return asyncio.run(run())


async def last_words(shell: Deployment, replica_id: ReplicaId) -> str:
    """What the reader of q0 hears of its end: from rank 0, or that it is gone."""
    try:
        ended = await read_to_end(shell, replica_id, 1)
    except ReplicaLostError as error:
        return str(error)
    return str(ended["q0"][1].error)


Start = Callable[..., InProcessShell]


@pytest.fixture
def start() -> Iterator[Start]:
    shells: list[InProcessShell] = []

    def start_shell(**sections: dict[str, Any]) -> InProcessShell:
        shells.append(InProcessShell(config(**sections)))
        return shells[-1]

    yield start_shell
    for shell in shells:
        shell.shutdown()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_greedy_tokens_equal_the_oracles_at_every_width(start: Start, width: int) -> None:
    shell = start(parallel={"tensor_parallel_size": width})
    params = SamplingParams(max_tokens=12, temperature=0.0, seed=0)
    assert serve(shell, PROMPTS, params) == [oracle(prompt, 12) for prompt in PROMPTS]


def test_random_tokens_are_the_same_at_every_width_and_replica_count(start: Start) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    shapes = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]
    streams = [
        serve(
            start(parallel={"tensor_parallel_size": width, "num_replicas": num_replicas}),
            PROMPTS,
            params,
        )
        for width, num_replicas in shapes
    ]
    assert streams == [streams[0]] * len(shapes)
    assert streams[0] != [oracle(prompt, 12) for prompt in PROMPTS]


def test_a_pool_too_small_for_all_gives_the_same_tokens_and_an_empty_ledger(start: Start) -> None:
    shell = start(
        cache={"num_blocks": 9, "block_size": 4},
        batch={"max_num_batched_tokens": 7},
        parallel={"tensor_parallel_size": 2},
    )
    prompts = [prompt[:10] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=20, temperature=0.0, seed=0)
    assert serve(shell, prompts, params) == [oracle(prompt, 20) for prompt in prompts]
    ((_, ledger),) = asyncio.run(shell.accounting())
    assert ledger.num_held_blocks == 0
    assert ledger.num_free_blocks + ledger.num_cached_blocks == 9


def test_a_prompt_served_before_is_taken_from_the_cache(start: Start) -> None:
    shell = start(parallel={"tensor_parallel_size": 2})
    params = SamplingParams(max_tokens=4, temperature=0.0, seed=0)

    async def ask(index: int) -> tuple[list[int], StreamItem]:
        consumer = f"reader {index}"
        placed = await submit(shell, request(index, list(range(33)), params, consumer))
        return (await read_to_end(shell, placed.replica_id, 1, consumer))[f"q{index}"]

    first, again = asyncio.run(ask(0)), asyncio.run(ask(1))
    assert (first[1].num_cached_tokens, again[1].num_cached_tokens) == (0, 32)
    assert first[0] == again[0]


def test_an_idle_deployment_outlives_ten_group_timeouts(start: Start) -> None:
    shell = start(parallel={"tensor_parallel_size": 2}, timeouts={"collective_timeout_s": 0.5})
    threading.Event().wait(5.5)
    params = SamplingParams(max_tokens=3, temperature=0.0, seed=0)
    assert serve(shell, PROMPTS[:1], params) == [oracle(PROMPTS[0], 3)]


def test_b117_a_wall_clock_that_jumps_ends_no_request_and_no_replica(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = {"consumer_lease_s": 20.0, "rank_liveness_s": 20.0, "deployment_lease_s": 20.0}
    shell = start(parallel={"tensor_parallel_size": 2}, timeouts=leases)
    wall, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: wall() + 3600 * (next(calls) % 3 - 1))
    params = SamplingParams(max_tokens=40, temperature=0.0, seed=0)
    assert serve(shell, PROMPTS, params) == [oracle(prompt, 40) for prompt in PROMPTS]


def test_a_cancelled_request_ends_as_cancelled_and_frees_its_blocks(start: Start) -> None:
    shell = start()

    async def run() -> StreamItem:
        params = SamplingParams(max_tokens=400, temperature=0.0, seed=0)
        placed = await submit(shell, request(0, [1, 2, 3], params))
        async for item in items(shell, placed.replica_id):
            if item.finish is not None:
                return item
            await shell.cancel(item.name.request_id, item.name.attempt)
        raise AssertionError

    last = asyncio.run(run())
    assert last.finish is FinishReason.CANCELLED
    ((_, ledger),) = asyncio.run(shell.accounting())
    assert ledger.num_held_blocks == 0


def test_a_request_that_cannot_fit_is_rejected_with_the_numbers(start: Start) -> None:
    shell = start(cache={"num_blocks": 4, "block_size": 4})
    params = SamplingParams(max_tokens=16, seed=0)
    answer = asyncio.run(shell.submit(request(0, [1] * 8, params)))
    assert isinstance(answer, Rejected)
    assert "needs 6 blocks of 4 slots, and the pool has 4 (16 slots)" in str(answer.error)


def test_a_lost_replica_ends_its_requests_and_its_watchers_hear_of_it(start: Start) -> None:
    shell = start(
        parallel={"tensor_parallel_size": 2},
        timeouts={"poll_timeout_s": 30.0},
        recovery={"restart": False},
    )

    async def run() -> None:
        params = SamplingParams(max_tokens=400, temperature=0.0, seed=0)
        placed = await submit(shell, request(0, [1, 2, 3], params))
        watching = asyncio.ensure_future(shell.watch(ConsumerId("reader")))
        await asyncio.sleep(0)
        lose = LoseReplica(placed.replica_id, placed.incarnation, "rank 1: silence")
        await asyncio.to_thread(shell.handle, lose)
        (news,) = await watching
        assert (news.replica_id, news.reason) == (placed.replica_id, "rank 1: silence")
        assert "rank 1: silence" in await last_words(shell, placed.replica_id)
        answer = await shell.submit(request(1, [1, 2, 3], params))
        assert isinstance(answer, Rejected)
        assert "r0 is lost: rank 1: silence" in str(answer.error)

    asyncio.run(run())
    assert asyncio.run(shell.accounting()) == ()


def test_a_watch_without_news_returns_empty_after_the_poll_timeout(start: Start) -> None:
    shell = start()
    assert asyncio.run(shell.watch(ConsumerId("reader"))) == ()


def test_polling_an_incarnation_that_does_not_exist_raises(start: Start) -> None:
    shell = start()
    with pytest.raises(ReplicaLostError, match="there is no such incarnation"):
        asyncio.run(
            shell.poll(ReplicaId("r0"), Incarnation(5), PollTokens(ConsumerId("reader"), 1, 0))
        )
    with pytest.raises(ReplicaLostError, match="there is no such incarnation"):
        asyncio.run(
            shell.poll(ReplicaId("r9"), Incarnation(0), PollTokens(ConsumerId("reader"), 1, 0))
        )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"model": "no/such/model"}}, "model='no/such/model'"),
        ({"parallel": {"tensor_parallel_size": 5}}, "tensor_parallel_size=5"),
        ({"cache": {"num_blocks": 1 << 40}}, f"cache.num_blocks={1 << 40}"),
        ({"cache": {"num_blocks": None, "memory": 1 << 60}}, f"cache.memory={1 << 60}"),
        ({"model": {"max_model_len": 5000}}, "model.max_model_len=5000"),
    ],
)
def test_what_cannot_start_raises_at_once_and_leaves_no_thread(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    before = set(threading.enumerate())
    parallel = {"tensor_parallel_size": 2} | sections.pop("parallel", {})
    with pytest.raises(InvalidInputError, match=message.replace(".", r"\.")):
        InProcessShell(config(parallel=parallel, **sections))
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_shutdown_leaves_no_thread_and_no_socket() -> None:
    threads, num_files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    shell = InProcessShell(config(parallel={"tensor_parallel_size": 3, "num_replicas": 2}))
    params = SamplingParams(max_tokens=4, temperature=0.0, seed=0)
    serve(shell, PROMPTS, params)
    shell.shutdown()
    shell.shutdown()
    wait_until(lambda: set(threading.enumerate()) <= threads)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_files)


def test_the_logs_of_all_machines_replay_to_what_they_answered(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    settings = config(parallel={"num_replicas": 2})
    settings = settings.model_copy(update={"event_log_dir": str(folder)})
    shell = InProcessShell(settings)
    serve(shell, PROMPTS, SamplingParams(max_tokens=4, temperature=0.0, seed=0))
    shell.shutdown()
    logs = log_files(folder)
    assert [path.name for path in logs] == ["controller.0.jsonl", "r0.0.jsonl", "r1.0.jsonl"]
    for path in logs:
        result = replay(read_log(path))
        assert result.difference is None
        assert result.num_machines == 1
        assert result.num_commands > 0
        events = [entry.event for entry in read_log(path) if isinstance(entry, LoggedEvent)]
        kind = SubmitRequest if path == logs[0] else StepFinished
        assert any(isinstance(event, kind) for event in events)
    # Another run is not mixed into them.
    with pytest.raises(InvalidInputError, match=r"r0\.0\.jsonl, the log of another run"):
        InProcessShell(settings)
