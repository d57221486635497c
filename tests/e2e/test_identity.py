"""What makes blocks equal, from the Python API down to the ranks: tenant, adapter, attachments."""

from collections.abc import Iterator
from typing import Any

import pytest
from fingerprint_llm import NUM_BLOCKS, num_unused_blocks

from rayserve_paged import LLM, Adapter, Attachment, RequestScope, SamplingParams
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.fingerprint import oracle
from rayserve_paged.model.row_content import RowContent

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
D1 = bytes.fromhex("abcd" + 13 * "00" + "01")
D2 = bytes.fromhex("abcd" + 13 * "00" + "02")


@pytest.fixture(scope="module", params=[1, 3])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    width: int = request.param
    with LLM(
        "fingerprint",
        shell="inprocess",
        tensor_parallel_size=width,
        block_size=8,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=40,
    ) as llm:
        yield llm
        assert num_unused_blocks(llm) == NUM_BLOCKS


def prompt_of(first_id: int) -> list[int]:
    """32 tokens that no other test has sent to the deployment that they share."""
    return [(first_id + 17 * place) % 1000 for place in range(32)]


def test_b04_a_batch_of_adapters_gives_what_each_alone_gives_and_shares_nothing(llm: LLM) -> None:
    prompt = prompt_of(1)
    adapters = [None, Adapter("a", "W1"), Adapter("a", "W2"), Adapter("b", "W1")]
    expected = [tuple(oracle(prompt, 8, content=RowContent(adapter))) for adapter in adapters]
    assert len(set(expected)) == 4
    scopes = [RequestScope(adapter=adapter) for adapter in adapters]
    for num_cached_tokens in (0, 24):
        outputs = llm.generate([prompt] * 4, GREEDY, scopes=scopes)
        assert [output.token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [num_cached_tokens] * 4


def test_b06_images_behind_equal_placeholders_give_outputs_of_their_own(llm: LLM) -> None:
    token_ids = [7] * 16 + prompt_of(2)[:8]
    attachments = [
        Attachment(D1, 0, 16),
        Attachment(D2, 0, 16),
        Attachment(D1, 8, 16),
        Attachment(D1, 0, 16),
    ]
    cached = []
    for attachment in attachments:
        prompt = {"prompt_token_ids": token_ids, "attachments": [attachment]}
        (output,) = llm.generate(prompt, GREEDY)
        content = RowContent(None, (attachment,))
        assert output.token_ids == tuple(oracle(token_ids, 8, content=content))
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 16]


def test_b07_tenants_share_no_prefix(llm: LLM) -> None:
    prompt = prompt_of(3)
    scopes = [RequestScope("a"), RequestScope("b"), RequestScope(), RequestScope("a")]
    cached = [llm.generate(prompt, GREEDY, scopes=scope)[0].num_cached_tokens for scope in scopes]
    assert cached == [0, 0, 0, 24]


def test_ids_without_attachments_are_a_prompt_like_a_list_of_them(llm: LLM) -> None:
    prompt = prompt_of(4)
    first, second = llm.generate([{"prompt_token_ids": prompt}, prompt], GREEDY)
    assert first.token_ids == second.token_ids == tuple(oracle(prompt, 8))
    assert first.prompt_token_ids == tuple(prompt)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt_token_ids": [1], "image": b""}, "prompt"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "attachments": D1}, "attachments"),
        ({"prompt_token_ids": [1], "attachments": [D1]}, "attachments"),
        (
            {"prompt_token_ids": [1], "attachments": [Attachment(D1, 0, 2)]},
            "attachments[0].num_tokens",
        ),
        ({"prompt_token_ids": [5000]}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"attachments": [Attachment(D1, 0, 1)]}, "prompt"),
    ],
)
def test_prompts_of_parts_that_do_not_fit_are_refused(
    llm: LLM,
    prompt: Any,  # noqa: ANN401
    field: str,
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        llm.validate(prompt, GREEDY)
    assert refused.value.field == field


def test_scopes_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    for scopes in ([], [RequestScope()] * 3, "a"):
        with pytest.raises(InvalidInputError, match="one RequestScope, or a list of 2"):
            llm.generate(["a", "b"], GREEDY, scopes=scopes)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInputError, match="tenant_salt=7"):
        llm.validate("a", GREEDY, scope=RequestScope(7))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scope": "team-a"}, "scope='team-a' is not accepted: expected a RequestScope, or None"),
        ({"scope": ""}, "scope='' is not accepted: expected a RequestScope, or None"),
        (
            {"scope": RequestScope(window=3)},  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            "scope.window=3 is not accepted: expected an AttentionWindow, or None",
        ),
        ({"params": {"n": 2}}, "params={'n': 2} is not accepted: expected SamplingParams, or None"),
        ({"params": {}}, "params={} is not accepted: expected SamplingParams, or None"),
    ],
)
def test_one_that_is_no_scope_or_no_parameters_is_refused_by_name(
    llm: LLM,
    arguments: Any,  # noqa: ANN401
    message: str,
) -> None:
    for call in (llm.validate, llm.stream):
        with pytest.raises(InvalidInputError) as refused:
            call("a", **arguments)
        assert str(refused.value) == message
