"""Reads prompts and sampling parameters as files and command lines hold them."""

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rayserve_paged.prompts import Prompt

_PROMPT_FIELDS: Final = ("prompt", "messages", "prompt_token_ids")
_SAMPLING_FIELDS: Final = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclasses.dataclass(frozen=True, slots=True)
class PromptEntry:
    """One prompt with its parameters.

    Args:
        place: Where it was found, such as "prompts.jsonl:3", for errors.
        prompt: Text, token ids or a chat.
        params: Its own fields over the common ones.
    """

    place: str
    prompt: "Prompt"
    params: SamplingParams


def read_prompts(path: Path, sampling: Mapping[str, Any]) -> list[PromptEntry]:
    """Read a file of JSON objects, one a line; empty lines are skipped.

    Each holds exactly one of `prompt` (text), `messages` (a chat) and `prompt_token_ids`, and any
    fields of `SamplingParams`, for that request alone. Ids of a `logit_bias` may be keys of an
    object ({"17": -100}), or stand in pairs ([[17, -100]]).

    Args:
        path: The file, in UTF-8.
        sampling: Fields of `SamplingParams` for the lines that do not set them.

    Raises:
        InvalidInputError: Naming file, line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        accepted = f"a readable file ({error.strerror})"
        raise InvalidInputError("--prompts", str(path), accepted) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError("--prompts", str(path), f"UTF-8 ({error})") from error
    entries = [
        _entry(f"{path}:{number}", line, sampling)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not entries:
        raise InvalidInputError("--prompts", str(path), "a file with at least one prompt")
    return entries


def _entry(place: str, line: str, sampling: Mapping[str, Any]) -> PromptEntry:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # The latter where it is nested too deeply.
        raise InvalidInputError(place, line, f"a JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise InvalidInputError(place, fields, "a JSON object")
    for name, value in fields.items():
        if name not in _PROMPT_FIELDS + _SAMPLING_FIELDS:
            near = difflib.get_close_matches(name, _PROMPT_FIELDS + _SAMPLING_FIELDS)
            known = near or _PROMPT_FIELDS + _SAMPLING_FIELDS
            accepted = f"a known field: {' or '.join(near)}" if near else ", ".join(known)
            raise InvalidInputError(f"{place}: {name}", value, accepted)
    given = [name for name in _PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise InvalidInputError(place, given, f"exactly one of {', '.join(_PROMPT_FIELDS)}")
    own = {name: value for name, value in fields.items() if name in _SAMPLING_FIELDS}
    if isinstance(own.get("logit_bias"), dict):
        own["logit_bias"] = _pairs(own["logit_bias"])
    try:
        params = SamplingParams(**{**sampling, **own})
    except InvalidInputError as error:
        raise located(place, error) from error
    return PromptEntry(place, _prompt(place, given[0], fields[given[0]]), params)


def _prompt(place: str, name: str, value: object) -> "Prompt":
    if name == "prompt":
        if not isinstance(value, str):
            raise InvalidInputError(f"{place}: prompt", value, "a text")
        return value
    if not isinstance(value, list):
        raise InvalidInputError(f"{place}: {name}", value, "a list")
    return {"messages": value} if name == "messages" else value


def _pairs(biases: Mapping[str, object]) -> list[tuple[object, object]]:
    """Make numbers of keys, which are text in JSON; what is none is left for the check of ids."""
    return [(_as_integer(token_id), bias) for token_id, bias in biases.items()]


def _as_integer(text: str) -> int | str:
    # `int` alone also takes underscores, spaces and digits of other scripts.
    return int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else text


def parse_logit_bias(texts: Sequence[str]) -> list[tuple[object, object]]:
    """Read values of --logit-bias, each an ID=BIAS or a JSON object of these.

    Returns:
        Pairs as `SamplingParams` takes and checks them.

    Raises:
        InvalidInputError: A value is neither.
    """
    pairs: list[tuple[object, object]] = []
    for text in texts:
        try:
            if text.lstrip().startswith("{"):
                pairs += _pairs(json.loads(text))
            else:
                token_id, _, bias = text.partition("=")
                pairs.append((int(token_id), float(bias)))
        except ValueError as error:
            accepted = 'ID=BIAS or a JSON object such as {"17": -100}'
            raise InvalidInputError("--logit-bias", text, accepted) from error
    return pairs


def parse_token_ids(flag: str, text: str) -> list[int]:
    """Read token ids with commas between them.

    Raises:
        InvalidInputError: One is not an integer.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        accepted = "token ids with commas between, such as 17,18"
        raise InvalidInputError(flag, text, accepted) from error


def located(place: str, error: InvalidInputError) -> InvalidInputError:
    """Return the error with the place of its prompt in front."""
    if type(error) is InvalidInputError:
        return InvalidInputError(f"{place}: {error.field}", error.value, error.accepted)
    error.add_note(f"at {place}")
    return error
