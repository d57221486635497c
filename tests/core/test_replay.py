"""Logs of runs in fresh state machines: equal command for command, or where they part."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from test_event_log import recorded_run

from rayserve_paged.core.event_log import (
    LogEntry,
    LoggedCommands,
    LoggedEvent,
    LoggedStart,
    ReplicaStart,
    encode,
    read_lines,
    to_line,
)
from rayserve_paged.core.ids import StepId
from rayserve_paged.core.replay import new_replica, recorded, replay
from rayserve_paged.core.replica_messages import RunStep, StepFinished, Tick
from rayserve_paged.core.step_messages import StepResult


def log_of(seed: int) -> list[LogEntry]:
    return list(read_lines(to_line(entry) for entry in recorded_run(seed).log))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_recorded_run_replays_to_the_same_commands(seed: int) -> None:
    cluster = recorded_run(seed)
    assert sum(driver.replica.batcher.num_preemptions for driver in cluster.drivers.values()) > 0
    result = replay(read_lines(to_line(entry) for entry in cluster.log))
    assert result.difference is None
    assert result.num_machines == 3
    assert result.num_events == sum(isinstance(entry, LoggedEvent) for entry in cluster.log)
    assert result.num_commands == len(cluster.commands) > 200


def test_the_first_difference_is_named_by_event_and_place() -> None:
    log = log_of(1)
    places = [
        (index, number)
        for index, entry in enumerate(log)
        if isinstance(entry, LoggedCommands)
        for number, command in enumerate(entry.commands)
        if isinstance(command, RunStep) and len(command.plan.token_ids) > 1
    ]
    index, number = places[3]
    entry: Any = log[index]
    plan = entry.commands[number].plan
    changed = plan.token_ids.copy()
    changed[-1] += 1
    commands = list(entry.commands)
    commands[number] = RunStep(dataclasses.replace(plan, token_ids=changed))
    log[index] = LoggedCommands(entry.machine, tuple(commands))
    difference = replay(log).difference
    assert difference is not None
    # The event is before its commands, and entries count from 1.
    event: Any = log[difference.entry - 1]
    assert difference.entry <= index
    assert (difference.machine, difference.event) == (entry.machine, event.event)
    last = len(changed) - 1
    assert difference.place == f"[{number}].plan.token_ids.$array[2][{last}]"
    assert difference.recorded == str(changed[-1])
    assert difference.replayed == str(changed[-1] - 1)
    assert f"entry {difference.entry}, {type(event.event).__name__} of" in str(difference)


@pytest.mark.parametrize("num_commands", [0, 1])
def test_a_command_too_many_or_too_few_is_a_difference(num_commands: int) -> None:
    log = log_of(2)
    index = next(
        i
        for i, entry in enumerate(log)
        if isinstance(entry, LoggedCommands) and len(entry.commands) == num_commands
    )
    log[index] = LoggedCommands(log[index].machine, (Tick(),) * (1 - num_commands))
    difference = replay(log).difference
    assert difference is not None
    assert difference.place == "[0]"
    nothing = difference.recorded if num_commands else difference.replayed
    assert nothing == '{"$nothing": true}'


def test_of_a_long_difference_the_beginning_is_shown() -> None:
    log = log_of(2)
    index, commands = next(
        (i, entry.commands)
        for i, entry in enumerate(log)
        if isinstance(entry, LoggedCommands)
        if len(entry.commands) == 1 and isinstance(entry.commands[0], RunStep)
    )
    text = json.dumps(encode(commands[0]))
    assert len(text) > 200
    log[index] = LoggedCommands(log[index].machine, ())
    difference = replay(log).difference
    assert difference is not None
    assert difference.replayed == text[:197] + "..."


def test_a_log_that_was_cut_off_is_compared_as_far_as_it_goes() -> None:
    log = log_of(3)
    ends = [i for i, entry in enumerate(log) if isinstance(entry, LoggedCommands)]
    result = replay(log[: ends[50]])
    assert result.difference is None
    assert result.num_events >= 50


def test_an_event_on_which_a_machine_raised_raises_in_its_replay_too() -> None:
    (start,) = [
        entry.start
        for entry in log_of(1)
        if isinstance(entry, LoggedStart) and entry.machine == "r0"
    ]
    assert isinstance(start, ReplicaStart)
    log: list[LogEntry] = [LoggedStart("r0", start)]
    handle = recorded("r0", new_replica(start).handle, log.append)
    unknown = StepFinished(StepResult(StepId(9), np.zeros((1, 0), np.int32), {}, {}))
    with pytest.raises((AssertionError, IndexError, KeyError)):
        handle(unknown, 1.0)
    handle(Tick(), 2.0)
    assert [type(entry) for entry in log[1:]] == [LoggedEvent, LoggedEvent, LoggedCommands]
    assert replay(log).difference is None
    # Where the recorded machine raised and the fresh one does not, that is a difference.
    log[1] = LoggedEvent("r0", 1.0, Tick())
    difference = replay(log).difference
    assert difference is not None
    assert difference.recorded == '{"$raised": true}'


def test_a_later_start_of_the_same_name_is_another_life() -> None:
    log = log_of(1)
    assert replay([*log, *log]).difference is None
    assert replay([*log, *log]).num_machines == 6


def test_an_event_of_a_machine_that_never_started_is_refused() -> None:
    with pytest.raises(KeyError, match="r9"):
        replay([LoggedEvent("r9", 0.0, Tick())])
