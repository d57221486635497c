"""Faults that were found in other engines, tried through `LLM` and the command.

The figures are those of the cases. The model is the fingerprint model, whose output shows any
wrong block, and whose oracle computes every sequence alone and without a cache.
"""

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fingerprint_llm import greedy, num_unused_blocks

from rayserve_paged import LLM, SamplingParams, cli
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.request import FinishReason
from rayserve_paged.outputs import RequestOutput

VOCAB_SIZE = 1000
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def refuses(llm: LLM, prompts: object, params: SamplingParams = GREEDY) -> str:
    """The message of a refusal, after which everything works as before."""
    before = llm.accounting()
    with pytest.raises(InvalidInputError) as refused:
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert llm.accounting() == before
    assert llm.generate("then a normal request", GREEDY)[0].token_ids == greedy(
        "then a normal request", 8
    )
    return str(refused.value)


def refuses_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *args: str
) -> str:
    command = ["rayserve-paged", "generate", "--model", "fingerprint", "--shell", "inprocess"]
    monkeypatch.setattr(sys, "argv", [*command, "--num-blocks", "8", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# --- B14: groups of samples -----------------------------------------------------------------

FOUR = SamplingParams(n=4, max_tokens=100, seed=14)
EIGHT_IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_b14_a_group_that_is_cancelled_after_a_child_has_ended_leaves_nothing(llm: LLM) -> None:
    (whole,) = llm.generate([EIGHT_IDS], FOUR)
    second = whole.samples[1].token_ids[1]
    assert not any(
        second in sample.token_ids[:4] for sample in whole.samples if sample.sibling != 1
    )
    assert second != whole.samples[1].token_ids[0]
    params = dataclasses.replace(FOUR, stop_token_ids=[second])

    async def cancel_at_the_third_token() -> RequestOutput | None:
        output, num_read = None, [0] * 4
        async for chunk in llm.stream(EIGHT_IDS, params, request_id="group"):
            num_read[chunk.sibling] += len(chunk.token_ids)
            if num_read[0] >= 3:
                llm.cancel("group")
            output = chunk.output
        return output

    output = asyncio.run(cancel_at_the_third_token())
    assert output is not None
    child = output.samples[1]
    assert (len(child.token_ids), child.finish_reason) == (2, FinishReason.STOP)
    assert [s.finish_reason for s in output.samples if s is not child] == ["cancelled"] * 3
    for sample in output.samples:
        assert sample.token_ids == whole.samples[sample.sibling].token_ids[: len(sample.token_ids)]
    assert num_unused_blocks(llm) == 256
    assert not llm.cancel("group")


def test_b14_a_group_is_admitted_whole_or_not_at_all() -> None:
    params = SamplingParams(n=4, max_tokens=4, seed=14)
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=16, max_num_seqs=3) as llm:
        before = llm.accounting()
        with pytest.raises(InvalidInputError, match="n=4 is not accepted: expected at most 3"):
            llm.generate([EIGHT_IDS], params)
        assert llm.accounting() == before
    # Three siblings of 3 blocks, two of them shared, are what the pool holds.
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=5) as llm:
        (output,) = llm.generate([EIGHT_IDS], params)
        assert num_unused_blocks(llm) == 5
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=16) as llm:
        (in_a_large_pool,) = llm.generate([EIGHT_IDS], params)
    assert [s.token_ids for s in output.samples] == [s.token_ids for s in in_a_large_pool.samples]
    assert len({sample.token_ids for sample in output.samples}) == 4


