"""Which steps are timed, and the tables and the held-out errors that come of it."""

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from rayserve_paged.core.config import BatchConfig
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.profiling.ranks import ReplicaProcesses, Rounds
from rayserve_paged.profiling.step_plans import (
    StepShape,
    chunk_shape,
    decode_shape,
    mixed_shape,
)
from rayserve_paged.sim.profile import DecodeSteps, EmptySteps, PrefillSteps, StepTable
from rayserve_paged.sim.profiled_cost import ProfiledCost

_CONTEXTS: Final = (16, 128, 512, 2048, 8192, 32768)
_NUM_HELD_OUT: Final = 16
_SEED: Final = 1

Progress = Callable[[str], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The axes of a table.

    Args:
        num_tokens: Of empty steps.
        num_sequences: Of decode steps.
        decode_contexts: Tokens in the cache of each.
        chunk_tokens: Of steps in which one sequence computes a chunk.
        chunk_contexts: Tokens in its cache.
    """

    num_tokens: tuple[int, ...]
    num_sequences: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    chunk_contexts: tuple[int, ...]

    def shapes(self) -> list[StepShape]:
        """Return all steps of the grid."""
        return [
            *(chunk_shape(tokens, 0) for tokens in self.num_tokens),
            *(decode_shape(n, c) for n in self.num_sequences for c in self.decode_contexts),
            *(chunk_shape(n, c) for n in self.chunk_tokens for c in self.chunk_contexts),
        ]


def choose_grid(batch: BatchConfig, limits: ModelLimits, max_context: int) -> Grid:
    """Return a grid that covers what a batch may hold.

    Args:
        batch: Bounds on a step.
        limits: Of the replica.
        max_context: Tokens in the cache of a sequence, at most.

    Raises:
        InvalidInputError: A context that no sequence can have.
    """
    # A sequence of the longest context still computes a chunk of its own.
    longest = limits.max_model_len - 1
    if not 32 <= max_context < longest:
        raise InvalidInputError("max_context", max_context, f"from 32 to {longest - 1}")
    most_tokens = min(batch.max_num_batched_tokens, longest)
    contexts = [*(c for c in _CONTEXTS if c < max_context), max_context]
    chunk_contexts = [c for c in contexts if c + 16 <= longest]
    chunks = _doubling(16, most_tokens, 4)
    room = min(limits.max_model_len - max(chunks), max_context)
    return Grid(
        num_tokens=tuple(_doubling(1, most_tokens, 2)),
        num_sequences=tuple(_doubling(1, batch.max_num_seqs, 2)),
        decode_contexts=tuple(contexts),
        chunk_tokens=tuple(chunks),
        chunk_contexts=(0, *(c for c in chunk_contexts if 64 <= c <= room)),
    )


def _doubling(first: int, last: int, factor: int) -> list[int]:
    """Return numbers from `first` to `last`, each `factor` times the one before; at least two."""
    numbers = [min(first, last)]
    while numbers[-1] * factor < last:
        numbers.append(numbers[-1] * factor)
    if numbers[-1] != last:
        numbers.append(last)
    return numbers if len(numbers) > 1 else [*numbers, numbers[0] + 1]


def held_out_shapes(grid: Grid, seed: int = _SEED) -> list[StepShape]:
    """Draw steps that lie between the points of a grid: decoding, chunks, and both at once."""
    draw = random.Random(seed)
    shapes = []
    for number in range(_NUM_HELD_OUT):
        num_sequences = draw.randint(1, grid.num_sequences[-1])
        context = draw.randint(grid.decode_contexts[0], grid.decode_contexts[-1])
        decoding = decode_shape(num_sequences, context)
        room = max(2, grid.num_tokens[-1] - num_sequences)
        chunk = chunk_shape(
            draw.randint(2, max(2, min(room, grid.chunk_tokens[-1]))),
            draw.choice([0, draw.randint(0, grid.chunk_contexts[-1])]),
        )
        kinds = (decoding, chunk, mixed_shape(decoding, chunk))
        shapes.append(kinds[number % 3])
    return shapes


def time_shapes(
    processes: ReplicaProcesses,
    shapes: Sequence[StepShape],
    levels: Iterable[int],
    num_passes: int,
    rounds: Rounds,
    progress: Progress,
) -> dict[tuple[int, StepShape], float]:
    """Time steps; a slow spell of the machine hits a part of the samples of many steps.

    Args:
        processes: What runs them.
        shapes: The steps.
        levels: How many replicas run them at once, one after the other.
        num_passes: Times that all steps are gone through, in an order of its own.
        rounds: Of each step in each pass.
        progress: Told how far it is.

    Returns:
        Median seconds by level and step.
    """
    jobs = [(level, shape) for level in levels for shape in dict.fromkeys(shapes)]
    samples: dict[tuple[int, StepShape], list[float]] = {job: [] for job in jobs}
    draw = random.Random(_SEED)
    for number in range(num_passes):
        draw.shuffle(jobs)
        for done, (level, shape) in enumerate(jobs):
            progress(f"pass {number + 1} of {num_passes}: step {done + 1} of {len(jobs)}")
            samples[level, shape] += processes.time_steps(shape, level, rounds)
    return {job: statistics.median(seconds) for job, seconds in samples.items()}


def tables_of(
    grid: Grid, seconds: dict[tuple[int, StepShape], float], levels: Iterable[int]
) -> list[StepTable]:
    """Arrange the seconds of a grid's steps, one table for each level."""
    return [
        StepTable(
            num_active=level,
            empty=EmptySteps(
                num_tokens=list(grid.num_tokens),
                seconds=[seconds[level, chunk_shape(n, 0)] for n in grid.num_tokens],
            ),
            decode=DecodeSteps(
                num_sequences=list(grid.num_sequences),
                num_context_tokens=list(grid.decode_contexts),
                seconds=[
                    [seconds[level, decode_shape(n, c)] for c in grid.decode_contexts]
                    for n in grid.num_sequences
                ],
            ),
            prefill=PrefillSteps(
                num_tokens=list(grid.chunk_tokens),
                num_context_tokens=list(grid.chunk_contexts),
                seconds=[
                    [seconds[level, chunk_shape(n, c)] for c in grid.chunk_contexts]
                    for n in grid.chunk_tokens
                ],
            ),
        )
        for level in levels
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class HeldOut:
    """How well steps are predicted that were timed and not put into the table.

    Args:
        num_steps: Of these.
        mean_error: Mean of |predicted - measured| over measured.
        p90_error: Its 90th percentile.
    """

    num_steps: int
    mean_error: float
    p90_error: float


def held_out_errors(cost: ProfiledCost, seconds: dict[tuple[int, StepShape], float]) -> HeldOut:
    """Compare predictions with measured seconds, by level and step."""
    errors = []
    for (level, shape), measured in seconds.items():
        (predicted,) = cost.step_seconds(
            shape.num_computed, shape.num_tokens, len(shape.rows), 1, level
        )
        errors.append(abs(float(predicted) - measured) / measured)
    return HeldOut(len(errors), float(np.mean(errors)), float(np.percentile(errors, 90)))
