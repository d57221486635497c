"""The model families that can be run, and what has to be known of each to shard it.

A family is described, not programmed: transformers has the modules, and a description says which of
their linear layers are split over the ranks and how, and which layers see a window. Neither torch
nor transformers is needed to read it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.core.errors import InvalidInputError

Axis = Literal["query", "kv", "intermediate"]
"""What is dealt over the ranks: query heads, KV heads, or columns of the feed-forward part."""


@dataclasses.dataclass(frozen=True, slots=True)
class WindowRule:
    """Which layers see a window, as transformers reads config.json.

    Args:
        default_size: The window where `sliding_window` is not stated; None for none.
        switched: Whether there are windows only where `use_sliding_window` is true.
        pattern: For config.json and a number of layers, whether each one sees the window; asked
            where `layer_types` is not stated. None where all layers do, whatever it states.
    """

    default_size: int | None
    switched: bool = False
    pattern: Callable[[Mapping[str, Any], int], Sequence[bool]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertNames:
    """What the files call a layer's router and experts, each with matrices of its own.

    transformers stacks the matrices of all experts, and joins gate and up, in `mlp.experts`.

    Args:
        block: Holds the router and the experts; `mlp` in transformers.
        gate: The matrix whose output goes through the activation.
        up: The matrix whose output is multiplied with that.
        down: The matrix back to the hidden size.
    """

    block: str
    gate: str
    up: str
    down: str


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """A family of models of transformers.

    Args:
        model_type: Its name in config.json.
        package: Its package under `transformers.models`.
        model_class: Of transformers; config.json may name it under `architectures`.
        columns: Linear layers of a decoder layer that are split by output features, each with what
            its output consists of: several parts where projections are fused.
        rows: Those that are split by input features, each with what its input consists of. Where
            layers may have experts instead of one feed-forward part, a layer has some of these.
        windows: Which layers see a window; None where none does.
        caps_logits: Whether `final_logit_softcapping` bounds the logits.
        experts: Their names in the files; None where no layer has experts.
    """

    model_type: str
    package: str
    model_class: str
    columns: Mapping[str, tuple[Axis, ...]]
    rows: Mapping[str, Axis]
    windows: WindowRule | None = None
    caps_logits: bool = False
    experts: ExpertNames | None = None


_COLUMNS: Mapping[str, tuple[Axis, ...]] = {
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("kv",),
    "self_attn.v_proj": ("kv",),
    "mlp.gate_proj": ("intermediate",),
    "mlp.up_proj": ("intermediate",),
}
_FUSED_COLUMNS: Mapping[str, tuple[Axis, ...]] = {
    "self_attn.qkv_proj": ("query", "kv", "kv"),
    "mlp.gate_up_proj": ("intermediate", "intermediate"),
}
_ROWS: Mapping[str, Axis] = {"self_attn.o_proj": "query", "mlp.down_proj": "intermediate"}
_SHARED_COLUMNS: Mapping[str, tuple[Axis, ...]] = {
    "mlp.shared_expert.gate_proj": ("intermediate",),
    "mlp.shared_expert.up_proj": ("intermediate",),
}
_SHARED_ROWS: Mapping[str, Axis] = {"mlp.shared_expert.down_proj": "intermediate"}
_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
_QWEN_EXPERTS = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")


def _last_layers(config: Mapping[str, Any], num_layers: int) -> Sequence[bool]:
    first = config.get("max_window_layers", 28)
    return [layer >= first for layer in range(num_layers)]


def _every_second_of_the_first(config: Mapping[str, Any], num_layers: int) -> Sequence[bool]:
    first_full = config.get("max_window_layers", 28)
    return [layer % 2 == 0 and layer < first_full for layer in range(num_layers)]


def _every_second(_: Mapping[str, Any], num_layers: int) -> Sequence[bool]:
    return [layer % 2 == 0 for layer in range(num_layers)]


def _all_but_every_nth(config: Mapping[str, Any], num_layers: int) -> Sequence[bool]:
    nth = config.get("sliding_window_pattern", 6)
    return [(layer + 1) % nth != 0 for layer in range(num_layers)]


_QWEN_WINDOWS = WindowRule(4096, switched=True, pattern=_last_layers)

_ALL = (
    Architecture("llama", "llama", "LlamaForCausalLM", _COLUMNS, _ROWS),
    Architecture("mistral", "mistral", "MistralForCausalLM", _COLUMNS, _ROWS, WindowRule(4096)),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _COLUMNS, _ROWS, _QWEN_WINDOWS),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", _COLUMNS, _ROWS, _QWEN_WINDOWS),
    Architecture(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        _COLUMNS,
        _ROWS,
        WindowRule(4096, pattern=_every_second),
        caps_logits=True,
    ),
    Architecture(
        "gemma3_text",
        "gemma3",
        "Gemma3ForCausalLM",
        _COLUMNS,
        _ROWS,
        WindowRule(4096, pattern=_all_but_every_nth),
        caps_logits=True,
    ),
    Architecture("phi3", "phi3", "Phi3ForCausalLM", _FUSED_COLUMNS, _ROWS, WindowRule(None)),
    Architecture(
        "mixtral",
        "mixtral",
        "MixtralForCausalLM",
        _COLUMNS,
        _ROWS,
        WindowRule(None),
        experts=_MIXTRAL_EXPERTS,
    ),
    Architecture(
        "qwen2_moe",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**_COLUMNS, **_SHARED_COLUMNS},
        {**_ROWS, **_SHARED_ROWS},
        WindowRule(4096, switched=True, pattern=_every_second_of_the_first),
        experts=_QWEN_EXPERTS,
    ),
    Architecture(
        "qwen3_moe",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _COLUMNS,
        _ROWS,
        WindowRule(4096, switched=True),
        experts=_QWEN_EXPERTS,
    ),
)
ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.model_type: architecture for architecture in _ALL
}
"""Every family that can be run, by the `model_type` of config.json."""


def find_architecture(directory: Path, config: Mapping[str, Any]) -> Architecture:
    """Return the family of a model.

    Args:
        directory: Of the model, for the error.
        config: Its config.json.

    Raises:
        InvalidInputError: It is of no family that can be run, or not made to continue a text.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        accepted = f"a config.json with a model_type of {', '.join(ARCHITECTURES)}"
        raise InvalidInputError("model", str(directory), f"{accepted}, not {model_type!r}")
    architecture = ARCHITECTURES[model_type]
    named = config.get("architectures") or [architecture.model_class]
    if architecture.model_class not in named:
        accepted = f"a config.json with {architecture.model_class} among its architectures"
        raise InvalidInputError("model", str(directory), f"{accepted}, not {named!r}")
    if config.get("use_bidirectional_attention"):
        accepted = "a config.json without use_bidirectional_attention: tokens see earlier ones only"
        raise InvalidInputError("model", str(directory), accepted)
    return architecture


