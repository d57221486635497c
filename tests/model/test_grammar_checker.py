"""Grammars are tried in another process, over the vocabulary of a real model."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.model.grammar_checker import GrammarChecker
from rayserve_paged.model.grammar_compiler import grammar_vocabulary
from rayserve_paged.model.row_grammar import GrammarMatchers, RowGrammar
from rayserve_paged.model.spec import DirectorySource
from rayserve_paged.model.tokenizer import load_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def checker(smollm2: DirectorySource) -> Iterator[GrammarChecker]:
    spec = smollm2.spec
    checker = GrammarChecker(load_tokenizer(smollm2), spec.vocab_size, spec.eos_token_ids)
    yield checker
    checker.close()


def test_one_that_takes_too_long_costs_its_process_and_no_other_grammar(
    checker: GrammarChecker,
) -> None:
    good = SamplingParams(grammar=Grammar.json_schema(SCHEMA))
    assert checker.checked(good) == good
    slow = SamplingParams(grammar=Grammar("regex", "a*" * 2000))
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="too much time"):
            checker.checked(slow)
    other = SamplingParams(grammar=Grammar.json_object())
    assert checker.checked(other) == other


def test_an_output_can_only_end_where_an_id_may_end_it(checker: GrammarChecker) -> None:
    params = SamplingParams(grammar=Grammar.json_object(), ignore_eos=True)
    with pytest.raises(InvalidInputError, match="ends the output"):
        checker.checked(params)
    # 1 is a special token, 13 a plain one.
    with_stop = dataclasses.replace(params, stop_token_ids=[1])
    assert checker.checked(with_stop) == with_stop


def test_tokens_told_at_once_or_one_by_one_leave_the_same_choice(smollm2: DirectorySource) -> None:
    spec, tokenizer = smollm2.spec, load_tokenizer(smollm2)
    vocabulary = grammar_vocabulary(tokenizer, spec.vocab_size, spec.eos_token_ids)
    matchers = GrammarMatchers(lambda: vocabulary, spec.eos_token_ids)
    params = SamplingParams(grammar=Grammar.json_schema(SCHEMA))
    prompt = [5, 6, 7]
    output = tokenizer.encode('{"a": "x y z"}')
    told = RowGrammar(matchers, params, np.array(prompt[:2], np.int32), 3)
    told.extend(1, np.array(prompt[1:], np.int32))
    for index in range(len(output) + 1):
        known = np.array(prompt + output[:index], np.int32)
        resumed = RowGrammar(matchers, params, known, 3)
        step_by_step, at_once = told.forbidden(), resumed.forbidden()
        assert step_by_step is not None
        assert at_once is not None
        np.testing.assert_array_equal(step_by_step, at_once)
        # The end is allowed at the end alone.
        assert bool(at_once[spec.eos_token_ids[0]]) == (index < len(output))
        assert told.num_outputs == index
        if index < len(output):
            assert not at_once[output[index]]
            told.extend(len(known), np.array(output[index : index + 1], np.int32))
    told.extend(told.num_tokens, np.array(spec.eos_token_ids, np.int32))
    assert told.forbidden() is None
    wrong = RowGrammar(matchers, params, np.array([*prompt, output[0], 13], np.int32), 3)
    with pytest.raises(ValueError, match="output token 1, 13, is not of the grammar"):
        wrong.forbidden()


def test_no_output_may_hold_bytes_that_are_no_characters(smollm2: DirectorySource) -> None:
    spec, tokenizer = smollm2.spec, load_tokenizer(smollm2)
    vocabulary = grammar_vocabulary(tokenizer, spec.vocab_size, spec.eos_token_ids)
    of_bytes = {token: token_id for token_id, token in enumerate(vocabulary)}
    matchers = GrammarMatchers(lambda: vocabulary, spec.eos_token_ids)
    some_character = Grammar.json_schema({"type": "string", "minLength": 1, "maxLength": 1})
    for grammar, start in ((some_character, b'"'), (Grammar("regex", "a[^b]c"), b"a")):
        params = SamplingParams(grammar=grammar)
        for lead in range(0xE0, 0xF0):
            known = np.array([of_bytes[start], of_bytes[bytes([lead])]], np.int32)
            forbidden = RowGrammar(matchers, params, known, 0).forbidden()
            assert forbidden is not None
            for second in range(0x80, 0xC0):
                # UTF-16 has places for surrogates, and UTF-8 one way to write each character.
                is_character = bool(bytes([lead, second, 0x80]).decode(errors="ignore"))
                assert bool(forbidden[of_bytes[bytes([second])]]) != is_character
