import json
import pickle
from typing import Any

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.event_log import decode, encode
from rayserve_paged.core.output_grammar import MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, Grammar
from rayserve_paged.core.sampling_params import SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Person",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_grammars_are_equal_hashed_pickled_and_logged_by_value() -> None:
    grammar = Grammar.json_schema(SCHEMA)
    assert grammar == Grammar("json_schema", json.dumps(SCHEMA, indent=3))
    assert len({grammar, Grammar.json_schema(SCHEMA), Grammar.json_object()}) == 2
    params = SamplingParams(grammar=grammar)
    assert pickle.loads(pickle.dumps(params)) == params
    assert decode(encode(params)) == params
    assert params.needs_history
    assert not SamplingParams().needs_history


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
            Grammar("json_schema", json.dumps(SCHEMA), strict=False),
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}},
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
    ],
)
def test_a_response_format_is_read_as_its_api_means_it(
    value: object, expected: Grammar | None
) -> None:
    assert Grammar.of_response_format(value) == expected


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("json_object", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": "no"}},
            "response_format.strict",
        ),
    ],
)
def test_a_response_format_that_is_none_is_refused_at_its_field(value: object, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Grammar.of_response_format(value)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("xml", "x"),
        ("json_object", "{}"),
        ("regex", ""),
        ("regex", 3),
        ("regex", "a" * (MAX_REGEX_BYTES + 1)),
        ("regex", "a\0"),
        ("ebnf", "\ud800"),
        ("json_schema", '{"type":'),
        ("json_schema", "3"),
        ("json_schema", '{"const": NaN}'),
        ("json_schema", "[" * 50_000 + "]" * 50_000),
        ("json_schema", '{"items":' * 65 + "{}" + "}" * 65),
        ("json_schema", json.dumps({"enum": ["x" * MAX_GRAMMAR_BYTES]})),
        ("json_schema", '{"pattern": "a\\"b", "type": "string"}'),
        ("json_schema", '{"patternProperties": {"\\\\x22": {}}, "type": "object"}'),
        ("json_schema", '{"anyOf": []}'),
        ("json_schema", '{"items": {"type": []}}'),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_no_grammar_is_refused(kind: Any, text: Any, strict: bool) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInputError) as caught:
        Grammar(kind, text, strict)
    assert caught.value.field in ("grammar", "grammar.kind", "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"if": {}, "then": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "required": ["x"]},
        {"type": "string", "anyOf": [{"minLength": 3}]},
        {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}},
        {"minimum": 3},
        {"type": "string", "format": "poem"},
        {"type": "string", "format": "date", "maxLength": 3},
        {"type": "string", "enum": ["a", 3]},
        {"type": "string", "const": "a", "minLength": 3},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"type": "object", "additionalProperties": True, "minProperties": 2},
        {"type": "object", "properties": {}, "additionalProperties": {}, "minProperties": 2},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"contains": {}}}}},
    ],
)
def test_under_strict_a_schema_that_would_not_be_enforced_is_refused(
    schema: dict[str, Any],
) -> None:
    with pytest.raises(InvalidInputError, match="strict"):
        Grammar.json_schema(schema)
    Grammar.json_schema(schema, strict=False)


@pytest.mark.parametrize("fields", [{"beam_width": 2}, {"min_tokens": 2}, {"grammar": "[a-z]"}])
def test_what_does_not_go_with_a_grammar_is_refused(fields: dict[str, Any]) -> None:
    both: dict[str, Any] = {"grammar": Grammar.json_object(), **fields}
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**both)
    assert caught.value.field in fields
