"""Owners of a deployment: leases, leaving, taking over."""

import pytest

from rayserve_paged.core.owners import Owners

LEASE_S, FAREWELL_S = 30.0, 10.0


def owners() -> Owners:
    made = Owners(LEASE_S, FAREWELL_S)
    made.watch(100.0)
    return made


def test_before_anybody_has_called_the_lease_of_whoever_made_it_runs() -> None:
    made = owners()
    assert made.lapses_at == 130.0
    assert made.lapsed(129.9) is None
    assert made.lapsed(130.0) == "its owner has not renewed the lease for 30 s"


def test_one_owner_of_two_keeps_it_when_the_other_dies() -> None:
    made = owners()
    made.renew("a", 100.0)
    made.renew("b", 120.0)
    assert made.lapsed(140.0) is None
    assert made.lapses_at == 150.0
    assert made.lapsed(150.0) == "its owner has not renewed the lease for 30 s"


def test_after_the_last_owner_has_left_another_may_take_over_for_a_while() -> None:
    made = owners()
    made.renew("a", 100.0)
    made.renew("b", 100.0)
    made.leave("a", 101.0)
    assert made.lapses_at == 130.0
    made.leave("b", 102.0)
    assert made.lapses_at == 112.0
    assert made.lapsed(111.0) is None
    made.renew("c", 111.0)
    assert made.lapsed(140.0) is None
    assert made.lapses_at == 141.0


def test_nobody_comes_after_the_last_owner() -> None:
    made = owners()
    made.renew("a", 100.0)
    made.leave("a", 105.0)
    assert made.lapsed(115.0) == "its last owner left 10 s ago"


@pytest.mark.parametrize("renewed", [False, True])
def test_one_that_leaves_twice_or_was_never_there_changes_nothing(renewed: bool) -> None:
    made = owners()
    if renewed:
        made.renew("a", 100.0)
    before = made.lapses_at
    made.leave("x", 101.0)
    assert made.lapses_at == before


def test_an_owner_whose_lease_is_over_can_come_back_while_another_is_there() -> None:
    made = owners()
    made.renew("a", 100.0)
    made.renew("b", 125.0)
    assert made.lapsed(131.0) is None
    made.leave("b", 132.0)
    assert made.lapses_at == 142.0, "the one that was silent does not count"
    made.renew("a", 133.0)
    assert made.lapses_at == 163.0


def test_without_a_lease_it_lives_on() -> None:
    made = Owners(None, FAREWELL_S)
    made.watch(0.0)
    made.renew("a", 0.0)
    made.leave("a", 1.0)
    assert made.lapses_at is None
    assert made.lapsed(1e9) is None
