"""Requests that were refused for now wait here, and ask again: of each tenant one at a time.

What is refused is what would overload the deployment, or what is beyond the quota of its tenant.
"""

import asyncio
import contextlib
import dataclasses
import time

from rayserve_paged.core.controller_messages import Placed, Rejected, SubmitRequest
from rayserve_paged.core.errors import OverloadedError, QuotaExceededError
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.deployment import Deployment

_MIN_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0


def refused_for_now(answer: Placed | Rejected) -> OverloadedError | QuotaExceededError | None:
    """Return why a submission was refused, where it may be accepted later."""
    error = answer.error if isinstance(answer, Rejected) else None
    return error if isinstance(error, OverloadedError | QuotaExceededError) else None


@dataclasses.dataclass(slots=True, eq=False)
class _Turn:
    """What one request waits for: to be the first of its tenant, or to be cancelled."""

    woken: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    cancelled: bool = False
    withdrawn: list[int] = dataclasses.field(default_factory=list)


class Door:
    """The waiting requests of one consumer, in the order in which they came.

    Only the first of each tenant asks again, so that a long list of requests costs the controller
    one question at a time, and a tenant that is at its quota is in no other's way.

    Args:
        deployment: Which is asked.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._turns: dict[RequestId, _Turn] = {}
        # The same by tenant.
        self._lanes: dict[str | None, dict[RequestId, _Turn]] = {}

    async def wait(self, request: Request, refusal: Rejected) -> Placed | Rejected | FinishReason:
        """Ask again until there is room.

        Args:
            request: Its deadline goes on running.
            refusal: The answer that it had.

        Returns:
            The last answer, which is for good; or why it gave up: CANCELLED, DEADLINE.
        """
        began_s = time.monotonic()
        turn = self._turns[request.request_id] = _Turn()
        self._lanes.setdefault(request.tenant, {})[request.request_id] = turn
        answer: Placed | Rejected = refusal
        try:
            while (error := refused_for_now(answer)) is not None:
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
            self._leave_lane(request)
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
        return next(iter(self._lanes[request.tenant])) == request.request_id

    def _leave_lane(self, request: Request) -> None:
        lane = self._lanes[request.tenant]
        del lane[request.request_id]
        for following in lane.values():
            following.woken.set()
            return
        del self._lanes[request.tenant]


def _left_s(request: Request, began_s: float) -> float | None:
    if request.deadline_s is None:
        return None
    return request.deadline_s - (time.monotonic() - began_s)
