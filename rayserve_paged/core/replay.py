"""Records what a state machine takes in and answers, and replays it in fresh ones."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from typing import TypeVar, assert_never, cast

from rayserve_paged.core.controller import Controller
from rayserve_paged.core.event_log import (
    ControllerStart,
    Handles,
    Json,
    LogEntry,
    LoggedCommands,
    LoggedEvent,
    LoggedStart,
    Record,
    ReplicaStart,
    encode,
)
from rayserve_paged.core.replica import Replica

_EventT = TypeVar("_EventT")
_CommandT = TypeVar("_CommandT")

_SHOWN_CHARS = 200
_NOTHING: Json = {"$nothing": True}
"""Stands for a part that one side does not have."""


def new_replica(start: ReplicaStart) -> Replica:
    """Make a replica."""
    return Replica(
        start.replica_id,
        start.incarnation,
        start.limits,
        start.scope,
        start.batch,
        start.timeouts,
        partial_reuse=start.partial_reuse,
        term=start.term,
    )


def new_controller(start: ControllerStart) -> Controller:
    """Make a controller."""
    return Controller(
        start.deployment_lease_s,
        start.batch,
        start.placement,
        start.recovery,
        start.start_timeout_s,
        start.term,
        start.expected,
        start.farewell_s,
    )


def recorded(
    machine: str, handle: Callable[[_EventT, float], list[_CommandT]], record: Record | None
) -> Callable[[_EventT, float], list[_CommandT]]:
    """Return a machine's `handle` that records each event before it, and the commands after it.

    Args:
        machine: Its name in the log.
        handle: Of the machine.
        record: Takes the entries; None for `handle` as it is.
    """
    if record is None:
        return handle

    def handle_and_record(event: _EventT, now: float) -> list[_CommandT]:
        record(LoggedEvent(machine, now, event))
        commands = handle(event, now)
        record(LoggedCommands(machine, tuple(commands)))
        return commands

    return handle_and_record


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay first parts from what was recorded.

    Args:
        entry: Which entry of the log, from 1: the event whose commands differ.
        machine: Who took it in.
        event: The message.
        place: Which part of the commands, such as "[0].plan.rows".
        recorded: What the log has there, as JSON; shortened.
        replayed: What the fresh machine gave.
    """

    entry: int
    machine: str
    event: object
    place: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"entry {self.entry}, {type(self.event).__name__} of {self.machine}: commands"
            f"{self.place} recorded as {self.recorded}, replayed as {self.replayed}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """What came of a replay.

    Args:
        num_machines: Machines that were made.
        num_events: Events replayed.
        num_commands: Commands that were compared, and equal.
        difference: The first one, where the replay ends; None where there is none.
    """

    num_machines: int
    num_events: int
    num_commands: int
    difference: Difference | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Answered:
    """An event that a fresh machine has taken in, and what it answered or raised."""

    entry: int
    event: object
    outcome: list[object] | Exception


def replay(entries: Iterable[LogEntry]) -> Replay:
    """Feed a log to fresh machines and compare what they answer with what it says.

    An event on which the recorded machine raised has no commands in the log; it is the same where
    the fresh one raises too. So has the last event of a machine that was killed: it is not
    compared.

    Raises:
        KeyError: An event of a machine whose start is not in the log.
    """
    machines: dict[str, Handles] = {}
    open_events: dict[str, _Answered] = {}
    num_machines = num_events = num_commands = 0
    difference: Difference | None = None
    for number, entry in enumerate(entries, 1):
        match entry:
            case LoggedStart(machine, start):
                machines[machine] = _new_machine(start)
                open_events.pop(machine, None)
                num_machines += 1
            case LoggedEvent(machine, now, event):
                if (answered := open_events.get(machine)) is not None:
                    difference = _compare(machine, answered, None)
                open_events[machine] = _answer(machines[machine], number, event, now)
                num_events += 1
            case LoggedCommands(machine, commands):
                difference = _compare(machine, open_events.pop(machine), commands)
                num_commands += len(commands)
            case _:
                assert_never(entry)
        if difference is not None:
            break
    return Replay(num_machines, num_events, num_commands, difference)


def _new_machine(start: ReplicaStart | ControllerStart) -> Handles:
    # That of each machine takes its own events alone; a log has no others for it.
    if isinstance(start, ReplicaStart):
        return cast(Handles, new_replica(start))
    return cast(Handles, new_controller(start))


def _answer(machine: Handles, entry: int, event: object, now: float) -> _Answered:
    try:
        return _Answered(entry, event, list(machine.handle(event, now)))
    except Exception as error:  # Whatever a machine raised live, its replay is to raise too.
        return _Answered(entry, event, error)


def _compare(
    machine: str, answered: _Answered, commands: tuple[object, ...] | None
) -> Difference | None:
    """Compare with what the log has: None where the recorded machine raised."""
    outcome = answered.outcome
    recorded_json: Json = {"$raised": True} if commands is None else encode(commands)
    replayed_json: Json
    if isinstance(outcome, Exception):
        if commands is None:
            return None
        replayed_json = {"$raised": f"{type(outcome).__name__}: {outcome}"}
    else:
        replayed_json = encode(outcome)
    # As text, in which a NaN is equal to itself.
    if json.dumps(recorded_json) == json.dumps(replayed_json):
        return None
    place, mine, theirs = _first_difference(recorded_json, replayed_json)
    return Difference(answered.entry, machine, answered.event, place, _shown(mine), _shown(theirs))


def _first_difference(recorded: Json, replayed: Json, place: str = "") -> tuple[str, Json, Json]:
    """Go down to the first part in which two values differ."""
    pairs: list[tuple[str, Json, Json]] = []
    if _NOTHING in (recorded, replayed):
        return place, recorded, replayed
    if isinstance(recorded, list) and isinstance(replayed, list):
        both = itertools.zip_longest(recorded, replayed, fillvalue=_NOTHING)
        pairs = [(f"[{index}]", a, b) for index, (a, b) in enumerate(both)]
    elif isinstance(recorded, dict) and isinstance(replayed, dict):
        pairs = [
            (f".{key}", recorded.get(key, _NOTHING), replayed.get(key, _NOTHING))
            for key in recorded | replayed
        ]
    for part, a, b in pairs:
        if json.dumps(a) != json.dumps(b):
            return _first_difference(a, b, place + part)
    return place, recorded, replayed


def _shown(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
