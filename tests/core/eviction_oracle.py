"""Eviction by value, block by block and without an index: every eviction looks at every block."""

import dataclasses
import math
from collections.abc import Callable, Sequence


@dataclasses.dataclass(eq=False)
class Run:
    level: int
    stamp: int
    num_gone: int = 0


@dataclasses.dataclass
class Entry:
    run: Run
    # Place among all that came in: tails first.
    place: tuple[int, int]
    before: int | None


class EvictionOracle:
    def __init__(self, num_blocks: int, fingerprint_of: Callable[[int], int]) -> None:
        self.num_blocks = num_blocks
        self.fingerprint_of = fingerprint_of
        self.entries: dict[int, Entry] = {}
        self.uses = dict.fromkeys(range(num_blocks), 0)
        self.ghosts: dict[int, tuple[int, int, int, int]] = {}
        self.ages: list[int] = []
        self.clock = 0
        self.num_releases = 0

    def order(self) -> list[int]:
        last = sorted(self.ages[-32:])
        scale = last[len(last) // 4] if last else 0

        def key(block_id: int) -> tuple[float, int, tuple[int, int]]:
            run = self.entries[block_id].run
            cost = (self.clock - run.stamp + scale) * (1 / math.sqrt(run.level + 1))
            return (-cost, run.level, self.entries[block_id].place)

        return sorted(self.entries, key=key)

    def used(self, block_ids: Sequence[int]) -> None:
        noted = set()
        for block_id in block_ids:
            entry = self.entries.get(block_id)
            if not self.uses[block_id] and entry is not None and id(entry.run) not in noted:
                noted.add(id(entry.run))
                self.ages.append(self.clock - entry.run.stamp)
            self.uses[block_id] = min(7, self.uses[block_id] + 1)

    def taken(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            entry = self.entries.pop(block_id)
            head, before = dataclasses.replace(entry.run, num_gone=0), entry.before
            while before in self.entries and self.entries[before].run is entry.run:
                self.entries[before].run = head
                before = self.entries[before].before

    def released(self, block_ids: Sequence[int], parent: int | None) -> None:
        self.clock += len(block_ids)
        self.num_releases += 1
        chain = [parent, *block_ids]
        self.recall(block_ids, chain)
        run = None
        for index, block_id in enumerate(block_ids):
            is_head = run is None or self.uses[block_id] != run.level
            if run is None or is_head:
                run = Run(self.uses[block_id], self.clock)
            place = (self.num_releases, len(block_ids) - index)
            self.entries[block_id] = Entry(run, place, None if is_head else chain[index])

    def recall(self, block_ids: Sequence[int], chain: Sequence[int | None]) -> None:
        num_recalled = 0
        for index, block_id in enumerate(block_ids):
            if num_recalled or self.uses[block_id]:
                num_recalled = max(0, num_recalled - 1)
                continue
            slot = self.fingerprint_of(block_id) % self.num_blocks
            if slot not in self.ghosts or self.ghosts[slot][0] != self.fingerprint_of(block_id):
                return
            _, level, num_gone, stamp = self.ghosts.pop(slot)
            if not level:
                self.ages.append(self.clock - stamp)
            before = chain[index]
            level = min(7, level + 1, 7 if before is None else self.uses[before])
            for each in block_ids[index : index + num_gone]:
                self.uses[each] = level
            num_recalled = num_gone - 1

    def evict(self, num_blocks: int) -> list[int]:
        evicted = []
        for _ in range(num_blocks):
            block_id = self.order()[0]
            run = self.entries.pop(block_id).run
            run.num_gone += 1
            self.uses[block_id] = 0
            if all(entry.run is not run for entry in self.entries.values()):
                fingerprint = self.fingerprint_of(block_id)
                ghost = (fingerprint, run.level, run.num_gone, run.stamp)
                self.ghosts[fingerprint % self.num_blocks] = ghost
            evicted.append(block_id)
        return evicted

    def forget(self, block_id: int) -> None:
        if block_id in self.entries:
            self.taken([block_id])
        self.uses[block_id] = 0
