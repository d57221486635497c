"""Faults of other engines in which one request disturbs others, tried through `LLM`."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch
from fingerprint_llm import greedy, num_unused_blocks

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.config import CacheConfig, DeploymentConfig, ModelConfig
from rayserve_paged.core.controller_messages import Placed, Rejected, SubmitRequest
from rayserve_paged.core.errors import DuplicateRequestError
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.front_end import FrontEnd
from rayserve_paged.inprocess import InProcessShell
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.tokenizer import ByteTokenizer
from rayserve_paged.request_options import RequestOptions

VOCAB_SIZE = 1000
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


# --- B92, B93: neighbours -------------------------------------------------------------------


def test_b92_an_id_is_refused_while_a_request_with_it_lives(llm: LLM) -> None:
    async def read() -> None:
        params = SamplingParams(max_tokens=100, temperature=0.0)
        async with contextlib.aclosing(llm.stream("x", params, request_id="a")) as first:
            token_ids: tuple[int, ...] = (await anext(first)).token_ids
            with pytest.raises(DuplicateRequestError, match="request_id='a'"):
                await anext(llm.stream("y", GREEDY, request_id="a"))
            async for chunk in first:
                token_ids += chunk.token_ids
        assert token_ids == greedy("x", 100)

    asyncio.run(read())
    # After its end the id is free again.
    (output,) = llm.generate(["y"], GREEDY, request_ids=["a"])
    assert (output.request_id, output.token_ids) == ("a", greedy("y", 8))


def test_b92_an_id_twice_in_one_call_is_refused_and_nothing_is_submitted(llm: LLM) -> None:
    before = llm.accounting()
    with pytest.raises(DuplicateRequestError):
        llm.generate(["x", "y"], GREEDY, request_ids=["b", "b"])
    assert llm.accounting() == before
    assert llm.generate(["x"], GREEDY, request_ids=["b"])[0].token_ids == greedy("x", 8)


def test_b92_two_readers_of_one_deployment_may_use_the_same_id() -> None:
    async def test(shell: InProcessShell) -> None:
        readers = [FrontEnd(shell, ByteTokenizer(VOCAB_SIZE)) for _ in range(2)]
        jobs = [
            reader.prepare(prompt, GREEDY, RequestOptions(request_id="same"))
            for reader, prompt in zip(readers, "xy", strict=True)
        ]
        results = await asyncio.gather(
            *(reader.complete([job]) for reader, job in zip(readers, jobs, strict=True))
        )
        assert [output.token_ids for (output,) in results] == [greedy("x", 8), greedy("y", 8)]
        for reader in readers:
            await reader.close()

    over_a_shell(test)


class PoisonedTokenizer(ByteTokenizer):
    """Raises on a text, or on an output token."""

    poisoned_text: str | None = None
    poisoned_token: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if text == self.poisoned_text:
            raise ValueError("poisoned text")
        return super().encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == self.poisoned_token:
            raise ValueError("poisoned token")
        return super().token_bytes(token_id)


class PoisonedShell(InProcessShell):
    """Raises on the submission of one prompt."""

    poisoned_ids: TokenIds | None = None

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        if message.request.prompt_token_ids == self.poisoned_ids:
            raise ValueError("poisoned request")
        return await super().submit(message)


def over_a_shell(test: Callable[[PoisonedShell], Coroutine[Any, Any, None]]) -> None:
    shell = PoisonedShell(
        DeploymentConfig(
            model=ModelConfig(model="fingerprint"), cache=CacheConfig(block_size=4, num_blocks=256)
        )
    )
    try:
        asyncio.run(test(shell))
    finally:
        shell.shutdown()


GOOD = [f"good request {index}" for index in range(8)]
LONG = SamplingParams(max_tokens=30, temperature=0.0)


def poisoned_among_eight(
    poison: Callable[[PoisonedShell, PoisonedTokenizer], None], poisoned_params: SamplingParams
) -> str:
    """Run 8 good requests and one that raises; return its error, all else being as it should."""
    errors: list[str] = []

    async def test(shell: PoisonedShell) -> None:
        tokenizer = PoisonedTokenizer(VOCAB_SIZE)
        front_end = FrontEnd(shell, tokenizer)
        poison(shell, tokenizer)
        jobs = [front_end.prepare(prompt, LONG) for prompt in GOOD]
        good = asyncio.create_task(front_end.complete(jobs))
        await asyncio.sleep(0)
        try:
            (bad,) = await front_end.complete([front_end.prepare("bad request", poisoned_params)])
            errors.append(bad.error or "")
        except ValueError as error:
            errors.append(str(error))
        assert [output.token_ids for output in await good] == [greedy(p, 30) for p in GOOD]
        num_unused = 0
        for _ in range(300):
            (ledger,) = (await front_end.accounting()).replicas.values()
            num_unused = ledger.num_free_blocks + ledger.num_cached_blocks
            if ledger.num_held_blocks == 0:
                break
        assert num_unused == 256
        await front_end.close()

    over_a_shell(test)
    (error,) = errors
    return error


def test_b93_an_error_in_tokenising_fails_one_request_alone() -> None:
    def poison(shell: PoisonedShell, tokenizer: PoisonedTokenizer) -> None:
        tokenizer.poisoned_text = "bad request"

    assert poisoned_among_eight(poison, LONG) == "poisoned text"


def test_b93_an_error_in_admission_fails_one_request_alone() -> None:
    def poison(shell: PoisonedShell, tokenizer: PoisonedTokenizer) -> None:
        shell.poisoned_ids = TokenIds.of(b"bad request")

    assert poisoned_among_eight(poison, LONG) == "ValueError: poisoned request"


def test_b93_an_error_in_sampling_fails_one_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def raise_for_one(
        self: Sampler, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[Any, Any, Any]:
        if any(row.params.seed == 666 for row in rows):
            raise ValueError("poisoned row")
        return sample(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", raise_for_one)
    params = SamplingParams(max_tokens=30, seed=666)
    error = poisoned_among_eight(lambda shell, tokenizer: None, params)
    assert error == "sampling raised ValueError: poisoned row"


def test_b93_an_error_in_detokenising_fails_one_request_alone() -> None:
    theirs = {token_id for prompt in GOOD for token_id in greedy(prompt, 30)}
    (poisoned, *_) = (i for i in greedy("bad request", 30) if i not in theirs)

    def poison(shell: PoisonedShell, tokenizer: PoisonedTokenizer) -> None:
        tokenizer.poisoned_token = poisoned

    assert poisoned_among_eight(poison, LONG) == "ValueError: poisoned token"


def test_b93_an_error_of_whoever_takes_an_output_fails_one_request_alone(llm: LLM) -> None:
    def take(output: object) -> None:
        raise ValueError("poisoned reader")

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        good = pool.submit(llm.generate, GOOD, LONG)
        with pytest.raises(ValueError, match="poisoned reader"):
            llm.generate("bad request", GREEDY, on_output=take)
        outputs = good.result()
    assert [output.token_ids for output in outputs] == [greedy(prompt, 30) for prompt in GOOD]
    assert num_unused_blocks(llm) == 256


# --- B100: seeds ----------------------------------------------------------------------------


def test_b100_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16)
    unseeded = SamplingParams(temperature=0.8, max_tokens=16)
    others = [SamplingParams(seed=n, temperature=0.8, max_tokens=16) for n in range(7)]
    with LLM("fingerprint", shell="inprocess", num_replicas=2, num_blocks=64) as llm:

        def at(place: int, params: list[SamplingParams]) -> tuple[int, ...]:
            return llm.generate(["the seeded one"] * len(params), params)[place].token_ids

        alone = at(0, [seeded])
        assert len(alone) == 16
        assert at(0, [seeded, unseeded]) == alone
        assert at(0, [seeded, *others]) == alone
        assert at(7, [*others, seeded]) == alone
        with_busy_neighbours = llm.generate(
            [[index] * 60 for index in range(6)] + [list(b"the seeded one")] * 2,
            [unseeded] * 6 + [seeded] * 2,
        )
        assert {output.token_ids for output in with_busy_neighbours[6:]} == {alone}


def test_b100_a_seeded_request_is_the_same_on_every_replica() -> None:
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16)
    with LLM("fingerprint", shell="inprocess", num_replicas=2, num_blocks=64) as llm:
        # Nothing is cached and the first is pending, so the load sends the second elsewhere.
        outputs = llm.generate(["short one", "short one"], seeded)
    assert {output.replica for output in outputs} == {"r0", "r1"}
    assert len({output.token_ids for output in outputs}) == 1


def test_b100_two_siblings_are_reproducible_and_differ() -> None:
    pair = SamplingParams(n=2, seed=42, temperature=0.8, max_tokens=16)
    alone = dataclasses.replace(pair, n=1)
    others = [SamplingParams(seed=n, temperature=0.8, max_tokens=16) for n in range(7)]
    with LLM("fingerprint", shell="inprocess", num_blocks=64) as llm:
        (single,) = llm.generate("the seeded one", alone)
        (first,) = llm.generate("the seeded one", pair)
        *_, again = llm.generate(["the seeded one"] * 8, [*others, pair])
    siblings = [sample.token_ids for sample in first.samples]
    assert [len(token_ids) for token_ids in siblings] == [16, 16]
    assert siblings[0] == single.token_ids
    assert siblings[1] != siblings[0]
    assert [sample.token_ids for sample in again.samples] == siblings
