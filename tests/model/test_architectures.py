"""Every family of models on several ranks, against transformers' own eager forward."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import model_class

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.architectures import ARCHITECTURES, layer_windows
from rayserve_paged.model.build import build_model
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.model.sharded_layers import VocabEmbedding

MakeModel = Callable[..., Path]
MakeGang = Callable[..., Any]

# Shorter and longer than any window, and none a multiple of the block size.
PROMPTS = [
    [(7 * place + place * place + 13 * seed) % 97 for place in range(length)]
    for seed, length in enumerate((41, 3, 62, 18))
]
NUM_TOKENS = 24

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": 13},
    "qwen2": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma2": {
        "num_hidden_layers": 4,
        "sliding_window": 10,
        "query_pre_attn_scalar": 11,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "query_pre_attn_scalar": 40,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {
        "sliding_window": 15,
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 9.0],
        },
    },
    "mixtral": {
        "sliding_window": 14,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    # Layers with experts and without.
    "qwen2_moe": {
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 23,
        "shared_expert_intermediate_size": 31,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
    },
    "qwen3_moe": {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 17,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 11,
    },
}


def gang_of(make_gang: MakeGang, directory: Path, world_size: int) -> Any:  # noqa: ANN401
    source = resolve_model(str(directory), directory)
    return make_gang(
        lambda collectives: build_model(source, "fp32", collectives, TorchBackend()),
        world_size,
        block_size=4,
        num_blocks=512,
    )


def reference_logits(model_type: str, directory: Path, token_ids: list[int]) -> torch.Tensor:
    """fp32 [num_tokens, vocab_size] by transformers, whole model, eager, no cache."""
    # Experts too: the default takes no widths that are not multiples of 16 bytes.
    model = model_class(model_type).from_pretrained(
        directory, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def check(make_gang: MakeGang, model_type: str, directory: Path, world_size: int) -> None:
    """Greedy outputs of a batch in chunks, and the logits behind them."""
    gang = gang_of(make_gang, directory, world_size)
    for prompt, logits in zip(
        PROMPTS, gang.greedy_logits(PROMPTS, NUM_TOKENS, budget=17), strict=True
    ):
        outputs = logits.argmax(dim=1).tolist()
        # By induction: transformers would choose each of them after the ones before it.
        want = reference_logits(model_type, directory, [*prompt, *outputs[:-1]])[-NUM_TOKENS:]
        assert want.argmax(dim=1).tolist() == outputs
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("model_type", "world_size"),
    [
        pytest.param(model_type, world_size, marks=[] if fast else pytest.mark.slow)
        for index, model_type in enumerate(FAMILIES)
        for world_size in (1, 2, 3)
        for fast in [world_size == 2 + index % 2]
    ],
)
def test_a_family_answers_as_transformers_does_at_every_width(
    make_model: MakeModel, make_gang: MakeGang, model_type: str, world_size: int
) -> None:
    directory = make_model(model_type, **FAMILIES[model_type])
    check(make_gang, model_type, directory, world_size)


@pytest.mark.parametrize(
    ("model_type", "stated"),
    [
        ("llama", {"sliding_window": 7}),
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7, "layer_types": ["full_attention"] * 7}),
        ("qwen2", {"sliding_window": 7, "max_window_layers": 3}),
        ("qwen2", {"sliding_window": 7, "max_window_layers": 3, "use_sliding_window": True}),
        ("qwen2", {"max_window_layers": 0, "use_sliding_window": True}),
        ("qwen3", {"num_hidden_layers": 30, "use_sliding_window": True}),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 7}),
        ("gemma2", {}),
        ("gemma2", {"sliding_window": 7, "layer_types": ["full_attention"] * 7}),
        ("gemma3_text", {"sliding_window": 512}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("phi3", {}),
        ("phi3", {"sliding_window": 2047}),
        ("mixtral", {}),
        ("mixtral", {"sliding_window": 7}),
        ("qwen2_moe", {"sliding_window": 7}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}),
        ("qwen2_moe", {"num_hidden_layers": 30, "use_sliding_window": True}),
        ("qwen3_moe", {"sliding_window": 7}),
        ("qwen3_moe", {"use_sliding_window": True}),
    ],
)
def test_windows_are_those_that_transformers_reads_from_config_json(
    model_type: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    stated = {"num_hidden_layers": 7, **stated}
    config = model_class(model_type).config_class(**stated)
    num_layers = stated["num_hidden_layers"]
    size = None if model_type == "llama" else config.sliding_window
    if ARCHITECTURES[model_type].windows is None or size is None:
        windows = [FULL_ATTENTION] * num_layers
    elif model_type in ("mistral", "phi3", "mixtral", "qwen3_moe"):
        windows = [AttentionWindow(size)] * num_layers
    else:
        kinds = {"full_attention": FULL_ATTENTION, "sliding_attention": AttentionWindow(size)}
        windows = [kinds[layer_type] for layer_type in config.layer_types]
    got = layer_windows(ARCHITECTURES[model_type], tmp_path, stated, num_layers)
    assert list(got or [FULL_ATTENTION] * num_layers) == windows
    assert got is None or set(got) != {FULL_ATTENTION}


@pytest.mark.parametrize(
    ("model_type", "stated", "accepted"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is at least 1 .*, not 0"),
        ("mistral", {"sliding_window": "7"}, "sliding_window is at least 1 .*, not '7'"),
        ("gemma2", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "not None"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is .*, not None"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types are 2 of full_attention and"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 2}, "not .'chunked_attention'"),
    ],
)
def test_windows_that_are_none_are_refused(
    model_type: str, stated: dict[str, Any], accepted: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=accepted):
        layer_windows(ARCHITECTURES[model_type], tmp_path, stated, 2)


def test_a_model_whose_tokens_see_later_ones_is_refused(make_model: MakeModel) -> None:
    directory = restated(make_model("gemma3_text"), use_bidirectional_attention=True)
    with pytest.raises(InvalidInputError, match="without use_bidirectional_attention"):
        resolve_model(str(directory), directory)


def test_dynamic_scaling_never_sets_in_below_the_positions_of_a_model(
    make_model: MakeModel, make_gang: MakeGang
) -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    longest = max(map(len, PROMPTS)) + NUM_TOKENS
    directory = make_model("llama", max_position_embeddings=longest, rope_parameters=scaling)
    check(make_gang, "llama", directory, 1)


def test_longrope_serves_lengths_up_to_the_switch_of_its_frequencies(
    make_model: MakeModel, make_gang: MakeGang
) -> None:
    longest = max(map(len, PROMPTS)) + NUM_TOKENS
    settings = FAMILIES["phi3"] | {"original_max_position_embeddings": longest}
    directory = make_model("phi3", **settings)
    assert resolve_model(str(directory), directory).spec.max_model_len == longest
    check(make_gang, "phi3", directory, 1)
    # As the first of these models state it.
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    restated(directory, rope_parameters=None, rope_scaling=scaling)
    assert resolve_model(str(directory), directory).spec.max_model_len == longest


def restated(directory: Path, **changes: object) -> Path:
    """Change what config.json states; None for what it is not to state."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    kept = {key: value for key, value in config.items() if key not in changes}
    changed = {key: value for key, value in changes.items() if value is not None}
    path.write_text(json.dumps(kept | changed))
    return directory


