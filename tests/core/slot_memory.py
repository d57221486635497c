"""A rank whose slots hold whole histories, so that each can be compared with what it must hold."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.messages import RowStart, StepPlan, StepResult

UNWRITTEN = -1


class Histories:
    """Every sequence of tokens that occurs, as a number: one number, one history.

    Args:
        vocab_size: Tokens are drawn below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._after: dict[tuple[int, int], int] = {}
        self._roots: dict[RequestScope, int] = {}
        self._mixed: list[int] = []

    def root(self, scope: RequestScope) -> int:
        """Return the empty history of a scope; KV of one is none of another's."""
        if scope not in self._roots:
            # What is drawn does not depend on it.
            self._roots[scope] = self._new(17)
        return self._roots[scope]

    def after(self, history: int, token_id: int) -> int:
        """Return a history with one more token."""
        known = self._after.get((history, token_id))
        if known is None:
            mixed = (self._mixed[history] * 0x9E3779B97F4A7C15 + token_id + 1) % (1 << 64)
            known = self._after[history, token_id] = self._new(mixed ^ mixed >> 29)
        return known

    def draw(self, history: int, seed: int | None, sibling: int) -> int:
        """Return the token that follows; without a seed it depends on the history alone."""
        mixed = self._mixed[history]
        if seed is not None:
            mixed = (mixed + seed * 0xBF58476D1CE4E5B9 + sibling * 0x94D049BB133111EB) % (1 << 64)
            mixed ^= mixed >> 31
        return (mixed >> 7) % self.vocab_size

    def _new(self, mixed: int) -> int:
        self._mixed.append(mixed)
        return len(self._mixed) - 1


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample of a request: all that it will ever be, and how much of that was told.

    Args:
        seed: None for a greedy one.
        sibling: Which sample of its request.
        num_prompt: Tokens of the prompt.
        tokens: Prompt and outputs up to its own end.
        histories: For each token the history that it ends; what its slot must hold.
        failing_draw: Output index whose draw raises.
        num_told: Outputs that were told.
        ended: Whether its end was told.
    """

    seed: int | None
    sibling: int
    num_prompt: int
    tokens: list[int]
    histories: list[int]
    failing_draw: int | None = None
    num_told: int = 0
    ended: bool = False


class SlotMemory:
    """Executes step plans on slots, each of which holds the history that its token ends.

    A token's slot is written from the slot before it, as read through the row's own table: what
    is wrong in one shows in all that follow.

    Args:
        pool: Blocks that are written must be held in it and not sealed.
        block_size: Slots per block.
        histories: Numbers of the histories.
    """

    def __init__(self, pool: BlockPool, block_size: int, histories: Histories) -> None:
        self.slots = [UNWRITTEN] * (pool.num_blocks * block_size)
        self.interrupt: Callable[[], bool] = lambda: False
        self._pool = pool
        self._block_size = block_size
        self._histories = histories
        self._starts: dict[int, RowStart] = {}
        self._tables: dict[int, list[int]] = {}
        self._sampled: dict[int, int] = {}

    def block(self, block_id: BlockId) -> list[int]:
        """Return what the slots of a block hold."""
        return self.slots[block_id * self._block_size : (block_id + 1) * self._block_size]

    def run(
        self, plan: StepPlan, samples: Mapping[int, Sample], roots: Mapping[int, int]
    ) -> StepResult:
        """Execute a plan, and compare every slot that it reads with what it must hold.

        Args:
            plan: The oldest plan in flight.
            samples: By row, what the sequences in it must be; of a row that is to be forked, the
                first sample.
            roots: By row, the empty history of its scope.
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
                self._write(row, ends[i], tokens[i], samples[row], roots[row])
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
        return StepResult(plan.step_id, result, {}, errors)

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
        assert not self._pool.is_frozen(BlockId(block_id)), f"block {block_id} is frozen"

    def _write(
        self, row: int, num_computed: int, tokens: list[int], sample: Sample, root: int
    ) -> None:
        size, table, slots = self._block_size, self._tables[row], self.slots
        for block_id in table[num_computed // size : (num_computed + len(tokens) - 1) // size + 1]:
            self._be_sure_it_may_be_written(block_id)
        history = root
        if num_computed:
            last = num_computed - 1
            history = slots[table[last // size] * size + last % size]
        for position, token_id in enumerate(tokens, num_computed):
            history = self._histories.after(history, token_id)
            slots[table[position // size] * size + position % size] = history
        num_read = num_computed + len(tokens)
        read: list[int] = []
        for block_id in table[: -(-num_read // size)]:
            read += slots[block_id * size : (block_id + 1) * size]
        # A sequence that ended is computed on until the step that was planned before has finished.
        num_right = min(num_read, len(sample.histories))
        assert read[:num_right] == sample.histories[:num_right], f"row {row} reads wrong slots"

    def _draw(
        self,
        plan: StepPlan,
        ends: Sequence[int],
        samples: Mapping[int, Sample],
        errors: dict[int, str],
    ) -> list[int]:
        size, drawn = self._block_size, []
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
            last = ends[index] - 1
            history = self.slots[self._tables[row][last // size] * size + last % size]
            seed = start.params.seed if start.params.temperature else None
            drawn.append(self._histories.draw(history, seed, sibling))
        return drawn
