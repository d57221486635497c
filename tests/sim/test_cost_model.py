"""The roofline and what fits a GPU, computed by hand for a tiny model and for published ones."""

import dataclasses

import numpy as np
import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.step_messages import IntArray
from rayserve_paged.sim.cost_model import RooflineCost, count_work
from rayserve_paged.sim.hardware import (
    GPUS,
    MODEL_SHAPES,
    GpuSpec,
    ModelShape,
    num_blocks_that_fit,
)
from rayserve_paged.sim.links import LinkSpec

# One layer of 2 query heads, 1 KV head, 4 elements each; hidden 8, MLP 16, 32 ids, bf16.
TINY = ModelShape("tiny", 1, 8, 2, 1, 4, 16, 32, 1024)
# A million operations and 10,000 bytes per second: few tokens wait for bytes, many compute.
GPU = GpuSpec("toy", 1e6, 1e4, 100_000, LinkSpec(0.001, 1e5), LinkSpec(0.002, 1e5))


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def tiny_cost(**changes: float) -> RooflineCost:
    cost = RooflineCost(
        gpu=GPU,
        shape=TINY,
        tensor_parallel_size=1,
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        overhead_s=0.0,
    )
    return dataclasses.replace(cost, **changes)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_the_weights_of_a_shape_are_those_of_its_matrices() -> None:
    # q 8x8, k and v 8x4 each, o 8x8, three of 8x16; the head 32x8 and as much to embed.
    assert TINY.num_layer_weights == 64 + 32 + 32 + 64 + 384 == 576
    assert TINY.num_head_weights == 256
    assert TINY.weight_bytes == 2 * (576 + 2 * 256)
    assert dataclasses.replace(TINY, tied_embeddings=True).weight_bytes == 2 * (576 + 256)
    # K and V of one head of 4 elements of 2 bytes.
    assert TINY.kv_bytes_per_token(1) == 16


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-8b", 8.03), ("llama-70b", 70.55), ("llama-405b", 405.8)]
)
def test_published_models_have_their_published_sizes(name: str, billions: float) -> None:
    # Norms are left out, a few ten thousand weights.
    assert MODEL_SHAPES[name].weight_bytes / 2e9 == pytest.approx(billions, rel=1e-3)


def test_a_decode_step_that_reads_more_than_it_computes_takes_what_the_reading_takes() -> None:
    (seconds,) = tiny_cost().step_seconds(ints(99, 49), ints(1, 1), 2, 1)
    layers = 576 * 2 / 1e4  # 2 tokens compute for 2 x 2 x 576 / 1e6 alone.
    attention = (100 + 50) * 16 / 1e4
    head = 256 * 2 / 1e4
    to_host = 0.002 + 2 * 4 / 1e5
    assert seconds == pytest.approx(layers + attention + head + to_host, rel=1e-12)


def test_a_prefill_that_computes_more_than_it_reads_takes_what_the_computing_takes() -> None:
    (seconds,) = tiny_cost().step_seconds(ints(100), ints(300), 1, 1)
    layers = 2 * 576 * 300 / 1e6
    # The i-th of the 300 attends to 100 + i; two products for each of 2 heads of 4 elements.
    pairs = sum(100 + i for i in range(1, 301))
    attention = 4 * 2 * 4 * pairs / 1e6
    head = 256 * 2 / 1e4
    to_host = 0.002 + 4 / 1e5
    assert seconds == pytest.approx(layers + attention + head + to_host, rel=1e-12)


def test_a_chunk_that_samples_nothing_needs_no_logits() -> None:
    with_sample, without = (
        tiny_cost().step_seconds(ints(0), ints(8), num_samples, 1)[0] for num_samples in (1, 0)
    )
    assert with_sample - without == pytest.approx(256 * 2 / 1e4 + 4 / 1e5, rel=1e-9)


def test_two_ranks_halve_the_work_and_reduce_twice_a_layer() -> None:
    cost = tiny_cost(tensor_parallel_size=2)
    (seconds,) = cost.step_seconds(ints(99), ints(1), 1, 1)
    layers = 576 * 2 / 2 / 1e4
    attention = 100 * 16 / 1e4  # One KV head cannot be halved: both ranks hold it.
    head = 256 * 2 / 2 / 1e4
    # A ring of two: 2 hops, each of half the row of 8 elements.
    reduce = 2 * (2 * 0.001 + 2 * 16 / 2 / 1e5)
    to_host = 0.002 + 4 / 1e5
    assert seconds == pytest.approx(layers + attention + head + reduce + to_host, rel=1e-12)


