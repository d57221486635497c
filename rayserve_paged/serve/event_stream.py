"""Responses that end with their client: streams of server-sent events, and answers in one piece.

A client that has left is noticed by its disconnect message, whatever the server does with what is
sent after it; what was computed for it is then cancelled.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

_T = TypeVar("_T")

DONE: Final = b"data: [DONE]\n\n"
"""Ends a stream that is whole; one that broke ends with an error and without this."""


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


def event(fields: Mapping[str, Any]) -> bytes:
    """Return one server-sent event with JSON in it."""
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Await something for as long as the client is there, and cancel it when it leaves.

    Args:
        receive: Of the request, whose body has been read.
        work: What is awaited.

    Raises:
        ClientGoneError: The client left first; the work has ended by then.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


class EventStream(Response):
    """Sends events as they come, those that come together in one write.

    Args:
        first: What is sent first.
        events: All that follows; closed at the end, and when the client leaves.
        gap_s: Says after each write how long the next one waits at least, so that there are fewer
            of them where tokens follow each other more closely; the first and the last are not
            held back.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        gap_s: Callable[[], float],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # Its length is not known.
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._gap_s = gap_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        del scope
        # Where the client left early, closing the generator is all there is to do.
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(ClientGoneError):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        pending: list[bytes] = []
        news = asyncio.Event()
        reading = asyncio.create_task(self._read(pending, news))
        try:
            while not reading.done() or pending:
                await news.wait()
                news.clear()
                if pending:
                    data = b"".join(pending)
                    pending.clear()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                # What comes meanwhile goes in one write; nothing waits for it once all has come.
                await asyncio.wait((reading,), timeout=self._gap_s())
            reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self, pending: list[bytes], news: asyncio.Event) -> None:
        try:
            async for data in self._events:
                pending.append(data)
                news.set()
        finally:
            news.set()
