"""Attention over a paged pool by a native kernel, built when it is first asked for."""

import ctypes
import functools
import logging
import threading
from pathlib import Path
from typing import Final

import torch

from rayserve_kernels.attention import (
    AttentionBackend,
    AttentionMetadata,
    TorchBackend,
    check_attend,
)
from rayserve_kernels.layout import KVPool
from rayserve_kernels.native_build import COMPILERS, BuildError, Width, build_library, widest

logger = logging.getLogger(__name__)

_DTYPES: Final = (torch.float32, torch.bfloat16)
_BAD_TABLE: Final = 2
_NO_MEMORY: Final = 3
_choosing = threading.Lock()


class _Arguments(ctypes.Structure):
    """`rayserve::Arguments` of native/paged_attention.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_bytes", "is_bfloat16", "num_threads")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "queries", "outputs")),
        *((name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("windows", "num_sinks")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_seqs", "table_width", "num_blocks", "block_size"),
                *("num_q_heads", "num_kv_heads", "head_dim"),
                *("key_block", "key_head", "key_slot", "key_part", "part_dim"),
                *("value_block", "value_head", "value_slot"),
                *("query_token", "query_head"),
            )
        ),
        ("scale", ctypes.c_double),
    )


class NativeBackend(TorchBackend):
    """The native kernel for fp32 and bf16 on CPUs; what it does not take, torch computes.

    The bits of a sequence's result depend on the instruction set, and on nothing else: neither on
    the batch, nor on the threads, nor on the chunks in which a prompt was computed, nor on the
    pool's layout. Runs on as many threads as torch does.

    Args:
        library: As `native_build.build_library` made it.
        width: Instruction set that it was built for, which this processor must have.

    Attributes:
        numerics: Class of results that agree bit for bit.

    Raises:
        OSError: The library cannot be loaded.
    """

    def __init__(self, library: Path, width: Width) -> None:
        self.numerics = f"native-{width}"
        self._attend = ctypes.CDLL(str(library)).rayserve_attend

    def attend(
        self,
        pool: KVPool,
        layer: int,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        soft_cap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`.

        Raises:
            ValueError: Also where a block table is too short or names a block that is none.
            MemoryError: No memory for the threads' scratch space.
        """
        dtype = pool.layout.dtype
        is_taken = dtype in _DTYPES and dtype == queries.dtype and pool.device.type == "cpu"
        if not is_taken or soft_cap is not None or alibi_slopes is not None:
            return super().attend(
                pool,
                layer,
                queries,
                metadata,
                scale,
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
            )
        check_attend(pool, queries, metadata)
        # Whatever the kernel follows must make sense; worked out once a step.
        _ = metadata.spans
        outputs = torch.empty(queries.shape, dtype=queries.dtype)
        arguments = _arguments(pool, layer, queries, metadata, scale, outputs)
        status = self._attend(ctypes.byref(arguments))
        if status == _BAD_TABLE:
            raise ValueError(
                f"block_tables: expected an entry from 0 to {pool.num_blocks - 1} for each block "
                f"of a sequence"
            )
        if status == _NO_MEMORY:
            raise MemoryError("no memory for the scratch space of attention")
        assert status == 0, status
        return outputs


def native_or_torch(
    cache_dir: Path, width: Width | None = None, compilers: tuple[str, ...] = COMPILERS
) -> AttentionBackend:
    """Build or load the native kernel; without one, log a line once and take torch.

    Args:
        cache_dir: Where libraries are kept.
        width: Instruction set; None for the widest of this processor.
        compilers: As `native_build.build_library`.
    """
    # Ranks may be threads, and one of them is to build and to complain.
    with _choosing:
        return _choose(cache_dir, widest() if width is None else width, compilers)


@functools.cache
def _choose(cache_dir: Path, width: Width, compilers: tuple[str, ...]) -> AttentionBackend:
    try:
        return NativeBackend(build_library(cache_dir, width, compilers), width)
    except (BuildError, OSError) as error:
        logger.warning("no native attention, torch computes it instead: %s", error)
        return TorchBackend()


def _arguments(
    pool: KVPool,
    layer: int,
    queries: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    outputs: torch.Tensor,
) -> _Arguments:
    layout = pool.layout
    keys, values = pool.key_view(layer), pool.value_view(layer)
    # The vectorised order keeps a key in parts.
    is_split = keys.dim() == 5
    windows, num_sinks = metadata.windows, metadata.num_sinks
    return _Arguments(
        ctypes.sizeof(_Arguments),
        layout.dtype == torch.bfloat16,
        torch.get_num_threads(),
        keys.data_ptr(),
        values.data_ptr(),
        queries.data_ptr(),
        outputs.data_ptr(),
        metadata.query_start.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.block_tables.data_ptr(),
        None if windows is None else windows.data_ptr(),
        None if num_sinks is None else num_sinks.data_ptr(),
        metadata.seq_lens.numel(),
        metadata.block_tables.shape[1],
        pool.num_blocks,
        layout.block_size,
        queries.shape[1],
        layout.num_kv_heads,
        layout.head_dim,
        *keys.stride()[:3],
        keys.stride(3) if is_split else 0,
        layout.vector_size if is_split else layout.head_dim,
        *values.stride()[:3],
        *queries.stride()[:2],
        scale,
    )
