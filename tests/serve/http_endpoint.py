"""An endpoint of the fingerprint model for tests, whose steps can be held, and its ledger."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch

from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.controller_messages import Placed, Rejected, SubmitRequest
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.inprocess import InProcessShell
from rayserve_paged.load_config import load_config_as
from rayserve_paged.model.fingerprint import oracle
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.tokenizer import ByteTokenizer, Tokenizer
from rayserve_paged.serve.api import create_app
from rayserve_paged.serve.local_server import bind, served
from rayserve_paged.serve.serve_config import EndpointConfig
from rayserve_paged.serve.service import Service

MODEL = "fingerprint"
VOCAB_SIZE = 1000
NUM_BLOCKS = 256
PATIENCE_S = 60.0
"""How long a condition may take on a busy machine; never what a test measures."""

Body = dict[str, Any]


class ScriptedTokenizer(ByteTokenizer):
    """Reads tokens as a test says, knows chats, and raises where a test wants it to.

    A chat reads as `role: content` lines.
    """

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.script: dict[int, bytes] = {}
        self.poisoned_text: str | None = None
        self.poisoned_token: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if text == self.poisoned_text:
            raise ValueError("poisoned text")
        return super().encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == self.poisoned_token:
            raise ValueError("poisoned token")
        return self.script.get(token_id) or super().token_bytes(token_id)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not messages:
            raise InvalidInputError("messages", messages, "at least one message")
        return "".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant: "


class WatchedShell(InProcessShell):
    """Counts what is submitted, polled and withdrawn; raises on the submission of one prompt."""

    num_submitted = 0
    num_polls_begun = 0
    num_polls = 0
    """That wait for an answer."""
    num_withdrawn = 0
    poisoned_prompt: bytes | None = None

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        if bytes(i % 256 for i in message.request.prompt_token_ids) == self.poisoned_prompt:
            raise ValueError("poisoned request")
        self.num_submitted += 1
        return await super().submit(message)

    async def poll(self, *args: Any, **kwargs: Any) -> Delivery:  # noqa: ANN401
        answer = asyncio.ensure_future(super().poll(*args, **kwargs))
        try:
            await asyncio.sleep(0)
            # From here on the replica has the poll.
            self.num_polls += 1
            self.num_polls_begun += 1
            return await answer
        finally:
            self.num_polls -= 1
            answer.cancel()

    async def cancel(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        await super().cancel(*args, **kwargs)
        self.num_withdrawn += 1


class Endpoint:
    """One endpoint of a test: its URL, and what is behind it."""

    def __init__(self, url: str, shell: WatchedShell, tokenizer: Any) -> None:  # noqa: ANN401
        self.url = url
        self.shell = shell
        self.tokenizer = tokenizer
        self._num_polls_seen = 0
        self.streams: list[Stream] = []
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
        )

    def forget(self) -> None:
        """Undo what a test has told the tokenizer and the shell."""
        vars(self.tokenizer).update(vars(ScriptedTokenizer()))
        self.shell.poisoned_prompt = None

    def close(self) -> None:
        for stream in self.streams:
            stream.leave()
        self.http.close()
        self.client.close()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def complete(self, **fields: object) -> Body:
        """Post a completion that has to succeed; greedy where nothing is said."""
        return self.post("/v1/completions", **fields)

    def post(self, path: str, **fields: object) -> Body:
        response = self.http.post(path, json=body(**fields))
        assert response.status_code == 200, response.text
        found: Body = response.json()
        return found

    def refused(self, path: str = "/v1/completions", status: int = 400, **fields: object) -> Body:
        """Post a body that is refused; returns the error, after which all works as before."""
        response = self.http.post(path, content=json.dumps(body(**fields)), headers=JSON)
        return self.error_of(response, status)

    def error_of(self, response: httpx.Response, status: int = 400) -> Body:
        assert response.status_code == status, response.text
        error: Body = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        self.works()
        return error

    def works(self) -> None:
        """Check that an ordinary request is answered, and rightly."""
        found = self.complete(prompt=[7, 8, 9], max_tokens=3, logprobs=0)
        assert found["choices"][0]["text"] == text_of(oracle([7, 8, 9], 3))

    def events(self, path: str = "/v1/completions", **fields: object) -> list[Body]:
        """Read a whole stream, which has to end as one should."""
        with self.http.stream("POST", path, json=body(stream=True, **fields)) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = list(response.iter_lines())
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]

    def step(self, gate: Gate, num_steps: int = 1) -> None:
        """Let the next steps run, whose tokens are delivered at once."""
        for _ in range(num_steps):
            wait_for(lambda: gate.num_waiting and self._is_polled(), "a step and a poll wait")
            self._num_polls_seen = self.shell.num_polls_begun
            num_before = gate.num_steps
            gate.allow()
            wait_for(lambda n=num_before: gate.num_steps > n, "the step runs")

    def _is_polled(self) -> bool:
        """Whether a poll waits that no step has answered."""
        return self.shell.num_polls > 0 and self.shell.num_polls_begun > self._num_polls_seen

    def ledger(self) -> Accounting:
        (ledger,) = dict(asyncio.run(self.shell.accounting())).values()
        return ledger

    def all_blocks_are_back(self) -> bool:
        return all(
            ledger.num_held_blocks == 0
            and ledger.num_free_blocks + ledger.num_cached_blocks == ledger.num_blocks
            for _, ledger in asyncio.run(self.shell.accounting())
        )

    def wait_for_blocks(self) -> None:
        wait_for(self.all_blocks_are_back, "all blocks are back")


class Stream:
    """A stream of one connection, whose client reads and leaves when it likes.

    Nothing is waited for until something is read.
    """

    def __init__(self, endpoint: Endpoint, path: str = "/v1/completions", **fields: object) -> None:
        self._connection = http.client.HTTPConnection(*endpoint.address, timeout=PATIENCE_S)
        content = json.dumps(body(**{"stream": True, **fields}))
        self._connection.request("POST", path, content, JSON)
        self._response: http.client.HTTPResponse | None = None
        endpoint.streams.append(self)

    @property
    def response(self) -> http.client.HTTPResponse:
        """Of which the head has been read."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def event(self) -> Body | None:
        """Read the next event; None for [DONE]."""
        line = self.response.readline()
        assert line.startswith(b"data: "), line
        assert self.response.readline() == b"\n"
        data = line.removeprefix(b"data: ").strip()
        return None if data == b"[DONE]" else json.loads(data)

    def texts(self, num_events: int) -> list[str]:
        """Read events with a choice each, and return their texts."""
        events = [self.event() for _ in range(num_events)]
        return [event["choices"][0]["text"] for event in events if event is not None]

    def rest(self) -> list[Body]:
        """Read all that follows, up to a [DONE]."""
        events = []
        while (event := self.event()) is not None:
            events.append(event)
        assert self.response.read() == b""
        self.leave()
        return events

    def leave(self) -> None:
        """Close the connection, whatever is still to come."""
        if self._connection.sock is not None:
            # Whoever else holds the descriptor, the server hears of it.
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        if self._response is not None:
            self._response.close()
        self._connection.close()


