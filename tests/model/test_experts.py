"""Experts split by columns: what the files hold of them, and what a token's result depends on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.config import Dtype
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.build import build_model
from rayserve_paged.model.loader import resolve_model

MakeModel = Callable[..., Path]
MakeGang = Callable[..., Any]

MIXTRAL: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
PROMPT = [(7 * place + place * place) % 97 for place in range(29)]
OTHERS = [[(5 * place + 11 * seed) % 97 for place in range(17 + seed)] for seed in range(6)]


def gang_of(
    make_gang: MakeGang, directory: Path, world_size: int = 1, dtype: Dtype = "fp32"
) -> Any:  # noqa: ANN401
    source = resolve_model(str(directory), directory)
    return make_gang(
        lambda collectives: build_model(source, dtype, collectives, TorchBackend()),
        world_size,
        block_size=4,
        num_blocks=128,
    )


# Last bits: a product of matrices may be added up in another order with other rows.
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_what_else_is_in_a_batch_changes_last_bits_alone(
    make_model: MakeModel, make_gang: MakeGang, dtype: Dtype, bound: float
) -> None:
    directory = make_model("mixtral", **MIXTRAL)
    alone = gang_of(make_gang, directory, dtype=dtype).logits(PROMPT)
    gang = gang_of(make_gang, directory, dtype=dtype)
    sequences = [gang.start(tokens) for tokens in (PROMPT, *OTHERS)]
    together = gang.step([(sequence, len(sequence.token_ids)) for sequence in sequences])[0]
    assert float((together - alone).norm() / alone.norm()) < bound


def test_ranks_beyond_the_columns_of_an_expert_hold_none(
    make_model: MakeModel, make_gang: MakeGang
) -> None:
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2}
    directory = make_model("qwen3_moe", **settings)
    one, three = (gang_of(make_gang, directory, width).logits(PROMPT) for width in (1, 3))
    torch.testing.assert_close(three, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "tensor", "change", "accepted"),
    [
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.4.w3.weight",
            lambda _: None,
            r"weights include model\.layers\.1\.block_sparse_moe\.experts\.4\.w3\.weight",
        ),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.gate.weight",
            lambda _: None,
            r"weights include model\.layers\.0\.block_sparse_moe\.gate\.weight",
        ),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.0.w2.weight",
            lambda weight: weight[:, :-1].contiguous(),
            r"experts\.0\.w2\.weight of shape \(48, 50\), not \(48, 49\)",
        ),
        (
            "qwen2_moe",
            "model.layers.1.mlp.experts.3.gate_proj.weight",
            lambda weight: torch.cat([weight, weight]),
            r"experts\.3\.gate_proj\.weight of shape \(23, 48\), not \(46, 48\)",
        ),
    ],
)
def test_experts_that_config_json_does_not_describe_are_refused(
    make_model: MakeModel,
    make_gang: MakeGang,
    model_type: str,
    tensor: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    accepted: str,
) -> None:
    qwen2_moe = {
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 23,
        "shared_expert_intermediate_size": 31,
    }
    directory = make_model(model_type, **MIXTRAL if model_type == "mixtral" else qwen2_moe)
    path = directory / "model.safetensors"
    weights = load_file(path)
    changed = change(weights.pop(tensor))
    if changed is not None:
        weights[tensor] = changed
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match=accepted):
        gang_of(make_gang, directory)
