"""Log-probabilities of one prompt's tokens, from the steps that yield them to their delivery."""

from collections.abc import Sequence

from rayserve_paged.core.step_messages import TokenLogprobs


class PromptScores:
    """Log-probabilities of a prompt that its reader asked for, as steps yield them.

    Args:
        num_prompt: Tokens of the prompt, of which all but the first are scored.
    """

    __slots__ = ("_fresh", "num_done", "num_wanted")

    def __init__(self, num_prompt: int) -> None:
        self.num_wanted = num_prompt - 1
        self.num_done = 0
        self._fresh: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        """Whether every token is scored."""
        return self.num_done == self.num_wanted

    def add(self, scores: Sequence[TokenLogprobs]) -> None:
        """Take in the scores of the tokens that come next."""
        self._fresh += scores
        self.num_done += len(scores)

    def take(self) -> tuple[TokenLogprobs, ...]:
        """Return all scores, once they are complete; nothing when asked again."""
        assert self.is_complete
        fresh, self._fresh = self._fresh, []
        return tuple(fresh)
