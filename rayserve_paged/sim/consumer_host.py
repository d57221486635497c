"""Hosts a consumer of a simulated cluster: such as an ingress process, on a node of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from rayserve_paged.core.consumer import Consumer
from rayserve_paged.core.controller_messages import Placed, Rejected, ReplicaLost
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.open_request import Source
from rayserve_paged.core.request import Request
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.network import Network, NodeId, message_bytes
from rayserve_paged.sim.report import OpenRequest, RequestLog

if TYPE_CHECKING:
    from rayserve_paged.sim.hosts import ControllerHost, ReplicaHost

Watch = Callable[[StreamUpdate, float], None]

_LOOK_S = 1.0
"""How often it looks for polls that were lost."""


class ConsumerHost:
    """A consumer, such as an ingress process: submits requests and polls who serves them.

    Args:
        engine: The clock.
        network: Carries its messages.
        node: Where it is.
        consumer: The state machine.
        controller: Whom it submits to.
        replicas: Whom it polls.
        log: Takes requests that have ended.
        watch: Called with each update of a stream as it is accepted, and the time.
    """

    def __init__(
        self,
        engine: Engine,
        network: Network,
        node: NodeId,
        consumer: Consumer,
        controller: ControllerHost,
        replicas: dict[Source, ReplicaHost],
        log: RequestLog,
        watch: Watch | None,
    ) -> None:
        self.node = node
        self.consumer = consumer
        self._engine = engine
        self._network = network
        self._controller = controller
        self._replicas = replicas
        self._log = log
        self._watch = watch
        self._open: dict[RequestId, OpenRequest] = {}
        # Whom a poll is under way to or pending at, and which.
        self._polled: dict[Source, int] = {}
        self._looks = False
        self._tick_at: float | None = None

    def submit(self, request: Request, number: int) -> None:
        """Open a request and submit it."""
        num_prompt_tokens = len(request.prompt_token_ids)
        self._open[request.request_id] = OpenRequest(
            number,
            self._engine.now,
            num_prompt_tokens,
            num_samples=request.params.num_siblings,
        )
        self.consumer.open(request, self._engine.now)
        self._send_due()

    def cancel(self, request_id: RequestId, sibling: int | None = None) -> None:
        """Ask for the end of a request, or of one of its samples; it then ends as cancelled."""
        self._hand_out(self.consumer.cancel(request_id, sibling, self._engine.now))
        self._send_due()

    def take(self, message: Placed | Rejected | ReplicaLost) -> None:
        """Take in what the controller has to say, or that a poll has failed."""
        now = self._engine.now
        match message:
            case Placed(request_id):
                opened = self._open.get(request_id)
                if opened is not None:
                    opened.num_attempts = max(opened.num_attempts, message.attempt + 1)
                self._hand_out(self.consumer.placed(message, now))
                source = self.consumer.source(request_id)
                if source is not None:
                    self._open[request_id].replica = self._replicas[source].index
                    self._listen(source)
            case Rejected():
                self._hand_out(self.consumer.rejected(message, now))
            case ReplicaLost(replica_id, incarnation):
                self._polled.pop((replica_id, incarnation), None)
                self._hand_out(self.consumer.lose([message], now))
            case _:
                assert_never(message)
        self._send_due()

    def take_delivery(self, sender: ReplicaHost, poll_id: int, delivery: Delivery) -> None:
        """Take in the answer to a poll, and poll again where more is to come."""
        self._hand_out(self.consumer.deliver(delivery, self._engine.now, poll_id))
        # Polls that answers to older ones brought about would answer each other for ever.
        if self._polled.get(sender.source) == poll_id:
            del self._polled[sender.source]
        self._listen(sender.source)
        self._send_due()

    def _listen(self, source: Source) -> None:
        """Keep one poll at a replica that serves an open request."""
        if source in self._polled or source not in self.consumer.serving():
            return
        host = self._replicas[source]
        message = self.consumer.poll(*source, self._engine.now)
        self._polled[source] = message.poll_id
        self._network.send(self.node, host.node, message_bytes(message), host.take, message)
        if not self._looks:
            self._looks = True
            self._engine.at(self._engine.now + _LOOK_S, self._look)

    def _look(self) -> None:
        """Repeat polls that must have been lost; give up replicas that answer none."""
        now = self._engine.now
        self._looks = False
        for source in self.consumer.silent(now):
            self._polled.pop(source, None)
            reason = "it answers no poll"
            self._hand_out(self.consumer.fail(*source, reason, now))
        for source in self.consumer.overdue_polls(now):
            self._polled.pop(source, None)
            self._listen(source)
        if self._polled and not self._looks:
            self._looks = True
            self._engine.at(now + _LOOK_S, self._look)
        self._send_due()

    def _send_due(self) -> None:
        """Send what the consumer has to say to the controller, and plan when it has more."""
        now = self._engine.now
        controller = self._controller
        due = self.consumer.next_tick
        while due is not None and due <= now:
            messages, updates = self.consumer.tick(now)
            for message in messages:
                size = message_bytes(message)
                self._network.send(self.node, controller.node, size, controller.take, message)
            self._hand_out(updates)
            due = self.consumer.next_tick
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = due
            self._engine.at(due, self._tick, due)

    def _tick(self, planned_for: float) -> None:
        if self._tick_at == planned_for:  # And none earlier was planned since.
            self._tick_at = None
            self._send_due()

    def _hand_out(self, updates: list[StreamUpdate]) -> None:
        now = self._engine.now
        for update in updates:
            if self._watch is not None:
                self._watch(update, now)
            opened = self._open[update.request_id]
            if opened.first_token_s is None:
                # What a later attempt finds is no hit of the request's.
                opened.num_cached_tokens = update.num_cached_tokens
            if update.token_ids:
                if opened.first_token_s is None:
                    opened.first_token_s = now
                opened.num_output_tokens += len(update.token_ids)
            if update.finish is None:
                continue
            if update.error is not None:
                self._log.errors[opened.number] = update.error
            opened.num_samples -= 1
            if not opened.num_samples:
                del self._open[update.request_id]
                self._log.add(opened, now, update.finish)
