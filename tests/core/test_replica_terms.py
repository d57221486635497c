"""What a replica obeys, and what it tells a controller that knows nothing of it."""

import dataclasses

import pytest
from replica_driver import R0, ReplicaDriver, make_limits, make_request, prompt_keys

from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, Term
from rayserve_paged.core.replica_messages import (
    AskInventory,
    AssignRequest,
    CancelRequest,
    ControllerMessage,
    FenceReplica,
    Inventory,
    PollTokens,
    RegisterReplica,
    ReplicaCommand,
    ReplicaReport,
    ResetCache,
    ServedRequest,
    Tick,
)
from rayserve_paged.core.request import Request, admit

Event = AssignRequest | CancelRequest | FenceReplica | AskInventory


@pytest.fixture
def driver() -> ReplicaDriver:
    return ReplicaDriver(make_limits(), incarnation=3)


def say(driver: ReplicaDriver, term: int, event: Event) -> list[ReplicaCommand]:
    return driver.send(ControllerMessage(Term(term), event))


def assignment(driver: ReplicaDriver, request: Request) -> AssignRequest:
    return AssignRequest(admit(request, driver.limits), prompt_keys(request, driver.scope))


def suspect(request: Request) -> Request:
    return dataclasses.replace(request, num_deaths=1)


def inventories(commands: list[ReplicaCommand]) -> list[Inventory]:
    found = []
    for command in commands:
        if isinstance(command, RegisterReplica):
            assert command.inventory is not None
            found.append(command.inventory)
    return found


def served(driver: ReplicaDriver) -> list[tuple[str, int]]:
    """What the replica has, by name and attempt."""
    return [(s.request.request_id, s.request.attempt) for s in driver.replica.sequences]


# --- terms ------------------------------------------------------------------------------------


def test_what_an_older_term_says_is_refused(driver: ReplicaDriver) -> None:
    first, second = (make_request([i], 9, request_id=f"q{i}") for i in range(2))
    say(driver, 2, assignment(driver, first))
    events: tuple[Event, ...] = (
        assignment(driver, second),
        CancelRequest(first.request_id, first.attempt),
        FenceReplica("lost"),
        AskInventory(1, with_keys=True),
    )
    for event in events:
        assert say(driver, 1, event) == []
    assert (served(driver), driver.replica.fenced) == ([("q0", 0)], None)


def test_what_the_term_that_it_knows_says_is_done(driver: ReplicaDriver) -> None:
    first, second = (make_request([i], 9, request_id=f"q{i}") for i in range(2))
    say(driver, 2, assignment(driver, first))
    assert inventories(say(driver, 2, assignment(driver, second))) == []
    assert inventories(say(driver, 2, CancelRequest(first.request_id, first.attempt))) == []
    assert served(driver) == [("q1", 0)]
    commands = say(driver, 2, FenceReplica("lost"))
    assert [type(command) for command in commands] == [ReplicaReport]
    assert driver.replica.fenced == "lost"


def test_the_first_message_of_a_term_is_answered_with_all_that_there_is(
    driver: ReplicaDriver,
) -> None:
    request = make_request([1], 9)
    command, *others = say(driver, 1, assignment(driver, request))
    empty = Inventory(number=None, served=(), keys=(), num_reports=0)
    # As it was before the message.
    assert command == RegisterReplica(R0, Incarnation(3), driver.limits, driver.scope, empty)
    assert inventories(others) == []
    assert served(driver) == [("q0", 0)]


def test_a_question_is_answered_once_though_it_is_the_first_message_of_a_term(
    driver: ReplicaDriver,
) -> None:
    (inventory,) = inventories(say(driver, 1, AskInventory(7, with_keys=True)))
    assert inventory == Inventory(number=7, served=(), keys=(), num_reports=0)
    (inventory,) = inventories(say(driver, 1, AskInventory(8, with_keys=False)))
    assert inventory == Inventory(number=8, served=(), keys=None, num_reports=0)


def test_a_fenced_replica_answers_with_its_end(driver: ReplicaDriver) -> None:
    driver.send(FenceReplica("a rank is gone"))
    questions: list[tuple[int, Event]] = [
        (0, AskInventory(1, with_keys=True)),
        (1, FenceReplica("again")),
    ]
    for term, event in questions:
        (report,) = say(driver, term, event)
        assert isinstance(report, ReplicaReport)
        assert report.fenced == "a rank is gone"
    assert [report.sequence for report in driver.reports] == [0, 1, 2]


# --- inventories ------------------------------------------------------------------------------