@pytest.mark.parametrize("num_turns", range(6))
def test_b14_a_reader_that_goes_while_its_group_is_submitted_leaves_nothing(
    llm: LLM, num_turns: int
) -> None:
    async def go_after(num_turns: int) -> None:
        task = asyncio.create_task(anext(llm.stream(EIGHT_IDS, FOUR)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(go_after(num_turns))
    assert num_unused_blocks(llm) == 256


# --- B17, B34: admission --------------------------------------------------------------------


def test_b17_blocks_of_requests_that_never_got_to_run_come_back() -> None:
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=6) as llm:

        async def give_up_at_once() -> None:
            # A prompt of 3 blocks, whose reader is gone before its first token can be delivered.
            task = asyncio.create_task(anext(llm.stream("eleven char", GREEDY)))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        for _ in range(10):
            asyncio.run(give_up_at_once())
            assert num_unused_blocks(llm) == 6
        assert llm.generate("eleven char", GREEDY)[0].token_ids == greedy("eleven char", 8)
        assert num_unused_blocks(llm) == 6


@pytest.fixture(scope="module")
def llm_of_1600_slots() -> Iterator[LLM]:
    with LLM("fingerprint", shell="inprocess", block_size=16, num_blocks=100) as llm:
        assert (llm.limits.num_slots, llm.limits.max_model_len) == (1600, 4096)
        yield llm


def test_b34_a_prompt_over_the_pool_is_refused_and_blocks_nobody(llm_of_1600_slots: LLM) -> None:
    with pytest.raises(CapacityError, match=r"the pool has 100 \(1600 slots\)"):
        llm_of_1600_slots.generate([list(range(500)) * 4], GREEDY)
    (output,) = llm_of_1600_slots.generate("ten tokens", GREEDY)
    assert len(output.prompt_token_ids) == 10
    assert output.token_ids == greedy("ten tokens", 8)


def test_b34_a_request_that_would_outgrow_the_pool_is_refused(llm_of_1600_slots: LLM) -> None:
    with pytest.raises(CapacityError, match="needs 107 blocks of 16 slots"):
        llm_of_1600_slots.generate([list(range(500)) * 3], SamplingParams(max_tokens=200))


def test_b34_a_request_that_fills_the_pool_to_the_last_slot_completes(
    llm_of_1600_slots: LLM,
) -> None:
    prompt = (list(range(500)) * 4)[:1584]
    params = SamplingParams(max_tokens=17, temperature=0.0)
    (output,) = llm_of_1600_slots.generate([prompt], params)
    assert output.token_ids == greedy(prompt, 17)
    assert output.finish_reason is FinishReason.LENGTH


# --- B50: what is cached --------------------------------------------------------------------


def test_b50_a_wholly_cached_prompt_still_computes_its_last_token() -> None:
    eight = [3, 1, 4, 1, 5, 9, 2, 6]
    prompts = [eight, eight, eight, [*eight, 5], [*eight, 5, 3, 5, 8]]
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=64) as llm:
        # One token each, so that no run caches a longer prefix than its prompt.
        outputs = [
            llm.generate([ids], SamplingParams(max_tokens=1, temperature=0.0))[0] for ids in prompts
        ]
    assert [output.num_cached_tokens for output in outputs] == [0, 4, 4, 8, 8]
    assert [output.token_ids for output in outputs] == [greedy(ids, 1) for ids in prompts]


def test_b50_blocks_of_one_slot_cache_no_prompt_of_one_token() -> None:
    with LLM("fingerprint", shell="inprocess", block_size=1, num_blocks=64) as llm:
        outputs = [llm.generate([[7]], GREEDY)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert {output.token_ids for output in outputs} == {greedy([7], 8)}


# --- B84 to B88: input ----------------------------------------------------------------------


@pytest.mark.parametrize("prompts", ["", [""], [], [[]]])
def test_b84_an_empty_prompt_is_refused(llm: LLM, prompts: object) -> None:
    assert "prompt" in refuses(llm, prompts)


def test_b84_the_command_refuses_an_empty_prompt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refuses_on_the_command_line(monkeypatch, capfd, "--prompt", "")
    assert "at least one token" in line


def test_b85_max_tokens_and_the_limits_of_the_model_and_of_the_pool() -> None:
    def params(max_tokens: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0.0)

    for refused in (0, -1):
        with pytest.raises(InvalidInputError, match=f"max_tokens={refused} is not accepted"):
            params(refused)
    ids = list(range(40))
    with LLM("fingerprint", shell="inprocess", num_blocks=8, max_model_len=32) as llm:
        (output,) = llm.generate([ids[:31]], params(10))
        assert (output.token_ids, output.finish_reason) == (greedy(ids[:31], 1), "length")
        for num_prompt in (32, 33):
            message = refuses(llm, [ids[:num_prompt]], params(10))
            assert f"'{num_prompt} tokens' is not accepted: expected at most 31" in message
        (output,) = llm.generate([ids[:20]], params(None))
        assert output.token_ids == greedy(ids[:20], 12)


def test_b85_the_limit_that_is_told_is_the_one_that_holds() -> None:
    with LLM("fingerprint", shell="inprocess", num_blocks=6, block_size=4, max_model_len=32) as llm:
        assert llm.limits.served_len == 24
        with pytest.raises(InvalidInputError, match="24 slots"):
            llm.generate([list(range(25))], SamplingParams(max_tokens=1))
        (output,) = llm.generate([[1, 2, 3]], GREEDY)
        assert output.token_ids == greedy([1, 2, 3], 8)


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1, 2**63 - 1, True, 3.0])
def test_b86_an_id_outside_the_vocabulary_is_refused(llm: LLM, bad: object) -> None:
    message = refuses(llm, [[5, bad]])
    assert message == (
        f"prompt_token_ids={bad!r} is not accepted: expected integers from 0 to {VOCAB_SIZE - 1}"
    )


