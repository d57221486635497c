"""Reads files of prompts: JSON lines, each with what is asked and how it is to be answered."""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.core.retention import RetentionRange
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.prompt_flags import bias_pairs
from rayserve_paged.request_options import NO_OPTIONS, RequestOptions

if TYPE_CHECKING:
    from rayserve_paged.prompts import Prompt

_PROMPT_FIELDS: Final = ("prompt", "messages", "prompt_token_ids")
_SAMPLING_FIELDS: Final = tuple(
    # A line says `response_format` instead.
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name != "grammar"
)
_OPTION_FIELDS: Final = tuple(field.name for field in dataclasses.fields(RequestOptions))
_FIELDS: Final = (
    *_PROMPT_FIELDS,
    "attachments",
    "pin",
    "response_format",
    *_OPTION_FIELDS,
    *_SAMPLING_FIELDS,
)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptEntry:
    """One prompt, and how it is to be answered.

    Args:
        place: Where it was found, such as "prompts.jsonl:3", for errors.
        prompt: Text, token ids, a chat, or ids with attachments.
        params: Its own fields over the common ones.
        options: The same.
        pin: Whether its blocks are to be kept cached for all that are answered after it.
    """

    place: str
    prompt: "Prompt"
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS
    pin: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedEntry:
    """A line that cannot be answered.

    Args:
        place: Of the line.
        error: Why; it names the place.
    """

    place: str
    error: InvalidInputError


