"""The real model gives the ids that transformers gives, token for token."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.model.build import build_model
from rayserve_paged.model.spec import LlamaSource

MakeGang = Callable[..., Any]


def check(
    make_gang: MakeGang,
    source: LlamaSource,
    golden: dict[str, Any],
    num_tokens: int,
    world_size: int,
    block_size: int,
) -> None:
    gang = make_gang(
        lambda collectives: build_model(source, "fp32", collectives, TorchBackend()),
        world_size,
        block_size=block_size,
    )
    prompts = [case["prompt_ids"] for case in golden["cases"]]
    # The longest prompt needs two steps, beside others that decode already.
    outputs = gang.greedy(prompts, num_tokens, budget=32)
    assert outputs == [case["output_ids"][:num_tokens] for case in golden["cases"]]


def test_greedy_ids_equal_the_golden_ones(
    make_gang: MakeGang, smollm2: LlamaSource, golden: dict[str, Any]
) -> None:
    check(make_gang, smollm2, golden, num_tokens=32, world_size=1, block_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("block_size", [8, 32])
def test_greedy_ids_equal_the_golden_ones_at_other_widths(
    make_gang: MakeGang,
    smollm2: LlamaSource,
    golden: dict[str, Any],
    world_size: int,
    block_size: int,
) -> None:
    check(make_gang, smollm2, golden, 64, world_size, block_size)


def test_the_converted_weights_are_those_of_the_golden_file(
    smollm2: LlamaSource, golden: dict[str, Any]
) -> None:
    with (smollm2.directory / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == golden["weights_sha256"]
