"""The dashboard's routes: a page without data, and the data behind whatever key is asked for."""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Annotated, Final

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from rayserve_paged.serve.dashboard_state import CellState, DashboardState
from rayserve_paged.serve.http_errors import HttpError

_FILES: Final = {
    "index.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "block_map.js": "text/javascript; charset=utf-8",
    "sparkline.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_NO_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

ReadState = Callable[[Request], Awaitable[DashboardState]]
"""Returns what the request's sender may see; raises HttpError 401 where it has no good key."""

ReadCell = Callable[[Request, str, int], Awaitable[CellState | None]]
"""The same for one cell of a replica; None where there is none."""


def add_dashboard_routes(app: FastAPI, read_state: ReadState, read_cell: ReadCell) -> None:
    """Add /dashboard, the files of its page, and /dashboard/state.

    The page has no data, so it asks for no key; what reads the data does.

    Args:
        app: The application.
        read_state: Reads what the page shows.
        read_cell: Reads the holders of a cell.
    """
    folder = files("rayserve_paged.serve") / "dashboard"
    contents = {name: (folder / name).read_bytes() for name in _FILES}

    @app.get("/dashboard", include_in_schema=False)
    async def page() -> Response:
        return Response(contents["index.html"], 200, _HEADERS, _FILES["index.html"])

    @app.get("/dashboard/state")
    async def state(
        request: Request,
        replica: Annotated[str | None, Query(max_length=200)] = None,
        cell: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
    ) -> Response:
        """Return what the dashboard shows; with a replica and a cell, who holds its blocks."""
        shown: DashboardState | CellState | None
        if replica is None or cell is None:
            shown = await read_state(request)
        else:
            shown = await read_cell(request, replica, cell)
            if shown is None:
                message = f"there is no cell {cell} of a replica {replica!r}"
                raise HttpError(404, message, param="cell", code="cell_not_found")
        return Response(shown.model_dump_json(), 200, _NO_STORE, JSONResponse.media_type)

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in _FILES:
            raise HttpError(404, f"there is no {name!r} here")
        return Response(contents[name], 200, _HEADERS, _FILES[name])
