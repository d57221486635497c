"""What a simulation is built of is passed over by the collector of cycles, and by no longer."""

import gc

import pytest

from rayserve_paged.sim.collector import spared_by_collector


def test_what_was_there_is_passed_over_while_the_context_lasts() -> None:
    assert gc.get_freeze_count() == 0
    built = [[], []]
    with spared_by_collector():
        assert gc.get_freeze_count() > 0
        assert not any(each is built for each in gc.get_objects())
        since: list[object] = []
        assert any(each is since for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(each is built for each in gc.get_objects())


def test_an_inner_context_leaves_the_outer_one_as_it_is() -> None:
    with spared_by_collector():
        with spared_by_collector():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_it_ends_with_an_error_too() -> None:
    with pytest.raises(ValueError, match="mine"), spared_by_collector():
        raise ValueError("mine")
    assert gc.get_freeze_count() == 0
