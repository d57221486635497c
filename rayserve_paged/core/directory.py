"""Which replicas hold which keys, as their reports tell, or will once they have computed them."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.ids import BlockKey

Levels: TypeAlias = list[tuple[int, npt.NDArray[np.intp]]]
"""Numbers of leading keys, ascending, from 1, with the slots of those who hold so many."""

MAX_KEYS: Final = 4_000_000
"""About 1 GB."""


class Directory:
    """Cluster-wide map of block keys to the replicas that can match them.

    A replica is a slot, a small number, and a bit in the set of each key's holders: walking a
    prompt's keys over all replicas is one AND per key.

    Args:
        max_keys: Beyond so many, the tenth that was published or matched longest ago is forgotten;
            matches count while it is more than half full. A prompt is then placed as if nobody held
            what was forgotten, though its replica still finds it.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # In the order in which keys were published or matched.
        self._holders: dict[BlockKey, int] = {}
        self._expected: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def update(self, slot: int, published: Iterable[BlockKey], evicted: Iterable[BlockKey]) -> None:
        """Take in what one replica reports."""
        bit = 1 << slot
        holders = self._holders
        # Keys with one holder share one number, which is half of what an entry takes.
        fresh = dict.fromkeys(published, bit)
        if holders.keys().isdisjoint(fresh):
            holders.update(fresh)
        else:
            for key in fresh:
                held = holders.get(key)
                holders[key] = bit if held is None else held | bit
        for key in evicted:
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)
        if len(holders) > self._max_keys:
            # All at once: dicts have no cheap way to drop their first entry.
            num_dropped = len(holders) - self._max_keys * 9 // 10
            self._holders = dict(islice(holders.items(), num_dropped, None))

    def expect(self, slot: int, keys: Sequence[BlockKey]) -> None:
        """Count keys as held by a replica that was given a request with them."""
        bit, expected = 1 << slot, self._expected
        if expected.keys().isdisjoint(keys):
            expected.update(dict.fromkeys(keys, bit))
            return
        for key in keys:
            expected[key] = expected.get(key, 0) | bit

    def settle(self, slot: int, keys: Sequence[BlockKey]) -> None:
        """Take an expectation back: by now the keys are reported, or they will never be.

        Other requests of the same replica that wait for the same keys are settled with it.
        """
        others, expected = ~(1 << slot), self._expected
        for key in keys:
            left = expected.pop(key, 0) & others
            if left:
                expected[key] = left

    @property
    def num_expected(self) -> int:
        """Keys that some replica is expected to hold."""
        return len(self._expected)

    def held(self, slot: int) -> set[BlockKey]:
        """Return the keys that a replica holds, as it told."""
        return {key for key, slots in self._holders.items() if slots >> slot & 1}

    def expected(self, slot: int) -> set[BlockKey]:
        """Return the keys that a replica is expected to hold."""
        return {key for key, slots in self._expected.items() if slots >> slot & 1}

    def replace(self, slot: int, keys: Iterable[BlockKey]) -> None:
        """Take in all that a replica holds; what it is expected to hold stays."""
        self._holders = _without(self._holders, slot)
        self.update(slot, keys, ())

    def forget(self, slot: int) -> None:
        """Drop all that a replica held; whoever has its slot next starts with nothing."""
        self._holders = _without(self._holders, slot)
        self._expected = _without(self._expected, slot)

    def match(self, keys: Sequence[BlockKey]) -> Levels:
        """Return which replicas hold, or are to hold, how many leading keys and no more."""
        held, expected = self._holders.get, self._expected.get
        levels: Levels = []
        alive = -1
        for depth, key in enumerate(keys):
            left = (held(key, 0) | expected(key, 0)) & alive
            if left != alive:
                if depth:
                    levels.append((depth, _slots(alive & ~left)))
                alive = left
                if not left:
                    break
        else:
            if keys:
                levels.append((len(keys), _slots(alive)))
        if levels and len(self._holders) > self._max_keys // 2:
            self._touch(keys[: levels[-1][0]])
        return levels

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        holders = self._holders
        # The head last, so that it is kept longest: nothing behind a gap is found.
        for key in reversed(keys):
            if key in holders:
                holders[key] = holders.pop(key)


def _without(holders: dict[BlockKey, int], slot: int) -> dict[BlockKey, int]:
    others = ~(1 << slot)
    kept = ((key, held & others) for key, held in holders.items())
    return {key: held for key, held in kept if held}


def _slots(bits: int) -> npt.NDArray[np.intp]:
    """Return the slots whose bits are set, at least one."""
    if not bits & (bits - 1):
        return np.array([bits.bit_length() - 1])
    raw = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little").nonzero()[0]
