"""Follows the outputs of rows through their grammars: which tokens may come next."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import IntArray
from rayserve_paged.model.grammar_compiler import (
    BoolArray,
    GrammarCompiler,
    closing_ids,
    no_characters,
)

if TYPE_CHECKING:
    import xgrammar

_MAX_COMPILED: Final = 64
"""Grammars that are kept compiled, up to some megabytes each."""

# CPU seconds that one output may take. What is matched is kept, about half a gigabyte for each
# second of it, so that this bounds memory as well. A token of JSON takes some microseconds.
_MATCH_ALLOWANCE_S: Final = 0.25
_MATCH_TOKEN_S: Final = 0.00025
_MASK_ALLOWANCE_S: Final = 4.0
_MASK_TOKEN_S: Final = 0.002


class GrammarMatchers:
    """Makes the matchers of one rank; the vocabulary is read when the first one is needed.

    Args:
        load_vocabulary: As `grammar_vocabulary` returns it.
        eos_token_ids: Of the model.
    """

    def __init__(
        self, load_vocabulary: Callable[[], list[bytes]], eos_token_ids: Sequence[int]
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._eos_token_ids = eos_token_ids
        self._vocabulary: list[bytes] = []
        self._compiler: GrammarCompiler | None = None
        self._no_characters: dict[int, BoolArray] = {}
        # The one used last at the end.
        self._compiled: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        """Token ids; known once there was a matcher."""
        return len(self._vocabulary)

    def matcher(self, grammar: Grammar) -> xgrammar.GrammarMatcher:
        """Return a matcher at the beginning of a grammar.

        Raises:
            ValueError: The grammar is none.
        """
        import xgrammar

        compiled = self._compiled.get(grammar)
        if compiled is None:
            if self._compiler is None:
                self._vocabulary = self._load_vocabulary()
                self._compiler = GrammarCompiler(self._vocabulary, is_lazy=True)
                self._no_characters = no_characters(self._vocabulary)
            compiled = self._compiled[grammar] = self._compiler.compile(grammar)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return xgrammar.GrammarMatcher(compiled)

    def no_characters(self, token_id: int) -> BoolArray | None:
        """Return which ids would not be valid UTF-8 behind a token of a text, bool [vocab_size].

        None where the grammar itself rules them out.
        """
        return self._no_characters.get(self._vocabulary[token_id][-1])

    def closing_ids(self, params: SamplingParams) -> list[int]:
        """As `grammar_compiler.closing_ids`, once there was a matcher."""
        return closing_ids(params, self._eos_token_ids, self._vocabulary)


class RowGrammar:
    """Where the output of one row is in its grammar.

    Nothing is matched before the row samples, so that whatever raises does so in the row's own
    choice.

    Args:
        matchers: Of the rank.
        params: Of the request; with a grammar.
        token_ids: int32 [num_known], all tokens known so far, the prompt first; not kept.
        num_prompt_tokens: How many of them are the prompt.
    """

    def __init__(
        self,
        matchers: GrammarMatchers,
        params: SamplingParams,
        token_ids: IntArray,
        num_prompt_tokens: int,
    ) -> None:
        self.num_tokens = len(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self._matchers = matchers
        self._params = params
        self._matcher: xgrammar.GrammarMatcher | None = None
        # Output tokens that the matcher has not been given.
        self._pending: list[int] = token_ids[num_prompt_tokens:].tolist()
        self._last: int | None = None
        self._closing: list[int] = []
        self._has_ended = False
        self._failure: str | None = None
        self._match_s = 0.0
        self._mask_s = 0.0

    @property
    def num_outputs(self) -> int:
        """Tokens known after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    def extend(self, position: int, token_ids: IntArray) -> None:
        """Take in the tokens of places `position`, `position + 1`, ... that are not known yet.

        Args:
            position: Place in the sequence of the first token, at most `num_tokens`.
            token_ids: int32 [n].
        """
        assert position <= self.num_tokens, "tokens in between were never told"
        new = token_ids[self.num_tokens - position :].tolist()
        num_prompt_left = max(0, self.num_prompt_tokens - self.num_tokens)
        self._pending += new[num_prompt_left:]
        self.num_tokens += len(new)

    def forbidden(self) -> BoolArray | None:
        """Return which ids may not come next, bool [vocab_size]; None where any may.

        Any may where the output has ended, as nobody looks at the choice.

        Raises:
            ValueError: The grammar is none, the output is not of it, or it takes too long.
        """
        if self._failure is None and not self._has_ended:
            try:
                matcher = self._advanced()
                if not self._has_ended:
                    return self._mask(matcher)
            except ValueError as error:
                self._failure = str(error)
        if self._failure is not None:
            raise ValueError(self._failure)
        return None

    def _advanced(self) -> xgrammar.GrammarMatcher:
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self._matchers.matcher(self._grammar)
            self._closing = self._matchers.closing_ids(self._params)
        start = time.thread_time()
        first = self.num_outputs - len(self._pending)
        for place, token_id in enumerate(self._pending, first):
            if token_id in self._closing:
                self._has_ended = True
                break
            if not matcher.accept_token(token_id):
                raise ValueError(f"output token {place}, {token_id}, is not of the grammar")
            self._last = token_id
            self._match_s = self._spent(start, self._match_s)
            start = time.thread_time()
            if self._match_s > _MATCH_ALLOWANCE_S + _MATCH_TOKEN_S * place:
                raise ValueError(
                    f"the grammar is too ambiguous: {place + 1} tokens took {self._match_s:.2f} s"
                )
        self._pending.clear()
        return matcher

    def _mask(self, matcher: xgrammar.GrammarMatcher) -> BoolArray:
        start = time.thread_time()
        vocab_size = self._matchers.vocab_size
        bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        matcher.fill_next_token_bitmask(bits)
        self._mask_s = self._spent(start, self._mask_s)
        if self._mask_s > _MASK_ALLOWANCE_S + _MASK_TOKEN_S * self.num_outputs:
            raise ValueError(f"the grammar is too large: its masks took {self._mask_s:.2f} s")
        unpacked = np.unpackbits((~bits[0]).view(np.uint8), count=vocab_size, bitorder="little")
        forbidden = unpacked.view(np.bool_)
        if self._last is not None:
            no_characters = self._matchers.no_characters(self._last)
            if no_characters is not None:
                forbidden |= no_characters
        if matcher.is_completed():
            forbidden[self._closing] = False
        return forbidden

    @property
    def _grammar(self) -> Grammar:
        assert self._params.grammar is not None
        return self._params.grammar

    @staticmethod
    def _spent(start: float, before: float) -> float:
        # Of this thread alone: what else runs on the machine must not decide about an output.
        return before + time.thread_time() - start
