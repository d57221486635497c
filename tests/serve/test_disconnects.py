"""Clients that leave: what was computed for them ends, their blocks come back, others go on."""

import contextlib
import socket

import pytest
from http_endpoint import (
    Endpoint,
    Gate,
    Stream,
    endpoint_of,
    greedy,
    greedy_ids,
    token_text,
    wait_for,
)

PIPELINE_DEPTH = 1


@pytest.mark.parametrize("stream", [True, False])
def test_b81_a_client_that_leaves_at_token_5_costs_no_more_than_the_pipeline(
    endpoint: Endpoint, gate: Gate, stream: bool
) -> None:
    gate.close()
    before = endpoint.shell.num_withdrawn
    one = Stream(endpoint, prompt="x", max_tokens=500, seed=81, stream=stream, logprobs=0)
    endpoint.step(gate, 5)
    if stream:
        one.texts(5)
    one.leave()
    wait_for(lambda: endpoint.shell.num_withdrawn > before, "the request is withdrawn")
    gate.open()
    endpoint.wait_for_blocks()
    assert 5 <= gate.num_sampled[81] <= 5 + 3 + PIPELINE_DEPTH


@pytest.mark.parametrize("stream", [True, False])
def test_b81_a_client_that_leaves_the_queue_never_runs(gate: Gate, stream: bool) -> None:
    with endpoint_of({"batch.max_num_seqs": 1}) as endpoint:
        gate.close()
        first = Stream(endpoint, prompt="first", max_tokens=20)
        endpoint.step(gate)
        queued = Stream(endpoint, prompt="queued", max_tokens=500, seed=81, stream=stream)
        wait_for(lambda: endpoint.shell.num_submitted == 2, "it is queued")
        queued.leave()
        wait_for(lambda: endpoint.shell.num_withdrawn == 1, "it is withdrawn")
        gate.open()
        text = "".join(event["choices"][0]["text"] for event in first.rest())
        assert text == greedy("first", 20)
        endpoint.wait_for_blocks()
        assert gate.num_sampled[81] == 0


def test_b80_two_clients_of_a_batch_leave_and_the_others_go_on(
    endpoint: Endpoint, gate: Gate
) -> None:
    gate.close()
    before = endpoint.shell.num_withdrawn
    submitted = endpoint.shell.num_submitted
    streams = []
    for number in range(1, 5):
        streams.append(Stream(endpoint, prompt=f"client {number}", max_tokens=50, logprobs=0))
        wait_for(lambda n=number: endpoint.shell.num_submitted == submitted + n, "submitted")
    endpoint.step(gate, 3)
    streams[1].leave()
    wait_for(lambda: endpoint.shell.num_withdrawn == before + 1, "client 2 is withdrawn")
    endpoint.step(gate)
    wait_for(lambda: gate.num_waiting, "a step is under way")
    streams[3].leave()
    wait_for(lambda: endpoint.shell.num_withdrawn == before + 2, "client 4 is withdrawn")
    fifth = Stream(endpoint, prompt="client 5", max_tokens=50, logprobs=0)
    gate.open()
    for number, one in ((1, streams[0]), (3, streams[2]), (5, fifth)):
        tokens = [t for event in one.rest() for t in tokens_of(event)]
        assert tokens == [token_text(i) for i in greedy_ids(f"client {number}", 50)]
    endpoint.wait_for_blocks()


def tokens_of(event: dict[str, list[dict[str, dict[str, list[str]]]]]) -> list[str]:
    listing = event["choices"][0]["logprobs"]
    return listing["tokens"] if listing else []


@pytest.mark.parametrize("stream", [True, False])
def test_all_samples_of_all_prompts_end_with_their_client(
    endpoint: Endpoint, gate: Gate, stream: bool
) -> None:
    gate.close()
    before = endpoint.shell.num_withdrawn
    one = Stream(endpoint, prompt=["x", "y", "z"], n=3, max_tokens=200, seed=9, stream=stream)
    endpoint.step(gate, 2)
    one.leave()
    wait_for(lambda: endpoint.shell.num_withdrawn >= before + 3, "all are withdrawn")
    gate.open()
    endpoint.wait_for_blocks()
    assert gate.num_sampled[9] <= 9 * (2 + 3 + PIPELINE_DEPTH)


def test_a_client_that_leaves_in_its_body_submits_nothing(endpoint: Endpoint) -> None:
    before = endpoint.shell.num_submitted
    with contextlib.closing(socket.create_connection(endpoint.address)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"model": "fingerprint", '
        )
    endpoint.works()
    assert endpoint.shell.num_submitted == before + 1
