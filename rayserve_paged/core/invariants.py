"""Recomputes every figure of the ledger from its holders and compares; runs after every step."""

from collections import Counter
from collections.abc import Iterable
from typing import cast

from rayserve_paged.core.attention_window import group_key
from rayserve_paged.core.batcher import Batcher
from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.block_identity import extend_chain
from rayserve_paged.core.block_pool import BlockPool, BlockState
from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.keyed_heap import MAX_ENTRIES_PER_ITEM, MAX_SPARE_ENTRIES
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.partial_index import BlockContent
from rayserve_paged.core.prefix_index import PrefixIndex
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.retention import DEFAULT_PRIORITY
from rayserve_paged.core.sequence import Phase, SequenceState

Sequences = tuple[SequenceState, ...]


def _require(condition: bool, message: str, *values: object) -> None:
    # What runs after every step makes a message only where something is wrong.
    if not condition:
        raise LedgerError(message.format(*values))


class PoolView:
    """What a pool says of all its blocks, read once.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        # Ids are made one by one only where something is wrong.
        self.block_ids = cast("Iterable[BlockId]", range(pool.num_blocks))
        self.free_ids = pool.free_ids
        # The next to be evicted first.
        self.cached_ids = pool.cached_ids
        self.frozen_ids = {block_id for block_id in self.block_ids if pool.is_frozen(block_id)}


def check_pool(
    view: PoolView,
    holders: Iterable[Iterable[BlockId]],
    copy_sources: Iterable[Iterable[BlockId]] = (),
) -> None:
    """Check that a pool agrees with those who hold its blocks.

    Args:
        view: The pool.
        holders: The blocks that each sequence lists, which may list a block once.
        copy_sources: The blocks that each step in flight holds, once for each copy.

    Raises:
        LedgerError: The first disagreement.
    """
    pool = view.pool
    num_holders: Counter[BlockId] = Counter()
    for listed in map(list, holders):
        _require(len(set(listed)) == len(listed), "a holder lists a block twice: {}", listed)
        num_holders.update(listed)
    for sources in copy_sources:
        num_holders.update(sources)
    counts = {each: count for each in view.block_ids if (count := pool.count(each))}
    if counts != dict(num_holders):
        for block_id in sorted({*counts, *num_holders}):
            count, expected = counts.get(block_id, 0), num_holders[block_id]
            _require(
                count == expected, "block {} has count {} and {} holders", block_id, count, expected
            )
    states = dict.fromkeys(view.free_ids, BlockState.FREE)
    states |= dict.fromkeys(view.cached_ids, BlockState.CACHED)
    unheld = (*view.free_ids, *view.cached_ids)
    _require(len(states) == len(unheld), "a block is twice among those FREE or CACHED: {}", unheld)
    for block_id in view.block_ids:
        state, expected_state = pool.state(block_id), states.get(block_id, BlockState.HELD)
        _require(
            state is expected_state, "block {} is {} and not {}", block_id, state, expected_state
        )
    numbers = pool.num_free, pool.num_held, pool.num_cached
    expected_numbers = len(view.free_ids), len(counts), len(view.cached_ids)
    _require(
        numbers == expected_numbers,
        "{} blocks are FREE, HELD and CACHED, and {} are said to be",
        expected_numbers,
        numbers,
    )


def check_index(view: PoolView, index: PrefixIndex) -> None:
    """Check that keys and blocks agree both ways, and that only sealed blocks have keys."""
    block_of = dict(index.items())
    keyed = set(block_of.values())
    for key, block_id in block_of.items():
        _require(index.key_of(block_id) == key, "block {} and its key disagree", block_id)
        is_sealed = view.pool.is_sealed(block_id)
        _require(is_sealed, "block {} has a key and is not sealed", block_id)
    _require(len(keyed) == len(index), "two keys name one block")
    unknown = set(view.cached_ids) - keyed - view.frozen_ids
    _require(not unknown, "blocks are CACHED, have no key and are not frozen: {}", unknown)


def check_partials(
    view: PoolView, kv: KVManager, copy_sources: Iterable[Iterable[BlockId]] = ()
) -> None:
    """Check that blocks whose slots can be copied are sealed or frozen, and found both ways.

    Args:
        view: The manager's pool.
        kv: The manager.
        copy_sources: The blocks that each step in flight holds, once for each copy.

    Raises:
        LedgerError: The first disagreement.
    """
    partials, frozen_ids = kv.partials, view.frozen_ids
    if partials is None:
        _require(not frozen_ids, "blocks are frozen without partial reuse")
        return
    sources = Counter(block_id for block_ids in copy_sources for block_id in block_ids)
    contents = dict(partials.items())
    _require(frozen_ids <= contents.keys(), "a frozen block cannot be found")
    parents = {content.parent for content in contents.values()}
    _require(len(parents) == partials.num_parents, "a parent is kept without what is behind it")
    for block_id, content in contents.items():
        _require(block_id in partials, "block {} is found and not noted", block_id)
        num_tokens = len(content.token_ids)
        _require(
            partials.find(content) == (block_id, num_tokens),
            "block {} is not what is found for what it holds",
            block_id,
        )
        key = kv.index.key_of(block_id)
        if block_id in frozen_ids:
            _require(key is None, "block {} is frozen and has a key", block_id)
            _require(0 < num_tokens < kv.block_size, "block {} is frozen and full", block_id)
            held = view.pool.count(block_id)
            _require(held == sources[block_id], "block {} is frozen and in a table", block_id)
        else:
            _require(key is not None, "block {} can be copied and is not kept", block_id)
            _require(
                num_tokens < kv.block_size or _is_key_of(key, content, kv),
                "block {} has other tokens than its key",
                block_id,
            )


def _is_key_of(key: BlockKey | None, content: BlockContent, kv: KVManager) -> bool:
    """Return whether a full block of one of the layer groups has this key."""
    for group in range(kv.num_layer_groups):
        # What names a group's block of a key of the chain leads back from there as well.
        parent = group_key(content.parent, group)
        (chain_key,) = extend_chain(parent, content.token_ids, kv.block_size)
        if group_key(chain_key, group) == key:
            return True
    return False


def check_retention(view: PoolView, kv: KVManager) -> None:
    """Check that blocks have the priorities that are asked for, and that none is kept of others.

    Raises:
        LedgerError: The first disagreement.
    """
    pool, asked = view.pool, dict(kv.retention.items())
    priorities = {each: pool.priority(each) for each in view.block_ids}
    expected = dict.fromkeys(view.block_ids, DEFAULT_PRIORITY)
    for block_id, steps in asked.items():
        _require(bool(steps), "nothing is kept of block {}", block_id)
        expected[block_id] = steps[0][1]
        _require(pool.is_sealed(block_id), "block {} is kept unsealed", block_id)
        ends = [until for until, _priority in steps]
        _require(ends == sorted(set(ends)), "steps of block {} have no order: {}", block_id, steps)
        _require(ends[0] > kv.retention.now, "block {} is kept for too long", block_id)
    _require(priorities == expected, "blocks have priorities {}, not {}", priorities, expected)
    order = [priorities[each] for each in view.cached_ids if each not in view.frozen_ids]
    _require(order == sorted(order), "a higher priority goes before a lower one: {}", order)


def check(replica: Replica) -> None:
    """Check a replica: its pool, its index, its sequences and the step in flight.

    Raises:
        LedgerError: The first invariant that does not hold.
    """
    batcher, kv = replica.batcher, replica.kv
    running, retiring, sequences = batcher.running, batcher.retiring, replica.sequences
    tables = [sequence.table.block_ids for sequence in (*running, *retiring)]
    pins, sources = list(replica.pins.blocks), batcher.copy_sources
    view = PoolView(kv.pool)
    check_pool(view, [*tables, *pins], sources)
    pinned = {block_id for block_ids in pins for block_id in block_ids}
    _require(len(pinned) == replica.pins.num_blocks, "the count of pinned blocks is wrong")
    most = replica.limits.max_pinned_blocks
    _require(len(pinned) <= most, "{} blocks are pinned, and {} may be", len(pinned), most)
    check_index(view, kv.index)
    check_partials(view, kv, sources)
    check_retention(view, kv)
    for block_id in kv.duplicates:
        _require(kv.pool.count(block_id) > 0, "duplicate {} is not HELD", block_id)
        _require(not kv.pool.is_sealed(block_id), "duplicate {} is sealed", block_id)
    _check_rows(batcher, running, retiring)
    _check_queue(batcher, running)
    for sequence in running:
        _check_running(replica, sequence)
    _check_prefix_waits(batcher, running)
    searches = {sequence.beam for sequence in sequences if sequence.beam is not None}
    for search in searches:
        _check_beams(batcher, search, running, sequences)
    reserved = sum(sequence.num_unborn for sequence in running)
    reserved += sum(search.num_reserved_rows for search in searches)
    _require(batcher.num_reserved_rows == reserved, "rows are reserved for nobody")


def _check_rows(batcher: Batcher, running: Sequences, retiring: Sequences) -> None:
    rows = [sequence.row for sequence in (*running, *retiring)]
    _require(None not in rows and len(set(rows)) == len(rows), "rows overlap: {}", rows)
    order = [sequence.order_key() for sequence in running]
    _require(order == sorted(order), "running sequences are out of order")
    for sequence in retiring:
        _require(sequence.phase is Phase.ENDED, "a sequence that retires has not ended")
    if not batcher.in_flight:
        _require(not retiring, "a sequence retires and no step is in flight")
    for plan in batcher.in_flight:
        _require(set(plan.rows.tolist()) <= set(rows), "a step is not a subset of the running")
        total, most = sum(plan.num_tokens.tolist()), batcher.max_num_batched_tokens
        _require(total <= most, "a step of {} tokens is over budget", total)
        _require(len(plan.token_ids) == total, "a step's tokens do not add up")


def _check_prefix_waits(batcher: Batcher, running: Sequences) -> None:
    waits = batcher.prefix_waits
    computing = set()
    for key, sequence in waits.computing():
        next_key = sequence.keys[sequence.num_sealed]
        _require(key == next_key, "the block that a sequence computes next is another one")
        computing.add(sequence)
    _require(computing <= set(running), "a sequence that does not run computes a block")
    behind = {
        sequence
        for sequence in running
        if sequence.num_sealed < len(sequence.keys) and batcher.kv.is_current(sequence.table)
    }
    known = behind if waits.max_wait_steps else set()
    _require(computing == known, "not all blocks that are being computed are known")
    waited_for = {sequence for _target, sequence, _waiter in waits.waits()}
    _require(waits.num_waited_for == len(waited_for), "nobody waits for one that is waited for")
    for target, sequence, waiter in waits.waits():
        _require(sequence in computing, "a sequence waits for one that computes nothing")
        _require(target > sequence.num_sealed, "a sequence waits for a block that is sealed")
        same = sequence.keys[target - 1] == waiter.keys[target - 1]
        _require(same, "a sequence waits for a block of another chain")


def _check_beams(
    batcher: Batcher, search: BeamGroup, running: Sequences, listed: Sequences
) -> None:
    sequences, width = search.sequences, search.rules.width
    _require(search.finish is None, "a search that has ended is still listed")
    _require(0 < len(sequences) <= width, "{} beams in a search of {}", len(sequences), width)
    siblings = {sequence.sibling for sequence in sequences}
    _require(siblings <= set(range(width)), "beams are numbered {}", siblings)
    _require(len(siblings) == len(sequences), "two beams have one number")
    _require(set(sequences) <= set(listed), "a beam is not listed")
    outputs = {sequence.tokens.tobytes() for sequence in running if sequence.beam is search}
    in_rows = [sequence for sequence in sequences if sequence.row is not None]
    _require(len(outputs) == len(in_rows), "two beams have the same tokens")
    _require(len({sequence.num_known for sequence in sequences}) == 1, "beams are not level")
    totals = [beam.cumulative for beam in search.beams]
    _require(totals == sorted(totals, reverse=True), "the best beam is not the first")
    _require(
        all(len(beam.logprobs) == beam.sequence.num_outputs for beam in search.beams),
        "a beam has a token without its log-probability",
    )
    waiting = [entry.beam.sequence for entry in search.entries]
    whole = [sequence for sequence in sequences if sequence not in waiting]
    _require(not in_rows or in_rows == whole, "a search has started in part")
    for entry in search.entries:
        _require(entry.source in search.beams, "a beam waits for one that is gone")
    missing = width - len(in_rows) if in_rows else 0
    _require(search.num_reserved_rows == missing, "not {} rows of a search are reserved", missing)
    for beam in search.beams:
        if beam.candidates is not None:
            computed = batcher.num_computed(beam.sequence)
            _require(computed == beam.sequence.num_known, "a proposal has outrun its beam")


def _check_running(replica: Replica, sequence: SequenceState) -> None:
    batcher, block_size = replica.batcher, replica.limits.block_size
    _require(sequence.phase is Phase.RUNNING, "a scheduled sequence is not RUNNING")
    computed, held = batcher.num_computed(sequence), batcher.num_held_tokens(sequence)
    _require(computed <= held, "computed and held are out of order")
    ahead = sum(plan.num_steps for plan in batcher.in_flight)
    _require(held <= sequence.num_known + ahead, "held and known are out of order")
    for window, group in zip(sequence.windows, sequence.table.groups, strict=True):
        unread = window.num_unread_blocks(computed, block_size)
        _require(
            group.num_trimmed == unread,
            "a layer group of {} trimmed {} blocks at {} tokens",
            window,
            group.num_trimmed,
            computed,
        )
        _require(
            group.num_places == sequence.table.num_places, "layer groups differ in their places"
        )
    waste = sequence.table.num_slots - held
    _require(0 <= waste < block_size, "a sequence wastes {} slots of a tail block", waste)
    _require(sequence.num_sealed == computed // block_size, "a full computed block is not sealed")
    _require(sequence.num_known <= sequence.max_known, "a sequence is longer than allowed")
    scores = sequence.scores
    if scores is None:
        _require(not batcher.is_scoring(sequence), "a prompt is scored that nobody asked for")
    else:
        wanted = scores.num_wanted
        _require(scores.num_done >= min(computed, wanted), "a prompt token was not scored")
        is_left = max(held, scores.num_done) < wanted
        _require(batcher.is_scoring(sequence) == is_left, "what is left to score is not known")


def _check_queue(batcher: Batcher, running: Sequences) -> None:
    queue, waiting = batcher.queue, batcher.waiting
    _require(len(waiting) == batcher.num_waiting, "the waiting count is wrong")
    for sequence in waiting:
        _require(not sequence.table.block_ids, "a waiting sequence holds blocks")
    # Behind the queue are those that wait for a prefix.
    in_order = waiting[: len(queue)]
    for sequence in (*in_order, *running):
        if sequence.withdrawn:
            siblings = set(range(sequence.num_unborn + 1))
            _require(sequence.withdrawn < siblings, "all samples of a sequence are withdrawn")
    if queue.is_turn_of_oldest:
        in_order = tuple(sorted(in_order, key=lambda each: (each.arrival, each.sibling)))
    first = in_order[0] if in_order else None
    _require(queue.first() is first, "not the first in order starts next")
    limit = MAX_ENTRIES_PER_ITEM * len(queue) + MAX_SPARE_ENTRIES
    _require(queue.num_entries <= limit, "{} entries for {} waiting", queue.num_entries, len(queue))
