"""A toy rank whose output shows any wrong block, and the oracle that uses no blocks at all.

Each KV slot stores a fingerprint of (token, position, adapter, attached content, layer group). The
next token is a hash of the slots that its window lets it see, as read through the rank's own block
table, which StepPlan differences alone keep up to date: a slot that is stale, foreign, misplaced or
missing changes the stream.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.beam_search import num_candidates
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.ids import Row
from rayserve_paged.core.request import FinishReason, ModelLimits, Request, admit
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import (
    RowStart,
    ScoredTokens,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

Slots = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]


def fingerprints(
    token_ids: npt.ArrayLike,
    positions: npt.ArrayLike,
    adapter: Adapter | None = None,
    attachments: Iterable[Attachment] = (),
    layer_group: int = 0,
) -> Slots:
    """Return what the slots of these tokens hold; never 0, which is an unwritten slot."""
    tokens = np.asarray(token_ids, np.uint64) + np.uint64(1)
    places = np.asarray(positions, np.uint64) + np.uint64(1)
    mixed = tokens * np.uint64(0x9E3779B97F4A7C15) ^ places * np.uint64(0xC2B2AE3D27D4EB4F)
    if adapter is not None:
        mixed ^= _digest(f"{adapter.adapter_id}/{adapter.version}".encode())
    for attachment in attachments:
        of_attachment = places - np.uint64(attachment.offset)
        inside = (places > attachment.offset) & (places <= attachment.end)
        mixed[inside] ^= (_digest(attachment.digest) * of_attachment)[inside]
    return mixed + np.uint64(layer_group << 32) | np.uint64(1)


def visible(num_tokens: int, window: AttentionWindow) -> Positions:
    """Return the positions that the last of these tokens attends to."""
    positions = np.arange(num_tokens)
    if window.size is None:
        return positions
    is_sink = positions < window.num_sink_tokens
    return positions[is_sink | (num_tokens - 1 - positions < window.size)]


def _digest(content: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))


def next_token(
    slots: Slots, params: SamplingParams, output_index: int, vocab_size: int, sibling: int = 0
) -> int:
    """Hash a history to a token; above temperature 0 the draw depends on
    (seed, sibling, index) as well.
    """
    digest = hashlib.blake2b(slots.tobytes(), digest_size=8)
    if params.temperature > 0:
        digest.update(f"{params.seed}/{sibling}/{output_index}".encode())
    return int.from_bytes(digest.digest(), "little") % vocab_size


def score(slots: Slots, target: int, num_top: int) -> TokenLogprobs:
    """Hash a history and the prompt token after it to what stands for its log-probability."""
    digest = hashlib.blake2b(slots.tobytes() + target.to_bytes(4, "little"), digest_size=8)
    value = int.from_bytes(digest.digest(), "little")
    return TokenLogprobs(
        -(value % 10000) / 1000, tuple((value % 97 + i, -1.0) for i in range(num_top))
    )


def token_logprobs(slots: Slots, vocab_size: int) -> list[float]:
    """Hash a history to what stands for the log-probabilities of a beam's next tokens: sixteenths
    from -3 to 0, so that sums are exact and equals are common.
    """
    return [-(byte % 49) / 16 for byte in hashlib.shake_128(slots.tobytes()).digest(vocab_size)]


class ScheduledRow(NamedTuple):
    """What one row computed in one step."""

    row: int
    num_computed: int
    num_tokens: int
    samples: int


class FingerprintRank:
    """Executes step plans on slots of its own.

    Args:
        limits: Of its replica.
        poison: (seed, output index) or (seed, output index, sibling) of draws that raise.
    """

    def __init__(self, limits: ModelLimits, poison: Iterable[tuple[int, ...]] = ()) -> None:
        self.limits = limits
        self.poison = set(poison)
        self.slots: Slots = np.zeros(limits.num_slots, np.uint64)
        self.starts: dict[int, RowStart] = {}
        self.tables: dict[int, list[int]] = {}
        self.windows: dict[int, tuple[AttentionWindow, ...]] = {}
        self.history: list[list[ScheduledRow]] = []
        self.sampled: dict[int, int] = {}
        self.interrupt: Callable[[], bool] | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan, up to the step after which `interrupt` says so or a draw fails."""
        for start in plan.starts:
            self.starts[start.row] = start
            self.tables[start.row] = start.block_ids.tolist()
            self.windows[start.row] = self._windows(start)
        for row, block_id in zip(plan.append_rows, plan.append_blocks, strict=True):
            self.tables[int(row)].append(int(block_id))
        self._copy(plan.copies)
        num_samples = np.bincount(plan.sample_indices, minlength=len(plan.rows))
        token_ids, computed, num_tokens = plan.token_ids.copy(), plan.num_computed, plan.num_tokens
        of_token = np.repeat(plan.rows, num_tokens)
        token_ids[plan.late] = [self.sampled[int(row)] for row in of_token[plan.late]]
        tokens: list[npt.NDArray[np.int32]] = []
        errors: dict[int, str] = {}
        prompt_logprobs: list[TokenLogprobs] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for _step in range(plan.num_steps):
            if _step > 0:
                computed, num_tokens = computed + num_tokens, np.ones_like(num_tokens)
                token_ids = tokens[-1]
            scheduled = [
                ScheduledRow(int(row), int(before), int(count), int(samples))
                for row, before, count, samples in zip(
                    plan.rows, computed, num_tokens, num_samples, strict=True
                )
            ]
            self.history.append(scheduled)
            self._write(scheduled, token_ids)
            if plan.scored is not None:
                prompt_logprobs += self._score(plan.scored, scheduled)
            row_tokens, errors = self._sample(plan, scheduled)
            logprobs = self._propose(plan, scheduled)
            tokens.append(np.array(row_tokens, np.int32))
            if errors or (self.interrupt is not None and self.interrupt()):
                break
        sampled_rows = plan.rows[plan.sample_indices].tolist()
        # Of this plan alone: what an older one sampled is known by now.
        self.sampled = dict(zip(sampled_rows, tokens[-1].tolist(), strict=True))
        return StepResult(plan.step_id, np.stack(tokens), logprobs, errors, tuple(prompt_logprobs))

    def _copy(self, copies: npt.NDArray[np.int32]) -> None:
        block_size = self.limits.block_size
        before = self.slots.copy()
        for source, target, num_slots in copies.tolist():
            first, new = source * block_size, target * block_size
            self.slots[new : new + num_slots] = before[first : first + num_slots]

    def _windows(self, start: RowStart) -> tuple[AttentionWindow, ...]:
        return tuple(window.tighter(start.window) for window in self.limits.layer_groups)

    def read(self, row: Row | int, num_tokens: int) -> Slots:
        """Return the slots that a row's token sees, through its table, in all layer groups."""
        seen = [
            self.slots[self._places(row, visible(num_tokens, window), group)]
            for group, window in enumerate(self.windows[int(row)])
        ]
        return np.concatenate(seen)

    def _write(self, scheduled: list[ScheduledRow], token_ids: npt.NDArray[np.int32]) -> None:
        written: list[int] = []
        first = 0
        for row, num_computed, num_tokens, _samples in scheduled:
            positions = np.arange(num_computed, num_computed + num_tokens)
            tokens = token_ids[first : first + num_tokens]
            start = self.starts[row]
            for group in range(len(self.limits.layer_groups)):
                places = self._places(row, positions, group)
                written += places.tolist()
                self.slots[places] = fingerprints(
                    tokens, positions, start.adapter, start.attachments, group
                )
            first += num_tokens
        assert first == len(token_ids), "the plan's tokens do not add up"
        assert len(set(written)) == len(written), "two rows write one slot in one step"

    def _score(
        self, scored: ScoredTokens, scheduled: list[ScheduledRow]
    ) -> Iterator[TokenLogprobs]:
        places = [
            (row, position)
            for row, num_computed, num_tokens, _samples in scheduled
            for position in range(num_computed, num_computed + num_tokens)
        ]
        for index, target in zip(scored.indices.tolist(), scored.targets.tolist(), strict=True):
            row, position = places[index]
            num_top = self.starts[row].params.prompt_logprobs
            assert num_top is not None, "nobody asked for it"
            yield score(self.read(row, position + 1), target, num_top)

    def _sample(
        self, plan: StepPlan, scheduled: list[ScheduledRow]
    ) -> tuple[list[int], dict[int, str]]:
        tokens: list[int] = []
        errors: dict[int, str] = {}
        for index, sibling in zip(plan.sample_indices, plan.sample_siblings, strict=True):
            row, num_computed, num_tokens, _samples = scheduled[int(index)]
            start = self.starts[row]
            num_read = num_computed + num_tokens
            output_index = num_read - start.num_prompt_tokens
            assert start.params.seed is not None
            draw = (start.params.seed, output_index, int(sibling))
            if draw in self.poison or draw[:2] in self.poison:
                errors[len(tokens)] = f"draw {output_index} is poisoned"
            slots = self.read(row, num_read)
            vocab_size = self.limits.vocab_size
            tokens.append(next_token(slots, start.params, output_index, vocab_size, int(sibling)))
        return tokens, errors

    def _propose(self, plan: StepPlan, scheduled: list[ScheduledRow]) -> dict[int, TokenLogprobs]:
        """List the candidates of the samples that are beams."""
        proposed: dict[int, TokenLogprobs] = {}
        for sample, index in enumerate(plan.sample_indices.tolist()):
            row, num_computed, num_tokens, _samples = scheduled[index]
            start = self.starts[row]
            params = start.params
            if params.beam_width is None:
                continue
            eos = () if params.ignore_eos else self.limits.eos_token_ids
            ends = {*eos, *params.stop_token_ids}
            num_read = num_computed + num_tokens
            early = num_read - start.num_prompt_tokens + 1 < params.min_tokens
            possible = [
                (token_id, logprob)
                for token_id, logprob in enumerate(
                    token_logprobs(self.read(row, num_read), self.limits.vocab_size)
                )
                if not (early and token_id in ends)
                and (params.allowed_token_ids is None or token_id in params.allowed_token_ids)
            ]
            possible.sort(key=lambda candidate: -candidate[1])
            top = tuple(possible[: num_candidates(params.beam_width, len(ends))])
            proposed[sample] = TokenLogprobs(top[0][1], top)
        return proposed

    def _places(self, row: Row | int, positions: Positions, layer_group: int) -> Positions:
        block_size = self.limits.block_size
        num_groups = len(self.limits.layer_groups)
        table = np.array(self.tables[int(row)], np.int64)[layer_group::num_groups]
        return table[positions // block_size] * block_size + positions % block_size


class Expected(NamedTuple):
    """What a request must give."""

    token_ids: tuple[int, ...]
    finish: FinishReason


def prompt_oracle(
    request: Request, layer_groups: tuple[AttentionWindow, ...] = ONE_FULL_GROUP
) -> tuple[TokenLogprobs, ...]:
    """Score a prompt's tokens but the first, on a plain list of them."""
    tokens, num_top = list(request.prompt_token_ids), request.params.prompt_logprobs
    assert num_top is not None
    windows = request.windows(layer_groups)
    return tuple(
        score(seen(request, tokens[:end], windows), tokens[end], num_top)
        for end in range(1, len(tokens))
    )


def seen(request: Request, tokens: Sequence[int], windows: tuple[AttentionWindow, ...]) -> Slots:
    """Return what the last of these tokens sees, in all layer groups, without any blocks."""
    positions = np.arange(len(tokens))
    seen = []
    for group, window in enumerate(windows):
        slots = fingerprints(tokens, positions, request.scope.adapter, request.attachments, group)
        seen.append(slots[visible(len(tokens), window)])
    return np.concatenate(seen)


def oracle(request: Request, limits: ModelLimits, sibling: int = 0) -> Expected:
    """Run one sample of a request alone, on a plain list of tokens."""
    params = admit(request, limits).params
    assert params.max_tokens is not None
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids.update(limits.eos_token_ids)
    tokens = list(request.prompt_token_ids)
    windows = request.windows(limits.layer_groups)
    outputs: list[int] = []
    while True:
        slots = seen(request, tokens, windows)
        token = next_token(slots, params, len(outputs), limits.vocab_size, sibling)
        tokens.append(token)
        outputs.append(token)
        if len(outputs) >= params.min_tokens and token in stop_ids:
            return Expected(tuple(outputs), FinishReason.STOP)
        if len(outputs) == params.max_tokens:
            return Expected(tuple(outputs), FinishReason.LENGTH)
