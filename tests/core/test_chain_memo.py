import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import make_scope

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import RequestScope, extend_chain
from rayserve_paged.core.chain_memo import BYTES_PER_CHAIN, BYTES_PER_KEY, ChainMemo
from rayserve_paged.core.ids import BlockKey

SCOPE = make_scope(block_size=4)
ROOT = SCOPE.root()
OTHER_ROOT = SCOPE.root(RequestScope("a tenant"))
BYTES_PER_BLOCK = 16 + BYTES_PER_KEY


class _Asked(NamedTuple):
    root: BlockKey
    prompt: list[int]
    attachments: tuple[Attachment, ...]


@st.composite
def _prompts(draw: st.DrawFn) -> list[_Asked]:
    """Prompts of few tokens, many of which begin as another one did."""
    asked: list[_Asked] = []
    for _ in range(draw(st.integers(1, 20))):
        before = draw(st.sampled_from(asked)).prompt if asked else []
        kept = before[: draw(st.integers(0, len(before)))]
        prompt = kept + draw(st.lists(st.integers(0, 1), max_size=24))
        attachments: list[Attachment] = []
        for start in range(0, len(prompt), 8):
            if draw(st.integers(0, 5)) == 0:
                digest = bytes([draw(st.integers(0, 1))]) * 16
                offset = draw(st.integers(start, min(len(prompt) - 1, start + 7)))
                most = min(len(prompt), start + 8) - offset
                attachments.append(Attachment(digest, offset, draw(st.integers(1, most))))
        asked.append(_Asked(draw(st.sampled_from([ROOT, OTHER_ROOT])), prompt, tuple(attachments)))
    return asked


@given(asked=_prompts(), num_blocks=st.sampled_from([0, 1, 3, 8, 1000]))
def test_keys_are_those_of_plain_hashing_whatever_is_remembered(
    asked: list[_Asked], num_blocks: int
) -> None:
    max_bytes = num_blocks * (BYTES_PER_BLOCK + BYTES_PER_CHAIN)
    memo = ChainMemo(4, max_bytes)
    for root, prompt, attachments in asked:
        keys = memo.keys(root, prompt, attachments)
        assert keys == extend_chain(root, prompt, 4, attachments)
        assert 0 <= memo.num_bytes <= max_bytes


def test_what_is_forgotten_is_no_longer_counted() -> None:
    drawn = random.Random(0)
    memo = ChainMemo(4, 10 * (BYTES_PER_CHAIN + 5 * BYTES_PER_BLOCK))
    for number in range(100):
        memo.keys(ROOT, [number, *drawn.choices(range(9), k=19)])
    # Ten of five blocks, each a chain of its own; had one been counted wrong, there were fewer.
    assert memo.num_bytes == 10 * (BYTES_PER_CHAIN + 5 * BYTES_PER_BLOCK)


def test_blocks_that_prompts_share_are_kept_once() -> None:
    memo = ChainMemo(4)
    shared = list(range(40))
    memo.keys(ROOT, [*shared, 1, 1, 1, 1])
    first = memo.num_bytes
    assert first == BYTES_PER_CHAIN + 11 * BYTES_PER_BLOCK
    memo.keys(ROOT, [*shared, 2, 2, 2, 2])
    assert memo.num_bytes - first == BYTES_PER_CHAIN + BYTES_PER_BLOCK
    # Of another tenant, nothing is shared.
    memo.keys(OTHER_ROOT, [*shared, 1, 1, 1, 1])
    assert memo.num_bytes == 2 * first + BYTES_PER_CHAIN + BYTES_PER_BLOCK


def test_the_turns_of_a_conversation_are_one_chain() -> None:
    memo = ChainMemo(4)
    prompt: list[int] = []
    for turn in range(1, 50):
        prompt += range(8 * turn, 8 * turn + 8)
        memo.keys(ROOT, prompt)
        assert memo.num_bytes == BYTES_PER_CHAIN + 2 * turn * BYTES_PER_BLOCK
    memo.keys(ROOT, prompt)
    memo.keys(ROOT, prompt[:20])
    assert memo.num_bytes == BYTES_PER_CHAIN + 98 * BYTES_PER_BLOCK


def test_what_is_used_stays_and_the_longest_unused_goes() -> None:
    memo = ChainMemo(4, 3 * (BYTES_PER_CHAIN + BYTES_PER_BLOCK))
    old, used, other = [1] * 4, [2] * 4, [3] * 4
    for prompt in (old, used, other, used, [4] * 4):
        memo.keys(ROOT, prompt)
    full = memo.num_bytes
    memo.keys(ROOT, [*used, *used, *used])
    # It was known, so that two blocks came in; they push out one chain of one block.
    assert memo.num_bytes == full - BYTES_PER_CHAIN + BYTES_PER_BLOCK


def test_a_branch_is_forgotten_before_what_it_branches_off() -> None:
    memo = ChainMemo(4, 2 * BYTES_PER_CHAIN + 5 * BYTES_PER_BLOCK)
    memo.keys(ROOT, [1] * 12)
    memo.keys(ROOT, [1] * 8 + [2] * 4)
    memo.keys(OTHER_ROOT, [3] * 8)
    # The branch went. What is left knows the first prompt, so that nothing comes in.
    left = memo.num_bytes
    assert left == 2 * BYTES_PER_CHAIN + 5 * BYTES_PER_BLOCK
    memo.keys(ROOT, [1] * 12)
    assert memo.num_bytes == left


def test_a_branch_that_was_asked_for_again_is_still_forgotten_before_what_it_branches_off() -> None:
    branch = [1] * 8 + [2] * 4
    memo = ChainMemo(4, 2 * BYTES_PER_CHAIN + 4 * BYTES_PER_BLOCK)
    for prompt in ([1] * 12, branch, branch):
        memo.keys(ROOT, prompt)
    # Both chains were walked. One must go for a block of another tenant, and it is the branch.
    memo.keys(OTHER_ROOT, [3] * 4)
    left = memo.num_bytes
    assert left == 2 * BYTES_PER_CHAIN + 4 * BYTES_PER_BLOCK
    memo.keys(ROOT, [1] * 12)
    assert memo.num_bytes == left


@pytest.mark.parametrize("offset", [0, 3, 4, 9, 19])
def test_only_blocks_before_the_first_attachment_are_remembered(offset: int) -> None:
    memo = ChainMemo(4)
    prompt = list(range(20))
    memo.keys(ROOT, prompt, (Attachment(b"x" * 16, offset, 1),))
    num_plain = offset // 4
    assert memo.num_bytes == (BYTES_PER_CHAIN + num_plain * BYTES_PER_BLOCK if num_plain else 0)


def test_arrays_and_lists_find_each_other() -> None:
    memo = ChainMemo(4)
    keys = memo.keys(ROOT, list(range(9)))
    before = memo.num_bytes
    assert memo.keys(ROOT, np.arange(9, dtype=np.int32)) == keys
    assert memo.num_bytes == before


def test_a_prompt_without_a_full_block_has_no_keys_and_is_not_kept() -> None:
    memo = ChainMemo(4)
    assert memo.keys(ROOT, [1, 2, 3]) == []
    assert memo.keys(ROOT, []) == []
    assert memo.num_bytes == 0
