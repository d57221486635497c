import pytest

from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.policy import ReplicaLoad, can_admit, choose_replica


def load(name: str, num_cached_blocks: int, num_pending_tokens: int) -> ReplicaLoad:
    return ReplicaLoad(ReplicaId(name), num_cached_blocks, num_pending_tokens)


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([load("a", 0, 0)], "a"),
        ([load("a", 1, 0), load("b", 2, 900)], "b"),
        ([load("a", 2, 900), load("b", 2, 10)], "b"),
        ([load("b", 2, 10), load("a", 2, 10)], "a"),
    ],
)
def test_the_longest_prefix_wins_then_the_least_load_then_the_name(
    loads: list[ReplicaLoad], chosen: str
) -> None:
    assert choose_replica(loads) == chosen


def test_there_is_no_choice_among_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        choose_replica([])


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
