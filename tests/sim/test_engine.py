"""The engine: order by time, then by when it was scheduled; nothing in the past."""

import pytest

from rayserve_paged.sim.engine import Engine


def test_actions_happen_in_the_order_of_their_times_and_equal_times_as_scheduled() -> None:
    engine = Engine()
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((engine.now, name))

    for time, name in [(2.0, "b"), (1.0, "a"), (2.0, "c"), (1.5, "x"), (2.0, "d")]:
        engine.at(time, note, name)
    engine.run(until=3.0)
    assert seen == [(1.0, "a"), (1.5, "x"), (2.0, "b"), (2.0, "c"), (2.0, "d")]
    assert (engine.now, engine.num_events, engine.num_scheduled) == (3.0, 5, 0)


def test_time_stops_where_it_is_told_to_and_what_is_later_waits() -> None:
    engine = Engine()
    seen: list[float] = []
    for time in (1.0, 2.0, 2.5):
        engine.at(time, seen.append, time)
    engine.run(until=2.0)
    assert (seen, engine.now, engine.num_scheduled) == ([1.0, 2.0], 2.0, 1)
    engine.run_while(lambda: True)
    assert (seen, engine.now) == ([1.0, 2.0, 2.5], 2.5)


def test_what_an_action_schedules_at_once_comes_after_what_waits_for_the_same_time() -> None:
    engine = Engine()
    seen: list[str] = []
    engine.at(1.0, lambda: engine.at(1.0, seen.append, "second"))
    engine.at(1.0, seen.append, "first")
    engine.run(until=1.0)
    assert seen == ["first", "second"]


@pytest.mark.parametrize("time", [0.5, float("nan")])
def test_the_past_and_what_is_no_time_are_refused(time: float) -> None:
    engine = Engine()
    engine.run(until=1.0)
    with pytest.raises(ValueError, match="is before now=1"):
        engine.at(time, print)
