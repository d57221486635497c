"""Reads what the dashboard of one endpoint shows, from the deployment and all of its ingresses."""

from collections.abc import Sequence

from fastapi import Request

from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.owner_report import OwnerReport
from rayserve_paged.core.running_request import RunningRequest
from rayserve_paged.deployment import Deployment
from rayserve_paged.serve.dashboard_state import (
    CellState,
    DashboardState,
    Reader,
    Totals,
    cell_state,
    dashboard_state,
    totals,
)
from rayserve_paged.serve.key_check import tenant_of


class DashboardFeed:
    """What any ingress shows of the whole endpoint.

    Args:
        deployment: Behind the endpoint.
        model: The name that is served.
    """

    def __init__(self, deployment: Deployment, model: str) -> None:
        self._deployment = deployment
        self._model = model

    async def state(self, request: Request) -> DashboardState:
        """Return all but the holders of blocks.

        Raises:
            DeploymentError: The controller does not answer.
        """
        view = await self._deployment.cluster_view()
        reports = await self._deployment.owner_reports()
        return dashboard_state(
            view, _running(reports), _totals(reports), model=self._model, reader=_reader(request)
        )

    async def cell(self, request: Request, replica: str, cell: int) -> CellState | None:
        """Return the holders of a cell; None where there is none.

        Raises:
            DeploymentError: The controller does not answer.
        """
        view = await self._deployment.cluster_view((ReplicaId(replica), cell))
        reports = await self._deployment.owner_reports()
        return cell_state(view, _running(reports), reader=_reader(request))


def _reader(request: Request) -> Reader:
    tenant = tenant_of(request)
    return Reader(tenant.name, sees_all=tenant.is_admin)


def _running(reports: Sequence[OwnerReport]) -> list[RunningRequest]:
    return [one for report in reports for one in report.running]


def _totals(reports: Sequence[OwnerReport]) -> Totals:
    return totals(
        sum(report.num_output_tokens for report in reports),
        sum(report.num_finished for report in reports),
        sum(report.num_failed for report in reports),
        [seconds for report in reports for seconds in report.ttft_s],
        [seconds for report in reports for seconds in report.itl_s],
    )
