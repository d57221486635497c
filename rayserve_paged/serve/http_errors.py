"""What an error is over HTTP: a status, a body in OpenAI's shape, and when to try again."""

import json
import math
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
    RequestFailedError,
    in_one_line,
)

_RETRY_SOON_S: Final = 1.0
"""Where nothing better is known."""

_PARAMS: Final = {
    "prompt_token_ids": "prompt",
    "tenant_salt": "rayserve.salt",
    "deadline_s": "rayserve.deadline_s",
    "priority": "rayserve.priority",
    "request_id": "rayserve.request_id",
    "retention": "rayserve.retention",
    "window": "rayserve.window",
    "num_sink_tokens": "rayserve.num_sink_tokens",
}
"""Fields of the Python API that have another name in a body."""


class HttpError(Exception):
    """An answer that is no success.

    Args:
        status: Of the answer.
        message: For a person.
        kind: The `type` of OpenAI's errors.
        param: The field that was refused.
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
        case InvalidInputError():
            param = _PARAMS.get(error.field, error.field)
            code = None
            if isinstance(error, CapacityError) or "model's limit" in error.accepted:
                code = "context_length_exceeded"
            return HttpError(400, message, param=param, code=code)
        case DuplicateRequestError():
            param = _PARAMS["request_id"]
            return HttpError(400, message, param=param, code="duplicate_request_id")
        case OverloadedError():
            after = error.retry_after_s or _RETRY_SOON_S
            return HttpError(
                503, message, "overloaded_error", code="overloaded", retry_after_s=after
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
