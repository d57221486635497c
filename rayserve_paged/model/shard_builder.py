"""Puts a rank's slices of the weights into a model of transformers that was built without any."""

import copy
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.architectures import Axis, longest_uniform_rotation
from rayserve_paged.model.expert_weights import read_experts, stored_tensors
from rayserve_paged.model.parallel import Collectives, HeadShare, deal
from rayserve_paged.model.safetensors_files import WeightReader
from rayserve_paged.model.sharded_layers import (
    ColumnLinear,
    RowLinear,
    ShardedExperts,
    VocabEmbedding,
)
from rayserve_paged.model.spec import DirectorySource


class ShardBuilder:
    """Builds one rank's part of a model.

    Everything that a rank holds whole, norms among it, is transformers' own, and so is the order in
    which things are computed; only the linear layers that the architecture names are replaced.

    Args:
        source: The model.
        reader: Of its weights.
        share: The attention heads of this rank.
        collectives: The ranks that hold the other parts.
        device: Where weights and activations live.
    """

    def __init__(
        self,
        source: DirectorySource,
        reader: WeightReader,
        share: HeadShare,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._source = source
        self._reader = reader
        self._share = share
        self._collectives = collectives
        self._device = device

    def build(self, attention: str) -> tuple[Any, tuple[int, ...]]:
        """Build the model.

        Args:
            attention: Name under which the attention function is registered with transformers.

        Returns:
            The model of transformers, and the number of vocabulary rows of each rank.

        Raises:
            InvalidInputError: transformers does not take the configuration, or a weight is missing
                or not of the shape that it tells.
        """
        model = self._empty_model(attention)
        config = model.config
        for name, parameter in model.named_parameters():
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                names = self._source.architecture.experts
                for stored, shape in stored_tensors(name, tuple(parameter.shape), names):
                    self._reader.check(stored, shape)
        vocab = deal(config.vocab_size, self._collectives.world_size)
        self._fill_vocabulary(model, vocab[self._collectives.rank])
        for index, layer in enumerate(model.model.layers):
            self._shard(layer, f"model.layers.{index}")
        self._fill_whole(model)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        return model.eval(), tuple(map(len, vocab))

    def _empty_model(self, attention: str) -> Any:
        """The model without weights; its rotary embedding alone has its numbers."""
        from huggingface_hub.errors import StrictDataclassError

        architecture, directory = self._source.architecture, self._source.directory
        # The module is imported by its own path: it loads in half the time of the top level.
        package = f"transformers.models.{architecture.package}"
        modeling = importlib.import_module(f"{package}.modeling_{architecture.package}")
        model_class = getattr(modeling, architecture.model_class)
        try:
            config = model_class.config_class.from_pretrained(directory)
            config._attn_implementation = attention
            # The others want widths that are multiples of 16 bytes, which a share may not have. A
            # token's experts are added up in the order of their numbers, so its sum does not depend
            # on the rest of the batch.
            config._experts_implementation = "eager"
            with torch.device("meta"):
                model = model_class(config)
            # Its frequencies are no weights, so nothing would fill those made on meta.
            model.model.rotary_emb = type(model.model.rotary_emb)(config).to(self._device)
        # KeyError for an activation or a rotary embedding that nobody knows, AssertionError for a
        # padding id that the vocabulary has not.
        except (StrictDataclassError, KeyError, AssertionError) as error:
            accepted = f"a config.json that transformers takes ({' '.join(str(error).split())})"
            raise InvalidInputError("model", str(directory), accepted) from error
        self._check_sizes(model)
        return model

    def _check_sizes(self, model: Any) -> None:
        """See to it that transformers takes the sizes from config.json that the pool has.

        Where one is not stated, families differ in what they take for it.
        """
        spec, config = self._source.spec, model.config
        uniform = longest_uniform_rotation(config.to_dict(), spec.max_model_len)
        for name, taken, expected in (
            ("num_key_value_heads", config.num_key_value_heads, spec.num_kv_heads),
            ("head_dim", model.model.layers[0].self_attn.head_dim, spec.head_dim),
            ("original_max_position_embeddings", uniform, spec.max_model_len),
        ):
            if taken != expected:
                accepted = f"a config.json that states {name}, which would be {taken} without"
                raise InvalidInputError("model", str(self._source.directory), accepted)

    def _own(self, axis: Axis, length: int) -> range:
        """This rank's part of an axis."""
        if axis == "intermediate":
            return deal(length, self._collectives.world_size)[self._collectives.rank]
        heads = self._share.query_heads if axis == "query" else self._share.kv_heads
        head_dim = self._source.spec.head_dim
        return range(heads.start * head_dim, heads.stop * head_dim)

    def _own_rows(self, parts: Sequence[Axis], num_rows: int) -> Iterator[range]:
        """This rank's rows of a weight whose rows are these parts, one after the other."""
        spec, start = self._source.spec, 0
        lengths = {
            "query": spec.num_heads * spec.head_dim,
            "kv": spec.num_kv_heads * spec.head_dim,
            "intermediate": num_rows // len(parts),
        }
        for axis in parts:
            own = self._own(axis, lengths[axis])
            yield range(start + own.start, start + own.stop)
            start += lengths[axis]

    def _fill_vocabulary(self, model: Any, rows: range) -> None:
        embedding = self._reader.read("model.embed_tokens.weight", rows)
        tied = model.config.tie_word_embeddings
        head = embedding if tied else self._reader.read("lm_head.weight", rows)
        scale = getattr(model.model.embed_tokens, "scalar_embed_scale", None)
        model.model.embed_tokens = VocabEmbedding(embedding, rows, self._collectives, scale)
        model.lm_head = ColumnLinear(head, None)

    def _shard(self, layer: Any, prefix: str) -> None:
        architecture = self._source.architecture
        has_experts = architecture.experts is not None
        there = {name for name, _ in layer.named_modules()}
        for name, parts in architecture.columns.items():
            if has_experts and name not in there:
                continue
            whole = layer.get_submodule(name)
            rows = tuple(self._own_rows(parts, whole.out_features))
            weight = self._read_rows(f"{prefix}.{name}.weight", rows)
            bias = None if whole.bias is None else self._read_rows(f"{prefix}.{name}.bias", rows)
            layer.set_submodule(name, ColumnLinear(weight, bias))
        for name, axis in architecture.rows.items():
            if has_experts and name not in there:
                continue
            whole = layer.get_submodule(name)
            columns = self._own(axis, whole.in_features)
            weight = self._reader.read(f"{prefix}.{name}.weight", columns=columns)
            bias = None if whole.bias is None else self._reader.read(f"{prefix}.{name}.bias")
            layer.set_submodule(name, RowLinear(weight, bias, self._collectives))
        if architecture.experts is not None and "mlp.experts" in there:
            experts = layer.mlp.experts
            columns = self._own("intermediate", experts.down_proj.shape[2])
            read_experts(experts, prefix, architecture.experts, self._reader, columns)
            layer.mlp.experts = ShardedExperts(experts, self._collectives)
        # Where a projection is fused, the layer cuts its output apart by these.
        attention = layer.self_attn
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = len(self._share.query_heads)
        attention.num_key_value_heads = len(self._share.kv_heads)

    def _read_rows(self, name: str, parts: Sequence[range]) -> torch.Tensor:
        read = [self._reader.read(name, rows) for rows in parts]
        return read[0] if len(read) == 1 else torch.cat(read)

    def _fill_whole(self, model: Any) -> None:
        """Read what no rank has a part of only."""
        empty = [(name, p.shape) for name, p in model.named_parameters() if p.is_meta]
        for name, shape in empty:
            module, _, parameter = name.rpartition(".")
            ((stored, _),) = stored_tensors(name, tuple(shape), self._source.architecture.experts)
            weight = nn.Parameter(self._reader.read(stored), requires_grad=False)
            setattr(model.get_submodule(module), parameter, weight)
