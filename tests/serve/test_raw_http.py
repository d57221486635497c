"""Requests that no client library would send."""

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest
from http_endpoint import JSON, Endpoint, endpoint_of, greedy


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 400, "the request body is missing"),
        (b"{", 400, "is not valid JSON"),
        (b"[]", 400, "the request body is []: expected a JSON object"),
        (b"null", 400, "the request body is"),
        (b'"x"', 400, "expected a JSON object"),
        (b"\xff\xfe\x00{", 400, "is not valid JSON"),
        (b'{"model": "\xff"}', 400, "it is not UTF-8 at byte 11"),
        (b"[" * 100_000, 400, "it is nested too deeply"),
        (b'{"a":' * 100_000, 400, "it is nested too deeply"),
        (b'{"model": ' + b"[" * 400 + b"]" * 400 + b"}", 400, "model="),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "an integer has too many digits"),
        (b'{"model": "fingerprint", "prompt": "x", "temperature": NaN}', 400, "temperature=NaN"),
        (b'{"model": "fingerprint", "prompt": "x", "top_p": Infinity}', 400, "top_p=Infinity"),
        (b'{"model": "fingerprint", "prompt": "x", "top_p": 1' + b"0" * 400 + b"}", 400, "top_p="),
        (b'{"model": "fingerprint", "prompt": "x", "n": 1' + b"0" * 400 + b"}", 400, "n="),
        (b'{"model": "fingerprint", "prompt": [1' + b"0" * 400 + b"]}", 400, "prompt="),
        (b'{"model": "fingerprint", "prompt": "\\ud800"}', 400, "without lone surrogates"),
        (b'{"model": "\\ud800", "prompt": "x"}', 404, "does not exist"),
        (
            b'{"model": "fingerprint", "prompt": "x", "rayserve": {"request_id": "\\ud800"}}',
            400,
            "rayserve.request_id",
        ),
        (b'{"model": "fingerprint", "prompt": "x", "\\ud800": 1}', 400, "no lone surr"),
        (b'{"model": "fingerprint", "prompt": "x", "logit_bias": {"\\ud800": 1}}', 400, "logit_b"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(
    endpoint: Endpoint, content: bytes, status: int, message: str
) -> None:
    response = endpoint.http.post("/v1/completions", content=content, headers=JSON)
    assert message in endpoint.error_of(response, status)["message"]


def test_a_stop_string_of_a_lone_surrogate_never_matches(endpoint: Endpoint) -> None:
    content = json.dumps(
        {"model": "fingerprint", "prompt": "x", "stop": "\ud800", "max_tokens": 4, "temperature": 0}
    )
    response = endpoint.http.post("/v1/completions", content=content, headers=JSON)
    assert response.json()["choices"][0]["text"] == greedy("x", 4)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_is_not_marked_as_json_is_refused(endpoint: Endpoint, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    content = b'{"model": "fingerprint", "prompt": "x"}'
    response = endpoint.http.post("/v1/completions", content=content, headers=headers)
    assert "Content-Type: application/json" in endpoint.error_of(response, 415)["message"]


def test_of_a_name_that_comes_twice_the_last_one_counts(endpoint: Endpoint) -> None:
    content = b'{"model":"x","model":"fingerprint","prompt":"x","temperature":0,"max_tokens":2}'
    response = endpoint.http.post("/v1/completions", content=content, headers=JSON)
    assert response.json()["choices"][0]["text"] == greedy("x", 2)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/health", "GET"),
    ],
)
def test_another_method_is_told_which_one_is_allowed(
    endpoint: Endpoint, method: str, path: str, allowed: str
) -> None:
    response = endpoint.http.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.fixture(scope="module")
def small() -> Iterator[Endpoint]:
    with endpoint_of({"serve.max_body_bytes": 2048}) as endpoint:
        yield endpoint


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_a_413_and_the_connection_goes_on(small: Endpoint, chunked: bool) -> None:
    content = b'{"prompt": "' + b"x" * 100_000
    with contextlib.closing(socket.create_connection(small.address)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        if chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        else:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = b""
        while data := connection.recv(65536):
            answers += data
    assert answers.startswith(b"HTTP/1.1 413 ")
    assert b"at most 2048 bytes" in answers
    assert answers.endswith(b'{"status":"ok"}')
    small.works()


def test_pipelined_requests_are_answered_in_their_order(endpoint: Endpoint) -> None:
    def request(prompt: str) -> bytes:
        fields = {"model": "fingerprint", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        content = json.dumps(fields).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
        )

    with contextlib.closing(socket.create_connection(endpoint.address)) as connection:
        connection.sendall(request("a") + request("b"))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = b""
        while data := connection.recv(65536):
            answers += data
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK")[1:]]
    texts = [json.loads(one)["choices"][0]["text"] for one in bodies[:2]]
    assert texts == [greedy("a", 2), greedy("b", 2)]
    assert bodies[2] == b'{"status":"ok"}'
