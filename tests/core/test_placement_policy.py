import dataclasses

import numpy as np
import pytest

from rayserve_paged.core.placement_policy import (
    PLACEMENTS,
    Candidates,
    QueueLoads,
    estimate_retry_s,
    has_room,
    worth_of_blocks,
)


def candidates(**loads: list[int]) -> Candidates:
    """Candidates that have nothing but what is given."""
    fields = [field.name for field in dataclasses.fields(Candidates)]
    (num,) = {len(load) for load in loads.values()}
    return Candidates(**{name: np.array(loads.get(name, [0] * num)) for name in fields})


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ({"num_queued_tokens": [10, 9, 11]}, 1),
        # A saved token is worth four queued ones.
        ({"num_queued_tokens": [0, 400], "num_saved_tokens": [0, 101]}, 1),
        ({"num_queued_tokens": [0, 400], "num_saved_tokens": [0, 99]}, 0),
        # A sequence counts for 64 queued tokens.
        ({"num_queued_tokens": [0, 129], "num_seqs": [2, 0]}, 0),
        ({"num_queued_tokens": [0, 127], "num_seqs": [2, 0]}, 1),
        # A token computed of late for a fifth.
        ({"num_queued_tokens": [0, 21], "num_recent_tokens": [100, 0]}, 0),
        ({"num_queued_tokens": [0, 19], "num_recent_tokens": [100, 0]}, 1),
        # What outputs were promised does not count, and of equals each has its turn.
        ({"num_pending_tokens": [0, 900], "last_turn": [7, 6]}, 1),
        ({"num_queued_tokens": [0, 0, 5], "last_turn": [3, -1, -1]}, 1),
    ],
)
def test_a_prefix_is_weighed_against_what_is_queued(
    loads: dict[str, list[int]], chosen: int
) -> None:
    assert PLACEMENTS["prefix-aware"](candidates(**loads)) == chosen


def test_the_least_loaded_takes_a_request_whatever_is_cached() -> None:
    loads = candidates(
        num_saved_tokens=[8, 0, 9, 9], num_pending_tokens=[5, 4, 4, 6], last_turn=[0, 2, 1, 3]
    )
    assert PLACEMENTS["least-loaded"](loads) == 2


def test_in_a_round_robin_whoever_was_chosen_longest_ago_is_next() -> None:
    turns = [([4, 2, 3], 1), ([4, -1, -1], 1)]
    for last_turn, chosen in turns:
        loads = candidates(num_pending_tokens=[0, 9, 9], last_turn=last_turn)
        assert PLACEMENTS["round-robin"](loads) == chosen


@pytest.mark.parametrize(
    ("depths", "heats", "worth"),
    [
        ([], [], []),
        ([6], [0], [6.0]),
        ([6], [2], [2.0]),
        # A system prompt of 4 blocks behind which three prompts parted, and a history of its own.
        ([4, 10], [3, 0], [1.0, 7.0]),
        ([1, 2, 5], [1, 1, 1], [0.5, 1.0, 2.5]),
    ],
)
def test_blocks_behind_which_many_prompts_parted_are_worth_less(
    depths: list[int], heats: list[int], worth: list[float]
) -> None:
    assert worth_of_blocks(depths, heats) == worth


@pytest.mark.parametrize(
    ("load", "num_seqs", "num_tokens", "limits", "room"),
    [
        # (sequences given, run at once, tokens pending); (may wait, may be pending).
        ((4, 4, 100), 1, 10, (None, None), True),
        ((4, 4, 100), 1, 10, (1, None), True),
        ((4, 4, 100), 1, 10, (0, None), False),
        ((3, 4, 100), 1, 10, (0, None), True),
        ((3, 4, 100), 2, 10, (0, None), False),
        ((5, 4, 100), 2, 10, (3, None), True),
        ((5, 4, 100), 3, 10, (3, None), False),
        ((1, 4, 100), 1, 10, (None, 110), True),
        ((1, 4, 100), 1, 11, (None, 110), False),
        # An idle replica takes what would otherwise never be taken.
        ((0, 4, 0), 1, 1000, (0, 110), True),
        ((0, 4, 0), 4, 1, (0, None), True),
    ],
)
def test_a_replica_has_room_within_its_limits_and_always_while_it_is_idle(
    load: tuple[int, int, int],
    num_seqs: int,
    num_tokens: int,
    limits: tuple[int | None, int | None],
    room: bool,
) -> None:
    loads = QueueLoads(*(np.array([number]) for number in load))
    assert has_room(loads, num_seqs, num_tokens, *limits).tolist() == [room]


def test_no_sequence_waits_while_rows_are_left() -> None:
    num_seqs, none = np.array([0, 3, 4, 5, 9]), np.zeros(5, np.int64)
    loads = QueueLoads(num_seqs, np.full(5, 4), none)
    assert loads.num_waiting.tolist() == [0, 0, 0, 1, 5]


def test_the_least_busy_has_the_fewest_waiting_then_the_fewest_tokens() -> None:
    num_seqs, num_tokens = np.array([9, 6, 5, 2]), np.array([0, 50, 60, 70])
    assert QueueLoads(num_seqs, np.array([4, 4, 4, 1]), num_tokens).least_busy() == 2
    assert QueueLoads(num_seqs, np.array([9, 9, 9, 9]), num_tokens).least_busy() == 0


def test_the_next_end_is_expected_after_the_mean_time_between_the_last_ones() -> None:
    assert estimate_retry_s([]) is None
    assert estimate_retry_s([3.0]) is None
    assert estimate_retry_s([3.0, 4.0]) == 1.0
    assert estimate_retry_s([3.0, 3.0, 3.5, 4.5]) == 0.5
