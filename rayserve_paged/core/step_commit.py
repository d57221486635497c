"""Takes in a finished step: seals what filled, appends what was sampled, ends what ended."""

from typing import NamedTuple

import numpy as np

from rayserve_paged.core.beam_commit import end_beams, take_in_candidates
from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.ids import ConsumerId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.row_readers import Readers
from rayserve_paged.core.running_batch import Flight, RunningBatch, SteadyState
from rayserve_paged.core.scored_tokens import take_in_scores
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.core.step_messages import IntArray, StepResult, TokenLogprobs
from rayserve_paged.core.stream_messages import TokenRun


class Progress(NamedTuple):
    """What a finished step did for one sequence, where that is more than a further token.

    Args:
        sequence: Whose.
        output_index: Of `token_id`, or of the next token where there is none.
        token_id: The new token; None where it failed.
        logprobs: Of the new token, where asked for.
        finish: Set where this was the last token.
        error: Set where finish is ERROR.
    """

    sequence: SequenceState
    output_index: int
    token_id: int | None
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    error: str | None


class Committed(NamedTuple):
    """What a finished plan did, in order.

    Args:
        news: Progress of single sequences, and for each consumer runs of further tokens.
        born: Siblings that were forked.
        beams: Searches whose beams have changed, or that have ended.
    """

    news: list[Progress | tuple[ConsumerId, TokenRun]]
    born: list[SequenceState]
    beams: list[BeamGroup]


