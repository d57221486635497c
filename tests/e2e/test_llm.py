"""LLM over the shell without Ray; the fingerprint model's output shows any wrong block."""

import asyncio
import contextlib
import threading

import pytest
import torch
from fingerprint_llm import NUM_BLOCKS, greedy, num_unused_blocks

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.config import DeploymentConfig, ModelConfig
from rayserve_paged.core.errors import DeploymentError, InvalidInputError, RequestFailedError
from rayserve_paged.core.request import FinishReason
from rayserve_paged.model.fingerprint import FingerprintOracle
from rayserve_paged.model.spec import FingerprintConfig
from rayserve_paged.outputs import RequestOutput, StreamChunk

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=200, temperature=0.0)


async def collect(llm: LLM, prompt: str, params: SamplingParams) -> list[StreamChunk]:
    return [chunk async for chunk in llm.stream(prompt, params)]


# --- generate -------------------------------------------------------------------------------


def test_outputs_are_the_oracles_and_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a ferry", "a", "a ferry on a river, which is long enough to fill several blocks"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert [output.token_ids for output in outputs] == [greedy(prompt, 8) for prompt in prompts]
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
    assert [output.prompt_token_ids for output in outputs] == [tuple(p.encode()) for p in prompts]
    assert len({output.request_id for output in outputs}) == 3


def test_ids_and_text_of_the_same_prompt_give_the_same_output(llm: LLM) -> None:
    by_text, by_ids = llm.generate(["ship", [115, 104, 105, 112]], GREEDY)
    assert by_ids.prompt is None
    assert (by_ids.token_ids, by_ids.text) == (by_text.token_ids, by_text.text)


def test_a_prompt_need_not_be_in_a_list(llm: LLM) -> None:
    assert [output.prompt_token_ids for output in llm.generate("ab", GREEDY)] == [(97, 98)]
    assert [output.prompt_token_ids for output in llm.generate([97, 98], GREEDY)] == [(97, 98)]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0) for n in (1, 5)]
    outputs = llm.generate(["x", "x"], params)
    assert [output.token_ids for output in outputs] == [greedy("x", 1), greedy("x", 5)]


def test_a_wrong_number_of_parameters_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="list of 2, one for each prompt"):
        llm.generate(["x", "y"], [GREEDY])
    with pytest.raises(InvalidInputError, match="priorities"):
        llm.generate(["x", "y"], GREEDY, priorities=[1, 2, 3])


def test_one_refused_prompt_keeps_all_from_being_submitted(llm: LLM) -> None:
    before = llm.accounting()
    with pytest.raises(InvalidInputError, match="prompt_token_ids=1000") as refused:
        llm.generate(["never seen before", [5, 1000]], GREEDY)
    assert refused.value.__notes__ == ["in prompts[1]"]
    assert llm.accounting() == before


