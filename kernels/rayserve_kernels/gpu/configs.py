"""Launch configurations by GPU, head dimension, dtype and kind of batch: a table to look up."""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from pathlib import Path

import torch

from rayserve_kernels.layout import SCALED_DTYPES

Kind = typing.Literal["decode", "decode_wide", "shared", "prefill"]
"""`decode_wide` is decode with more query heads for each KV head than `decode` has rows; `shared`
is the part of a cascade that several sequences share."""
Width = typing.Literal["fp32", "half", "scaled"]
"""fp32 in queries or slots; 16-bit queries over 16-bit slots; the same over codes with scales."""

DECODE_QUERIES = 8
"""Sequences of no more queries are split over their tokens; those of more are cut into tiles."""

_SHIPPED = Path(__file__).parent / "launch_configs.json"
_ANY = "any"
# Later members of a family, which have what its rows need.
_FAMILIES = {"sm103": "sm100", "gfx950": "gfx942"}
_NARROW_HEAD_DIM = 64
_FP8_CAPABILITY = 89


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a kernel is launched.

    Args:
        block_m: Rows of a tile, a power of two of at least 16.
        block_n: Positions of a tile, a power of two of at least 16.
        split_tokens: Positions of a split of a decode, a multiple of `block_n`. It decides where
            partial sums end, and so the last bits of results; None but for decodes.
        num_warps: Of a program.
        num_stages: Of the pipeline over tiles.

    Raises:
        ValueError: A field that is none of these.
    """

    block_m: int
    block_n: int
    split_tokens: int | None
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name}={size}: expected a power of two of at least 16")
        if self.split_tokens is not None and (
            self.split_tokens < 1 or self.split_tokens % self.block_n
        ):
            raise ValueError(
                f"split_tokens={self.split_tokens}: expected a multiple of block_n={self.block_n}"
            )


class Key(typing.NamedTuple):
    """What a configuration is looked up by; head_dim is padded to a power of two."""

    gpu: str
    head_dim: int
    width: Width
    kind: Kind


class LaunchTable:
    """Launch configurations; a value.

    Args:
        rows: A configuration for each key. For "any" GPU there must be a row of each width and kind
            with each head dimension that occurs.

    Attributes:
        digest: Eight hexadecimal digits that differ between tables.
    """

    def __init__(self, rows: Mapping[Key, LaunchConfig]) -> None:
        self.rows = dict(rows)
        text = repr(sorted((key, dataclasses.astuple(row)) for key, row in self.rows.items()))
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:8]

    @classmethod
    def read(cls, path: Path = _SHIPPED) -> "LaunchTable":
        """Read a table as `write` leaves it; by default the one that is shipped.

        Raises:
            OSError: No such file.
            ValueError: The file holds no table.
        """
        rows = json.loads(path.read_text(encoding="utf-8"))
        keys = Key._fields
        return cls(
            {
                Key(*(row[name] for name in keys)): LaunchConfig(
                    **{name: row[name] for name in row.keys() - set(keys)}
                )
                for row in rows
            }
        )

    def write(self, path: Path) -> None:
        """Write the table, one line a row."""
        lines = [
            json.dumps({**key._asdict(), **dataclasses.asdict(row)})
            for key, row in sorted(self.rows.items())
        ]
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")

    def look_up(self, gpu: str, head_dim: int, width: Width, kind: Kind) -> LaunchConfig:
        """Find the configuration of a kind of batch; GPUs without rows of their own share "any".

        Args:
            gpu: As `gpu_family` names it.
            head_dim: 1 to 256.
            width: As `width_of`.
            kind: Of batch.

        Raises:
            ValueError: A head_dim beyond those of the table.
        """
        padded = max(_NARROW_HEAD_DIM, 1 << (head_dim - 1).bit_length())
        for name in (gpu, _ANY):
            row = self.rows.get(Key(name, padded, width, kind))
            if row is not None:
                return row
        most = max((key.head_dim for key in self.rows), default=0)
        raise ValueError(f"head_dim={head_dim}: the table of launch configurations ends at {most}")


def width_of(queries: torch.dtype, slots: torch.dtype) -> Width:
    """Name the width of queries and a pool's slots together.

    Raises:
        ValueError: A dtype that the kernels do not take.
    """
    floats = (torch.float32, torch.float16, torch.bfloat16)
    if queries not in floats or slots not in (*floats, *SCALED_DTYPES):
        raise ValueError(
            f"queries of {queries} over a pool of {slots}: expected float32, float16 or bfloat16, "
            f"and a pool of one of these or of codes"
        )
    if torch.float32 in (queries, slots):
        return "fp32"
    return "scaled" if slots in SCALED_DTYPES else "half"


def check_support(gpu: str, slots: torch.dtype) -> None:
    """Refuse a pool that a GPU cannot read.

    Raises:
        ValueError: float8_e4m3fn on NVIDIA GPUs before compute capability 8.9.
    """
    if slots == torch.float8_e4m3fn and gpu.startswith("sm") and int(gpu[2:]) < _FP8_CAPABILITY:
        raise ValueError(
            f"a pool of {slots} on {gpu}: expected compute capability 8.9 or later; this GPU takes "
            f"int8, and any floats of 16 or 32 bits"
        )


def gpu_family(device: torch.device) -> str:
    """Name the family of a device, by which the table has its rows.

    Args:
        device: On a CPU the kernels run in Triton's interpreter.
    """
    if device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = str(properties.gcnArchName).partition(":")[0]
    else:
        name = f"sm{properties.major}{properties.minor}"
    return _FAMILIES.get(name, name)
