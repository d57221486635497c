"""A toy rank whose output shows any wrong block, and the oracle that uses no blocks at all.

Each KV slot stores a fingerprint of (token, position). The next token is a hash of the slots as
read through the rank's own block table, which StepPlan differences alone keep up to date: a slot
that is stale, foreign, misplaced or missing changes the stream.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.ids import Row
from rayserve_paged.core.messages import RowStart, StepPlan, StepResult
from rayserve_paged.core.request import (
    FinishReason,
    ModelLimits,
    Request,
    SamplingParams,
    admit,
)

Slots = npt.NDArray[np.uint64]


def fingerprints(token_ids: npt.ArrayLike, positions: npt.ArrayLike) -> Slots:
    """Return what the slots of these tokens hold; never 0, which is an unwritten slot."""
    tokens = np.asarray(token_ids, np.uint64) + np.uint64(1)
    places = np.asarray(positions, np.uint64) + np.uint64(1)
    mixed = tokens * np.uint64(0x9E3779B97F4A7C15) ^ places * np.uint64(0xC2B2AE3D27D4EB4F)
    return mixed | np.uint64(1)


def next_token(slots: Slots, params: SamplingParams, output_index: int, vocab_size: int) -> int:
    """Hash a history to a token; above temperature 0 the draw depends on (seed, index) as well."""
    digest = hashlib.blake2b(slots.tobytes(), digest_size=8)
    if params.temperature > 0:
        digest.update(f"{params.seed}/{output_index}".encode())
    return int.from_bytes(digest.digest(), "little") % vocab_size


class ScheduledRow(NamedTuple):
    """What one row computed in one step."""

    row: int
    num_computed: int
    num_tokens: int
    samples: bool


class FingerprintRank:
    """Executes step plans on slots of its own.

    Args:
        limits: Of its replica.
        poison: (seed, output index) of draws that raise.
    """

    def __init__(self, limits: ModelLimits, poison: Iterable[tuple[int, int]] = ()) -> None:
        self.limits = limits
        self.poison = set(poison)
        self.slots: Slots = np.zeros(limits.num_slots, np.uint64)
        self.starts: dict[int, RowStart] = {}
        self.tables: dict[int, list[int]] = {}
        self.history: list[list[ScheduledRow]] = []

    def run(self, plan: StepPlan) -> StepResult:
        for start in plan.starts:
            self.starts[start.row] = start
            self.tables[start.row] = start.block_ids.tolist()
        for row, block_id in zip(plan.append_rows, plan.append_blocks, strict=True):
            self.tables[int(row)].append(int(block_id))
        scheduled = [
            ScheduledRow(*fields)
            for fields in zip(
                plan.rows.tolist(),
                plan.num_computed.tolist(),
                plan.num_tokens.tolist(),
                plan.samples.tolist(),
                strict=True,
            )
        ]
        self.history.append(scheduled)
        self._write(scheduled, plan.token_ids)
        return self._sample(plan, scheduled)

    def read(self, row: Row | int, num_tokens: int) -> Slots:
        """Return the first slots of a row, through its table."""
        return self.slots[self._places(row, np.arange(num_tokens))]

    def _write(self, scheduled: list[ScheduledRow], token_ids: npt.NDArray[np.int32]) -> None:
        written: list[int] = []
        first = 0
        for row, num_computed, num_tokens, _samples in scheduled:
            positions = np.arange(num_computed, num_computed + num_tokens)
            places = self._places(row, positions)
            written += places.tolist()
            self.slots[places] = fingerprints(token_ids[first : first + num_tokens], positions)
            first += num_tokens
        assert first == len(token_ids), "the plan's tokens do not add up"
        assert len(set(written)) == len(written), "two rows write one slot in one step"

    def _sample(self, plan: StepPlan, scheduled: list[ScheduledRow]) -> StepResult:
        tokens: list[int] = []
        errors: dict[int, str] = {}
        for row, num_computed, num_tokens, samples in scheduled:
            if not samples:
                continue
            start = self.starts[row]
            num_read = num_computed + num_tokens
            output_index = num_read - start.num_prompt_tokens
            assert start.params.seed is not None
            if (start.params.seed, output_index) in self.poison:
                errors[len(tokens)] = f"draw {output_index} is poisoned"
            slots = self.read(row, num_read)
            tokens.append(next_token(slots, start.params, output_index, self.limits.vocab_size))
        return StepResult(plan.step_id, np.array(tokens, np.int32), {}, errors)

    def _places(self, row: Row | int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        block_size = self.limits.block_size
        table = np.array(self.tables[int(row)], np.int64)
        return table[positions // block_size] * block_size + positions % block_size


class Expected(NamedTuple):
    """What a request must give."""

    token_ids: tuple[int, ...]
    finish: FinishReason


def oracle(request: Request, limits: ModelLimits) -> Expected:
    """Run a request alone, on a plain list of tokens."""
    params = admit(request, limits).params
    assert params.max_tokens is not None
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids.update(limits.eos_token_ids)
    tokens = list(request.prompt_token_ids)
    outputs: list[int] = []
    while True:
        slots = fingerprints(tokens, np.arange(len(tokens)))
        token = next_token(slots, params, len(outputs), limits.vocab_size)
        tokens.append(token)
        outputs.append(token)
        if len(outputs) >= params.min_tokens and token in stop_ids:
            return Expected(tuple(outputs), FinishReason.STOP)
        if len(outputs) == params.max_tokens:
            return Expected(tuple(outputs), FinishReason.LENGTH)
