"""Deals a model's heads, columns and rows over the ranks, and names what ranks exchange.

Neither torch nor a process group is needed to deal: a driver refuses a width before it starts
anything.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank; every query head's KV head is on the same rank.

    Args:
        query_heads: Query heads, in the model's numbering; each is on exactly one rank.
        kv_heads: KV heads, in the model's numbering; one may be on several ranks.
    """

    query_heads: range
    kv_heads: range


def deal(total: int, world_size: int) -> tuple[range, ...]:
    """Deal `total` items into contiguous ranges whose lengths differ by at most one.

    Earlier ranks take the larger shares. A share is empty where there are more ranks than items.
    """
    share, rest = divmod(total, world_size)
    bounds = [rank * share + min(rank, rest) for rank in range(world_size + 1)]
    return tuple(range(low, high) for low, high in itertools.pairwise(bounds))


def working_widths(num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Tensor-parallel widths at which the heads can be dealt by KV group."""
    return tuple(
        width
        for width in range(1, num_heads + 1)
        if width <= num_kv_heads or width % num_kv_heads == 0
    )


def deal_heads(num_heads: int, num_kv_heads: int, world_size: int) -> tuple[HeadShare, ...]:
    """Deal attention heads by KV group.

    Up to one rank per KV head, whole groups are dealt, unevenly where they do not divide. With
    more ranks each KV head is held by `world_size / num_kv_heads` of them, which split its query
    heads, so every rank's query heads share its KV heads in equal groups.

    Args:
        num_heads: Query heads of the model, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads of the model.
        world_size: Ranks of the tensor-parallel group.

    Returns:
        One share per rank, in rank order.

    Raises:
        InvalidInputError: The heads cannot be dealt over so many ranks.
    """
    widths = working_widths(num_heads, num_kv_heads)
    if world_size not in widths:
        raise InvalidInputError(
            "tensor_parallel_size",
            world_size,
            f"one of {', '.join(map(str, widths))} for a model of {num_heads} query heads and "
            f"{num_kv_heads} KV heads",
        )
    group = num_heads // num_kv_heads
    if world_size <= num_kv_heads:
        return tuple(
            HeadShare(range(kv.start * group, kv.stop * group), kv)
            for kv in deal(num_kv_heads, world_size)
        )
    return tuple(
        HeadShare(range(kv * group + part.start, kv * group + part.stop), range(kv, kv + 1))
        for kv in range(num_kv_heads)
        for part in deal(group, world_size // num_kv_heads)
    )


class Collectives(Protocol):
    """What the ranks of one tensor-parallel group exchange during a step.

    Every rank makes the same calls in the same order.
    """

    @property
    def rank(self) -> int:
        """Place of the caller in the group, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over the ranks, in place, with equal bits on every rank.

        Args:
            tensor: Contiguous, of one shape and dtype (int64, fp32, bf16 or fp16) on all ranks.
        """
        ...

    def gather_rows(self, rows: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Lay the ranks' columns side by side on rank 0.

        Args:
            rows: [num_rows, widths[rank]], contiguous; `num_rows` and dtype equal on all ranks.
            widths: Columns of each rank, known to all; they may differ and may be 0.

        Returns:
            [num_rows, sum(widths)] on rank 0, None elsewhere.
        """
        ...


class SoloCollectives:
    """A group of one rank: nothing is exchanged."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave the tensor, which is its own sum."""

    def gather_rows(self, rows: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return the rows, which are complete."""
        assert tuple(widths) == (rows.shape[-1],)
        return rows
