"""Groups of sequences that share splits of a prefix: found, chosen, and listed for a kernel."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from rayserve_kernels.gpu.prefix_groups import PrefixGroup, SharedPrefixes, find_groups


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for index, part in enumerate(rest):
            yield [*rest[:index], [rows[0], *part], *rest[index + 1 :]]


def common_splits(
    tables: np.ndarray, computed: list[int], rows: list[int], block_size: int, split_tokens: int
) -> int:
    splits = min(computed[row] for row in rows) // split_tokens
    while splits:
        end = -(-splits * split_tokens // block_size)
        if len({tables[row, :end].tobytes() for row in rows}) == 1:
            return splits
        splits -= 1
    return 0


@pytest.mark.parametrize(("block_size", "split_tokens"), [(16, 64), (24, 64), (128, 64)])
def test_no_other_choice_of_groups_saves_more(block_size: int, split_tokens: int) -> None:
    rng = random.Random(block_size)
    num_found = 0
    for _ in range(60):
        computed = [rng.randrange(0, 330) for _ in range(5)]
        width = 330 // block_size + 1
        tables = np.array([[0] * width for _ in computed], np.int32)
        for row in range(5):
            # From some block on a sequence goes its own way, or that of an earlier one.
            tables[row] = tables[rng.randrange(row)] if row else 1
            tables[row, rng.randrange(width + 1) :] = 10 + row
        groups = find_groups(tables, computed, block_size, split_tokens)
        members = [row for group in groups for row in group.members]
        assert len(members) == len(set(members))
        for group in groups:
            held = common_splits(tables, computed, list(group.members), block_size, split_tokens)
            assert 0 < group.num_splits <= held
        most = max(
            sum(
                (len(part) - 1) * common_splits(tables, computed, part, block_size, split_tokens)
                for part in partition
            )
            for partition in partitions(list(range(5)))
        )
        assert sum(group.saved_splits for group in groups) == most
        num_found += len(groups)
    assert num_found > 30


def test_a_prefix_is_shared_as_far_as_whole_splits_lie_before_the_queries() -> None:
    tables = np.array([[7, 8, 9, 1], [7, 8, 9, 2], [7, 8, 3, 4], [5, 8, 9, 6]], np.int32)
    assert find_groups(tables, [64, 64, 64, 64], 16, 16) == [PrefixGroup((0, 1, 2), 2)]
    assert find_groups(tables[:2], [64, 64], 16, 16) == [PrefixGroup((0, 1), 3)]
    assert find_groups(tables[:2], [64, 47], 16, 16) == [PrefixGroup((0, 1), 2)]
    assert find_groups(tables[:2], [64, 64], 16, 32) == [PrefixGroup((0, 1), 1)]
    assert find_groups(tables[:2], [64, 15], 16, 16) == []


def test_a_step_is_planned_where_sharing_pays() -> None:
    tables = np.zeros((4, 8), np.int32)

    def plan(num_new: list[int], least: int) -> SharedPrefixes | None:
        return SharedPrefixes.for_step(
            tables,
            [100, 100, 100, 100],
            num_new,
            block_size=16,
            split_tokens=32,
            most_queries=3,
            least_saved_tokens=least,
        )

    # One has no queries and one has too many; the other two share three splits.
    shared = plan([1, 0, 4, 2], 96)
    assert shared is not None
    assert plan([1, 0, 4, 2], 97) is None
    assert plan([1, 0, 4, 0], 0) is None
    assert shared.group_start.tolist() == [0, 3]
    assert shared.group_splits.tolist() == [3]
    assert shared.query_seq.tolist() == [0, 3, 3]
    assert shared.query_index.tolist() == [0, 0, 1]
    assert shared.first_split.tolist() == [3, 0, 0, 3]
    assert (shared.max_splits, shared.split_tokens) == (3, 32)
