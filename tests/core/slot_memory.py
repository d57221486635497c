"""A rank whose slots hold whole histories, so that each can be compared with what it must hold.

A slot of layer group g of G holds the history that its token ends as `history * G + g`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from ledger_oracle import Histories, Sample, seen_positions

from rayserve_paged.core.beam_search import num_candidates
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.step_messages import RowStart, StepPlan, StepResult, TokenLogprobs

UNWRITTEN = -1


class SlotMemory:
    """Executes step plans on slots, each of which holds the history that its token ends.

    A token's slot is written from the slot before it, as read through the row's own table: what
    is wrong in one shows in all that follow.

    Args:
        pool: Blocks that are written must be held in it and not sealed.
        block_size: Slots per block.
        histories: Numbers of the histories.
        num_layer_groups: Blocks that each place of a sequence has.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, histories: Histories, num_layer_groups: int
    ) -> None:
        self.slots = [UNWRITTEN] * (pool.num_blocks * block_size)
        self.interrupt: Callable[[], bool] = lambda: False
        self._pool = pool
        self._block_size = block_size
        self._histories = histories
        self._num_groups = num_layer_groups
        self._starts: dict[int, RowStart] = {}
        self._tables: dict[int, list[int]] = {}
        self._sampled: dict[int, int] = {}

    def block(self, block_id: BlockId) -> list[int]:
        """Return what the slots of a block hold."""
        return self.slots[block_id * self._block_size : (block_id + 1) * self._block_size]

    def run(self, plan: StepPlan, samples: Mapping[int, Sample]) -> StepResult:
        """Execute a plan, and compare every slot that it reads with what it must hold.

        Args:
            plan: The oldest plan in flight.
            samples: By row, what the sequences in it must be; of a row that is to be forked, the
                first sample.
        """
        for start in plan.starts:
            self._starts[start.row] = start
            self._tables[start.row] = start.block_ids.tolist()
        for row, block_id in zip(
            plan.append_rows.tolist(), plan.append_blocks.tolist(), strict=True
        ):
            self._tables[row].append(block_id)
        self._copy(plan.copies.tolist())
        rows, ends = plan.rows.tolist(), plan.num_computed.tolist()
        tokens = self._tokens(plan)
        taken: list[list[int]] = []
        errors: dict[int, str] = {}
        for _step in range(plan.num_steps):
            for i, row in enumerate(rows):
                self._write(row, ends[i], tokens[i], samples[row])
                ends[i] += len(tokens[i])
            drawn = self._draw(plan, ends, samples, errors)
            taken.append(drawn)
            if plan.num_steps > 1:
                tokens = [[token_id] for token_id in drawn]
            if errors or self.interrupt():
                break
        of_sample = [rows[index] for index in plan.sample_indices.tolist()]
        self._sampled = dict(zip(of_sample, taken[-1], strict=True))
        result = np.array(taken, np.int32).reshape(len(taken), len(of_sample))
        return StepResult(plan.step_id, result, self._propose(plan, ends), errors)

    def _propose(self, plan: StepPlan, ends: Sequence[int]) -> dict[int, TokenLogprobs]:
        """List the candidates of the samples that are beams."""
        proposed: dict[int, TokenLogprobs] = {}
        for sample, index in enumerate(plan.sample_indices.tolist()):
            row = int(plan.rows[index])
            width = self._starts[row].params.beam_width
            if width is not None:
                logprobs = self._histories.logprobs(self._last_history(row, ends[index]))
                order = sorted(range(len(logprobs)), key=lambda token_id: -logprobs[token_id])
                most = num_candidates(width, num_end_ids=1)
                top = tuple((token_id, logprobs[token_id]) for token_id in order[:most])
                proposed[sample] = TokenLogprobs(top[0][1], top)
        return proposed

    def _tokens(self, plan: StepPlan) -> list[list[int]]:
        flat = plan.token_ids.tolist()
        if len(plan.late):
            of_token = np.repeat(plan.rows, plan.num_tokens)
            for place in plan.late.tolist():
                flat[place] = self._sampled[int(of_token[place])]
        tokens, first = [], 0
        for count in plan.num_tokens.tolist():
            tokens.append(flat[first : first + count])
            first += count
        assert first == len(flat), "the plan's tokens do not add up"
        return tokens

    def _copy(self, copies: Sequence[Sequence[int]]) -> None:
        size = self._block_size
        sources = [self.slots[source * size : source * size + num] for source, _, num in copies]
        for (source, target, num_slots), content in zip(copies, sources, strict=True):
            assert self._pool.count(BlockId(source)), f"the source {source} of a copy is not held"
            self._be_sure_it_may_be_written(target)
            self.slots[target * size : target * size + num_slots] = content

    def _be_sure_it_may_be_written(self, block_id: int) -> None:
        assert self._pool.count(BlockId(block_id)), f"block {block_id} is written and not held"
        assert not self._pool.is_sealed(BlockId(block_id)), f"block {block_id} is sealed"

    def _place(self, row: int, position: int, group: int) -> int:
        size = self._block_size
        block_id = self._tables[row][position // size * self._num_groups + group]
        return block_id * size + position % size

    def _write(self, row: int, num_computed: int, tokens: list[int], sample: Sample) -> None:
        size, groups, slots = self._block_size, self._num_groups, self.slots
        end = num_computed + len(tokens)
        first, last = num_computed // size * groups, (end - 1) // size * groups + groups
        for block_id in self._tables[row][first:last]:
            self._be_sure_it_may_be_written(block_id)
        for group in range(groups):
            history = sample.root
            if num_computed:
                history = slots[self._place(row, num_computed - 1, group)] // groups
            for position, token_id in enumerate(tokens, num_computed):
                history = self._histories.after(history, token_id)
                slots[self._place(row, position, group)] = history * groups + group
        # A sequence that ended is computed on until the step that was planned before has finished.
        if end <= len(sample.histories):
            self._compare(row, end, sample)

    def _compare(self, row: int, num_read: int, sample: Sample) -> None:
        """Compare all slots that the last token sees with what they must hold."""
        size, groups, table = self._block_size, self._num_groups, self._tables[row]
        for group, window in enumerate(sample.windows):
            if window.size is None:
                read: list[int] = []
                for block_id in table[group : -(-num_read // size) * groups : groups]:
                    read += self.slots[block_id * size : (block_id + 1) * size]
                expected = [history * groups + group for history in sample.histories[:num_read]]
                assert read[:num_read] == expected, f"row {row} reads wrong slots"
                continue
            for position in seen_positions(num_read, window):
                held = self.slots[self._place(row, position, group)]
                expected_slot = sample.histories[position] * groups + group
                assert held == expected_slot, f"row {row} reads a wrong slot at {position}"

    def _last_history(self, row: int, num_tokens: int) -> int:
        return self.slots[self._place(row, num_tokens - 1, 0)] // self._num_groups

    def _draw(
        self,
        plan: StepPlan,
        ends: Sequence[int],
        samples: Mapping[int, Sample],
        errors: dict[int, str],
    ) -> list[int]:
        drawn: list[int] = []
        for index, sibling in zip(
            plan.sample_indices.tolist(), plan.sample_siblings.tolist(), strict=True
        ):
            row = int(plan.rows[index])
            sample, start = samples[row], self._starts[row]
            output_index = ends[index] - start.num_prompt_tokens
            if sample.failing_draw == output_index and (
                output_index == 0 or sibling == sample.sibling
            ):
                errors[len(drawn)] = f"draw {output_index} of sample {sibling} fails"
            history = self._last_history(row, ends[index])
            seed = start.params.seed if start.params.temperature else None
            drawn.append(self._histories.draw(history, seed, sibling))
        return drawn
