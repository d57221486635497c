"""The loads of all live replicas, and the choice of one for each request.

A replica's load is what the controller itself has promised to the requests that it placed there and
that have not ended, so that several placements between two reports see each other. Reports take it
back, request by request: when a prompt is computed, and when a request has ended. It lives in
arrays with one entry per replica: a placement makes no object per replica.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from rayserve_paged.core.config import BatchConfig, PlacementPolicy
from rayserve_paged.core.directory import Directory, Levels
from rayserve_paged.core.ids import BlockKey, ReplicaId, RequestId
from rayserve_paged.core.placement_policy import (
    PLACEMENTS,
    SEQUENCE_TOKENS,
    BoolArray,
    Candidates,
    FloatArray,
    LongArray,
    QueueLoads,
    has_room,
    worth_of_blocks,
)
from rayserve_paged.core.prefix_heat import PrefixHeat
from rayserve_paged.core.request import ModelLimits, Request

_ALL: Final = slice(None)
_NUM_RECENT: Final = 64
"""Placements per replica over which what counts as recent work falls to a third."""


@dataclasses.dataclass(slots=True)
class Promise:
    """What one request adds to the load of its replica."""

    num_rows: int
    num_tokens: int
    num_queued_tokens: int
    expected: Sequence[BlockKey]


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
        self._heat = PrefixHeat()
        # Each replica has a slot in all that follows; those of dead ones are used again.
        self._slot_of: dict[ReplicaId, int] = {}
        self._names: list[ReplicaId | None] = []
        self._limits: list[ModelLimits | None] = []
        self._promises: list[dict[RequestId, Promise]] = []
        self._is_live = np.zeros(0, np.bool_)
        self._max_num_seqs = np.zeros(0, np.int64)
        self._num_seqs = np.zeros(0, np.int64)
        self._num_pending_tokens = np.zeros(0, np.int64)
        self._num_queued_tokens = np.zeros(0, np.int64)
        self._num_recent_tokens = np.zeros(0, np.float64)
        self._last_turn = np.zeros(0, np.int64)
        self._num_turns = 0
        # The kinds of replicas there are, and which one each is of.
        self._kinds: list[ModelLimits] = []
        self._kind = np.zeros(0, np.int64)
        self._largest: ModelLimits | None = None
        self._num_usable_blocks = 0

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
        self._num_queued_tokens[slot] = 0
        self._num_recent_tokens[slot] = 0
        self._sort_kinds()

    def update(
        self,
        replica_id: ReplicaId,
        published: Iterable[BlockKey],
        evicted: Iterable[BlockKey],
    ) -> None:
        """Take in which keys came and went on a live replica."""
        self.directory.update(self._slot_of[replica_id], published, evicted)

    def replace_keys(self, replica_id: ReplicaId, keys: Iterable[BlockKey]) -> None:
        """Take in all keys that a live replica has, whatever was known of them."""
        slot = self._slot_of[replica_id]
        self.directory.replace(slot, keys)

    @property
    def largest_limits(self) -> ModelLimits | None:
        """Limits of the live replica that can hold most; None where there is none."""
        return self._largest

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that all live replicas have for requests."""
        return self._num_usable_blocks

    def limits(self, replica_id: ReplicaId) -> ModelLimits:
        """Return what a live replica can hold."""
        limits = self._limits[self._slot_of[replica_id]]
        assert limits is not None, "it is live"
        return limits

    def num_requests(self, replica_id: ReplicaId) -> int:
        """Return how many requests a live replica was given that have not finished."""
        return len(self._promises[self._slot_of[replica_id]])

    def num_pending_tokens(self, replica_id: ReplicaId) -> int:
        """Return the prompt and output tokens promised to those requests."""
        return int(self._num_pending_tokens[self._slot_of[replica_id]])

    def num_queued_tokens(self, replica_id: ReplicaId) -> int:
        """Return the prompt tokens that a live replica has yet to compute, as far as is known."""
        return int(self._num_queued_tokens[self._slot_of[replica_id]])

    def num_seqs(self, replica_id: ReplicaId) -> int:
        """Return the sequences of the requests that a live replica has not finished."""
        return int(self._num_seqs[self._slot_of[replica_id]])

    def promises(self, replica_id: ReplicaId) -> Mapping[RequestId, Promise]:
        """Return what a live replica was promised that has not ended."""
        return self._promises[self._slot_of[replica_id]]

    def held_keys(self, replica_id: ReplicaId) -> AbstractSet[BlockKey]:
        """Return the keys that a live replica holds, as far as is known."""
        return self.directory.held(self._slot_of[replica_id])

    def expected_keys(self, replica_id: ReplicaId) -> AbstractSet[BlockKey]:
        """Return the keys that a live replica is to hold once it has computed them."""
        return self.directory.expected(self._slot_of[replica_id])

    def _grow(self) -> None:
        self._names.append(None)
        self._limits.append(None)
        self._promises.append({})
        self._is_live = np.append(self._is_live, False)
        self._max_num_seqs = np.append(self._max_num_seqs, 0)
        self._num_seqs = np.append(self._num_seqs, 0)
        self._num_pending_tokens = np.append(self._num_pending_tokens, 0)
        self._num_queued_tokens = np.append(self._num_queued_tokens, 0)
        self._num_recent_tokens = np.append(self._num_recent_tokens, 0.0)
        self._last_turn = np.append(self._last_turn, -1)

    def _sort_kinds(self) -> None:
        live = [limits for limits in self._limits if limits is not None]
        self._kinds = list(dict.fromkeys(live))
        self._kind = np.array(
            [0 if limits is None else self._kinds.index(limits) for limits in self._limits],
            np.int64,
        )
        self._num_usable_blocks = sum(limits.num_usable_blocks for limits in live)
        self._largest = max(live, key=lambda limits: limits.num_usable_slots, default=None)

    # --- requests -------------------------------------------------------------------------

    def can_hold(self, request: Request) -> bool:
        """Return whether any live replica has the blocks for a request."""
        return bool(self._fits(request).any())

    def place(
        self,
        request: Request,
        keys: Sequence[BlockKey],
        without: Collection[ReplicaId] = (),
    ) -> ReplicaId | None:
        """Choose a replica for a request and promise it there.

        A request that has lost its replica was let in before, and no queue limit keeps it out.

        Args:
            request: Checked and clamped (`request.admit`).
            keys: Of the full blocks of its prompt.
            without: Live replicas that are not to be given it.

        Returns:
            The replica; None where the queue limits of all that can hold it leave no room.
        """
        able = self._able(request)
        if without:
            able = able.copy()
            able[[self._slot_of[replica_id] for replica_id in without]] = False
        if not able.any():
            return None
        levels = self.directory.match(keys)
        worth = self._worth(keys, levels)
        candidates = Candidates(
            worth,
            self._num_queued_tokens,
            self._num_seqs,
            self._num_pending_tokens,
            self._num_recent_tokens,
            self._last_turn,
        )
        if able.all():
            slot = self._choose(candidates)
        else:
            slots = able.nonzero()[0]
            slot = int(slots[self._choose(candidates.only(slots))])
        num_cached = next((depth for depth, slots in levels if slot in slots), 0)
        self._promise(slot, request, keys, num_cached)
        if levels:
            self._heat.note(keys[levels[-1][0] - 1])
        name = self._names[slot]
        assert name is not None, "only live ones are candidates"
        return name

    def note_prefilled(self, replica_id: ReplicaId, request_id: RequestId) -> None:
        """Take in that a request's prompt is computed."""
        slot = self._slot_of[replica_id]
        promise = self._promises[slot][request_id]
        self._dequeue(slot, promise)

    def adopt(
        self, replica_id: ReplicaId, request_id: RequestId, num_rows: int, num_tokens: int
    ) -> None:
        """Note what a live replica has promised to a request that was not placed from here."""
        slot = self._slot_of[replica_id]
        self._promises[slot][request_id] = Promise(num_rows, num_tokens, 0, ())
        self._num_seqs[slot] += num_rows
        self._num_pending_tokens[slot] += num_tokens

    def settle(self, replica_id: ReplicaId, request_id: RequestId) -> None:
        """Take back what was promised to a request that has ended."""
        slot = self._slot_of[replica_id]
        promise = self._promises[slot].pop(request_id)
        self._num_seqs[slot] -= promise.num_rows
        self._num_pending_tokens[slot] -= promise.num_tokens
        self._dequeue(slot, promise)

    def _dequeue(self, slot: int, promise: Promise) -> None:
        self._num_queued_tokens[slot] -= promise.num_queued_tokens
        self.directory.settle(slot, promise.expected)
        promise.num_queued_tokens, promise.expected = 0, ()

    def _promise(
        self, slot: int, request: Request, keys: Sequence[BlockKey], num_cached: int
    ) -> None:
        # The last token of a prompt is computed in any case.
        num_cached_tokens = num_cached * self._kinds[0].block_size
        num_to_compute = max(1, len(request.prompt_token_ids) - num_cached_tokens)
        expected = keys[num_cached:]
        self.directory.expect(slot, expected)
        promise = Promise(request.num_rows, request.num_promised_tokens, num_to_compute, expected)
        self._promises[slot][request.request_id] = promise
        self._num_seqs[slot] += promise.num_rows
        self._num_pending_tokens[slot] += promise.num_tokens
        self._num_queued_tokens[slot] += num_to_compute
        self._num_recent_tokens *= 1 - 1 / (_NUM_RECENT * len(self._slot_of))
        self._num_recent_tokens[slot] += num_to_compute + SEQUENCE_TOKENS * promise.num_rows
        self._last_turn[slot] = self._num_turns
        self._num_turns += 1

    def _worth(self, keys: Sequence[BlockKey], levels: Levels) -> FloatArray:
        """Return float64 [num_slots], what the tokens are worth that each replica holds.

        Args:
            keys: Of the request's prompt.
            levels: Which replicas hold how many of them.
        """
        worth = np.zeros(len(self._names))
        depths = [depth for depth, _slots in levels]
        heats = self._heat.up_to(keys, depths)
        block_size = self._kinds[0].block_size
        for (_depth, slots), blocks in zip(levels, worth_of_blocks(depths, heats), strict=True):
            worth[slots] = blocks * block_size
        return worth

    def shortest_queue(self, request: Request) -> tuple[int, int]:
        """Return the least that waits on a replica that can hold a request: sequences, tokens."""
        loads = self._queues(self._fits(request).nonzero()[0])
        least = loads.least_busy()
        return int(loads.num_waiting[least]), int(loads.num_pending_tokens[least])

    def _able(self, request: Request) -> BoolArray:
        """Return bool [num_slots], which replicas may take a request that `admit` let in."""
        able = self._fits(request)
        if not self._limits_queue or request.attempt:
            return able
        room = has_room(
            self._queues(),
            request.num_rows,
            request.num_promised_tokens,
            self._max_num_waiting,
            self._max_pending_tokens,
        )
        room &= able
        return room

    def _fits(self, request: Request) -> BoolArray:
        """Return bool [num_slots], which live replicas have the blocks for a request."""
        if len(self._kinds) == 1:
            # It was admitted by the limits of the largest.
            return self._is_live
        fits = [kind.num_usable_blocks >= request.num_blocks_needed(kind) for kind in self._kinds]
        able: BoolArray = np.array(fits)[self._kind] & self._is_live
        return able

    def _queues(self, slots: LongArray | slice = _ALL) -> QueueLoads:
        return QueueLoads(
            self._num_seqs[slots], self._max_num_seqs[slots], self._num_pending_tokens[slots]
        )
