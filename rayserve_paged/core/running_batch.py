"""The running sequences of a replica in arrays by row, and the steps in flight over them.

For one row, in tokens:

    0 ......... computed ......... end .... known .... known + ahead
      KV in the blocks  | in flight | to do | sampled by steps in flight, not known yet

`computed` and `known` are what finished steps have made certain; `end` and `ahead` run before
them by the steps in flight. Planning looks at the latter two, so that a step can be planned while
the one before it runs.
"""

import bisect
import dataclasses
from collections import deque
from collections.abc import Iterable

import numpy as np

from rayserve_paged.core.ids import BlockId, Row
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.prefix_wait import PrefixWaits
from rayserve_paged.core.row_readers import Readers, RowReaders
from rayserve_paged.core.sequence import Phase, SequenceState
from rayserve_paged.core.step_messages import BoolArray, IntArray, StepPlan

Scoring = tuple[SequenceState, int]
"""A sequence, and how many tokens of its prompt a step scores."""

NEVER = int(np.iinfo(np.int32).max)
"""A length that no sequence reaches."""

_SPARE_COLUMNS = 2


@dataclasses.dataclass(slots=True)
class SteadyState:
    """A batch in which every sequence decodes, and what is the same in each of its steps.

    Args:
        version: Of the batch; any other ends the steady state.
        rows: int32 [n], all running rows, first served first.
        places: The same as an index: a slice, which costs less, where they follow on each other.
        ones: int32 [n].
        sample_indices: int32 [n].
        siblings: int32 [n].
        computed: int32 [n], for the next plan.
        outputs: int32 [n], output index of the tokens that the next plan samples.
        readers: Of `rows`.
        num_plans: Plans before some row needs a block or may reach its length.
        num_to_fill: Steps until the next one that fills a block of some row, that one included;
            None where that is to be looked up.
    """

    version: int
    rows: IntArray
    places: IntArray | slice
    ones: IntArray
    sample_indices: IntArray
    siblings: IntArray
    computed: IntArray
    outputs: IntArray
    readers: Readers
    num_plans: int
    num_to_fill: int | None = None


@dataclasses.dataclass(slots=True)
class Flight:
    """A plan that is being executed.

    Args:
        plan: The plan.
        sampled: int32 [num_samples], the row of each sample.
        held: Sources of copies, held until the plan has finished.
        forks: Index of the first sample of each row that is to be forked.
        num_ahead: Samples of each sampled row that later plans count on.
        steady: Set where the batch was in its steady state.
        outputs: int32 [num_samples], output index of each sample, set with `steady`.
        scoring: What the plan scores, in its order.
    """

    plan: StepPlan
    sampled: IntArray
    held: list[BlockId]
    forks: list[int]
    num_ahead: int = 0
    steady: SteadyState | None = None
    outputs: IntArray | None = None
    scoring: list[Scoring] = dataclasses.field(default_factory=list)


