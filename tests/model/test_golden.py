"""The real model gives the ids that transformers gives, token for token."""

import hashlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from rayserve_kernels.attention import AttentionBackend, TorchBackend
from rayserve_kernels.native_build import COMPILERS, build_library, widest
from rayserve_kernels.native_cpu import NativeBackend
from rayserve_paged.model.build import build_model
from rayserve_paged.model.spec import DirectorySource

MakeGang = Callable[..., Any]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeBackend:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler")
    width = widest()
    return NativeBackend(build_library(tmp_path_factory.getbasetemp(), width), width)


def check(
    make_gang: MakeGang,
    source: DirectorySource,
    golden: dict[str, Any],
    num_tokens: int,
    world_size: int,
    block_size: int,
    backend: AttentionBackend,
) -> None:
    gang = make_gang(
        lambda collectives: build_model(source, "fp32", collectives, backend),
        world_size,
        block_size=block_size,
    )
    prompts = [case["prompt_ids"] for case in golden["cases"]]
    # The longest prompt needs two steps, beside others that decode already.
    outputs = gang.greedy(prompts, num_tokens, budget=32)
    assert outputs == [case["output_ids"][:num_tokens] for case in golden["cases"]]


def test_greedy_ids_equal_the_golden_ones(
    make_gang: MakeGang, smollm2: DirectorySource, golden: dict[str, Any]
) -> None:
    check(make_gang, smollm2, golden, 32, 1, 16, TorchBackend())


def test_greedy_ids_of_native_attention_equal_the_golden_ones(
    make_gang: MakeGang, smollm2: DirectorySource, golden: dict[str, Any], native: NativeBackend
) -> None:
    check(make_gang, smollm2, golden, 32, 1, 16, native)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("block_size", [8, 32])
def test_greedy_ids_equal_the_golden_ones_at_other_widths(
    make_gang: MakeGang,
    smollm2: DirectorySource,
    golden: dict[str, Any],
    world_size: int,
    block_size: int,
) -> None:
    check(make_gang, smollm2, golden, 64, world_size, block_size, TorchBackend())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("block_size", [8, 32])
def test_greedy_ids_of_native_attention_equal_the_golden_ones_at_other_widths(
    make_gang: MakeGang,
    smollm2: DirectorySource,
    golden: dict[str, Any],
    native: NativeBackend,
    world_size: int,
    block_size: int,
) -> None:
    check(make_gang, smollm2, golden, 64, world_size, block_size, native)


def test_the_converted_weights_are_those_of_the_golden_file(
    smollm2: DirectorySource, golden: dict[str, Any]
) -> None:
    with (smollm2.directory / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == golden["weights_sha256"]
