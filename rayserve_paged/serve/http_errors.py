"""What an error is over HTTP: a status, a body in OpenAI's shape, and when to try again."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from rayserve_paged.core.errors import (
    CapacityError,
    DeploymentError,
    DuplicateRequestError,
    InvalidInputError,
    NoReplicaError,
    OverloadedError,
    PagedError,
    QuotaExceededError,
    RequestFailedError,
    in_one_line,
)

_RETRY_SOON_S: Final = 1.0
"""Where nothing better is known."""

_MAX_VALUE_LENGTH: Final = 200


class HttpError(Exception):
    """An answer that is no success.

    Args:
        status: Of the answer.
        message: For a person.
        kind: The `type` of OpenAI's errors.
        param: The field that was refused, as the client wrote it.
        code: What a program may look at.
        retry_after_s: When to try again.
        headers: Further ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message)
        self._headers = dict(headers or {})
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        detail = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": detail}

    @property
    def headers(self) -> dict[str, str]:
        """Those of the answer; Retry-After, in whole seconds, where it is known."""
        headers = self._headers.copy()
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def encode(self) -> bytes:
        """Return the body as JSON; what the user sent may stand in it, lone surrogates too."""
        return json.dumps(self.body, ensure_ascii=True).encode()


def as_http_error(error: Exception) -> HttpError:
    """Return what an error is over HTTP; one that nobody expected is a 500 without details."""
    if isinstance(error, HttpError):
        return error
    message = in_one_line(error) if isinstance(error, PagedError) else ""
    match error:
        case CapacityError():
            return HttpError(400, message, param=error.field, code="context_length_exceeded")
        case InvalidInputError():
            code = "context_length_exceeded" if "model's limit" in error.accepted else None
            return HttpError(400, _refusal(error), param=error.field, code=code)
        case DuplicateRequestError():
            param = "rayserve.request_id"
            message = f"rayserve.{message}"
            return HttpError(400, message, param=param, code="duplicate_request_id")
        case OverloadedError():
            after = error.retry_after_s or _RETRY_SOON_S
            return HttpError(
                503, message, "overloaded_error", code="overloaded", retry_after_s=after
            )
        case QuotaExceededError():
            after = error.retry_after_s or _RETRY_SOON_S
            return HttpError(
                429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after_s=after
            )
        case NoReplicaError() | DeploymentError():
            return HttpError(
                503, message, "unavailable_error", code="no_replica", retry_after_s=_RETRY_SOON_S
            )
        case RequestFailedError():
            return HttpError(500, message, "server_error", code="request_failed")
        case _:
            message = message or "an internal error; its details are in the log"
            return HttpError(500, message, "server_error")


def _refusal(error: InvalidInputError) -> str:
    """Return what a refusal says, in the words of JSON."""
    accepted = re.sub(r"\bNone\b", "null", error.accepted)
    text = f"{error.field}={shown_value(error.value)} is not accepted: expected {accepted}"
    return " ".join((text, *(f"({note})" for note in getattr(error, "__notes__", ()))))


def shown_value(value: object) -> str:
    """Return a value as JSON, cut off where it is long."""
    if isinstance(value, str | list | tuple):
        value = value[: _MAX_VALUE_LENGTH + 1]
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        return "a value that is nested too deeply"
    return f"{text[:_MAX_VALUE_LENGTH]}..." if len(text) > _MAX_VALUE_LENGTH else text
