import numpy as np
from replica_driver import make_request

from rayserve_paged.core.consumer import Consumer
from rayserve_paged.core.controller_messages import Placed, ReplicaLost, SubmitRequest
from rayserve_paged.core.delivered import DeliveredSample
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replica_messages import PollTokens
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import Delivery, StreamItem, StreamName, TokenRun

Q = RequestId("q0")
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
LIFE = Incarnation(2)


def make_consumer() -> Consumer:
    consumer = Consumer(ConsumerId("c0"))
    consumer.open(make_request([1], 9), 0.0)
    return consumer


def place(consumer: Consumer, replica_id: ReplicaId = R0, attempt: int = 0) -> list[object]:
    return [*consumer.placed(Placed(Q, Attempt(attempt), replica_id, LIFE, 9), 0.0)]


def delivery(*items: StreamItem | TokenRun, sequence: int = 1) -> Delivery:
    return Delivery(R0, LIFE, sequence, items)


def name(attempt: int = 0, sibling: int = 0) -> StreamName:
    return StreamName(Q, Attempt(attempt), sibling)


def item(
    index: int,
    *token_ids: int,
    attempt: int = 0,
    sibling: int = 0,
    finish: FinishReason | None = None,
) -> StreamItem:
    return StreamItem(name(attempt, sibling), index, token_ids, (), 4, finish, None)


def run(*tokens: tuple[StreamName, int, int]) -> TokenRun:
    """A run of (stream, output index, token)."""
    names, indices, token_ids = zip(*tokens, strict=True)
    return TokenRun(names, np.array(indices, np.int32), np.array([token_ids], np.int32))


def lost(replica_id: ReplicaId = R0, life: Incarnation = LIFE) -> ReplicaLost:
    return ReplicaLost(replica_id, life, "a rank died", (ConsumerId("c0"),))


def test_each_token_is_accepted_once() -> None:
    consumer = make_consumer()
    place(consumer)
    batches = [item(0, 5, 6), item(0, 5, 6, 7), item(1, 6), item(3, 8)]
    got = [consumer.deliver(delivery(one), 0.0) for one in batches]
    assert [[update.token_ids for update in updates] for updates in got] == [
        [(5, 6)],
        [(7,)],
        [],
        [(8,)],
    ]
    assert got[0][0].num_cached_tokens == 4


def test_items_and_runs_of_one_stream_are_told_together() -> None:
    consumer = make_consumer()
    foreign = StreamName(RequestId("other"), Attempt(0), 0)
    one, two = run((name(), 1, 6), (foreign, 0, 9)), run((name(), 2, 7))
    end = item(3, 8, finish=FinishReason.LENGTH)
    (update,) = consumer.deliver(delivery(item(0, 5), one, two, end), 0.0)
    assert (update.token_ids, update.finish) == ((5, 6, 7, 8), FinishReason.LENGTH)
    assert update.num_cached_tokens == 4
    assert consumer.open_requests == ()


def test_tokens_of_a_run_are_accepted_once_and_a_gap_in_one_fails_its_stream() -> None:
    consumer = make_consumer()
    consumer.deliver(delivery(item(0, 5)), 0.0)
    (update,) = consumer.deliver(delivery(run((name(), 0, 5)), run((name(), 1, 6))), 0.0)
    assert (update.token_ids, update.num_cached_tokens) == ((6,), 4)
    assert consumer.deliver(delivery(run((name(), 1, 6))), 0.0) == []
    (update,) = consumer.deliver(delivery(run((name(), 3, 8)), item(2, 7)), 0.0)
    assert (update.token_ids, update.finish) == ((), FinishReason.ERROR)
    assert update.error == "its stream skips from token 2 to token 3"


def test_several_tokens_of_a_run_are_accepted_once_each() -> None:
    consumer = Consumer(ConsumerId("c0"))
    consumer.open(make_request([1], 9, n=2), 0.0)
    consumer.deliver(delivery(item(0, 5), item(0, 6, sibling=1), item(1, 7, sibling=1)), 0.0)
    names = (name(), name(sibling=1))
    tokens = np.array([[15, 7], [25, 17], [35, 27]], np.int32)
    updates = consumer.deliver(delivery(TokenRun(names, np.array([1, 1], np.int32), tokens)), 0.0)
    assert [(u.sibling, u.token_ids) for u in updates] == [(0, (15, 25, 35)), (1, (17, 27))]


def test_nothing_follows_the_end_of_a_stream() -> None:
    consumer = make_consumer()
    end = item(1, finish=FinishReason.DEADLINE)
    (update,) = consumer.deliver(delivery(item(0, 5), end, run((name(), 1, 6)), item(2, 7)), 0.0)
    assert (update.token_ids, update.finish) == ((5,), FinishReason.DEADLINE)


