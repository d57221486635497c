"""Recomputes every figure of the ledger from its holders and compares; runs after every step."""

from collections import Counter
from collections.abc import Iterable
from typing import cast

from rayserve_paged.core.batcher import Batcher
from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.block_identity import extend_chain
from rayserve_paged.core.block_pool import BlockPool, BlockState
from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.keyed_heap import MAX_ENTRIES_PER_ITEM, MAX_SPARE_ENTRIES
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.prefix_index import PrefixIndex
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.retention import DEFAULT_PRIORITY
from rayserve_paged.core.sequence import Phase, SequenceState


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LedgerError(message)


def _all_blocks(pool: BlockPool) -> Iterable[BlockId]:
    # Messages and ids are made one by one in what follows only where something is wrong: it runs
    # after every step, over every block.
    return cast("Iterable[BlockId]", range(pool.num_blocks))


def check_pool(
    pool: BlockPool,
    holders: Iterable[Iterable[BlockId]],
    copy_sources: Iterable[Iterable[BlockId]] = (),
) -> None:
    """Check that a pool agrees with those who hold its blocks.

    Args:
        pool: The pool.
        holders: The blocks that each sequence lists, which may list a block once.
        copy_sources: The blocks that each step in flight holds, once for each copy.

    Raises:
        LedgerError: The first disagreement.
    """
    counts: Counter[BlockId] = Counter()
    for block_ids in holders:
        listed = list(block_ids)
        _require(len(set(listed)) == len(listed), f"a holder lists a block twice: {listed}")
        counts.update(listed)
    for block_ids in copy_sources:
        counts.update(block_ids)
    free, cached = set(pool.free_ids), set(pool.cached_ids)
    _require(len(free) == pool.num_free, f"a block is twice on the free list: {pool.free_ids}")
    _require(not free & cached, "a block is both FREE and CACHED")
    for block_id in _all_blocks(pool):
        count, num_holders = pool.count(block_id), counts.get(block_id, 0)
        if count != num_holders:
            raise LedgerError(f"block {block_id} has count {count} and {num_holders} holders")
        held = pool.state(block_id) is BlockState.HELD
        if held == (block_id in free or block_id in cached):
            raise LedgerError(f"block {block_id} is HELD and listed, or neither")
    total = pool.num_free + pool.num_held + pool.num_cached
    _require(total == pool.num_blocks, f"{total} blocks in a pool of {pool.num_blocks}")


def check_index(pool: BlockPool, index: PrefixIndex) -> None:
    """Check that keys and blocks agree both ways, and that only sealed blocks have keys."""
    keyed = set()
    for key, block_id in index.items():
        _require(index.key_of(block_id) == key, f"block {block_id} and its key disagree")
        _require(pool.is_sealed(block_id), f"block {block_id} has a key and is not sealed")
        _require(
            pool.state(block_id) is not BlockState.FREE, f"block {block_id} is FREE and has a key"
        )
        keyed.add(block_id)
    _require(len(keyed) == len(index), "two keys name one block")
    for block_id in pool.cached_ids:
        known = block_id in keyed or pool.is_frozen(block_id)
        _require(known, f"block {block_id} is CACHED, has no key and is not frozen")


