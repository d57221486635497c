"""Carries the messages of one consumer on an asyncio loop: submissions, polls, cancellations.

The decisions are those of `core.consumer`. One poll is pending for each replica that serves an
open request, and one watch for news of lost replicas while any request is open; an idle consumer
sends nothing.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Iterable
from collections.abc import Set as AbstractSet

from rayserve_paged.core.consumer import Consumer, StreamUpdate
from rayserve_paged.core.controller_messages import Placed, Rejected, ReplicaLost, SubmitRequest
from rayserve_paged.core.errors import PagedError, ReplicaLostError, RequestFailedError
from rayserve_paged.core.ids import ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.deployment import Deployment
from rayserve_paged.door import Door, overload

_Source = tuple[ReplicaId, Incarnation]

logger = logging.getLogger(__name__)


class ConsumerLoop:
    """One consumer of a deployment; all methods are called on one asyncio loop.

    Args:
        deployment: Where requests go.
        consumer_id: Unique in the deployment.
    """

    def __init__(self, deployment: Deployment, consumer_id: ConsumerId) -> None:
        self._deployment = deployment
        self._consumer = Consumer(consumer_id)
        # None in a queue: the loop is closed.
        self._streams: dict[RequestId, asyncio.Queue[StreamUpdate | None]] = {}
        self._pollers: dict[_Source, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._door = Door(deployment)
        self._cancelling: set[asyncio.Task[None]] = set()

    async def stream(
        self, request: Request, *, waits: bool = False
    ) -> AsyncGenerator[StreamUpdate, None]:
        """Submit a request and yield what is new of it, until all of its samples have finished.

        Closing the generator early cancels them all; it returns once that was asked for.

        Args:
            request: Its deadline is counted from now.
            waits: Whether to wait, as long as the deadline allows, where the deployment is
                overloaded.

        Raises:
            PagedError: It was refused, or the deployment cannot be reached.
            RequestFailedError: This loop was closed.
        """
        updates: asyncio.Queue[StreamUpdate | None] = asyncio.Queue()
        self._streams[request.request_id] = updates
        self._consumer.open(request)
        try:
            await self._submit(request, waits=waits)
            num_open = request.params.num_siblings
            while num_open:
                update = await updates.get()
                if update is None:
                    raise RequestFailedError(request.request_id, "its consumer was closed")
                yield update
                if update.finish is not None:
                    num_open -= 1
        finally:
            del self._streams[request.request_id]
            await self._give_up(request.request_id)

    async def _submit(self, request: Request, *, waits: bool) -> None:
        answer: Placed | Rejected | FinishReason
        answer = await self._deployment.submit(SubmitRequest(request))
        if waits and isinstance(answer, Rejected) and overload(answer) is not None:
            answer = await self._door.wait(request, answer)
        match answer:
            case Placed():
                self._hand_out(self._consumer.placed(answer))
                self._listen({(answer.replica_id, answer.incarnation)})
            case Rejected():
                self._consumer.abandon(request.request_id)
                raise answer.error
            case FinishReason():
                self._hand_out(self._consumer.end_unplaced(request.request_id, answer))

    async def _give_up(self, request_id: RequestId) -> None:
        attempt = self._consumer.attempt(request_id)
        if attempt is not None:
            self._consumer.abandon(request_id)
            # A deployment that cannot be reached has other ways to learn it: the lease.
            with contextlib.suppress(PagedError):
                await self._deployment.cancel(request_id, attempt)

    async def _cancel_all(self, requests: list[Request]) -> None:
        for request in requests:
            with contextlib.suppress(PagedError):
                await self._deployment.cancel(request.request_id, request.attempt)

    async def cancel(self, request_id: RequestId, sibling: int | None = None) -> None:
        """Ask for the end of a request, or of one of its samples; what is ended so ends as
        cancelled. Idempotent.

        Raises:
            DeploymentError: The deployment cannot be reached.
        """
        attempt = self._consumer.attempt(request_id)
        if attempt is not None and not self._door.cancel(request_id, sibling):
            await self._deployment.cancel(request_id, attempt, sibling)

    async def close(self) -> None:
        """Cancel what is open and stop listening; open streams raise RequestFailedError."""
        for request_id, updates in self._streams.items():
            updates.put_nowait(None)
            self._door.cancel(request_id, None)
        await asyncio.gather(*map(self._give_up, self._consumer.open_requests))
        tasks = [*self._pollers.values(), *self._cancelling]
        if self._watcher is not None:
            tasks.append(self._watcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- listening ------------------------------------------------------------------------

    def _listen(self, sources: AbstractSet[_Source]) -> None:
        """Poll these replicas as long as they serve an open request, and watch while any does."""
        for source in sources - self._pollers.keys():
            self._pollers[source] = task = asyncio.create_task(self._poll(source))
            task.add_done_callback(functools.partial(self._poll_ended, source))
        if sources and self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
            self._watcher.add_done_callback(self._watch_ended)

    async def _poll(self, source: _Source) -> None:
        while source in self._consumer.serving():
            message = self._consumer.poll(*source)
            self._hand_out(self._consumer.deliver(await self._deployment.poll(*source, message)))

    def _poll_ended(self, source: _Source, task: asyncio.Task[None]) -> None:
        del self._pollers[source]
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, ReplicaLostError):
            notice = ReplicaLost(*source, error.reason, (self._consumer.consumer_id,))
            self._hand_out(self._consumer.lose((notice,)))
        elif error is not None:
            # The replica may be well: its requests are cancelled, and later ones poll it anew.
            requests = self._consumer.served_by(*source)
            reason = f"its poll failed ({type(error).__name__}: {error})"
            self._hand_out(self._consumer.fail(*source, reason))
            cancelling = asyncio.create_task(self._cancel_all(requests))
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)
        # A request may have been placed since the poller looked.
        self._listen(self._consumer.serving())

    async def _watch(self) -> None:
        while self._consumer.serving():
            notices = await self._deployment.watch(self._consumer.consumer_id)
            self._hand_out(self._consumer.lose(notices))

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        self._watcher = None
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            # A request may have been placed since the watcher looked.
            self._listen(self._consumer.serving())
        else:
            # Replicas go on without a controller: their polls say when they are lost. The next
            # submission tries again.
            logger.warning("cannot watch for lost replicas: %s: %s", type(error).__name__, error)

    def _hand_out(self, updates: Iterable[StreamUpdate]) -> None:
        for update in updates:
            if (stream := self._streams.get(update.request_id)) is not None:
                stream.put_nowait(update)