@pytest.mark.parametrize(
    ("model_type", "changes", "accepted"),
    [
        ("mistral", {"num_key_value_heads": None}, "states num_key_value_heads, .* 8 without"),
        ("gemma3_text", {"head_dim": None}, "states head_dim, which would be 256 without"),
        (
            "phi3",
            {
                "original_max_position_embeddings": None,
                "rope_parameters": FAMILIES["phi3"]["rope_parameters"],
            },
            "states original_max_position_embeddings, which would be 4096 without",
        ),
        ("phi3", {"num_key_value_heads": 6}, r"qkv_proj.weight of shape \(144, 48\), not \(96, 48"),
        ("phi3", {"intermediate_size": 49}, r"gate_up_proj.weight of shape \(98, 48\), not \(100,"),
        (
            "qwen3",
            {"attention_bias": True},
            r"weights include model.layers.0.self_attn.q_proj.bias",
        ),
    ],
)
def test_weights_that_config_json_does_not_describe_are_refused(
    make_model: MakeModel,
    make_gang: MakeGang,
    model_type: str,
    changes: dict[str, object],
    accepted: str,
) -> None:
    positions = {"max_position_embeddings": 8192, "original_max_position_embeddings": 4096}
    settings = FAMILIES[model_type] | (positions if model_type == "phi3" else {})
    directory = restated(make_model(model_type, **settings | {"attention_bias": False}), **changes)
    with pytest.raises(InvalidInputError, match=accepted):
        gang_of(make_gang, directory, 1)


def test_a_missing_norm_is_named(make_model: MakeModel, make_gang: MakeGang) -> None:
    from safetensors.torch import load_file, save_file

    directory = make_model("gemma3_text")
    path = directory / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.self_attn.k_norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match=r"include model\.layers\.1\.self_attn\.k_norm"):
        gang_of(make_gang, directory, 1)


def test_embeddings_are_scaled_by_a_factor_rounded_to_their_dtype() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    whole = Gemma3TextScaledWordEmbedding(11, 8, 0, embed_scale=3072**0.5).to(torch.bfloat16)
    weight = whole.weight.data
    part = VocabEmbedding(weight, range(11), SoloCollectives(), whole.scalar_embed_scale)
    token_ids = torch.arange(11)
    assert torch.equal(part(token_ids), whole(token_ids))
    assert not torch.equal(part(token_ids), weight * 3072**0.5)
