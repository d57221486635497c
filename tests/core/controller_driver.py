"""What a controller is told in the tests, and how its answers read."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from replica_driver import make_limits, make_report, make_scope, prompt_keys

from rayserve_paged.core.controller import RETRY_S, Controller
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    LoseReplica,
    Placed,
    Rejected,
    SendToReplica,
    SubmitRequest,
)
from rayserve_paged.core.errors import NoReplicaError
from rayserve_paged.core.ids import Attempt, BlockKey, Incarnation, ReplicaId, Term
from rayserve_paged.core.replica_messages import (
    AskInventory,
    AssignRequest,
    CancelRequest,
    ControllerMessage,
    FenceReplica,
    Inventory,
    RegisterReplica,
    ReplicaReport,
    ServedRequest,
    Tick,
)
from rayserve_paged.core.request import ModelLimits, Request

SCOPE = make_scope()
LIMITS = make_limits(num_blocks=16)
R0, R1 = ReplicaId("r0"), ReplicaId("r1")


def register(
    name: ReplicaId,
    life: int = 0,
    limits: ModelLimits = LIMITS,
    inventory: Inventory | None = None,
) -> RegisterReplica:
    return RegisterReplica(name, Incarnation(life), limits, SCOPE, inventory)


def lost(name: ReplicaId, life: int = 0, reason: str = "a rank is silent") -> LoseReplica:
    return LoseReplica(name, Incarnation(life), reason)


def make_controller(
    *names: ReplicaId,
    lease_s: float | None = None,
    **fields: Any,  # noqa: ANN401
) -> Controller:
    controller = Controller(lease_s, **fields)
    for name in names:
        assert controller.handle(register(name), 0.0) == []
    return controller


def report(
    name: ReplicaId,
    *finished: Request,
    life: int = 0,
    sequence: int = 0,
    prefilled: Iterable[Request] = (),
    fenced: str | None = None,
) -> ReplicaReport:
    """A report of requests that have ended, and of the keys of their prompts."""
    published = {key: None for request in finished for key in prompt_keys(request, SCOPE)}
    return make_report(
        name,
        *finished,
        incarnation=life,
        sequence=sequence,
        published=published,
        prefilled=prefilled,
        fenced=fenced,
    )


def serve(
    request: Request, attempt: int = 0, *, is_prefilled: bool = True, on_trial: bool = False
) -> ServedRequest:
    """A request as the replica that has it lists it."""
    assert request.params.max_tokens is not None
    return ServedRequest(
        request.request_id,
        Attempt(attempt),
        request.consumer_id,
        request.num_rows,
        request.num_promised_tokens,
        request.params.max_tokens,
        is_prefilled,
        on_trial,
        is_tried_long=request.is_tried_long,
        tenant=request.tenant,
        num_blocks=request.num_tenant_blocks(LIMITS),
    )


def inventory(
    *served: ServedRequest,
    number: int | None = None,
    keys: Sequence[BlockKey] | None = (),
    num_reports: int = 0,
) -> Inventory:
    return Inventory(number, served, None if keys is None else tuple(keys), num_reports)


def submit(
    controller: Controller,
    request: Request,
    now: float = 0.0,
    lost_at: tuple[ReplicaId, int] | None = None,
    *,
    is_repeated: bool = False,
) -> list[ControllerCommand]:
    source = None if lost_at is None else (lost_at[0], Incarnation(lost_at[1]))
    return controller.handle(SubmitRequest(request, source, is_repeated), now)


def tick(controller: Controller, now: float) -> list[ControllerCommand]:
    return controller.handle(Tick(), now)


def placement(commands: Sequence[ControllerCommand]) -> str:
    """The replica that a request was placed on."""
    (placed,) = [command for command in commands if isinstance(command, Placed)]
    return placed.replica_id


def refusal(commands: Sequence[ControllerCommand]) -> Exception:
    """Why a request is refused for good."""
    (rejected,) = commands
    assert isinstance(rejected, Rejected)
    assert rejected.retry_after_s is None
    return rejected.error


def postponement(commands: Sequence[ControllerCommand]) -> str:
    """Why a request is to be submitted again."""
    (rejected,) = commands
    assert isinstance(rejected, Rejected)
    assert isinstance(rejected.error, NoReplicaError)
    assert rejected.retry_after_s == RETRY_S
    return str(rejected.error)


def to_replica(
    name: ReplicaId,
    event: AssignRequest | CancelRequest | FenceReplica | AskInventory,
    life: int = 0,
    term: int = 0,
) -> SendToReplica:
    return SendToReplica(name, Incarnation(life), ControllerMessage(Term(term), event))


def asks(commands: Sequence[ControllerCommand]) -> list[tuple[str, int, bool]]:
    """Who is asked what there is, in which life, and whether for keys; all commands are that."""
    found: list[tuple[str, int, bool]] = []
    for command in commands:
        assert isinstance(command, SendToReplica)
        ask = command.event.event
        assert isinstance(ask, AskInventory)
        found.append((command.replica_id, command.incarnation, ask.with_keys))
    return found


def number_of(commands: Sequence[ControllerCommand]) -> int:
    """The number of the only question."""
    (command,) = commands
    assert isinstance(command, SendToReplica)
    ask = command.event.event
    assert isinstance(ask, AskInventory)
    return ask.number


def with_attempt(request: Request, attempt: int, **fields: Any) -> Request:  # noqa: ANN401
    return dataclasses.replace(request, attempt=Attempt(attempt), **fields)
