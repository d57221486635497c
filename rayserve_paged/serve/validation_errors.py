"""What is wrong with a body that does not have the form of its model, in one line."""

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from rayserve_paged.serve.http_errors import HttpError

_MAX_VALUE_LENGTH = 100


def as_invalid_request(error: RequestValidationError) -> HttpError:
    """Return the first thing that is wrong, with the field named."""
    errors: Sequence[Any] = error.errors()
    first = errors[0]
    where = [part for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be read")
        return HttpError(400, f"the request body is not valid JSON ({reason})", code="invalid_json")
    if not where:
        return HttpError(400, "the request body is not a JSON object")
    field = str(where[0])
    # A value that may be of several types has one error for each of them.
    same = [one for one in errors if field in one["loc"]] if len(errors) > 1 else [first]
    accepted = " or ".join(dict.fromkeys(_accepted(one["msg"]) for one in same))
    param = ".".join(str(part) for part in where) if len(same) == 1 else field
    if first["type"] == "missing":
        return HttpError(400, f"{param} is missing", param=param)
    if first["type"] == "extra_forbidden":
        message = f"{param} is not a field of this request, or not supported"
        return HttpError(400, message, param=param, code="unknown_field")
    value = repr(first["input"])
    if len(value) > _MAX_VALUE_LENGTH:
        value = f"{value[:_MAX_VALUE_LENGTH]}..."
    return HttpError(400, f"{param}={value} is not accepted: expected {accepted}", param=param)


def _accepted(message: str) -> str:
    message = message.removeprefix("Input should be ")
    return message[:1].lower() + message[1:]
