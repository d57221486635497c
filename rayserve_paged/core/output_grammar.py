"""What the text of an output must be: JSON of a schema or any, or what a grammar describes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.schema_check import find_fault

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf"]

MAX_GRAMMAR_BYTES: Final = 64 * 1024
MAX_REGEX_BYTES: Final = 4 * 1024

_KINDS: Final = get_args(GrammarKind)
_LIMITS: Final = {"regex": MAX_REGEX_BYTES}
_RESPONSE_TYPES: Final = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", ...}'


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """A language that the text of every output belongs to, once it has ended by itself.

    An output that `max_tokens` or a stop string cuts off is the beginning of such a text. See
    docs/structured-output.md.

    Args:
        kind: "json_object" for any JSON object, "json_schema", "regex" or "ebnf" (as llama.cpp
            writes it, with a rule `root`).
        text: The schema as JSON, the regex or the grammar, at most 64 KiB of UTF-8, 4 KiB for a
            regex; empty for "json_object". A schema is brought into one spelling.
        strict: Refuse a schema of which something would not be enforced. Where False such parts
            of it are passed over.

    Raises:
        InvalidInputError: Naming `response_format` for JSON, else `grammar`.
    """

    kind: GrammarKind
    text: str = ""
    strict: bool = True

    def __post_init__(self) -> None:
        """Check what can be checked without a vocabulary."""
        if self.kind not in _KINDS:
            raise InvalidInputError("grammar.kind", self.kind, ", ".join(_KINDS))
        if not isinstance(self.strict, bool):
            raise InvalidInputError(f"{self.field}.strict", self.strict, "true or false")
        if not isinstance(self.text, str):
            raise InvalidInputError(self.field, self.text, "a text")
        if self.kind == "json_object":
            if self.text:
                raise InvalidInputError(self.field, self.text, "no text with json_object")
            return
        if not self.text:
            raise InvalidInputError(self.field, self.text, f"a text with {self.kind}")
        self._check_size()
        if self.kind == "json_schema":
            self._check_schema()

    @property
    def field(self) -> str:
        """What errors call it."""
        return "response_format" if str(self.kind).startswith("json") else "grammar"

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | bool | str, strict: bool = True) -> Grammar:
        """JSON that is valid under a schema.

        Args:
            schema: The schema, or its JSON text.
            strict: As `Grammar`.

        Raises:
            InvalidInputError: It is none, or none that is supported.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema, strict)
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            accepted = f"a JSON schema ({error})"
            raise InvalidInputError("response_format", schema, accepted) from error
        return cls("json_schema", text, strict)

    @classmethod
    def of_response_format(cls, value: object) -> Grammar | None:
        """Read the OpenAI API's `response_format`; None for any text.

        As in that API a schema is not `strict` where it does not say so.

        Args:
            value: None, {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema",
                "json_schema": {"schema": SCHEMA, "strict": BOOLEAN, "name": ..., ...}}.

        Raises:
            InvalidInputError: It is something else.
        """
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InvalidInputError("response_format", value, _RESPONSE_TYPES)
        kind = value.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json_object()
        if kind != "json_schema":
            raise InvalidInputError("response_format.type", kind, _RESPONSE_TYPES)
        fields = value.get("json_schema")
        if not isinstance(fields, Mapping) or not isinstance(fields.get("schema"), Mapping | bool):
            accepted = 'an object with "schema", a JSON schema'
            raise InvalidInputError("response_format.json_schema", fields, accepted)
        strict = fields.get("strict")
        schema = cast("Mapping[str, object] | bool", fields["schema"])
        return cls.json_schema(schema, False if strict is None else strict)

    def _check_size(self) -> None:
        most = _LIMITS.get(self.kind, MAX_GRAMMAR_BYTES)
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidInputError(self.field, self.text, f"valid Unicode ({error})") from error
        if num_bytes > most:
            raise InvalidInputError(self.field, self.text, f"at most {most} bytes of UTF-8")
        if "\0" in self.text:
            raise InvalidInputError(self.field, self.text, "a text without NUL characters")

    def _check_schema(self) -> None:
        try:
            schema = json.loads(self.text)
            # What is checked here is what is compiled later, however that reads JSON.
            object.__setattr__(self, "text", json.dumps(schema, allow_nan=False))
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(self.field, self.text, f"a JSON schema ({error})") from error
        self._check_size()
        fault = find_fault(schema, strict=self.strict)
        if fault is not None:
            raise InvalidInputError(self.field, self.text, fault)
