import json
import random

import numpy as np
import pytest
from cluster_driver import ClusterDriver
from replica_driver import make_limits, make_request

from rayserve_paged.core.controller_messages import Rejected
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.event_log import (
    LoggedEvent,
    decode,
    encode,
    read_lines,
    to_line,
)
from rayserve_paged.core.ids import Attempt, ReplicaId, RequestId, StepId
from rayserve_paged.core.replica_messages import AnswerPoll, RunStep, StepFinished
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import StepResult, TokenLogprobs
from rayserve_paged.core.stream_messages import TokenRun

LIMITS = make_limits(num_blocks=6, block_size=2, vocab_size=31, eos_token_ids=(0,))


def recorded_run(seed: int) -> ClusterDriver:
    """A controller and two replicas under load: prefixes, preemptions, cancels, a death."""
    draw = random.Random(seed)
    cluster = ClusterDriver([LIMITS, LIMITS], deployment_lease_s=1000.0)
    requests = []
    for number in range(40):
        request = make_request(
            [1, 2, 3, 4, 5, 6][: draw.randint(1, 6)],
            draw.randint(1, 14),
            request_id=f"q{number}",
            consumer_id=draw.choice(["c0", "c1"]),
            priority=draw.choice([0, 0, 1]),
            temperature=draw.choice([0.0, 0.7]),
            seed=number,
            n=draw.choice([1, 1, 2]),
        )
        requests.append(request)
        cluster.submit(request)
        for _ in range(draw.randint(0, 4)):
            cluster.step(draw.choice([ReplicaId("r0"), ReplicaId("r1")]))
        if draw.random() < 0.2:
            cluster.withdraw(draw.choice(requests))
        cluster.poll(draw.choice([ReplicaId("r0"), ReplicaId("r1")]), draw.choice(["c0", "c1"]))
        cluster.tick(draw.choice([0.01, 0.3]))
    cluster.run()
    cluster.lose_replica(ReplicaId("r1"))
    return cluster


def test_a_run_is_the_same_run_when_it_is_repeated() -> None:
    first, second = recorded_run(4), recorded_run(4)
    assert [to_line(entry) for entry in first.log] == [to_line(entry) for entry in second.log]


def test_every_line_reads_back_to_the_line_that_it_was() -> None:
    lines = [to_line(entry) for entry in recorded_run(5).log]
    assert [to_line(entry) for entry in read_lines(lines)] == lines


def test_commands_read_back_too() -> None:
    for command in recorded_run(6).commands:
        assert encode(decode(encode(command))) == encode(command)


def test_arrays_keep_their_type_and_dictionaries_their_keys() -> None:
    logprobs = {1: TokenLogprobs(-0.25, ((3, -0.25), (4, float("-inf"))))}
    result = StepResult(StepId(7), np.array([[3, 4]], np.int32), logprobs, {0: "NaN"})
    line = to_line(LoggedEvent("r0", 1.5, StepFinished(result)))
    (entry,) = read_lines([line, "", "  \n"])
    assert isinstance(entry, LoggedEvent)
    assert (entry.machine, entry.now) == ("r0", 1.5)
    assert isinstance(entry.event, StepFinished)
    read = entry.event.result
    assert read.token_ids.dtype == np.int32
    assert read.token_ids.tolist() == [[3, 4]]
    assert (read.step_id, read.logprobs, read.errors) == (7, logprobs, {0: "NaN"})


def test_a_plan_keeps_its_arrays() -> None:
    cluster = ClusterDriver([LIMITS])
    cluster.submit(make_request([1, 2, 3], n=2))
    (run,) = [command for command in cluster.commands if isinstance(command, RunStep)]
    read = decode(json.loads(json.dumps(encode(run))))
    assert isinstance(read, RunStep)
    assert read.plan.starts[0].block_ids.dtype == np.int32
    for name in ("append_rows", "copies", "late", "sample_indices", "sample_siblings"):
        array, expected = getattr(read.plan, name), getattr(run.plan, name)
        assert array.dtype == np.int32
        assert array.shape == expected.shape
        assert array.tolist() == expected.tolist()
    assert read.plan.sample_siblings.tolist() == [0, 1]


def test_a_delivery_keeps_its_runs() -> None:
    runs = [
        item
        for command in recorded_run(7).commands
        if isinstance(command, AnswerPoll)
        for item in command.delivery.items
        if isinstance(item, TokenRun)
    ]
    assert runs
    for run in runs:
        read = decode(json.loads(json.dumps(encode(run))))
        assert isinstance(read, TokenRun)
        assert read.names == run.names
        assert read.indices.dtype == read.token_ids.dtype == np.int32
        assert read.indices.tolist() == run.indices.tolist()
        assert read.token_ids.tolist() == run.token_ids.tolist()


def test_errors_read_back_as_themselves() -> None:
    for error in (CapacityError(9, 9, 5, 4, 4), InvalidInputError("top_p", 3.5, "less")):
        command = Rejected(RequestId("q"), Attempt(0), error)
        read = decode(encode(command))
        assert isinstance(read, Rejected)
        assert type(read.error) is type(error)
        assert str(read.error) == str(error)
        assert vars(read.error) == vars(error)


def test_finish_reasons_read_back_as_themselves() -> None:
    assert decode(encode(FinishReason.STOP)) is FinishReason.STOP
    assert encode(FinishReason.STOP) == {"$finish": "stop"}


def test_what_no_message_holds_is_refused() -> None:
    for value in (object(), {1, 2}, np.int64(3), LoggedEvent):
        with pytest.raises(TypeError, match="not a message or a part of one"):
            encode(value)


def test_a_line_with_an_unknown_message_is_refused() -> None:
    with pytest.raises(KeyError, match="Nonsense"):
        list(read_lines(['{"machine":"r0","now":0,"event":{"type":"Nonsense"}}']))
    with pytest.raises(KeyError, match="machine"):
        list(read_lines(['{"now":0,"event":{"type":"Tick"}}']))
    with pytest.raises(ValueError, match="Expecting"):
        list(read_lines(["not json"]))


def test_a_last_line_that_breaks_off_is_passed_over_and_any_other_is_not() -> None:
    lines = [to_line(entry) + "\n" for entry in recorded_run(8).log]
    broken = lines[-1][: len(lines[-1]) // 2]
    assert [to_line(entry) + "\n" for entry in read_lines([*lines[:-1], broken])] == lines[:-1]
    with pytest.raises(ValueError, match="line 1 column"):
        list(read_lines([*lines[:-1], broken + "\n", lines[-1]]))
