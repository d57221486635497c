"""Finds the sizes of a model that is to be planned for: by name, or from its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.load_config import accepted_by
from rayserve_paged.model.architectures import (
    find_architecture,
    layer_windows,
    longest_uniform_rotation,
)
from rayserve_paged.model.json_files import read_json_object
from rayserve_paged.sim.hardware import MODEL_SHAPES, ModelShape


class _Sizes(BaseModel):
    """What a config.json says of sizes."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = False


def find_shape(model: str) -> ModelShape:
    """Return the sizes of a model, in 16 bits.

    Args:
        model: One of `MODEL_SHAPES`, or a directory with a config.json; no weights are needed.

    Raises:
        InvalidInputError: It is neither, of a family that cannot be run, or one that the cost
            model does not know: with experts, or with layers that see a window.
    """
    if model in MODEL_SHAPES:
        return MODEL_SHAPES[model]
    path = Path(model) / "config.json"
    if not path.is_file():
        accepted = f"{', '.join(MODEL_SHAPES)}, or a directory with a config.json"
        raise InvalidInputError("model.model", model, accepted)
    return _shape_of(path.parent, read_json_object(path))


def _shape_of(directory: Path, config: dict[str, Any]) -> ModelShape:
    architecture = find_architecture(directory, config)
    try:
        sizes = _Sizes.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        value = None if first["type"] == "missing" else first["input"]
        path = directory / "config.json"
        raise InvalidInputError(f"{path}: {field}", value, accepted_by(first)) from error
    windows = layer_windows(architecture, directory, config, sizes.num_hidden_layers)
    if architecture.experts is not None or windows is not None:
        accepted = "a dense model whose layers see all tokens: no experts, no sliding window"
        raise InvalidInputError("model.model", str(directory), accepted)
    return ModelShape(
        directory.resolve().name,
        num_layers=sizes.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads or sizes.num_attention_heads,
        head_dim=sizes.head_dim or sizes.hidden_size // sizes.num_attention_heads,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        max_model_len=longest_uniform_rotation(config, sizes.max_position_embeddings),
        tied_embeddings=sizes.tie_word_embeddings,
    )
