"""Run the kernels on a case, under configurations that cut short sequences into several pieces."""

import typing

import torch
from paged_case import DEVICE, PagedCase

from rayserve_kernels.gpu.configs import Key, Kind, LaunchConfig, LaunchTable, Width
from rayserve_kernels.gpu.launch import attend_layer

_CONFIGS: dict[Kind, LaunchConfig] = {
    "decode": LaunchConfig(16, 32, 64, 4, 2),
    "decode_wide": LaunchConfig(32, 32, 64, 4, 2),
    "shared": LaunchConfig(32, 32, None, 4, 2),
    "prefill": LaunchConfig(32, 32, None, 4, 2),
}
SMALL_TABLE = LaunchTable(
    {
        Key("any", head_dim, width, kind): config
        for head_dim in (64, 128, 256)
        for width in typing.get_args(Width)
        for kind, config in _CONFIGS.items()
    }
)


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
