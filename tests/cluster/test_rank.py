"""What a rank computes attention with, and that its blocks say so."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from random_model import make_llama, make_model
from torch.distributed import HashStore

from rayserve_cluster.rank import Rank, start_rank
from rayserve_cluster.tp_group import TpGroup
from rayserve_kernels.native_build import available_widths
from rayserve_kernels.native_cpu import native_or_torch
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import InvalidInputError

__all__ = ["make_llama", "make_model"]


def started(**sections: dict[str, object]) -> Rank:
    config = DeploymentConfig.model_validate(sections)
    group = TpGroup(0, 1, timeout_s=10.0)
    try:
        return start_rank(config, group, None, "first")
    finally:
        group.abort("done")


def numerics() -> str:
    cache: dict[str, object] = {"num_blocks": 8, "block_size": 8}
    return started(model={"model": "fingerprint"}, cache=cache).scope.numerics


def test_blocks_that_the_native_kernel_had_a_part_in_match_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSERVE_CACHE_DIR", str(tmp_path / "one"))
    assert numerics() == native_or_torch(tmp_path / "one" / "rayserve-paged").numerics
    monkeypatch.setenv("RAYSERVE_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("PATH", "")
    assert numerics() == "default"


def test_the_attention_of_cpus_can_be_chosen_and_is_part_of_the_scope() -> None:
    cache: dict[str, object] = {"num_blocks": 8, "block_size": 8}
    scopes = [
        started(model={"model": "fingerprint", "cpu_attention": name}, cache=cache).scope
        for name in ("torch", "portable", available_widths()[0])
    ]
    assert [scope.numerics for scope in scopes] == [
        *("default", "native-portable", f"native-{available_widths()[0]}")
    ]
    assert len({scope.root() for scope in scopes}) == len({scope.numerics for scope in scopes})


def test_an_attention_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: dict[str, object] = {"model": "fingerprint", "cpu_attention": "avx2"}
    monkeypatch.setattr("rayserve_cluster.rank.available_widths", lambda: ("portable",))
    with pytest.raises(InvalidInputError, match=r"='avx2' .* torch, or .* processor has: portable"):
        started(model=model, cache={"num_blocks": 8})
    monkeypatch.setenv("RAYSERVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    model["cpu_attention"] = "portable"
    with pytest.raises(InvalidInputError, match=r"='portable' .* torch .*no C\+\+ compiler"):
        started(model=model, cache={"num_blocks": 8})


def test_ranks_that_compute_differently_make_no_replica() -> None:
    base = {"model": "fingerprint", "dtype": "fp32"}
    configs = [
        DeploymentConfig.model_validate(
            {"model": {**base, "cpu_attention": name}, "cache": {"num_blocks": 8}}
        )
        for name in ("torch", "portable")
    ]
    meeting = HashStore()
    groups = [TpGroup(index, 2, timeout_s=60.0) for index in range(2)]
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(start_rank, config, group, meeting, "first")
            for config, group in zip(configs, groups, strict=True)
        ]
    for group in groups:
        group.abort("done")
    errors = [str(future.exception()) for future in futures]
    for error, name in zip(errors, ("default", "native-portable"), strict=True):
        assert f"every rank of the replica has (this one computes by {name})" in error


def test_the_scope_names_the_coding_and_memory_buys_blocks_with_their_scales(
    make_llama: Callable[..., Path],
) -> None:
    model = str(make_llama(head_dim=32))
    roots = set()
    for kv_dtype, coding, vector_bytes in (
        (None, "float32", 128),
        ("fp16", "float16", 64),
        ("int8", "int8-per-slot", 36),
        ("fp8", "float8_e4m3fn-per-slot", 36),
    ):
        rank = started(
            model={"model": model, "kv_dtype": kv_dtype}, cache={"memory": 2**20, "block_size": 8}
        )
        assert rank.scope.kv_dtype == coding
        # 2 layers, K and V, 3 KV heads, 8 slots.
        block_bytes = 2 * 2 * 3 * 8 * vector_bytes
        assert rank.limits.num_blocks == 2**20 // block_bytes
        assert rank.runner.pool.payload.numel() == rank.limits.num_blocks * block_bytes
        roots.add(rank.scope.root())
    assert len(roots) == 4


def test_a_dtype_for_the_cache_of_the_fingerprint_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"model\.kv_dtype='fp8' .* nothing for the finger"):
        started(model={"model": "fingerprint", "kv_dtype": "fp8"})
