"""The error tree. Every error is picklable and carries the ids and numbers of its story.

PagedError
├── InvalidInputError       a field holds a value that is not accepted
│   └── CapacityError       a request that the pool can never hold
├── PinLimitError           a prefix to be pinned is longer than what pins may hold
├── DuplicateRequestError   a live request already has this id
├── NoReplicaError          no replica can take the request
├── OverloadedError         as much waits as may wait; later there will be room
├── QuotaExceededError      its tenant has in use, or has used, what it may; later it may more
├── ReplicaLostError        a replica died with requests on it
├── RequestFailedError      one request failed; its neighbours did not
│   └── PoisonedRequestError    it ended the replicas that it was tried on
├── DeploymentError         a deployment could not be started or reached
│   └── ControllerAwayError     its controller does not answer now, and may come back
└── LedgerError             an internal invariant of the block ledger broke
"""


class PagedError(Exception):
    """Root of all errors that this package raises on purpose.

    Subclasses pass their fields to `super().__init__` as positional arguments, which is what
    makes them survive pickling, and compose the message in `__str__`.
    """


def in_one_line(error: PagedError) -> str:
    """Return what an error says, with its notes, without line breaks."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return " ".join(f"{error}{notes}".split())


class InvalidInputError(PagedError):
    """A field holds a value that is not accepted.

    Args:
        field: Name of the field as the user wrote it.
        value: The refused value.
        accepted: What would be accepted, as a phrase.
    """

    def __init__(self, field: str, value: object, accepted: str) -> None:
        super().__init__(field, value, accepted)
        self.field = field
        self.value = value
        self.accepted = accepted

    def __str__(self) -> str:
        value = repr(self.value)
        if len(value) > 200:
            value = f"{value[:200]}... ({len(value)} characters)"
        return f"{self.field}={value} is not accepted: expected {self.accepted}"


class CapacityError(InvalidInputError):
    """A request needs more KV slots than the pool will ever have.

    Args:
        num_prompt_tokens: Length of the prompt.
        max_tokens: Output tokens asked for.
        num_blocks_needed: Blocks for `num_prompt_tokens + max_tokens - 1` KV slots, those behind
            the prompt's full blocks once for each beam.
        num_blocks: Blocks of the pool, without those that may be pinned.
        block_size: Slots per block.
        beam_width: Beams of the request, 1 where it has no search.
        max_pinned_blocks: Blocks of the pool that may be pinned.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_blocks_needed: int,
        num_blocks: int,
        block_size: int,
        beam_width: int = 1,
        max_pinned_blocks: int = 0,
    ) -> None:
        PagedError.__init__(
            self,
            num_prompt_tokens,
            max_tokens,
            num_blocks_needed,
            num_blocks,
            block_size,
            beam_width,
            max_pinned_blocks,
        )
        self.field = "max_tokens"
        self.value = max_tokens
        self.accepted = f"at most {num_blocks} blocks of {block_size} slots in all"
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.num_blocks_needed = num_blocks_needed
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.beam_width = beam_width
        self.max_pinned_blocks = max_pinned_blocks

    def __str__(self) -> str:
        beams = f" and beam_width={self.beam_width}" if self.beam_width > 1 else ""
        lower = "max_tokens or beam_width" if beams else "max_tokens"
        pinned = self.max_pinned_blocks
        pins = f" beside the {pinned} that pins may hold" if pinned else ""
        return (
            f"a prompt of {self.num_prompt_tokens} tokens with max_tokens={self.max_tokens}{beams} "
            f"needs {self.num_blocks_needed} blocks of {self.block_size} slots, and the pool has "
            f"{self.num_blocks} ({self.num_blocks * self.block_size} slots){pins}: shorten the "
            f"prompt, lower {lower} or give the cache more blocks"
        )


class PinLimitError(PagedError):
    """A prefix to be pinned has more blocks than pins may still hold.

    Args:
        pin_id: Name of the pin.
        num_blocks: Its blocks that no other pin holds.
        num_pinned_blocks: Blocks that other pins hold.
        max_pinned_blocks: Blocks that all pins of a replica may hold.
    """

    def __init__(
        self, pin_id: str, num_blocks: int, num_pinned_blocks: int, max_pinned_blocks: int
    ) -> None:
        super().__init__(pin_id, num_blocks, num_pinned_blocks, max_pinned_blocks)
        self.pin_id = pin_id
        self.num_blocks = num_blocks
        self.num_pinned_blocks = num_pinned_blocks
        self.max_pinned_blocks = max_pinned_blocks

    def __str__(self) -> str:
        return (
            f"pin {self.pin_id!r} needs {self.num_blocks} blocks, and of the "
            f"{self.max_pinned_blocks} that pins may hold {self.num_pinned_blocks} are pinned: "
            f"unpin others, shorten the prefix or raise max_pinned_share"
        )


