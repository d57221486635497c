"""Sequences that share a prefix: read through one table row, merged with what each has alone."""

import dataclasses
from typing import Any

import pytest
import torch
from attend_case import attend
from paged_case import DEVICE, GARBAGE_BLOCK, NO_WINDOW, PagedCase, build
from pairwise import Case, pairwise

from rayserve_kernels.gpu.configs import DECODE_QUERIES
from rayserve_kernels.gpu.prefix_groups import SharedPrefixes

SPLIT_TOKENS = 64
NUM_COMPUTED = (200, 140, 150, 70, 149, 130)
NUM_NEW = (1, 3, 1, 2, 1, 20)
# Rows, each with the one whose first tokens it has and how many. Row 5 is a prompt and stays alone.
SHARED = ((1, 0, 128), (3, 0, 64), (4, 2, 144), (5, 0, 128))
AXES: dict[str, list[Any]] = {
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "pool": [None, torch.int8, torch.float8_e4m3fn],
    "order": ["block_major", "nhd", "hnd", "vectorised"],
    "block_size": [8, 16, 64],
    "heads": [(2, 2), (6, 2), (20, 1)],
    "head_dim": [64, 80, 256],
    "masks": [None, ((NO_WINDOW, 20, NO_WINDOW, 90, 1, 33), (0, 4, 0, 7, 0, 3))],
    "scores": [(None, False), (2.0, True)],
}


def share(case: PagedCase) -> PagedCase:
    """Give rows the blocks of others, and plan the step."""
    tables = case.metadata.block_tables.cpu()
    for row, other, num_tokens in SHARED:
        num_blocks = num_tokens // case.layout.block_size
        num_tokens = num_blocks * case.layout.block_size
        tables[row, :num_blocks] = tables[other, :num_blocks]
        case.keys[row][:, :num_tokens] = case.keys[other][:, :num_tokens]
        case.values[row][:, :num_tokens] = case.values[other][:, :num_tokens]
    shared = SharedPrefixes.for_step(
        tables.numpy(),
        NUM_COMPUTED,
        NUM_NEW,
        block_size=case.layout.block_size,
        split_tokens=SPLIT_TOKENS,
        most_queries=DECODE_QUERIES,
        device=DEVICE,
        least_saved_tokens=0,
    )
    assert shared is not None
    assert shared.first_split.tolist() == [2, 2, 2, 0, 2, 0]
    # What is shared is read through the first member's row; the others' entries are left alone.
    for row in (1, 4):
        tables[row, : 2 * SPLIT_TOKENS // case.layout.block_size] = GARBAGE_BLOCK
    metadata = dataclasses.replace(
        case.metadata, block_tables=tables.to(DEVICE), shared_prefixes=shared
    )
    return dataclasses.replace(case, metadata=metadata)


def check(choice: Case) -> None:
    windows, sinks = choice["masks"] or (None, None)
    soft_cap, has_alibi = choice["scores"]
    case = build(
        dtype=choice["dtype"],
        pool_dtype=choice["pool"],
        order=choice["order"],
        block_size=choice["block_size"],
        heads=choice["heads"],
        head_dim=choice["head_dim"],
        num_computed=NUM_COMPUTED,
        num_new=NUM_NEW,
        windows=windows,
        sinks=sinks,
        soft_cap=soft_cap,
        has_alibi=has_alibi,
    )
    case = share(case)
    assert case.agrees(attend(case))


@pytest.mark.parametrize("choice", pairwise(AXES))
def test_a_shared_prefix_is_read_for_all_and_merged_with_what_is_a_sequences_own(
    choice: Case,
) -> None:
    check(choice)


def test_a_plan_for_other_splits_is_refused() -> None:
    case = share(build(dtype=torch.float32, num_computed=NUM_COMPUTED, num_new=NUM_NEW))
    shared = case.metadata.shared_prefixes
    assert shared is not None
    other = dataclasses.replace(shared, split_tokens=96)
    case.metadata = dataclasses.replace(case.metadata, shared_prefixes=other)
    with pytest.raises(ValueError, match="split_tokens=96: expected 64"):
        attend(case)
