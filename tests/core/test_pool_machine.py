"""Pool, index, manager and tables against plain lists of tokens and a memory of slots."""

import dataclasses
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replica_driver import make_scope

from rayserve_paged.core import invariants
from rayserve_paged.core.accounting import account
from rayserve_paged.core.block_identity import extend_chain
from rayserve_paged.core.block_pool import BlockPool, BlockState
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.kv_manager import KVManager

STORIES = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0])


@dataclasses.dataclass(eq=False)
class Writer:
    """A sequence whose tokens are written in order."""

    story: list[int]
    keys: list[BlockKey]
    table: BlockTable
    num_written: int
    num_sealed: int


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.writers: list[Writer] = []

    @initialize(
        num_blocks=st.sampled_from([6, 4, 8, 3, 1]), block_size=st.sampled_from([2, 1, 3, 4])
    )
    def start(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.kv = KVManager(self.pool, block_size)
        self.root = make_scope(block_size).root()
        self.memory: dict[int, tuple[int, int]] = {}
        # Keys that can be matched, as the changes tell; what must be CACHED.
        self.matchable: set[BlockKey] = set()
        self.cached: set[BlockId] = set()
        self.parents: dict[BlockKey, BlockKey] = {}
        self.discarded: set[BlockKey] = set()

    def held(self) -> set[BlockId]:
        return {block_id for writer in self.writers for block_id in writer.table.block_ids}

    def chain(self, story: list[int]) -> list[BlockKey]:
        keys = extend_chain(self.root, story, self.block_size)
        self.parents.update(pairwise([*reversed(keys), self.root]))
        return keys

    @rule(story=st.sampled_from(STORIES), num_tokens=st.integers(1, 12), resumes=st.booleans())
    def open(self, story: list[int], num_tokens: int, resumes: bool) -> None:
        keys = self.chain(story)
        matched = self.kv.match(keys, num_tokens)
        depth = 0
        while (depth + 1) * self.block_size < num_tokens and keys[depth] in self.matchable:
            depth += 1
        assert len(matched) == depth, "the longest run that leaves a token to compute"
        table = self.kv.open(matched, resumes=resumes)
        num_matched = depth * self.block_size
        self.cached -= set(matched)
        self.writers.append(Writer(story, keys, table, num_matched, depth))

    @precondition(lambda self: self.writers)
    @rule(pick=st.integers(0, 99), num_tokens=st.integers(1, 6))
    def write(self, pick: int, num_tokens: int) -> None:
        writer = self.writers[pick % len(self.writers)]
        if not self.owns_tail(writer):
            return
        end = min(writer.num_written + num_tokens, len(writer.story))
        num_missing = writer.table.num_missing(end)
        num_free = self.pool.num_free
        num_left = self.pool.num_blocks - len(self.held())
        before = list(writer.table.block_ids)
        evicted = list(self.pool.cached_ids[: max(0, num_missing - num_free)])
        granted = self.kv.grow(writer.table, end)
        if granted is None:
            assert num_missing > num_left
            assert writer.table.block_ids == before
            return
        assert len(granted) == num_missing <= num_left
        assert writer.table.block_ids == before + granted
        self.cached -= set(evicted)
        assert granted[num_missing - len(evicted) :] == evicted, "free first, then in order"
        for position in range(writer.num_written, end):
            self.memory[writer.table.slot(position)] = (writer.story[position], position)
        writer.num_written = end

    def owns_tail(self, writer: Writer) -> bool:
        """Copy the block that is written next where it is shared; False where none is left."""
        index, num_filled = divmod(writer.num_written, self.block_size)
        if not num_filled or self.pool.count(writer.table.block_ids[index]) == 1:
            return True
        num_free, num_left = self.pool.num_free, self.pool.num_blocks - len(self.held())
        before = list(writer.table.block_ids)
        evicted = [] if num_free else list(self.pool.cached_ids[:1])
        replaced = self.kv.replace(writer.table, index)
        if replaced is None:
            assert num_left == 0
            assert writer.table.block_ids == before
            return False
        old, new = replaced
        assert (before[index], writer.table.block_ids[index]) == (old, new)
        self.cached -= set(evicted)
        assert num_free or [new] == evicted, "free first, then in order"
        tables = [writer.table.block_ids for writer in self.writers]
        invariants.check_pool(invariants.PoolView(self.pool), tables, copy_sources=[[old]])
        for offset in range(num_filled):
            self.memory[new * self.block_size + offset] = self.memory[
                old * self.block_size + offset
            ]
        self.pool.release_each([old])
        return True

    @precondition(lambda self: self.writers)
    @rule(pick=st.integers(0, 99), tokens=st.sampled_from([20, 21]))
    def fork(self, pick: int, tokens: int) -> None:
        parent = self.writers[pick % len(self.writers)]
        num_written = parent.num_written
        story = parent.story[:num_written] + [tokens] * (len(parent.story) - num_written)
        table = self.kv.fork(parent.table)
        assert table.block_ids == parent.table.block_ids
        keys = self.chain(story)
        self.writers.append(Writer(story, keys, table, num_written, parent.num_sealed))

    @precondition(lambda self: self.writers)
    @rule(pick=st.integers(0, 99), as_run=st.booleans())
    def seal(self, pick: int, as_run: bool) -> None:
        writer = self.writers[pick % len(self.writers)]
        if not self.kv.is_current(writer.table):
            return
        first, end = writer.num_sealed, writer.num_written // self.block_size
        if as_run:
            self.kv.seal_run(writer.table.run(first, end), writer.keys[first:end])
        else:
            for index in range(first, end):
                self.kv.seal(writer.table.block_ids[index], writer.keys[index])
        writer.num_sealed = end

    @precondition(lambda self: self.writers)
    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        writer = self.writers.pop(pick % len(self.writers))
        known = [self.kv.index.key_of(block_id) for block_id in writer.table.block_ids]
        keys = {key for key in known if key is not None}
        if self.kv.is_current(writer.table):
            keys.update(writer.keys[: writer.num_sealed])
        else:
            assert not keys, "a block of before a reset can be found"
        self.kv.close(writer.table)
        assert writer.table.block_ids == []
        # Of equal blocks one stays, and what was sealed can be matched: whoever else computed it.
        blocks = [self.kv.index.block_of(key) for key in keys]
        assert None not in blocks
        self.cached |= {block_id for block_id in blocks if block_id is not None} - self.held()

    @precondition(lambda self: self.writers)
    @rule(pick=st.integers(0, 99))
    def discard(self, pick: int) -> None:
        writer = self.writers.pop(pick % len(self.writers))
        let_go = [b for b in writer.table.block_ids if b not in self.held()]
        self.discarded |= {key for b in let_go if (key := self.kv.index.key_of(b)) is not None}
        self.kv.discard(writer.table)
        assert all(self.pool.state(block_id) is BlockState.FREE for block_id in let_go)
        assert not any(self.kv.index.key_of(block_id) for block_id in let_go)

    @rule(luck=st.integers(0, 9))
    def reset(self, luck: int) -> None:
        if luck != 7:
            return
        held = self.held()
        self.kv.reset()
        assert not len(self.kv.index)
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        self.cached = set()

    @invariant()
    def the_ledger_agrees_with_its_holders(self) -> None:
        view = invariants.PoolView(self.pool)
        invariants.check_pool(view, [writer.table.block_ids for writer in self.writers])
        invariants.check_index(view, self.kv.index)
        assert set(self.pool.cached_ids) == self.cached
        assert all(self.pool.count(block_id) for block_id in self.kv.duplicates)
        published, evicted = self.kv.index.take_changes()
        assert not self.matchable & set(published)
        assert set(evicted) <= self.matchable
        self.matchable = (self.matchable | set(published)) - set(evicted)
        assert self.matchable == {key for key, _block_id in self.kv.index.items()}

    @invariant()
    def a_cached_block_leaves_before_what_precedes_it(self) -> None:
        cached = [self.kv.index.key_of(block_id) for block_id in self.pool.cached_ids]
        places = {key: place for place, key in enumerate(cached) if key is not None}
        for key, place in places.items():
            parent, ancestors = key, set()
            while (parent := self.parents[parent]) != self.root:
                ancestors.add(parent)
                if ancestors & self.discarded:
                    break
                assert parent in self.matchable, "a cached block without the one before it"
                assert places.get(parent, len(places)) > place

    @invariant()
    def every_writer_reads_back_what_it_wrote(self) -> None:
        for writer in self.writers:
            for position in range(writer.num_written):
                slot = writer.table.slot(position)
                assert self.memory[slot] == (writer.story[position], position)

    @invariant()
    def the_figures_add_up(self) -> None:
        holders = [(writer.table.block_ids, writer.num_written) for writer in self.writers]
        figures = account(holders, self.pool, self.block_size)
        live_slots = {
            writer.table.slot(position)
            for writer in self.writers
            for position in range(writer.num_written)
        }
        num_tokens = sum(writer.num_written for writer in self.writers)
        assert figures.unique_live_tokens == len(live_slots)
        assert figures.allocated_slots == len(self.held()) * self.block_size
        assert figures.internal_fragmentation_slots == figures.allocated_slots - len(live_slots)
        assert figures.prefix_sharing_saved_slots == num_tokens - len(live_slots)

    def teardown(self) -> None:
        if not self.writers:
            return
        for writer in self.writers:
            self.kv.close(writer.table)
        assert self.pool.num_held == 0
        assert self.pool.num_available == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
