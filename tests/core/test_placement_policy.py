import numpy as np
import pytest

from rayserve_paged.core.placement_policy import (
    PLACEMENTS,
    Candidates,
    QueueLoads,
    estimate_retry_s,
    has_room,
)


def candidates(*loads: tuple[int, int, int]) -> Candidates:
    """Of (cached tokens, pending tokens, last turn) each."""
    return Candidates(*np.array(loads, np.int64).T)


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([(0, 0, -1)], 0),
        ([(4, 0, -1), (8, 900, -1)], 1),
        ([(8, 900, -1), (8, 10, 3)], 1),
        ([(8, 10, 1), (8, 10, 0)], 0),
    ],
)
def test_the_longest_prefix_wins_then_the_least_load_then_the_first(
    loads: list[tuple[int, int, int]], chosen: int
) -> None:
    assert PLACEMENTS["prefix-aware"](candidates(*loads)) == chosen


def test_the_least_loaded_takes_a_request_whatever_is_cached() -> None:
    assert PLACEMENTS["least-loaded"](candidates((8, 5, 0), (0, 4, 2), (9, 4, 1))) == 1


def test_in_a_round_robin_whoever_was_chosen_longest_ago_is_next() -> None:
    assert PLACEMENTS["round-robin"](candidates((8, 5, 4), (0, 4, 2), (9, 0, 3))) == 1
    assert PLACEMENTS["round-robin"](candidates((8, 5, 4), (0, 4, -1), (9, 0, -1))) == 1


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
