"""Reads an experiment's YAML and lays its matrix out: one cell for each run.

Each cell has settings of its own, checked as a whole, and a digest of everything that its result
depends on: those settings, the seed, the contents of the files that they name, the version.
"""

import dataclasses
import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError

import rayserve_paged
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.experiments.config import CellConfig, ExperimentHead, SloConfig
from rayserve_paged.load_config import accepted_by, read_yaml

RESULT_FORMAT: Final = 2
"""Goes into every digest; another one makes all cells run anew."""

MAX_CELLS: Final = 10_000

_FILES: Final = (("workload", "trace"), ("simulation", "profile"))
_Model = TypeVar("_Model", bound=BaseModel)

COLUMNS: Final = frozenset(
    (
        *("cell", "seed", "request", "replica", "finish", "error", "count", "meets_slo"),
        *("arrival_s", "first_token_s", "end_s", "ttft_s", "itl_s", "e2e_s", "time_s", "gap_s"),
        *("busy_s", "num_steps", "num_running", "num_waiting", "num_open_slots"),
        *("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions"),
        *("num_queried_tokens", "num_hit_tokens", "num_computed_tokens", "num_attempts"),
        *("died", "hangs", "back_s"),
        *("num_free_blocks", "num_cached_blocks", "num_held_blocks"),
    )
)
"""Of the tables; an axis becomes a column beside them."""


@dataclasses.dataclass(frozen=True, slots=True)
class AxisValue:
    """One value of an axis.

    Args:
        label: What it is called in tables and pictures.
        settings: Fields, dotted, and their values.
        number: The value where the axis is of numbers, else None.
    """

    label: str
    settings: Mapping[str, object]
    number: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of the matrix.

    Args:
        name: A field, dotted, or a name of its own.
        values: In the order of the file.
    """

    name: str
    values: tuple[AxisValue, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether its values are numbers."""
        return all(value.number is not None for value in self.values)

    @property
    def changes_load(self) -> bool:
        """Whether it changes when requests come."""
        load = ("workload.time_scale", "workload.synthetic.arrivals")
        fields = [field for value in self.values for field in value.settings]
        return all(field.startswith(load) for field in fields)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        labels: By axis, the label of its value.
        seed: Of its workload.
        config: Its settings.
        files: Digests of the contents of the files that the settings name.
    """

    labels: Mapping[str, str]
    seed: int
    config: CellConfig
    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """32 hex digits; equal for runs that must have equal results."""
        config = self.config.model_dump(mode="json", exclude={"name", "event_log_dir"})
        for section, field in _FILES:
            config[section][field] = self.files.get(f"{section}.{field}")
        content = [RESULT_FORMAT, rayserve_paged.__version__, self.seed, config]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        """What it is called in messages."""
        parts = [f"{axis}={label}" for axis, label in self.labels.items()]
        return ", ".join([*parts, f"seed={self.seed}"])


@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment's file, laid out.

    Args:
        title: Of the experiment.
        question: That it answers.
        slo: What a request has to keep.
        axes: Of the matrix, in the order of the file.
        seeds: Each cell of the axes is run with each.
        x: Axis along which the pictures run; None to have none.
        cells: All combinations, in the order of the axes, the seeds innermost.
    """

    title: str
    question: str
    slo: SloConfig
    axes: tuple[Axis, ...]
    seeds: tuple[int, ...]
    x: Axis | None
    cells: tuple[Cell, ...]


def read_experiment(path: Path, settings: Mapping[str, object] | None = None) -> Experiment:
    """Read an experiment's YAML, and check every cell's settings.

    Args:
        path: The file.
        settings: Fields, dotted, whose values win over the file's; a path in them is relative to
            the working directory.

    Raises:
        InvalidInputError: Naming file, field and value, and what is accepted.
    """
    content = {str(key): value for key, value in read_yaml(path).items()}
    head_fields = ExperimentHead.model_fields
    given = {key: value for key, value in content.items() if key in head_fields}
    head = _validated(ExperimentHead, given, lambda _field: str(path))
    base = {key: value for key, value in content.items() if key not in head_fields}
    _resolve_files(base, path.parent)
    for field, value in (settings or {}).items():
        _set(base, field, value, str(path))
    axes = tuple(_axis(str(path), name, values) for name, values in head.axes.items())
    num_cells = len(head.seeds)
    for axis in axes:
        num_cells *= len(axis.values)
    if num_cells > MAX_CELLS:
        raise InvalidInputError(f"{path}: axes", f"{num_cells} cells", f"at most {MAX_CELLS}")
    cells = tuple(_cells(path, base, axes, head.seeds))
    x = next((axis for axis in axes if axis.name == head.x), None) or _default_x(axes)
    return Experiment(head.title, head.question, head.slo, axes, head.seeds, x, cells)


def _default_x(axes: Sequence[Axis]) -> Axis | None:
    loads = [axis for axis in axes if axis.changes_load]
    numeric = [axis for axis in axes if axis.is_numeric]
    return next(iter(loads + numeric), None)


# --- axes ---------------------------------------------------------------------------------


