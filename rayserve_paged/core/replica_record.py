"""What a controller keeps of one live replica: its requests, its reports in order, its trial."""

import dataclasses

from rayserve_paged.core.controller_messages import Placed
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replica_messages import AssignRequest, ReplicaReport
from rayserve_paged.core.request import Request

ASK_AGAIN_S = 1.0
"""A question that was not answered is put again after this long."""
SILENCE_S = 5.0
"""A replica with requests that reports nothing for this long is asked what it has."""
AUDIT_S = 30.0
"""The books of a busy replica are compared with its own so often."""
SETTLE_S = 5.0
"""A request that was placed so long before a question must have come to the replica."""


@dataclasses.dataclass(slots=True)
class Booked:
    """A request in the books.

    Args:
        request_id: The request.
        attempt: Which attempt of it.
        consumer_id: Who reads it.
        placed: Where it is.
        placed_at: Since when, in seconds.
        given: As its consumer submitted it, and as it was assigned; None where it was learned from
            an inventory.
        is_tried_long: As `Request.is_tried_long`.
        tenant: Whose it is; None for nobody's.
        num_blocks: That count as its tenant's while it lives.
    """

    request_id: RequestId
    attempt: Attempt
    consumer_id: ConsumerId
    placed: Placed
    placed_at: float
    given: tuple[Request, AssignRequest] | None = None
    is_tried_long: bool = False
    tenant: str | None = None
    num_blocks: int = 0

    @property
    def source(self) -> tuple[ReplicaId, Incarnation]:
        """Where it is."""
        return self.placed.replica_id, self.placed.incarnation


class ReportOrder:
    """Puts the reports of one incarnation in order, each once, whatever the network did to them."""

    def __init__(self) -> None:
        self.next = 0
        self._later: dict[int, ReplicaReport] = {}

    @property
    def has_gap(self) -> bool:
        """Whether reports have come that follow one which has not."""
        return bool(self._later)

    def take(self, report: ReplicaReport) -> list[ReplicaReport]:
        """Take in a report; return those whose turn has come."""
        if report.sequence < self.next:
            return []
        self._later[report.sequence] = report
        return self._drain()

    def skip_to(self, sequence: int) -> list[ReplicaReport]:
        """Wait for no report before this one any more; return those whose turn has come."""
        self.next = max(self.next, sequence)
        self._later = {n: report for n, report in self._later.items() if n >= self.next}
        return self._drain()

    def _drain(self) -> list[ReplicaReport]:
        ready = []
        while (report := self._later.pop(self.next, None)) is not None:
            ready.append(report)
            self.next += 1
        return ready


class ReplicaRecord:
    """A live replica.

    Args:
        incarnation: Its life.
        now: When it registered, in seconds.
    """

    def __init__(self, incarnation: Incarnation, now: float) -> None:
        self.incarnation = incarnation
        self.requests: dict[RequestId, Booked] = {}
        self.reports = ReportOrder()
        # The one suspect that it may have at a time.
        self.trial: tuple[RequestId, Attempt] | None = None
        # A consumer says that it is gone; it is given nothing until it has said something.
        self.is_doubted = False
        self.lacks_reports = False
        self._last_heard = now
        self._last_inventory = now
        self._last_ask = float("-inf")
        # When each question was put that was not answered.
        self._asked: dict[int, float] = {}

    @property
    def is_troubled(self) -> bool:
        """Whether it has to be asked, requests or no requests."""
        return self.is_doubted or self.lacks_reports or self.reports.has_gap

    def hear(self, now: float) -> None:
        """Note that it has said something."""
        self._last_heard = now
        self.is_doubted = False

    def must_ask(self, now: float) -> bool:
        """Return whether to ask it what it has."""
        if now - self._last_ask < ASK_AGAIN_S:
            return False
        if self.is_troubled:
            return True
        overdue = now - self._last_heard >= SILENCE_S or now - self._last_inventory >= AUDIT_S
        return bool(self.requests) and overdue

    def ask(self, number: int, now: float) -> None:
        """Note that a question was put."""
        self._last_ask = now
        self._asked[number] = now

    def answer(self, number: int | None, now: float) -> float | None:
        """Note an inventory; return when it was asked for, None where it was not."""
        self._last_inventory = now
        asked_at = None if number is None else self._asked.pop(number, None)
        if asked_at is not None:
            self._asked = {n: at for n, at in self._asked.items() if at > asked_at}
        return asked_at

    def end_trial(self, request_id: RequestId, attempt: Attempt) -> None:
        """Note that a request is not on trial here any more."""
        if self.trial == (request_id, attempt):
            self.trial = None
