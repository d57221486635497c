"""Every message as one line of JSON, so that a shell can record what happened and replay it.

A log has lines of three kinds, those of several machines in any order:

    {"machine": name, "start": what the machine was made of}
    {"machine": name, "now": seconds, "event": message}
    {"machine": name, "commands": [what the machine answered to its last event, ...]}

A message is an object whose `"type"` names its dataclass; arrays, bytes, enums, errors and sections
of the configuration are objects with one key that begins with "$".
"""

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from rayserve_paged.core import (
    block_identity,
    controller_messages,
    errors,
    replica_messages,
    request,
    step_messages,
    stream_messages,
)
from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.config import (
    BatchConfig,
    PlacementPolicy,
    RecoveryConfig,
    TimeoutConfig,
)
from rayserve_paged.core.ids import Incarnation, ReplicaId, Term
from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.token_ids import TokenIds

CONTROLLER = "controller"
"""Name of the controller in a log; replicas have their ids."""

_FIRST_TERM = Term(0)

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStart:
    """What a replica is made of; see `Replica`."""

    replica_id: ReplicaId
    incarnation: Incarnation
    limits: ModelLimits
    scope: BlockScope
    batch: BatchConfig
    timeouts: TimeoutConfig
    partial_reuse: bool = False
    term: Term = _FIRST_TERM


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStart:
    """What a controller is made of; see `Controller`."""

    deployment_lease_s: float | None
    batch: BatchConfig
    placement: PlacementPolicy = "prefix-aware"
    recovery: RecoveryConfig | None = None
    start_timeout_s: float = 300.0
    term: Term = _FIRST_TERM
    expected: tuple[ReplicaId, ...] = ()
    farewell_s: float = 10.0


_MESSAGES: Mapping[str, Callable[..., object]] = {
    name: kind
    for module in (
        step_messages,
        stream_messages,
        replica_messages,
        controller_messages,
        request,
        block_identity,
    )
    for name, kind in vars(module).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
} | {kind.__name__: kind for kind in (ReplicaStart, ControllerStart, Grammar)}
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.PagedError)
}
_SECTIONS = {kind.__name__: kind for kind in (BatchConfig, TimeoutConfig, RecoveryConfig)}


class Handles(Protocol):
    """A state machine: Replica, Controller."""

    def handle(self, event: object, now: float, /) -> Iterable[object]:
        """Take in one event; return commands."""
        ...


class LoggedStart(NamedTuple):
    """A machine began; one of the same name before it is no more.

    Args:
        machine: Its name, such as "controller" or "r0".
        start: What it was made of.
    """

    machine: str
    start: ReplicaStart | ControllerStart


class LoggedEvent(NamedTuple):
    """A machine took in an event.

    Args:
        machine: Its name.
        now: At what time, in seconds.
        event: The message.
    """

    machine: str
    now: float
    event: object


class LoggedCommands(NamedTuple):
    """What a machine answered to its last event; missing where it raised or the log was cut off.

    Args:
        machine: Its name.
        commands: The messages, in order.
    """

    machine: str
    commands: tuple[object, ...]


LogEntry: TypeAlias = LoggedStart | LoggedEvent | LoggedCommands
Record: TypeAlias = Callable[[LogEntry], object]


def encode(value: object) -> Json:
    """Return a message as JSON values.

    Raises:
        TypeError: A value of a kind that no message holds.
    """
    if isinstance(value, enum.Enum):
        return {"$finish": str(value.value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, TokenIds):
        return {"$token_ids": value.view.tolist()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, np.ndarray):
        return {"$array": [str(value.dtype), list(value.shape), cast(Json, value.ravel().tolist())]}
    if isinstance(value, dict):
        return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, BatchConfig | TimeoutConfig | RecoveryConfig):
        return {"$config": [type(value).__name__, value.model_dump(mode="json")]}
    if isinstance(value, errors.PagedError):
        return {"$error": [type(value).__name__, *(encode(item) for item in value.args)]}
    if dataclasses.is_dataclass(value) and type(value).__name__ in _MESSAGES:
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    raise TypeError(f"{type(value).__name__} is not a message or a part of one")


def decode(value: Json) -> object:
    """Return the message that `encode` made these values of.

    Raises:
        KeyError: An unknown type name.
    """
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "type" in value:
        fields = {name: decode(item) for name, item in value.items() if name != "type"}
        return _MESSAGES[cast(str, value["type"])](**fields)
    ((tag, content),) = value.items()
    return _DECODERS[tag](content)


def _decode_array(content: Json) -> object:
    dtype, shape, items = cast("tuple[str, list[int], list[int]]", content)
    return np.array(items, dtype).reshape(shape)


def _decode_dict(content: Json) -> object:
    pairs = cast("list[list[Json]]", content)
    return {decode(key): decode(item) for key, item in pairs}


def _decode_error(content: Json) -> object:
    name, *args = cast("list[Json]", content)
    return _ERRORS[cast(str, name)](*(decode(item) for item in args))


def _decode_config(content: Json) -> object:
    name, fields = cast("tuple[str, dict[str, Json]]", content)
    return _SECTIONS[name].model_validate(fields)


_DECODERS: dict[str, Callable[[Json], object]] = {
    "$finish": lambda content: request.FinishReason(cast(str, content)),
    "$bytes": lambda content: bytes.fromhex(cast(str, content)),
    "$array": _decode_array,
    "$token_ids": lambda content: TokenIds.of(cast("list[int]", content)),
    "$dict": _decode_dict,
    "$config": _decode_config,
    "$error": _decode_error,
}


def to_line(entry: LogEntry) -> str:
    """Return one entry as a line of JSON, without the line's end."""
    line: dict[str, Json] = {"machine": entry.machine}
    match entry:
        case LoggedStart(_machine, start):
            line["start"] = encode(start)
        case LoggedEvent(_machine, now, event):
            line |= {"now": now, "event": encode(event)}
        case LoggedCommands(_machine, commands):
            line["commands"] = encode(commands)
    return json.dumps(line, separators=(",", ":"))


def read_lines(lines: Iterable[str]) -> Iterator[LogEntry]:
    """Yield the entries of a log; empty lines are passed over.

    So is a last line that breaks off, as a process that was killed leaves it.

    Raises:
        ValueError: A line that is not JSON.
        KeyError: A line without a field, or with an unknown message.
    """
    rest = iter(lines)
    is_first = True
    for line in rest:
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            if is_first or any(other.strip() for other in rest):
                raise
            return
        is_first = False
        yield _decode_entry(entry)


def _decode_entry(entry: dict[str, Json]) -> LogEntry:
    machine = cast(str, entry["machine"])
    if "start" in entry:
        return LoggedStart(machine, cast("ReplicaStart | ControllerStart", decode(entry["start"])))
    if "commands" in entry:
        return LoggedCommands(machine, cast("tuple[object, ...]", decode(entry["commands"])))
    return LoggedEvent(machine, cast(float, entry["now"]), decode(entry["event"]))
