"""What the requests of the replica machine are drawn from, and which of them can run."""

import dataclasses
from typing import Any

import pytest

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.request import ModelLimits, Request, admit
from rayserve_paged.core.retention import RetentionRange
from rayserve_paged.sim.fingerprint_rank import visible

ENDINGS: tuple[tuple[float, bool | str], ...] = (
    (1.0, False),
    (0.0, True),
    (2.0, "never"),
    (-1.0, False),
)
# What a search may choose from.
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"stop_token_ids": tuple(range(1, 12))},
    {"min_tokens": 3, "stop_token_ids": (5, 6, 7)},
    {"allowed_token_ids": tuple(range(3, 11)), "stop_token_ids": (3, 4, 5)},
    {"ignore_eos": True},
)
# Prompts are cut from these, so that they share prefixes of every length.
STORIES = (
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
    [3, 1, 4, 1, 7, 7, 7, 7, 7, 7, 7, 7],
    [3, 1, 4, 1, 5, 9, 2, 7, 7, 7, 7, 7],
)
# Cut off where the prompt ends.
RETENTIONS: tuple[tuple[RetentionRange, ...], ...] = (
    (RetentionRange(priority=80),),
    (RetentionRange(priority=10),),
    (RetentionRange(priority=5, duration_s=0.1),),
    (RetentionRange(0, 4, 90, 2.5), RetentionRange(4, 6, 60, 0.1), RetentionRange(6, 12, 20)),
    (RetentionRange(1, 3, 0), RetentionRange(5, None, 100, 0.1)),
)
# What tells equal tokens apart.
IDENTITIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tenant": {"tenant_salt": "tenant"},
    "adapter": {"adapter": Adapter("a", "1")},
    "reloaded adapter": {"adapter": Adapter("a", "2")},
    "image": {"attachments": (Attachment(bytes(16), 0, 1),)},
    "another image": {"attachments": (Attachment(bytes(15) + b"1", 0, 1),)},
}


def cut(ranges: tuple[RetentionRange, ...], num_prompt: int) -> tuple[RetentionRange, ...]:
    """Return what of some ranges a prompt of this length can have."""
    return tuple(
        dataclasses.replace(each, end=None if each.end is None else min(each.end, num_prompt))
        for each in ranges
        if each.start < num_prompt
    )


def is_admitted(request: Request, limits: ModelLimits) -> bool:
    """Return whether a request can run here; check how it is refused where it cannot."""
    params = request.params
    assert params.max_tokens is not None
    width = params.beam_width or 1
    if max(params.n, width) > limits.max_num_seqs:
        with pytest.raises(InvalidInputError, match="sequences that run at once"):
            admit(request, limits)
        return False
    num_blocks = _most_blocks_at_once(request, limits)
    if params.beam_width is not None and params.max_tokens > 1:
        windows = request.windows(limits.layer_groups)
        # Beams share what is full of the prompt, and it may be that nothing else is. With a
        # window they do not count even on that.
        num_tokens = len(request.prompt_token_ids) + params.max_tokens - 1
        shared = len(request.prompt_token_ids) // limits.block_size
        own = -(-num_tokens // limits.block_size) - shared
        sharing = (shared + width * own) * len(windows)
        full = all(window.size is None for window in windows)
        num_blocks = sharing if full else width * num_blocks
    if num_blocks > limits.num_usable_blocks:
        with pytest.raises(CapacityError) as refused:
            admit(request, limits)
        assert refused.value.num_blocks_needed == num_blocks
        return False
    return True


def _most_blocks_at_once(request: Request, limits: ModelLimits) -> int:
    """Count, length by length, the blocks that computing one more token of a sample takes."""
    assert request.params.max_tokens is not None
    num_tokens = len(request.prompt_token_ids) + request.params.max_tokens - 1
    size = limits.block_size
    windows = request.windows(limits.layer_groups)

    def count(position: int) -> int:
        # The block before the token is kept whatever the window.
        kept = {(g, max(0, position - 1) // size) for g in range(len(windows))}
        for group, window in enumerate(windows):
            kept |= {(group, seen // size) for seen in visible(position + 1, window).tolist()}
            if window.size is not None:
                sinks = min(window.num_sink_tokens, position + 1)
                kept |= {(group, sink // size) for sink in range(sinks)}
        return len(kept)

    return max(count(position) for position in range(num_tokens))
