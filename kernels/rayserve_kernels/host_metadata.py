"""The metadata of a step as the host makes it, before it is sent to a device."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class HostMetadata(NamedTuple):
    """The arrays behind an `AttentionMetadata`, whose fields explain them."""

    query_start: Ints
    seq_lens: Ints
    block_tables: Ints
    slot_mapping: npt.NDArray[np.int64]
    windows: Ints | None
    num_sinks: Ints | None
    query_lens: npt.NDArray[np.int64]
    max_seq_len: int

    @classmethod
    def for_step(
        cls,
        block_tables: Ints,
        num_computed: npt.ArrayLike,
        num_new: npt.ArrayLike,
        block_size: int,
        windows: Ints | None = None,
        num_sinks: Ints | None = None,
    ) -> HostMetadata:
        """Derive it from what the scheduler knows: see `AttentionMetadata.for_step`.

        Raises:
            ValueError: A table too short for its sequence, or a negative block id in use.
        """
        computed = np.asarray(num_computed, dtype=np.int64)
        new = np.asarray(num_new, dtype=np.int64)
        lengths = computed + new
        capacity = block_tables.shape[1] * block_size
        if lengths.size and int(lengths.max()) > capacity:
            raise ValueError(
                f"a sequence has {int(lengths.max())} tokens: the block table holds "
                f"{block_tables.shape[1]} blocks of {block_size}"
            )
        query_start = np.concatenate(([0], np.cumsum(new)))
        rows = np.repeat(np.arange(new.size), new)
        positions = np.arange(query_start[-1]) + np.repeat(computed - query_start[:-1], new)
        block_ids = block_tables[rows, positions // block_size].astype(np.int64)
        if block_ids.size and int(block_ids.min()) < 0:
            raise ValueError(f"block id {int(block_ids.min())} in use: expected at least 0")
        return cls(
            query_start=query_start.astype(np.int32),
            seq_lens=lengths.astype(np.int32),
            block_tables=block_tables,
            slot_mapping=block_ids * block_size + positions % block_size,
            windows=windows,
            num_sinks=num_sinks,
            query_lens=new,
            max_seq_len=int(lengths.max(initial=0)),
        )

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """What goes to the device, in the order of fields; windows and sinks where there are."""
        arrays: list[npt.NDArray[np.generic]] = [
            *(self.query_start, self.seq_lens, self.block_tables, self.slot_mapping)
        ]
        if self.windows is not None and self.num_sinks is not None:
            arrays += [self.windows, self.num_sinks]
        return arrays

    def padded(self, num_seqs: int, width: int, spare_block: int, block_size: int) -> HostMetadata:
        """Add sequences of one token to a step in which each has one query.

        They lie in a block that nobody reads otherwise, over each other.

        Args:
            num_seqs: Sequences afterwards.
            width: Of the block tables afterwards; at least that of now.
            spare_block: A block of the pool that no sequence holds.
            block_size: Slots per block.
        """
        num_more = num_seqs - len(self.seq_lens)
        tables = np.full((num_seqs, width), spare_block, np.int32)
        tables[: len(self.seq_lens), : self.block_tables.shape[1]] = self.block_tables
        no_window = np.iinfo(np.int32).max
        return HostMetadata(
            query_start=np.arange(num_seqs + 1, dtype=np.int32),
            seq_lens=_extended(self.seq_lens, num_more, 1),
            block_tables=tables,
            slot_mapping=_extended(self.slot_mapping, num_more, spare_block * block_size),
            windows=None if self.windows is None else _extended(self.windows, num_more, no_window),
            num_sinks=None if self.num_sinks is None else _extended(self.num_sinks, num_more, 0),
            query_lens=np.ones(num_seqs, np.int64),
            max_seq_len=width * block_size,
        )


_Int = TypeVar("_Int", np.int32, np.int64)


def _extended(array: npt.NDArray[_Int], num_more: int, value: int) -> npt.NDArray[_Int]:
    return np.concatenate((array, np.full(num_more, value, array.dtype)))
