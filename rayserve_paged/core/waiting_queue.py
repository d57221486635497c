"""Sequences without a row, and which of them starts next.

The orders are the key functions of `policy`. Some keys never change while a sequence waits, some
do: a tenant is served, a prefix is computed or evicted. Each kind has its own way to find the
smallest key without asking every sequence.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, assert_never

from rayserve_paged.core import policy
from rayserve_paged.core.config import QueuePolicy
from rayserve_paged.core.fair_share import FairShare, Tenant
from rayserve_paged.core.ids import BlockKey
from rayserve_paged.core.keyed_heap import KeyedHeap
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.policy import OrderKey, WaitingRequest
from rayserve_paged.core.sequence import SequenceState


class WaitingOrder(Protocol):
    """Finds the waiting sequence with the smallest key."""

    def key(self, sequence: SequenceState) -> OrderKey:
        """Return the key of a waiting sequence as of now."""
        ...

    def add(self, sequence: SequenceState) -> None:
        """Let a sequence wait."""
        ...

    def remove(self, sequence: SequenceState) -> None:
        """Let a sequence wait no more."""
        ...

    def first(self) -> SequenceState | None:
        """Return the one with the smallest key; None where none waits."""
        ...

    @property
    def num_entries(self) -> int:
        """Entries kept, those of sequences that have gone included."""
        ...


class WaitingQueue:
    """The waiting sequences of one replica.

    Args:
        kv: Where cached prefixes are found.
        policy_name: Of the order.
        oldest_every: One in so many starts is the oldest's; None for the policy's own bound.
        tenant_weights: For "weighted-fair".
    """

    def __init__(
        self,
        kv: KVManager,
        policy_name: QueuePolicy = "priority",
        oldest_every: int | None = None,
        tenant_weights: Mapping[Tenant, float] | None = None,
    ) -> None:
        self._keeps_priority = policy_name == "priority"
        self._oldest_every = oldest_every or policy.OLDEST_EVERY[policy_name]
        self._fair: _FairOrder | None = None
        self._order: WaitingOrder
        match policy_name:
            case "fcfs" | "priority" | "shortest-remaining":
                self._order = _FixedOrder(policy.WAITING_KEYS[policy_name])
            case "longest-prefix-first":
                self._order = _PrefixOrder(kv)
            case "weighted-fair":
                self._order = self._fair = _FairOrder(tenant_weights or {})
            case _:
                assert_never(policy_name)
        self._by_age: KeyedHeap[SequenceState] = KeyedHeap()
        self._num_passed = 0

    def __len__(self) -> int:
        return len(self._by_age)

    @property
    def num_entries(self) -> int:
        """Entries of the larger heap: at most twice the sequences and a few."""
        return max(self._by_age.num_entries, self._order.num_entries)

    @property
    def in_order(self) -> tuple[SequenceState, ...]:
        """Waiting sequences, by their keys as of now."""
        return tuple(sorted(self._by_age, key=self._order.key))

    @property
    def is_turn_of_oldest(self) -> bool:
        """Whether the next to start is the oldest, whatever the order says."""
        return policy.is_turn_of_oldest(self._num_passed, self._oldest_every)

    def add(self, sequence: SequenceState) -> None:
        """Let a sequence wait."""
        if not self._keeps_priority:
            sequence.priority = 0
        self._by_age.put(sequence, (sequence.arrival, sequence.sibling))
        self._order.add(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Let a sequence wait no more, although it has not started."""
        self._by_age.remove(sequence)
        self._order.remove(sequence)

    def first(self) -> SequenceState | None:
        """Return the one that starts next; None where none waits."""
        return self._by_age.first() if self.is_turn_of_oldest else self._order.first()

    def start(self, sequence: SequenceState) -> None:
        """Take out the first, which starts."""
        favourite = self._order.first()
        assert favourite is not None, "nobody waits"
        # One whose turn came by age would start merely to give way to whom it was put before.
        sequence.priority = min(sequence.priority, favourite.priority)
        self._num_passed = 0 if sequence is self._by_age.first() else self._num_passed + 1
        self.remove(sequence)
        if self._fair is not None:
            self._fair.charge(sequence)

    def forgive(self, leader: SequenceState) -> None:
        """Note that a sample of a sequence will never be born, so that less is left to do."""
        if self._fair is not None:
            self._fair.refund(leader, leader.max_known - leader.num_known)
        elif isinstance(self._order, _FixedOrder) and leader in self._by_age:
            self._order.add(leader)

    def settle(self, sequence: SequenceState) -> None:
        """Note that a sequence that had started has ended."""
        if self._fair is not None:
            self._fair.refund(sequence, sequence.num_promised_outputs)


def _snapshot(
    sequence: SequenceState, *, num_cached_blocks: int = 0, tenant_served: float = 0.0
) -> WaitingRequest:
    num_remaining = sequence.num_promised_outputs
    if sequence.num_cached_tokens is None:
        # Of one that was preempted the cache still has most.
        num_remaining += sequence.num_prompt
    return WaitingRequest(
        priority=sequence.priority,
        arrival=sequence.arrival,
        sibling=sequence.sibling,
        num_remaining_tokens=num_remaining,
        num_cached_blocks=num_cached_blocks,
        tenant_served=tenant_served,
    )


