"""Runs of tokens that are no plain continuation of a stream which is read from their source."""

import numpy as np
from replica_driver import make_request

from rayserve_paged.core.consumer import Consumer
from rayserve_paged.core.controller_messages import Placed, SubmitRequest
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import Delivery, StreamItem, StreamName, TokenRun
from rayserve_paged.core.stream_update import StreamUpdate

Q = RequestId("q0")
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
LIFE = Incarnation(0)


def make_consumer(n: int = 1) -> Consumer:
    consumer = Consumer(ConsumerId("c0"))
    consumer.open(make_request([1], 9, n=n), 0.0)
    return consumer


def place(consumer: Consumer, attempt: int = 0) -> None:
    assert consumer.placed(Placed(Q, Attempt(attempt), R0, LIFE, 9), 0.0) == []


def item(
    index: int,
    *token_ids: int,
    sibling: int = 0,
    finish: FinishReason | None = None,
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
) -> StreamItem:
    name = StreamName(Q, Attempt(0), sibling)
    return StreamItem(name, index, token_ids, (), 0, finish, None, prompt_logprobs)


def run(index: int, *token_ids: int, attempt: int = 0, num_siblings: int = 1) -> TokenRun:
    """The same tokens for each sample."""
    names = tuple(StreamName(Q, Attempt(attempt), sibling) for sibling in range(num_siblings))
    columns = np.array([token_ids] * num_siblings, np.int32).T
    return TokenRun(names, np.full(num_siblings, index, np.int32), columns)


def deliver(
    consumer: Consumer, *items: StreamItem | TokenRun, name: ReplicaId = R0
) -> list[StreamUpdate]:
    return consumer.deliver(Delivery(name, LIFE, 1, items), 0.0)


def tokens(updates: list[StreamUpdate]) -> list[tuple[int, tuple[int, ...]]]:
    return [(update.sibling, update.token_ids) for update in updates]


def test_a_run_from_another_replica_is_not_accepted_and_its_stream_not_wanted() -> None:
    consumer = make_consumer()
    deliver(consumer, item(0, 5))
    assert deliver(consumer, run(1, 6), name=R1) == []
    assert consumer.poll(R1, LIFE, 0.0).unwanted == ((Q, 0),)
    assert tokens(deliver(consumer, run(1, 7))) == [(0, (7,))]
    assert consumer.poll(R0, LIFE, 0.0).unwanted == ()


def test_a_run_of_an_attempt_that_was_given_up_is_not_accepted() -> None:
    consumer = make_consumer()
    deliver(consumer, item(0, 5))
    consumer.fail(R0, LIFE, "its poll failed", 0.0)
    # The same replica serves the next one.
    place(consumer, attempt=1)
    assert tokens(deliver(consumer, run(1, 7, attempt=1))) == [(0, (7,))]
    assert deliver(consumer, run(2, 8)) == []
    assert consumer.poll(R0, LIFE, 0.0).unwanted == ((Q, 0),)
    assert tokens(deliver(consumer, run(2, 9, attempt=1))) == [(0, (9,))]


def test_a_run_that_comes_first_shows_where_its_request_is_served() -> None:
    consumer = make_consumer()
    consumer.tick(0.0)
    place(consumer)
    assert tokens(deliver(consumer, run(0, 5))) == [(0, (5,))]
    assert consumer.next_tick is None, "it need not be submitted again"
    assert consumer.placed(Placed(Q, Attempt(0), R1, LIFE, 9), 0.0) == []
    assert consumer.source(Q) == (R0, LIFE)


def test_a_run_goes_on_with_the_samples_that_have_not_ended() -> None:
    consumer = make_consumer(n=2)
    deliver(consumer, item(0, 5, finish=FinishReason.STOP), item(0, 6, sibling=1))
    assert tokens(deliver(consumer, run(1, 7, num_siblings=2))) == [(1, (7,))]


def test_runs_of_one_delivery_are_told_together_and_each_token_once() -> None:
    consumer = make_consumer(n=2)
    deliver(consumer, item(0, 5), item(0, 6, sibling=1))
    again = run(1, 7, 8, num_siblings=2)
    updates = deliver(consumer, again, again, run(2, 8, 9, num_siblings=2))
    assert tokens(updates) == [(0, (7, 8, 9)), (1, (7, 8, 9))]
    assert deliver(consumer, again) == []
    consumer.fail(R0, LIFE, "its poll failed", 0.0)
    ((message,), _updates) = consumer.tick(0.0)
    assert isinstance(message, SubmitRequest)
    assert [sample.token_ids for sample in message.request.delivered] == [
        (5, 7, 8, 9),
        (6, 7, 8, 9),
    ]


def test_scores_of_the_prompt_are_told_with_the_first_token_and_once() -> None:
    consumer = make_consumer()
    scores = (TokenLogprobs(-0.5, ()),)
    first, second = item(0, 5, prompt_logprobs=scores), item(1, 6)
    (update,) = deliver(consumer, first, second)
    assert (update.token_ids, update.prompt_logprobs) == ((5, 6), scores)
    # The answer was taken for lost, and is given again with what followed.
    (update,) = deliver(consumer, first, second, item(2, 7))
    assert (update.token_ids, update.prompt_logprobs) == ((7,), ())