def layer_windows(
    architecture: Architecture, directory: Path, config: Mapping[str, Any], num_layers: int
) -> tuple[AttentionWindow, ...] | None:
    """Return what each layer of a model attends to; None where all attend to all.

    Args:
        architecture: Of the model.
        directory: Of the model, for the error.
        config: Its config.json.
        num_layers: Its layers.

    Raises:
        InvalidInputError: config.json has windows that are none.
    """
    rule = architecture.windows
    if rule is None:
        return None
    size = config.get("sliding_window", rule.default_size)
    if rule.switched and not config.get("use_sliding_window", False):
        size = None
    if rule.pattern is None:
        windowed: Sequence[bool] = [size is not None] * num_layers
    elif config.get("layer_types") is None:
        windowed = rule.pattern(config, num_layers) if size is not None else [False] * num_layers
    else:
        windowed = _windowed_of(directory, config["layer_types"], num_layers)
    if not any(windowed):
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        accepted = "a config.json whose sliding_window is at least 1 where layers see a window"
        raise InvalidInputError("model", str(directory), f"{accepted}, not {size!r}")
    return tuple(AttentionWindow(size) if short else FULL_ATTENTION for short in windowed)


def _windowed_of(directory: Path, layer_types: object, num_layers: int) -> list[bool]:
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(layer_type not in known for layer_type in layer_types)
    ):
        accepted = f"a config.json whose layer_types are {num_layers} of {' and '.join(known)}"
        raise InvalidInputError("model", str(directory), f"{accepted}, not {layer_types!r}")
    return [layer_type == "sliding_attention" for layer_type in layer_types]


def longest_uniform_rotation(config: Mapping[str, Any], max_positions: int) -> int:
    """Return up to which length the rotary embedding turns a position by the same angles.

    With "longrope" transformers takes other frequencies for all of a batch where its longest
    sequence is longer than the model was first trained for (LongRoPE, arXiv 2402.13753). A cached
    key was turned by those of its own time, and a batch mixes requests, so only sequences that
    never reach the switch are right. The other scalings do not switch below `max_positions`.

    Args:
        config: Of the model.
        max_positions: Positions that it has.
    """
    # Former names stand where older configurations have them.
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return max_positions
    of_each = [scaling, *(value for value in scaling.values() if isinstance(value, dict))]
    kinds = {rope.get("rope_type", rope.get("type")) for rope in of_each}
    if not kinds & {"longrope", "su"}:
        return max_positions
    originals = [c.get("original_max_position_embeddings") for c in (config, *of_each)]
    return min([max_positions, *(length for length in originals if isinstance(length, int))])
