"""What samples and searches must give, as plain lists of tokens that know nothing of blocks.

A history is a sequence of tokens in the scope of a request. Equal histories have equal numbers,
and no others: so a slot that holds a number can be compared with what it must hold.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

from beam_oracle import beam_search

from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow, group_key
from rayserve_paged.core.block_identity import BlockScope, RequestScope
from rayserve_paged.core.ids import BlockKey
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.sampling_params import SamplingParams


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

    def logprobs(self, history: int) -> list[float]:
        """Return what stands for the log-probabilities of the tokens that may follow: sixteenths
        from -3 to 0, so that sums are exact and equals are common.
        """
        mixed = self._mixed[history]
        return [
            -((mixed * (2 * token_id + 1) >> 23) % 49) / 16 for token_id in range(self.vocab_size)
        ]

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
        histories: For each token the history that it ends.
        root: The empty history.
        windows: What each layer group attends to.
        keys: Of its full blocks.
        failing_draw: Output index whose draw raises.
        num_told: Outputs that were told.
        ended: Whether its end was told.
    """

    seed: int | None
    sibling: int
    num_prompt: int
    tokens: list[int]
    histories: list[int]
    root: int
    windows: tuple[AttentionWindow, ...]
    keys: list[BlockKey]
    failing_draw: int | None = None
    num_told: int = 0
    ended: bool = False


def seen_positions(num_tokens: int, window: AttentionWindow) -> list[int]:
    """Return the positions that the last of these tokens attends to, without itself."""
    return [
        position
        for position in range(num_tokens - 1)
        if window.size is None
        or position < window.num_sink_tokens
        or num_tokens - 1 - position < window.size
    ]


class LedgerOracle:
    """Foresees what becomes of requests, and knows what each key of a block stands for.

    Args:
        limits: Of the replica; one end id.
        scope: Of the replica.
        scopes: Of the requests.
    """

    def __init__(
        self, limits: ModelLimits, scope: BlockScope, scopes: Sequence[RequestScope]
    ) -> None:
        self.histories = Histories(limits.vocab_size)
        # The histories that the slots of a key's block hold; of a root the empty one.
        self.content = {scope.root(of): [self.histories.root(of)] for of in scopes}
        # Of keys of other layer groups than the first: the chain's own key, and the group.
        self.group_of: dict[BlockKey, tuple[BlockKey, int]] = {
            group_key(root, group): (root, group)
            for root in self.content
            for group in range(1, len(limits.layer_groups))
        }
        self._limits = limits
        self._scope = scope

    def sample(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        scope: RequestScope,
        seed: int | None,
        sibling: int,
    ) -> Sample:
        """Write down all that a sample will be."""
        tokens = list(prompt)
        history = self._passed(tokens, scope)[-1]
        for _ in range(max_tokens):
            tokens.append(self.histories.draw(history, seed, sibling))
            history = self.histories.after(history, tokens[-1])
            if tokens[-1] in self._limits.eos_token_ids:
                break
        return self._sample(tokens, len(prompt), scope, seed, sibling)

    def beam(self, tokens: Sequence[int], num_prompt: int, scope: RequestScope) -> Sample:
        """Write down what a beam is that knows these tokens."""
        return self._sample(list(tokens), num_prompt, scope, None, 0)

    def search(
        self, prompt: Sequence[int], params: SamplingParams, scope: RequestScope
    ) -> list[tuple[int, ...]]:
        """Return what a search finds, best first."""

        def next_logprobs(token_ids: Sequence[int]) -> list[float]:
            return self.histories.logprobs(self._passed(token_ids, scope)[-1])

        found, _num_steps = beam_search(next_logprobs, prompt, params, self._limits.eos_token_ids)
        return [one.token_ids for one in found]

    def slots_of(self, key: BlockKey) -> list[int]:
        """Return what the slots of a key's block must hold."""
        first, group = self.group_of.get(key, (key, 0))
        num_groups = len(self._limits.layer_groups)
        return [history * num_groups + group for history in self.content[first]]

    def _sample(
        self,
        tokens: list[int],
        num_prompt: int,
        scope: RequestScope,
        seed: int | None,
        sibling: int,
    ) -> Sample:
        root = self.histories.root(scope)
        windows = self._windows(scope)
        passed = self._passed(tokens, scope)
        keys = self._keys(tokens, passed, scope)
        return Sample(seed, sibling, num_prompt, tokens, passed, root, windows, keys)

    def _keys(self, tokens: list[int], passed: list[int], scope: RequestScope) -> list[BlockKey]:
        """Hash the full blocks of these tokens, and write down what each key stands for."""
        size, key, chain = self._limits.block_size, self._scope.root(scope), []
        for end in range(size, len(tokens) + 1, size):
            payload = b"".join(t.to_bytes(4, "little") for t in tokens[end - size : end])
            key = BlockKey(hashlib.sha256(key + payload).digest())
            content = passed[end - size : end]
            assert self.content.setdefault(key, content) == content, "one key for two contents"
            chain.append(key)
            for group in range(1, len(self._limits.layer_groups)):
                self.group_of[group_key(key, group)] = (key, group)
        return chain

    def _windows(self, scope: RequestScope) -> tuple[AttentionWindow, ...]:
        """Return what each layer group attends to for the requests of a scope."""
        own = scope.window or FULL_ATTENTION
        return tuple(
            own
            if own.size is not None and (window.size is None or own.size < window.size)
            else window
            for window in self._limits.layer_groups
        )

    def _passed(self, token_ids: Sequence[int], scope: RequestScope) -> list[int]:
        """Return the history that each token ends."""
        history, passed = self.histories.root(scope), []
        for token_id in token_ids:
            history = self.histories.after(history, token_id)
            passed.append(history)
        return passed