def test_b86_the_last_id_of_the_vocabulary_runs(llm: LLM) -> None:
    prompt = [5, VOCAB_SIZE - 1]
    assert llm.generate([prompt], GREEDY)[0].token_ids == greedy(prompt, 8)


def test_b87_a_stop_id_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, min_tokens=5, stop_token_ids=[VOCAB_SIZE])
    assert "stop_token_ids=1000 is not accepted" in refuses(llm, ["x"], params)
    with pytest.raises(InvalidInputError, match="stop_token_ids=-1"):
        SamplingParams(stop_token_ids=[-1])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"logit_bias": {VOCAB_SIZE: 5}}, "logit_bias=1000 is not accepted: expected integers"),
        ({"logit_bias": {-1: 5}}, "logit_bias=-1 is not accepted: expected at most 300 token ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids=1000 is not accepted"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1 is not accepted"),
        ({"allowed_token_ids": []}, "allowed_token_ids=[] is not accepted: expected at least one"),
    ],
)
def test_b87_biased_and_allowed_ids_outside_the_vocabulary_are_refused(
    llm: LLM, fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        llm.generate("x", SamplingParams(**fields))
    assert str(refused.value).startswith(complaint)
    assert llm.generate("x", GREEDY)[0].token_ids == greedy("x", 8)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ('"logit_bias": {"1000": 5}', "logit_bias=1000 is not accepted"),
        ('"logit_bias": {"-1": 5}', "logit_bias=-1 is not accepted"),
        ('"logit_bias": {"x": 5}', "logit_bias='x' is not accepted"),
        ('"stop_token_ids": [1000], "min_tokens": 5', "stop_token_ids=1000 is not accepted"),
        ('"allowed_token_ids": [1000]', "allowed_token_ids=1000 is not accepted"),
        ('"allowed_token_ids": []', "allowed_token_ids=[] is not accepted"),
        ('"logprobs": -1', "logprobs=-1 is not accepted"),
    ],
)
def test_b87_the_command_refuses_ids_outside_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    fields: str,
    complaint: str,
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "x", {fields}}}\n')
    line = refuses_on_the_command_line(monkeypatch, capfd, "--prompts", str(path))
    assert f"{path}:1: {complaint}" in line


def test_b87_the_last_id_of_the_vocabulary_may_be_biased_and_allowed(llm: LLM) -> None:
    last = VOCAB_SIZE - 1
    biased = SamplingParams(max_tokens=8, seed=1, logit_bias={last: 100.0})
    alone = SamplingParams(max_tokens=8, seed=1, allowed_token_ids=[last])
    outputs = llm.generate("x", biased) + llm.generate("x", alone)
    assert [output.token_ids for output in outputs] == [(last,) * 8] * 2


@pytest.mark.parametrize("bad", [-1, 21, VOCAB_SIZE])
def test_b87_logprobs_are_bounded(bad: int) -> None:
    with pytest.raises(InvalidInputError, match="logprobs"):
        SamplingParams(logprobs=bad)


@pytest.mark.parametrize(
    ("field", "literal"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "-1"),
        ("temperature", "1e308"),
        ("temperature", '"NaN"'),
        ("temperature", '"0.5"'),
        ("top_p", "NaN"),
        ("top_p", "0"),
        ("top_p", "-1"),
        ("top_p", "1.1"),
        ("top_p", '"0.5"'),
        ("min_p", "-0.1"),
        ("min_p", "2"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "-1"),
        ("repetition_penalty", "NaN"),
        ("presence_penalty", "1e9"),
    ],
)
def test_b88_nonsense_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    field: str,
    literal: str,
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "x", "{field}": {literal}}}\n')
    line = refuses_on_the_command_line(monkeypatch, capfd, "--prompts", str(path))
    value = json.loads(literal)
    assert f"{path}:1: {field}={value!r} is not accepted" in line
