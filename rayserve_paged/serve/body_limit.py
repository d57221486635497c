"""Refuses request bodies that are too long, before they are read as a whole."""

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_paged.serve.http_errors import HttpError


class BodyLimit:
    """Middleware that refuses a body by the length that it announces, or else by its bytes.

    Args:
        app: What is behind it.
        max_body_bytes: Most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and answer it with status 413 where its body is too long."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        accepted = f"at most {self._max_body_bytes} bytes"
        message = f"the request body is too long: expected {accepted}"
        refusal = HttpError(413, message, code="body_too_long")
        response = Response(refusal.encode(), 413, media_type="application/json")
        announced = Headers(scope=scope).get("content-length", "")
        # No more digits than int() takes; what is cut off would only make it longer.
        if announced.isascii() and announced.isdecimal() and self._is_over(int(announced[:20])):
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if self._is_over(num_bytes):
                    raise refusal
            return message

        async def sent(message: Message) -> None:
            # Whatever the application makes of a body that breaks off, this is the answer.
            if not self._is_over(num_bytes):
                await send(message)

        try:
            await self._app(scope, counted, sent)
        except Exception:
            if not self._is_over(num_bytes):
                raise
        if self._is_over(num_bytes):
            await response(scope, receive, send)

    def _is_over(self, num_bytes: int) -> bool:
        return num_bytes > self._max_body_bytes
