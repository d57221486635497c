"""A client of completions over HTTP that costs little: raw sockets, and the events of streams."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

_DONE: Final = b"[DONE]"
_LIMIT: Final = 1 << 22
"""Bytes of the longest line, such as a whole answer."""


@dataclasses.dataclass(slots=True)
class Answer:
    """What came of one request, as its client saw it.

    Args:
        status: Of the answer; None where there was none.
        texts: Of each choice, as far as it came.
        reasons: Why each choice that has ended did.
        is_whole: Whether it says of itself that it is: a stream by its last event, another answer
            by its length.
        error: What an error event, or an answer that is no success, says.
        num_tokens: Output tokens, where the answer says how many.
        times_s: When text came, what was written together once, on the clock of time.monotonic.
        num_chars: How much came then, over all choices.
        ended_at_s: When it ended, or broke off, or the client left.
    """

    status: int | None = None
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    is_whole: bool = False
    error: str | None = None
    num_tokens: int | None = None
    times_s: list[float] = dataclasses.field(default_factory=list)
    num_chars: list[int] = dataclasses.field(default_factory=list)
    ended_at_s: float = 0.0


async def complete(
    host: str,
    port: int,
    body: Mapping[str, Any],
    leave_after: int | None = None,
    leave_after_s: float | None = None,
) -> Answer:
    """Post a completion and read its answer.

    Args:
        host: Of the endpoint.
        port: Of the endpoint.
        body: With `stream` or without.
        leave_after: Close the connection after so many events; None to stay.
        leave_after_s: Close it so many seconds after the request was sent, however far the answer
            is; None to stay.

    Returns:
        What came, whole or not; never raises for a connection that breaks.
    """
    answer = Answer()
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=_LIMIT)
    except OSError as error:
        answer.error = f"cannot connect: {error}"
        answer.ended_at_s = time.monotonic()
        return answer
    try:
        writer.write(request_bytes(host, body))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leave_after_s):
                await _read(reader, answer, leave_after)
    except (OSError, EOFError, ValueError) as error:
        answer.error = answer.error or f"the connection broke: {error!r}"
    finally:
        answer.ended_at_s = time.monotonic()
        writer.close()
    return answer


def request_bytes(host: str, body: Mapping[str, Any]) -> bytes:
    """Return what is sent to ask for a completion."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _read(reader: asyncio.StreamReader, answer: Answer, leave_after: int | None) -> None:
    """Read an answer.

    Raises:
        EOFError: It ends before its end.
        ValueError: It is no answer.
    """
    status_line = await reader.readline()
    if not status_line:
        raise EOFError("no answer")
    answer.status = int(status_line.split()[1])
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        await _read_chunks(reader, answer, leave_after)
        return
    content = await reader.readexactly(int(headers.get("content-length", "0")))
    _take_whole(answer, content)


def _take_whole(answer: Answer, content: bytes) -> None:
    if answer.status != 200:
        answer.error = content.decode(errors="replace")
        return
    fields = json.loads(content)
    answer.num_tokens = fields["usage"]["completion_tokens"]
    for choice in fields["choices"]:
        answer.texts[choice["index"]] = choice["text"]
        answer.reasons[choice["index"]] = choice["finish_reason"]
    answer.is_whole = True
    answer.times_s.append(time.monotonic())


async def _read_chunks(
    reader: asyncio.StreamReader, answer: Answer, leave_after: int | None
) -> None:
    rest, num_events, is_done = b"", 0, False
    while True:
        line = await reader.readline()
        size = int(line, 16) if line.strip() else -1
        if size < 0:
            raise EOFError("a stream without an end")
        data = await reader.readexactly(size + 2)
        if size == 0:
            # The end of the body alone does not make a stream whole.
            answer.is_whole = is_done
            if answer.status != 200:
                answer.error = rest.decode(errors="replace")
            return
        *events, rest = (rest + data[:-2]).split(b"\n\n")
        if answer.status != 200:
            rest = b"\n\n".join((*events, rest))
            continue
        num_chars = 0
        for event in events:
            payload = event.removeprefix(b"data: ")
            if payload == _DONE:
                is_done = True
            else:
                num_chars += _take_event(answer, json.loads(payload))
        if num_chars:
            answer.times_s.append(time.monotonic())
            answer.num_chars.append(num_chars)
        num_events += len(events)
        if leave_after is not None and num_events >= leave_after:
            return


def _take_event(answer: Answer, fields: Mapping[str, Any]) -> int:
    """Take in an event; return how many characters it has."""
    if "error" in fields:
        answer.error = fields["error"]["message"]
        return 0
    if fields.get("usage") is not None:
        answer.num_tokens = fields["usage"]["completion_tokens"]
        return 0
    for choice in fields["choices"]:
        index = choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + choice["text"]
        if choice["finish_reason"] is not None:
            answer.reasons[index] = choice["finish_reason"]
    return sum(len(choice["text"]) for choice in fields["choices"])


def keep_reading(host: str, port: int, bodies: Sequence[Mapping[str, Any]]) -> None:
    """Ask for each body again and again, all at once, until this process is ended."""

    async def read(body: Mapping[str, Any]) -> None:
        while True:
            answer = await complete(host, port, body)
            if not answer.is_whole:
                await asyncio.sleep(0.1)

    async def read_all() -> None:
        await asyncio.gather(*map(read, bodies))

    asyncio.run(read_all())
