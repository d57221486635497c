"""Requests that an overloaded deployment has refused wait here, and ask again one by one."""

import asyncio
import contextlib
import dataclasses
import time

from rayserve_paged.core.controller_messages import Placed, Rejected, SubmitRequest
from rayserve_paged.core.errors import OverloadedError
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.deployment import Deployment

_MIN_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0


def overload(answer: Placed | Rejected) -> OverloadedError | None:
    """Return why a submission was refused, where it may be accepted later."""
    error = answer.error if isinstance(answer, Rejected) else None
    return error if isinstance(error, OverloadedError) else None


@dataclasses.dataclass(slots=True, eq=False)
class _Turn:
    """What one request waits for: to be the first, or to be cancelled."""

    woken: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    cancelled: bool = False
    withdrawn: list[int] = dataclasses.field(default_factory=list)


class Door:
    """The waiting requests of one consumer, in the order in which they came.

    Only the first asks again, so that a long list of requests costs the controller one question
    at a time.

    Args:
        deployment: Which is asked.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._turns: dict[RequestId, _Turn] = {}

    async def wait(self, request: Request, refusal: Rejected) -> Placed | Rejected | FinishReason:
        """Ask again until there is room.

        Args:
            request: Its deadline goes on running.
            refusal: The answer that it had.

        Returns:
            The last answer, which is no overload; or why it gave up: CANCELLED, DEADLINE.
        """
        began_s = time.monotonic()
        turn = self._turns[request.request_id] = _Turn()
        answer: Placed | Rejected = refusal
        try:
            while (error := overload(answer)) is not None:
                pause_s = None
                if self._is_first(request):
                    pause_s = min(max(error.retry_after_s or 0.0, _MIN_PAUSE_S), _MAX_PAUSE_S)
                left_s = _left_s(request, began_s)
                if left_s is not None and (pause_s is None or left_s < pause_s):
                    pause_s = left_s
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(turn.woken.wait(), pause_s)
                turn.woken.clear()
                if turn.cancelled:
                    return FinishReason.CANCELLED
                left_s = _left_s(request, began_s)
                if left_s is not None and left_s <= 0:
                    return FinishReason.DEADLINE
                if self._is_first(request):
                    message = SubmitRequest(dataclasses.replace(request, deadline_s=left_s))
                    answer = await self._deployment.submit(message)
        finally:
            del self._turns[request.request_id]
            for following in list(self._turns.values())[:1]:
                following.woken.set()
        if isinstance(answer, Placed):
            for sibling in turn.withdrawn:
                await self._deployment.cancel(request.request_id, request.attempt, sibling)
        return answer

    def cancel(self, request_id: RequestId, sibling: int | None) -> bool:
        """Cancel a request that waits, or one of its samples; return whether it waits."""
        turn = self._turns.get(request_id)
        if turn is None:
            return False
        if sibling is None:
            turn.cancelled = True
            turn.woken.set()
        else:
            turn.withdrawn.append(sibling)
        return True

    def _is_first(self, request: Request) -> bool:
        return next(iter(self._turns)) == request.request_id


def _left_s(request: Request, began_s: float) -> float | None:
    if request.deadline_s is None:
        return None
    return request.deadline_s - (time.monotonic() - began_s)
