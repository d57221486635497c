"""Bodies of the OpenAI-compatible routes.

Names and shapes are those of the OpenAI API reference (completions, chat completions, models). What
other servers of open models have added to it and clients already send (`top_k`, `min_tokens`,
`stop_token_ids`, ...) stands beside the official fields; what only this endpoint has is under the
one key `rayserve`. A field that is not listed is refused, never ignored.

Types are strict, so that `true` is no token id and "0.5" no temperature. Ranges are the business
of `SamplingParams`, which every way into the system shares.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_ID_LENGTH = 256


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class RetentionFields(_Body):
    """Tokens whose blocks are to stay cached for longer or shorter than others."""

    start: int = 0
    end: int | None = None
    """None for the whole rest, outputs included."""
    priority: int | None = None
    """0 to 100; 35 where nothing is asked for."""
    duration_s: float | None = None


class RayserveFields(_Body):
    """How a request is served: what the OpenAI API has no words for."""

    request_id: (
        Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH, pattern=r"^[!-~]+$")] | None
    ) = None
    """Printable ASCII without spaces, unique among the live requests that one ingress has of the
    tenant."""
    priority: int | None = None
    """Lower is served first."""
    salt: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)] | None = None
    """Requests share cached prefixes only where their salts are equal, and never across tenants."""
    deadline_s: float | None = None
    """Seconds after which it is given up, with the finish reason `deadline`."""
    window: int | None = None
    """Positions that a token attends to, itself among them; None for all."""
    num_sink_tokens: int = 0
    """First positions that every token attends to besides its window."""
    retention: list[RetentionFields] = []


class StreamOptions(_Body):
    """What a stream carries besides its deltas."""

    include_usage: bool = False
    """One more chunk at the end, without choices, with the usage of the whole request."""
    include_obfuscation: bool = False
    """Accepted, and without effect."""


class JsonSchema(_Body):
    """A schema that the answer follows."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(_Body):
    """What the answer has to be: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class _Sampling(_Body):
    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Keys are token ids, written as text."""
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    """Accepted, and without effect, as are the next three; tenants are told apart by their keys."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Prefixes are found by their tokens."""
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    """Accepted, and without effect."""
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    rayserve: RayserveFields = RayserveFields()


class CompletionRequest(_Sampling):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """A text, token ids, or several of either."""
    best_of: int | None = None
    echo: bool | None = None
    """Put the prompt before each answer, and with `logprobs` its tokens' as well."""
    logprobs: int | None = None
    """Log-probabilities of so many most likely tokens with each token."""
    suffix: None = None


class TextPart(_Body):
    """One part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None


class ChatCompletionRequest(_Sampling):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`."""
    best_of: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """With `logprobs`: how many most likely tokens to list with each token."""
    store: bool | None = None
    """Accepted, and without effect."""


class TokenizeRequest(_Body):
    """Body of `/tokenize`: a text, or a chat after the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    """Whether a text gets those that the model was taught to expect; a template has its own."""


class DetokenizeRequest(_Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class TokenizeResponse(BaseModel):
    """Answer of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int
    """Prompt and output tokens that a request may have here."""


class DetokenizeResponse(BaseModel):
    """Answer of `/detokenize`."""

    prompt: str


class ModelCard(BaseModel):
    """One model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix seconds of when this ingress started."""
    owned_by: str = "rayserve-paged"
    max_model_len: int
    """Prompt and output tokens that a request may have here."""


class ModelList(BaseModel):
    """Answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class PromptTokensDetails(BaseModel):
    """Where the prompt's KV came from."""

    cached_tokens: int
    """Tokens that were not computed."""


class Usage(BaseModel):
    """Tokens of a request, over all of its prompts and samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class IdLogprob(BaseModel):
    """A token by its id."""

    token_id: int
    token: str
    logprob: float


class PromptLogprob(BaseModel):
    """A prompt token, and the most likely ones in its place."""

    logprob: float
    top_logprobs: list[IdLogprob]


PromptLogprobs = list[PromptLogprob | None] | None
"""Where `prompt_logprobs` asks for them; None for the first token."""


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a text, token by token.

    A token that is only a part of a character reads as its bytes: `bytes:\\xe2\\x82`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Characters before each token."""


class CompletionChoice(BaseModel):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs = None


class Completion(BaseModel):
    """Answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that stands at a position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer, token by token."""

    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    """The answer to a chat."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    prompt_logprobs: PromptLogprobs = None


class ChatCompletion(BaseModel):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    """The field that was refused."""
    code: str | None


class ErrorBody(BaseModel):
    """Every answer with a status of 400 or above."""

    error: ErrorDetail
