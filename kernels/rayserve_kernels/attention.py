"""The one interface between a model and the kernels: write keys and values, then attend."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rayserve_kernels.cache_write import write_kv
from rayserve_kernels.cpu import attend_sequence, gather_sequence
from rayserve_kernels.cpu_scores import attend_scores
from rayserve_kernels.cpu_window import attend_window
from rayserve_kernels.host_metadata import HostMetadata
from rayserve_kernels.layout import KVPool
from rayserve_kernels.reference import dense_attention, read_slots, seen_positions

if TYPE_CHECKING:
    from rayserve_kernels.gpu.prefix_groups import SharedPrefixes


class SequenceSpan(NamedTuple):
    """One sequence of a step, as the paths that loop over sequences need it.

    The sequence's queries are rows `first_query` to `end_query - 1` of the flattened batch;
    they stand at its last positions.
    """

    first_query: int
    end_query: int
    num_tokens: int
    """Tokens in the cache after this step's writes."""
    window: int | None = None
    """Positions that a query sees, its own the last; None where it sees all up to its own."""
    num_sinks: int = 0
    """First positions that every query sees besides its window."""


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the tokens of one step belong; made once per step, used in every layer.

    All tensors are contiguous and on one device; `query_lens` and `max_seq_len` are the host's.

    Args:
        query_start: int32 [num_seqs + 1], first row of each sequence in the flattened batch,
            then num_tokens.
        seq_lens: int32 [num_seqs], tokens of each sequence in the cache after this step.
        block_tables: int32 [num_seqs, width]. Entries beyond a sequence's length are padding
            and may hold anything; nothing looks at them.
        slot_mapping: int64 [num_tokens], slot of each row: block_id * block_size + offset.
        windows: int32 [num_seqs], at least 1: a query at position q sees positions above
            q - window; a window of `seq_lens` or more hides nothing. None where no sequence has
            one.
        num_sinks: int32 [num_seqs], at least 0: positions below it are seen whatever the window.
            Given exactly where `windows` is.
        query_lens: int64 [num_seqs], queries of each sequence; None where the host does not know.
            Kernels on a GPU size their grids by it. A graph may be replayed with fewer queries than
            it was captured with.
        max_seq_len: At least the largest of `seq_lens`; None for what the block tables can hold.
        shared_prefixes: Sequences whose first blocks are the same, where reading these once is to
            pay. A hint: kernels may read them for each sequence.

    Entries of a table whose every slot is hidden from the step's queries may hold anything.

    Raises:
        ValueError: A shape, dtype or device that does not fit.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    windows: torch.Tensor | None = None
    num_sinks: torch.Tensor | None = None
    query_lens: npt.NDArray[np.int64] | None = None
    max_seq_len: int | None = None
    shared_prefixes: "SharedPrefixes | None" = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and devices; values are not read, since that may wait for a GPU."""
        num_seqs = self.seq_lens.numel()
        if (self.windows is None) != (self.num_sinks is None):
            raise ValueError("windows and num_sinks: expected both or neither")
        for name, dtype, shape in (
            ("seq_lens", torch.int32, (num_seqs,)),
            ("query_start", torch.int32, (num_seqs + 1,)),
            ("block_tables", torch.int32, (num_seqs, None)),
            ("slot_mapping", torch.int64, (None,)),
            ("windows", torch.int32, (num_seqs,)),
            ("num_sinks", torch.int32, (num_seqs,)),
        ):
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            fits = tensor.dim() == len(shape) and all(
                want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
            )
            if not fits or tensor.dtype != dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {shape} "
                    f"for {num_seqs} sequences"
                )
            if tensor.device != self.seq_lens.device or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} on {tensor.device} with strides {tensor.stride()}: expected a "
                    f"contiguous tensor on {self.seq_lens.device}"
                )
        if self.query_lens is not None and self.query_lens.shape != (num_seqs,):
            raise ValueError(
                f"query_lens is {self.query_lens.shape}: expected ({num_seqs},), one a sequence"
            )

    @classmethod
    def for_step(
        cls,
        block_tables: npt.NDArray[np.int32],
        num_computed: npt.ArrayLike,
        num_new: npt.ArrayLike,
        block_size: int,
        device: torch.device | str = "cpu",
        windows: npt.NDArray[np.int32] | None = None,
        num_sinks: npt.NDArray[np.int32] | None = None,
    ) -> "AttentionMetadata":
        """Derive the metadata of a step from what the scheduler knows.

        Args:
            block_tables: int32 [num_seqs, width], padding of any value beyond a length; copied.
            num_computed: Integers [num_seqs], tokens of each sequence already in the cache.
            num_new: Integers [num_seqs], tokens of each sequence to compute now.
            block_size: Slots per block.
            device: Of the tensors.
            windows: int32 [num_seqs], as the field; copied.
            num_sinks: int32 [num_seqs], as the field; copied.

        Raises:
            ValueError: A table too short for its sequence, or a negative block id in use.
        """
        host = HostMetadata.for_step(
            block_tables, num_computed, num_new, block_size, windows, num_sinks
        )
        # Copies, since the caller may write over its arrays.
        return cls.from_host(host, [torch.tensor(array, device=device) for array in host.arrays()])

    @classmethod
    def from_host(cls, host: HostMetadata, tensors: Sequence[torch.Tensor]) -> "AttentionMetadata":
        """Make the metadata of a step whose arrays have been sent to their device.

        Args:
            host: The arrays.
            tensors: What became of `host.arrays()`, in their order.
        """
        query_start, seq_lens, block_tables, slot_mapping = tensors[:4]
        windows, num_sinks = tensors[4:] or (None, None)
        return cls(
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            windows=windows,
            num_sinks=num_sinks,
            query_lens=host.query_lens,
            max_seq_len=host.max_seq_len,
        )

    @property
    def num_tokens(self) -> int:
        """Rows of the flattened batch."""
        return self.slot_mapping.numel()

    @functools.cached_property
    def spans(self) -> tuple[SequenceSpan, ...]:
        """The sequences as Python numbers; the first access waits for the device.

        Raises:
            ValueError: `query_start` and `seq_lens` contradict each other or `num_tokens`.
        """
        starts: list[int] = self.query_start.tolist()
        lengths: list[int] = self.seq_lens.tolist()
        if starts[0] != 0 or starts[-1] != self.num_tokens:
            raise ValueError(
                f"query_start runs from {starts[0]} to {starts[-1]}: expected 0 to "
                f"num_tokens={self.num_tokens}"
            )
        spans = tuple(map(SequenceSpan, starts[:-1], starts[1:], lengths, *self._masks(lengths)))
        for index, span in enumerate(spans):
            num_queries = span.end_query - span.first_query
            if not 0 <= num_queries <= span.num_tokens:
                raise ValueError(
                    f"sequence {index} has {num_queries} queries and {span.num_tokens} tokens "
                    f"in the cache: expected 0 to that many queries"
                )
        return spans

    def _masks(self, lengths: list[int]) -> tuple[Sequence[int | None], Sequence[int]]:
        """Window and sinks of each sequence; None for a window that hides nothing."""
        if self.windows is None or self.num_sinks is None:
            return [None] * len(lengths), [0] * len(lengths)
        windows: list[int] = self.windows.tolist()
        sinks: list[int] = self.num_sinks.tolist()
        for index, (window, num_sinks) in enumerate(zip(windows, sinks, strict=True)):
            if window < 1 or num_sinks < 0:
                raise ValueError(
                    f"sequence {index} has window {window} and {num_sinks} sinks: expected at "
                    f"least 1 and at least 0"
                )
        hiding = [w if w < n else None for w, n in zip(windows, lengths, strict=True)]
        return hiding, [s if w is not None else 0 for s, w in zip(sinks, hiding, strict=True)]


class AttentionBackend(Protocol):
    """Runs attention over a paged pool. Implementations keep no state between calls.

    Attributes:
        numerics: Name of the class of implementations whose results may be mixed.
    """

    numerics: str

    def write(
        self,
        pool: KVPool,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the new tokens' keys and values into their slots.

        Args:
            pool: Written in place.
            layer: Layer of the pool.
            keys: [num_tokens, num_kv_heads, head_dim], as `cache_write.write_kv` takes them.
            values: As `keys`.
            metadata: Of this step.

        Raises:
            ValueError: A tensor does not fit the pool or the metadata.
        """
        ...

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
        """Attend from the new tokens, whose keys and values are written, to their sequences.

        Args:
            pool: Read only. Slots beyond a sequence's length, and those that windows hide from all
                its queries, never influence the result.
            layer: Layer of the pool.
            queries: [num_tokens, num_q_heads, head_dim], floats, innermost stride 1. The pool holds
                floats of any dtype, or codes with scales.
            metadata: Of this step.
            scale: Factor on the scores before the softmax.
            soft_cap: Positive: bounds a score to soft_cap * tanh(scale * q.k / soft_cap), before
                anything is added to it (Gemma 2, arXiv 2408.00118, section 2). None for no bound.
            alibi_slopes: fp32 [num_q_heads], contiguous: adds slope * (key position - query
                position) to a score (ALiBi, arXiv 2108.12409). None to add nothing.

        Returns:
            [num_tokens, num_q_heads, head_dim], the queries' dtype.

        Raises:
            ValueError: A tensor does not fit the pool or the metadata.
        """
        ...


