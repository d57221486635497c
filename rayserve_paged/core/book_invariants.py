"""Recomputes what a controller has in its books from their parts, and compares."""

from collections.abc import Iterator

from rayserve_paged.core.controller import Controller
from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.fleet import Fleet
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.replica_record import ReplicaRecord
from rayserve_paged.core.tenant_books import InUse


def check_books(controller: Controller) -> None:
    """Check that the books of a controller agree with each other.

    Raises:
        LedgerError: The first that does not.
    """
    problem = next(_problems(controller.fleet), None)
    if problem is not None:
        raise LedgerError(problem)


def _problems(fleet: Fleet) -> Iterator[str]:
    for replica_id, live in fleet.replicas.items():
        yield from _problems_of_one(fleet, replica_id, live)
    num_booked = sum(len(live.requests) for live in fleet.replicas.values())
    if len(fleet.booked) != num_booked:
        yield f"{len(fleet.booked)} requests are booked, and replicas have {num_booked}"
    yield from _problems_of_tenants(fleet)
    doubted = {replica_id for replica_id, live in fleet.replicas.items() if live.is_doubted}
    if fleet.doubted != doubted:
        yield f"{fleet.doubted} are spared, and {doubted} are doubted"


def _problems_of_tenants(fleet: Fleet) -> Iterator[str]:
    counted: dict[str, InUse] = {}
    for booked in fleet.booked.values():
        if booked.given is not None:
            limits = fleet.placement.limits(booked.placed.replica_id)
            needed = booked.given[1].request.num_tenant_blocks(limits)
            if (booked.tenant, booked.num_blocks) != (booked.given[0].tenant, needed):
                yield f"{booked} counts as {booked.num_blocks} blocks, and needs {needed}"
        if booked.tenant is not None:
            before = counted.get(booked.tenant, InUse())
            counted[booked.tenant] = InUse(
                before.num_requests + 1, before.num_blocks + booked.num_blocks
            )
    if fleet.tenants.in_use != counted:
        yield f"tenants are said to use {fleet.tenants.in_use}, and use {counted}"


def _problems_of_one(fleet: Fleet, replica_id: ReplicaId, live: ReplicaRecord) -> Iterator[str]:
    placement, promises = fleet.placement, fleet.placement.promises(replica_id)
    if promises.keys() != live.requests.keys():
        yield f"{replica_id} has {live.requests.keys()}, and was promised {promises.keys()}"
    for request_id, booked in live.requests.items():
        if fleet.booked.get(request_id) is not booked:
            yield f"{replica_id} has {booked}, and {fleet.booked.get(request_id)} is booked"
        if booked.source != (replica_id, live.incarnation):
            yield f"{booked} is in the books of {replica_id}, life {live.incarnation}"
    if live.trial is not None:
        request_id, attempt = live.trial
        tried = live.requests.get(request_id)
        if tried is None or tried.attempt != attempt:
            yield f"{live.trial} is on trial on {replica_id}, which has {live.requests.keys()}"
    told = (
        placement.num_seqs(replica_id),
        placement.num_pending_tokens(replica_id),
        placement.num_queued_tokens(replica_id),
    )
    counted = (
        sum(promise.num_rows for promise in promises.values()),
        sum(promise.num_tokens for promise in promises.values()),
        sum(promise.num_queued_tokens for promise in promises.values()),
    )
    if told != counted:
        yield f"the load of {replica_id} is told as {told}, and is {counted}"
    expected = {key for promise in promises.values() for key in promise.expected}
    unexpected = placement.expected_keys(replica_id) - expected
    if unexpected:
        yield f"{replica_id} is expected to hold {len(unexpected)} keys that nobody computes"
