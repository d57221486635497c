"""What a rank computes attention with, and that its blocks say so."""

from pathlib import Path

import pytest

from rayserve_cluster.rank import start_rank
from rayserve_cluster.tp_group import TpGroup
from rayserve_kernels.native_cpu import native_or_torch
from rayserve_paged.core.config import DeploymentConfig


def numerics() -> str:
    config = DeploymentConfig.model_validate(
        {"model": {"model": "fingerprint"}, "cache": {"num_blocks": 8, "block_size": 8}}
    )
    group = TpGroup(0, 1, timeout_s=10.0)
    try:
        return start_rank(config, group, None, "first").scope.numerics
    finally:
        group.abort("done")


def test_blocks_that_the_native_kernel_had_a_part_in_match_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSERVE_CACHE_DIR", str(tmp_path / "one"))
    assert numerics() == native_or_torch(tmp_path / "one" / "rayserve-paged").numerics
    monkeypatch.setenv("RAYSERVE_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("PATH", "")
    assert numerics() == "default"
