"""The dashboard on a port of its own, with whatever state a test gives it."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response

from rayserve_paged.core.cluster_view import ClusterEvent, ClusterView, ReplicaView
from rayserve_paged.core.holdings import Holder, HolderKind, Holdings, block_view
from rayserve_paged.core.ids import BlockId, Incarnation, ReplicaId, Term
from rayserve_paged.core.running_request import RequestStage, RunningRequest
from rayserve_paged.serve.dashboard_routes import add_dashboard_routes
from rayserve_paged.serve.dashboard_state import (
    CellState,
    DashboardState,
    Reader,
    Totals,
    cell_state,
    dashboard_state,
)
from rayserve_paged.serve.http_errors import HttpError

SEES_ALL = Reader("", sees_all=True)


def make_request(name: str, request_id: str, tenant: str = "", **changes: object) -> RunningRequest:
    request = RunningRequest(
        request_id, name, tenant, "r0", RequestStage.DECODE, 900, 512, 40, 200, 3.5, 0
    )
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def make_holdings(
    num_blocks: int,
    sequences: Mapping[str, Sequence[int]],
    pin: Sequence[int],
    cached: Sequence[int],
) -> Holdings:
    """Take what holders list to be all there is, so that the counts agree with it."""
    counts, kept = [0] * num_blocks, bytearray(num_blocks)
    for listed in (*sequences.values(), pin):
        for each in listed:
            counts[each] += 1
    for each in cached:
        kept[each] = 1
    holders = [
        Holder(HolderKind.SEQUENCE, name, 0, (tuple(map(BlockId, listed)),))
        for name, listed in sequences.items()
    ]
    if pin:
        holders.append(Holder(HolderKind.PIN, "system", None, (tuple(map(BlockId, pin)),)))
    return Holdings(counts, bytes(kept), tuple(holders), len(sequences), 0)


@dataclasses.dataclass
class Shown:
    """What the page is to show; a test changes it while the page is open."""

    replicas: dict[str, Holdings]
    requests: tuple[RunningRequest, ...] = ()
    totals: Totals = dataclasses.field(default_factory=Totals)
    events: tuple[ClusterEvent, ...] = ()
    readers: dict[str, Reader] | None = None
    is_broken: bool = False

    def reader(self, request: Request) -> Reader:
        if self.is_broken:
            raise HttpError(503, "the controller is away")
        if self.readers is None:
            return SEES_ALL
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self.readers:
            raise HttpError(401, "no such key")
        return self.readers[key]

    def view(self, at: tuple[str, int] | None) -> ClusterView:
        replicas = tuple(
            ReplicaView(
                ReplicaId(name), Incarnation(0), block_view(held, None if at is None else at[1])
            )
            for name, held in self.replicas.items()
            if at is None or at[0] == name
        )
        return ClusterView(Term(0), replicas, self.events)


def make_app(shown: Shown) -> FastAPI:
    app = FastAPI()

    async def read_state(request: Request) -> DashboardState:
        reader = shown.reader(request)
        return dashboard_state(
            shown.view(None), shown.requests, shown.totals, model="tiny", reader=reader
        )

    async def read_cell(request: Request, replica: str, cell: int) -> CellState | None:
        reader = shown.reader(request)
        return cell_state(shown.view((replica, cell)), shown.requests, reader=reader)

    async def answer(request: Request, error: Exception) -> Response:
        del request
        assert isinstance(error, HttpError)
        return Response(error.encode(), error.status, error.headers, "application/json")

    app.add_exception_handler(HttpError, answer)
    add_dashboard_routes(app, read_state, read_cell)
    return app


class PageServer:
    """Serves on one port, and can go away and come back there."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._stop: Callable[[], None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/dashboard"

    def start(self) -> None:
        config = uvicorn.Config(
            self._app,
            "127.0.0.1",
            self.port,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)

        def stop() -> None:
            server.should_exit = True
            thread.join()

        self._stop = stop

    def stop(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None


@contextlib.contextmanager
def serving(shown: Shown) -> Iterator[PageServer]:
    server = PageServer(make_app(shown))
    server.start()
    try:
        yield server
    finally:
        server.stop()
