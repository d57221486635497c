"""Pinned prefixes through LLM, on real ranks in this process."""

from collections.abc import Iterator

import pytest
from fingerprint_llm import greedy

from rayserve_paged import LLM, Adapter, Attachment, RequestOptions, SamplingParams
from rayserve_paged.block_picture import block_picture, legend
from rayserve_paged.core.config import BatchConfig, CacheConfig, DeploymentConfig, ModelConfig
from rayserve_paged.core.errors import CapacityError, InvalidInputError, PinLimitError

SYSTEM = list(range(1, 10))


def params(max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


@pytest.fixture
def llm() -> Iterator[LLM]:
    config = DeploymentConfig(
        model=ModelConfig(model="fingerprint"),
        cache=CacheConfig(block_size=4, num_blocks=12, max_pinned_share=0.25),
    )
    with LLM(config=config, shell="inprocess") as llm:
        yield llm


def num_pinned(llm: LLM) -> int:
    return llm.accounting().num_pinned_blocks


def test_a_pinned_prompt_stays_cached_under_pressure_until_it_is_unpinned(llm: LLM) -> None:
    llm.generate(SYSTEM, params())
    pin = llm.pin_prefix(SYSTEM)
    assert dict(pin.num_tokens) == {"r0": 8}
    assert num_pinned(llm) == 2
    (ledger,) = llm.accounting().replicas.values()
    assert block_picture(ledger, 6).plain.count("p") == 2
    assert "p pinned 2" in legend(ledger).plain
    for start in range(100, 220, 30):
        llm.generate(list(range(start, start + 30)), params(4))
    (output,) = llm.generate(SYSTEM, params(6))
    assert (output.num_cached_tokens, output.token_ids) == (8, greedy(SYSTEM, 6))
    llm.unpin(pin.pin_id)
    llm.unpin(pin.pin_id)
    assert num_pinned(llm) == 0


def test_pins_over_their_share_and_requests_over_the_rest_are_refused(llm: LLM) -> None:
    llm.generate(list(range(1, 18)), params())
    with pytest.raises(PinLimitError, match="needs 4 blocks, and of the 3") as refused:
        llm.pin_prefix(list(range(1, 18)), "long")
    assert refused.value.pin_id == "long"
    assert num_pinned(llm) == 0
    assert dict(llm.pin_prefix(list(range(1, 13)), "short").num_tokens) == {"r0": 12}
    llm.generate(list(range(100, 130)), params(7))
    with pytest.raises(CapacityError, match="needs 10 blocks"):
        llm.generate(list(range(100, 130)), params(8))


def test_a_reset_ends_pins_and_nonsense_is_refused(llm: LLM) -> None:
    llm.generate(SYSTEM, params())
    llm.pin_prefix(SYSTEM, "system")
    llm.reset_prefix_cache()
    assert num_pinned(llm) == 0
    with pytest.raises(InvalidInputError, match="pin_id"):
        llm.pin_prefix(SYSTEM, "")
    with pytest.raises(InvalidInputError, match="prompt"):
        llm.pin_prefix([1, -1])
    with pytest.raises(InvalidInputError, match="at least one token"):
        llm.pin_prefix([])
    longest = llm.limits.max_model_len - 1
    with pytest.raises(InvalidInputError, match=f"at most {longest} tokens"):
        llm.pin_prefix([5] * (longest + 1))
    assert dict(llm.pin_prefix(SYSTEM[:3]).num_tokens) == {"r0": 0}


@pytest.mark.parametrize(
    "options",
    [
        RequestOptions(tenant_salt="a"),
        RequestOptions(adapter=Adapter("a", "1")),
        RequestOptions(window=6, num_sink_tokens=2),
    ],
)
def test_what_is_pinned_for_some_requests_is_there_for_those_alone(
    llm: LLM, options: RequestOptions
) -> None:
    llm.generate([SYSTEM, SYSTEM], params(), [options, RequestOptions()])
    assert dict(llm.pin_prefix(SYSTEM, "own", options).num_tokens) == {"r0": 8}
    for start in range(100, 220, 30):
        llm.generate(list(range(start, start + 30)), params(4))
    outputs = llm.generate([SYSTEM, SYSTEM], params(), [options, RequestOptions()])
    assert [output.num_cached_tokens for output in outputs] == [8, 0]
    llm.unpin("own")
    assert num_pinned(llm) == 0


def test_a_prompt_with_attachments_is_pinned_with_them(llm: LLM) -> None:
    prompts = [
        {"prompt_token_ids": SYSTEM, "attachments": [Attachment(bytes(15) + last, 2, 4)]}
        for last in (b"1", b"2")
    ]
    llm.generate(prompts, params())
    assert dict(llm.pin_prefix(prompts[0]).num_tokens) == {"r0": 8}
    for start in range(100, 220, 30):
        llm.generate(list(range(start, start + 30)), params(4))
    outputs = llm.generate(prompts, params())
    assert [output.num_cached_tokens for output in outputs] == [8, 0]


def test_a_share_for_pins_may_be_given_with_the_other_settings() -> None:
    with LLM(
        "fingerprint", shell="inprocess", block_size=4, num_blocks=12, max_pinned_share=0.5
    ) as llm:
        assert llm.limits.max_pinned_blocks == 6


def test_a_default_pool_serves_the_models_length_beside_its_pins() -> None:
    config = DeploymentConfig(
        model=ModelConfig(model="fingerprint", max_model_len=96),
        cache=CacheConfig(block_size=4, max_pinned_share=0.3),
        batch=BatchConfig(max_num_seqs=1),
    )
    with LLM(config=config, shell="inprocess") as llm:
        limits = llm.limits
        # 24 blocks for the model's length, and ten that may be pinned.
        assert (limits.num_blocks, limits.max_pinned_blocks, limits.served_len) == (35, 10, 96)
