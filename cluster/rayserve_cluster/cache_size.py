"""How many blocks a rank's pool gets: what was asked for, against the memory there is."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from rayserve_paged.core.attention_window import AttentionWindow, num_blocks_held
from rayserve_paged.core.config import CacheConfig
from rayserve_paged.core.errors import InvalidInputError

DEFAULT_CPU_BYTES = 1 << 30
DEFAULT_GPU_SHARE = 0.8
"""Of the memory that is free once the weights are loaded; the rest is for activations."""


def default_pool_bytes(available_bytes: int, *, on_gpu: bool) -> int:
    """Return the bytes of a pool of which the user names no size.

    Args:
        available_bytes: Memory that is free once the weights are loaded.
        on_gpu: Of a GPU, which a rank has to itself.
    """
    return int(available_bytes * DEFAULT_GPU_SHARE) if on_gpu else DEFAULT_CPU_BYTES


def max_useful_blocks(
    cache: CacheConfig, windows: Sequence[AttentionWindow], *, max_num_seqs: int, max_model_len: int
) -> int:
    """Return how many blocks there are if all rows are filled to the longest sequence.

    Args:
        cache: What the user asked for.
        windows: Of the model's layer groups.
        max_num_seqs: Sequences that run at once.
        max_model_len: Tokens of the longest.
    """
    num_useful = max_num_seqs * num_blocks_held(windows, max_model_len, cache.block_size)
    return math.ceil(num_useful / (1 - cache.max_pinned_share))


def choose_num_blocks(
    cache: CacheConfig,
    *,
    block_bytes: int,
    available_bytes: int,
    default_bytes: int,
    max_useful_blocks: int,
) -> int:
    """Return how many blocks one rank can offer.

    Args:
        cache: What the user asked for.
        block_bytes: Bytes of one block on this rank.
        available_bytes: Memory that this rank may take.
        default_bytes: Pool where the user names neither blocks nor memory.
        max_useful_blocks: Blocks beyond which a default pool would never be filled.

    Raises:
        InvalidInputError: The pool would be larger than the memory, or smaller than one block.
    """
    most = available_bytes // block_bytes
    if cache.num_blocks is not None:
        if cache.num_blocks > most:
            raise InvalidInputError(
                "cache.num_blocks",
                cache.num_blocks,
                f"at most {most} blocks of {block_bytes} bytes, since {available_bytes} bytes of "
                f"memory are available to each rank",
            )
        return cache.num_blocks
    if cache.memory is not None:
        if not block_bytes <= cache.memory <= available_bytes:
            raise InvalidInputError(
                "cache.memory",
                int(cache.memory),
                f"from {block_bytes} bytes, which is one block, to {available_bytes}, which is "
                f"what is available to each rank",
            )
        return int(cache.memory) // block_bytes
    num_blocks = min(default_bytes // block_bytes, most, max_useful_blocks)
    if num_blocks < 1:
        raise InvalidInputError(
            "cache.num_blocks",
            None,
            f"more memory: a block takes {block_bytes} bytes and {available_bytes} are available",
        )
    return num_blocks


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device, container limits included."""
    if device.type == "cuda":
        free_bytes, _total = torch.cuda.mem_get_info(device)
        return free_bytes
    available = _meminfo_bytes("MemAvailable")
    if available is None:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _control_group_bytes("memory.max")
    if limit is None:
        return available
    # Most of what the page cache takes of a limit can be had back.
    used = (_control_group_bytes("memory.current") or 0) - _control_group_cache_bytes()
    return max(0, min(available, limit - used))


def _meminfo_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def _control_group_bytes(name: str) -> int | None:
    try:
        value = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(value) if value.isdigit() else None


def _control_group_cache_bytes() -> int:
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
