"""Lets in only who has a key, where keys are set, before a body is read."""

from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rayserve_paged.serve.http_errors import HttpError
from rayserve_paged.serve.keys_file import WatchedKeys
from rayserve_paged.serve.tenants import Tenant

_OPEN: Final = ("/health", "/openapi.json", "/dashboard")
"""Routes that tell nothing of anybody's requests."""

_PAGE: Final = "/dashboard/"
_DATA: Final = "/dashboard/state"


class KeyCheck:
    """Middleware that finds out whose a request is, and refuses those of nobody with status 401.

    Args:
        app: What is behind it.
        keys: Who has which key.
    """

    def __init__(self, app: ASGIApp, keys: WatchedKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its tenant in its state."""
        if scope["type"] == "http" and _needs_key(scope):
            try:
                tenant = self._keys.authenticate(Headers(scope=scope).get("authorization"))
            except HttpError as error:
                refusal = error.encode(), error.status, error.headers, "application/json"
                await Response(*refusal)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _needs_key(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    is_page = path.startswith(_PAGE) and path != _DATA
    return path not in _OPEN and not is_page


def tenant_of(request: Request) -> Tenant:
    """Return whose a request is that has passed the check."""
    tenant: Tenant = request.state.tenant
    return tenant
