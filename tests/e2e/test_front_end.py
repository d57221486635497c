"""The consumer's side over a real deployment whose parts fail on demand."""

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import pytest

from rayserve_paged.core.config import (
    CacheConfig,
    DeploymentConfig,
    ModelConfig,
    RecoveryConfig,
    TimeoutConfig,
)
from rayserve_paged.core.controller_messages import (
    LoseReplica,
    Placed,
    Rejected,
    ReplicaLost,
    SubmitRequest,
)
from rayserve_paged.core.errors import (
    DeploymentError,
    InvalidInputError,
    NoReplicaError,
    RequestFailedError,
)
from rayserve_paged.core.ids import ConsumerId, Incarnation, ReplicaId
from rayserve_paged.core.replica_messages import PollTokens
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.front_end import FrontEnd
from rayserve_paged.inprocess import InProcessShell
from rayserve_paged.model.fingerprint import oracle
from rayserve_paged.model.tokenizer import ByteTokenizer
from rayserve_paged.outputs import StreamChunk
from rayserve_paged.prompts import Prompt
from rayserve_paged.request_options import RequestOptions

R0, LIFE = ReplicaId("r0"), Incarnation(0)
CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("CALLER", default="nobody")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=2000, temperature=0.0)


class CountingShell(InProcessShell):
    """Counts polls and watches, and may lose a poll's answer or break the watch."""

    num_polls = 0
    num_watches = 0
    lose_answers = 0
    watch_error: Exception | None = None
    poll_error: Exception | None = None

    async def poll(
        self, replica_id: ReplicaId, incarnation: Incarnation, message: PollTokens
    ) -> Delivery:
        self.num_polls += 1
        if self.poll_error is not None:
            raise self.poll_error
        delivery = await super().poll(replica_id, incarnation, message)
        if self.lose_answers and delivery.items:
            self.lose_answers -= 1
            return Delivery(replica_id, incarnation, 0, ())
        return delivery

    async def watch(self, consumer_id: ConsumerId) -> tuple[ReplicaLost, ...]:
        self.num_watches += 1
        if self.watch_error is not None:
            raise self.watch_error
        return await super().watch(consumer_id)