class TorchBackend:
    """Gather and SDPA, sequence by sequence: what runs where no faster kernel does."""

    numerics = "default"

    def write(
        self,
        pool: KVPool,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """As `AttentionBackend.write`."""
        write_kv(pool, layer, keys, values, metadata.slot_mapping)

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
        """As `AttentionBackend.attend`; a sequence's result does not depend on the others.

        Computes in the wider dtype of queries and pool, for which codes count as fp32.
        """
        check_attend(pool, queries, metadata, soft_cap=soft_cap, alibi_slopes=alibi_slopes)
        stored = torch.float32 if pool.layout.scaled else pool.layout.dtype
        dtype = torch.promote_types(queries.dtype, stored)
        grouped = queries.to(dtype).unflatten(1, (pool.layout.num_kv_heads, -1))
        pieces = [grouped.narrow(0, 0, 0)]
        for row, span in enumerate(metadata.spans):
            if span.first_query == span.end_query:
                continue
            own_queries = grouped.narrow(0, span.first_query, span.end_query - span.first_query)
            table = metadata.block_tables.select(0, row)
            if soft_cap is not None or alibi_slopes is not None:
                pieces += attend_scores(
                    pool,
                    layer,
                    own_queries,
                    table,
                    span.num_tokens,
                    window=span.window,
                    num_sinks=span.num_sinks,
                    scale=scale,
                    soft_cap=soft_cap,
                    alibi_slopes=alibi_slopes,
                )
            elif span.window is None:
                num_blocks = -(-span.num_tokens // pool.layout.block_size)
                keys, values = gather_sequence(
                    pool, layer, table.narrow(0, 0, num_blocks), span.num_tokens
                )
                pieces += attend_sequence(own_queries, keys.to(dtype), values.to(dtype), scale)
            else:
                pieces += attend_window(
                    pool,
                    layer,
                    own_queries,
                    table,
                    span.num_tokens,
                    window=span.window,
                    num_sinks=span.num_sinks,
                    scale=scale,
                )
        return torch.cat(pieces).view(queries.shape).to(queries.dtype)


class ReferenceBackend:
    """The oracle: slow, eager, one slot at a time.

    Args:
        compute_dtype: What attention is computed in and answered in; None for the queries' own.
    """

    numerics = "reference"

    def __init__(self, compute_dtype: torch.dtype | None = None) -> None:
        self._compute_dtype = compute_dtype

    def write(
        self,
        pool: KVPool,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """As `AttentionBackend.write`."""
        write_kv(pool, layer, keys, values, metadata.slot_mapping)

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
        """As `AttentionBackend.attend`; the result has the compute dtype."""
        check_attend(pool, queries, metadata, soft_cap=soft_cap, alibi_slopes=alibi_slopes)
        dtype = self._compute_dtype or queries.dtype
        output = torch.empty(queries.shape, dtype=dtype, device=queries.device)
        tables: Sequence[Sequence[int]] = metadata.block_tables.tolist()
        for table, span in zip(tables, metadata.spans, strict=True):
            first, end, num_tokens, window, num_sinks = span
            if first == end:
                continue
            seen = seen_positions(num_tokens - (end - first), num_tokens, window, num_sinks)
            keys, values = read_slots(pool, layer, table, seen)
            output[first:end] = dense_attention(
                queries[first:end].to(dtype),
                keys.to(dtype),
                values.to(dtype),
                scale,
                positions=seen,
                window=window,
                num_sinks=num_sinks,
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
            )
        return output


def check_attend(
    pool: KVPool,
    queries: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Check what every implementation of `AttentionBackend.attend` expects.

    Raises:
        ValueError: A shape, dtype, device or stride that does not fit, or a cap that is none.
    """
    layout = pool.layout
    num_q_heads = queries.shape[1] if queries.dim() == 3 else 0
    if num_q_heads < 1 or queries.shape != (metadata.num_tokens, num_q_heads, layout.head_dim):
        raise ValueError(
            f"queries is {tuple(queries.shape)}: expected [{metadata.num_tokens}, num_q_heads, "
            f"{layout.head_dim}]"
        )
    if num_q_heads % layout.num_kv_heads:
        raise ValueError(
            f"{num_q_heads} query heads: expected a multiple of {layout.num_kv_heads} KV heads"
        )
    holds_floats = layout.scaled or layout.dtype.is_floating_point
    if not queries.dtype.is_floating_point or not holds_floats:
        raise ValueError(
            f"queries is {queries.dtype} and the pool {layout.coding}: expected floats, and a pool "
            f"of floats or of codes with scales"
        )
    if queries.device != pool.device or metadata.seq_lens.device != pool.device:
        raise ValueError(
            f"queries on {queries.device}, metadata on {metadata.seq_lens.device} and the pool on "
            f"{pool.device}: expected one device"
        )
    if queries.stride(-1) != 1:
        raise ValueError(f"queries has strides {queries.stride()}: expected innermost stride 1")
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"soft_cap={soft_cap}: expected None or a positive finite number")
    if alibi_slopes is None:
        return
    if alibi_slopes.dtype != torch.float32 or alibi_slopes.shape != (num_q_heads,):
        raise ValueError(
            f"alibi_slopes is {alibi_slopes.dtype} {tuple(alibi_slopes.shape)}: expected "
            f"torch.float32 ({num_q_heads},)"
        )
    if alibi_slopes.device != pool.device or not alibi_slopes.is_contiguous():
        raise ValueError(
            f"alibi_slopes on {alibi_slopes.device} with strides {alibi_slopes.stride()}: expected "
            f"a contiguous tensor on {pool.device}"
        )