JSON = {"content-type": "application/json"}


def body(**fields: object) -> Body:
    """Fields of a generation, greedy where nothing is said."""
    return {"model": MODEL, "temperature": 0, **fields}


def text_of(token_ids: Sequence[int]) -> str:
    return ByteTokenizer(VOCAB_SIZE).decode(token_ids)


def token_text(token_id: int) -> str:
    """A token in a list of tokens; alone it may be only a part of a character."""
    if token_id < 128:
        return chr(token_id)
    return f"bytes:\\x{token_id:02x}" if token_id < 256 else f"<{token_id}>"


def greedy(prompt: str | Sequence[int], num_tokens: int) -> str:
    """The greedy text of a prompt, computed without a cache."""
    return text_of(greedy_ids(prompt, num_tokens))


def greedy_ids(prompt: str | Sequence[int], num_tokens: int) -> list[int]:
    return oracle(prompt.encode() if isinstance(prompt, str) else prompt, num_tokens)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.005)


class Gate:
    """Holds the step loops of this process in front of the sampler, and counts what they draw.

    Attributes:
        num_sampled: Tokens drawn so far, by the seed of their request.
        num_waiting: Step loops that wait now.
        num_steps: Steps that were let through.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_allowed: int | None = None
        self.num_waiting = 0
        self.num_steps = 0
        self.num_sampled: Counter[int | None] = Counter()
        self.poisoned_seed: int | None = None

    def close(self) -> None:
        with self._changed:
            self._num_allowed = 0

    def allow(self, num_steps: int = 1) -> None:
        with self._changed:
            assert self._num_allowed is not None, "the gate is open"
            self._num_allowed += num_steps
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._num_allowed = None
            self._changed.notify_all()

    def enter(self, rows: Sequence[SamplingRow]) -> None:
        with self._changed:
            self.num_waiting += 1
            self._changed.wait_for(lambda: self._num_allowed != 0, PATIENCE_S)
            self.num_waiting -= 1
            self.num_steps += 1
            if self._num_allowed is not None:
                self._num_allowed -= 1
            self.num_sampled.update(row.params.seed for row in rows)
        if any(row.params.seed == self.poisoned_seed for row in rows):
            raise ValueError("poisoned row")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    sample = Sampler.sample

    def gated(
        self: Sampler, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[Any, Any, Any]:
        gate.enter(rows)
        return sample(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", gated)
    yield gate
    gate.open()


@contextlib.contextmanager
def endpoint_of(
    settings: Mapping[str, object] | None = None, tokenizer: Tokenizer | None = None
) -> Iterator[Endpoint]:
    """Serve, without Ray.

    Args:
        settings: Of the configuration, with dotted names.
        tokenizer: None for a `ScriptedTokenizer`, which belongs to the fingerprint model.
    """
    usual = {
        "model.model": MODEL,
        "cache.block_size": 4,
        "cache.num_blocks": NUM_BLOCKS,
        "serve.drain_timeout_s": 1,
    }
    config = load_config_as(EndpointConfig, None, {**usual, **(settings or {})}, {})
    tokenizer = ScriptedTokenizer() if tokenizer is None else tokenizer
    shell = WatchedShell(config.deployment())
    try:
        app = create_app(Service(shell, tokenizer, config))
        with (
            contextlib.closing(bind("127.0.0.1", 0)) as listener,
            served(app, listener, config.serve.drain_timeout_s) as url,
            contextlib.closing(Endpoint(url, shell, tokenizer)) as endpoint,
        ):
            yield endpoint
    finally:
        shell.shutdown()


@pytest.fixture(scope="module")
def shared_endpoint() -> Iterator[Endpoint]:
    """One endpoint for a file's tests."""
    with endpoint_of() as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Iterator[Endpoint]:
    """No test may leave a block held."""
    yield shared_endpoint
    shared_endpoint.forget()
    shared_endpoint.wait_for_blocks()
