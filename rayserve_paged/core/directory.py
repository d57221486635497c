"""Which replicas hold which keys, as their reports tell; tied to a replica's incarnation."""

from collections.abc import Iterable, Sequence

from rayserve_paged.core.ids import BlockKey, ReplicaId


class Directory:
    """Cluster-wide map of block keys to the replicas that can match them.

    Each replica has a bit, so that walking a prompt's keys over all replicas is one AND per key.
    """

    def __init__(self) -> None:
        self._bit_of: dict[ReplicaId, int] = {}
        self._holders: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def update(
        self,
        replica_id: ReplicaId,
        published: Iterable[BlockKey],
        evicted: Iterable[BlockKey],
    ) -> None:
        """Take in what one replica reports."""
        bit = self._bit(replica_id)
        holders = self._holders
        for key in published:
            holders[key] = holders.get(key, 0) | bit
        for key in evicted:
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def forget(self, replica_id: ReplicaId) -> None:
        """Drop all that a replica held; its next incarnation starts with nothing."""
        bit = self._bit_of.pop(replica_id, 0)
        kept = ((key, held & ~bit) for key, held in self._holders.items())
        self._holders = {key: held for key, held in kept if held}

    def match(self, keys: Sequence[BlockKey]) -> dict[ReplicaId, int]:
        """Return how many leading keys each replica holds; replicas that hold none are left out."""
        lengths: dict[ReplicaId, int] = {}
        alive = sum(self._bit_of.values())
        depth = 0
        for key in keys:
            held = self._holders.get(key, 0) & alive
            if held != alive:
                self._note(alive & ~held, depth, lengths)
                alive = held
            if not alive:
                break
            depth += 1
        self._note(alive, depth, lengths)
        return lengths

    def _note(self, bits: int, depth: int, lengths: dict[ReplicaId, int]) -> None:
        if bits and depth:
            for replica_id, bit in self._bit_of.items():
                if bits & bit:
                    lengths[replica_id] = depth

    def _bit(self, replica_id: ReplicaId) -> int:
        bit = self._bit_of.get(replica_id)
        if bit is None:
            # The lowest bit that nobody has: bits of dead replicas are used again.
            taken = sum(self._bit_of.values())
            bit = ~taken & (taken + 1)
            self._bit_of[replica_id] = bit
        return bit
