"""Converts a Llama GGUF file to a Hugging Face directory with fp32 weights, once.

llama.cpp stores the rows of the query and key projections in another order (rotary pairs side by
side) and names tensors and settings in its own way; everything else is dequantisation.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.gguf_tokenizer import write_tokenizer
from rayserve_paged.model.safetensors_files import write_safetensors

CONVERTER_VERSION = 1
"""Part of a converted copy's name: raise it when the same file would convert differently."""

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFModel:
    """The settings and tensors of a GGUF file.

    Args:
        path: The file.

    Raises:
        InvalidInputError: Not a GGUF file.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        # What the reader raises on foreign bytes: a bad magic or version, a short file, and
        # nonsense sizes and types.
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise InvalidInputError("model", str(path), f"a GGUF file ({error})") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def setting(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key, or the default where the file has none."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def number(self, key: str) -> Any:
        """Value of a metadata key.

        Raises:
            InvalidInputError: The file has none, or one for each layer.
        """
        value = self.setting(key)
        if not isinstance(value, int | float):
            accepted = f"a GGUF file with one number for {key}"
            raise InvalidInputError("model", str(self.path), f"{accepted}, not {value!r}")
        return value


def converted_directory(path: Path, cache_dir: Path) -> Path:
    """The Hugging Face directory for a GGUF file, converted now if it was not before.

    Safe to call from several processes at once: one converts, the others wait. The directory
    appears whole or not at all.

    Args:
        path: The GGUF file.
        cache_dir: Where converted copies are kept; created as needed.

    Returns:
        A directory below `cache_dir`, named by the file's digest and the converter's version.

    Raises:
        InvalidInputError: Not a GGUF file, or not of a model that can be converted.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_dir / f"gguf-{digest[:32]}-v{CONVERTER_VERSION}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / f"{target.name}.lock"):
        if not target.is_dir():
            _convert_into(path, target)
    return target


def _convert_into(path: Path, target: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        convert(path, work)
        # mkdtemp makes it private; a shared cache is read by others.
        work.chmod(0o755)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def convert(path: Path, directory: Path) -> None:
    """Write config.json, model.safetensors (fp32) and the tokenizer's files.

    Args:
        path: The GGUF file.
        directory: An existing, empty directory.

    Raises:
        InvalidInputError: Not a GGUF file, or not of a model that can be converted.
    """
    model = GGUFModel(path)
    config = _config(model)
    write_tokenizer(model.setting, directory, model_name=str(path))
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n")
    shapes = {
        name: tuple(int(size) for size in reversed(model.tensors[source].shape))
        for name, source in _names(model, config["num_hidden_layers"]).items()
    }
    write_safetensors(directory / "model.safetensors", shapes, _weights(model, config))


def _config(model: GGUFModel) -> dict[str, Any]:
    architecture = model.setting("general.architecture")
    accepted = "a GGUF file of a plain Llama model"
    if architecture != "llama":
        raise InvalidInputError("model", str(model.path), f"{accepted}, not of {architecture}")
    for key in ("llama.expert_count", "llama.rope.scaling.type"):
        if model.setting(key) not in (None, 0, "none"):
            raise InvalidInputError("model", str(model.path), f"{accepted}, without {key}")
    if "rope_freqs.weight" in model.tensors:
        raise InvalidInputError("model", str(model.path), f"{accepted}, without rope_freqs")
    num_heads = model.number("llama.attention.head_count")
    hidden_size = model.number("llama.embedding_length")
    epsilon = np.float32(model.number("llama.attention.layer_norm_rms_epsilon"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "bos_token_id": model.setting("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": model.setting("tokenizer.ggml.eos_token_id"),
        "head_dim": model.setting("llama.attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": model.number("llama.feed_forward_length"),
        "max_position_embeddings": model.number("llama.context_length"),
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": model.number("llama.block_count"),
        "num_key_value_heads": model.setting("llama.attention.head_count_kv", num_heads),
        # The shortest decimal that is this fp32 number: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(str(epsilon)),
        "rope_parameters": {
            "rope_theta": model.setting("llama.rope.freq_base", 10000.0),
            "rope_type": "default",
        },
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "vocab_size": int(model.tensors["token_embd.weight"].shape[-1]),
    }


def _names(model: GGUFModel, num_layers: int) -> dict[str, str]:
    """Hugging Face name -> GGUF name of every tensor to convert."""
    stems = dict(_TENSORS)
    for layer in range(num_layers):
        for source, target in _LAYER_TENSORS.items():
            stems[f"blk.{layer}.{source}"] = f"model.layers.{layer}.{target}"
    names = {
        f"{target}.{part}": f"{source}.{part}"
        for source, target in stems.items()
        for part in ("weight", "bias")
        if f"{source}.{part}" in model.tensors
    }
    missing = {f"{target}.weight" for target in stems.values()} - names.keys() - {"lm_head.weight"}
    unknown = model.tensors.keys() - names.values()
    if missing or unknown:
        raise InvalidInputError(
            "model",
            str(model.path),
            f"a GGUF file with all tensors of a plain Llama model and no others "
            f"(missing: {sorted(missing)[:3]}, unknown: {sorted(unknown)[:3]})",
        )
    return names


def _weights(model: GGUFModel, config: dict[str, Any]) -> Iterator[npt.NDArray[np.float32]]:
    from gguf.quants import dequantize

    for name, source in sorted(_names(model, config["num_hidden_layers"]).items()):
        tensor = model.tensors[source]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if ".q_proj." in name:
            weight = unpermute(weight, config["num_attention_heads"])
        elif ".k_proj." in name:
            weight = unpermute(weight, config["num_key_value_heads"])
        yield weight


def unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of a query or key projection.

    Within a head it stores rows 0, D/2, 1, D/2 + 1, ... (the two halves of each rotary pair side
    by side) where Hugging Face has 0, 1, ..., D - 1.

    Args:
        weight: fp32 [num_heads * head_dim, ...], a weight or a bias.
        num_heads: Heads of the projection.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
