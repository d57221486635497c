"""The Triton attention kernels against float64, over a pool whose other slots hold NaN."""

from typing import Any

import pytest
import torch
from paged_case import DEVICE, NO_WINDOW, PagedCase, build
from pairwise import Case, pairwise
from small_table import SMALL_TABLE

from rayserve_kernels.gpu.configs import LaunchTable
from rayserve_kernels.gpu.launch import attend_layer

# Several tiles and splits; positions that are and are not multiples of tiles and blocks.
BATCHES = {
    "decode": ((130, 63, 0), (1, 1, 1)),
    "speculative": ((61, 30), (5, 8)),
    "prefill": ((0, 50), (45, 33)),
    "mixed": ((70, 12, 31, 5), (1, 40, 3, 0)),
}
AXES: dict[str, list[Any]] = {
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "pool": [None, torch.int8, torch.float8_e4m3fn],
    "order": ["block_major", "nhd", "hnd", "vectorised"],
    "block_size": [8, 16, 24, 128],
    "heads": [(2, 2), (6, 2), (7, 1), (20, 1)],
    "head_dim": [64, 80, 96, 128, 256],
    "batch": list(BATCHES),
    "masks": [None, ((8,), (0,)), ((1, 40, NO_WINDOW, 33), (4, 0, 7, 20))],
    "soft_cap": [None, 2.0],
    "has_alibi": [False, True],
}


def attend(case: PagedCase, table: LaunchTable = SMALL_TABLE) -> torch.Tensor:
    slopes = case.alibi_slopes
    return attend_layer(
        case.view,
        torch.cat(case.queries).to(DEVICE),
        case.metadata,
        case.scale,
        gpu="interpreter",
        table=table,
        soft_cap=case.soft_cap,
        alibi_slopes=None if slopes is None else slopes.to(DEVICE),
    )


def check(choice: Case) -> None:
    computed, new = BATCHES[choice["batch"]]
    windows, sinks = choice["masks"] or (None, None)
    case = build(
        dtype=choice["dtype"],
        pool_dtype=choice["pool"],
        order=choice["order"],
        block_size=choice["block_size"],
        heads=choice["heads"],
        head_dim=choice["head_dim"],
        num_computed=computed,
        num_new=new,
        windows=windows,
        sinks=sinks,
        soft_cap=choice["soft_cap"],
        has_alibi=choice["has_alibi"],
    )
    assert case.agrees(attend(case))


def name(choice: Case) -> str:
    return "-".join(str(value).removeprefix("torch.").replace(" ", "") for value in choice.values())


@pytest.mark.parametrize("choice", pairwise(AXES), ids=name)
def test_the_kernels_agree_with_float64(choice: Case) -> None:
    check(choice)
