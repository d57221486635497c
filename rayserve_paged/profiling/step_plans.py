"""Step plans that are made up: any batch with any context, without computing the context first."""

import dataclasses

import numpy as np

from rayserve_paged.core.block_table import num_blocks_for
from rayserve_paged.core.ids import Row, StepId
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import IntArray, RowStart, StepPlan

_NO_INTS = np.zeros(0, np.int32)
_GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes: for each sequence (tokens in its cache, tokens to compute)."""

    rows: tuple[tuple[int, int], ...]

    @property
    def num_computed(self) -> IntArray:
        """int32 [n], as `StepPlan.num_computed`."""
        return np.array([computed for computed, _tokens in self.rows], np.int32)

    @property
    def num_tokens(self) -> IntArray:
        """int32 [n], as `StepPlan.num_tokens`."""
        return np.array([tokens for _computed, tokens in self.rows], np.int32)


def decode_shape(num_sequences: int, num_context_tokens: int) -> StepShape:
    """Return a step in which every sequence decodes."""
    return StepShape(((num_context_tokens, 1),) * num_sequences)


def chunk_shape(num_tokens: int, num_context_tokens: int) -> StepShape:
    """Return a step in which one sequence computes several tokens."""
    return StepShape(((num_context_tokens, num_tokens),))


def mixed_shape(*shapes: StepShape) -> StepShape:
    """Return a step that does all that these do."""
    return StepShape(tuple(row for shape in shapes for row in shape.rows))


def make_plan(shape: StepShape, limits: ModelLimits) -> StepPlan:
    """Return a plan that can be run again and again, each time on the same slots.

    Blocks are dealt out in turn over the whole pool, so that the contexts of different sequences
    lie in different memory as far as the pool reaches; what is in them makes no step longer.

    Args:
        shape: What it computes; every sequence samples.
        limits: Of the replica.
    """
    next_block = 0
    starts = []
    for row, (computed, tokens) in enumerate(shape.rows):
        num_places = num_blocks_for(computed + tokens, limits.block_size)
        num_ids = num_places * len(limits.layer_groups)
        block_ids = (next_block + np.arange(num_ids)) % limits.num_blocks
        next_block += num_ids
        starts.append(
            RowStart(
                Row(row), computed, block_ids.astype(np.int32), _GREEDY, max(1, computed + tokens)
            )
        )
    num_rows = len(shape.rows)
    num_tokens = shape.num_tokens
    return StepPlan(
        step_id=StepId(0),
        starts=tuple(starts),
        append_rows=_NO_INTS,
        append_blocks=_NO_INTS,
        copies=np.zeros((0, 3), np.int32),
        rows=np.arange(num_rows, dtype=np.int32),
        num_computed=shape.num_computed,
        num_tokens=num_tokens,
        # Spread over the vocabulary, so that the rows of the embedding are not always the same.
        token_ids=(np.arange(int(num_tokens.sum())) * 7919 % limits.vocab_size).astype(np.int32),
        late=_NO_INTS,
        sample_indices=np.arange(num_rows, dtype=np.int32),
        sample_siblings=np.zeros(num_rows, np.int32),
        num_steps=1,
    )
