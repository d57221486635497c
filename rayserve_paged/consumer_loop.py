"""Carries the messages of one consumer on an asyncio loop: submissions, polls, cancellations.

The decisions are those of `core.consumer`. One poll is pending for each replica that serves an
open request, and one watch for news of lost replicas while any request is open; an idle consumer
sends nothing.
"""

import asyncio
import contextlib
import contextvars
import functools
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Final

from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.consumer import Consumer
from rayserve_paged.core.controller_messages import (
    Placed,
    Rejected,
    ReplicaLost,
    SubmitRequest,
    WithdrawRequest,
)
from rayserve_paged.core.errors import (
    ControllerAwayError,
    PagedError,
    ReplicaLostError,
    RequestFailedError,
)
from rayserve_paged.core.ids import Attempt, ConsumerId, RequestId
from rayserve_paged.core.open_request import Source
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.deployment import Deployment
from rayserve_paged.door import Door, refused_for_now

_RECOVERY: Final = RecoveryConfig()
_WATCH_AGAIN_S: Final = 1.0

logger = logging.getLogger(__name__)


class ConsumerLoop:
    """One consumer of a deployment; all methods are called on one asyncio loop.

    Args:
        deployment: Where requests go.
        consumer_id: Unique in the deployment.
    """

    def __init__(
        self,
        deployment: Deployment,
        consumer_id: ConsumerId,
        recovery: RecoveryConfig = _RECOVERY,
    ) -> None:
        self._deployment = deployment
        self._consumer = Consumer(consumer_id, recovery)
        # None in a queue: the loop is closed.
        self._streams: dict[RequestId, asyncio.Queue[StreamUpdate | None]] = {}
        self._pollers: dict[Source, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._driver: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._door = Door(deployment)
        # Requests that wait at the door where the deployment is overloaded, or a quota exceeded.
        self._patient: set[RequestId] = set()
        self._submitting: dict[RequestId, asyncio.Task[None]] = {}
        self._withdrawing: set[asyncio.Task[None]] = set()

    async def stream(
        self, request: Request, *, waits: bool = False
    ) -> AsyncGenerator[StreamUpdate, None]:
        """Submit a request and yield what is new of it, until all of its samples have finished.

        Where its replica is lost, it goes on elsewhere. Closing the generator early cancels all
        samples; it returns once that was asked for.

        Args:
            request: Its deadline is counted from now.
            waits: Whether to wait, as long as the deadline allows, where the deployment is
                overloaded or the tenant at its quota.

        Raises:
            PagedError: It was refused, no replica could take it for too long, or the deployment
                cannot be reached.
            RequestFailedError: This loop was closed, or the request ends its replicas.
        """
        updates: asyncio.Queue[StreamUpdate | None] = asyncio.Queue()
        request_id = request.request_id
        self._streams[request_id] = updates
        if waits:
            self._patient.add(request_id)
        self._consumer.open(request, time.monotonic())
        self._send_due()
        try:
            num_open = request.params.num_siblings
            while num_open:
                update = await updates.get()
                if update is None:
                    raise RequestFailedError(request_id, "its consumer was closed")
                if update.cause is not None:
                    raise update.cause
                yield update
                if update.finish is not None:
                    num_open -= 1
        finally:
            del self._streams[request_id]
            self._patient.discard(request_id)
            await self._give_up(request_id)

    def place(self, request_id: RequestId) -> tuple[Source | None, Attempt]:
        """Return where a request is served and as which attempt; (None, 0) where it is not open."""
        attempt = self._consumer.attempt(request_id)
        return self._consumer.source(request_id), Attempt(0) if attempt is None else attempt

    async def _give_up(self, request_id: RequestId) -> None:
        withdrawal = self._consumer.abandon(request_id)
        if withdrawal is None:
            return
        submitting = self._submitting.pop(request_id, None)
        if submitting is not None:
            submitting.cancel()
        # What asks for it may be cancelled meanwhile.
        await asyncio.shield(self._begin_withdrawing(withdrawal))

    async def cancel(self, request_id: RequestId, sibling: int | None = None) -> None:
        """Ask for the end of a request, or of one of its samples; what is ended so ends as
        cancelled. Idempotent.
        """
        if not self._door.cancel(request_id, sibling):
            self._hand_out(self._consumer.cancel(request_id, sibling, time.monotonic()))

    async def close(self) -> None:
        """Cancel what is open and stop listening; open streams raise RequestFailedError."""
        for request_id, updates in self._streams.items():
            updates.put_nowait(None)
            self._door.cancel(request_id, None)
        await asyncio.gather(*map(self._give_up, self._consumer.open_requests))
        tasks = [*self._pollers.values(), *self._submitting.values(), *self._withdrawing]
        tasks += [task for task in (self._watcher, self._driver) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- speaking -------------------------------------------------------------------------

    def _send_due(self) -> None:
        """Send what is due to the controller, and see to it that what is due later will be."""
        messages, updates = self._consumer.tick(time.monotonic())
        for message in messages:
            if isinstance(message, WithdrawRequest):
                self._begin_withdrawing(message)
            else:
                self._begin_submitting(message)
        for update in updates:
            self._put(update)
        if self._driver is None and self._consumer.next_tick is not None:
            self._driver = _begin(self._drive())
            self._driver.add_done_callback(self._driver_ended)
        self._wake.set()

    async def _drive(self) -> None:
        while (due := self._consumer.next_tick) is not None:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._wake.wait()
            if due <= time.monotonic():
                self._send_due()

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        self._driver = None
        if not task.cancelled():
            self._send_due()

    def _begin_submitting(self, message: SubmitRequest) -> None:
        request_id = message.request.request_id
        before = self._submitting.get(request_id)
        if before is not None:
            before.cancel()  # It has led to nothing for long enough.
        task = self._submitting[request_id] = _begin(self._submit(message))
        task.add_done_callback(functools.partial(self._submitted, request_id))

    def _submitted(self, request_id: RequestId, task: asyncio.Task[None]) -> None:
        if self._submitting.get(request_id) is task:
            del self._submitting[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._hand_out(self._consumer.refuse(request_id, error))

    async def _submit(self, message: SubmitRequest) -> None:
        request = message.request
        answer: Placed | Rejected | FinishReason
        try:
            answer = await self._deployment.submit(message)
        except ControllerAwayError as error:
            # It is submitted again until somebody answers.
            logger.warning("request %s is not answered: %s", request.request_id, error)
            return
        if isinstance(answer, Rejected) and refused_for_now(answer) and self._is_patient(request):
            self._consumer.hold(request.request_id)
            answer = await self._door.wait(request, answer)
        now = time.monotonic()
        match answer:
            case Placed():
                self._hand_out(self._consumer.placed(answer, now))
            case Rejected():
                self._hand_out(self._consumer.rejected(answer, now))
            case FinishReason():
                self._hand_out(self._consumer.end_unplaced(request.request_id, answer))

    def _begin_withdrawing(self, message: WithdrawRequest) -> asyncio.Task[None]:
        task = _begin(self._withdraw(message))
        self._withdrawing.add(task)
        task.add_done_callback(self._withdrawing.discard)
        return task

    def _is_patient(self, request: Request) -> bool:
        return request.request_id in self._patient

    async def _withdraw(self, message: WithdrawRequest) -> None:
        # A deployment that cannot be reached has other ways to learn it: the lease.
        with contextlib.suppress(PagedError):
            await self._deployment.cancel(
                message.request_id, message.attempt, message.sibling, message.placed_at
            )

    # --- listening ------------------------------------------------------------------------

    def _listen(self, sources: AbstractSet[Source]) -> None:
        """Poll these replicas as long as they serve an open request, and watch while any does."""
        for source in sources - self._pollers.keys():
            self._pollers[source] = task = _begin(self._poll(source))
            task.add_done_callback(functools.partial(self._poll_ended, source))
        if sources and self._watcher is None:
            self._watcher = _begin(self._watch())
            self._watcher.add_done_callback(self._watch_ended)

    async def _poll(self, source: Source) -> None:
        while source in self._consumer.serving():
            message = self._consumer.poll(*source, time.monotonic())
            delivery = await self._deployment.poll(*source, message)
            self._hand_out(self._consumer.deliver(delivery, time.monotonic()))

    def _poll_ended(self, source: Source, task: asyncio.Task[None]) -> None:
        del self._pollers[source]
        if task.cancelled():
            return
        error, now = task.exception(), time.monotonic()
        if isinstance(error, ReplicaLostError):
            notice = ReplicaLost(*source, error.reason, (self._consumer.consumer_id,))
            self._hand_out(self._consumer.lose((notice,), now))
        elif error is not None:
            # The replica may be well: later requests poll it anew.
            reason = f"its poll failed ({type(error).__name__}: {error})"
            self._hand_out(self._consumer.fail(*source, reason, now))
        # A request may have been placed since the poller looked.
        self._listen(self._consumer.serving())

    async def _watch(self) -> None:
        is_away = False
        while self._consumer.serving():
            try:
                notices = await self._deployment.watch(self._consumer.consumer_id)
            except PagedError as error:
                # Replicas go on without a controller: their polls say when they are lost.
                if not is_away:
                    logger.warning("cannot watch for lost replicas: %s", error)
                is_away = True
                await asyncio.sleep(_WATCH_AGAIN_S)
                continue
            is_away = False
            self._hand_out(self._consumer.lose(notices, time.monotonic()))

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        self._watcher = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("cannot watch for lost replicas", exc_info=error)
            return
        # A request may have been placed since the watcher looked.
        self._listen(self._consumer.serving())

    def _hand_out(self, updates: Iterable[StreamUpdate]) -> None:
        for update in updates:
            self._put(update)
        self._listen(self._consumer.serving())
        self._send_due()

    def _put(self, update: StreamUpdate) -> None:
        if (stream := self._streams.get(update.request_id)) is not None:
            stream.put_nowait(update)


def _begin(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run what serves all streams, apart from the one that happened to need it first.

    Where that is a call of an actor, as in Ray Serve, Ray would take whatever is called in its
    context for a part of it, and cancel it together with it: a client that leaves would end the
    polls for all others.
    """
    return asyncio.create_task(coroutine, context=contextvars.Context())