def check_partials(kv: KVManager, copy_sources: Iterable[Iterable[BlockId]] = ()) -> None:
    """Check that blocks whose slots can be copied are sealed or frozen, and found both ways.

    Args:
        kv: The manager.
        copy_sources: The blocks that each step in flight holds, once for each copy.

    Raises:
        LedgerError: The first disagreement.
    """
    pool, partials = kv.pool, kv.partials
    sources = Counter(block_id for block_ids in copy_sources for block_id in block_ids)
    frozen = {block_id for block_id in _all_blocks(pool) if pool.is_frozen(block_id)}
    if partials is None:
        _require(not frozen, "blocks are frozen without partial reuse")
        return
    contents = dict(partials.items())
    _require(frozen <= contents.keys(), "a frozen block cannot be found")
    parents = {content.parent for content in contents.values()}
    _require(len(parents) == partials.num_parents, "a parent is kept without what is behind it")
    for block_id, content in contents.items():
        _require(block_id in partials, f"block {block_id} is found and not noted")
        num_tokens = len(content.token_ids)
        best = partials.find(content)
        _require(
            best is not None and best == (block_id, num_tokens),
            f"block {block_id} is not what is found for what it holds",
        )
        key = kv.index.key_of(block_id)
        if block_id in frozen:
            _require(key is None, f"block {block_id} is frozen and has a key")
            _require(0 < num_tokens < kv.block_size, f"block {block_id} is frozen and full")
            held = pool.count(block_id)
            _require(held == sources[block_id], f"block {block_id} is frozen and in a table")
        else:
            _require(key is not None, f"block {block_id} can be copied and is not kept")
            chain = extend_chain(content.parent, content.token_ids, kv.block_size)
            _require(chain in ([], [key]), f"block {block_id} has other tokens than its key")


def check_retention(kv: KVManager) -> None:
    """Check that blocks have the priorities that are asked for, and that none is kept of others.

    Raises:
        LedgerError: The first disagreement.
    """
    pool, asked = kv.pool, dict(kv.retention.items())
    for block_id in _all_blocks(pool):
        steps = asked.get(block_id, ())
        expected = steps[0][1] if steps else DEFAULT_PRIORITY
        priority = pool.priority(block_id)
        if priority != expected:
            message = f"block {block_id} has priority {priority} and is to have {expected}"
            raise LedgerError(message)
        if not steps:
            continue
        _require(pool.is_sealed(block_id), f"block {block_id} is kept unsealed")
        ends = [until for until, _priority in steps]
        _require(ends == sorted(set(ends)), f"steps of block {block_id} are out of order: {steps}")
        _require(not ends or ends[0] > kv.retention.now, f"block {block_id} is kept for too long")
    order = [pool.priority(each) for each in pool.cached_ids if not pool.is_frozen(each)]
    _require(order == sorted(order), f"a higher priority goes before a lower one: {order}")


def check(replica: Replica) -> None:
    """Check a replica: its pool, its index, its sequences and the step in flight.

    Raises:
        LedgerError: The first invariant that does not hold.
    """
    batcher, pool = replica.batcher, replica.kv.pool
    holders = (*batcher.running, *batcher.retiring)
    tables = [sequence.table.block_ids for sequence in holders]
    pins = list(replica.pins.blocks)
    check_pool(pool, [*tables, *pins], batcher.copy_sources)
    pinned = {block_id for block_ids in pins for block_id in block_ids}
    _require(len(pinned) == replica.pins.num_blocks, "the count of pinned blocks is wrong")
    most = replica.limits.max_pinned_blocks
    _require(len(pinned) <= most, f"{len(pinned)} blocks are pinned, and {most} may be")
    check_index(pool, replica.kv.index)
    check_partials(replica.kv, batcher.copy_sources)
    check_retention(replica.kv)
    for block_id in replica.kv.duplicates:
        _require(pool.count(block_id) > 0, f"duplicate {block_id} is not HELD")
        _require(not pool.is_sealed(block_id), f"duplicate {block_id} is sealed")
    rows = [sequence.row for sequence in holders]
    _require(None not in rows and len(set(rows)) == len(rows), f"rows overlap: {rows}")
    for sequence in batcher.waiting:
        _require(not sequence.table.block_ids, "a waiting sequence holds blocks")
    _require(len(batcher.waiting) == batcher.num_waiting, "the waiting count is wrong")
    _check_queue(replica)
    order = [sequence.order_key() for sequence in batcher.running]
    _require(order == sorted(order), "running sequences are out of order")
    for sequence in batcher.running:
        _check_running(replica, sequence)
    _check_prefix_waits(batcher)
    searches = {s.beam for s in replica.sequences if s.beam is not None}
    for search in searches:
        _check_beams(replica, search)
    reserved = sum(sequence.num_unborn for sequence in batcher.running)
    reserved += sum(search.num_reserved_rows for search in searches)
    _require(batcher.num_reserved_rows == reserved, "rows are reserved for nobody")
    for sequence in batcher.retiring:
        _require(sequence.phase is Phase.ENDED, "a sequence that retires has not ended")
    if not batcher.in_flight:
        _require(not batcher.retiring, "a sequence retires and no step is in flight")
    for plan in batcher.in_flight:
        _require(set(plan.rows.tolist()) <= set(rows), "a step is not a subset of the running")
        total = int(plan.num_tokens.sum())
        _require(
            total <= batcher.max_num_batched_tokens, f"a step of {total} tokens is over budget"
        )
        _require(len(plan.token_ids) == total, "a step's tokens do not add up")