def _axis(file: str, name: str, values: Sequence[object] | Mapping[str, object]) -> Axis:
    where = f"{file}: axes.{name}"
    if name in COLUMNS:
        raise InvalidInputError(where, name, "another name: the tables have a column of this one")
    is_field = name.partition(".")[0] in CellConfig.model_fields
    if not isinstance(values, Mapping):
        if not is_field:
            accepted = f"{_near(name)}; or, under a name of its own, labels with fields and values"
            raise InvalidInputError(where, values, accepted)
        listed = Axis(name, tuple(_listed(name, value) for value in values))
        return _with_unique_labels(where, listed)
    found = []
    for label, value in values.items():
        if is_field:
            found.append(AxisValue(label, {name: value}))
        elif isinstance(value, Mapping) and value:
            found.append(AxisValue(label, {str(key): each for key, each in value.items()}))
        else:
            accepted = (
                f"fields and their values, such as {{batch.max_num_seqs: 8}}, or {_near(name)}"
            )
            raise InvalidInputError(f"{where}.{label}", value, accepted)
    return Axis(name, tuple(found))


def _listed(name: str, value: object) -> AxisValue:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if value is None:
        label = "none"
    elif isinstance(value, str):
        label = value
    else:
        label = json.dumps(value, default=str)
    return AxisValue(label, {name: value}, number)


def _with_unique_labels(where: str, axis: Axis) -> Axis:
    labels = [value.label for value in axis.values]
    if len(set(labels)) < len(labels):
        raise InvalidInputError(where, labels, "each value once")
    return axis


def _near(name: str) -> str:
    names = [*_leaf_names(CellConfig), *ExperimentHead.model_fields]
    sections = [field for field in CellConfig.model_fields if field not in names]
    near = difflib.get_close_matches(name, sections + names)
    if near:
        return f"a known field: did you mean {' or '.join(near)}?"
    return f"a known field: one of {', '.join(names)}"


def _leaf_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        sections = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        for section in sections:
            yield from _leaf_names(section, f"{prefix}{name}.")
        if not sections:
            yield f"{prefix}{name}"


# --- cells --------------------------------------------------------------------------------


def _cells(
    path: Path, base: Mapping[str, object], axes: Sequence[Axis], seeds: Sequence[int]
) -> Iterator[Cell]:
    digests: dict[Path, str] = {}
    for values in itertools.product(*(axis.values for axis in axes)):
        merged = _copied(base)
        labels = {axis.name: value.label for axis, value in zip(axes, values, strict=True)}
        for axis, value in zip(axes, values, strict=True):
            changed = _copied(value.settings)
            _resolve_settings(changed, path.parent)
            for field, each in changed.items():
                _set(merged, field, each, f"{path}: axes.{axis.name}.{value.label}")
        config = _validated(CellConfig, merged, _place_of(path, axes, values))
        files = {}
        for section, field in _FILES:
            file = getattr(getattr(config, section), field)
            if file is not None:
                if file not in digests:
                    digests[file] = _digest(f"{path}: {section}.{field}", file)
                files[f"{section}.{field}"] = digests[file]
        for seed in seeds:
            yield Cell(labels, seed, config, files)


def _copied(settings: Mapping[str, object]) -> dict[str, object]:
    return {
        key: _copied(value) if isinstance(value, dict) else value for key, value in settings.items()
    }


def _set(settings: dict[str, object], field: str, value: object, where: str) -> None:
    """Set a dotted field in nested mappings."""
    *sections, last = field.split(".")
    for name in sections:
        inner = settings.setdefault(name, {})
        if inner is None:
            inner = settings[name] = {}
        if not isinstance(inner, dict):
            raise InvalidInputError(where, field, f"{_near(field)} ({name} has no fields)")
        settings = inner
    settings[last] = value


def _resolve_files(settings: Mapping[str, object], folder: Path) -> None:
    for section, field in _FILES:
        inner = settings.get(section)
        if isinstance(inner, dict) and isinstance(inner.get(field), str):
            inner[field] = str(folder / inner[field])


def _resolve_settings(settings: dict[str, object], folder: Path) -> None:
    for section, field in _FILES:
        value = settings.get(f"{section}.{field}")
        if isinstance(value, str):
            settings[f"{section}.{field}"] = str(folder / value)


def _digest(where: str, path: Path) -> str:
    try:
        digest = hashlib.sha256()
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()
    except OSError as error:
        accepted = f"a readable file ({error.strerror})"
        if where.endswith("workload.trace"):
            accepted += "; --trace FILE gives another one"
        raise InvalidInputError(where, str(path), accepted) from error


def _place_of(
    path: Path, axes: Sequence[Axis], values: Sequence[AxisValue]
) -> Callable[[str], str]:
    """Return what tells where the value of a field comes from: the file, or axes in it."""

    def place_of(field: str) -> str:
        parts = [
            f"{axis.name}={value.label}"
            for axis, value in zip(axes, values, strict=True)
            if any(f"{field}.".startswith(f"{name}.") for name in value.settings)
        ]
        return f"{path}: axes {', '.join(parts)}" if parts else str(path)

    return place_of


def _validated(
    model: type[_Model], settings: Mapping[str, object], place_of: Callable[[str], str]
) -> _Model:
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        field = _field_of(first["loc"], settings)
        where = place_of(field)
        if first["type"] == "extra_forbidden":
            raise InvalidInputError(f"{where}: {field}", first["input"], _near(field)) from error
        value = None if first["type"] == "missing" else first["input"]
        raise InvalidInputError(f"{where}: {field}", value, accepted_by(first)) from error


def _field_of(loc: Sequence[int | str], settings: object) -> str:
    """Return a dotted field, without the parts by which pydantic tells members of a union."""
    parts = []
    for index, part in enumerate(loc):
        is_last = index == len(loc) - 1
        if isinstance(settings, Mapping) and part not in settings and not is_last:
            continue
        parts.append(str(part))
        if isinstance(settings, Mapping):
            settings = settings.get(part)
        elif isinstance(settings, Sequence) and isinstance(part, int):
            settings = settings[part] if part < len(settings) else None
    return ".".join(parts)
