"""The loads of all live replicas, and the choice of one for each request.

A replica's load is what the controller itself has promised to the requests that it placed there and
that have not ended, so that several placements between two reports see each other. It lives in
arrays with one entry per replica: a placement makes no object per replica.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from rayserve_paged.core.config import BatchConfig, PlacementPolicy
from rayserve_paged.core.directory import Directory
from rayserve_paged.core.ids import BlockKey, ReplicaId, RequestId
from rayserve_paged.core.placement_policy import (
    PLACEMENTS,
    BoolArray,
    Candidates,
    LongArray,
    QueueLoads,
    has_room,
)
from rayserve_paged.core.request import ModelLimits, Request


@dataclasses.dataclass(frozen=True, slots=True)
class _Promise:
    """What one request adds to the load of its replica."""

    num_rows: int
    num_tokens: int


class Placement:
    """Live replicas, what each was promised to compute, and which keys each holds.

    Args:
        policy: How one is chosen.
        batch: Its queue limits.
    """

    def __init__(self, policy: PlacementPolicy, batch: BatchConfig) -> None:
        self._choose = PLACEMENTS[policy]
        self._max_num_waiting = batch.max_num_waiting
        self._max_pending_tokens = batch.max_pending_tokens
        self._limits_queue = (batch.max_num_waiting, batch.max_pending_tokens) != (None, None)
        self.directory = Directory()
        # Each replica has a slot in all that follows; those of dead ones are used again.
        self._slot_of: dict[ReplicaId, int] = {}
        self._names: list[ReplicaId | None] = []
        self._limits: list[ModelLimits | None] = []
        self._promises: list[dict[RequestId, _Promise]] = []
        self._is_live = np.zeros(0, np.bool_)
        self._max_num_seqs = np.zeros(0, np.int64)
        self._num_seqs = np.zeros(0, np.int64)
        self._num_pending_tokens = np.zeros(0, np.int64)
        self._last_turn = np.zeros(0, np.int64)
        self._num_turns = 0
        # The kinds of replicas there are, and which one each is of.
        self._kinds: list[ModelLimits] = []
        self._kind = np.zeros(0, np.int64)
        self._largest: ModelLimits | None = None

    # --- replicas -------------------------------------------------------------------------

    def add(self, replica_id: ReplicaId, limits: ModelLimits) -> None:
        """Take in a replica that is not live, with nothing promised and nothing cached."""
        assert replica_id not in self._slot_of, "a replica is removed before it is added anew"
        slot = next((i for i, name in enumerate(self._names) if name is None), len(self._names))
        if slot == len(self._names):
            self._grow()
        self._slot_of[replica_id] = slot
        self._names[slot] = replica_id
        self._limits[slot] = limits
        self._is_live[slot] = True
        self._max_num_seqs[slot] = limits.max_num_seqs
        self._last_turn[slot] = -1
        self._sort_kinds()

    def remove(self, replica_id: ReplicaId) -> None:
        """Forget a live replica, with all that it was promised and held."""
        slot = self._slot_of.pop(replica_id)
        self.directory.forget(slot)
        self._names[slot] = None
        self._limits[slot] = None
        self._promises[slot] = {}
        self._is_live[slot] = False
        self._num_seqs[slot] = 0
        self._num_pending_tokens[slot] = 0
        self._sort_kinds()

    def update(
        self,
        replica_id: ReplicaId,
        published: Iterable[BlockKey],
        evicted: Iterable[BlockKey],
    ) -> None:
        """Take in which keys came and went on a live replica."""
        self.directory.update(self._slot_of[replica_id], published, evicted)

    @property
    def largest_limits(self) -> ModelLimits | None:
        """Limits of the live replica that can hold most; None where there is none."""
        return self._largest

    def num_requests(self, replica_id: ReplicaId) -> int:
        """Return how many requests a live replica was given that have not finished."""
        return len(self._promises[self._slot_of[replica_id]])

    def num_pending_tokens(self, replica_id: ReplicaId) -> int:
        """Return the prompt and output tokens promised to those requests."""
        return int(self._num_pending_tokens[self._slot_of[replica_id]])

    def _grow(self) -> None:
        self._names.append(None)
        self._limits.append(None)
        self._promises.append({})
        self._is_live = np.append(self._is_live, False)
        self._max_num_seqs = np.append(self._max_num_seqs, 0)
        self._num_seqs = np.append(self._num_seqs, 0)
        self._num_pending_tokens = np.append(self._num_pending_tokens, 0)
        self._last_turn = np.append(self._last_turn, -1)

    def _sort_kinds(self) -> None:
        live = [limits for limits in self._limits if limits is not None]
        self._kinds = list(dict.fromkeys(live))
        self._kind = np.array(
            [0 if limits is None else self._kinds.index(limits) for limits in self._limits],
            np.int64,
        )
        self._largest = max(live, key=lambda limits: limits.num_usable_slots, default=None)

    # --- requests -------------------------------------------------------------------------

    def place(self, request: Request, keys: Sequence[BlockKey]) -> ReplicaId | None:
        """Choose a replica for a request and promise it there.

        Args:
            request: Checked and clamped (`request.admit`).
            keys: Of the full blocks of its prompt.

        Returns:
            The replica; None where the queue limits of all that can hold it leave no room.
        """
        promise = _Promise(request.num_rows, request.num_promised_tokens)
        slots = np.flatnonzero(self._fits(request))
        if self._limits_queue:
            room = has_room(
                self._queues(slots),
                promise.num_rows,
                promise.num_tokens,
                self._max_num_waiting,
                self._max_pending_tokens,
            )
            slots = slots[room]
        if not len(slots):
            return None
        num_cached = self.directory.match(keys, len(self._names))[slots]
        block_size = self._kinds[0].block_size
        chosen = self._choose(
            Candidates(
                num_cached * block_size,
                self._num_pending_tokens[slots],
                self._last_turn[slots],
            )
        )
        slot = int(slots[chosen])
        self._promises[slot][request.request_id] = promise
        self._num_seqs[slot] += promise.num_rows
        self._num_pending_tokens[slot] += promise.num_tokens
        self._last_turn[slot] = self._num_turns
        self._num_turns += 1
        name = self._names[slot]
        assert name is not None, "only live ones are candidates"
        return name

    def settle(self, replica_id: ReplicaId, request_id: RequestId) -> None:
        """Take back what was promised to a request that has ended."""
        slot = self._slot_of[replica_id]
        promise = self._promises[slot].pop(request_id)
        self._num_seqs[slot] -= promise.num_rows
        self._num_pending_tokens[slot] -= promise.num_tokens

    def shortest_queue(self, request: Request) -> tuple[int, int]:
        """Return the least that waits on a replica that can hold a request: sequences, tokens."""
        loads = self._queues(np.flatnonzero(self._fits(request)))
        least = loads.least_busy()
        return int(loads.num_waiting[least]), int(loads.num_pending_tokens[least])

    def _fits(self, request: Request) -> BoolArray:
        """Return bool [num_slots], which live replicas have the blocks for a request."""
        fits = [kind.num_usable_blocks >= request.num_blocks_needed(kind) for kind in self._kinds]
        return self._is_live if all(fits) else self._is_live & np.array(fits)[self._kind]

    def _queues(self, slots: LongArray) -> QueueLoads:
        return QueueLoads(
            self._num_seqs[slots], self._max_num_seqs[slots], self._num_pending_tokens[slots]
        )
