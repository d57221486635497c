"""The HTTP application: OpenAI-compatible routes over one `Service`."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from rayserve_paged import __version__
from rayserve_paged.core.errors import InvalidInputError, PagedError
from rayserve_paged.outputs import RequestOutput
from rayserve_paged.prompts import Prompt, tokenize
from rayserve_paged.serve.body_limit import BodyLimit
from rayserve_paged.serve.dashboard_routes import add_dashboard_routes
from rayserve_paged.serve.event_stream import (
    DONE,
    ClientGoneError,
    EventStream,
    event,
    unless_gone,
)
from rayserve_paged.serve.http_errors import HttpError, as_http_error, shown_value
from rayserve_paged.serve.key_check import KeyCheck, tenant_of
from rayserve_paged.serve.openai_answers import AnswerWriter, ChatWriter, CompletionWriter
from rayserve_paged.serve.openai_requests import (
    chat_ask,
    chat_messages,
    completion_ask,
    named_as_in,
)
from rayserve_paged.serve.openai_types import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorBody,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from rayserve_paged.serve.request_ids import RequestIds
from rayserve_paged.serve.service import Chunks, Service, Submission
from rayserve_paged.serve.validation_errors import as_invalid_request, as_unreadable_body

_GONE: Final = 499
"""Status of an answer that nobody waits for, as in nginx's logs."""

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 429, 500, 503)
}
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
"""What a body with `stream` is answered by, besides the JSON of others."""


logger = logging.getLogger(__name__)


def create_app(
    service: Service,
    on_close: Callable[[], None] | None = None,
    *,
    adds_request_id: bool = True,
) -> FastAPI:
    """Build the application.

    Args:
        service: Answers; closed when the application is shut down, on the loop that serves.
        on_close: Called in a thread after that.
        adds_request_id: As `RequestIds`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(service.report()),
            asyncio.create_task(service.keys.watch()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.close()
            if on_close is not None:
                await asyncio.to_thread(on_close)

    app = FastAPI(
        title="rayserve-paged",
        version=__version__,
        summary="An OpenAI-compatible endpoint over a paged KV cache.",
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,
    )
    app.add_middleware(BodyLimit, max_body_bytes=int(service.config.serve.max_body_bytes))
    # Each goes round those before: what is refused has an id as well.
    app.add_middleware(KeyCheck, keys=service.keys)
    app.add_middleware(RequestIds, adds_header=adds_request_id)
    _handle_errors(app)
    _add_model_routes(app, service)
    _add_token_routes(app, service)
    _add_generation_routes(app, service)
    add_dashboard_routes(app, service.dashboard.state, service.dashboard.cell)
    _describe_errors(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        match error:
            case RequestValidationError():
                known: Exception = as_invalid_request(error)
            case HTTPException():
                known = as_unreadable_body(error) or _unrouted(request, error)
            case _:
                known = error
        http_error = as_http_error(known)
        if http_error.status == 500:
            logger.error("a request failed", exc_info=error)
        return _error_response(http_error)

    async def leave(request: Request, error: Exception) -> Response:
        del request, error
        return Response(status_code=_GONE)

    app.add_exception_handler(ClientGoneError, leave)
    for kind in (RequestValidationError, HTTPException, HttpError, PagedError, Exception):
        app.add_exception_handler(kind, answer)


def _unrouted(request: Request, error: HTTPException) -> HttpError:
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no route {shown_value(request.url.path)}"
    elif error.status_code == 405:
        accepted = (error.headers or {}).get("Allow", "another one")
        message = f"the method {request.method} is not accepted here: expected {accepted}"
    return HttpError(error.status_code, message, headers=error.headers)


def _error_response(error: HttpError) -> Response:
    return Response(error.encode(), error.status, error.headers, "application/json")


def _add_model_routes(app: FastAPI, service: Service) -> None:
    def card() -> ModelCard:
        return ModelCard(
            id=service.config.model_name,
            created=service.started,
            max_model_len=service.max_model_len,
        )

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> ModelList:
        """List the model that is served."""
        return ModelList(data=[card()])

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model(model: str) -> ModelCard:
        """Describe the model that is served."""
        service.check_model(model)
        return card()

    @app.get("/health", responses={503: {"model": ErrorBody}})
    async def health() -> Response:
        """Tell whether a replica can serve."""
        if await service.is_healthy():
            return JSONResponse({"status": "ok"})
        message = "no replica can serve"
        raise HttpError(503, message, "unavailable_error", code="no_replica", retry_after_s=1.0)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    # In threads, since the text may be long.
    @app.post("/tokenize", responses=_ERRORS)
    def tokenize_text(body: TokenizeRequest) -> TokenizeResponse:
        """Return the token ids of a text, or of a chat."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidInputError("prompt", body.prompt, "either prompt or messages")
        prompt: Prompt
        if body.messages is not None:
            prompt = {"messages": chat_messages(body.messages)}
            ids = list(tokenize(prompt, service.tokenizer).token_ids)
        else:
            assert body.prompt is not None
            _check_text("prompt", body.prompt)
            ids = service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        return TokenizeResponse(tokens=ids, count=len(ids), max_model_len=service.max_model_len)

    @app.post("/detokenize", responses=_ERRORS)
    def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of token ids."""
        service.check_model(body.model)
        vocab_size = service.tokenizer.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise InvalidInputError("tokens", token_id, f"token ids from 0 to {vocab_size - 1}")
        return DetokenizeResponse(prompt=service.tokenizer.decode(body.tokens))


def _check_text(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(field, text, "a text without lone surrogates") from error


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=Completion, responses=_ERRORS | _STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        service.check_model(body.model)
        with named_as_in(body):
            ask = completion_ask(body, service.config.serve.max_prompts)
            submission = await service.prepare(ask, tenant_of(request), streaming=bool(body.stream))
        prompts = [job.request.prompt_token_ids for job in submission.jobs]
        head = _head("cmpl", submission, service)
        writer = CompletionWriter(head, ask, prompts, service.tokenizer)
        return await _answer(service, submission, writer, body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_ERRORS | _STREAM)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a chat."""
        service.check_model(body.model)
        with named_as_in(body):
            ask = chat_ask(body)
            submission = await service.prepare(ask, tenant_of(request), streaming=bool(body.stream))
        (job,) = submission.jobs
        head = _head("chatcmpl", submission, service)
        writer = ChatWriter(head, ask, job.request.prompt_token_ids, service.tokenizer)
        return await _answer(service, submission, writer, body, request)


