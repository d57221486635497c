"""What a deployment remembers of what has happened to it."""

from replica_driver import R0, make_limits, make_request, make_scope

from rayserve_paged.core.controller_messages import (
    ReplicaLost,
    StartReplica,
    SubmitRequest,
    TakeDown,
)
from rayserve_paged.core.ids import Incarnation
from rayserve_paged.core.recent_events import MAX_EVENTS, RecentEvents
from rayserve_paged.core.replica_messages import RegisterReplica, Tick

LIFE = Incarnation(0)
REGISTER = RegisterReplica(R0, LIFE, make_limits(), make_scope())


def test_a_life_of_a_replica_is_told_once_from_its_start_to_its_loss() -> None:
    events = RecentEvents()
    events.see(REGISTER, (), 1.0)
    events.see(REGISTER, (), 2.0)
    lost = ReplicaLost(R0, LIFE, "rank 0 died", ())
    events.see(Tick(), (lost, StartReplica(R0, Incarnation(1)), TakeDown("over")), 3.0)
    assert [
        (event.sequence, event.ago_s, event.kind, event.text) for event in events.latest(5.0)
    ] == [
        (1, 4.0, "replica started", "r0 serves, as life 0"),
        (2, 2.0, "replica lost", "r0 (life 0): rank 0 died"),
        (3, 2.0, "replica starting", "r0 is started again, as life 1"),
        (4, 2.0, "taken down", "over"),
    ]


def test_requests_that_go_on_together_are_one_event() -> None:
    events = RecentEvents()
    again = SubmitRequest(make_request([1]), lost_at=(R0, LIFE))
    for now in (1.0, 2.0, 3.0):
        events.see(again, (), now)
    events.see(SubmitRequest(make_request([1])), (), 3.0)
    events.see(again, (), 60.0)
    assert [event.text for event in events.latest(60.0)] == [
        "3 requests go on elsewhere: r0 was lost",
        "1 request goes on elsewhere: r0 was lost",
    ]


def test_old_events_are_forgotten_and_long_texts_are_cut() -> None:
    events = RecentEvents()
    for number in range(MAX_EVENTS + 5):
        events.add(float(number), "note", "x" * 1000, "acme")
    latest = events.latest(1000.0)
    assert [event.sequence for event in latest] == list(range(6, MAX_EVENTS + 6))
    assert {(len(event.text), event.tenant) for event in latest} == {(300, "acme")}
