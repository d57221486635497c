"""A whole model whose attention runs in the Triton kernels: interpreted where there is no GPU."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from driven_runner import BLOCK_SIZE, Driven
from random_model import make_model

from rayserve_kernels.attention import AttentionBackend, TorchBackend
from rayserve_kernels.gpu.backend import TritonBackend
from rayserve_kernels.gpu.configs import DECODE_QUERIES, LaunchTable
from rayserve_kernels.gpu.prefix_groups import SharedPrefixes
from rayserve_paged.core.config import KvDtype
from rayserve_paged.model.build import StepModel, build_model
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.model.spec import ModelSource

__all__ = ["make_model"]

SPLIT_TOKENS = 64


def triton() -> TritonBackend:
    """The kernels with splits so short that small sequences have several."""
    rows = {
        key: row
        if row.split_tokens is None
        else dataclasses.replace(row, split_tokens=SPLIT_TOKENS)
        for key, row in LaunchTable.read().rows.items()
    }
    return TritonBackend("interpreter", LaunchTable(rows))


def build(source: ModelSource, backend: AttentionBackend, kv_dtype: KvDtype | None) -> StepModel:
    return build_model(source, "fp32", SoloCollectives(), backend, "cpu", kv_dtype)


@pytest.mark.parametrize(("model_type", "kv_dtype"), [("llama", None), ("gemma2", "int8")])
def test_a_model_over_the_triton_kernels_gives_the_logits_of_torch(
    make_model: Callable[..., Path], tmp_path: Path, model_type: str, kv_dtype: KvDtype | None
) -> None:
    settings = {"sliding_window": 7} if model_type == "gemma2" else {}
    source = resolve_model(str(make_model(model_type, **settings)), tmp_path)
    draw = np.random.default_rng(1)
    driven = [
        Driven(build(source, backend, kv_dtype), num_places=20, with_graphs=with_graphs)
        for backend, with_graphs in ((TorchBackend(), False), (triton(), False), (triton(), True))
    ]

    def check(step: Callable[[Driven], torch.Tensor]) -> None:
        want, *got = map(step, driven)
        for logits in got:
            torch.testing.assert_close(logits, want, rtol=0, atol=1e-3 if kv_dtype else 1e-5)

    for row, num_tokens in enumerate((5, 70, 11)):
        prompt = draw.integers(90, size=num_tokens).tolist()
        check(lambda each, row=row, prompt=prompt: each.start(row, prompt))
    for rows in ([0, 1, 2], [2, 0], [1]):
        token_ids = draw.integers(90, size=len(rows)).tolist()
        check(lambda each, rows=rows, token_ids=token_ids: each.decode(rows, token_ids))


def test_sequences_that_share_blocks_decode_together_and_give_what_each_gives_alone(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = resolve_model(str(make_model("llama")), tmp_path)
    found: list[SharedPrefixes | None] = []

    def find(
        tables: npt.NDArray[np.int32], num_computed: Sequence[int], num_new: Sequence[int]
    ) -> SharedPrefixes | None:
        found.append(
            SharedPrefixes.for_step(
                tables,
                num_computed,
                num_new,
                block_size=BLOCK_SIZE,
                split_tokens=SPLIT_TOKENS,
                most_queries=DECODE_QUERIES,
                least_saved_tokens=1,
            )
        )
        return found[-1]

    prefix = np.random.default_rng(2).integers(90, size=2 * SPLIT_TOKENS).tolist()
    model = build(source, triton(), None)
    # What torch computes of the prompts is read by the kernels.
    prompts = Driven(build(source, TorchBackend(), None), num_places=36)
    apart, together = (
        Driven(model, num_places=36, find_shared_prefixes=finder) for finder in (None, find)
    )
    for driven in (prompts, apart, together):
        driven.blocks[1:3, :32] = driven.blocks[0, :32]
    for row in range(3):
        for driven in (prompts, apart, together):
            driven.begin(row, len(prefix) + 1)
        prompts.start(row, [*prefix, row])
    for driven in (apart, together):
        driven.pool.payload.copy_(prompts.pool.payload)
    for token_id in (7, 8):
        want = apart.decode([2, 0, 1], [token_id] * 3)
        got = together.decode([2, 0, 1], [token_id] * 3)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert [None if one is None else one.first_split.tolist() for one in found] == [[2, 2, 2]] * 2
