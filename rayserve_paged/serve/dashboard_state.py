"""What the dashboard shows: the maps of blocks, the running requests, figures and events.

A tenant sees all blocks and all counts, and the names of its own requests alone.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict

from rayserve_paged.core.cluster_view import ClusterEvent, ClusterView, ReplicaView
from rayserve_paged.core.holdings import BlockCounts, CellHolder, CellView, HolderKind
from rayserve_paged.core.running_request import RequestStage, RunningRequest

MAX_REQUESTS: Final = 200
"""Requests that are listed."""

MAX_NAME: Final = 120
"""Characters of a name that are shown."""

_STRANGER: Final = "another tenant"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReplicaState(_Frozen):
    """One replica: `cells` has a letter for each cell, "." free, "#" held, "=" shared, "o" cached,
    "p" pinned; all cells but the last have `blocks_per_cell` blocks.
    """

    replica: str
    incarnation: int
    num_blocks: int
    blocks_per_cell: int
    cells: str
    counts: BlockCounts
    num_running: int
    num_waiting: int


class RequestState(_Frozen):
    """One running request; `name` is "another tenant" where it is not the reader's."""

    name: str
    is_own: bool
    tenant: str
    replica: str | None
    stage: RequestStage
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int | None
    age_s: float
    recoveries: int


class Totals(_Frozen):
    """Counters since the endpoint began, and latencies of late; None where there are none."""

    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None


class EventState(_Frozen):
    """One event of the deployment."""

    sequence: int
    ago_s: float
    kind: str
    text: str


class DashboardState(_Frozen):
    """Everything that the page shows but the holders of blocks."""

    model: str
    term: int
    replicas: tuple[ReplicaState, ...]
    requests: tuple[RequestState, ...]
    num_requests: int
    totals: Totals
    events: tuple[EventState, ...]


class HolderState(_Frozen):
    """Who holds blocks of a cell, and how many of them."""

    kind: HolderKind
    name: str
    is_own: bool
    sibling: int | None
    layer_groups: tuple[int, ...]
    num_blocks: int


class CellState(_Frozen):
    """One cell of a replica's map and its holders, those of most blocks first."""

    replica: str
    cell: int
    first_block: int
    num_blocks: int
    counts: BlockCounts
    holders: tuple[HolderState, ...]
    num_more_holders: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Who looks.

    Args:
        tenant: Of its key; "" where there are no keys.
        sees_all: Whether it sees the names of all tenants: an administrator, or there are no keys.
    """

    tenant: str
    sees_all: bool

    def owns(self, tenant: str) -> bool:
        """Return whether it may see what is this tenant's."""
        return self.sees_all or (tenant != "" and tenant == self.tenant)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of all do not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def totals(
    output_tokens: int,
    finished: int,
    failed: int,
    ttft_s: Sequence[float],
    itl_s: Sequence[float],
) -> Totals:
    """Make the figures.

    Args:
        output_tokens: Since the endpoint began.
        finished: Requests that ended well.
        failed: Requests that did not.
        ttft_s: Times to the first token of late, in seconds.
        itl_s: Times between tokens of late, in seconds.
    """
    return Totals(
        output_tokens=output_tokens,
        finished=finished,
        failed=failed,
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p99_s=quantile(ttft_s, 0.99),
        itl_p50_s=quantile(itl_s, 0.5),
        itl_p99_s=quantile(itl_s, 0.99),
    )


def dashboard_state(
    view: ClusterView,
    requests: Iterable[RunningRequest],
    figures: Totals,
    *,
    model: str,
    reader: Reader,
) -> DashboardState:
    """Build what the page shows.

    Args:
        view: Of the deployment.
        requests: Those of all ingress replicas.
        figures: Likewise.
        model: The name that is served.
        reader: Who looks.
    """
    listed = sorted(requests, key=lambda each: (not reader.owns(each.tenant), -each.age_s))
    return DashboardState(
        model=model,
        term=view.term,
        replicas=tuple(map(_replica, view.replicas)),
        requests=tuple(_request(each, reader) for each in listed[:MAX_REQUESTS]),
        num_requests=len(listed),
        totals=figures,
        events=tuple(
            _event(each) for each in view.events if each.tenant == "" or reader.owns(each.tenant)
        ),
    )


def _replica(view: ReplicaView) -> ReplicaState:
    blocks = view.blocks
    return ReplicaState(
        replica=view.replica_id,
        incarnation=view.incarnation,
        num_blocks=blocks.num_blocks,
        blocks_per_cell=blocks.blocks_per_cell,
        cells=blocks.cells,
        counts=blocks.counts,
        num_running=blocks.num_running,
        num_waiting=blocks.num_waiting,
    )


def _request(request: RunningRequest, reader: Reader) -> RequestState:
    is_own = reader.owns(request.tenant)
    return RequestState(
        name=_short(request.name) if is_own else _STRANGER,
        is_own=is_own,
        tenant=_short(request.tenant) if is_own else "",
        replica=request.replica,
        stage=request.stage,
        prompt_tokens=request.num_prompt_tokens,
        # What a stranger's prompt has in common with others is its tenant's affair.
        cached_tokens=request.num_cached_tokens if is_own else 0,
        output_tokens=request.num_output_tokens,
        max_tokens=request.max_output_tokens,
        age_s=request.age_s,
        recoveries=request.num_recoveries,
    )


def _event(event: ClusterEvent) -> EventState:
    return EventState(sequence=event.sequence, ago_s=event.ago_s, kind=event.kind, text=event.text)


def cell_state(
    view: ClusterView, requests: Iterable[RunningRequest], *, reader: Reader
) -> CellState | None:
    """Build what the page says of one cell; None where there is no such replica or cell.

    Args:
        view: As `Deployment.cluster_view` returns it for a cell.
        requests: Those of all ingress replicas.
        reader: Who looks.
    """
    for replica in view.replicas:
        cell = replica.blocks.cell
        if cell is not None:
            known = {request.request_id: request for request in requests}
            return CellState(
                replica=replica.replica_id,
                cell=cell.index,
                first_block=cell.first_block,
                num_blocks=cell.num_blocks,
                counts=cell.counts,
                holders=_holders(cell, known, reader),
                num_more_holders=cell.num_more_holders,
            )
    return None


def _holders(
    cell: CellView, known: Mapping[str, RunningRequest], reader: Reader
) -> tuple[HolderState, ...]:
    """Name the holders; those whose names are not to be seen are counted together."""
    named: list[HolderState] = []
    others: Counter[HolderKind] = Counter()
    for holder in cell.holders:
        request = known.get(holder.name) if holder.kind is HolderKind.SEQUENCE else None
        if holder.kind is HolderKind.STEP:
            named.append(_holder(holder, f"step in flight {holder.name}", is_own=False))
        elif reader.owns("" if request is None else request.tenant):
            name = holder.name if request is None else request.name
            named.append(_holder(holder, _short(name), is_own=True))
        else:
            others[holder.kind] += holder.num_blocks
    hidden = (
        HolderState(
            kind=kind,
            name=_STRANGER if kind is HolderKind.SEQUENCE else "a pin",
            is_own=False,
            sibling=None,
            layer_groups=(),
            num_blocks=number,
        )
        for kind, number in others.items()
    )
    return (*named, *hidden)


def _holder(holder: CellHolder, name: str, *, is_own: bool) -> HolderState:
    return HolderState(
        kind=holder.kind,
        name=name,
        is_own=is_own,
        sibling=holder.sibling,
        layer_groups=holder.layer_groups,
        num_blocks=holder.num_blocks,
    )


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