def test_an_inventory_lists_the_requests_that_have_not_ended(driver: ReplicaDriver) -> None:
    done = make_request([9], 1, request_id="done")
    driver.generate(done)
    old = make_request(range(5), 9, attempt=2, request_id="old", n=2)
    driver.submit(old)
    driver.step()
    new = make_request([7, 7], 6, request_id="new", consumer_id="c1")
    driver.submit(new)
    (inventory,) = inventories(say(driver, 0, AskInventory(1, with_keys=True)))
    assert inventory.served == (
        ServedRequest(
            request_id=old.request_id,
            attempt=Attempt(2),
            consumer_id=ConsumerId("c0"),
            num_rows=2,
            num_tokens=5 + 2 * 9,
            max_tokens=9,
            is_prefilled=True,
            on_trial=False,
        ),
        ServedRequest(
            request_id=new.request_id,
            attempt=Attempt(0),
            consumer_id=ConsumerId("c1"),
            num_rows=1,
            num_tokens=2 + 6,
            max_tokens=6,
            is_prefilled=False,
            on_trial=False,
        ),
    )
    assert inventory.num_reports == len(driver.reports)


@pytest.mark.parametrize(
    ("beam_width", "expected"),
    [(None, [(True, False), (False, False)]), (2, [(True, True), (True, True)])],
    ids=["sample", "search"],
)
def test_a_suspect_is_on_trial_until_its_reader_may_have_a_token(
    driver: ReplicaDriver, beam_width: int | None, expected: list[tuple[bool, bool]]
) -> None:
    told = []
    driver.submit(suspect(make_request([1], 9, attempt=1, beam_width=beam_width)))
    for _ in range(2):
        (inventory,) = inventories(say(driver, 0, AskInventory(1, with_keys=False)))
        told += [(one.on_trial, one.is_tried_long) for one in inventory.served]
        driver.step()
    assert told == expected


def test_all_keys_stand_for_the_reports_that_were_due(driver: ReplicaDriver) -> None:
    driver.generate(make_request(range(9), 1))
    request = make_request(range(20, 29), 9, request_id="q1")
    driver.submit(request)
    driver.step()
    assert len(driver.reports) == 1, "the next is due later"
    (inventory,) = inventories(say(driver, 0, AskInventory(1, with_keys=False)))
    assert inventory.keys is None
    (inventory,) = inventories(say(driver, 0, AskInventory(2, with_keys=True)))
    assert inventory.keys is not None
    keys = prompt_keys(make_request(range(9)), driver.scope) + prompt_keys(request, driver.scope)
    assert (set(inventory.keys), inventory.num_reports) == (set(keys), 1)
    driver.tick(1.0)
    assert [(report.sequence, report.published) for report in driver.reports[1:]] == [(1, ())]


def test_keys_that_were_not_listed_are_reported(driver: ReplicaDriver) -> None:
    driver.generate(make_request([5], 1))
    request = make_request(range(20, 29), 9, request_id="q1")
    driver.submit(request)
    driver.step()
    say(driver, 0, AskInventory(1, with_keys=False))
    driver.tick(1.0)
    assert driver.reports[-1].published == prompt_keys(request, driver.scope)


# --- reports ----------------------------------------------------------------------------------


def test_the_end_of_a_trial_is_reported_at_once(driver: ReplicaDriver) -> None:
    driver.submit(make_request([5], 30, request_id="busy"))
    driver.step()
    driver.submit(suspect(make_request([1], 9, request_id="good", attempt=1)))
    driver.submit(suspect(make_request([2], 9, request_id="bad", attempt=1)))
    num_reports = len(driver.reports)
    driver.send(CancelRequest(make_request([2], request_id="bad").request_id, Attempt(1)))
    assert [report.finished for report in driver.reports[num_reports:]] == [(("bad", 1),)]
    driver.step()
    driver.step()
    driver.step()
    assert [report.prefilled for report in driver.reports[num_reports + 1 :]] == [(("good", 1),)]


def test_a_fenced_replica_has_no_further_report_due(driver: ReplicaDriver) -> None:
    assert [driver.replica.next_tick] == [None]
    driver.submit(make_request(range(9), 30))
    driver.step()
    driver.send(FenceReplica("lost"))
    driver.send(ResetCache())  # Keys go, and nobody is to be told.
    lease_ends = driver.replica.next_tick
    driver.tick(1.0)
    assert (lease_ends, len(driver.reports)) == (10.0, 2)


# --- what consumers do not want ---------------------------------------------------------------


def test_an_attempt_that_its_consumer_does_not_want_is_ended(driver: ReplicaDriver) -> None:
    requests = [make_request([i], 9, request_id=f"q{i}", attempt=1) for i in range(2)]
    for request in requests:
        driver.send(assignment(driver, request))
    names = tuple((request.request_id, Attempt(i)) for i, request in enumerate(requests))
    driver.send(PollTokens(ConsumerId("c0"), 1, 0, names))
    # Of the first another attempt is meant.
    assert served(driver) == [("q0", 1)]


def test_a_later_attempt_takes_the_place_of_the_one_before(driver: ReplicaDriver) -> None:
    old, new = (make_request([1], 9, attempt=attempt) for attempt in (1, 2))
    say(driver, 0, assignment(driver, old))
    driver.step()
    say(driver, 0, assignment(driver, new))
    assert served(driver) == [("q0", 2)]
    driver.send(Tick())
    assert [report.finished for report in driver.reports if report.finished] == []
    driver.tick(1.0)
    assert driver.reports[-1].finished == (("q0", 1),)
