"""Compiles grammars for a vocabulary, with xgrammar, which is imported when it is first needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.output_grammar import Grammar

if TYPE_CHECKING:
    import xgrammar

    from rayserve_paged.core.sampling_params import SamplingParams
    from rayserve_paged.model.tokenizer import Tokenizer

BoolArray = npt.NDArray[np.bool_]

_MAX_WHITESPACE: Final = 32
"""Characters between two parts of JSON: a model that has lost its way would write no others."""

# Valid between the parts of JSON at most, and the library lets some of them into strings.
_NO_JSON: Final = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")

# Surrogates and characters in more bytes than they need: the library takes them for characters,
# a decoder for several invalid bytes each. The first byte and what may not be the second:
_NO_CHARACTERS: Final = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F)}
_NO_TEXT: Final = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]")

# Where in its sources the library noticed something.
_PLACE: Final = re.compile(r"^\[[0-9:]+\] \S+:[0-9]+: (?:Check failed: \(.*?\) is false: ?)?")


class GrammarCompiler:
    """The compiler for one vocabulary.

    Args:
        vocabulary: The bytes of each token id, empty for those that no text consists of.
        is_lazy: Leave the work for each state of a grammar until an output comes to it.
    """

    def __init__(self, vocabulary: Sequence[bytes], *, is_lazy: bool) -> None:
        # It takes half a second where torch is there already, and two where not.
        import xgrammar

        def backend(vocabulary: list[bytes]) -> xgrammar.GrammarCompiler:
            # What has no bytes, such as an id that ends an output, the library never allows.
            info = xgrammar.TokenizerInfo(
                vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[], vocab_size=len(vocabulary)
            )
            return xgrammar.GrammarCompiler(
                info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=is_lazy
            )

        text = [b"" if _NO_TEXT.search(token) else token for token in vocabulary]
        self._text = backend(text)
        self._json = backend([b"" if _NO_JSON.search(token) else token for token in text])

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Compile a grammar.

        Raises:
            ValueError: It is none, with the reason.
        """
        try:
            return self._compile(grammar)
        except RuntimeError as error:
            raise ValueError(_PLACE.sub("", str(error)).strip()) from error

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        match grammar.kind:
            case "json_object" | "json_schema":
                schema = grammar.text or '{"type": "object"}'
                # Objects hold what the schema names alone, unless it says otherwise.
                return self._json.compile_json_schema(
                    schema, strict_mode=True, max_whitespace_cnt=_MAX_WHITESPACE
                )
            case "regex":
                return self._text.compile_regex(grammar.text)
            case "ebnf":
                return self._text.compile_grammar(grammar.text)
            case _:
                assert_never(grammar.kind)


def grammar_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> list[bytes]:
    """Return the bytes of each id of a model as grammars see them.

    Args:
        tokenizer: Of the model.
        vocab_size: Of the model.
        eos_token_ids: Of the model.
    """
    num_known = min(vocab_size, tokenizer.vocab_size)
    vocabulary = [tokenizer.grammar_bytes(token_id) for token_id in range(num_known)]
    vocabulary += [b""] * (vocab_size - num_known)
    for token_id in eos_token_ids:
        vocabulary[token_id] = b""
    return vocabulary


def no_characters(vocabulary: Sequence[bytes]) -> dict[int, BoolArray]:
    """Return which ids may not come behind a byte, as they would make it no valid UTF-8.

    Args:
        vocabulary: As `grammar_vocabulary` returns it.

    Returns:
        bool [vocab_size] by the byte, for the few behind which a grammar would let them come.
    """
    first_bytes = np.array([token[0] if token else 0 for token in vocabulary], np.uint8)
    return {
        byte: (first_bytes >= first) & (first_bytes <= last)
        for byte, (first, last) in _NO_CHARACTERS.items()
    }


def closing_ids(
    params: SamplingParams, eos_token_ids: Sequence[int], vocabulary: Sequence[bytes]
) -> list[int]:
    """Return the ids that end an output and add nothing to its text.

    Args:
        params: Of the request.
        eos_token_ids: Of the model.
        vocabulary: As `grammar_vocabulary` returns it.
    """
    eos = () if params.ignore_eos else eos_token_ids
    ids = {*eos, *params.stop_token_ids}
    if params.allowed_token_ids is not None:
        ids &= set(params.allowed_token_ids)
    return sorted(token_id for token_id in ids if not vocabulary[token_id])
