"""How long a step takes, from measurements: interpolates a table of timed steps.

The file is one JSON object:

    {
      "format": "rayserve-paged/profile/1",
      "model": "...", "device": "...",
      "empty":   {"num_tokens": [1, 8, 64, 512], "seconds": [..]},
      "decode":  {"num_sequences": [1, 4, 16], "num_context_tokens": [16, 256, 2048],
                  "seconds": [[..], [..], [..]]},
      "prefill": {"num_tokens": [16, 128, 512], "num_context_tokens": [0, 512, 4096],
                  "seconds": [[..], [..], [..]]}
    }

All seconds are of whole steps, from plan to result. `empty`: so many sequences that each compute
their first token. `decode`: row i has num_sequences[i] sequences that each compute one token and
attend to num_context_tokens[j] before it. `prefill`: one sequence computes num_tokens[i] with
num_context_tokens[j] in the cache. What a step takes over the `empty` one of as many tokens is its
attention; a step that decodes and prefills takes the `empty` one's time and each attention's.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.step_messages import IntArray
from rayserve_paged.sim.cost_model import FloatArray

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_Axis = Annotated[list[_Count], Field(min_length=2)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _check_axis(name: str, axis: list[int]) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise(axis)):
        raise ValueError(f"{name} must ascend")


class EmptySteps(_Part):
    """Steps with next to nothing in the cache, by tokens computed."""

    num_tokens: _Axis
    seconds: list[_Seconds]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_axis("num_tokens", self.num_tokens)
        if len(self.seconds) != len(self.num_tokens):
            raise ValueError("one number of seconds for each of num_tokens")
        return self


class DecodeSteps(_Part):
    """Steps in which every sequence decodes, by sequences and tokens in the cache of each."""

    num_sequences: _Axis
    num_context_tokens: _Axis
    seconds: list[list[_Seconds]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_grid("num_sequences", self.num_sequences, self.num_context_tokens, self.seconds)
        return self


class PrefillSteps(_Part):
    """Steps in which one sequence computes several tokens, by these and those in its cache."""

    num_tokens: _Axis
    num_context_tokens: _Axis
    seconds: list[list[_Seconds]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_grid("num_tokens", self.num_tokens, self.num_context_tokens, self.seconds)
        return self


def _check_grid(name: str, rows: list[int], columns: list[int], seconds: list[list[float]]) -> None:
    _check_axis(name, rows)
    _check_axis("num_context_tokens", columns)
    if len(seconds) != len(rows) or any(len(row) != len(columns) for row in seconds):
        raise ValueError(f"seconds must be [{len(rows)}][{len(columns)}], as the axes are")


class Profile(_Part):
    """The file, checked."""

    format: Literal["rayserve-paged/profile/1"]
    model: str
    device: str
    empty: EmptySteps
    decode: DecodeSteps
    prefill: PrefillSteps


def read_profile(path: Path) -> Profile:
    """Read a measured table.

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


class ProfiledCost:
    """A cost model that interpolates between measured steps, linearly, and goes on beyond them.

    Args:
        profile: The measurements.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        empty, decode, prefill = profile.empty, profile.decode, profile.prefill
        self._tokens = np.array(empty.num_tokens, np.float64)
        self._empty_s = np.array(empty.seconds)
        self._decode = _Grid(
            decode.num_sequences,
            decode.num_context_tokens,
            np.array(decode.seconds) - self._empty(decode.num_sequences)[:, None],
        )
        self._prefill = _Grid(
            prefill.num_tokens,
            prefill.num_context_tokens,
            np.array(prefill.seconds) - self._empty(prefill.num_tokens)[:, None],
        )

    def step_seconds(
        self, num_computed: IntArray, num_tokens: IntArray, num_samples: int, num_steps: int
    ) -> FloatArray:
        """As `CostModel.step_seconds`."""
        del num_samples  # Part of what was measured.
        num_rows = len(num_tokens)
        seconds = np.empty(num_steps)
        decoding = num_tokens == 1
        seconds[0] = self._empty([int(num_tokens.sum())])[0]
        if decoding.any():
            num_decoding = int(decoding.sum())
            context = np.array([int(num_computed[decoding].sum()) / num_decoding])
            seconds[:1] += self._decode.at(num_decoding, context)
        for row in np.flatnonzero(~decoding).tolist():
            context = np.array([float(num_computed[row])])
            seconds[:1] += self._prefill.at(int(num_tokens[row]), context)
        if num_steps > 1:
            # From then on all decode. Divided last, to give what single steps give to the bit.
            reach = int(num_computed.sum()) + int(num_tokens.sum())
            contexts = (reach + num_rows * np.arange(num_steps - 1)) / num_rows
            seconds[1:] = self._empty([num_rows])[0] + self._decode.at(num_rows, contexts)
        return seconds

    def _empty(self, num_tokens: list[int]) -> FloatArray:
        return _interpolate(np.array(num_tokens, np.float64), self._tokens, self._empty_s)


class _Grid:
    """Seconds of attention over (how many, how much context)."""

    def __init__(self, rows: list[int], columns: list[int], seconds: FloatArray) -> None:
        self._rows = np.array(rows, np.float64)
        self._columns = np.array(columns, np.float64)
        # Noise can make a step with context the faster one.
        self._seconds = seconds.clip(0.0)

    def at(self, row: float, columns: FloatArray) -> FloatArray:
        """Return the seconds at one row and several columns."""
        one = np.array([row], np.float64)
        by_column = np.stack(
            [_interpolate(one, self._rows, column)[0] for column in self._seconds.T]
        )
        return _interpolate(columns, self._columns, by_column).clip(0.0)


def _interpolate(x: FloatArray, xs: FloatArray, ys: FloatArray) -> FloatArray:
    """Return y at x on the lines between the points; the first and the last go on."""
    i = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, len(xs) - 2)
    slope = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])
    y: FloatArray = ys[i] + slope * (x - xs[i])
    return y
