"""Writes safetensors files tensor by tensor, and reads the parts of them that a rank needs."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.json_files import read_json_object

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[npt.NDArray[np.float32]],
) -> None:
    """Write fp32 tensors one by one, so that no more than one needs to be in memory.

    Args:
        path: The file to write.
        shapes: Shape of each tensor.
        tensors: The tensors in the order of their sorted names.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in sorted(shapes.items()):
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor, dtype="<f4").data)


def safetensors_paths(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory, sorted; empty where it has none.

    Raises:
        InvalidInputError: Its index is not one.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidInputError("model", str(index), "an index with a weight_map")
        return tuple(directory / name for name in sorted(set(weight_map.values())))
    single = directory / SINGLE_NAME
    return (single,) if single.is_file() else ()


def read_header(path: Path) -> dict[str, Any]:
    """Header of a safetensors file: tensor name -> dtype, shape and data_offsets.

    Raises:
        InvalidInputError: No such file, not a safetensors file, or only a part of one.
    """
    if not path.is_file():
        raise InvalidInputError("model", str(path), "a directory with all its safetensors files")
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        encoded = file.read(length) if length <= size_bytes else b""
    try:
        header = json.loads(encoded)
    except ValueError as error:
        raise InvalidInputError("model", str(path), "a safetensors file") from error
    if not isinstance(header, dict):
        raise InvalidInputError("model", str(path), "a safetensors file")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if size_bytes != 8 + length + max(ends, default=0):
        accepted = f"a whole safetensors file of {8 + length + max(ends, default=0)} bytes"
        raise InvalidInputError("model", f"{path}, {size_bytes} bytes", accepted)
    return header


class WeightReader:
    """Reads tensors, or slices of them, from the safetensors files of a directory.

    Only what is asked for is read, and it is copied, so nothing refers to the files afterwards.
    A file is opened anew for each tensor: its mapping would otherwise count as this process's
    memory, page by page, until the last tensor is read.

    Args:
        directory: A Hugging Face model directory.
        dtype: What to convert to.
        device: Where to put it.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._directory = directory
        self._paths: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in safetensors_paths(directory):
            header = read_header(path)
            header.pop("__metadata__", None)
            self._paths |= dict.fromkeys(header, path)
            self._shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}

    def __contains__(self, name: str) -> bool:
        """Whether the files hold a tensor of this name."""
        return name in self._paths

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """See to it that a tensor is there, and is as large as the configuration says.

        A slice of one that is larger would be read without complaint.

        Raises:
            InvalidInputError: The files hold no tensor of this name, or one of another shape.
        """
        if name not in self._paths:
            accepted = f"a directory whose weights include {name}"
            raise InvalidInputError("model", str(self._directory), accepted)
        if self._shapes[name] != shape:
            accepted = f"weights as config.json tells: {name} of shape {shape}"
            raise InvalidInputError(
                "model", str(self._directory), f"{accepted}, not {self._shapes[name]}"
            )

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """Read a tensor.

        Args:
            name: Of the tensor.
            rows: Part of its first axis; None for all.
            columns: Part of its second axis; None for all.

        Returns:
            A contiguous tensor of its own storage.

        Raises:
            InvalidInputError: The files hold no tensor of this name.
        """
        import torch
        from safetensors import safe_open

        if name not in self._paths:
            accepted = f"a directory whose weights include {name}"
            raise InvalidInputError("model", str(self._directory), accepted)
        where = [slice(None) if r is None else slice(r.start, r.stop) for r in (rows, columns)]
        with safe_open(self._paths[name], framework="pt") as file:
            part = file.get_slice(name)
            tensor = part[tuple(where[: len(part.get_shape())])]
            return torch.empty(tensor.shape, dtype=self.dtype, device=self.device).copy_(tensor)
