"""Attention over a paged pool by a native kernel, built when it is first asked for."""

import ctypes
import functools
import logging
import threading
from pathlib import Path
from typing import Final

import torch

from rayserve_kernels.attention import AttentionBackend, TorchBackend, check_attend
from rayserve_kernels.layout import KVPool
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.native_build import COMPILERS, BuildError, Width, build_library, widest

logger = logging.getLogger(__name__)

# `rayserve::Format` of native/arguments.h.
_FORMATS: Final = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}
_QUERY_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_BAD_TABLE: Final = 2
_NO_MEMORY: Final = 3
_choosing = threading.Lock()


class _Arguments(ctypes.Structure):
    """`rayserve::Arguments` of native/arguments.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_bytes", "query_format", "kv_format")),
        ("num_threads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, ctypes.c_void_p) for name in ("queries", "outputs")),
        *((name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("windows", "num_sinks", "alibi_slopes")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_seqs", "table_width", "num_blocks", "block_size"),
                *("num_q_heads", "num_kv_heads", "head_dim"),
                *("key_block", "key_head", "key_slot"),
                *("key_part", "part_dim"),
                *("value_block", "value_head", "value_slot"),
                *("key_scale_block", "key_scale_head", "key_scale_slot"),
                *("value_scale_block", "value_scale_head", "value_scale_slot"),
                *("query_token", "query_head"),
            )
        ),
        *((name, ctypes.c_double) for name in ("scale", "soft_cap")),
    )


class NativeBackend(TorchBackend):
    """The native kernel on CPUs; what it does not take (fp64, integers), torch computes.

    Queries are fp32, bf16 or fp16; the pool is one of these, or int8 or fp8 with scales, whatever
    the queries are. Products are made and added up in fp32; where the instruction set has products
    of bf16, and both are bf16, the weights of the values are rounded to bf16. The bits of a
    sequence's result depend on the instruction set, and on nothing else: neither on the batch, nor
    on the threads, nor on the chunks in which a prompt was computed, nor on the pool's layout. Runs
    on as many threads as torch does.

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
        if not _takes(pool, queries):
            return super().attend(
                pool,
                layer,
                queries,
                metadata,
                scale,
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
            )
        check_attend(pool, queries, metadata, soft_cap=soft_cap, alibi_slopes=alibi_slopes)
        # Whatever the kernel follows must make sense; worked out once a step.
        _ = metadata.spans
        outputs = torch.empty(queries.shape, dtype=queries.dtype)
        arguments = _arguments(pool, layer, queries, metadata, outputs)
        arguments.scale = scale
        arguments.soft_cap = 0.0 if soft_cap is None else soft_cap
        arguments.alibi_slopes = None if alibi_slopes is None else alibi_slopes.data_ptr()
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


def native_of_width(cache_dir: Path, width: Width) -> NativeBackend:
    """Build or load the native kernel for an instruction set.

    Args:
        cache_dir: Where libraries are kept.
        width: One of `native_build.available_widths()`.

    Raises:
        BuildError: No compiler, it fails, or the cache cannot be written.
        OSError: The library cannot be loaded.
    """
    with _choosing:
        return _of_width(cache_dir, width, COMPILERS)


@functools.cache
def _of_width(cache_dir: Path, width: Width, compilers: tuple[str, ...]) -> NativeBackend:
    return NativeBackend(build_library(cache_dir, width, compilers), width)


@functools.cache
def _choose(cache_dir: Path, width: Width, compilers: tuple[str, ...]) -> AttentionBackend:
    try:
        return _of_width(cache_dir, width, compilers)
    except (BuildError, OSError) as error:
        logger.warning("no native attention, torch computes it instead: %s", error)
        return TorchBackend()


def _takes(pool: KVPool, queries: torch.Tensor) -> bool:
    layout = pool.layout
    is_known = layout.dtype in _QUERY_DTYPES or (layout.scaled and layout.dtype in _FORMATS)
    return is_known and queries.dtype in _QUERY_DTYPES and pool.device.type == "cpu"


def _arguments(
    pool: KVPool,
    layer: int,
    queries: torch.Tensor,
    metadata: AttentionMetadata,
    outputs: torch.Tensor,
) -> _Arguments:
    """All but what turns products into scores."""
    layout = pool.layout
    keys, values = pool.key_view(layer), pool.value_view(layer)
    # The vectorised order keeps a key in parts.
    is_split = keys.dim() == 5
    windows, num_sinks = metadata.windows, metadata.num_sinks
    arguments = _Arguments(
        num_bytes=ctypes.sizeof(_Arguments),
        query_format=_FORMATS[queries.dtype],
        kv_format=_FORMATS[layout.dtype],
        num_threads=torch.get_num_threads(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        queries=queries.data_ptr(),
        outputs=outputs.data_ptr(),
        query_start=metadata.query_start.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        block_tables=metadata.block_tables.data_ptr(),
        windows=None if windows is None else windows.data_ptr(),
        num_sinks=None if num_sinks is None else num_sinks.data_ptr(),
        num_seqs=metadata.seq_lens.numel(),
        table_width=metadata.block_tables.shape[1],
        num_blocks=pool.num_blocks,
        block_size=layout.block_size,
        num_q_heads=queries.shape[1],
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        key_part=keys.stride(3) if is_split else 0,
        part_dim=layout.vector_size if is_split else layout.head_dim,
    )
    arguments.key_block, arguments.key_head, arguments.key_slot = keys.stride()[:3]
    arguments.value_block, arguments.value_head, arguments.value_slot = values.stride()[:3]
    key_scales, value_scales = pool.key_scale_view(layer), pool.value_scale_view(layer)
    if key_scales is not None and value_scales is not None:
        arguments.key_scales = key_scales.data_ptr()
        arguments.value_scales = value_scales.data_ptr()
        (
            arguments.key_scale_block,
            arguments.key_scale_head,
            arguments.key_scale_slot,
        ) = key_scales.stride()
        (
            arguments.value_scale_block,
            arguments.value_scale_head,
            arguments.value_scale_slot,
        ) = value_scales.stride()
    arguments.query_token, arguments.query_head = queries.stride()[:2]
    return arguments
