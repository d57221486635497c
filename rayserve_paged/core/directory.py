"""Which replicas hold which keys, as their reports tell."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.ids import BlockKey


class Directory:
    """Cluster-wide map of block keys to the replicas that can match them.

    A replica is a slot, a small number, and a bit in the set of each key's holders: walking a
    prompt's keys over all replicas is one AND per key.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def update(self, slot: int, published: Iterable[BlockKey], evicted: Iterable[BlockKey]) -> None:
        """Take in what one replica reports."""
        bit = 1 << slot
        holders = self._holders
        for key in published:
            held = holders.get(key)
            # Keys with one holder share one number, which is half of what an entry takes.
            holders[key] = bit if held is None else held | bit
        for key in evicted:
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def forget(self, slot: int) -> None:
        """Drop all that a replica held; whoever has its slot next starts with nothing."""
        others = ~(1 << slot)
        kept = ((key, held & others) for key, held in self._holders.items())
        self._holders = {key: held for key, held in kept if held}

    def match(self, keys: Sequence[BlockKey], num_slots: int) -> npt.NDArray[np.int64]:
        """Return int64 [num_slots], how many leading keys each replica holds."""
        depths = np.zeros(num_slots, np.int64)
        holders = self._holders
        alive = holders.get(keys[0], 0) if keys else 0
        depth = 1
        while alive:
            held = alive & holders.get(keys[depth], 0) if depth < len(keys) else 0
            if held != alive:
                depths[_slots(alive & ~held, num_slots)] = depth
                alive = held
            depth += 1
        return depths


def _slots(bits: int, num_slots: int) -> npt.NDArray[np.intp]:
    """Return the slots whose bits are set."""
    if not bits & (bits - 1):
        return np.array([bits.bit_length() - 1])
    raw = np.frombuffer(bits.to_bytes(-(-num_slots // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little"))
