"""The Triton attention kernels against float64, over a pool whose other slots hold NaN."""

from typing import Any

import pytest
import torch
from attend_case import attend
from paged_case import NO_WINDOW, build
from pairwise import Case, pairwise, product

# Several tiles and splits; positions that are and are not multiples of tiles and blocks.
BATCHES = {
    "decode": ((130, 63, 0), (1, 1, 1)),
    "speculative": ((61, 30), (5, 8)),
    "prefill": ((0, 50), (45, 33)),
    "mixed": ((70, 12, 31, 5), (1, 40, 3, 0)),
}
AXES: dict[str, list[Any]] = {
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "pool": [None, torch.int8, torch.float8_e4m3fn, torch.bfloat16],
    "order": ["block_major", "nhd", "hnd", "vectorised"],
    "block_size": [8, 16, 24, 128],
    "heads": [(2, 2), (6, 2), (7, 1), (20, 1)],
    "head_dim": [64, 80, 96, 128, 256],
    "batch": list(BATCHES),
    "masks": [None, ((8,), (0,)), ((1, 40, NO_WINDOW, 33), (4, 0, 7, 20))],
    "soft_cap": [None, 2.0],
    "has_alibi": [False, True],
}


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


WIDE_AXES = {
    **AXES,
    "block_size": [1, 8, 16, 24, 32, 64, 128],
    "heads": [(1, 1), (2, 2), (6, 2), (7, 1), (20, 1), (9, 3)],
    "pool": [*AXES["pool"], torch.float16, torch.float32],
    "head_dim": [16, 64, 80, 96, 112, 128, 160, 256],
    "soft_cap": [None, 2.0, 30.0],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [choice for seed in (2, 3, 4) for choice in pairwise(WIDE_AXES, tries=4, seed=seed)],
    ids=name,
)
def test_the_kernels_agree_with_float64_over_more_choices(choice: Case) -> None:
    check(choice)


# One test for many cases, since pytest would take longer to list them than they take.
@pytest.mark.prove
@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("pool", AXES["pool"])
@pytest.mark.parametrize("order", AXES["order"])
def test_the_kernels_agree_with_float64_over_the_product(
    dtype: torch.dtype, pool: torch.dtype | None, order: str
) -> None:
    axes = {name: AXES[name] for name in ("head_dim", "batch", "masks", "soft_cap")}
    for index, choice in enumerate(product(axes)):
        check(
            {
                **choice,
                "dtype": dtype,
                "pool": pool,
                "order": order,
                # Round and round, each with every other choice.
                "block_size": AXES["block_size"][index % 4],
                "heads": AXES["heads"][index // 4 % 4],
                "has_alibi": index // 16 % 2 == 0,
            }
        )
