"""What fits into a replica's memory: figures worked out by hand, and those of real ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_model import make_llama, make_model

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.config import DeploymentConfig, KvDtype
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.build import build_model
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.sim.hardware import GPUS, GPUS_PER_NODE, MODEL_SHAPES
from rayserve_paged.sizing.memory import MemoryPlan, plan_memory, rank_weight_bytes
from rayserve_paged.sizing.shape import find_shape

__all__ = ["make_llama", "make_model"]


def config_of(tp: int = 8, **sections: dict[str, object]) -> DeploymentConfig:
    model = {"model": "llama-70b", "dtype": "bf16"} | sections.pop("model", {})
    return DeploymentConfig.model_validate(
        {"model": model, "parallel": {"tensor_parallel_size": tp}, **sections}
    )


def plan(
    shape: str = "llama-70b", gpu: str = "H200", tp: int = 8, **sections: dict[str, object]
) -> MemoryPlan:
    return plan_memory(MODEL_SHAPES[shape], GPUS[gpu], config_of(tp, **sections), 1300)


def test_a_70b_model_on_eight_h200_has_the_figures_worked_out_by_hand() -> None:
    got = plan()
    # 80 layers of (q and o of 64 heads, k and v of 8, three of the MLP), embedding and head.
    layer = 8192 * 128 * 2 * (64 + 8) + 3 * 8192 * 28672
    assert layer == 855_638_016
    assert got.shape.weight_bytes == 2 * (80 * layer + 2 * 8192 * 128256) == 141_104_775_168
    assert got.rank_weight_bytes == 141_104_775_168 // 8
    # K and V of 80 layers, 8 heads of 128 elements of two bytes: 320 KiB a token.
    assert got.replica_kv_bytes_per_token == 2 * 80 * 8 * 128 * 2 == 320 * 2**10
    assert got.rank_kv_bytes_per_token == 40 * 2**10
    assert got.layout.block_bytes == 640 * 2**10
    assert got.available_bytes == 141 * 10**9 - 17_638_096_896
    # Four fifths of what is left, in whole blocks.
    assert got.limits.num_blocks == 98_689_522_483 // 655_360 == 150_588
    assert got.limits.served_len == 131072
    # 82 blocks each; of which the default batch runs 64.
    assert got.num_that_fit(1300) == 150_588 // 82 == 1836
    assert got.num_at_once(1300) == 64


@pytest.mark.parametrize(
    ("kv_dtype", "block_bytes"),
    [("fp32", 1280 * 2**10), ("int8", 160 * (16 * 128 + 64)), ("fp8", 160 * (16 * 128 + 64))],
)
def test_the_dtype_of_the_cache_counts_with_its_scales(kv_dtype: KvDtype, block_bytes: int) -> None:
    got = plan(model={"kv_dtype": kv_dtype})
    assert got.layout.block_bytes == block_bytes
    # What the cost model reads of each token.
    assert got.shape.kv_bytes_per_token(8) == block_bytes / 16


def test_more_memory_or_more_ranks_hold_more_and_larger_weights_less() -> None:
    def blocks(**of: object) -> int:
        return plan(**of).limits.num_blocks  # type: ignore[arg-type]

    assert blocks(gpu="H100") < blocks(gpu="H200") < blocks(gpu="B200")
    assert blocks(tp=2) < blocks(tp=4) < blocks(tp=8)
    assert blocks(shape="llama-405b", gpu="B200") < blocks(shape="llama-70b", gpu="B200")
    assert blocks(cache={"num_blocks": 100}) == 100
    assert blocks(cache={"memory": 655_360 * 7 + 1}) == 7
    # No rows could fill a larger pool: two of 131,072 tokens.
    assert blocks(batch={"max_num_seqs": 2}) == 2 * 8192


def test_what_may_be_pinned_is_no_room_for_requests() -> None:
    got = plan(cache={"max_pinned_share": 0.5})
    assert got.num_that_fit(1300) == 150_588 // 2 // 82


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_where_all_divides_ranks_share_the_weights_evenly(num_ranks: int) -> None:
    shape = MODEL_SHAPES["llama-70b"]
    assert rank_weight_bytes(shape, num_ranks) * num_ranks == shape.weight_bytes


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_smallest_width() -> None:
    with pytest.raises(InvalidInputError) as refused:
        plan(tp=1)
    assert (refused.value.field, refused.value.value) == ("parallel.tensor_parallel_size", 1)
    text = str(refused.value)
    assert "at least 2: H200 has 141.0 GB" in text
    assert "141.1 GB for weights and 0.4 GB for the KV of 1,300 tokens on each of 1" in text
    assert "70.6 GB for weights and 0.2 GB for the KV of 1,300 tokens on each of 2" in text
    plan(tp=2)


def test_the_smallest_width_is_the_first_at_which_the_longest_request_fits() -> None:
    # 131,072 tokens take 21.5 GB on each of two; H100 has 80 and 70.6 are weights.
    shape, gpu = MODEL_SHAPES["llama-70b"], GPUS["H100"]
    plan_memory(shape, gpu, config_of(2), 1300)
    with pytest.raises(InvalidInputError, match="at least 3: "):
        plan_memory(shape, gpu, config_of(2), 131072)
    assert plan_memory(shape, gpu, config_of(3), 131072).num_that_fit(131072) == 1


@pytest.mark.parametrize(
    ("shape", "gpu", "tp", "sections", "field"),
    [
        ("llama-405b", "H100", 8, {}, "gpu"),
        ("llama-70b", "H200", 7, {"model": {"dtype": "fp32"}}, "model.dtype"),
        ("llama-70b", "H200", 9, {}, "tensor_parallel_size"),
        ("llama-405b", "H200", 2 * GPUS_PER_NODE, {}, "parallel.tensor_parallel_size"),
        ("llama-70b", "H200", 8, {"model": {"max_model_len": 1299}}, "longest request"),
        ("llama-70b", "H200", 8, {"cache": {"num_blocks": 10**6}}, "cache.num_blocks"),
        ("llama-70b", "H200", 8, {"cache": {"memory": 655_359}}, "cache.memory"),
    ],
)
def test_what_cannot_be_is_refused(
    shape: str, gpu: str, tp: int, sections: dict[str, dict[str, object]], field: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        plan(shape, gpu, tp, **sections)
    assert refused.value.field == field


class _OneRank(SoloCollectives):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


# Three KV heads on two ranks, and each of three on two ranks of six.
@pytest.mark.parametrize(("world_size", "kv_dtype"), [(1, "bf16"), (2, "int8"), (6, "fp32")])
def test_a_real_rank_has_the_weights_and_blocks_that_were_planned(
    make_llama: Callable[..., Path], world_size: int, kv_dtype: KvDtype
) -> None:
    directory = make_llama()
    config = config_of(world_size, model={"model": str(directory), "kv_dtype": kv_dtype})
    got = plan_memory(find_shape(str(directory)), GPUS["L40S"], config, 200)
    source = resolve_model(str(directory), Path("unused"))
    device = torch.device("cpu")
    ranks = [
        build_model(source, "bf16", _OneRank(rank, world_size), TorchBackend(), device, kv_dtype)
        for rank in range(world_size)
    ]
    assert got.layout == ranks[0].kv_layout(16)
    assert got.limits.max_model_len == source.spec.max_model_len
    blocks = [rank.kv_layout(16).block_bytes for rank in ranks]
    assert max(blocks) == got.layout.block_bytes
    if kv_dtype != "int8":  # Whose runs are padded on each rank.
        assert got.replica_kv_bytes_per_token == sum(blocks) / 16
    weights = [
        sum(
            tensor.nbytes
            for tensor in (*rank._model.parameters(), *rank._model.buffers())  # type: ignore[attr-defined]
            if tensor.dim() == 2
        )
        for rank in ranks
    ]
    assert max(weights) == got.rank_weight_bytes


def test_a_model_is_known_by_its_config_alone(make_llama: Callable[..., Path]) -> None:
    directory = make_llama(tie_word_embeddings=True)
    for file in directory.glob("*.safetensors"):
        file.unlink()
    shape = find_shape(str(directory))
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (2, 6, 3)
    assert shape.tied_embeddings


@pytest.mark.parametrize(
    ("family", "settings"), [("mixtral", {}), ("mistral", {"sliding_window": 64})]
)
def test_experts_and_windows_are_refused(
    make_model: Callable[..., Path], family: str, settings: dict[str, object]
) -> None:
    with pytest.raises(InvalidInputError, match="a dense model whose layers see all tokens"):
        find_shape(str(make_model(family, **settings)))


def test_a_config_that_lacks_a_size_is_named(make_llama: Callable[..., Path]) -> None:
    directory = make_llama()
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size"', '"other_size"'))
    with pytest.raises(InvalidInputError, match=r"config\.json: intermediate_size=None"):
        find_shape(str(directory))


def test_an_unknown_model_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"llama-70b, .* or a directory"):
        find_shape(str(tmp_path))
