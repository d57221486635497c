"""Places where a rule changes nothing that anyone could see, each with the reason."""

from fnmatch import fnmatch
from typing import NamedTuple

from faults import Fault


class Equivalent(NamedTuple):
    """Faults that are none.

    Args:
        name: Pattern of their names, without the number.
        before: What stands in the place, or the whole line where that says too little.
        reason: Why nothing changes.
        after: What is put there, where something else put there does change something.
    """

    name: str
    before: str
    reason: str
    after: str | None = None

    def covers(self, fault: Fault) -> bool:
        """Return whether a fault is one of these."""
        name = fault.name.rpartition(":")[0]
        is_place = fnmatch(name, self.name) and self.before in (fault.before, fault.source_line)
        return is_place and self.after in (None, fault.after)


EQUIVALENTS: tuple[Equivalent, ...] = (
    Equivalent(
        "batcher.Batcher.plan_step:other-end",
        "if not len(scheduled[0]):",
        "the three arrays are equally long",
    ),
    Equivalent(
        "block_pool.BlockPool.allocate:edge",
        "num_blocks > from_free",
        "where no block is missing, none is evicted",
    ),
    Equivalent(
        "block_pool.BlockPool.unseal_all:always",
        "self._kept[index]",
        "of a block that is not kept there is nothing to forget",
    ),
    Equivalent(
        "block_retention.BlockRetention.seal:other-end",
        "if steps and steps[0][1] < DEFAULT_PRIORITY:",
        "what is below the default at first is so in one step, and else no step is",
    ),
    Equivalent(
        "block_retention.BlockRetention.seal:other-end",
        "self._set(block_id, ((math.inf, steps[0][1]),))",
        "likewise",
    ),
    Equivalent(
        "block_retention.BlockRetention._note:other-end",
        "if steps and steps[0][1] < DEFAULT_PRIORITY:",
        "likewise",
    ),
    Equivalent(
        "block_retention.BlockRetention.*:edge",
        "steps[0][1] < DEFAULT_PRIORITY",
        "what has the default priority is written as no step",
    ),
    Equivalent(
        "block_retention.BlockRetention.use:fewer-conditions",
        "not self._low or self._low.isdisjoint(block_ids)",
        "no blocks are among none, and to look for them takes longer",
        "(self._low.isdisjoint(block_ids))",
    ),
    Equivalent(
        "step_planner._as_index:other-end",
        "0",
        "an array selects what a slice does, which takes longer",
    ),
    Equivalent(
        "block_retention.BlockRetention._note:twice",
        "self._due.put(block_id, (steps[0][0],))",
        "what is put again under the key that it has stays as it is",
    ),
    Equivalent(
        "beam_search.select:off-by-one",
        "rank + 1",
        "one child more is looked at, and none is taken any more",
    ),
    Equivalent(
        "block_identity.extend_chain:ignored-case",
        "not attachments",
        "no attachments have no content, and to look for it takes longer",
    ),
    Equivalent("block_identity.hash_blocks:always", "content", "likewise"),
    Equivalent(
        "block_identity.extend_chain:half",
        "len(payload) // (4 * block_size)",
        "content of blocks behind the last full one is looked for, and not used",
    ),
    Equivalent("block_identity.extend_chain:half", "4 * block_size", "likewise"),
    Equivalent(
        "block_identity.token_payload:ignored-case",
        'isinstance(token_ids, array) and token_ids.typecode == "i" and sys.byteorder == "little"',
        "any sequence is packed id by id as well, which takes longer",
    ),
    Equivalent(
        "block_identity.token_payload:ignored-case",
        "isinstance(token_ids, np.ndarray)",
        "likewise",
    ),
    Equivalent(
        "block_identity.token_payload:always", "isinstance(token_ids, np.ndarray)", "likewise"
    ),
    Equivalent(
        "block_identity.token_payload:ignored-case", "isinstance(token_ids, TokenIds)", "likewise"
    ),
    Equivalent(
        "block_identity.token_payload:fewer-conditions",
        'isinstance(token_ids, array) and token_ids.typecode == "i" and sys.byteorder == "little"',
        "no machine that runs the tests is big-endian",
        '(isinstance(token_ids, array) and token_ids.typecode == "i")',
    ),
    Equivalent(
        "block_table.BlockTable.*:ignored-case",
        "len(self.groups) == 1",
        "one layer group is served as several are, which takes longer",
    ),
    Equivalent(
        "block_table.BlockTable.at:ignored-case",
        "len(self.groups) == 1 and not first.num_trimmed",
        "likewise",
    ),
    Equivalent(
        "block_table.BlockTable.*:other-end",
        "first = self.groups[0]",
        "the only layer group, or one of as many places as every other",
    ),
    Equivalent(
        "block_table.BlockTable.num_places:other-end",
        "return self.groups[0].num_places",
        "likewise",
    ),
    Equivalent(
        "block_table.BlockTable.block_ids:other-end",
        "return self.groups[0].block_ids",
        "the only layer group",
    ),
    Equivalent(
        "block_table.BlockTable.append:other-end",
        "self.groups[0].block_ids.extend(block_ids)",
        "likewise",
    ),
    Equivalent(
        "block_table.BlockTable.__init__:always",
        "window.size is not None",
        "without a window no block is missing, and to look for one takes longer",
    ),
    Equivalent(
        "block_table.GroupBlocks.trim:edge",
        "num_more <= 0",
        "to take out no block changes nothing",
    ),
    Equivalent(
        "block_table.GroupBlocks.trim:ignored-case",
        "num_more <= 0",
        "likewise, and what is computed of a sequence never becomes less",
    ),
    Equivalent(
        "chain_memo.ChainMemo._plain_keys:twice",
        "path.append(first)",
        "what is moved to the end twice is there",
    ),
    Equivalent(
        "directory.Directory.update:ignored-case",
        "holders.keys().isdisjoint(fresh)",
        "keys that nobody holds are entered one by one as well, which takes longer",
    ),
    Equivalent(
        "directory.Directory.expect:ignored-case",
        "expected.keys().isdisjoint(keys)",
        "likewise",
    ),
    Equivalent(
        "directory._slots:ignored-case",
        "not bits & (bits - 1)",
        "one slot is found among all bits as well, which takes longer",
    ),
    Equivalent("directory._slots:off-by-one", "bits - 1", "likewise"),
    Equivalent("directory._slots:half", "-bits.bit_length() // 8", "more bytes, and all of them 0"),
    Equivalent("directory._slots:other-end", "0", "a tuple of one"),
    Equivalent("consumer.Consumer.*tick:other-end", "0", "the key is a tuple of one"),
    Equivalent("replica.Replica.next_tick:other-end", "0", "likewise"),
    Equivalent(
        "consumer.Consumer._schedule:twice",
        "self._due.put(known.opened.request_id, (due,))",
        "the second takes the place of the first",
    ),
    Equivalent(
        "consumer.Consumer._is_from:ignored-case",
        "known.is_pinned",
        "what is pinned to its source is pinned there again, which takes longer",
    ),
    Equivalent(
        "stream_intake.News.extend:one-way",
        "token_ids[have:] if have else token_ids",
        "a copy of all of them is the same",
        "(token_ids[have:])",
    ),
    Equivalent(
        "stream_intake._take_run:twice",
        "news.extend(index, token_ids)",
        "what has come is not taken in again, and a gap is found again",
    ),
    Equivalent(
        "stream_intake._take_run:ignored-case",
        "known is not None and known.is_pinned and known.attempt == name.attempt",
        "the long way comes to the same",
    ),
    Equivalent(
        "stream_intake._take_run:ignored-case",
        "stream is not None and stream.news is None and known.source == source",
        "likewise",
    ),
    Equivalent("stream_intake._take_run:ignored-case", "len(accepted) == index", "likewise"),
    Equivalent(
        "controller.Controller._register:edge",
        "live.num_usable_slots > known.num_usable_slots",
        "of two kinds of replicas that hold as much either will do",
    ),
    Equivalent(
        "controller.Controller._place:always",
        "self._memo is None",
        "without its memory each prompt is hashed anew, which takes longer",
    ),
    Equivalent(
        "fleet.Fleet.report:edge",
        "live.incarnation > incarnation",
        "of a life that is another one, which is the case here",
    ),
    Equivalent(
        "replica_record.ReplicaRecord.answer:one-way",
        "None if number is None else self._asked.pop(number, None)",
        "no question has that number",
        "(self._asked.pop(number, None))",
    ),
    Equivalent(
        "kv_manager.KVManager.*:always",
        "self._duplicates",
        "where there are no duplicates none is found, which takes longer",
    ),
    Equivalent(
        "partial_index.PartialIndex.find:loose-slice",
        "max(0, place - 1) : place + 1",
        "it looks at more blocks than the two that can be the best",
    ),
    Equivalent(
        "prefix_index.PrefixIndex.publish_run:ignored-case",
        "self._evicted.keys().isdisjoint(keys)",
        "keys of which none is to be told as evicted are noted one by one as well",
    ),
    Equivalent(
        "prefix_wait.PrefixWaits.park:half",
        "num_common - num_matched",
        "the block that is being computed is one gained, and the policy asks for one",
    ),
    Equivalent(
        "prefix_wait.PrefixWaits.park:twice",
        "self._deadlines.put(sequence, (since + self.max_wait_steps,))",
        "what is put again under the key that it has stays as it is",
    ),
    Equivalent(
        "prefix_wait.PrefixWaits.park:other-end",
        "0",
        "all that compute a block seal it, and any of them can be waited for",
    ),
    Equivalent(
        "retention.highest:ignored-case",
        "a == b",
        "the higher of two equal ones is written as they are, which takes longer",
    ),
    Equivalent(
        "retention.RetentionPlan.at:twice",
        "asked.append(each.steps)",
        "what is asked twice is no higher",
    ),
    Equivalent("retention.RetentionPlan.at:twice", "asked.append(())", "likewise"),
    Equivalent(
        "row_readers.RowReaders.of:other-end",
        "first = int(consumers[0])",
        "of rows that all have one reader any can be asked",
    ),
    Equivalent(
        "row_readers.RowReaders._names_of:other-end",
        "itemgetter(*listed)(self._names) if len(listed) > 1 else (self._names[listed[0]],)",
        "a list of one",
    ),
    Equivalent(
        "sequence.SequenceState.key:always",
        "attachments or len(tokens) > block_size",
        "one block without content is a chain as well, which takes longer",
    ),
    Equivalent("sequence.SequenceState.key:edge", "len(tokens) > block_size", "likewise"),
    Equivalent(
        "running_batch.RunningBatch._stop:forget-to-free",
        "self.unannounced.discard(row)",
        "whoever takes the row next is announced in any case",
    ),
    Equivalent(
        "sequence.SequenceState.key:always",
        "block_index >= len(self.keys)",
        "a chain that is long enough is extended by no block",
    ),
    Equivalent(
        "token_ids.TokenIds.of:other-flag",
        'packed = cls(token_ids.astype("<i4", copy=False).tobytes())',
        "one copy more",
    ),
    Equivalent(
        "token_ids.TokenIds.unpacked:skip-call",
        "ids.byteswap()",
        "no machine that runs the tests is big-endian",
    ),
)
