"""Reads values of the command line that are more than a number or a text."""

import json
import re
from collections.abc import Mapping, Sequence

from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.core.retention import RetentionRange

_RANGE = re.compile(r"([0-9]{0,9}):([0-9]{0,9})=([0-9]{1,9})(?:,([0-9.]{1,20}))?")


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
                pairs += bias_pairs(json.loads(text))
            else:
                token_id, _, bias = text.partition("=")
                pairs.append((int(token_id), float(bias)))
        except ValueError as error:
            accepted = 'ID=BIAS or a JSON object such as {"17": -100}'
            raise InvalidInputError("--logit-bias", text, accepted) from error
    return pairs


def bias_pairs(biases: Mapping[str, object]) -> list[tuple[object, object]]:
    """Make numbers of keys, which are text in JSON; what is none is left for the check of ids."""
    return [(_as_integer(token_id), bias) for token_id, bias in biases.items()]


def _as_integer(text: str) -> int | str:
    # `int` alone also takes underscores, spaces and digits of other scripts.
    return int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else text


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


def parse_response_format(text: str) -> Grammar | None:
    """Read a value of --response-format.

    Raises:
        InvalidInputError: It is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        accepted = f'JSON such as {{"type": "json_object"}} ({error})'
        raise InvalidInputError("--response-format", text, accepted) from error
    return Grammar.of_response_format(value)


def parse_retention(texts: Sequence[str]) -> tuple[RetentionRange, ...]:
    """Read values of --retention, each START:END=PRIORITY or START:END=PRIORITY,SECONDS.

    Raises:
        InvalidInputError: A value is neither. Whether the ranges suit a prompt is checked with it.
    """
    ranges = []
    for text in texts:
        found = _RANGE.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            start, end, priority, seconds = found.groups()
            duration_s = None if seconds is None else float(seconds)
        except ValueError as error:
            accepted = "START:END=PRIORITY or START:END=PRIORITY,SECONDS, such as 0:800=90"
            raise InvalidInputError("--retention", text, accepted) from error
        end_token = int(end) if end else None
        ranges.append(RetentionRange(int(start or 0), end_token, int(priority), duration_s))
    return tuple(ranges)


def parse_adapter(text: str) -> Adapter:
    """Read a value of --adapter, ID@VERSION.

    Raises:
        InvalidInputError: It is none.
    """
    adapter_id, _, version = text.rpartition("@")
    if not adapter_id or not version:
        raise InvalidInputError("--adapter", text, "ID@VERSION, such as summaries@2026-03")
    return Adapter(adapter_id, version)
