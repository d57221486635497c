"""Builds the configuration from a YAML file, the environment and flags.

A later source wins, field by field: file, then environment, then flags. Names of fields are
dotted (`cache.block_size`). In the environment they are upper case, behind RAYSERVE_, and a double
underscore enters a section: RAYSERVE_CACHE__BLOCK_SIZE=32. An empty variable counts as unset.

No other module reads the environment.
"""

import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import InvalidInputError

_PREFIX: Final = "RAYSERVE_"
_CACHE_DIR_VARIABLE: Final = "RAYSERVE_CACHE_DIR"
_ENDPOINT_PREFIX: Final = "RAYSERVE_SERVE__"
"""Of the endpoint alone; nothing to a deployment without one."""

_ConfigT = TypeVar("_ConfigT", bound=BaseModel)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _leaf_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if section := _section(field):
            yield from _leaf_names(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def load_config(
    path: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> DeploymentConfig:
    """Build the configuration of a deployment.

    Args:
        path: As in `load_config_as`.
        flags: As in `load_config_as`.
        environ: As in `load_config_as`.

    Raises:
        InvalidInputError: As `load_config_as`.
    """
    return load_config_as(DeploymentConfig, path, flags, environ)


def load_config_as(
    kind: type[_ConfigT],
    path: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> _ConfigT:
    """Build a configuration of some kind.

    Args:
        kind: What is configured.
        path: A YAML file with the sections of `kind`; None for no file.
        flags: Values that win over everything else, with dotted keys or nested mappings; a
            value of None was not given.
        environ: Where the RAYSERVE_ variables are looked up; None for the process environment.

    Returns:
        The checked configuration.

    Raises:
        InvalidInputError: The file cannot be read, a name is unknown, or a value is refused.
    """
    fields = tuple(_leaf_names(kind))
    from_file = {}
    if path is not None:
        from_file = dict(_known_fields(_flatten(read_yaml(path), fields), fields))
    environ = os.environ if environ is None else environ
    from_environment = dict(_environment_fields(environ, fields))
    given = ((name, value) for name, value in _flatten(flags or {}, fields) if value is not None)
    from_flags = dict(_known_fields(given, fields))
    settings = from_file | from_environment | from_flags
    try:
        return kind.model_validate(_nest(kind, settings))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        accepted = accepted_by(first)
        if field in from_flags:
            pass
        elif field in from_environment:
            accepted += f" (set by {_variable(field)})"
        elif field in from_file:
            accepted += f" (set in {path})"
        value = None if first["type"] == "missing" else first["input"]
        raise InvalidInputError(field, value, accepted) from error


def user_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where converted models are kept: `rayserve-paged` inside the user's cache directory.

    The user's cache directory is RAYSERVE_CACHE_DIR, else XDG_CACHE_HOME, else `~/.cache`. The
    directory is not created.

    Args:
        environ: Where the variables are looked up; None for the process environment.

    Returns:
        An absolute path.
    """
    environ = os.environ if environ is None else environ
    xdg = environ.get("XDG_CACHE_HOME", "")
    if own := environ.get(_CACHE_DIR_VARIABLE):
        base = Path(own).expanduser().absolute()
    elif Path(xdg).is_absolute():  # The XDG specification has relative paths ignored.
        base = Path(xdg)
    else:
        base = Path.home() / ".cache"
    return base / "rayserve-paged"


def read_yaml(path: Path) -> Mapping[object, object]:
    """Return the mapping that a YAML file holds; an empty file's is empty.

    Raises:
        InvalidInputError: The file cannot be read, or holds something else.
    """
    import yaml  # Not needed, and perhaps not installed, where there is no file.

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        accepted = f"a readable YAML file ({error.strerror})"
        raise InvalidInputError("config", str(path), accepted) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        accepted = f"a valid YAML file ({' '.join(str(error).split())})"
        raise InvalidInputError("config", str(path), accepted) from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise InvalidInputError("config", str(path), "a YAML file that holds a mapping of fields")
    return content


def _flatten(
    values: Mapping[str, object] | Mapping[object, object],
    fields: Collection[str],
    prefix: str = "",
) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        # An empty section is yielded as a value, so that its name is checked too.
        if isinstance(value, Mapping) and value and name not in fields:
            yield from _flatten(value, fields, f"{name}.")
        else:
            yield name, value


def _known_fields(
    settings: Iterable[tuple[str, object]], fields: Collection[str]
) -> Iterator[tuple[str, object]]:
    for name, value in settings:
        inside = [field for field in fields if field.startswith(f"{name}.")]
        if name in fields:
            yield name, value
        elif not inside:
            raise _unknown(name, value, fields)
        elif value is not None and value != {}:
            raise InvalidInputError(name, value, f"a section with the fields {', '.join(inside)}")


def _environment_fields(
    environ: Mapping[str, str], fields: Collection[str]
) -> Iterator[tuple[str, str]]:
    by_variable = {_variable(field): field for field in fields}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(_PREFIX) or variable == _CACHE_DIR_VARIABLE or not value:
            continue
        if variable in by_variable:
            yield by_variable[variable], value
        elif not variable.startswith(_ENDPOINT_PREFIX):
            raise _unknown(variable, value, [*by_variable, _CACHE_DIR_VARIABLE])


def _variable(field: str) -> str:
    return _PREFIX + field.replace(".", "__").upper()


def _unknown(name: str, value: object, known: Iterable[str]) -> InvalidInputError:
    known = list(known)
    near = difflib.get_close_matches(name, known)
    if near:
        return InvalidInputError(name, value, f"a known name: did you mean {' or '.join(near)}?")
    return InvalidInputError(name, value, f"one of the names {', '.join(known)}")


def _nest(
    model: type[BaseModel], settings: Mapping[str, object], prefix: str = ""
) -> dict[str, object]:
    # Every section is there, if empty, so that a missing field is reported under its own name.
    nested: dict[str, object] = {}
    for name, field in model.model_fields.items():
        if section := _section(field):
            nested[name] = _nest(section, settings, f"{prefix}{name}.")
        elif f"{prefix}{name}" in settings:
            nested[name] = settings[f"{prefix}{name}"]
    return nested


_PHRASES: Final = (
    ("Input should be greater", "a number greater"),
    ("Input should be less", "a number less"),
    ("Input should be ", ""),
    ("String should have ", "text with "),
    ("String should match ", "text that matches "),
)


def accepted_by(error: ErrorDetails) -> str:
    """Return what would be accepted where pydantic found an error."""
    match error["type"]:
        case "missing":
            return "a value (the field has no default)"
        case "value_error":
            return f"values that fit together: {error.get('ctx', {}).get('error')}"
        case "int_parsing" | "int_type" | "int_from_float":
            return "an integer"
        case "float_parsing" | "float_type":
            return "a number"
        case "bool_parsing" | "bool_type":
            return "true or false"
        case "byte_size" | "byte_size_unit":
            return 'a size such as 1048576 or "512MiB"'
        case _:
            message = error["msg"]
            for pydantic_phrase, phrase in _PHRASES:
                if message.startswith(pydantic_phrase):
                    return phrase + message.removeprefix(pydantic_phrase)
            return message