def read_prompts(
    path: Path,
    sampling: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    skip_invalid: bool = False,
) -> "list[PromptEntry | RefusedEntry]":
    """Read a file of JSON objects, one a line; empty lines are skipped.

    Each holds exactly one of `prompt` (text), `messages` (a chat) and `prompt_token_ids`, the last
    with or without `attachments`; and for that request alone any fields of `SamplingParams` and
    `RequestOptions`, and `pin`. Ids of a `logit_bias` may be keys of an object ({"17": -100}), or
    stand in pairs ([[17, -100]]). An `adapter`, the ranges of `retention` and `attachments` are
    objects with the fields of `Adapter`, `RetentionRange` and `Attachment`, whose digest is text
    in hexadecimal.

    Args:
        path: The file, in UTF-8.
        sampling: Fields of `SamplingParams` for the lines that do not set them.
        options: The same of `RequestOptions`.
        skip_invalid: Return what is wrong with a line in its place, and go on.

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
    places: dict[str, str] = {}
    entries: list[PromptEntry | RefusedEntry] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            entry = _entry(place, line, sampling, options)
            _check_name(entry, places)
            entries.append(entry)
        except InvalidInputError as error:
            if not skip_invalid:
                raise
            entries.append(RefusedEntry(place, error))
    if not entries:
        raise InvalidInputError("--prompts", str(path), "a file with at least one prompt")
    return entries


def _check_name(entry: PromptEntry, places: dict[str, str]) -> None:
    name = entry.options.request_id
    if name is None:
        return
    if name in places:
        accepted = f"an id of its own, since {places[name]} has this one"
        raise InvalidInputError(f"{entry.place}: request_id", name, accepted)
    places[name] = entry.place


def _entry(
    place: str, line: str, sampling: Mapping[str, Any], options: Mapping[str, Any]
) -> PromptEntry:
    try:
        fields = json.loads(line, object_pairs_hook=_object)
    except InvalidInputError as error:
        raise located(place, error) from error
    except (ValueError, RecursionError) as error:  # The latter where it is nested too deeply.
        accepted = f"a JSON object on a line of its own ({error})"
        raise InvalidInputError(place, line, accepted) from error
    if not isinstance(fields, dict):
        raise InvalidInputError(place, fields, "a JSON object on a line of its own")
    try:
        _check_names("", fields, _FIELDS)
        prompt = _prompt(fields)
        params = SamplingParams(**{**sampling, **_sampling(fields)})
        own = RequestOptions(**{**options, **_options(fields)})
        pin = fields.get("pin", False)
        if not isinstance(pin, bool):
            raise InvalidInputError("pin", pin, "true or false")
    except InvalidInputError as error:
        raise located(place, error) from error
    return PromptEntry(place, prompt, params, own, pin)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise InvalidInputError(name, value, f"one value, and {fields[name]!r} is there before")
        fields[name] = value
    return fields


def _check_names(inside: str, fields: Mapping[str, object], known: Sequence[str]) -> None:
    for name, value in fields.items():
        if name not in known:
            near = difflib.get_close_matches(name, known)
            accepted = f"a known field: {' or '.join(near)}" if near else ", ".join(known)
            raise InvalidInputError(f"{inside}{name}", value, accepted)


def _prompt(fields: Mapping[str, Any]) -> "Prompt":
    given = [name for name in _PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise InvalidInputError("", given, f"exactly one of {', '.join(_PROMPT_FIELDS)}")
    (name,) = given
    value = fields[name]
    if name != "prompt_token_ids" and "attachments" in fields:
        accepted = "none but with prompt_token_ids, among which they lie"
        raise InvalidInputError("attachments", fields["attachments"], accepted)
    if name == "prompt":
        if not isinstance(value, str):
            raise InvalidInputError("prompt", value, "a text")
        return value
    if not isinstance(value, list):
        raise InvalidInputError(name, value, "a list")
    if name == "messages":
        return {"messages": value}
    if "attachments" not in fields:
        return value
    attachments = _list("attachments", fields["attachments"])
    return {
        "prompt_token_ids": value,
        "attachments": [_attachment(f"attachments[{i}]", each) for i, each in attachments],
    }


def _attachment(inside: str, value: object) -> Attachment:
    parts = _parts(inside, value, Attachment)
    digest = parts["digest"]
    try:
        parts["digest"] = bytes.fromhex(digest)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{inside}.digest", digest, "bytes in hexadecimal") from error
    try:
        return Attachment(**parts)
    except InvalidInputError as error:
        field = error.field.replace("attachment", inside, 1)
        raise InvalidInputError(field, error.value, error.accepted) from error


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in fields.items() if name in _SAMPLING_FIELDS}
    if isinstance(own.get("logit_bias"), dict):
        own["logit_bias"] = bias_pairs(own["logit_bias"])
    if "response_format" in fields:
        own["grammar"] = Grammar.of_response_format(fields["response_format"])
    return own


def _options(fields: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in fields.items() if name in _OPTION_FIELDS}
    if "retention" in own:
        own["retention"] = tuple(
            RetentionRange(**_parts(f"retention[{i}]", each, RetentionRange))
            for i, each in _list("retention", own["retention"])
        )
    if own.get("adapter") is not None:
        own["adapter"] = Adapter(**_parts("adapter", own["adapter"], Adapter))
    return own


def _list(name: str, value: object) -> Iterator[tuple[int, object]]:
    if not isinstance(value, list):
        raise InvalidInputError(name, value, "a list")
    return enumerate(value)


def _parts(inside: str, value: object, kind: type) -> dict[str, Any]:
    """Return the fields of an object from which one of a dataclass can be made."""
    fields = dataclasses.fields(kind)
    names = [field.name for field in fields]
    if not isinstance(value, dict):
        raise InvalidInputError(inside, value, f"an object with the fields {', '.join(names)}")
    _check_names(f"{inside}.", value, names)
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in value:
            raise InvalidInputError(inside, value, f"an object with the field {field.name}")
    return dict(value)


def located(place: str, error: InvalidInputError) -> InvalidInputError:
    """Return the error with the place of its prompt in front."""
    if type(error) is InvalidInputError:
        field = f"{place}: {error.field}" if error.field else place
        return InvalidInputError(field, error.value, error.accepted)
    error.add_note(f"at {place}")
    return error
