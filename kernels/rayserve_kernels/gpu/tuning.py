"""Which launch configurations are tried for a key of the table, and which of them is kept.

Not every field is free. `block_n` and `split_tokens` decide where the online softmax rescales and
where partial sums end: another value gives other bits. `num_warps` and `block_m` decide how a tile
is spread over threads, hence the order in which a row's weights are summed, and which matrix
instruction is chosen (on sm_90 another one from 64 rows and 4 warps on): they may give other bits.
`num_stages` only decides when loads are issued. So without `may_change_bits` the first two stay as
they are, and of the rest only what gives the same bits as the present row is kept.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rayserve_kernels.gpu.configs import Key, LaunchConfig, LaunchTable

LEAST_GAIN = 0.03
"""Share by which a configuration must be faster than the present one to take its place."""
PROVENANCE = Path(__file__).parent / "launch_provenance.json"
"""Which rows of the shipped table were measured, on what; rows that it lacks never were."""

_BLOCK_M = (16, 32, 64, 128)
_BLOCK_N = (16, 32, 64, 128)
_SPLIT_TOKENS = (256, 512, 1024, 2048)
_NUM_WARPS = (4, 8)
_NUM_STAGES = (1, 2, 3, 4)
_MOST_SCORES = 128 * 128


class Trial(NamedTuple):
    """What came of a configuration.

    fault: Why it is refused, None if it is not. us: Its median time in each case, else empty.
    """

    config: LaunchConfig
    fault: str | None
    us: tuple[float, ...] = ()


def keys_of(table: LaunchTable, gpu: str) -> list[Key]:
    """List the keys of a GPU, which has them all whether it has rows of its own or not."""
    return sorted({key._replace(gpu=gpu) for key in table.rows})


def present(table: LaunchTable, key: Key) -> LaunchConfig:
    """Look up the row of a key, or what stands in for it."""
    return table.look_up(*key)


def candidates(table: LaunchTable, key: Key, may_change_bits: bool = False) -> list[LaunchConfig]:
    """List what is to be tried for a key, the present configuration first, the others ascending.

    Args:
        table: The present one. Splits stay multiples of the tiles of all that shares them.
        key: Of the row.
        may_change_bits: Also vary what changes bits by its nature.
    """
    row = present(table, key)
    is_decode = row.split_tokens is not None
    others = {
        other.kind: present(table, other)
        for other in keys_of(table, key.gpu)
        if (other.head_dim, other.width) == (key.head_dim, key.width) and other.kind != key.kind
    }
    # Batches with more query heads for each KV head than `decode` has rows go to `decode_wide`.
    block_m = (row.block_m,) if key.kind == "decode" else _BLOCK_M
    block_n = _BLOCK_N if may_change_bits else (row.block_n,)
    splits: tuple[int | None, ...] = (row.split_tokens,)
    if may_change_bits and is_decode:
        splits = _SPLIT_TOKENS
    found = []
    for m, n, split, warps, stages in itertools.product(
        block_m, block_n, splits, _NUM_WARPS, _NUM_STAGES
    ):
        all_splits = [split, *(other.split_tokens for other in others.values())]
        tiles = [n, *(other.block_n for other in others.values())] if is_decode else [n]
        fits = all(
            length % tile == 0 for length in all_splits if length is not None for tile in tiles
        )
        if m * n <= _MOST_SCORES and fits:
            found.append(LaunchConfig(m, n, split, warps, stages))
    found = [config for config in found if config != row]
    return [row, *sorted(found, key=_ordinal)]


def choose(row: LaunchConfig, trials: Sequence[Trial]) -> Trial | None:
    """Choose among trials by the geometric mean of their times; None if all were refused.

    Args:
        row: The present configuration, which stays unless another is clearly faster.
        trials: Over the same cases, at least one.
    """
    sound = [trial for trial in trials if trial.fault is None]
    if not sound:
        return None
    best = min(sound, key=lambda trial: (mean_us(trial), _ordinal(trial.config)))
    for trial in sound:
        if trial.config == row and mean_us(best) > mean_us(trial) * (1 - LEAST_GAIN):
            return trial
    return best


def mean_us(trial: Trial) -> float:
    """Geometric mean of a trial's times, so that short cases count as much as long ones."""
    return math.exp(sum(map(math.log, trial.us)) / len(trial.us))


def read_provenance(path: Path = PROVENANCE) -> dict[Key, dict[str, Any]]:
    """Read what `write_provenance` wrote."""
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    names = Key._fields
    return {
        Key(*(entry[name] for name in names)): {
            name: value for name, value in entry.items() if name not in names
        }
        for entry in entries
    }


def write_provenance(entries: Mapping[Key, Mapping[str, Any]], path: Path) -> None:
    """Write on what rows were measured, one line a row; the same entries give the same bytes."""
    lines: Iterable[str] = (
        json.dumps({**key._asdict(), **dict(sorted(entry.items()))})
        for key, entry in sorted(entries.items())
    )
    text = ",\n".join(lines)
    path.write_text(f"[\n{text}\n]\n" if text else "[]\n", encoding="utf-8")


def _ordinal(config: LaunchConfig) -> tuple[int, ...]:
    split = config.split_tokens or 0
    return config.block_m, config.block_n, split, config.num_warps, config.num_stages
