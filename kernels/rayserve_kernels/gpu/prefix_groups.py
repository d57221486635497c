"""Which sequences of a step share a prefix that is worth reading once for all of them."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Reading that many tokens of a layer costs about what one more launch costs: some microseconds.
LEAST_SAVED_TOKENS = 8192
_MOST_BRANCHES = 64


class PrefixGroup(NamedTuple):
    """Sequences, by their rows in a step, whose first `num_splits` splits are the same blocks."""

    members: tuple[int, ...]
    num_splits: int

    @property
    def saved_splits(self) -> int:
        """Splits that are not read again for each member."""
        return (len(self.members) - 1) * self.num_splits


def find_groups(
    block_tables: npt.NDArray[np.int32],
    num_computed: Sequence[int],
    block_size: int,
    split_tokens: int,
) -> list[PrefixGroup]:
    """Choose disjoint groups that together save the most.

    Only whole splits are shared, so that partial sums end where they end without sharing; and only
    tokens that lie before a sequence's queries, so that all of these see them.

    Args:
        block_tables: int32 [num_seqs, width].
        num_computed: [num_seqs], tokens before the queries of each sequence; 0 for one that is to
            stay alone.
        block_size: Slots per block.
        split_tokens: Positions of a split.
    """

    def share(members: Sequence[int], depth: int) -> list[list[int]]:
        # Those of the members that also share the split at `depth`, apart by its blocks.
        first = depth * split_tokens // block_size
        end = -(-(depth + 1) * split_tokens // block_size)
        parts = defaultdict[bytes, list[int]](list)
        for row in members:
            if num_computed[row] >= (depth + 1) * split_tokens:
                parts[block_tables[row, first:end].tobytes()].append(row)
        return [part for part in parts.values() if len(part) > 1]

    return list(_choose(_branch(list(range(len(num_computed))), 0, share), 0, {}).groups)


class _Branch(NamedTuple):
    """Members that share `depth` splits and no more; branches that share more; the others."""

    depth: int
    branches: tuple["_Branch", ...]
    others: tuple[int, ...]


class _Choice(NamedTuple):
    """Groups below a branch, and members left to join the nearest group above; what both save."""

    saved: int
    groups: tuple[PrefixGroup, ...]
    joining: tuple[int, ...]


def _branch(
    members: list[int],
    depth: int,
    share: Callable[[Sequence[int], int], list[list[int]]],
    num_above: int = 0,
) -> _Branch:
    # Beyond so many branches inside each other, members are left where they are.
    parts = share(members, depth) if num_above < _MOST_BRANCHES else []
    while len(parts) == 1 and len(parts[0]) == len(members):
        depth += 1
        parts = share(members, depth)
    inside = set(itertools.chain.from_iterable(parts))
    branches = tuple(_branch(part, depth + 1, share, num_above + 1) for part in parts)
    return _Branch(depth, branches, tuple(row for row in members if row not in inside))


def _choose(branch: _Branch, above: int, chosen: dict[tuple[int, int], _Choice]) -> _Choice:
    """Choose the groups of a branch, where a group that shares `above` splits is open to it."""
    key = (id(branch), above)
    if key not in chosen:
        joined = _join(branch, above, chosen)
        if branch.depth > above:
            # A group of its own: it reads its splits once more, and its members save more.
            own = _join(branch, branch.depth, chosen)
            if own.saved - branch.depth > joined.saved:
                group = PrefixGroup(tuple(sorted(own.joining)), branch.depth)
                joined = _Choice(own.saved - branch.depth, (*own.groups, group), ())
        chosen[key] = joined
    return chosen[key]


def _join(branch: _Branch, depth: int, chosen: dict[tuple[int, int], _Choice]) -> _Choice:
    choices = [_choose(inner, depth, chosen) for inner in branch.branches]
    return _Choice(
        sum(choice.saved for choice in choices) + depth * len(branch.others),
        tuple(itertools.chain.from_iterable(choice.groups for choice in choices)),
        (*branch.others, *itertools.chain.from_iterable(choice.joining for choice in choices)),
    )


def _saved(groups: Sequence[PrefixGroup]) -> int:
    return sum(group.saved_splits for group in groups)


@dataclasses.dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Groups of a step as a kernel follows them. All tensors are int32, on one device.

    The queries of all members are listed group by group.

    Args:
        group_start: [num_groups + 1], first listed query of each group, then their number.
        group_splits: [num_groups], splits that the group shares.
        query_seq: [num_listed], sequence of each query.
        query_index: [num_listed], its place among its sequence's queries.
        first_split: [num_seqs], the first split that each sequence reads by itself.
        max_splits: The largest of `group_splits`.
        split_tokens: Positions of a split.
    """

    group_start: torch.Tensor
    group_splits: torch.Tensor
    query_seq: torch.Tensor
    query_index: torch.Tensor
    first_split: torch.Tensor
    max_splits: int
    split_tokens: int

    @classmethod
    def for_groups(
        cls,
        groups: Sequence[PrefixGroup],
        num_new: Sequence[int],
        split_tokens: int,
        device: torch.device | str = "cpu",
    ) -> "SharedPrefixes":
        """List the queries of groups.

        Args:
            groups: At least one; no sequence twice.
            num_new: [num_seqs], queries of each sequence.
            split_tokens: Positions of a split.
            device: Of the tensors.
        """
        first_split = [0] * len(num_new)
        for group in groups:
            for row in group.members:
                first_split[row] = group.num_splits
        queries = [
            [(row, index) for row in group.members for index in range(num_new[row])]
            for group in groups
        ]
        listed = list(itertools.chain.from_iterable(queries))

        def on_device(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        return cls(
            group_start=on_device([0, *itertools.accumulate(map(len, queries))]),
            group_splits=on_device([group.num_splits for group in groups]),
            query_seq=on_device([row for row, _ in listed]),
            query_index=on_device([index for _, index in listed]),
            first_split=on_device(first_split),
            max_splits=max(group.num_splits for group in groups),
            split_tokens=split_tokens,
        )

    @classmethod
    def for_step(
        cls,
        block_tables: npt.NDArray[np.int32],
        num_computed: Sequence[int],
        num_new: Sequence[int],
        *,
        block_size: int,
        split_tokens: int,
        most_queries: int,
        device: torch.device | str = "cpu",
        least_saved_tokens: int = LEAST_SAVED_TOKENS,
    ) -> "SharedPrefixes | None":
        """Find the groups of a step; None where sharing would not pay.

        Args:
            block_tables: int32 [num_seqs, width].
            num_computed: [num_seqs], tokens of each sequence already in the cache.
            num_new: [num_seqs], tokens of each sequence to compute now.
            block_size: Slots per block.
            split_tokens: Positions of a split.
            most_queries: Sequences of more queries, or of none, are left alone.
            device: Of the tensors.
            least_saved_tokens: Tokens that must be saved for sharing to pay.
        """
        computed = [
            count if 0 < new <= most_queries else 0
            for count, new in zip(num_computed, num_new, strict=True)
        ]
        groups = find_groups(block_tables, computed, block_size, split_tokens)
        saved = _saved(groups)
        if not saved or saved * split_tokens < least_saved_tokens:
            return None
        return cls.for_groups(groups, num_new, split_tokens, device)
