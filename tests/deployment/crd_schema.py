"""Checks objects against the schema of a custom resource definition, as an API server would.

A structural schema is JSON Schema but for Kubernetes' own words, which are translated here. An API
server drops what a schema does not know; here it is an error, since it is a mistake. Rules in CEL
(`x-kubernetes-validations`) are not evaluated.
"""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from jsonschema import validators
from jsonschema.exceptions import ValidationError

Schema = dict[str, Any]

_METADATA = (
    "annotations",
    "finalizers",
    "generateName",
    "labels",
    "name",
    "namespace",
    "ownerReferences",
)
_BITS = {"int32": 32, "int64": 64}
_UNKNOWN = "x-unknown"


class CustomResource:
    """The served versions of one custom resource.

    Args:
        definition: A CustomResourceDefinition.

    Raises:
        ValueError: It is none.
    """

    def __init__(self, definition: Mapping[str, Any]) -> None:
        if definition.get("kind") != "CustomResourceDefinition":
            raise ValueError(f"kind={definition.get('kind')!r}: a CustomResourceDefinition")
        spec = definition["spec"]
        self.kind: str = spec["names"]["kind"]
        self._schemas = {
            f"{spec['group']}/{version['name']}": version["schema"]["openAPIV3Schema"]
            for version in spec["versions"]
            if version["served"]
        }

    @classmethod
    def read(cls, path: Path) -> "CustomResource":
        """Read a definition from a YAML file.

        Raises:
            ValueError: It holds none.
        """
        definition = yaml.load(path.read_bytes(), Loader=_fastest_loader())
        if not isinstance(definition, dict):
            raise ValueError(f"{path}: a CustomResourceDefinition")
        return cls(definition)

    def problems(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return what an API server would refuse or drop; empty where all is well."""
        version = manifest.get("apiVersion")
        if version not in self._schemas:
            return [f"apiVersion: {version!r} is none of {', '.join(self._schemas)}"]
        errors = self._validator(version).iter_errors(manifest)
        return sorted(message for error in errors for message in _messages(error))

    @functools.lru_cache  # noqa: B019 - as many as there are versions
    def _validator(self, version: str) -> Any:  # noqa: ANN401 - of a class made at run time
        return _Validator(translated(self._schemas[version], is_root=True))


def translated(schema: Schema, *, is_root: bool = False) -> Schema:
    """Return a structural schema as JSON Schema that refuses unknown fields."""
    result = {key: value for key, value in schema.items() if key not in ("properties", "items")}
    properties = {name: translated(inner) for name, inner in schema.get("properties", {}).items()}
    if is_root:
        properties["metadata"] = {
            "type": "object",
            "properties": {name: {} for name in _METADATA},
            _UNKNOWN: True,
        }
    if properties:
        result["properties"] = properties
    if "items" in schema:
        result["items"] = translated(schema["items"])
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        result["additionalProperties"] = translated(extra)
    keeps = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if schema.get("type") == "object" and extra is None and not keeps:
        result[_UNKNOWN] = True
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    return result


def _unknown_fields(
    _validator: object, _on: object, instance: object, schema: Schema
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known = schema.get("properties", {})
    for name in instance:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f", did you mean {near[0]}?" if near else ""
            yield ValidationError(f"unknown field {name!r}{meant}")


def _integer_size(
    _validator: object, name: str, instance: object, _schema: Schema
) -> Iterator[ValidationError]:
    bits = _BITS.get(name)
    if bits is None or not isinstance(instance, int):
        return
    if not -(2 ** (bits - 1)) <= instance < 2 ** (bits - 1):
        yield ValidationError(f"{instance} is no {name}")


def _pattern(
    _validator: object, pattern: str, instance: object, _schema: Schema
) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not re.search(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern}")


def _list_type(
    _validator: object, kind: str, instance: object, schema: Schema
) -> Iterator[ValidationError]:
    if not isinstance(instance, list) or kind == "atomic":
        return
    keys: Sequence[str] = schema.get("x-kubernetes-list-map-keys", ())
    defaults = {
        name: inner["default"]
        for name, inner in schema["items"].get("properties", {}).items()
        if "default" in inner
    }
    seen: set[str] = set()
    for item in instance:
        identity = repr(item)
        if kind == "map" and isinstance(item, dict):
            identity = ", ".join(f"{key}={item.get(key, defaults.get(key))!r}" for key in keys)
        if identity in seen:
            yield ValidationError(f"{identity} is there twice")
        seen.add(identity)


_Validator: Any = validators.extend(
    jsonschema.Draft202012Validator,
    {
        _UNKNOWN: _unknown_fields,
        "format": _integer_size,
        "pattern": _pattern,
        "x-kubernetes-list-type": _list_type,
    },
)


def _messages(error: ValidationError) -> Iterator[str]:
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path
    ).removeprefix(".")
    message = error.message if len(error.message) < 300 else f"{error.message[:300]}..."
    yield f"{path or '(top)'}: {message}"


def _fastest_loader() -> Any:  # noqa: ANN401 - one of two classes
    # A definition is a megabyte, which takes the loader in Python ten seconds.
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
