from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_paged.model.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 50), max_size=60)


def ints(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def counted(counts: TokenCounts) -> dict[int, int]:
    ids = counts.token_ids.tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, counts.output_counts.tolist(), strict=True))


def naive(prompt: list[int], output: list[int]) -> dict[int, int]:
    seen = dict.fromkeys(prompt, 0)
    return seen | Counter(output)


def test_prompt_and_output_are_counted_apart() -> None:
    counts = TokenCounts(ints([7, 3, 7, 3, 9, 3]), 3)
    assert counted(counts) == {3: 2, 7: 0, 9: 1}
    assert (counts.num_tokens, counts.num_outputs) == (6, 3)


@given(TOKENS.filter(bool), TOKENS, TOKENS)
def test_counts_from_a_history_equal_counts_token_by_token(
    prompt: list[int], output: list[int], more: list[int]
) -> None:
    resumed = TokenCounts(ints(prompt + output), len(prompt))
    assert counted(resumed) == naive(prompt, output)
    for place, token_id in enumerate(more):
        resumed.extend(len(prompt) + len(output) + place, ints([token_id]))
    assert counted(resumed) == naive(prompt, output + more)
    assert resumed.num_outputs == len(output) + len(more)


def test_tokens_that_are_counted_already_are_not_counted_again() -> None:
    counts = TokenCounts(ints([1, 2, 3, 4]), 2)
    # What a resumed sequence computes again, in chunks, the last of which has a new token.
    counts.extend(0, ints([1, 2, 3]))
    assert counts.num_tokens == 4
    counts.extend(3, ints([4, 4]))
    assert counted(counts) == {1: 0, 2: 0, 3: 1, 4: 2}


def test_a_gap_between_history_and_computed_tokens_is_refused() -> None:
    with pytest.raises(AssertionError, match="never told"):
        TokenCounts(ints([1, 2]), 1).extend(3, ints([5]))


def test_the_history_given_is_not_kept() -> None:
    history = ints([1, 2, 2])
    counts = TokenCounts(history, 1)
    history[:] = 9
    counts.extend(3, history[:1])
    assert counted(counts) == {1: 0, 2: 2, 9: 1}
