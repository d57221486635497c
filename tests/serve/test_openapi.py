"""The application keeps to its own OpenAPI document, whatever is sent to it."""

import hypothesis
import pytest
import schemathesis
from http_endpoint import Endpoint
from schemathesis.core.result import Err
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_body_is_a_500_and_answers_are_as_documented(
    endpoint: Endpoint, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{endpoint.url}/openapi.json")
    for result in schema.get_all_operations():
        assert not isinstance(result, Err), result
        operation = result.ok()
        if operation.method != "post":
            continue

        @hypothesis.settings(max_examples=15, deadline=None)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            # Ranges are no part of the document.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        check()
