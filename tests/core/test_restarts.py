from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.ids import Incarnation, ReplicaId, Term
from rayserve_paged.core.restarts import Restarts

R0, R1 = ReplicaId("r0"), ReplicaId("r1")
RECOVERY = RecoveryConfig(restart_delay_s=1.0, max_restart_delay_s=60.0, lasting_life_s=60.0)
START_TIMEOUT_S = 300.0


def make_restarts(term: int = 0, config: RecoveryConfig | None = RECOVERY) -> Restarts:
    return Restarts(config, START_TIMEOUT_S, Term(term))


def register(restarts: Restarts, incarnation: int, now: float) -> None:
    restarts.register(R0, Incarnation(incarnation), now)


def lose(restarts: Restarts, incarnation: int, now: float) -> None:
    restarts.lose(R0, Incarnation(incarnation), now)


def pause_after(restarts: Restarts, incarnation: int, began: float, lasted_s: float) -> float:
    """Let a life begin and end, and the next one start as soon as it is due."""
    register(restarts, incarnation, began)
    lose(restarts, incarnation, began + lasted_s)
    due = restarts.next_tick
    assert due is not None
    assert restarts.take_due(due) == [(R0, incarnation + 1)]
    return due - began - lasted_s


def test_a_lost_life_is_followed_by_the_next_incarnation_at_once_and_once() -> None:
    restarts = make_restarts()
    register(restarts, 4, 10.0)
    assert (restarts.is_hopeful, restarts.next_tick) == (False, None)
    lose(restarts, 4, 20.0)
    assert (restarts.is_hopeful, restarts.next_tick) == (True, 20.0)
    assert (restarts.expects(R0), restarts.expects(R1)) == (True, False)
    assert (restarts.starting, restarts.take_due(19.9)) == ([], [])
    assert restarts.take_due(20.0) == [(R0, 5)]
    assert (restarts.starting, restarts.take_due(99.0)) == ([(R0, 5)], [])
    assert (restarts.is_hopeful, restarts.expects(R0)) == (True, True)
    lives = [(R0, 4), (R0, 5), (R0, 6), (R1, 5)]
    told = [restarts.is_starting(name, Incarnation(life)) for name, life in lives]
    assert told == [False, True, False, False]


def test_each_replica_is_started_when_it_is_due_itself() -> None:
    restarts = make_restarts()
    for name, now in ((R0, 0.0), (R1, 10.0)):
        restarts.lose(name, Incarnation(0), now)
        assert restarts.take_due(now) == [(name, 1)]
    restarts.lose(R0, Incarnation(1), 20.0)
    restarts.lose(R1, Incarnation(1), 30.0)
    assert restarts.next_tick == 21.0
    assert (restarts.take_due(20.9), restarts.take_due(21.0)) == ([], [(R0, 2)])
    assert (restarts.take_due(30.9), restarts.take_due(31.0)) == ([], [(R1, 2)])


def test_a_life_that_has_begun_is_not_waited_for_any_more() -> None:
    restarts = make_restarts()
    register(restarts, 0, 0.0)
    lose(restarts, 0, 1.0)
    restarts.take_due(1.0)
    register(restarts, 1, 2.0)
    assert (restarts.is_hopeful, restarts.expects(R0)) == (False, False)
    assert (restarts.starting, restarts.next_tick) == ([], None)
    assert not restarts.is_starting(R0, Incarnation(1))
    assert (restarts.take_due(999.0), restarts.overdue(999.0)) == ([], [])


def test_the_pause_before_a_start_doubles_with_each_short_life_up_to_its_bound() -> None:
    restarts = make_restarts()
    pauses = [pause_after(restarts, life, 1000.0 * life, 1.0) for life in range(10)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_replica_that_dies_for_ever_is_started_again_for_ever() -> None:
    restarts = make_restarts()
    pauses = [pause_after(restarts, life, 1000.0 * life, 1.0) for life in range(1200)]
    assert pauses[-1] == 60.0, "and 2.0**1199 is no float"


def test_a_life_that_lasted_begins_the_count_anew() -> None:
    restarts = make_restarts()
    lasted = [1.0, 1.0, 59.0, 60.0, 1.0, 1.0]
    pauses = [pause_after(restarts, life, 1000.0 * life, s) for life, s in enumerate(lasted)]
    assert pauses == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]


