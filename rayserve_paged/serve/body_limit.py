"""Refuses request bodies that are too long, before they are read as a whole."""

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_paged.serve.http_errors import HttpError


class BodyLimit:
    """Middleware that counts the bytes of a body, whatever its headers say.

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
        num_bytes = 0
        refusal: HttpError | None = None

        async def counted() -> Message:
            nonlocal num_bytes, refusal
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    accepted = f"at most {self._max_body_bytes} bytes"
                    refusal = HttpError(413, f"the request body is too long: expected {accepted}")
                    raise refusal
            return message

        async def sent(message: Message) -> None:
            # Whatever the application makes of a body that breaks off, this is the answer.
            if refusal is None:
                await send(message)

        try:
            await self._app(scope, counted, sent)
        except Exception:
            if refusal is None:
                raise
        if refusal is not None:
            response = Response(refusal.encode(), 413, media_type="application/json")
            await response(scope, receive, send)