def _check_prefix_waits(batcher: Batcher) -> None:
    waits = batcher.prefix_waits
    for key, sequence in waits.computing():
        next_key = sequence.keys[sequence.num_sealed]
        _require(key == next_key, "the block that a sequence computes next is another one")
    running = set(batcher.running)
    computing = {sequence for _key, sequence in waits.computing()}
    _require(computing <= running, "a sequence that does not run computes a block")
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


def _check_beams(replica: Replica, search: BeamGroup) -> None:
    sequences, width = search.sequences, search.rules.width
    _require(search.finish is None, "a search that has ended is still listed")
    _require(0 < len(sequences) <= width, f"{len(sequences)} beams in a search of {width}")
    siblings = {sequence.sibling for sequence in sequences}
    _require(siblings <= set(range(width)), f"beams are numbered {siblings}")
    _require(len(siblings) == len(sequences), "two beams have one number")
    _require(set(sequences) <= set(replica.sequences), "a beam is not listed")
    outputs = {tuple(s.tokens) for s in replica.batcher.running if s.beam is search}
    in_rows = [sequence for sequence in sequences if sequence.row is not None]
    _require(len(outputs) == len(in_rows), "two beams have the same tokens")
    _require(len({sequence.num_known for sequence in sequences}) == 1, "beams are not level")
    totals = [beam.cumulative for beam in search.beams]
    _require(totals == sorted(totals, reverse=True), "the best beam is not the first")
    _require(
        all(len(beam.logprobs) == beam.sequence.num_outputs for beam in search.beams),
        "a beam has a token without its log-probability",
    )
    whole = not in_rows or len(in_rows) == len(sequences) or in_rows == [search.first]
    _require(whole, "a search has started in part")
    missing = width - len(in_rows) if in_rows else 0
    _require(search.num_reserved_rows == missing, f"not {missing} rows of a search are reserved")
    for beam in search.beams:
        if beam.candidates is not None:
            computed = replica.batcher.num_computed(beam.sequence)
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
            f"a layer group of {window} trimmed {group.num_trimmed} blocks at {computed} tokens",
        )
        _require(
            group.num_places == sequence.table.num_places, "layer groups differ in their places"
        )
    waste = sequence.table.num_slots - held
    _require(0 <= waste < block_size, f"a sequence wastes {waste} slots of a tail block")
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


def _check_queue(replica: Replica) -> None:
    queue = replica.batcher.queue
    first, in_order = queue.first(), queue.in_order
    if queue.is_turn_of_oldest:
        in_order = tuple(sorted(in_order, key=lambda each: (each.arrival, each.sibling)))
    _require(first is (in_order[0] if in_order else None), "not the first in order starts next")
    limit = MAX_ENTRIES_PER_ITEM * len(queue) + MAX_SPARE_ENTRIES
    _require(queue.num_entries <= limit, f"{queue.num_entries} entries for {len(queue)} waiting")
    for sequence in (*queue.in_order, *replica.batcher.running):
        siblings = range(sequence.num_unborn + 1)
        _require(sequence.withdrawn < set(siblings), "all samples of a sequence are withdrawn")
