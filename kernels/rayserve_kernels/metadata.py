"""Where the tokens of one step belong: what the kernels follow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rayserve_kernels.host_metadata import HostMetadata

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
    shared_prefixes: SharedPrefixes | None = None

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
    ) -> AttentionMetadata:
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
    def from_host(cls, host: HostMetadata, tensors: Sequence[torch.Tensor]) -> AttentionMetadata:
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
