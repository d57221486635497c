"""Outputs that must follow a grammar, on the fingerprint model, whose vocabulary is bytes."""

import asyncio
import dataclasses
import itertools
import json
import re
from typing import Any

import jsonschema
import pytest

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.config import CacheConfig, DeploymentConfig, ModelConfig
from rayserve_paged.core.errors import InvalidInputError, RequestFailedError
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.core.request import FinishReason
from rayserve_paged.front_end import FrontEnd
from rayserve_paged.generation import Job
from rayserve_paged.inprocess import InProcessShell
from rayserve_paged.model.fingerprint import oracle
from rayserve_paged.model.grammar_checker import GrammarChecker
from rayserve_paged.model.tokenizer import ByteTokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{2}$"}},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.json_schema(SCHEMA)
MANY = [
    SamplingParams(max_tokens=600, temperature=0.0, grammar=GRAMMAR),
    SamplingParams(max_tokens=600, seed=5, n=2, grammar=GRAMMAR, logprobs=1),
    SamplingParams(max_tokens=600, seed=6, grammar=GRAMMAR, frequency_penalty=0.2),
    SamplingParams(max_tokens=60, seed=7, grammar=Grammar("regex", "[a-f]{4,9}!")),
    SamplingParams(max_tokens=60, seed=8),
]
PROMPTS = [f"prompt {index}" for index in range(len(MANY))]


def test_outputs_are_valid_alone_and_together_and_change_no_neighbour(llm: LLM) -> None:
    alone = [llm.generate(p, params)[0] for p, params in zip(PROMPTS, MANY, strict=True)]
    outputs = llm.generate(PROMPTS, MANY)
    assert [o.samples[0].token_ids for o in outputs] == [o.samples[0].token_ids for o in alone]
    assert [len(o.samples) for o in outputs] == [1, 2, 1, 1, 1]
    for output in outputs[:3]:
        for sample in output.samples:
            assert sample.finish_reason is FinishReason.STOP
            jsonschema.validate(json.loads(sample.text), SCHEMA)
    assert re.fullmatch("[a-f]{4,9}!", outputs[3].text)
    free = SamplingParams(max_tokens=24, temperature=0.0)
    beside = llm.generate(["free", *PROMPTS], [free, *MANY])
    assert beside[0].token_ids == tuple(oracle(b"free", 24))


def test_a_stream_is_the_output_and_a_cut_one_its_beginning(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], MANY[0])

    async def texts() -> list[str]:
        return [chunk.text async for chunk in llm.stream(PROMPTS[0], MANY[0])]

    assert "".join(asyncio.run(texts())) == whole.text
    short = SamplingParams(max_tokens=9, temperature=0.0, grammar=GRAMMAR)
    (cut,) = llm.generate(PROMPTS[0], short)
    assert (cut.finish_reason, cut.token_ids) == (FinishReason.LENGTH, whole.token_ids[:9])


def test_a_model_that_likes_invalid_bytes_writes_characters(llm: LLM) -> None:
    schema = {"type": "string", "minLength": 4, "maxLength": 4}
    # Many begin with bytes behind which a decoder takes but some of those that go on.
    bias = {0xE0: 100.0, 0xED: 100.0, 0xF0: 100.0}
    params = SamplingParams(
        max_tokens=60, seed=1, n=24, logit_bias=bias, grammar=Grammar.json_schema(schema)
    )
    (output,) = llm.generate("x", params)
    for sample in output.samples:
        assert sample.finish_reason is FinishReason.STOP
        assert "\ufffd" not in sample.text
        jsonschema.validate(json.loads(sample.text), schema)


def test_preemption_pipelines_and_runs_of_steps_change_no_token(llm: LLM) -> None:
    expected = [[s.token_ids for s in o.samples] for o in llm.generate(PROMPTS, MANY)]
    with LLM(
        "fingerprint",
        shell="inprocess",
        block_size=4,
        num_blocks=155,
        pipeline_depth=2,
        max_decode_steps=4,
        tensor_parallel_size=2,
    ) as small:
        outputs = small.generate(PROMPTS, MANY)
    assert [[s.token_ids for s in o.samples] for o in outputs] == expected


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(a"), "not closed"),
        (Grammar("regex", "(a)\\1"), "Backreference"),
        (Grammar("ebnf", "root ::= missing"), "not defined"),
        (Grammar.json_schema(False), "cannot accept"),
        (Grammar.json_schema({"type": "poem"}, strict=False), "Unsupported type"),
        (Grammar.json_schema({"$ref": "#/$defs/a"}), "Cannot find"),
        (Grammar.json_schema({"type": "number", "multipleOf": 0.5}), "multipleOf"),
    ],
)
def test_what_does_not_compile_is_refused_before_it_is_submitted(
    llm: LLM, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason) as caught:
        llm.validate("x", SamplingParams(grammar=grammar))
    assert caught.value.field == grammar.field


def test_a_grammar_needs_an_id_that_ends_the_output(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="ends the output") as caught:
        llm.validate("x", SamplingParams(grammar=GRAMMAR, allowed_token_ids=list(range(256))))
    assert caught.value.field == "allowed_token_ids"


def test_a_row_whose_matching_fails_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the check at the door had let it pass.
    monkeypatch.setattr(GrammarChecker, "checked", lambda self, params: params)
    bad = SamplingParams(max_tokens=9, grammar=Grammar("ebnf", "root ::= missing"), seed=1)
    outputs = llm.generate(
        ["bad", "good"], [bad, SamplingParams(max_tokens=9, temperature=0.0)], raise_on_error=False
    )
    assert "not defined" in (outputs[0].error or "")
    assert outputs[1].token_ids == tuple(oracle(b"good", 9))
    ambiguous = SamplingParams(
        max_tokens=1000,
        temperature=0.0,
        stop_token_ids=[300],
        grammar=Grammar("regex", "(" * 10 + "a" + ")*" * 10 + "b"),
    )
    with pytest.raises(RequestFailedError, match="ambiguous"):
        llm.generate("x", dataclasses.replace(ambiguous, logit_bias={97: 100.0}))


def test_outputs_go_on_with_the_same_tokens_after_a_death(llm: LLM) -> None:
    expected = [[s.token_ids for s in o.samples] for o in llm.generate(PROMPTS, MANY)]
    shell = InProcessShell(
        DeploymentConfig(
            model=ModelConfig(model="fingerprint"), cache=CacheConfig(block_size=4, num_blocks=256)
        )
    )
    num_tokens: list[int] = []

    async def run() -> list[list[tuple[int, ...]]]:
        front_end = FrontEnd(shell, ByteTokenizer(1000))
        jobs = [front_end.prepare(p, params) for p, params in zip(PROMPTS, MANY, strict=True)]
        num_chunks = itertools.count()

        async def whole(job: Job) -> list[tuple[int, ...]]:
            async for chunk in front_end.stream(job):
                num_tokens.append(len(chunk.token_ids))
                if next(num_chunks) in (12, 90):
                    shell.kill_replica(ReplicaId("r0"), "a test")
                if chunk.output is not None:
                    return [sample.token_ids for sample in chunk.output.samples]
            raise AssertionError("a stream ends with its output")

        outputs = await asyncio.gather(*map(whole, jobs))
        await front_end.close()
        return outputs

    try:
        assert asyncio.run(run()) == expected
        incarnations = asyncio.run(shell.replicas())
        assert incarnations[ReplicaId("r0")] == 2
    finally:
        shell.shutdown()
    assert sum(num_tokens) == sum(len(ids) for output in expected for ids in output)