class ShellThatAsksWho(CountingShell):
    """Notes in whose context it is called."""

    def __init__(self, config: DeploymentConfig) -> None:
        super().__init__(config)
        self.callers: dict[str, set[str]] = {}

    def _note(self, call: str) -> None:
        self.callers.setdefault(call, set()).add(CALLER.get())

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        self._note("submit")
        return await super().submit(message)

    async def poll(
        self, replica_id: ReplicaId, incarnation: Incarnation, message: PollTokens
    ) -> Delivery:
        self._note("poll")
        return await super().poll(replica_id, incarnation, message)

    async def watch(self, consumer_id: ConsumerId) -> tuple[ReplicaLost, ...]:
        self._note("watch")
        return await super().watch(consumer_id)

    async def cancel(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self._note("cancel")
        await super().cancel(*args, **kwargs)


class SlowSubmission(CountingShell):
    """Answers a submission only once it is told to."""

    def __init__(self, config: DeploymentConfig) -> None:
        super().__init__(config)
        self.placed = asyncio.Event()
        self.go_on = asyncio.Event()

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        answer = await super().submit(message)
        self.placed.set()
        await self.go_on.wait()
        return answer


CONFIG = DeploymentConfig(
    model=ModelConfig(model="fingerprint"),
    cache=CacheConfig(block_size=4, num_blocks=1024),
    timeouts=TimeoutConfig(poll_timeout_s=0.2),
)


@pytest.fixture
def shell() -> Iterator[CountingShell]:
    shell = CountingShell(CONFIG)
    yield shell
    shell.shutdown()


def run(shell: InProcessShell, test: Callable[[FrontEnd], Coroutine[Any, Any, None]]) -> None:
    async def with_front_end() -> None:
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        try:
            await test(front_end)
        finally:
            await front_end.close()

    asyncio.run(with_front_end())


class OpeningTokenizer(ByteTokenizer):
    """Of a model that was taught a beginning-of-sequence token."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [256] * add_special_tokens + super().encode(text)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "hi"


def test_special_tokens_are_added_to_a_text_and_to_nothing_else(shell: CountingShell) -> None:
    front_end = FrontEnd(shell, OpeningTokenizer(1000))

    def ids(prompt: Prompt) -> tuple[int, ...]:
        return tuple(front_end.prepare(prompt, GREEDY).request.prompt_token_ids)

    assert ids("hi") == (256, *b"hi")
    assert ids({"messages": [{"role": "user", "content": "hello"}]}) == (*b"hi",)
    assert ids([104, 105]) == (*b"hi",)
    with pytest.raises(InvalidInputError, match="at least one token"):
        ids("")


async def until_nothing_is_held(front_end: FrontEnd) -> None:
    for _ in range(300):
        ledgers = (await front_end.accounting()).replicas.values()
        if not any(ledger.num_held_blocks for ledger in ledgers):
            return
    raise AssertionError("blocks are still held")


async def read_to_the_end(stream: AsyncGenerator[StreamChunk, None]) -> None:
    async for _ in stream:
        pass


def test_calls_that_serve_all_streams_are_made_in_the_context_of_none() -> None:
    shell = ShellThatAsksWho(CONFIG)

    async def test(front_end: FrontEnd) -> None:
        CALLER.set("a stream")
        stream = front_end.stream(front_end.prepare("x", ENDLESS))
        async with contextlib.aclosing(stream):
            await anext(stream)
        await until_nothing_is_held(front_end)

    try:
        run(shell, test)
    finally:
        shell.shutdown()
    assert shell.callers == {call: {"nobody"} for call in ("submit", "poll", "watch", "cancel")}


# --- lost replicas --------------------------------------------------------------------------


@pytest.fixture
def mortal() -> Iterator[CountingShell]:
    """A deployment whose only replica is not started again."""
    shell = CountingShell(CONFIG.model_copy(update={"recovery": RecoveryConfig(restart=False)}))
    yield shell
    shell.shutdown()


def test_a_lost_replica_is_started_again_and_its_streams_go_on(shell: CountingShell) -> None:
    async def test(front_end: FrontEnd) -> None:
        group = dataclasses.replace(GREEDY, max_tokens=300, n=2, logprobs=0)
        stream = front_end.stream(front_end.prepare("x", group))
        token_ids: dict[int, list[int]] = {0: [], 1: []}
        num_logprobs = num_chunks = 0
        async for chunk in stream:
            token_ids[chunk.sibling] += chunk.token_ids
            num_logprobs += len(chunk.logprobs)
            num_chunks += 1
            if num_chunks in (10, 60):
                incarnation = Incarnation(num_chunks // 60)
                shell.handle(LoseReplica(R0, incarnation, "its plug was pulled"))
        assert token_ids == {0: oracle(b"x", 300), 1: oracle(b"x", 300)}
        assert num_logprobs == 600
        await until_nothing_is_held(front_end)
        # Neither the requests that moved nor those that come later are lost track of.
        await front_end.complete([front_end.prepare("y", GREEDY)])

    run(shell, test)


def test_a_lost_replica_ends_its_requests_with_the_reason(mortal: CountingShell) -> None:
    shell = mortal

    async def test(front_end: FrontEnd) -> None:
        jobs = [front_end.prepare(f"request {index}", ENDLESS) for index in range(3)]
        running = asyncio.create_task(front_end.complete(jobs))
        while shell.num_polls < 3:
            await asyncio.sleep(0)
        shell.handle(LoseReplica(R0, LIFE, "rank 1: its plug was pulled"))
        outputs = await running
        assert [output.finish_reason for output in outputs] == [FinishReason.ERROR] * 3
        reason = "no replica can take the request: r0 is lost: rank 1: its plug was pulled"
        assert {output.error for output in outputs} == {reason}
        assert [output.request_id for output in outputs] == [job.name for job in jobs]

    run(shell, test)


def test_a_lost_replica_ends_all_samples_of_a_request(mortal: CountingShell) -> None:
    shell = mortal

    async def test(front_end: FrontEnd) -> None:
        group = dataclasses.replace(ENDLESS, n=3)
        running = asyncio.create_task(front_end.complete([front_end.prepare("x", group)]))
        while shell.num_polls < 3:
            await asyncio.sleep(0)
        shell.handle(LoseReplica(R0, LIFE, "gone"))
        (output,) = await running
        reason = "no replica can take the request: r0 is lost: gone"
        assert output.error == reason
        assert [sample.error for sample in output.samples] == [reason] * 3
        for sample in output.samples:
            assert sample.token_ids == tuple(oracle(b"x", len(sample.token_ids)))

    run(shell, test)


def test_a_stream_of_a_lost_replica_does_not_just_end(mortal: CountingShell) -> None:
    shell = mortal

    async def test(front_end: FrontEnd) -> None:
        job = front_end.prepare("x", ENDLESS, RequestOptions(request_id="mine"))
        stream = front_end.stream(job)
        await anext(stream)
        shell.handle(LoseReplica(R0, LIFE, "gone"))
        with pytest.raises(NoReplicaError, match="r0 is lost: gone"):
            await read_to_the_end(stream)

    run(shell, test)


def test_a_request_after_the_last_replica_is_lost_is_refused_with_the_reason(
    mortal: CountingShell,
) -> None:
    shell = mortal

    async def test(front_end: FrontEnd) -> None:
        shell.handle(LoseReplica(R0, LIFE, "burnt"))
        (output,) = await front_end.complete([front_end.prepare("x", GREEDY)])
        assert output.error is not None
        assert "r0 is lost: burnt" in output.error
        assert output.replica is None
        with pytest.raises(NoReplicaError, match="burnt"):
            await read_to_the_end(front_end.stream(front_end.prepare("x", GREEDY)))

    run(shell, test)


def test_a_poll_that_breaks_in_an_unforeseen_way_ends_its_requests_and_no_later_ones(
    shell: CountingShell,
) -> None:
    async def test(front_end: FrontEnd) -> None:
        shell.poll_error = OSError("cable cut")
        (output,) = await front_end.complete([front_end.prepare("x", GREEDY)])
        assert output.error is not None
        assert "3 replicas in a row died" in output.error
        assert output.error.count("its poll failed (OSError: cable cut)") == 3
        shell.poll_error = None
        await until_nothing_is_held(front_end)
        (output,) = await front_end.complete([front_end.prepare("x", GREEDY)])
        assert output.error is None

    run(shell, test)


def test_requests_go_on_where_the_controller_cannot_be_watched(
    shell: CountingShell, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(front_end: FrontEnd) -> None:
        shell.watch_error = DeploymentError("default", "its controller is gone")
        (output,) = await front_end.complete([front_end.prepare("x", GREEDY)])
        assert output.token_ids == tuple(oracle(b"x", 8))
        assert shell.num_watches > 0

    run(shell, test)
    assert "its controller is gone" in caplog.text


def test_answers_lost_on_the_way_are_given_again(shell: CountingShell) -> None:
    async def test(front_end: FrontEnd) -> None:
        shell.lose_answers = 3
        (output,) = await front_end.complete([front_end.prepare("x", GREEDY)])
        assert output.token_ids == tuple(oracle(b"x", 8))
        assert shell.lose_answers == 0

    run(shell, test)


# --- listening ------------------------------------------------------------------------------


def test_an_idle_consumer_neither_polls_nor_watches(shell: CountingShell) -> None:
    async def test(front_end: FrontEnd) -> None:
        await front_end.complete([front_end.prepare("x", GREEDY)])
        await asyncio.sleep(3 * CONFIG.timeouts.poll_timeout_s)
        counts = (shell.num_polls, shell.num_watches)
        await asyncio.sleep(3 * CONFIG.timeouts.poll_timeout_s)
        assert (shell.num_polls, shell.num_watches) == counts
        (output,) = await front_end.complete([front_end.prepare("x", GREEDY)])
        assert output.finish_reason is FinishReason.LENGTH

    run(shell, test)


def test_one_poll_brings_the_tokens_of_all_requests(shell: CountingShell) -> None:
    async def test(front_end: FrontEnd) -> None:
        jobs = [front_end.prepare(f"request {index}", GREEDY) for index in range(20)]
        outputs = await front_end.complete(jobs)
        assert [len(output.token_ids) for output in outputs] == [8] * 20
        assert shell.num_polls < 20 * 8

    run(shell, test)


# --- the ends of a request ------------------------------------------------------------------


def test_a_reader_that_goes_before_its_request_is_placed_leaves_nothing() -> None:
    async def test() -> None:
        shell = SlowSubmission(CONFIG)
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        running = asyncio.create_task(front_end.complete([front_end.prepare("x", ENDLESS)]))
        await shell.placed.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        shell.go_on.set()
        await until_nothing_is_held(front_end)
        await front_end.close()
        shell.shutdown()

    asyncio.run(test())


def test_a_consumer_whose_lease_ran_out_goes_on_when_it_is_back() -> None:
    timeouts = TimeoutConfig(consumer_lease_s=0.2, poll_timeout_s=0.1)

    async def test() -> None:
        shell = SlowSubmission(CONFIG.model_copy(update={"timeouts": timeouts}))
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        long = dataclasses.replace(GREEDY, max_tokens=400)
        running = asyncio.create_task(front_end.complete([front_end.prepare("x", long)]))
        await shell.placed.wait()
        await asyncio.sleep(1.0)  # Longer than the lease and a tick of the replica.
        shell.go_on.set()
        (output,) = await running
        assert output.token_ids == tuple(oracle(b"x", 400))
        await front_end.close()
        shell.shutdown()

    asyncio.run(test())


def test_closing_a_stream_ends_all_samples_of_its_request(shell: CountingShell) -> None:
    async def test(front_end: FrontEnd) -> None:
        group = dataclasses.replace(ENDLESS, n=3)
        async with contextlib.aclosing(front_end.stream(front_end.prepare("x", group))) as stream:
            seen = {(await anext(stream)).sibling for _ in range(6)}
        assert seen == {0, 1, 2}
        await until_nothing_is_held(front_end)

    run(shell, test)


def test_answers_lost_on_the_way_are_given_again_to_all_samples(shell: CountingShell) -> None:
    async def test(front_end: FrontEnd) -> None:
        shell.lose_answers = 3
        group = dataclasses.replace(GREEDY, n=3)
        (output,) = await front_end.complete([front_end.prepare("x", group)])
        assert [sample.token_ids for sample in output.samples] == [tuple(oracle(b"x", 8))] * 3
        assert shell.lose_answers == 0

    run(shell, test)


def test_closing_the_front_end_ends_open_streams_with_an_error(shell: CountingShell) -> None:
    async def test(front_end: FrontEnd) -> None:
        stream = front_end.stream(front_end.prepare("x", ENDLESS))
        await anext(stream)
        await front_end.close()
        with pytest.raises(RequestFailedError, match="closed"):
            await read_to_the_end(stream)
        await until_nothing_is_held(front_end)

    run(shell, test)


def test_a_stream_that_is_closed_before_it_began_was_never_submitted(shell: CountingShell) -> None:
    async def test(front_end: FrontEnd) -> None:
        stream = front_end.stream(front_end.prepare("x", GREEDY))
        async with contextlib.aclosing(stream):
            pass
        assert shell.num_polls == 0

    run(shell, test)
