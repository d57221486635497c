"""Which JSON schemas can be enforced: their depth, their patterns, and under `strict` the rest.

The grammar compiler passes over what it does not know, and over some of what it knows where it
stands beside something else. Its outputs then are JSON, but not valid under the schema.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

MAX_DEPTH: Final = 64
"""Objects and arrays around any part of a schema: compiling takes the cube of it."""

_Schema: TypeAlias = Mapping[str, object]
_Part: TypeAlias = tuple[str, object]

_ANNOTATIONS: Final = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
    }
)
_NUMBER: Final = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "minProperties",
            "maxProperties",
            "patternProperties",
            "propertyNames",
        }
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
_FORMATS: Final = frozenset(
    {
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "uuid",
    }
)
_ALONE: Final = ("$ref", "anyOf", "oneOf", "allOf")
"""Whatever stands beside one of these is passed over."""

_IS_OF_TYPE: Final[Mapping[str, Callable[[object], bool]]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}

# Compiled into strings without being escaped, so that what they match would end the string.
_BREAKS_STRINGS: Final = re.compile(r'["\x00-\x1f]|\\(?![dDwWsS.+*?()\[\]{}|^$/-])')


def find_fault(schema: object, *, strict: bool) -> str | None:
    """Return what would be accepted instead of a schema; None where it can be enforced.

    Args:
        schema: As it was read from JSON.
        strict: Whether every keyword must be enforced; else only the outputs must be JSON.
    """
    if _depth_exceeds(schema, MAX_DEPTH):
        return f"a schema of at most {MAX_DEPTH} objects and arrays inside each other"
    if not isinstance(schema, dict | bool):
        return "a JSON schema, which is an object or a boolean"
    pending: list[_Part] = [("", schema)]
    while pending:
        path, part = pending.pop()
        if not isinstance(part, dict):
            continue
        fault = _empty_fault(part) or _pattern_fault(part)
        if fault is None and strict:
            fault = _strict_fault(part)
        if fault is not None:
            return f"{fault}, at {path or 'its root'}"
        pending += _parts(path, part)
    return None


def _depth_exceeds(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _parts(path: str, schema: _Schema) -> Iterator[_Part]:
    """Yield the schemas inside a schema, with where they stand."""
    for keyword, value in schema.items():
        place = f"{path}/{keyword}"
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(value, dict):
                yield from ((f"{place}/{name}", part) for name, part in value.items())
        elif keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
            if isinstance(value, list):
                yield from ((f"{place}/{index}", part) for index, part in enumerate(value))
        elif keyword in (
            "items",
            "additionalProperties",
            "propertyNames",
            "unevaluatedProperties",
            "unevaluatedItems",
        ):
            yield place, value


def _empty_fault(schema: _Schema) -> str | None:
    # Compiled into an empty text, or any.
    for keyword in ("type", "enum", *_ALONE[1:]):
        if schema.get(keyword) == []:
            return f"a list of one or more for {keyword!r}"
    return None


def _pattern_fault(schema: _Schema) -> str | None:
    patterns = [schema.get("pattern")]
    if isinstance(of_names := schema.get("patternProperties"), dict):
        patterns += of_names
    for pattern in patterns:
        if isinstance(pattern, str) and _BREAKS_STRINGS.search(pattern):
            return (
                "patterns without quotes, control characters and backslashes but those of "
                f"\\d \\w \\s, their opposites and escaped punctuation, not {pattern!r}"
            )
    return None


def _strict_fault(schema: _Schema) -> str | None:
    """Return what would have to be else for one schema, without those inside it, to be enforced."""
    keywords = {key for key in schema if key not in _ANNOTATIONS and not key.startswith("x-")}
    for alone in _ALONE:
        if alone in keywords:
            if keywords != {alone}:
                others = ", ".join(sorted(keywords - {alone}))
                return f"with strict nothing beside {alone}, not {others}"
            return None
    if keywords & {"enum", "const"}:
        return _values_fault(schema, keywords)
    types = schema.get("type", [])
    given = types if isinstance(types, list) else [types]
    names = [name for name in given if isinstance(name, str) and name in _OF_TYPE]
    if names != given:
        return f"a type of {', '.join(_OF_TYPE)} with strict, not {types!r}"
    known = frozenset[str]().union(*(_OF_TYPE[name] for name in names))
    if unknown := sorted(keywords - known - {"type"}):
        beside = " or ".join(names) or "no type"
        return f"with strict no {unknown[0]!r} beside {beside}, since it would not be enforced"
    return _string_fault(schema) or _object_fault(schema, keywords)


def _values_fault(schema: _Schema, keywords: set[str]) -> str | None:
    if others := sorted(keywords - {"type", "enum", "const"}):
        return f"with strict nothing but a type beside enum or const, not {others[0]!r}"
    if {"enum", "const"} <= keywords:
        return "with strict either enum or const"
    types = schema.get("type")
    if types is None:
        return None
    names = types if isinstance(types, list) else [types]
    values = schema.get("enum") if "enum" in keywords else [schema["const"]]
    for value in values if isinstance(values, list) else []:
        if not any(is_of(value) for name, is_of in _IS_OF_TYPE.items() if name in names):
            return f"with strict values of the type, not {value!r}"
    return None


def _string_fault(schema: _Schema) -> str | None:
    if "format" in schema and schema["format"] not in _FORMATS:
        return f"with strict a format of {', '.join(sorted(_FORMATS))}, not {schema['format']!r}"
    if "format" in schema and {"pattern", "minLength", "maxLength"} & schema.keys():
        return "with strict no pattern or length beside a format"
    return None


def _object_fault(schema: _Schema, keywords: set[str]) -> str | None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if name not in properties:
                return f"with strict required names that are among the properties, not {name!r}"
    named = keywords & {"properties", "patternProperties", "propertyNames"}
    if len(named) > 1:
        return f"with strict only one of {', '.join(sorted(named))}"
    is_open = schema.get("additionalProperties", False) is not False
    if is_open and "patternProperties" in keywords:
        return "with strict no additionalProperties beside patternProperties"
    if is_open and properties:
        # The name of another may be that of a property, written with escapes.
        return "with strict no additionalProperties beside properties"
    counted = keywords & {"minProperties", "maxProperties"}
    if counted and (is_open or named != {"properties"}):
        # Others may come twice and would be counted twice.
        return f"with strict {min(counted)} beside properties without additionalProperties alone"
    return None
