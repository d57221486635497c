"""Every message as one line of JSON, so that a shell can record what happened and replay it.

A line is `{"machine": name, "now": seconds, "event": message}`. A message is an object whose
`"type"` names its dataclass; arrays, bytes, enums and errors are objects with one key that begins
with "$".
"""

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Iterator
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

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_MESSAGES = {
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
}
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.PagedError)
}


class Handles(Protocol):
    """A state machine: Replica, Controller."""

    def handle(self, event: object, now: float, /) -> Iterable[object]:
        """Take in one event; return commands."""
        ...


class LoggedEvent(NamedTuple):
    """One line of a log.

    Args:
        machine: Which machine took the event in, such as "controller" or "r0".
        now: At what time, in seconds.
        event: The message.
    """

    machine: str
    now: float
    event: object


def encode(value: object) -> Json:
    """Return a message as JSON values.

    Raises:
        TypeError: A value of a kind that no message holds.
    """
    if isinstance(value, enum.Enum):
        return {"$finish": str(value.value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, np.ndarray):
        return {"$array": [str(value.dtype), list(value.shape), cast(Json, value.ravel().tolist())]}
    if isinstance(value, dict):
        return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}
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


_DECODERS: dict[str, Callable[[Json], object]] = {
    "$finish": lambda content: request.FinishReason(cast(str, content)),
    "$bytes": lambda content: bytes.fromhex(cast(str, content)),
    "$array": _decode_array,
    "$dict": _decode_dict,
    "$error": _decode_error,
}


def to_line(entry: LoggedEvent) -> str:
    """Return one event as a line of JSON, without the line's end."""
    line = {"machine": entry.machine, "now": entry.now, "event": encode(entry.event)}
    return json.dumps(line, separators=(",", ":"))


def read_lines(lines: Iterable[str]) -> Iterator[LoggedEvent]:
    """Yield the events of a log; empty lines are passed over.

    Raises:
        ValueError: A line that is not JSON.
        KeyError: A line without a field, or with an unknown message.
    """
    for line in lines:
        if line.strip():
            entry = json.loads(line)
            yield LoggedEvent(entry["machine"], entry["now"], decode(entry["event"]))


def replay(entries: Iterable[LoggedEvent], machines: dict[str, Handles]) -> Iterator[object]:
    """Feed a log to fresh machines; yield each command that they return.

    Raises:
        KeyError: An event of a machine that is not given.
    """
    for entry in entries:
        yield from machines[entry.machine].handle(entry.event, entry.now)