def test_ranks_on_several_nodes_reduce_over_the_network() -> None:
    shape = dataclasses.replace(TINY, num_heads=16)
    slow = LinkSpec(0.1, 1e5)
    near, far = (
        RooflineCost(gpu=GPU, shape=shape, tensor_parallel_size=width, between_nodes=slow)
        .step_seconds(ints(9), ints(1), 1, 1)
        .item()
        for width in (8, 16)
    )
    assert near < 2 * 14 * 0.001 + 0.2
    assert far > 2 * 30 * 0.1


def test_efficiency_and_overhead_make_a_step_longer() -> None:
    (plain,) = tiny_cost().step_seconds(ints(99), ints(1), 1, 1)
    (halved,) = tiny_cost(memory_efficiency=0.5, overhead_s=0.25).step_seconds(
        ints(99), ints(1), 1, 1
    )
    to_host = 0.002 + 4 / 1e5
    assert halved == pytest.approx(2 * (plain - to_host) + to_host + 0.25, rel=1e-12)


def test_the_steps_of_a_plan_take_exactly_what_single_steps_take() -> None:
    cost = RooflineCost(gpu=GPUS["H200"], shape=MODEL_SHAPES["llama-70b"], tensor_parallel_size=8)
    computed = ints(5000, 17, 123456)
    several = cost.step_seconds(computed, ints(1, 1, 1), 3, 50)
    single = [
        cost.step_seconds(computed + np.int32(step), ints(1, 1, 1), 3, 1)[0] for step in range(50)
    ]
    assert several.tolist() == single
    assert several.tolist()[:7] == cost.step_seconds(computed, ints(1, 1, 1), 3, 7).tolist()


def test_a_70b_model_decodes_on_8_h200_at_what_the_memory_gives() -> None:
    cost = RooflineCost(gpu=GPUS["H200"], shape=MODEL_SHAPES["llama-70b"], tensor_parallel_size=8)
    (seconds,) = cost.step_seconds(ints(1000), ints(1), 1, 1)
    # 141 GB over 8 x 4.8 TB/s at 80% are 4.6 ms; 160 all-reduces of 14 hops 2.2 ms.
    assert 0.0065 < seconds < 0.0080


def test_work_is_counted_by_tokens_contexts_and_pairs() -> None:
    work = count_work(ints(10, 4), ints(3, 1), 3)
    assert work.num_tokens.tolist() == [4, 2, 2]
    assert work.num_context_tokens.tolist() == [18, 20, 22]
    assert work.num_pairs.tolist() == [11 + 12 + 13 + 5, 20, 22]


def test_the_blocks_that_fit_are_what_the_weights_leave() -> None:
    # 90,000 bytes less 2,176 of weights, in blocks of 4 x 16.
    assert num_blocks_that_fit(GPU, TINY, 1, 4) == (90_000 - 2_176) // 64
    assert num_blocks_that_fit(GPU, TINY, 1, 4, memory_share=0.5) == (50_000 - 2_176) // 64
    # 126.9 GB less an eighth of 141.1; 16 tokens of 80 layers, one KV head on each rank.
    shape = MODEL_SHAPES["llama-70b"]
    bytes_left = 141e9 * 0.9 - shape.weight_bytes / 8
    assert num_blocks_that_fit(GPUS["H200"], shape, 8, 16) == int(
        bytes_left // (16 * 2 * 80 * 128 * 2)
    )


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidInputError, match="more than 157 GB for llama-70b on 1 ranks"):
        num_blocks_that_fit(GPUS["H200"], MODEL_SHAPES["llama-70b"], 1, 16)
    with pytest.raises(InvalidInputError, match="memory_share"):
        num_blocks_that_fit(GPU, TINY, 1, 16, memory_share=1.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 3),
        ("compute_efficiency", 0.0),
        ("memory_efficiency", 1.1),
        ("overhead_s", -1.0),
        ("overhead_s", float("nan")),
    ],
)
def test_what_no_replica_can_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError) as refused:
        tiny_cost(**{field: value})
    assert refused.value.field == field
