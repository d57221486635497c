"""Queue limits, deadlines and cancelling one sample, through the Python API."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from fingerprint_llm import greedy

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.config import BatchConfig, CacheConfig, DeploymentConfig, ModelConfig
from rayserve_paged.core.controller_messages import Placed, Rejected, SubmitRequest
from rayserve_paged.core.errors import InvalidInputError, OverloadedError, QuotaExceededError
from rayserve_paged.core.ids import Attempt, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.tenant_quota import TenantQuota
from rayserve_paged.front_end import FrontEnd
from rayserve_paged.inprocess import InProcessShell
from rayserve_paged.model.fingerprint import oracle
from rayserve_paged.model.tokenizer import ByteTokenizer
from rayserve_paged.outputs import RequestOutput
from rayserve_paged.request_options import RequestOptions

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=2000, temperature=0.0)


class WatchedShell(InProcessShell):
    """Notes what is asked of the deployment."""

    def __init__(self, config: DeploymentConfig) -> None:
        super().__init__(config)
        self.submissions: list[tuple[str, float | None, bool]] = []
        self.cancels: list[int | None] = []

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        answer = await super().submit(message)
        request = message.request
        self.submissions.append(
            (request.request_id, request.deadline_s, isinstance(answer, Placed))
        )
        return answer

    async def cancel(
        self,
        request_id: RequestId,
        attempt: Attempt,
        sibling: int | None = None,
        placed_at: tuple[ReplicaId, Incarnation] | None = None,
    ) -> None:
        self.cancels.append(sibling)
        await super().cancel(request_id, attempt, sibling, placed_at)


CONFIG = DeploymentConfig(
    model=ModelConfig(model="fingerprint"),
    cache=CacheConfig(block_size=4, num_blocks=1024),
    batch=BatchConfig(max_num_seqs=2, max_num_waiting=1, policy="fcfs"),
)


@pytest.fixture
def shell() -> Iterator[WatchedShell]:
    shell = WatchedShell(CONFIG)
    yield shell
    shell.shutdown()


async def until_nothing_is_held(front_end: FrontEnd) -> None:
    for _ in range(300):
        ledgers = (await front_end.accounting()).replicas.values()
        if not any(ledger.num_held_blocks for ledger in ledgers):
            return
    raise AssertionError("blocks are still held")


async def fill(front_end: FrontEnd) -> list[asyncio.Task[list[RequestOutput]]]:
    """Run as many endless requests as may be there, and wait until each has a token."""
    tasks = []
    for i in range(3):
        job = front_end.prepare(f"busy {i}", ENDLESS, RequestOptions(request_id=f"busy{i}"))
        tasks.append(asyncio.create_task(front_end.complete([job])))
        await asyncio.sleep(0)
    return tasks


def test_a_list_that_is_longer_than_the_queue_is_answered_whole_and_in_order() -> None:
    prompts = [f"prompt {i}" for i in range(24)]
    with LLM(config=CONFIG, shell="inprocess") as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == [greedy(p, 8) for p in prompts]


def test_a_stream_is_refused_at_once_where_too_many_wait(shell: WatchedShell) -> None:
    async def test() -> None:
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        tasks = await fill(front_end)
        while len(shell.submissions) < 3:
            await asyncio.sleep(0.001)
        with pytest.raises(OverloadedError) as refused:
            async for _ in front_end.stream(front_end.prepare("late", GREEDY)):
                pass
        assert (refused.value.num_waiting, refused.value.max_num_waiting) == (1, 1)
        for i in range(3):
            assert await front_end.cancel(f"busy{i}")
        outputs = [output for task in tasks for output in await task]
        assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED] * 3
        await until_nothing_is_held(front_end)
        await front_end.close()

    asyncio.run(test())


def test_a_tenant_at_its_quota_waits_in_a_batch_and_is_in_nobodys_way() -> None:
    async def test(shell: WatchedShell) -> None:
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        quota = TenantQuota(max_concurrent_requests=1)
        slow = RequestOptions(request_id="slow", tenant="a", quota=quota)
        slow_task = asyncio.create_task(
            front_end.complete([front_end.prepare("busy", ENDLESS, slow)])
        )
        while not shell.submissions:
            await asyncio.sleep(0.001)
        of_a = RequestOptions(tenant="a", quota=quota)
        with pytest.raises(QuotaExceededError) as refused:
            async for _ in front_end.stream(front_end.prepare("late", GREEDY, of_a)):
                pass
        assert (refused.value.tenant, refused.value.used) == ("a", 1)
        waiting = asyncio.create_task(
            front_end.complete([front_end.prepare(f"a {i}", GREEDY, of_a) for i in range(3)])
        )
        for options in (RequestOptions(tenant="b", quota=quota), RequestOptions()):
            jobs = [front_end.prepare(f"b {i}", GREEDY, options) for i in range(3)]
            outputs = await front_end.complete(jobs)
            assert [output.token_ids for output in outputs] == [
                greedy(f"b {i}", 8) for i in range(3)
            ]
        assert not waiting.done()
        await front_end.cancel("slow")
        assert [output.token_ids for output in await waiting] == [
            greedy(f"a {i}", 8) for i in range(3)
        ]
        await slow_task
        await until_nothing_is_held(front_end)
        await front_end.close()

    shell = WatchedShell(CONFIG)
    try:
        asyncio.run(test(shell))
    finally:
        shell.shutdown()


def test_what_waits_for_room_can_be_cancelled_and_has_its_deadline(shell: WatchedShell) -> None:
    async def test() -> None:
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        tasks = await fill(front_end)
        while len(shell.submissions) < 3:
            await asyncio.sleep(0.001)
        jobs = [
            front_end.prepare("cancelled", GREEDY, RequestOptions(request_id="cancelled")),
            front_end.prepare("hurried", GREEDY, RequestOptions(deadline_s=0.2)),
            front_end.prepare("in time", GREEDY, RequestOptions(deadline_s=100.0)),
        ]
        waiting = asyncio.create_task(front_end.complete(jobs))
        while len(shell.submissions) < 6:
            await asyncio.sleep(0.001)
        assert await front_end.cancel("cancelled")
        await asyncio.sleep(0.4)
        for i in range(3):
            await front_end.cancel(f"busy{i}")
        cancelled, hurried, in_time = await waiting
        assert (cancelled.finish_reason, cancelled.replica) == (FinishReason.CANCELLED, None)
        assert (hurried.finish_reason, hurried.replica) == (FinishReason.DEADLINE, None)
        assert (hurried.error, hurried.token_ids) == (None, ())
        assert in_time.token_ids == tuple(oracle(b"in time", 8))
        # It carries what is left of its deadline, which no replica has seen begin.
        (deadline_s,) = [d for name, d, ok in shell.submissions if ok and d is not None]
        assert deadline_s < 99.7
        await asyncio.gather(*tasks)
        await until_nothing_is_held(front_end)
        await front_end.close()

    asyncio.run(test())


def test_closing_lets_go_of_those_who_wait_for_room(shell: WatchedShell) -> None:
    async def test() -> None:
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        tasks = await fill(front_end)
        jobs = [front_end.prepare(f"waits {i}", GREEDY) for i in range(3)]
        waiting = asyncio.create_task(front_end.complete(jobs))
        while len(shell.submissions) < 6:
            await asyncio.sleep(0.001)
        await front_end.close()
        outputs = await waiting
        for task in tasks:
            outputs += await task
        assert {output.error for output in outputs} == {"its consumer was closed"}
        num_submissions = len(shell.submissions)
        await asyncio.sleep(0.2)
        assert len(shell.submissions) == num_submissions

    asyncio.run(test())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "fingerprint",
        shell="inprocess",
        block_size=4,
        num_blocks=1024,
        policy="weighted-fair",
        tenant_weights={"gold": 2.0},
    ) as llm:
        yield llm


def test_a_deadline_ends_an_answer_with_the_tokens_until_then(llm: LLM) -> None:
    (output,) = llm.generate("never done", ENDLESS, deadline_s=0.3)
    assert output.finish_reason is FinishReason.DEADLINE
    assert output.error is None
    num_tokens = len(output.token_ids)
    assert num_tokens < 2000
    assert output.token_ids == greedy("never done", num_tokens)


def test_tenants_and_deadlines_are_checked_before_anything_is_submitted(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="tenants"):
        llm.generate(["a", "b"], GREEDY, tenants=["only one"])
    with pytest.raises(InvalidInputError, match="tenant=''"):
        llm.generate("a", GREEDY, tenants="")
    with pytest.raises(InvalidInputError, match=r"deadline_s=0.0 is not accepted"):
        llm.stream("a", GREEDY, deadline_s=0.0)
    outputs = llm.generate(["a", "b"], GREEDY, tenants=["gold", "tin"], deadline_s=60.0)
    assert [output.token_ids for output in outputs] == [greedy("a", 8), greedy("b", 8)]


def test_one_sample_is_cancelled_and_the_others_are_whole(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=60, seed=5)
    (expected,) = llm.generate("one of us", params)

    async def read() -> RequestOutput | None:
        output = None
        asked = False
        async for chunk in llm.stream("one of us", params, request_id="three"):
            if not asked:
                asked = True
                assert llm.cancel("three", sibling=1)
            output = chunk.output
        return output

    output = asyncio.run(read())
    assert output is not None
    assert output.error is None
    reasons = [sample.finish_reason for sample in output.samples]
    assert reasons == [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH]
    num_tokens = len(output.samples[1].token_ids)
    assert num_tokens < 60
    cut = expected.samples[1].token_ids[:num_tokens]
    whole = [sample.token_ids for sample in expected.samples]
    assert [sample.token_ids for sample in output.samples] == [whole[0], cut, whole[2]]


def test_a_sample_that_does_not_exist_is_refused(llm: LLM) -> None:
    async def read() -> None:
        params = SamplingParams(n=2, max_tokens=500)
        async with contextlib.aclosing(llm.stream("x", params, request_id="two")) as chunks:
            await anext(chunks)
            with pytest.raises(InvalidInputError, match="sibling=2 is not accepted: expected an i"):
                llm.cancel("two", sibling=2)

    asyncio.run(read())


def test_a_stop_string_in_one_sample_stops_its_decoding(shell: WatchedShell) -> None:
    async def test() -> None:
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        params = SamplingParams(n=2, max_tokens=400, seed=11)
        (whole,) = await front_end.complete([front_end.prepare("stop one", params)])
        text = whole.samples[1].text
        others = whole.samples[0].text
        stop = next(text[i : i + 4] for i in range(9, 60) if text[i : i + 4] not in others)
        cut = dataclasses.replace(params, stop=stop)
        shell.cancels.clear()
        (output,) = await front_end.complete([front_end.prepare("stop one", cut)])
        assert shell.cancels == [1]
        assert output.samples[0].text == whole.samples[0].text
        assert output.samples[1].text == text[: text.index(stop)]
        reasons = [sample.finish_reason for sample in output.samples]
        assert reasons == [FinishReason.LENGTH, FinishReason.STOP]
        await until_nothing_is_held(front_end)
        await front_end.close()

    asyncio.run(test())
