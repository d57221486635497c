"""Faults of the recovery that simulated chaos is to find, each with what it stands for."""

from typing import NamedTuple

from faults import Fault


class RecoveryFault(NamedTuple):
    """A fault that a rule writes.

    Args:
        name: Of the fault, without its number.
        before: What stands in the place, or the whole line where that says too little.
        meaning: What goes wrong with it.
    """

    name: str
    before: str
    meaning: str

    def is_it(self, fault: Fault) -> bool:
        """Return whether a fault is this one."""
        name = fault.name.rpartition(":")[0]
        return name == self.name and self.before in (fault.before, fault.source_line)


RECOVERY_FAULTS = (
    RecoveryFault(
        "fleet.Fleet.report:any-life",
        "live.incarnation != incarnation",
        "a report of a life that was given up is taken in",
    ),
    RecoveryFault(
        "open_request.OpenRequest.go_on:off-by-one",
        "self.attempt + 1",
        "a request that has lost its replica goes on as the same attempt",
    ),
    RecoveryFault(
        "open_request.OpenRequest._delivered:always",
        "is_whole and not any(stream.token_ids for _sibling, stream in streams)",
        "the delivered tokens are left out of the next attempt",
    ),
    RecoveryFault(
        "open_request.OpenRequest.submit:ignored-case",
        "self.deadline_at is not None and (is_repeated or self.current is not self.opened)",
        "the deadline begins anew with each attempt",
    ),
    RecoveryFault(
        "poll_log.PollLog.poll:stale-state",
        "self._polled[source] = (self.num_polls, now)",
        "polls that nobody answers are forgotten",
    ),
    RecoveryFault(
        "outbox.Outbox.poll:always",
        "event.ack >= box.sequence",
        "a poll acknowledges what was lost on the way",
    ),
    RecoveryFault(
        "outbox.Outbox._deliver:no-increment",
        "box.unacknowledged += box.fresh",
        "what waits for its acknowledgement is not kept",
    ),
    RecoveryFault(
        "stream_intake.News.extend:loose-slice",
        "have:",
        "what comes twice is handed out twice",
    ),
    RecoveryFault(
        "consumer.Consumer._is_from:ignored-case",
        "known.source is None",
        "a delivery that overtakes the answer to its submission is refused for good",
    ),
    RecoveryFault(
        "consumer.Consumer.cancel:always",
        "known is None or not (sibling is None or sibling in known.streams)",
        "a cancellation is lost",
    ),
    RecoveryFault(
        "controller.Controller._submit:any-life",
        "request.attempt == known.attempt",
        "a new attempt is taken for the old one, which is gone",
    ),
    RecoveryFault(
        "controller.Controller._submit:ignored-case",
        "known is not None",
        "a submission that comes twice is placed twice",
    ),
    RecoveryFault(
        "controller.Controller._choose:ignored-case",
        "request.is_suspect",
        "requests that may have ended a replica are tried side by side",
    ),
    RecoveryFault(
        "fleet.Fleet.register:no-increment",
        "commands += self._take_inventory(replica_id, live, event.inventory, now)",
        "an inventory is not taken in",
    ),
    RecoveryFault(
        "fleet.Fleet._reconcile:ignored-case",
        "booked is None",
        "a controller that was started anew does not adopt what replicas serve",
    ),
    RecoveryFault(
        "fleet.Fleet.lose:stale-entry",
        "del self.booked[booked.request_id]",
        "the requests of a lost replica stay in the books",
    ),
    RecoveryFault(
        "restarts.Restarts.take_due:off-by-one",
        "lives.last + 1",
        "a replica is started again as the incarnation that was fenced",
    ),
    RecoveryFault(
        "replica_record.ReplicaRecord.end_trial:stale-state",
        "self.trial = None",
        "a replica waits for ever for the end of a trial",
    ),
    RecoveryFault(
        "replica.Replica._fence:stale-state",
        "self.fenced = reason",
        "a fence does not fence",
    ),
    RecoveryFault(
        "replica.Replica._fence:forget-to-free",
        "self.batcher.abandon()",
        "a fenced replica keeps the blocks of the steps under way",
    ),
    RecoveryFault(
        "replica.Replica._assign:any-life",
        "sequence.request.attempt >= request.attempt",
        "an assignment that comes twice ends the request that it began",
    ),
)