def test_the_samples_of_a_request_are_streams_of_their_own() -> None:
    consumer = Consumer(ConsumerId("c0"))
    consumer.open(make_request([1], 9, n=2), 0.0)
    place(consumer)
    first = consumer.deliver(
        delivery(item(0, 5), item(0, 6, sibling=1), item(0, 7, sibling=2)), 0.0
    )
    assert [(u.sibling, u.token_ids) for u in first] == [(0, (5,)), (1, (6,))]
    (update,) = consumer.deliver(delivery(item(1, 8, sibling=1, finish=FinishReason.STOP)), 0.0)
    assert (update.sibling, update.finish) == (1, FinishReason.STOP)
    assert consumer.open_requests == (Q,)
    assert consumer.serving() == {(R0, LIFE)}
    assert consumer.deliver(delivery(item(2, 8, sibling=1)), 0.0) == []
    assert consumer.lose([lost()], 0.0) == []
    assert consumer.serving() == set()
    (message,), _updates = consumer.tick(0.0)
    assert isinstance(message, SubmitRequest)
    assert message.request.delivered == (DeliveredSample(0, (5,)),)


def test_log_probabilities_of_known_tokens_are_dropped_with_them() -> None:
    consumer = make_consumer()
    consumer.deliver(delivery(item(0, 5)), 0.0)
    logprobs = tuple(TokenLogprobs(-float(i), ()) for i in range(2))
    again = StreamItem(name(), 0, (5, 6), logprobs, 0, None, None)
    (update,) = consumer.deliver(delivery(again), 0.0)
    assert (update.token_ids, update.logprobs) == ((6,), logprobs[1:])


def test_the_last_update_is_told_once_and_closes_the_request() -> None:
    consumer = make_consumer()
    place(consumer)
    (update,) = consumer.deliver(delivery(item(0, 5, finish=FinishReason.LENGTH)), 0.0)
    assert update.finish is FinishReason.LENGTH
    assert consumer.open_requests == ()
    assert consumer.serving() == set()
    assert consumer.deliver(delivery(item(0, 5, finish=FinishReason.LENGTH)), 0.0) == []


def test_an_end_without_new_tokens_is_told() -> None:
    consumer = make_consumer()
    consumer.deliver(delivery(item(0, 5)), 0.0)
    (update,) = consumer.deliver(delivery(item(1, finish=FinishReason.DEADLINE)), 0.0)
    assert (update.token_ids, update.finish) == ((), FinishReason.DEADLINE)


def test_a_gap_fails_the_request_instead_of_being_skipped() -> None:
    consumer = make_consumer()
    consumer.deliver(delivery(item(0, 5)), 0.0)
    (update,) = consumer.deliver(delivery(item(2, 7)), 0.0)
    assert (update.finish, update.token_ids) == (FinishReason.ERROR, ())
    assert update.error == "its stream skips from token 1 to token 2"
    assert consumer.open_requests == ()


def test_items_of_another_attempt_are_dropped() -> None:
    consumer = make_consumer()
    assert consumer.deliver(delivery(item(0, 5, attempt=1)), 0.0) == []
    assert place(consumer, attempt=1) == []
    assert consumer.serving() == set()
    assert consumer.attempt(Q) == 0


def test_an_abandoned_request_is_closed_to_whatever_still_comes() -> None:
    consumer = make_consumer()
    place(consumer)
    consumer.abandon(Q)
    consumer.abandon(Q)
    assert consumer.deliver(delivery(item(0, 5)), 0.0) == []
    assert (consumer.attempt(Q), consumer.serving()) == (None, set())


def test_polls_are_numbered_and_acknowledge_per_incarnation() -> None:
    consumer = make_consumer()
    assert consumer.poll(R0, LIFE, 0.0) == PollTokens(ConsumerId("c0"), 1, 0)
    consumer.deliver(delivery(sequence=4), 0.0)
    consumer.deliver(delivery(sequence=3), 0.0)
    assert consumer.poll(R0, LIFE, 0.0).ack == 4
    assert consumer.poll(R1, LIFE, 0.0).ack == 0
    assert consumer.poll(R0, Incarnation(3), 0.0) == PollTokens(ConsumerId("c0"), 4, 0)


def test_the_replicas_of_open_requests_are_to_be_polled() -> None:
    consumer = make_consumer()
    assert consumer.serving() == set()
    place(consumer)
    assert consumer.serving() == {(R0, LIFE)}


def test_a_replica_is_polled_until_its_last_request_ends_moves_or_is_given_up() -> None:
    consumer = make_consumer()
    for other in ("q1", "q2"):
        consumer.open(make_request([1], 9, request_id=other), 0.0)
        consumer.placed(Placed(RequestId(other), Attempt(0), R0, LIFE, 9), 0.0)
    place(consumer)
    place(consumer)
    consumer.deliver(delivery(item(0, 5, finish=FinishReason.LENGTH)), 0.0)
    consumer.abandon(RequestId("q1"))
    assert consumer.serving() == {(R0, LIFE)}
    consumer.placed(Placed(RequestId("q2"), Attempt(0), R1, LIFE, 9), 0.0)
    assert consumer.serving() == {(R1, LIFE)}
    consumer.abandon(RequestId("q2"))
    assert consumer.serving() == set()
