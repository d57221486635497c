"""What is wrong with a body that does not have the form of its model, in one line."""

from collections.abc import Sequence
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rayserve_paged.serve.http_errors import HttpError, shown_value

_PHRASES: Final = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} character",
    "string_type": "a text",
}
"""What is accepted, by pydantic's type of error; its own words elsewhere."""

_UNIONS: Final = {
    "prompt": "a text, a list of token ids, or a list of either",
    "stop": "a text, or a list of texts",
    "content": "a text, or a list of text parts",
}
"""The same of fields of several types, of which each has an error of its own."""


def as_invalid_request(error: RequestValidationError) -> HttpError:
    """Return the first thing that is wrong, with the field named."""
    errors: Sequence[Any] = error.errors()
    first = errors[0]
    where = [part for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be read")
        return invalid_json(f"{reason} (character {where[0]})" if where else reason)
    if not where:
        return _not_an_object(error.body)
    # A value that may be of several types has one error for each of them.
    depth = next((i for i, part in enumerate(where) if part in _UNIONS), len(where) - 1)
    param = _path(where[: depth + 1])
    if first["type"] == "missing":
        return HttpError(400, f"{param} is missing", param=param)
    if first["type"] == "extra_forbidden":
        message = f"{param} is not a field of this request, or not supported"
        return HttpError(400, message, param=param, code="unknown_field")
    accepted = _accepted(first) if depth == len(where) - 1 else _UNIONS[str(where[depth])]
    message = f"{param}={shown_value(first['input'])} is not accepted: expected {accepted}"
    return HttpError(400, message, param=param)


def as_unreadable_body(error: HTTPException) -> HttpError | None:
    """Return what is wrong with a body that could not be read; None where that is not the error."""
    match error.__cause__:
        case RecursionError():
            return invalid_json("it is nested too deeply")
        case UnicodeDecodeError() as cause:
            return invalid_json(f"it is not UTF-8 at byte {cause.start}")
        case ValueError():
            return invalid_json("an integer has too many digits")
    return None


def invalid_json(reason: str) -> HttpError:
    """Return the refusal of a body that is no JSON."""
    return HttpError(400, f"the request body is not valid JSON: {reason}", code="invalid_json")


def _not_an_object(body: object) -> HttpError:
    if body is None:
        return HttpError(400, "the request body is missing: expected a JSON object")
    if isinstance(body, bytes):
        message = "the request body is not marked as JSON: expected Content-Type: application/json"
        return HttpError(415, message, code="unsupported_media_type")
    if isinstance(body, dict):
        message = "the request body has a name that is no text: expected no lone surrogates"
        return HttpError(400, message)
    return HttpError(400, f"the request body is {shown_value(body)}: expected a JSON object")


def _path(parts: Sequence[str | int]) -> str:
    """Return the name of a field in fields: `rayserve.retention[0].start`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".")


def _accepted(error: dict[str, Any]) -> str:
    phrase = _PHRASES.get(error["type"])
    if phrase is not None:
        return phrase.format_map(error.get("ctx", {}))
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return message[:1].lower() + message[1:]
