"""What the controller takes in, and what it asks for.

Shells carry these between machines and processes without looking inside.
"""

from __future__ import annotations

import dataclasses

from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replica_messages import (
    ControllerMessage,
    RegisterReplica,
    ReplicaReport,
    Tick,
)
from rayserve_paged.core.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class LoseReplica:
    """A rank of this incarnation is dead or silent, or the incarnation could not be started."""

    replica_id: ReplicaId
    incarnation: Incarnation
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class FoundReplica:
    """The shell of a controller that was started anew has found an incarnation that may live."""

    replica_id: ReplicaId
    incarnation: Incarnation


@dataclasses.dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A consumer hands in a request. Idempotent by (request_id, attempt).

    Args:
        request: The request.
        lost_at: Where its last attempt was lost, as far as its consumer can see; told once.
        is_repeated: The same attempt was submitted before, and may even have ended.
    """

    request: Request
    lost_at: tuple[ReplicaId, Incarnation] | None = None
    is_repeated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class WithdrawRequest:
    """A consumer cancels a request, or one of its samples, wherever it is.

    Args:
        request_id: The request.
        attempt: Which submission of it.
        sibling: The sample; None for all.
        placed_at: Where it was placed, for a controller that does not know; None for nowhere.
    """

    request_id: RequestId
    attempt: Attempt
    sibling: int | None = None
    placed_at: tuple[ReplicaId, Incarnation] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RenewLease:
    """An owner of the deployment is alive.

    Args:
        owner: Who; a deployment may have several.
    """

    owner: str


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveDeployment:
    """An owner goes. After the last one the deployment waits a little for another, then ends."""

    owner: str


@dataclasses.dataclass(frozen=True, slots=True)
class EndDeployment:
    """Take everything down."""

    reason: str


ControllerEvent = (
    RegisterReplica
    | FoundReplica
    | LoseReplica
    | SubmitRequest
    | WithdrawRequest
    | ReplicaReport
    | RenewLease
    | LeaveDeployment
    | EndDeployment
    | Tick
)


@dataclasses.dataclass(frozen=True, slots=True)
class SendToReplica:
    """Deliver an event to one incarnation of a replica."""

    replica_id: ReplicaId
    incarnation: Incarnation
    event: ControllerMessage


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """The answer to SubmitRequest: poll this replica for the stream.

    Args:
        request_id: The request.
        attempt: Which submission of it.
        replica_id: Who serves it.
        incarnation: In which life.
        max_tokens: Output tokens that each of its samples may have.
        on_trial: It is suspected of having ended a replica, and the only one of these there.
    """

    request_id: RequestId
    attempt: Attempt
    replica_id: ReplicaId
    incarnation: Incarnation
    max_tokens: int
    on_trial: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rejected:
    """The answer to SubmitRequest: why it was refused.

    Args:
        request_id: The request.
        attempt: Which submission of it.
        error: A PagedError to raise.
        retry_after_s: When to submit it again; None where that is of no use.
    """

    request_id: RequestId
    attempt: Attempt
    error: Exception
    retry_after_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaLost:
    """Tell these consumers that an incarnation is gone, with what it still owed them."""

    replica_id: ReplicaId
    incarnation: Incarnation
    reason: str
    consumers: tuple[ConsumerId, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StopReplica:
    """Kill the ranks of an incarnation and give back what they hold."""

    replica_id: ReplicaId
    incarnation: Incarnation
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StartReplica:
    """Start a replica's next life, once nothing is left of those before.

    Answered by RegisterReplica, or by LoseReplica where it cannot be started.
    """

    replica_id: ReplicaId
    incarnation: Incarnation


@dataclasses.dataclass(frozen=True, slots=True)
class TakeDown:
    """End every replica, then the controller itself."""

    reason: str


ControllerCommand = (
    SendToReplica | Placed | Rejected | ReplicaLost | StopReplica | StartReplica | TakeDown
)
