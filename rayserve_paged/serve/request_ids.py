"""The header X-Request-Id: a client's name for a request, or one drawn here, on every answer."""

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_paged.serve.http_errors import HttpError, shown_value
from rayserve_paged.serve.openai_types import MAX_ID_LENGTH

REQUEST_ID_HEADER: Final = "X-Request-Id"

_VALID: Final = re.compile(rf"[\x20-\x7e]{{1,{MAX_ID_LENGTH}}}")


class RequestIds:
    """Middleware that gives every answer the id of its request.

    The id is for whoever looks for a request in logs: two requests may have the same. It is not
    `rayserve.request_id`, by which a request is known to the deployment.

    Args:
        app: What is behind it.
        adds_header: Whether to put it on the answer; not where a proxy in front does.
    """

    def __init__(self, app: ASGIApp, *, adds_header: bool = True) -> None:
        self._app = app
        self._adds_header = adds_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its id in `request.state.request_id`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        is_valid = given is not None and _VALID.fullmatch(given) is not None
        request_id = given if given is not None and is_valid else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self._adds_header:
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        if given is None or is_valid:
            await self._app(scope, receive, send_with_id)
            return
        accepted = f"1 to {MAX_ID_LENGTH} printable ASCII characters"
        message = f"{REQUEST_ID_HEADER}={shown_value(given)} is not accepted: expected {accepted}"
        refusal = HttpError(400, message, param=REQUEST_ID_HEADER)
        response = Response(refusal.encode(), 400, media_type="application/json")
        await response(scope, receive, send_with_id)
