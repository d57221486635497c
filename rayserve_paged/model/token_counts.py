"""How often each token occurs in one sequence: what penalties go by."""

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.step_messages import IntArray


class TokenCounts:
    """Distinct tokens of one sequence, and how often its output holds each.

    Memory and time follow the distinct tokens of the sequence, not the vocabulary.

    Args:
        token_ids: int32 [num_known], all tokens known so far, the prompt first; not kept.
        num_prompt_tokens: How many of them are the prompt.
    """

    def __init__(self, token_ids: IntArray, num_prompt_tokens: int) -> None:
        ids, places = np.unique(token_ids, return_inverse=True)
        counts = np.bincount(places[num_prompt_tokens:], minlength=len(ids))
        self.num_tokens = len(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self._num_distinct = len(ids)
        self._places = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        # int64 [capacity]: token ids and their counts in the output, in order of appearance.
        self._ids = ids.astype(np.int64)
        self._counts = counts.astype(np.int64)

    @property
    def num_outputs(self) -> int:
        """Tokens counted after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Tokens that the prompt or the output holds, int64 [num_distinct]; a view."""
        return self._ids[: self._num_distinct]

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """How often the output holds each of `token_ids`, int64 [num_distinct]; a view."""
        return self._counts[: self._num_distinct]

    def extend(self, position: int, token_ids: IntArray) -> None:
        """Count the tokens of the places `position`, `position + 1`, ... that are not counted yet.

        Args:
            position: Place in the sequence of the first token, at most `num_tokens`.
            token_ids: int32 [n].
        """
        assert position <= self.num_tokens, "tokens in between were never told"
        new = token_ids[self.num_tokens - position :].tolist()
        self.num_tokens += len(new)
        for token_id in new:
            place = self._places.get(token_id)
            if place is None:
                place = self._add(token_id)
            self._counts[place] += 1

    def _add(self, token_id: int) -> int:
        place = self._num_distinct
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(place + 16, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(place + 16, np.int64)])
        self._ids[place] = token_id
        self._places[token_id] = place
        self._num_distinct += 1
        return place