def test_a_life_that_does_not_register_in_time_is_overdue_and_was_a_short_one() -> None:
    restarts = make_restarts()
    register(restarts, 0, 0.0)
    lose(restarts, 0, 100.0)
    assert restarts.overdue(999.0) == [], "it has not been started"
    restarts.take_due(100.0)
    assert restarts.next_tick == 100.0 + START_TIMEOUT_S
    assert restarts.overdue(399.9) == []
    assert restarts.overdue(400.0) == [(R0, 1)]
    lose(restarts, 1, 400.0)
    assert not restarts.is_starting(R0, Incarnation(1))
    assert (restarts.starting, restarts.next_tick) == ([], 401.0)
    assert restarts.take_due(401.0) == [(R0, 2)]


def test_the_next_tick_is_the_earlier_of_a_start_and_of_a_life_that_is_given_up() -> None:
    restarts = make_restarts()
    restarts.lose(R0, Incarnation(0), 0.0)
    restarts.take_due(0.0)
    restarts.lose(R1, Incarnation(0), 10.0)
    assert restarts.next_tick == 10.0
    restarts.take_due(10.0)
    assert restarts.next_tick == 300.0
    restarts.lose(R1, Incarnation(1), 299.5)
    assert restarts.next_tick == 300.0


def test_the_loss_of_an_older_life_says_nothing_of_the_next_one() -> None:
    restarts = make_restarts()
    register(restarts, 4, 0.0)
    lose(restarts, 3, 1.0)
    assert (restarts.is_hopeful, restarts.next_tick) == (False, None)
    lose(restarts, 4, 2.0)
    restarts.take_due(2.0)
    lose(restarts, 4, 3.0)
    assert restarts.starting == [(R0, 5)]


def test_the_next_life_follows_the_latest_that_was_seen() -> None:
    restarts = make_restarts()
    register(restarts, 0, 0.0)
    register(restarts, 5, 1.0)
    lose(restarts, 3, 2.0)
    assert not restarts.is_hopeful
    lose(restarts, 7, 3.0)
    assert restarts.take_due(3.0) == [(R0, 8)]


def test_a_life_is_overtaken_as_long_as_a_later_one_is_starting() -> None:
    restarts = make_restarts()
    register(restarts, 4, 0.0)
    assert not restarts.is_overtaken(R0, Incarnation(3)), "a later one lives"
    lose(restarts, 4, 1.0)
    assert not restarts.is_overtaken(R0, Incarnation(4)), "the next one is not started yet"
    restarts.take_due(1.0)
    lives = [(R0, 4), (R0, 5), (R0, 6), (R1, 4)]
    told = [restarts.is_overtaken(name, Incarnation(life)) for name, life in lives]
    assert told == [True, False, False, False]
    register(restarts, 5, 2.0)
    assert not restarts.is_overtaken(R0, Incarnation(4))


def test_each_term_numbers_the_lives_that_it_starts_above_those_of_all_before() -> None:
    restarts = make_restarts(term=2)
    restarts.lose(R0, None, 0.0)
    restarts.lose(R1, Incarnation(1_000_007), 0.0)
    assert restarts.take_due(0.0) == [(R0, 2_000_000), (R1, 2_000_000)]
    register(restarts, 2_000_000, 1.0)
    lose(restarts, 2_000_000, 2.0)
    assert restarts.take_due(3.0) == [(R0, 2_000_001)]


def test_a_life_that_is_unknown_is_no_later_than_one_that_is_known() -> None:
    restarts = make_restarts(term=1)
    register(restarts, 1_000_000, 0.0)
    restarts.lose(R0, None, 1.0)
    assert (restarts.is_hopeful, restarts.next_tick) == (False, None)


def test_without_restarts_nothing_is_started_again() -> None:
    for config in (None, RecoveryConfig(restart=False)):
        restarts = make_restarts(config=config)
        register(restarts, 0, 0.0)
        lose(restarts, 0, 1.0)
        assert (restarts.is_hopeful, restarts.expects(R0)) == (False, False)
        assert (restarts.next_tick, restarts.take_due(99.0)) == (None, [])
