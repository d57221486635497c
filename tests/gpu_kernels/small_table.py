"""Launch configurations under which short sequences have several splits, and tiles of each kind."""

import typing

from rayserve_kernels.gpu.configs import Key, Kind, LaunchConfig, LaunchTable, Width

_CONFIGS: dict[Kind, LaunchConfig] = {
    "decode": LaunchConfig(16, 32, 64, 4, 2),
    "decode_wide": LaunchConfig(32, 32, 64, 4, 2),
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