@pytest.mark.parametrize("prompts", [[], None, 3, [3.5], [b"text"], {"text": "x"}, [None]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(InvalidInputError, match="prompt"):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_a_chat_needs_a_model_with_a_template(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="no chat template"):
        llm.generate({"messages": [{"role": "user", "content": "hello"}]}, GREEDY)


def test_a_second_run_finds_its_prompt_in_the_cache(llm: LLM) -> None:
    prompt = "twenty-one characters"
    assert len(prompt) == 21
    (first,) = llm.generate(prompt, GREEDY)
    (second,) = llm.generate(prompt, GREEDY)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 20)
    assert first.token_ids == second.token_ids == greedy(prompt, 8)


def test_after_a_reset_a_prompt_is_computed_anew_and_what_runs_goes_on(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0)
    prompt = "the cache forgets this"
    llm.generate(prompt, SamplingParams(max_tokens=1))

    async def reset_in_between() -> RequestOutput | None:
        output, is_first = None, True
        async with contextlib.aclosing(llm.stream(prompt, params)) as chunks:
            async for chunk in chunks:
                if is_first:
                    await asyncio.to_thread(llm.reset_prefix_cache)
                is_first, output = False, chunk.output
        return output

    output = asyncio.run(reset_in_between())
    assert output is not None
    assert output.num_cached_tokens > 0
    assert output.token_ids == greedy(prompt, 60)
    (again,) = llm.generate(prompt, params)
    assert (again.num_cached_tokens, again.token_ids) == (0, greedy(prompt, 60))


def test_durations_are_there_once_there_are_tokens_to_take_them_from(llm: LLM) -> None:
    one, many = llm.generate(
        ["x", "y"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
    )
    assert one.ttft_s is not None
    assert one.tpot_s is None
    assert many.tpot_s is not None
    assert min(one.ttft_s, many.tpot_s) >= 0.0


def test_logprobs_are_those_of_the_oracle(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(max_tokens=3, temperature=0.0, logprobs=2))
    assert output.logprobs is not None
    sequence = FingerprintOracle(FingerprintConfig())
    for token_id in b"abc":
        sequence.append(token_id)
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        expected = torch.log_softmax(sequence.logits().double(), dim=0)
        assert position.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
        assert [i for i, _ in position.top] == expected.topk(2).indices.tolist()
        sequence.append(token_id)


def test_unseeded_requests_differ_and_seeded_ones_do_not(llm: LLM) -> None:
    free, seeded = SamplingParams(), SamplingParams(seed=7)
    outputs = llm.generate(["same"] * 4, [free, free, seeded, seeded])
    assert outputs[0].token_ids != outputs[1].token_ids
    assert outputs[2].token_ids == outputs[3].token_ids


def test_each_output_is_handed_over_once_as_soon_as_it_is_there(llm: LLM) -> None:
    seen: list[RequestOutput] = []
    short = SamplingParams(max_tokens=1, temperature=0.0)
    long, brief = llm.generate(["x", "y"], [ENDLESS, short], on_output=seen.append)
    assert seen == [brief, long]


def test_generate_may_be_called_where_a_loop_runs(llm: LLM) -> None:
    async def notebook_cell() -> list[RequestOutput]:
        return llm.generate("x", GREEDY)

    assert asyncio.run(notebook_cell())[0].token_ids == greedy("x", 8)


# --- stop strings ---------------------------------------------------------------------------


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm: LLM) -> None:
    (whole,) = llm.generate("stop here", SamplingParams(max_tokens=40, temperature=0.0))
    stop = f"<{whole.token_ids[10]}>" if whole.token_ids[10] > 255 else chr(whole.token_ids[10])
    assert whole.text.count(stop) >= 1
    params = SamplingParams(max_tokens=40, temperature=0.0, stop=stop)
    (output,) = llm.generate("stop here", params)
    assert output.finish_reason is FinishReason.STOP
    assert output.text == whole.text[: whole.text.index(stop)]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) <= 11
    assert num_unused_blocks(llm) == NUM_BLOCKS


def test_text_held_back_for_a_stop_string_that_never_comes_is_not_lost(llm: LLM) -> None:
    (whole,) = llm.generate("end", GREEDY)
    almost = whole.text[-1] + "never"
    params = SamplingParams(max_tokens=8, temperature=0.0, stop=almost)
    assert llm.generate("end", params)[0].text == whole.text


# --- stream ---------------------------------------------------------------------------------


