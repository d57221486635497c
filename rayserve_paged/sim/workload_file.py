"""A workload from a file: a trace or a recorded run, changed as asked, or the description of a
synthetic one.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.recorded_workload import is_event_log, read_recorded
from rayserve_paged.sim.requests import SimRequest, requests_of
from rayserve_paged.sim.synthetic import SyntheticWorkload, generate
from rayserve_paged.sim.transforms import repeat, sample, scale_time, take_first
from rayserve_paged.sim.workload import read_workload


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceChanges:
    """What is made of a trace, in this order.

    Args:
        time_scale: Factor on the times of arrival: 0.5 doubles the load.
        sample: Share of the requests that are kept.
        repeat: Times that it is served, one after the other.
        limit: Only the first so many requests; None for all.
    """

    time_scale: float = 1.0
    sample: float = 1.0
    repeat: int = 1
    limit: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class OpenWorkload:
    """A workload that is ready to be served, once.

    Args:
        requests: In order of arrival, made as they are taken.
        num_requests: How many.
        num_skipped: Rows of the trace that were left out because they make no sense.
    """

    requests: Iterator[SimRequest]
    num_requests: int
    num_skipped: int


def open_workload(
    path: Path,
    block_size: int,
    seed: int,
    changes: TraceChanges,
    *,
    skip_invalid: bool = False,
) -> OpenWorkload:
    """Open a workload: `.yaml` describes a `SyntheticWorkload`, a folder or a file of event logs is
    a recorded run, all else is a trace.

    Args:
        path: The file or folder.
        block_size: Slots per block of the cluster.
        seed: Another one gives other tokens, and draws a synthetic workload anew.
        changes: To a trace; a synthetic workload has its own rate and number, and takes a limit.
        skip_invalid: Leave out and count the rows of a trace that make no sense.

    Raises:
        InvalidInputError: Naming what is wrong with the file or a change.
    """
    if path.suffix in (".yaml", ".yml"):
        return _open_synthetic(path, seed, changes)
    if is_event_log(path):
        workload = read_recorded(path)
    else:
        workload = read_workload(path, skip_invalid=skip_invalid)
    workload = scale_time(workload, changes.time_scale)
    workload = repeat(sample(workload, changes.sample, seed), changes.repeat)
    if changes.limit is not None:
        workload = take_first(workload, changes.limit)
    requests = requests_of(workload, block_size, seed)
    return OpenWorkload(requests, len(workload.requests), workload.num_skipped)


def _open_synthetic(path: Path, seed: int, changes: TraceChanges) -> OpenWorkload:
    for field in ("time_scale", "sample", "repeat"):
        if getattr(changes, field) != 1:
            accepted = f"1 with {path.name}, which has a rate and a number of requests"
            raise InvalidInputError(field, getattr(changes, field), accepted)
    config = _read_description(path)
    limit = config.num_requests if changes.limit is None else changes.limit
    if limit < 1:
        raise InvalidInputError("limit", limit, "at least 1 request")
    requests = itertools.islice(generate(config, seed), limit)
    return OpenWorkload(requests, min(limit, config.num_requests), 0)


def _read_description(path: Path) -> SyntheticWorkload:
    import yaml

    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        accepted = f"a readable file ({error.strerror})"
        raise InvalidInputError("trace", str(path), accepted) from error
    except yaml.YAMLError as error:
        raise InvalidInputError("trace", str(path), f"YAML ({error})") from error
    try:
        return SyntheticWorkload.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "description"
        accepted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        value = first["input"]
        if first["type"] == "missing":
            value, accepted = None, "a value (the field has no default)"
        raise InvalidInputError(f"{path}: {field}", value, accepted) from error
