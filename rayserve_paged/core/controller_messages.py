"""What the controller takes in, and what it asks for.

Shells carry these between machines and processes without looking inside.
"""

from __future__ import annotations

import dataclasses

from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    CancelRequest,
    FenceReplica,
    ReplicaReport,
    Tick,
)
from rayserve_paged.core.request import ModelLimits, Request


@dataclasses.dataclass(frozen=True, slots=True)
class RegisterReplica:
    """A replica is ready to take requests."""

    replica_id: ReplicaId
    incarnation: Incarnation
    limits: ModelLimits
    scope: BlockScope


@dataclasses.dataclass(frozen=True, slots=True)
class LoseReplica:
    """A rank of this incarnation is dead or silent."""

    replica_id: ReplicaId
    incarnation: Incarnation
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A consumer hands in a request. Idempotent by (request_id, attempt)."""

    request: Request


@dataclasses.dataclass(frozen=True, slots=True)
class WithdrawRequest:
    """A consumer cancels a request, or one of its samples, wherever it is."""

    request_id: RequestId
    attempt: Attempt
    sibling: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RenewLease:
    """The owner of the deployment is alive."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndDeployment:
    """Take everything down."""

    reason: str


ControllerEvent = (
    RegisterReplica
    | LoseReplica
    | SubmitRequest
    | WithdrawRequest
    | ReplicaReport
    | RenewLease
    | EndDeployment
    | Tick
)


@dataclasses.dataclass(frozen=True, slots=True)
class SendToReplica:
    """Deliver an event to one incarnation of a replica."""

    replica_id: ReplicaId
    incarnation: Incarnation
    event: AssignRequest | CancelRequest | FenceReplica


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """The answer to SubmitRequest: poll this replica for the stream."""

    request_id: RequestId
    attempt: Attempt
    replica_id: ReplicaId
    incarnation: Incarnation
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rejected:
    """The answer to SubmitRequest: why it was refused; `error` is a PagedError to raise."""

    request_id: RequestId
    attempt: Attempt
    error: Exception


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
class TakeDown:
    """End every replica, then the controller itself."""

    reason: str


ControllerCommand = SendToReplica | Placed | Rejected | ReplicaLost | StopReplica | TakeDown