def test_the_chunks_of_a_stream_are_its_output(llm: LLM) -> None:
    chunks = asyncio.run(collect(llm, "stream me", GREEDY))
    output = chunks[-1].output
    assert output is not None
    assert [chunk.output for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert sum((chunk.token_ids for chunk in chunks), ()) == output.token_ids
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert output.token_ids == greedy("stream me", 8)


def test_closing_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    async def read_three() -> int:
        num_read = 0
        async with contextlib.aclosing(llm.stream("close me", ENDLESS)) as chunks:
            async for _ in chunks:
                num_read += 1
                if num_read == 3:
                    break
        return num_unused_blocks(llm)

    assert asyncio.run(read_three()) == NUM_BLOCKS


def test_cancelling_the_task_that_reads_a_stream_frees_its_blocks(llm: LLM) -> None:
    async def read_until_cancelled() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async with contextlib.aclosing(llm.stream("cancel my reader", ENDLESS)) as chunks:
                async for _ in chunks:
                    begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(read_until_cancelled())
    assert num_unused_blocks(llm) == NUM_BLOCKS


def test_streams_on_several_loops_do_not_mix(llm: LLM) -> None:
    prompts = [f"loop number {index}" for index in range(4)]
    texts: dict[str, tuple[int, ...]] = {}

    def read(prompt: str) -> None:
        chunks = asyncio.run(collect(llm, prompt, GREEDY))
        texts[prompt] = sum((chunk.token_ids for chunk in chunks), ())

    threads = [threading.Thread(target=read, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {prompt: greedy(prompt, 8) for prompt in prompts}


def test_a_stream_refuses_bad_input_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="at least one token"):
        llm.stream("")


# --- cancel ---------------------------------------------------------------------------------


def test_a_cancelled_request_keeps_its_tokens_and_says_so(llm: LLM) -> None:
    async def read() -> RequestOutput | None:
        output = None
        async for chunk in llm.stream("cancel me", ENDLESS, request_id="mine"):
            llm.cancel("mine")
            output = chunk.output
        return output

    output = asyncio.run(read())
    assert output is not None
    assert output.finish_reason is FinishReason.CANCELLED
    assert output.error is None
    num_tokens = len(output.token_ids)
    assert 1 <= num_tokens < 200
    assert output.token_ids == greedy("cancel me", num_tokens)


def test_cancelling_what_is_not_live_says_so(llm: LLM) -> None:
    assert llm.cancel("nobody") is False


# --- accounting -----------------------------------------------------------------------------


def test_the_accounting_of_a_running_request_adds_up(llm: LLM) -> None:
    async def look() -> None:
        async for chunk in llm.stream("count my tokens", ENDLESS):
            if chunk.output is None:
                figures = llm.accounting()
                assert figures.unique_live_tokens >= len("count my tokens")
                assert figures.allocated_slots == (
                    figures.unique_live_tokens + figures.internal_fragmentation_slots
                )
                assert figures.prefix_sharing_saved_slots == 0
                return

    asyncio.run(look())


# --- lifecycle ------------------------------------------------------------------------------


def test_requests_preempt_each_other_in_a_small_pool_and_nothing_changes() -> None:
    prompts = [f"{index}: sixteen slots" for index in range(6)]
    params = SamplingParams(max_tokens=20, temperature=0.0)
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=14) as llm:
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [greedy(p, 20) for p in prompts]
        assert num_unused_blocks(llm) == 14


def test_lower_priorities_are_served_first() -> None:
    seen: list[str] = []
    with LLM("fingerprint", shell="inprocess", num_blocks=8, max_num_seqs=1) as llm:
        llm.generate(
            ["first", "low", "high"],
            SamplingParams(max_tokens=40),
            priorities=[0, 2, 1],
            request_ids=["first", "low", "high"],
            on_output=lambda output: seen.append(output.request_id),
        )
    assert seen == ["first", "high", "low"]


def test_two_replicas_of_two_ranks_give_the_same_tokens() -> None:
    prompts = [f"prompt {index}" for index in range(6)]
    with LLM(
        "fingerprint",
        shell="inprocess",
        tensor_parallel_size=2,
        num_replicas=2,
        block_size=4,
        num_blocks=NUM_BLOCKS,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == [greedy(p, 8) for p in prompts]
        assert {output.replica for output in outputs} == set(llm.accounting().replicas)


def test_a_closed_llm_is_closed_for_good() -> None:
    llm = LLM("fingerprint", shell="inprocess", num_blocks=4)
    llm.close()
    llm.close()
    with pytest.raises(DeploymentError, match="closed"):
        llm.generate("x")


def test_closing_ends_what_runs_with_an_error() -> None:
    llm = LLM("fingerprint", shell="inprocess", num_blocks=256)

    async def read() -> None:
        async for _ in llm.stream("x", SamplingParams(max_tokens=4000)):
            await asyncio.to_thread(llm.close)

    with pytest.raises(RequestFailedError, match="closed"):
        asyncio.run(read())


def test_a_stream_may_be_closed_after_its_llm() -> None:
    llm = LLM("fingerprint", shell="inprocess", num_blocks=256)

    async def close_both() -> None:
        async with contextlib.aclosing(llm.stream("x", SamplingParams(max_tokens=4000))) as chunks:
            await anext(chunks)
            await asyncio.to_thread(llm.close)

    asyncio.run(close_both())


def test_a_config_and_a_field_of_it_are_not_given_together() -> None:
    config = DeploymentConfig(model=ModelConfig(model="fingerprint"))
    with pytest.raises(InvalidInputError, match=r"cache\.block_size=4"):
        LLM(block_size=4, config=config, shell="inprocess")


def test_an_unknown_shell_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="shell='slurm'"):
        LLM("fingerprint", shell="slurm")


def test_an_address_without_ray_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="address='auto'"):
        LLM("fingerprint", shell="inprocess", address="auto")