def _head(kind: str, submission: Submission, service: Service) -> dict[str, Any]:
    return {
        "id": f"{kind}-{submission.request_id}",
        "created": submission.created,
        "model": service.config.model_name,
    }


async def _answer(
    service: Service,
    submission: Submission,
    writer: AnswerWriter,
    body: CompletionRequest | ChatCompletionRequest,
    request: Request,
) -> Response:
    receive = request.receive
    if not body.stream:
        outputs = await unless_gone(receive, service.outputs(submission))
        return JSONResponse(writer.whole(outputs))
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    events = _events(service.chunks(submission), writer, wants_usage)
    # What is refused has a status of its own, so nothing is answered before there is something.
    first = await unless_gone(receive, anext(events))
    return EventStream(first, events, service.write_gap_s)


async def _events(
    batches: AsyncGenerator[Chunks, None], writer: AnswerWriter, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, what came together in one piece.

    Raises:
        Exception: Whatever ended it before there was anything to send. Later, that is sent, and the
            stream ends without a finish reason and without `DONE`.
    """
    has_begun = False
    # Clients that ask for the usage find the field in every chunk.
    no_usage = {"usage": None} if wants_usage else {}
    outputs: dict[int, RequestOutput] = {}
    try:
        async with contextlib.aclosing(batches):
            async for batch in batches:
                shown = (writer.chunk(place, chunk) for place, chunk in batch)
                data = b"".join(event(fields | no_usage) for fields in shown if fields is not None)
                outputs |= {p: chunk.output for p, chunk in batch if chunk.output is not None}
                if data:
                    has_begun = True
                    yield data
    except Exception as error:  # The status is sent: this is the only way to tell the client.
        if not has_begun:
            raise
        http_error = as_http_error(error)
        if http_error.status == 500:
            logger.exception("a stream broke")
        yield event(http_error.body)
        return
    end = event(writer.usage_chunk([outputs[p] for p in sorted(outputs)])) if wants_usage else b""
    yield end + DONE


def _describe_errors(app: FastAPI) -> None:
    """Leave FastAPI's own shape of validation errors out of the document: ours is another."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes
            )
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