class RunningBatch:
    """Rows, the sequences in them, and the steps in flight.

    Args:
        kv: The sequences' blocks.
        num_rows: Sequences that can run at once.
        max_prefix_wait_steps: Steps that a sequence waits for blocks that another one computes.
    """

    def __init__(self, kv: KVManager, num_rows: int, max_prefix_wait_steps: int = 0) -> None:
        self.kv = kv
        self.prefix_waits = PrefixWaits(max_prefix_wait_steps)
        self.readers = RowReaders(num_rows)
        self.block_size = kv.block_size
        self.known = np.zeros(num_rows, np.int32)
        self.ahead = np.zeros(num_rows, np.int32)
        self.computed = np.zeros(num_rows, np.int32)
        self.end = np.zeros(num_rows, np.int32)
        self.slots = np.zeros(num_rows, np.int32)
        self.max_known = np.zeros(num_rows, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.next_seal = np.zeros(num_rows, np.int32)
        # Tokens computed at which the row's table is to be trimmed.
        self.next_trim = np.full(num_rows, NEVER, np.int32)
        # The row's layers, or some of them, have a window.
        self.windowed = np.zeros(num_rows, np.bool_)
        self.num_windowed = 0
        self.last_token = np.zeros(num_rows, np.int32)
        self.last_step = np.full(num_rows, -1, np.int64)
        self.sibling = np.zeros(num_rows, np.int32)
        # Siblings to be forked from the row once its prompt is computed.
        self.num_unborn = np.zeros(num_rows, np.int32)
        # The row's sequence goes on; False for one that ended with a step still in flight.
        self.alive = np.zeros(num_rows, np.bool_)
        # Nothing but the token is to be told of each further step.
        self.plain = np.zeros(num_rows, np.bool_)
        # The tail block may be shared with a sibling.
        self.forked = np.zeros(num_rows, np.bool_)
        self.num_forked = 0
        # Rows that hold beams of a search; their tokens are chosen together.
        self.is_beam = np.zeros(num_rows, np.bool_)
        self.num_beams = 0
        # Not to be scheduled before the step in flight has finished: it is to be forked.
        self.held_back = np.zeros(num_rows, np.bool_)
        # Rows whose sequence or table the ranks do not know yet.
        self.unannounced: set[int] = set()
        # Rows with prompt tokens that no step in flight or before has scored.
        self.scoring: set[int] = set()
        # Rows kept free for siblings that are not born yet, and for beams.
        self.num_reserved_rows = 0
        self.flights: deque[Flight] = deque()
        # Ended, but in a step that still writes their blocks; True where these are to be discarded.
        self.retiring: list[tuple[SequenceState, bool]] = []
        # Changes with the membership.
        self.version = 0
        self._sequences: list[SequenceState | None] = [None] * num_rows
        # The latest tokens of each row, by position modulo the width.
        self._recent = np.zeros((num_rows, kv.block_size + _SPARE_COLUMNS), np.int32)
        self._free_rows = [Row(row) for row in reversed(range(num_rows))]
        self._order: list[SequenceState] = []
        self._rows = np.zeros(0, np.int32)
        self._rows_changed = False
        self._stop_table = np.zeros(1, np.bool_)

    # --- membership -----------------------------------------------------------------------

    @property
    def num_open_rows(self) -> int:
        """Rows that a newcomer may take."""
        return len(self._free_rows) - self.num_reserved_rows

    @property
    def order(self) -> list[SequenceState]:
        """Sequences that go on, first served first; not to be changed."""
        return self._order

    @property
    def rows(self) -> IntArray:
        """Rows of `order`, int32 [num_running]; not to be changed."""
        if self._rows_changed:
            self._rows = np.array([sequence.row for sequence in self._order], np.int32)
            self._rows_changed = False
        return self._rows

    def sequence(self, row: int) -> SequenceState:
        """Return the sequence in a row."""
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} is empty"
        return sequence

    def enter(self, sequence: SequenceState, num_computed: int) -> Row:
        """Give a sequence, whose table is open, a row."""
        row = self._free_rows.pop()
        sequence.row = row
        sequence.phase = Phase.RUNNING
        self._sequences[row] = sequence
        self.readers.enter(row, sequence.name, sequence.consumer_id)
        self.known[row] = len(sequence.tokens)
        self.ahead[row] = 0
        self.computed[row] = num_computed
        self.end[row] = num_computed
        self.slots[row] = sequence.table.num_slots
        self.max_known[row] = sequence.max_known
        self.num_prompt[row] = sequence.num_prompt
        self.next_seal[row] = (sequence.num_sealed + 1) * self.block_size
        self.last_token[row] = sequence.tokens[-1]
        self.last_step[row] = -1
        self.sibling[row] = sequence.sibling
        self.num_unborn[row] = sequence.num_unborn
        self.num_reserved_rows += sequence.num_unborn
        self.alive[row] = True
        is_beam = sequence.beam is not None
        self.is_beam[row] = is_beam
        self.num_beams += is_beam
        details = is_beam or sequence.request.params.logprobs is not None
        # Its first token here says more than a further one: what of the prompt was cached.
        self.plain[row] = sequence.num_outputs > sequence.num_delivered and not details
        self.held_back[row] = False
        self.unannounced.add(row)
        if sequence.scores is not None and not sequence.scores.is_complete:
            self.scoring.add(row)
        if sequence.table.has_window:
            self.windowed[row] = True
            self.num_windowed += 1
            # Slots that it copied may have brought it past another block.
            self.kv.trim(sequence.table, num_computed, sequence.retention)
            self.next_trim[row] = min(NEVER, sequence.table.next_trim() or NEVER)
        self._note_stops(sequence.stop_ids)
        bisect.insort(self._order, sequence, key=SequenceState.order_key)
        self._rows_changed = True
        self.version += 1
        self.prefix_waits.enter(sequence)
        return row

    def retire(self, sequence: SequenceState, *, discard: bool = False) -> None:
        """End a running sequence: it gives back its blocks and its row once no step in flight
        writes them.

        Args:
            sequence: In a row.
            discard: Its blocks are not to be matched.
        """
        self._stop(sequence)
        sequence.phase = Phase.ENDED
        self.retiring.append((sequence, discard))
        self.free_retired()

    def free_retired(self) -> None:
        """Free what retired and is in no step any more."""
        still = []
        for sequence, discard in self.retiring:
            if self.is_in_flight(sequence):
                still.append((sequence, discard))
            else:
                self._free(sequence, discard=discard)
        self.retiring = still

    def preempt(self, sequence: SequenceState) -> None:
        """Take a sequence's blocks and row away.

        Raises:
            AssertionError: A step in flight writes its blocks.
        """
        assert not self.is_in_flight(sequence), "its blocks are being written"
        self._stop(sequence)
        self._free(sequence, discard=False)
        # It resumes on whole blocks wherever they are cached, also where none of its own is, since
        # the cache was reset while it ran.
        sequence.extend_keys()
        sequence.phase = Phase.WAITING
        sequence.num_preemptions += 1

    def is_in_flight(self, sequence: SequenceState) -> bool:
        """Return whether a step in flight writes blocks of a sequence that has a row."""
        if not self.flights:
            return False
        assert sequence.row is not None
        return bool(self.last_step[sequence.row] >= self.flights[0].plan.step_id)

    def _stop(self, sequence: SequenceState) -> None:
        row = sequence.row
        assert row is not None
        self.sync(sequence)
        self.unfork(row)
        self.unannounced.discard(row)
        self.scoring.discard(row)
        self.num_reserved_rows -= sequence.num_unborn
        self.num_beams -= sequence.beam is not None
        self.alive[row] = False
        self.prefix_waits.leave(sequence)
        self._order.remove(sequence)
        self._rows_changed = True
        self.version += 1

    def _free(self, sequence: SequenceState, *, discard: bool) -> None:
        row = sequence.row
        assert row is not None
        if discard:
            self.kv.discard(sequence.table)
        else:
            if self.kv.partials is not None and self.kv.is_current(sequence.table):
                self._freeze_tail(sequence)
            self.kv.close(sequence.table, sequence.retention)
        if self.windowed[row]:
            self.windowed[row] = False
            self.num_windowed -= 1
            self.next_trim[row] = NEVER
        self._sequences[row] = None
        self._free_rows.append(row)
        sequence.row = None

    def _freeze_tail(self, sequence: SequenceState) -> None:
        """Keep what a sequence has computed of its last block."""
        index, block_size = sequence.num_sealed, self.block_size
        # A step after its last one may have computed a token that was dropped.
        end = min(int(self.computed[sequence.row]), sequence.num_known)
        content = sequence.content(index, min(end, (index + 1) * block_size - 1))
        if content.token_ids:
            for group, block_id in enumerate(sequence.table.at(index)):
                self.kv.freeze(block_id, content, group)

    # --- forks ----------------------------------------------------------------------------

    def mark_forked(self, row: int) -> None:
        """Note that a row shares its blocks with siblings, the partly filled tail among them."""
        if self.computed[row] % self.block_size and not self.forked[row]:
            self.forked[row] = True
            self.num_forked += 1

    def unfork(self, row: int) -> None:
        """Note that a row shares no block that it will write."""
        if self.forked[row]:
            self.forked[row] = False
            self.num_forked -= 1

    # --- windows --------------------------------------------------------------------------

    def trim(self, row: int) -> None:
        """Let go of the blocks of a row that no token after its computed ones reads."""
        sequence = self.sequence(row)
        table = sequence.table
        self.kv.trim(table, int(self.computed[row]), sequence.retention)
        self.next_trim[row] = min(NEVER, table.next_trim() or NEVER)

    # --- tokens ---------------------------------------------------------------------------

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Make one sampled token of each row known."""
        known = self.known[rows]
        self._recent[rows, known % self._recent.shape[1]] = token_ids
        self.known[rows] = known + 1
        self.last_token[rows] = token_ids

    def append_steady(self, steady: SteadyState, token_ids: IntArray) -> None:
        """Make one sampled token of each row of a steady state known, whose last one before is
        computed by now.
        """
        known = steady.computed
        self._recent[steady.rows, known % self._recent.shape[1]] = token_ids
        self.known[steady.places] = known + 1
        self.last_token[steady.places] = token_ids

    def append_steps(self, rows: IntArray, token_ids: IntArray) -> None:
        """Make the sampled tokens of several steps known.

        Args:
            rows: int32 [n], each once.
            token_ids: int32 [num_steps, n], of at most one block's steps.
        """
        num_steps = len(token_ids)
        known = self.known[rows]
        columns = (known + np.arange(num_steps, dtype=np.int32)[:, None]) % self._recent.shape[1]
        self._recent[rows, columns] = token_ids
        self.known[rows] = known + num_steps
        self.last_token[rows] = token_ids[-1]

    def sync(self, sequence: SequenceState) -> None:
        """Bring `sequence.tokens` up to date with the arrays."""
        row = sequence.row
        if row is None:
            return
        have, known = len(sequence.tokens), int(self.known[row])
        if have < known:
            recent = self._recent[row]
            first, last = have % len(recent), (known - 1) % len(recent)
            if first <= last:
                sequence.tokens.extend(recent[first : last + 1].tolist())
            else:
                sequence.tokens.extend(recent[first:].tolist())
                sequence.tokens.extend(recent[: last + 1].tolist())

    def sync_all(self, rows: IntArray) -> None:
        """Bring the tokens of several rows' sequences up to date with the arrays, as `sync` does.

        Args:
            rows: int32 [n].
        """
        width = self._recent.shape[1]
        known = self.known[rows]
        # From the oldest that is kept of a row to its last one.
        columns = (known[:, None] + np.arange(width, dtype=np.int32)) % width
        recent = self._recent[rows[:, None], columns].tobytes()
        num_bytes = self._recent.itemsize
        for place, (row, length) in enumerate(zip(rows.tolist(), known.tolist(), strict=True), 1):
            tokens = self.sequence(row).tokens
            end = place * width
            start = end - length + len(tokens)
            tokens.frombytes(recent[start * num_bytes : end * num_bytes])

    def may_stop(self, token_ids: IntArray) -> BoolArray:
        """Return which tokens end some running sequence, bool [n]: a superset of what ends."""
        # The last entry is never set: it stands for all ids beyond the table.
        last = len(self._stop_table) - 1
        if not last:
            return np.zeros(token_ids.shape, np.bool_)
        return self._stop_table[np.minimum(token_ids, last)]

    def _note_stops(self, stop_ids: Iterable[int]) -> None:
        for token_id in stop_ids:
            if token_id + 1 >= len(self._stop_table):
                grown = np.zeros(2 * token_id + 2, np.bool_)
                grown[: len(self._stop_table)] = self._stop_table
                self._stop_table = grown
            self._stop_table[token_id] = True
