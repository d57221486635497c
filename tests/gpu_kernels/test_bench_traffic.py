"""What a step must move and multiply, counted by hand, and the bounds that follow from it."""

import dataclasses
import re

import pytest

from rayserve_kernels.gpu_bench import roofline
from rayserve_kernels.gpu_bench.cases import (
    TARGET,
    cascade_cases,
    decode_cases,
    prefill_cases,
)
from rayserve_kernels.gpu_bench.traffic import Case, Traffic, flops_of, traffic_of
from rayserve_paged.sim.hardware import GPUS

SMALL = Case(3, 40, num_q_heads=6, num_kv_heads=2, head_dim=64, block_size=16)


def test_the_target_moves_a_gibibyte_of_keys_and_values() -> None:
    traffic = traffic_of(TARGET, split_tokens=512)
    assert traffic == Traffic(
        keys_values=2**30,
        scales=0,
        tables=64 * 256 * 4,
        queries=64 * 32 * 128 * 2,
        outputs=64 * 32 * 128 * 2,
        partials=2 * 64 * 32 * 8 * 129 * 4,
    )
    assert traffic.needed == 2**30 + 65_536 + 2 * 524_288
    assert traffic.total == traffic.needed + 16_908_288


def test_codes_take_a_byte_and_each_vector_a_scale() -> None:
    codes = traffic_of(dataclasses.replace(SMALL, dtype="int8"))
    assert codes == traffic_of(dataclasses.replace(SMALL, dtype="fp8"))
    assert codes.keys_values == 2 * 3 * 40 * 2 * 64
    assert codes.scales == 2 * 3 * 40 * 2 * 4
    floats = traffic_of(SMALL)
    assert floats == traffic_of(dataclasses.replace(SMALL, dtype="fp16"))
    assert (floats.keys_values, floats.scales) == (2 * codes.keys_values, 0)
    # Queries and outputs are of two bytes beside codes too; a part of a block counts as one.
    assert codes.queries == codes.outputs == floats.queries == 3 * 6 * 64 * 2
    assert codes.tables == 3 * 3 * 4


def test_a_shared_prefix_is_read_once() -> None:
    shared = traffic_of(dataclasses.replace(SMALL, shared_tokens=32))
    assert shared.keys_values == 2 * (32 + 3 * 8) * 2 * 64 * 2
    assert shared.tables == traffic_of(SMALL).tables


@pytest.mark.parametrize(
    ("num_queries", "split_tokens", "num_splits"),
    [(1, None, 0), (1, 64, 0), (1, 40, 0), (1, 16, 3), (8, 16, 3), (9, 16, 0)],
)
def test_only_a_decode_of_several_splits_has_partial_outputs(
    num_queries: int, split_tokens: int | None, num_splits: int
) -> None:
    case = dataclasses.replace(SMALL, num_queries=num_queries)
    entries = 3 * num_queries * 6 * num_splits
    assert traffic_of(case, split_tokens).partials == 2 * entries * (64 + 1) * 4


def test_only_pairs_that_are_seen_count_as_operations() -> None:
    # A query at each of positions 37, 38 and 39, which see 38, 39 and 40 positions.
    case = dataclasses.replace(SMALL, num_queries=3)
    assert flops_of(case) == 3 * (38 + 39 + 40) * 6 * 64 * 4
    assert flops_of(SMALL) == 3 * 40 * 6 * 64 * 4


def test_the_target_is_among_all_dtypes_and_orders_and_sizes_beside_it() -> None:
    few, full = list(decode_cases()), list(decode_cases(is_full=True))
    assert few[0] == full[0] == TARGET
    assert len(set(few)) == len(few) == 4 * 4 + 2 * 4 * 4 - 2
    assert len(set(full)) == len(full) == 4 * 4 * 4 * 4
    assert set(few) < set(full)
    assert all(case.num_queries == 1 and not case.shared_tokens for case in full)
    # Whole splits of the lengths that tables have: a part of one would not be shared.
    assert all(case.shared_tokens % 1024 == 0 for case in cascade_cases())
    assert all(case.num_queries > 8 for case in prefill_cases())


def test_bandwidths_are_those_that_simulations_take() -> None:
    known = {name: rate for name, rate in roofline.MEMORY_BYTES_PER_S.items() if name in GPUS}
    assert known.keys() == {"A100", "H100", "H200"}
    assert known == {name: GPUS[name].memory_bytes_per_s for name in known}


def test_a_bound_is_bytes_over_nine_tenths_of_the_bandwidth() -> None:
    assert roofline.step_us(TARGET, 4.8e12) == pytest.approx(248.81, abs=0.01)
    row = next(line for line in roofline.table().splitlines() if "**" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["**64, 4,096, bf16**", "1,074.9"]
    # 64 tokens after 32 layers.
    assert cells[4] == "248.8 µs, 8,038/s"
    assert len(re.findall(r"µs", roofline.table())) == 5 * 4
