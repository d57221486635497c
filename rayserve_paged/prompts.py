"""What a prompt may be: a text, token ids, a chat, ids with attachments; and its token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.tokenizer import Tokenizer

Prompt = str | list[int] | tuple[int, ...] | Mapping[str, Sequence[Any]]
"""A text, token ids, {"messages": [{"role": TEXT, "content": TEXT}, ...]} for a chat, or
{"prompt_token_ids": [...], "attachments": [Attachment, ...]} for ids that content stands behind."""


class TokenizedPrompt(NamedTuple):
    """A prompt as the model reads it.

    Args:
        text: Of the prompt, of a chat after its template; None where ids were given.
        token_ids: Not checked against the vocabulary where they were given.
        attachments: As they were given.
    """

    text: str | None
    token_ids: tuple[int, ...]
    attachments: tuple[Attachment, ...]


def as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Tell one prompt from several: a list that begins with a number is one prompt's ids.

    Raises:
        InvalidInputError: It is neither.
    """
    accepted = "a prompt or several: texts, lists of token ids or chats"
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise InvalidInputError("prompts", prompts, accepted)
    if isinstance(prompts[0], int):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def tokenize(prompt: Prompt, tokenizer: Tokenizer) -> TokenizedPrompt:
    """Return the token ids of a prompt, of whichever kind it is.

    Raises:
        InvalidInputError: It is of none, a text without tokens, or a chat that the model's
            template refuses.
    """
    is_chat = isinstance(prompt, Mapping)
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return TokenizedPrompt(None, *_parts(prompt))
        if set(prompt) != {"messages"}:
            raise InvalidInputError("prompt", prompt, 'a chat as {"messages": [...]} alone')
        text = tokenizer.apply_chat_template(prompt["messages"])
    elif isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, list | tuple):
        return TokenizedPrompt(None, tuple(prompt), ())
    else:
        raise InvalidInputError("prompt", prompt, "a text, a list of token ids or a chat")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError("prompt", text, "a text without lone surrogates") from error
    # Not by the ids, among which a beginning-of-sequence token would hide that it is empty.
    token_ids = tokenizer.encode(text, add_special_tokens=not is_chat) if text else []
    if not token_ids:
        raise InvalidInputError("prompt", text, "a text of at least one token")
    return TokenizedPrompt(text, tuple(token_ids), ())


def _parts(prompt: Mapping[str, object]) -> tuple[tuple[int, ...], tuple[Attachment, ...]]:
    """The ids and the attachments of a prompt that names them; what they hold is checked later."""
    unknown = prompt.keys() - {"prompt_token_ids", "attachments"}
    if unknown:
        raise InvalidInputError("prompt", sorted(unknown), "prompt_token_ids and attachments alone")
    parts = []
    for field in ("prompt_token_ids", "attachments"):
        values = prompt.get(field, ())
        if not isinstance(values, list | tuple):
            raise InvalidInputError(field, values, "a list")
        parts.append(tuple(values))
    token_ids, attachments = parts
    return token_ids, attachments
