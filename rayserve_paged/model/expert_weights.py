"""Reads experts, of which the files hold each matrix and transformers one stack of them all."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rayserve_paged.model.architectures import ExpertNames
from rayserve_paged.model.safetensors_files import WeightReader


def stored_tensors(
    name: str, shape: tuple[int, ...], experts: ExpertNames | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tell what the files hold for a parameter.

    Args:
        name: Of the parameter in transformers.
        shape: Of the parameter.
        experts: Their names in the files; None where no layer has experts.

    Yields:
        Names and shapes of the tensors; one, but for a stack of experts.
    """
    layer, in_mlp, rest = name.partition(".mlp.")
    if experts is None or not in_mlp:
        yield name, shape
        return
    block = f"{layer}.{experts.block}"
    match rest:
        case "experts.gate_up_proj":
            num_experts, rows, columns = shape
            for expert in range(num_experts):
                for part in (experts.gate, experts.up):
                    yield _weight(block, expert, part), (rows // 2, columns)
        case "experts.down_proj":
            for expert in range(shape[0]):
                yield _weight(block, expert, experts.down), shape[1:]
        case _:
            yield f"{block}.{rest}", shape


def read_experts(
    module: Any,
    layer: str,
    names: ExpertNames,
    reader: WeightReader,
    columns: range,
) -> None:
    """Put some columns of each expert into a module that has no weights.

    Args:
        module: Of transformers: `gate_up_proj` [num_experts, 2 * intermediate_size, hidden_size]
            and `down_proj` [num_experts, hidden_size, intermediate_size], which are replaced.
        layer: Name of the decoder layer.
        names: Of the experts in the files.
        reader: Of the files.
        columns: Of the intermediate size, those to read.
    """
    num_experts, hidden_size, _ = module.down_proj.shape
    dtype, device = reader.dtype, reader.device
    gate_up = torch.empty(num_experts, 2, len(columns), hidden_size, dtype=dtype, device=device)
    down = torch.empty(num_experts, hidden_size, len(columns), dtype=dtype, device=device)
    block = f"{layer}.{names.block}"
    for expert in range(num_experts):
        gate_up[expert, 0] = reader.read(_weight(block, expert, names.gate), columns)
        gate_up[expert, 1] = reader.read(_weight(block, expert, names.up), columns)
        down[expert] = reader.read(_weight(block, expert, names.down), columns=columns)
    module.gate_up_proj = nn.Parameter(gate_up.flatten(1, 2), requires_grad=False)
    module.down_proj = nn.Parameter(down, requires_grad=False)


def _weight(block: str, expert: int, matrix: str) -> str:
    return f"{block}.experts.{expert}.{matrix}.weight"
