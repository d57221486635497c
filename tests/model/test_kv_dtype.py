"""A Llama over pools of every dtype: near what it gives over its own, at every width."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayserve_kernels.attention import TorchBackend
from rayserve_kernels.layout import KVPool
from rayserve_paged.core.config import Dtype, KvDtype
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.build import build_model
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import SoloCollectives

MakeGang = Callable[..., Any]
PROMPT = [(7 * place + place * place) % 97 for place in range(90)]


@pytest.fixture(scope="module")
def directory(make_llama: Callable[..., Path]) -> Path:
    return make_llama(head_dim=16)


def gang_of(
    make_gang: MakeGang,
    directory: Path,
    kv_dtype: KvDtype | None,
    world_size: int = 1,
    dtype: Dtype = "fp32",
) -> Any:  # noqa: ANN401
    source = resolve_model(str(directory), directory)
    return make_gang(
        lambda collectives: build_model(
            source, dtype, collectives, TorchBackend(), kv_dtype=kv_dtype
        ),
        world_size,
        block_size=8,
    )


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


# Bounds of a few times what rounding to 7 bits, and to 3 bits behind the leading one, leads to.
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [
        ("fp32", "fp32", 0.0),
        ("fp32", "bf16", 0.01),
        ("fp32", "fp16", 0.002),
        ("fp32", "int8", 0.02),
        ("fp32", "fp8", 0.1),
        ("bf16", "fp32", 0.03),
        ("bf16", "int8", 0.03),
        ("bf16", "fp8", 0.1),
        ("fp16", "int8", 0.02),
    ],
)
def test_logits_are_near_those_over_a_pool_of_fp32(
    directory: Path, make_gang: MakeGang, dtype: Dtype, kv_dtype: KvDtype, bound: float
) -> None:
    exact = gang_of(make_gang, directory, None).logits(PROMPT, chunks=(40, 1))
    logits = gang_of(make_gang, directory, kv_dtype, dtype=dtype).logits(PROMPT, chunks=(40, 1))
    assert distance(logits, exact) <= bound
    assert kv_dtype == dtype or not torch.equal(logits, exact)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_every_width_holds_the_codes_of_its_heads_and_gives_the_logits_of_one(
    directory: Path, make_gang: MakeGang, kv_dtype: KvDtype
) -> None:
    expected = gang_of(make_gang, directory, kv_dtype).logits(PROMPT, chunks=(40, 1))
    for world_size in (2, 3):
        gang = gang_of(make_gang, directory, kv_dtype, world_size)
        # Sums over ranks differ in their last bits, and then some codes by a step.
        assert distance(gang.logits(PROMPT, chunks=(40, 1)), expected) < 0.02
        held = [model.kv_layout(8).num_kv_heads for model in gang.models]
        assert sum(held) == 3
        for pool, num_heads in zip(gang.pools, held, strict=True):
            assert pool.layout.block_bytes == 2 * 2 * num_heads * 8 * (16 + 4)


def stored(pool: KVPool, block_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the keys of a sequence, fp32 [layers, blocks, heads, slots, ...]."""
    assert pool.key_scales is not None
    return pool.keys[:, block_ids].float(), pool.key_scales[:, block_ids]


def test_chunks_store_what_one_step_stores(directory: Path, make_gang: MakeGang) -> None:
    parts = []
    for chunk in (90, 13, 1):
        gang = gang_of(make_gang, directory, "int8")
        sequence = gang.start(PROMPT[:88])
        while sequence.num_computed < 88:
            gang.step([(sequence, min(chunk, 88 - sequence.num_computed))])
        parts.append(stored(gang.pools[0], sequence.block_ids))
    codes, scales = parts[0]
    for other_codes, other_scales in parts[1:]:
        # The last bits of a matrix product depend on its size: here and there a code is another.
        assert (codes - other_codes).abs().max() <= 1
        assert (codes != other_codes).float().mean() < 0.001
        torch.testing.assert_close(scales, other_scales, rtol=1e-4, atol=0)


def test_the_fingerprint_model_takes_no_dtype_for_its_integers() -> None:
    source = resolve_model("fingerprint", Path())
    with pytest.raises(InvalidInputError, match=r"model\.kv_dtype='int8' .* holds integers"):
        build_model(source, "fp32", SoloCollectives(), TorchBackend(), kv_dtype="int8")
