"""What the keys of a batcher's blocks must name, and what sequences must start on."""

from collections import Counter

from ledger_oracle import LedgerOracle, Sample, seen_positions
from slot_memory import SlotMemory

from rayserve_paged.core.attention_window import group_key
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.sequence import SequenceState


class FollowedKeys:
    """The keys that can be matched, as their changes tell.

    Args:
        kv: Whose keys.
        memory: What stands in the slots.
        oracle: What must stand there.
        events: Counts what came about.
    """

    def __init__(
        self, kv: KVManager, memory: SlotMemory, oracle: LedgerOracle, events: Counter[str]
    ) -> None:
        self.matchable: set[BlockKey] = set()
        # Tables that were open at the last reset.
        self.stale_tables: list[BlockTable] = []
        self.num_queried = self.num_hits = self.num_resumed = 0
        self._kv, self._memory, self._oracle = kv, memory, oracle
        self._events = events

    def follow_changes(self) -> set[BlockKey]:
        """Keep up with the keys that can be matched; return those that were lost just now."""
        published, evicted = self._kv.index.take_changes()
        assert not self.matchable & set(published)
        assert set(evicted) <= self.matchable
        self.matchable = (self.matchable | set(published)) - set(evicted)
        self._events["evicted"] += len(evicted)
        self._events["sealed"] += len(published)
        return set(evicted)

    def check_start(
        self,
        sequence: SequenceState,
        sample: Sample,
        num_found: int,
        evicted: set[BlockKey],
        *,
        is_exact: bool,
    ) -> None:
        """Compare what a sequence starts on with the longest run that may be matched.

        Args:
            sequence: It has just started or resumed.
            sample: What it is.
            num_found: Tokens that it need not compute.
            evicted: Keys that were lost in the plan that started it, before or after.
            is_exact: Whether it must have found all that it may.
        """
        size, num_known = self._kv.block_size, sequence.num_known
        depth = (num_known - 1) // size
        while depth and not self._can_start_on(sample, depth, evicted):
            depth -= 1
        if self._kv.partials is None:
            assert num_found <= depth * size, "more was matched than had been computed"
        assert num_found < num_known, "nothing is left to compute"
        if is_exact:
            num_partial = num_found - depth * size
            assert 0 <= num_partial < size, "less was matched than could have been"
            self._events["partly matched"] += num_partial > 0
        if sequence.num_preemptions or sequence.sibling:
            self._events["resumed"] += 1
            self.num_resumed += num_found
        else:
            self.num_queried += sample.num_prompt
            self.num_hits += num_found
            self._events["started"] += 1
        self._events["hit tokens"] += num_found

    def _can_start_on(self, sample: Sample, depth: int, evicted: set[BlockKey]) -> bool:
        """Return whether all that the token behind so many blocks sees can be matched."""
        size = self._kv.block_size
        num_tokens = depth * size
        for group, window in enumerate(sample.windows):
            # The token before it is kept in any case.
            seen = {*seen_positions(num_tokens + 1, window), num_tokens - 1}
            for place in {position // size for position in seen}:
                key = group_key(sample.keys[place], group)
                if key not in self.matchable and key not in evicted:
                    return False
        return True

    def check(self) -> None:
        """Compare each block that a key names with what was hashed into the key."""
        self.follow_changes()
        num_keys = 0
        for key, block_id in self._kv.index.items():
            assert key in self.matchable
            assert self._memory.block(BlockId(block_id)) == self._oracle.slots_of(key)
            num_keys += 1
        assert num_keys == len(self.matchable)
        for table in self.stale_tables:
            assert not any(self._kv.index.key_of(block_id) for block_id in table.block_ids)

    def check_partly_filled(self) -> None:
        """Compare the slots that can be copied with what is said of them."""
        if self._kv.partials is None:
            return
        for block_id, content in self._kv.partials.items():
            parent, group = self._oracle.group_of.get(content.parent, (content.parent, 0))
            history = self._oracle.content[parent][-1]
            for offset, token_id in enumerate(content.token_ids):
                history = self._oracle.histories.after(history, token_id)
                slot = history * self._kv.num_layer_groups + group
                assert self._memory.block(block_id)[offset] == slot
