"""Faults of other engines in texts, stops, seeds and ends of streams, tried over HTTP."""

import json
from typing import Any

import openai
import pytest
from http_endpoint import MODEL, Endpoint, Gate, Stream, endpoint_of, greedy, greedy_ids

PROMPT = "scripted"


def script(endpoint: Endpoint, *tokens: bytes) -> None:
    """Have the greedy tokens of PROMPT read as these."""
    ids = greedy_ids(PROMPT, len(tokens))
    assert len(set(ids)) == len(ids)
    endpoint.tokenizer.script = dict(zip(ids, tokens, strict=True))


def both(endpoint: Endpoint, **fields: Any) -> tuple[str, str]:  # noqa: ANN401
    """Text and reason of a completion, which a stream has to have too."""
    (whole,) = endpoint.complete(prompt=PROMPT, **fields)["choices"]
    choices = [e["choices"][0] for e in endpoint.events(prompt=PROMPT, **fields)]
    text = "".join(choice["text"] for choice in choices)
    assert (text, choices[-1]["finish_reason"]) == (whole["text"], whole["finish_reason"])
    return whole["text"], whole["finish_reason"]


def test_b96_characters_come_whole(endpoint: Endpoint, gate: Gate) -> None:
    data = "a\N{HOT PEPPER} \N{EURO SIGN}".encode()
    script(endpoint, *(bytes([byte]) for byte in data))
    gate.close()
    one = Stream(endpoint, prompt=PROMPT, max_tokens=9, logprobs=0)
    deltas = []
    for _ in data:
        endpoint.step(gate)
        deltas += one.texts(1)
    assert deltas == ["a", "", "", "", "\N{HOT PEPPER}", " ", "", "", "\N{EURO SIGN}"]
    gate.open()
    assert one.rest() == []
    assert both(endpoint, max_tokens=9) == (data.decode(), "length")
    assert both(endpoint, max_tokens=8) == ("a\N{HOT PEPPER} \N{REPLACEMENT CHARACTER}", "length")
    script(endpoint, b"\x80")
    assert both(endpoint, max_tokens=1) == ("\N{REPLACEMENT CHARACTER}", "length")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop": ["DEFGHIJ"]}, ("", "stop")),
        ({"stop": ["GHX"]}, ("DEFGHIJKL", "length")),
        # Of those that one token completes, the earliest start wins.
        ({"stop": ["IJ", "HIJK"]}, ("DEFG", "stop")),
        ({"stop": ["L"], "include_stop_str_in_output": True}, ("DEFGHIJKL", "stop")),
        ({"stop": [PROMPT]}, ("DEFGHIJKL", "length")),
        ({"stop": ["\N{EURO SIGN}"]}, ("DEFGHIJKL", "length")),
    ],
)
def test_b98_stop_strings_over_token_borders(
    endpoint: Endpoint, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    script(endpoint, b"DEF", b"G", b"HI", b"JK", b"L")
    assert both(endpoint, max_tokens=5, **fields) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_b101_a_logprob_of_minus_infinity_is_valid_json(endpoint: Endpoint, stream: bool) -> None:
    fields = {"prompt": "abc", "top_k": 1, "logprobs": 5, "echo": True, "max_tokens": 3}
    if stream:
        choices = [e["choices"][0] for e in endpoint.events(**fields)]
    else:
        choices = endpoint.complete(**fields)["choices"]
    text = json.dumps(choices, allow_nan=False)
    assert "token_logprobs" in text
    values = [v for c in choices if c["logprobs"] for v in c["logprobs"]["token_logprobs"]]
    assert len(values) == 6
    assert all(value is None or value >= -9999.0 for value in values)


@pytest.mark.parametrize("stream", [True, False])
def test_b102_a_stream_that_dies_does_not_look_complete(gate: Gate, stream: bool) -> None:
    settings = {"recovery.restart": False, "recovery.patience_s": 0.1}
    with endpoint_of(settings) as endpoint:
        gate.close()
        one = Stream(endpoint, prompt="x", max_tokens=50, logprobs=0, stream=stream)
        endpoint.step(gate, 5)
        text = "".join(one.texts(5)) if stream else ""
        endpoint.shell.kill_replica("r0", "a trial")  # type: ignore[arg-type]
        gate.open()
        if not stream:
            assert one.response.status in (500, 503)
            assert json.loads(one.response.read())["error"]["code"] is not None
            return
        events = []
        while line := one.response.readline():
            if line.strip():
                events.append(json.loads(line.removeprefix(b"data: ")))
        assert "error" in events[-1]
        assert all("error" not in event for event in events[:-1])
        choices = [event["choices"][0] for event in events[:-1]]
        assert {choice["finish_reason"] for choice in choices} <= {None}
        assert greedy("x", 50).startswith(text + "".join(one["text"] for one in choices))


def test_b102_the_client_raises_where_a_stream_breaks(gate: Gate) -> None:
    settings = {"recovery.restart": False, "recovery.patience_s": 0.1}
    with endpoint_of(settings) as endpoint:
        parts = endpoint.client.completions.create(
            model=MODEL, prompt="x", max_tokens=1000, stream=True
        )
        next(iter(parts))
        endpoint.shell.kill_replica("r0", "a trial")  # type: ignore[arg-type]
        with pytest.raises(openai.APIError):
            list(parts)


def test_b102_max_tokens_and_a_deadline_of_the_server_are_told_apart() -> None:
    with endpoint_of({"serve.max_deadline_s": 0.2}) as endpoint:
        events = endpoint.events(prompt="x", max_tokens=5)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        events = endpoint.events(prompt="x", max_tokens=1000)
        assert events[-1]["choices"][0]["finish_reason"] == "deadline"
