"""How long a step takes, from measurements: interpolates the tables of a profile.

What a step takes over an `empty` one of as many tokens is put down to attention and sampling; a
step that decodes and prefills takes the `empty` one's time and each of these.
"""

import numpy as np

from rayserve_paged.core.step_messages import IntArray
from rayserve_paged.sim.cost_model import FloatArray
from rayserve_paged.sim.profile import Profile, ServedSteps, StepTable


class ProfiledCost:
    """A cost model that interpolates between measured steps, linearly, and goes on beyond them.

    Args:
        profile: The measurements.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._tables = [_Table(table) for table in profile.tables]
        self._num_active = np.array([table.num_active for table in profile.tables], np.float64)
        control = profile.control
        self._control = (np.array([1.0, 2.0]), np.zeros(2))
        if control is not None:
            self._control = (
                np.array(control.num_sequences, np.float64),
                np.array(control.seconds),
            )
        served = profile.served or ServedSteps(scale=1.0, extra_s=0.0)
        self._scale, self._extra_s = served.scale, served.extra_s

    @property
    def max_active(self) -> int:
        """As `CostModel.max_active`."""
        return self.profile.tables[-1].num_active

    def step_seconds(
        self,
        num_computed: IntArray,
        num_tokens: IntArray,
        num_samples: int,
        num_steps: int,
        num_active: int = 1,
    ) -> FloatArray:
        """As `CostModel.step_seconds`."""
        del num_samples  # Part of what was measured.
        num_active = min(num_active, self.max_active)
        above = int(np.searchsorted(self._num_active, num_active))
        seconds = self._tables[above].step_seconds(num_computed, num_tokens, num_steps)
        if self._num_active[above] != num_active:
            fewer = self._tables[above - 1].step_seconds(num_computed, num_tokens, num_steps)
            low, high = self._num_active[above - 1], self._num_active[above]
            seconds = fewer + (seconds - fewer) * ((num_active - low) / (high - low))
        rows = np.array([float(len(num_tokens))])
        control_s = max(0.0, float(_interpolate(rows, *self._control)[0]))
        return seconds * self._scale + (self._extra_s + control_s)


class _Table:
    """One table of a profile, ready to be interpolated."""

    def __init__(self, table: StepTable) -> None:
        empty, decode, prefill = table.empty, table.decode, table.prefill
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
        self, num_computed: IntArray, num_tokens: IntArray, num_steps: int
    ) -> FloatArray:
        """Return float64 [num_steps], as `CostModel.step_seconds`."""
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
    """Seconds over the empty step, by (how many, how much context)."""

    def __init__(self, rows: list[int], columns: list[int], seconds: FloatArray) -> None:
        self._rows = np.array(rows, np.float64)
        self._columns = np.array(columns, np.float64)
        # Noise can make a step with more context the faster one.
        self._seconds = np.maximum.accumulate(seconds.clip(0.0), axis=1)

    def at(self, row: float, columns: FloatArray) -> FloatArray:
        """Return the seconds at one row and several columns."""
        one = np.array([row], np.float64)
        by_column = np.stack(
            [_interpolate(one, self._rows, column)[0] for column in self._seconds.T]
        )
        # Beyond the rows, lines of columns can cross.
        by_column = np.maximum.accumulate(by_column.clip(0.0))
        return _interpolate(columns, self._columns, by_column).clip(0.0)


def _interpolate(x: FloatArray, xs: FloatArray, ys: FloatArray) -> FloatArray:
    """Return y at x on the lines between the points; the first and the last go on."""
    i = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, len(xs) - 2)
    slope = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])
    y: FloatArray = ys[i] + slope * (x - xs[i])
    return y