class StepCommit:
    """Brings a running batch up to date with one finished plan.

    Args:
        batch: The batch; `flight` has just left its flights.
        flight: The plan.
        result: What the executor reports of it.
    """

    def __init__(self, batch: RunningBatch, flight: Flight, result: StepResult) -> None:
        self._batch = batch
        self._flight = flight
        self._result = result
        self._committed = Committed([], [], [])

    def run(self) -> Committed:
        """Do it, once."""
        batch, plan, result = self._batch, self._flight.plan, self._result
        steady = self._flight.steady
        if steady is not None:
            if self._is_steady():
                self._take_in_steady(steady)
                return self._committed
            # It may go on with the next step, and this one is not counted.
            steady.num_to_fill = None
        num_run = len(result.token_ids)
        # First, since a row that is freed below may be entered again.
        if num_run < plan.num_steps:
            # Interrupted: what was not run is to be planned again.
            batch.end[plan.rows] -= plan.num_steps - num_run
        if self._flight.num_ahead:
            batch.ahead[self._flight.sampled] -= self._flight.num_ahead
        if self._flight.scoring:
            take_in_scores(self._flight.scoring, result.prompt_logprobs)
        first = 0
        if num_run > 1 and (num_calm := self._num_calm_steps()):
            first = min(num_calm + 1, num_run)
            self._take_in_at_once(first)
        if self._flight.held:
            # First, so that what was copied is let go before what precedes it in a chain.
            batch.kv.pool.release_each(self._flight.held)
        for step in range(first, num_run):
            batch.computed[plan.rows] += plan.num_tokens if step == 0 else 1
            if step == num_run - 1 and result.errors:
                self._fail_rows(result.errors)
            self._note_computed(plan.rows)
            self._take_in(result.token_ids[step], ended_before=step > 0)
        if batch.retiring:
            batch.free_retired()
        return self._committed

    def _fail_rows(self, errors: dict[int, str]) -> None:
        """End sequences whose sampling failed; their blocks are not to be matched."""
        batch = self._batch
        for index, reason in errors.items():
            row = int(self._flight.sampled[index])
            if not batch.alive[row]:
                # Ended already, and its row may be empty. A step that still runs holds its blocks.
                batch.retiring = [
                    (other, discard or other.row == row) for other, discard in batch.retiring
                ]
                continue
            sequence = batch.sequence(row)
            if sequence.beam is not None:
                end_beams(batch, sequence.beam, FinishReason.ERROR, reason, discard=True)
                self._committed.beams.append(sequence.beam)
                continue
            batch.sync(sequence)
            sequence.finish = FinishReason.ERROR
            self._committed.news.append(
                Progress(sequence, sequence.num_outputs, None, None, FinishReason.ERROR, reason)
            )
            batch.retire(sequence, discard=True)

    def _note_computed(self, rows: IntArray) -> None:
        """Publish the blocks that have been filled, then let go of those behind a window."""
        self._seal(rows)
        if self._batch.num_windowed:
            self._trim(rows)

    def _seal(self, rows: IntArray) -> None:
        """Publish the blocks that the finished step has filled."""
        batch = self._batch
        rows = rows[batch.computed[rows] >= batch.next_seal[rows]]
        if not len(rows):
            return
        rows = rows[batch.alive[rows]]
        batch.sync_all(rows)
        num_full = batch.computed[rows] // batch.block_size
        batch.next_seal[rows] = (num_full + 1) * batch.block_size
        for row, end in zip(rows.tolist(), num_full.tolist(), strict=True):
            sequence = batch.sequence(row)
            if batch.kv.is_current(sequence.table):
                self._publish(sequence, end)
            sequence.num_sealed = end
            batch.prefix_waits.advance(sequence)

    def _publish(self, sequence: SequenceState, end: int) -> None:
        """Publish the blocks of a sequence from the first that is not sealed to this one."""
        kv, first = self._batch.kv, sequence.num_sealed
        plain = kv.partials is None and kv.num_layer_groups == 1 and sequence.retention is None
        if plain and end - first > 1:
            sequence.key(end - 1)
            kv.seal_run(sequence.table.run(first, end), sequence.keys[first:end])
            return
        for block_index in range(first, end):
            key, content = sequence.key(block_index), None
            if kv.partials is not None:
                content = sequence.content(block_index, sequence.num_known)
            for group, block_id in enumerate(sequence.table.at(block_index)):
                is_new = kv.seal(block_id, key, content, group)
                if is_new and sequence.retention is not None:
                    kv.retention.seal(block_id, block_index, sequence.retention)

    def _num_calm_steps(self) -> int:
        """Return how many of a plan's first steps end nothing."""
        batch, flight, result = self._batch, self._flight, self._result
        rows = flight.sampled
        if batch.retiring or flight.held or flight.forks or result.errors:
            return 0
        num_calm = int(np.minimum.reduce(batch.max_known[rows] - batch.known[rows])) - 1
        stops = batch.may_stop(result.token_ids)
        if np.count_nonzero(stops):
            num_calm = min(num_calm, int(stops.any(axis=1).argmax()))
        return min(num_calm, len(result.token_ids))

    def _take_in_at_once(self, num_steps: int) -> None:
        """Take in the first steps of a plan: what its single steps would do, one after the other.

        Args:
            num_steps: Steps of which all but the last end nothing.
        """
        batch, plan, rows = self._batch, self._flight.plan, self._flight.sampled
        token_ids = self._result.token_ids[:num_steps]
        outputs = batch.known[rows] - batch.num_prompt[rows]
        batch.append_steps(rows, token_ids)
        batch.computed[plan.rows] += plan.num_tokens + (num_steps - 1)
        self._note_computed(plan.rows)
        ends = batch.known[rows] >= batch.max_known[rows]
        ends |= batch.may_stop(token_ids[-1])
        if not np.count_nonzero(ends):
            self._tell_runs(batch.readers.of(rows), outputs, token_ids)
            return
        ending, going_on = ends.nonzero()[0], (~ends).nonzero()[0]
        readers = batch.readers.of(rows[ending])
        self._tell_runs(readers, outputs[ending], token_ids[:-1, ending])
        for index in ending.tolist():
            self._tell(batch.sequence(int(rows[index])), int(token_ids[-1, index]), index)
        if len(going_on):
            readers = batch.readers.of(rows[going_on])
            self._tell_runs(readers, outputs[going_on], token_ids[:, going_on])

    def _tell_runs(self, readers: Readers, outputs: IntArray, token_ids: IntArray) -> None:
        """Note further tokens of rows: int32 [n] output indices, int32 [num_steps, n] ids."""
        for consumer_id, chosen, names in readers:
            if chosen is not None:
                run = TokenRun(names, outputs[chosen], token_ids[:, chosen])
            else:
                run = TokenRun(names, outputs, token_ids)
            self._committed.news.append((consumer_id, run))

    def _trim(self, rows: IntArray) -> None:
        """Let go of the blocks that have fallen out of a window, which are sealed by now."""
        batch = self._batch
        due = batch.computed[rows] >= batch.next_trim[rows]
        for row in rows[due].tolist():
            if batch.alive[row]:
                batch.trim(row)

    def _take_in(self, token_ids: IntArray, *, ended_before: bool) -> None:
        """Append one step's samples, and say what is to be told of them."""
        batch, flight = self._batch, self._flight
        rows, tokens, indices = flight.sampled, token_ids, None
        check = ended_before or batch.num_beams > 0
        check |= bool(flight.forks or self._result.errors or batch.retiring)
        # First, since beams may enter the row of one that was to be forked, and has ended.
        forks = [first for first in flight.forks if batch.alive[rows[first]]]
        if batch.num_beams:
            self._committed.beams.extend(take_in_candidates(batch, rows, self._result.logprobs))
        if check:
            # Without ghosts and beams, and one sample of each row: a fork hands out the others.
            taken = batch.alive[rows]
            taken[1:] &= rows[1:] != rows[:-1]
            taken &= ~batch.is_beam[rows]
            indices = taken.nonzero()[0]
            rows, tokens = rows[indices], tokens[indices]
        if not len(rows):
            return
        batch.append(rows, tokens)
        special = ~batch.plain[rows] | (batch.known[rows] >= batch.max_known[rows])
        special |= batch.may_stop(tokens)
        if np.count_nonzero(special):
            for i in special.nonzero()[0].tolist():
                index = i if indices is None else int(indices[i])
                self._tell(batch.sequence(int(rows[i])), int(tokens[i]), index)
            rows, tokens = rows[~special], tokens[~special]
        for first in forks:
            self._fork(first, token_ids)
        if len(rows):
            outputs = batch.known[rows] - batch.num_prompt[rows] - 1
            self._tell_runs(batch.readers.of(rows), outputs, tokens[None])

    def _is_steady(self) -> bool:
        """Return whether there is nothing to a step of the steady state but one more token each."""
        batch, result = self._batch, self._result
        if len(result.token_ids) != 1 or result.errors or batch.retiring or batch.num_beams:
            return False
        # Several times as fast as `any` for a few rows.
        return not np.count_nonzero(batch.may_stop(result.token_ids[0]))

    def _take_in_steady(self, steady: SteadyState) -> None:
        """Do what `run` does of a step that is steady, for all of its rows alike."""
        batch, rows, outputs = self._batch, steady.rows, self._flight.outputs
        assert outputs is not None
        if steady.num_to_fill is None:
            steady.num_to_fill = int((batch.next_seal[rows] - batch.computed[rows]).min())
        batch.computed[steady.places] = steady.computed
        steady.num_to_fill -= 1
        if steady.num_to_fill <= 0:
            self._seal(rows)
            steady.num_to_fill = None
        if batch.num_windowed:
            self._trim(rows)
        tokens = self._result.token_ids[0]
        batch.append_steady(steady, tokens)
        self._tell_runs(steady.readers, outputs, tokens[None])

    def _tell(self, sequence: SequenceState, token_id: int, index: int) -> None:
        """Note a token that is more than a further one: the first, the last, one with details."""
        batch = self._batch
        assert sequence.row is not None
        batch.sync(sequence)
        if sequence.sibling in sequence.withdrawn:
            # It only computes the prompt for its siblings.
            return
        finish = sequence.finish_reason(token_id)
        logprobs = self._result.logprobs.get(index)
        self._committed.news.append(
            Progress(sequence, sequence.num_outputs - 1, token_id, logprobs, finish, None)
        )
        if batch.plain[sequence.row] != (sequence.request.params.logprobs is None):
            batch.plain[sequence.row] = True
            batch.version += 1
        # A sequence that is yet to be forked is retired after that.
        if finish is not None and not sequence.num_unborn:
            sequence.finish = finish
            batch.retire(sequence)

    def _fork(self, first: int, token_ids: IntArray) -> None:
        """Make the siblings of a sequence whose prompt is computed; each knows its first token."""
        batch = self._batch
        row = int(self._flight.sampled[first])
        leader = batch.sequence(row)
        batch.num_reserved_rows -= leader.num_unborn
        leader.num_unborn = 0
        batch.num_unborn[row] = 0
        batch.held_back[row] = False
        batch.mark_forked(row)
        withdrawn, leader.withdrawn = leader.withdrawn, frozenset()
        siblings = self._flight.plan.sample_siblings
        num_drawn = int((self._flight.sampled == row).sum())
        for index in range(first + 1, first + num_drawn):
            sibling = int(siblings[index])
            if sibling in withdrawn:
                continue
            child = leader.fork(sibling, batch.kv.fork(leader.table))
            child_row = batch.enter(child, int(batch.computed[row]))
            batch.mark_forked(child_row)
            self._committed.born.append(child)
            batch.append(np.array([child_row]), token_ids[index : index + 1])
            self._tell(child, int(token_ids[index]), index)
        finish = leader.finish_reason(leader.tokens[-1])
        if 0 in withdrawn:
            finish = FinishReason.CANCELLED
        if finish is not None:
            leader.finish = finish
            batch.retire(leader)
