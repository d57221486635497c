"""What the rest of the system knows of a model: sizes, limits and identity."""

import dataclasses
import hashlib
from pathlib import Path

from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.config import KvDtype
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.architectures import Architecture
from rayserve_paged.model.layer_groups import LayerGroup, group_layers


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes, limits and identity of a model, independent of dtype and of tensor parallelism.

    Args:
        num_layers: Layers that keep keys and values.
        num_heads: Query heads, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads.
        head_dim: Elements of one head's key.
        vocab_size: Ids of the tokenizer; padding rows of the embedding do not count.
        max_model_len: Prompt and output tokens that the positions allow.
        eos_token_ids: Ids that end a sequence; may be empty.
        fingerprint: Digest of weights and configuration, for the scope of block keys.
        adapters: Those that are loaded; None where any may be asked for.
        takes_attachments: Whether content may stand behind tokens of a prompt.
        layer_windows: What each layer attends to; None where all attend to all.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: bytes
    adapters: tuple[Adapter, ...] | None = ()
    takes_attachments: bool = False
    layer_windows: tuple[AttentionWindow, ...] | None = None

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers by what they keep, in groups of equal size."""
        return group_layers(self.layer_windows or (FULL_ATTENTION,) * self.num_layers)


@dataclasses.dataclass(frozen=True, slots=True)
class FingerprintConfig:
    """All there is to a fingerprint model (see `fingerprint`).

    Args:
        num_layers: Layers that keep fingerprints.
        num_heads: Query heads, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads.
        vocab_size: Token ids; at least 256, so that every byte is one.
        max_model_len: Prompt and output tokens.
        eos_token_ids: Ids that end a sequence; none by default.
        weights_version: Part of every fingerprint, as the weights would be.
        layer_windows: What each layer reads; None where all read all.
    """

    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab_size: int = 1000
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    weights_version: int = 0
    layer_windows: tuple[AttentionWindow, ...] | None = None

    def spec(self) -> ModelSpec:
        """The specification of this model."""
        return ModelSpec(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=1,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            fingerprint=hashlib.sha256(repr(self).encode()).digest(),
            # It has no weights that would have to be loaded, and no encoder that is missing.
            adapters=None,
            takes_attachments=True,
            layer_windows=self.layer_windows,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class DirectorySource:
    """A Hugging Face directory with a language model, as `loader.resolve_model` found it.

    Args:
        name: What the user asked for.
        spec: Sizes, limits and identity.
        directory: Holds config.json, the safetensors files and the tokenizer's files.
        architecture: Its family.
    """

    name: str
    spec: ModelSpec
    directory: Path
    architecture: Architecture


@dataclasses.dataclass(frozen=True, slots=True)
class FingerprintSource:
    """The fingerprint model, whose configuration is all there is to it.

    Args:
        name: What the user asked for.
        config: What makes its numbers.
        spec: Sizes, limits and identity.
    """

    name: str
    config: FingerprintConfig
    spec: ModelSpec


ModelSource = DirectorySource | FingerprintSource
"""Where a model comes from; picklable, so that every rank builds its part from the same one."""


def check_kv_dtype(source: ModelSource, kv_dtype: KvDtype | None) -> None:
    """Refuse a dtype of the cache where the model has one of its own.

    Raises:
        InvalidInputError: It was given for the fingerprint model.
    """
    if kv_dtype is not None and isinstance(source, FingerprintSource):
        accepted = "nothing for the fingerprint model, whose cache holds integers"
        raise InvalidInputError("model.kv_dtype", kv_dtype, accepted)
