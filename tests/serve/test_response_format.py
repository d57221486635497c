"""response_format through the official client."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from http_endpoint import MODEL, Endpoint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "c": {"enum": ["red", "green"]}},
    "required": ["n", "c"],
    "additionalProperties": False,
}


def ask(endpoint: Endpoint, schema: Any, **fields: Any) -> Any:  # noqa: ANN401
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    return endpoint.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "JSON please"}],
        max_tokens=400,
        seed=3,
        response_format=form,  # type: ignore[arg-type]
        **fields,
    )


def test_answers_are_valid_and_streams_are_the_answers(endpoint: Endpoint) -> None:
    answer = ask(endpoint, SCHEMA, n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = ask(endpoint, SCHEMA, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "number", "multipleOf": 0.5}])
def test_a_schema_that_cannot_be_enforced_is_refused_at_its_field(
    endpoint: Endpoint, schema: object
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(endpoint, schema)
    assert refused.value.param == "response_format"
