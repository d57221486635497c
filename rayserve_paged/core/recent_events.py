"""What has happened to a deployment lately, for those who watch it."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from rayserve_paged.core.cluster_view import ClusterEvent
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    ControllerEvent,
    ReplicaLost,
    StartReplica,
    SubmitRequest,
    TakeDown,
)
from rayserve_paged.core.ids import Incarnation, ReplicaId
from rayserve_paged.core.replica_messages import RegisterReplica

MAX_EVENTS: Final = 200
"""Events that are remembered."""

_MAX_TEXT: Final = 300
_TOGETHER_S: Final = 5.0
"""Requests that go on within this long of each other, from one replica, are one event."""


class RecentEvents:
    """The latest events, at most MAX_EVENTS."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, float, str, str, str]] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._serving: dict[ReplicaId, Incarnation] = {}
        # Where requests went on from last, since when, and how many.
        self._recovered: tuple[ReplicaId, float, int] | None = None

    def add(self, now: float, kind: str, text: str, tenant: str = "") -> None:
        """Note an event.

        Args:
            now: Seconds on a clock that never goes back.
            kind: As in `ClusterEvent`.
            text: Likewise; a long one is cut.
            tenant: Likewise.
        """
        self._num_events += 1
        short = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
        self._events.append((self._num_events, now, kind, short, tenant))

    def see(
        self, event: ControllerEvent, commands: Iterable[ControllerCommand], now: float
    ) -> None:
        """Note what a controller was told, and what it made of it."""
        if isinstance(event, RegisterReplica):
            life = event.incarnation
            if self._serving.get(event.replica_id) != life:
                self._serving[event.replica_id] = life
                self.add(now, "replica started", f"{event.replica_id} serves, as life {life}")
        if isinstance(event, SubmitRequest) and event.lost_at is not None:
            self._see_recovery(event.lost_at[0], now)
        for command in commands:
            match command:
                case ReplicaLost(replica_id, incarnation, reason):
                    self._serving.pop(replica_id, None)
                    text = f"{replica_id} (life {incarnation}): {reason}"
                    self.add(now, "replica lost", text)
                case StartReplica(replica_id, incarnation):
                    text = f"{replica_id} is started again, as life {incarnation}"
                    self.add(now, "replica starting", text)
                case TakeDown(reason):
                    self.add(now, "taken down", reason)
                case _:
                    pass

    def _see_recovery(self, lost: ReplicaId, now: float) -> None:
        since, number = now, 1
        if self._recovered is not None and self._events and self._events[-1][2] == "recovery":
            replica_id, before, known = self._recovered
            if replica_id == lost and now - before < _TOGETHER_S:
                self._events.pop()
                since, number = before, known + 1
        self._recovered = (lost, since, number)
        requests = "1 request goes" if number == 1 else f"{number} requests go"
        self.add(now, "recovery", f"{requests} on elsewhere: {lost} was lost")

    def latest(self, now: float) -> tuple[ClusterEvent, ...]:
        """Return them, the oldest first, as seen at a time."""
        return tuple(
            ClusterEvent(sequence, now - at, kind, text, tenant)
            for sequence, at, kind, text, tenant in self._events
        )
