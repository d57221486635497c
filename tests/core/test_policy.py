import numpy as np
import pytest

from rayserve_paged.core.policy import (
    BlockHolder,
    Recompute,
    Victim,
    can_admit,
    choose_victim,
    deal_budget,
    is_turn_of_oldest,
    shorten_chunks,
)


@pytest.mark.parametrize(
    ("needed", "promised", "running", "admitted"),
    [
        (10, 0, 0, True),
        (11, 0, 0, False),
        (8, 1, 1, True),
        (8, 2, 1, False),
        (8, 1, 2, False),
        (0, 0, 10, True),
        (0, 0, 11, False),
    ],
)
def test_a_history_must_fit_beside_promises_and_a_block_of_headroom_for_each_running_one(
    needed: int, promised: int, running: int, admitted: bool
) -> None:
    assert admitted == can_admit(
        num_blocks_needed=needed,
        num_blocks_available=10,
        num_blocks_promised=promised,
        num_running=running,
    )


@pytest.mark.parametrize(
    ("pending", "budget", "newcomers", "dealt"),
    [
        # All that is pending fits.
        ([1, 1, 1], 8, False, [1, 1, 1]),
        ([1, 5, 1], 8, False, [1, 5, 1]),
        ([], 8, True, []),
        # Who is one token behind goes first, whoever is served first; the earlier ones where few.
        ([9, 1, 1], 2, False, [0, 1, 1]),
        ([1, 1, 1, 1], 3, True, [1, 1, 1, 0]),
        ([0, 1, 0, 1], 1, False, [0, 1, 0, 0]),
        # One prefill alone takes what is left, or three quarters of it where newcomers wait.
        ([1, 100], 9, False, [1, 8]),
        ([1, 100], 9, True, [1, 6]),
        ([100], 1, True, [1]),
        ([100], 3, True, [3]),
        ([100], 4, True, [3]),
        ([5], 8, True, [5]),
        # A quarter goes to the others, the shortest first; what they leave goes on.
        ([100, 50, 2], 8, False, [6, 0, 2]),
        ([100, 50, 1], 9, False, [6, 2, 1]),
        ([100, 3, 3], 16, False, [12, 3, 1]),
        ([4, 50, 60], 16, False, [4, 12, 0]),
        # Where newcomers wait, the quarter is theirs.
        ([100, 50], 64, True, [48, 0]),
        ([20, 50, 60], 64, True, [20, 28, 0]),
        ([100, 0, 3], 8, False, [6, 0, 2]),
    ],
)
def test_a_budget_goes_to_decoding_then_the_first_prefill_then_the_shortest(
    pending: list[int], budget: int, newcomers: bool, dealt: list[int]
) -> None:
    got = deal_budget(np.array(pending, np.int32), budget, newcomers=newcomers)
    assert got.tolist() == dealt


def test_whatever_is_pending_the_budget_is_kept_and_the_first_prefill_goes_on() -> None:
    draw = np.random.default_rng(0)
    for _ in range(2000):
        pending = draw.integers(0, draw.choice([2, 4, 40]), draw.integers(0, 9)).astype(np.int32)
        budget, newcomers = int(draw.integers(1, 40)), bool(draw.integers(2))
        dealt = deal_budget(pending, budget, newcomers=newcomers)
        assert (dealt >= 0).all()
        assert (dealt <= pending).all()
        assert dealt.sum() <= budget
        num_decoding = int((pending == 1).sum())
        assert dealt[pending == 1].sum() == min(num_decoding, budget)
        left = budget - num_decoding
        prefills = np.flatnonzero(pending > 1)
        if len(prefills) and left > 0:
            first = prefills[0]
            assert dealt[first] >= min(pending[first], left - left // 4, left)
        if not newcomers:
            assert dealt.sum() == min(budget, pending.sum()), "nothing is left over"


# --- who gives way --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holders", "num_short", "victim", "num_lost"),
    [
        # (priority, open blocks, tokens in them, sealed blocks), in blocks of 4.
        ([(0, 1, 2, 5)], 1, 0, 2),
        # The least urgent, however dear.
        ([(0, 1, 1, 9), (1, 1, 4, 0), (0, 1, 1, 9)], 1, 1, 4),
        # The same loss: who frees more; the same of both: who is served last.
        ([(0, 1, 2, 9), (0, 1, 2, 1)], 1, 0, 2),
        ([(0, 1, 2, 5), (0, 1, 2, 5)], 1, 1, 2),
        # The emptier tail.
        ([(0, 1, 1, 5), (0, 1, 4, 5)], 1, 0, 1),
        # Sealed blocks are lost as far as the shortage takes them.
        ([(0, 0, 0, 2)], 1, 0, 4),
        ([(0, 1, 3, 7)], 3, 0, 11),
        ([(0, 1, 3, 1)], 5, 0, 7),
        ([(0, 2, 1, 0), (0, 0, 0, 8)], 2, 0, 1),
        # Who frees nothing comes last of all.
        ([(0, 0, 0, 0), (0, 1, 4, 0)], 1, 1, 4),
        ([(0, 0, 0, 0), (0, 0, 0, 0)], 1, 1, 0),
    ],
)
def test_the_victim_is_the_least_urgent_that_loses_least_for_each_block_freed(
    holders: list[tuple[int, int, int, int]], num_short: int, victim: int, num_lost: int
) -> None:
    chosen = choose_victim([BlockHolder(*fields) for fields in holders], num_short, 4)
    assert chosen == Victim(victim, Recompute(num_lost))


def test_there_is_no_victim_among_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        choose_victim([], 1, 4)


# --- limits and bounds ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_passed", "oldest_every", "turn"),
    [(0, None, False), (99, None, False), (0, 1, True), (1, 3, False), (2, 3, True), (9, 3, True)],
)
def test_one_in_so_many_starts_is_that_of_the_oldest(
    num_passed: int, oldest_every: int | None, turn: bool
) -> None:
    assert is_turn_of_oldest(num_passed, oldest_every) == turn


@pytest.mark.parametrize(
    ("num_tokens", "room", "may_shorten", "num_places", "chunks"),
    [
        # Seven tokens beyond the first room take two of the three blocks.
        ([9, 9], [2, 0], [True, True], 3, [9, 4]),
        ([9, 9], [2, 0], [True, True], 1, [2, 4]),
        ([5, 3], [0, 0], [False, True], 3, [5, 3]),
        ([5, 9], [0, 0], [False, True], 3, [5, 4]),
        ([8, 1], [8, 0], [True, True], 1, [8, 1]),
        ([4], [0], [True], 0, None),
        ([5, 1], [0, 0], [False, True], 2, None),
    ],
)
def test_chunks_are_shortened_to_the_blocks_that_are_there(
    num_tokens: list[int],
    room: list[int],
    may_shorten: list[bool],
    num_places: int,
    chunks: list[int] | None,
) -> None:
    shortened = shorten_chunks(
        np.array(num_tokens, np.int32),
        np.array(room, np.int32),
        np.array(may_shorten),
        num_places,
        4,
    )
    assert (None if shortened is None else shortened.tolist()) == chunks
