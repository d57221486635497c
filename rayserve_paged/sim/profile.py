"""The file that `rayserve-paged profile` writes: what steps, messages and a start took.

One JSON object:

    {
      "format": "rayserve-paged/profile/2",
      "model": "...", "dtype": "fp32", "device": "...", "tensor_parallel_size": 1, "num_threads": 1,
      "tables": [
        {
          "num_active": 1,
          "empty":   {"num_tokens": [1, 8, 64, 512], "seconds": [..]},
          "decode":  {"num_sequences": [1, 4, 16], "num_context_tokens": [16, 256, 2048],
                      "seconds": [[..], [..], [..]]},
          "prefill": {"num_tokens": [16, 128, 512], "num_context_tokens": [0, 512, 4096],
                      "seconds": [[..], [..], [..]]}
        }, ...
      ],
      "control":  {"num_sequences": [1, 32], "seconds": [..]},
      "messages": {"submit_s": .., "assign_s": .., "deliver_s": ..},
      "served":   {"scale": 1.05, "extra_s": 0.001, "ratios": [0.9, 1.0, 1.1]},
      "start_s":  ..
    }

A table holds the seconds of whole steps on the ranks, from plan to result, while so many replicas
of the machine run steps at once. `empty`: one sequence computes its first num_tokens[i] tokens.
`decode`: row i has num_sequences[i] sequences that each compute one token and attend to
num_context_tokens[j] before it. `prefill`: one sequence computes num_tokens[i] with
num_context_tokens[j] in the cache. The rest may be left out: `control`, what the state machine
takes for the commit of a step and the plan of the next; `messages`, means from a consumer's call to
the controller, from there to the replica, and from a replica's answer to its consumer; `served`,
how steps in a live deployment compare to those of the tables: scale times as long, and extra_s
more, times one of ratios, each as likely as the others and 1 on average; `start_s`, from the start
of a replica to its registration.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayserve_paged.core.errors import InvalidInputError

FORMAT: Final = "rayserve-paged/profile/2"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_Axis = Annotated[list[_Count], Field(min_length=2)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


def _check_axis(name: str, axis: list[int]) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise(axis)):
        raise ValueError(f"{name} must ascend")


def _check_line(name: str, axis: list[int], seconds: list[float]) -> None:
    _check_axis(name, axis)
    if len(seconds) != len(axis):
        raise ValueError(f"one number of seconds for each of {name}")


def _check_grid(name: str, rows: list[int], columns: list[int], seconds: list[list[float]]) -> None:
    _check_axis(name, rows)
    _check_axis("num_context_tokens", columns)
    if len(seconds) != len(rows) or any(len(row) != len(columns) for row in seconds):
        raise ValueError(f"seconds must be [{len(rows)}][{len(columns)}], as the axes are")


class EmptySteps(_Part):
    """Steps with nothing in the cache, by the tokens that their one sequence computes."""

    num_tokens: _Axis
    seconds: list[Seconds]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_line("num_tokens", self.num_tokens, self.seconds)
        return self


class DecodeSteps(_Part):
    """Steps in which every sequence decodes, by sequences and tokens in the cache of each."""

    num_sequences: _Axis
    num_context_tokens: _Axis
    seconds: list[list[Seconds]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_grid("num_sequences", self.num_sequences, self.num_context_tokens, self.seconds)
        return self


class PrefillSteps(_Part):
    """Steps in which one sequence computes several tokens, by these and those in its cache."""

    num_tokens: _Axis
    num_context_tokens: _Axis
    seconds: list[list[Seconds]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_grid("num_tokens", self.num_tokens, self.num_context_tokens, self.seconds)
        return self


class StepTable(_Part):
    """All kinds of steps, while so many replicas of the machine run some."""

    num_active: Annotated[int, Field(ge=1)]
    empty: EmptySteps
    decode: DecodeSteps
    prefill: PrefillSteps


class ControlTimes(_Part):
    """What the state machine takes per step, by decoding sequences."""

    num_sequences: _Axis
    seconds: list[Seconds]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_line("num_sequences", self.num_sequences, self.seconds)
        return self


class MessageTimes(_Part):
    """How long messages are under way, on average."""

    submit_s: Seconds
    assign_s: Seconds
    deliver_s: Seconds


class ServedSteps(_Part):
    """How the steps of a live deployment compare to those of the tables."""

    scale: Seconds
    extra_s: _SecondsOrNone
    ratios: list[Seconds] = []


class Profile(_Part):
    """The file, checked."""

    format: Literal["rayserve-paged/profile/2"] = FORMAT
    model: str
    dtype: str
    device: str
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    num_threads: Annotated[int, Field(ge=1)] = 1
    tables: Annotated[list[StepTable], Field(min_length=1)]
    control: ControlTimes | None = None
    messages: MessageTimes | None = None
    served: ServedSteps | None = None
    start_s: Seconds | None = None

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        counts = [table.num_active for table in self.tables]
        _check_axis("num_active of the tables", counts)
        if counts[0] != 1:
            raise ValueError("the first of the tables is of one replica: num_active 1")
        return self


def read_profile(path: Path) -> Profile:
    """Read a measured profile.

    Raises:
        InvalidInputError: Naming what is wrong with the file.
    """
    try:
        return Profile.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        accepted = f"a readable file ({error.strerror})"
        raise InvalidInputError("profile", str(path), accepted) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        accepted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        value = None if first["type"] == "missing" else first["input"]
        raise InvalidInputError(f"{path}: {field}", value, accepted) from error
    except ValueError as error:
        raise InvalidInputError("profile", str(path), f"a JSON object ({error})") from error


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile that `read_profile` reads.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    try:
        path.write_text(profile.model_dump_json(exclude_none=True, indent=1) + "\n")
    except OSError as error:
        accepted = f"a file that can be written ({error.strerror})"
        raise InvalidInputError("--out", str(path), accepted) from error
