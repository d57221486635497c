"""What an API needs of a running deployment; every shell implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.cluster_view import ClusterView
from rayserve_paged.core.controller_messages import Placed, Rejected, ReplicaLost, SubmitRequest
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.owner_report import OwnerReport
from rayserve_paged.core.replica_messages import PinAnswered, PinPrefix, PollTokens, UnpinPrefix
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.stream_messages import Delivery


class Deployment(Protocol):
    """A controller and its replicas, reached from any thread and any asyncio loop."""

    @property
    def limits(self) -> ModelLimits:
        """What a request is checked against."""
        ...

    async def submit(self, message: SubmitRequest) -> Placed | Rejected:
        """Hand in a request. Idempotent by (request_id, attempt).

        Raises:
            ControllerAwayError: Nobody answers now; submit it again later.
            DeploymentError: There is no such deployment any more.
        """
        ...

    async def poll(
        self, replica_id: ReplicaId, incarnation: Incarnation, message: PollTokens
    ) -> Delivery:
        """Wait for new tokens of the consumer's requests on one replica.

        Answered with an empty delivery after the poll timeout. At most one poll per consumer
        and replica is pending; a newer one replaces an older one.

        Raises:
            ReplicaLostError: This incarnation is gone.
        """
        ...

    async def cancel(
        self,
        request_id: RequestId,
        attempt: Attempt,
        sibling: int | None = None,
        placed_at: tuple[ReplicaId, Incarnation] | None = None,
    ) -> None:
        """Withdraw a request, or one of its samples, wherever it is; what is withdrawn ends as
        cancelled. Idempotent.

        Args:
            request_id: The request.
            attempt: Which submission of it.
            sibling: The sample; None for all.
            placed_at: Where it was placed, for a controller that was started since.
        """
        ...

    async def watch(self, consumer_id: ConsumerId) -> tuple[ReplicaLost, ...]:
        """Wait for news of lost replicas that still owed this consumer something.

        Returns with nothing after the poll timeout; call it again and again.
        """
        ...

    async def replicas(self) -> Mapping[ReplicaId, Incarnation]:
        """Return the replicas that serve now, each with its life.

        Raises:
            ControllerAwayError: Nobody can say now.
            DeploymentError: There is no such deployment any more.
        """
        ...

    async def report_owner(self, report: OwnerReport) -> None:
        """Tell the other owners what the requests of this one are at; about once a second."""
        ...

    async def owner_reports(self) -> tuple[OwnerReport, ...]:
        """Return the last report of each owner."""
        ...

    async def accounting(self) -> tuple[tuple[ReplicaId, Accounting], ...]:
        """Take the ledger of every replica, each at a step's end, ordered by replica id."""
        ...

    async def cluster_view(self, cell: tuple[ReplicaId, int] | None = None) -> ClusterView:
        """Take the map of every replica's blocks, each at a step's end, and the latest events.

        Args:
            cell: A replica and a cell of its map whose holders are wanted: then of this replica
                alone. None for the maps without.
        """
        ...

    async def reset_cache(self) -> None:
        """Forget the prefix caches of all replicas; returns when each has done it.

        Requests that run meanwhile go on unharmed, and what they compute on the blocks that they
        have is not cached. Replicas that are lost have no cache.
        """
        ...

    async def pin_prefix(self, event: PinPrefix) -> tuple[tuple[ReplicaId, PinAnswered], ...]:
        """Keep the cached blocks of a prefix on every replica, ordered by replica id.

        Replicas that are lost are left out; one that starts later has no pins.
        """
        ...

    async def unpin_prefix(self, event: UnpinPrefix) -> None:
        """Let go of a pin on every replica. Idempotent."""
        ...

    def shutdown(self) -> None:
        """End every replica and wait until nothing of it is left. Idempotent; blocks."""
        ...