class _FixedOrder:
    """Keys that change while a sequence waits only where it is added again."""

    def __init__(self, key_of: Callable[[WaitingRequest], OrderKey]) -> None:
        self._key_of = key_of
        self._heap: KeyedHeap[SequenceState] = KeyedHeap()

    def key(self, sequence: SequenceState) -> OrderKey:
        return self._key_of(_snapshot(sequence))

    def add(self, sequence: SequenceState) -> None:
        self._heap.put(sequence, self.key(sequence))

    def remove(self, sequence: SequenceState) -> None:
        self._heap.remove(sequence)

    def first(self) -> SequenceState | None:
        return self._heap.first()

    @property
    def num_entries(self) -> int:
        return self._heap.num_entries


class _FairOrder:
    """By tenant: those of one tenant wait in the order of arrival, and tenants by what they got."""

    def __init__(self, weights: Mapping[Tenant, float]) -> None:
        self._share = FairShare(weights)
        self._lanes: dict[Tenant, KeyedHeap[SequenceState]] = {}
        # By the key of the first in each lane.
        self._tenants: KeyedHeap[Tenant] = KeyedHeap()

    def key(self, sequence: SequenceState) -> OrderKey:
        served = self._share.served(sequence.tenant)
        return policy.weighted_fair_key(_snapshot(sequence, tenant_served=served))

    def add(self, sequence: SequenceState) -> None:
        tenant = sequence.tenant
        lane = self._lanes.get(tenant)
        if lane is None:
            least = self._tenants.first()
            level = None if least is None else self._share.served(least)
            self._share.come_back(tenant, self._lanes, level)
            lane = self._lanes[tenant] = KeyedHeap()
        lane.put(sequence, (sequence.arrival, sequence.sibling))
        self._place(tenant)

    def remove(self, sequence: SequenceState) -> None:
        lane = self._lanes.get(sequence.tenant)
        if lane is not None:
            lane.remove(sequence)
            self._place(sequence.tenant)

    def first(self) -> SequenceState | None:
        tenant = self._tenants.first()
        return None if tenant is None else self._lanes[tenant].first()

    @property
    def num_entries(self) -> int:
        # Of the largest heap: each lane has one of its own.
        lanes = max((lane.num_entries for lane in self._lanes.values()), default=0)
        return max(lanes, self._tenants.num_entries)

    def charge(self, sequence: SequenceState) -> None:
        """Charge the tenant of a sequence that starts, and not of one that resumes."""
        if sequence.num_cached_tokens is None:
            num_tokens = sequence.num_prompt + sequence.num_promised_outputs
            self._share.charge(sequence.tenant, num_tokens)
            self._place(sequence.tenant)

    def refund(self, sequence: SequenceState, num_tokens: int) -> None:
        """Give back what a sequence will not take; one that never started was not charged."""
        if sequence.num_cached_tokens is not None:
            self._share.refund(sequence.tenant, num_tokens)
            self._place(sequence.tenant)

    def _place(self, tenant: Tenant) -> None:
        lane = self._lanes.get(tenant)
        if lane is None:
            return
        first = lane.first()
        if first is None:
            del self._lanes[tenant]
            self._tenants.remove(tenant)
        else:
            self._tenants.put(tenant, self.key(first))


class _PrefixOrder:
    """By cached prefix: whoever waits for a block's key is looked at when it is published.

    What is evicted is noticed when it matters: when its sequence comes up first.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._heap: KeyedHeap[SequenceState] = KeyedHeap()
        self._num_matched: dict[SequenceState, int] = {}
        # By the first key that each lacks, where one of its full blocks is not cached.
        self._lacking: dict[BlockKey, dict[SequenceState, None]] = {}
        self._num_published = kv.index.num_published

    def key(self, sequence: SequenceState) -> OrderKey:
        return self._key(sequence, self._match(sequence))

    def _key(self, sequence: SequenceState, num_matched: int) -> OrderKey:
        return policy.longest_prefix_key(_snapshot(sequence, num_cached_blocks=num_matched))

    def _match(self, sequence: SequenceState) -> int:
        # Without its holes where there is a window: a key that is published ends the run, or not.
        return len(self._kv.match(sequence.keys, sequence.num_matchable))

    def add(self, sequence: SequenceState) -> None:
        num_matched = self._num_matched[sequence] = self._match(sequence)
        self._heap.put(sequence, self._key(sequence, num_matched))
        if num_matched < len(sequence.keys):
            self._lacking.setdefault(sequence.keys[num_matched], {})[sequence] = None

    def remove(self, sequence: SequenceState) -> None:
        num_matched = self._num_matched.pop(sequence, None)
        if num_matched is None:
            return
        self._heap.remove(sequence)
        if num_matched < len(sequence.keys):
            key = sequence.keys[num_matched]
            del self._lacking[key][sequence]
            if not self._lacking[key]:
                del self._lacking[key]

    def first(self) -> SequenceState | None:
        self._notice_published()
        while (sequence := self._heap.first()) is not None:
            if self._match(sequence) == self._num_matched[sequence]:
                break
            self._look_again(sequence)
        return sequence

    def _notice_published(self) -> None:
        index = self._kv.index
        if self._num_published == index.num_published:
            return
        self._num_published = index.num_published
        for key in [key for key in self._lacking if key in index]:
            for sequence in list(self._lacking[key]):
                self._look_again(sequence)

    def _look_again(self, sequence: SequenceState) -> None:
        self.remove(sequence)
        self.add(sequence)

    @property
    def num_entries(self) -> int:
        return self._heap.num_entries