class DuplicateRequestError(PagedError):
    """A live request already has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request_id={self.request_id!r} is in use by a request that has not finished"


class NoReplicaError(PagedError):
    """No replica can take the request."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"no replica can take the request: {self.reason}"


class OverloadedError(PagedError):
    """As much waits as may wait; nothing is wrong with the request, and later there will be room.

    Args:
        num_waiting: Sequences placed beyond those that run at once, on the least busy replica.
        max_num_waiting: How many may be; None for no limit.
        num_pending_tokens: Tokens promised to unfinished requests, on the least busy replica.
        max_pending_tokens: How many may be; None for no limit.
        retry_after_s: Estimate of when there will be room, from how fast requests finished; None
            where too few have.
    """

    def __init__(
        self,
        num_waiting: int,
        max_num_waiting: int | None,
        num_pending_tokens: int,
        max_pending_tokens: int | None,
        retry_after_s: float | None,
    ) -> None:
        super().__init__(
            num_waiting, max_num_waiting, num_pending_tokens, max_pending_tokens, retry_after_s
        )
        self.num_waiting = num_waiting
        self.max_num_waiting = max_num_waiting
        self.num_pending_tokens = num_pending_tokens
        self.max_pending_tokens = max_pending_tokens
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        limits = []
        if self.max_num_waiting is not None:
            limits.append(f"{self.num_waiting} sequences wait and {self.max_num_waiting} may")
        if self.max_pending_tokens is not None:
            limits.append(
                f"{self.num_pending_tokens} tokens are pending and {self.max_pending_tokens} may be"
            )
        after = "later" if self.retry_after_s is None else f"in about {self.retry_after_s:.3g} s"
        return f"overloaded: on the least busy replica {', and '.join(limits)}; try again {after}"


class QuotaExceededError(PagedError):
    """Its tenant uses as much as it may; nothing is wrong with the request, and it may come later.

    Args:
        tenant: Whose quota it is.
        name: Of the limit: a field of `TenantQuota`.
        limit: How much there may be; for the share of blocks, in blocks.
        used: How much there is.
        asked: How much more the request needs.
        retry_after_s: When there will be room, if nothing else comes from the tenant; None where
            that depends on when its requests end.
    """

    def __init__(
        self,
        tenant: str,
        name: str,
        limit: int,
        used: int,
        asked: int,
        retry_after_s: float | None,
    ) -> None:
        super().__init__(tenant, name, limit, used, asked, retry_after_s)
        self.tenant = tenant
        self.name = name
        self.limit = limit
        self.used = used
        self.asked = asked
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        limit = f"{self.name}={self.limit}"
        if self.name == "block_share":
            limit = f"{self.name} comes to {self.limit} blocks"
        after = "once others of its requests have ended"
        if self.retry_after_s is not None:
            after = f"in {self.retry_after_s:.3g} s"
        return (
            f"tenant {self.tenant!r} is at its quota: {limit}, {self.used} are used and "
            f"{self.asked} more are needed; try again {after}"
        )


class ReplicaLostError(PagedError):
    """A replica died with requests on it."""

    def __init__(self, replica_id: str, incarnation: int, reason: str) -> None:
        super().__init__(replica_id, incarnation, reason)
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.reason = reason

    def __str__(self) -> str:
        return f"replica {self.replica_id} (incarnation {self.incarnation}) is lost: {self.reason}"


class RequestFailedError(PagedError):
    """One request failed; its neighbours did not.

    Args:
        request_id: The request.
        reason: What went wrong, for a person.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(request_id, reason)
        self.request_id = request_id
        self.reason = reason

    def __str__(self) -> str:
        return f"request {self.request_id} failed: {self.reason}"


class PoisonedRequestError(RequestFailedError):
    """A request ended every replica that it was tried on, and is not tried again.

    Args:
        request_id: The request.
        deaths: Why each of these replicas was lost, the first one first.
    """

    def __init__(self, request_id: str, deaths: tuple[str, ...]) -> None:
        reason = (
            f"{len(deaths)} replicas in a row died with it, the last of them before it had a new "
            f"token, with no other suspect: {'; '.join(deaths)}"
        )
        PagedError.__init__(self, request_id, deaths)
        self.request_id = request_id
        self.reason = reason
        self.deaths = deaths


class DeploymentError(PagedError):
    """A deployment could not be started or reached."""

    def __init__(self, deployment: str, reason: str) -> None:
        super().__init__(deployment, reason)
        self.deployment = deployment
        self.reason = reason

    def __str__(self) -> str:
        return f"deployment {self.deployment!r}: {self.reason}"


class ControllerAwayError(DeploymentError):
    """A deployment's controller does not answer now; it is started anew, or was only cut off."""


class LedgerError(PagedError):
    """An internal invariant of the block ledger broke; always a bug, never a user's mistake."""

    def __init__(self, message: str, *numbers: int) -> None:
        super().__init__(message, *numbers)
        self.message = message

    def __str__(self) -> str:
        return self.message
