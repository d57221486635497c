"""Runs transformers' Llama over this rank's shards, with attention over the paged pool.

The batch is flattened to one sequence of `num_tokens`; there is no padding, no mask and no
Hugging Face cache. The pool, the backend and the metadata travel as keyword arguments through the
model's own forward to the attention function, so ranks may live in threads of one process.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rayserve_kernels.attention import AttentionBackend, AttentionMetadata
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout, KVPool
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.layer_groups import places_of
from rayserve_paged.model.parallel import Collectives, HeadShare, deal, deal_heads
from rayserve_paged.model.safetensors_files import WeightReader
from rayserve_paged.model.sharded_layers import ColumnLinear, RowLinear, VocabEmbedding
from rayserve_paged.model.spec import LlamaSource
from rayserve_paged.model.step_batch import StepBatch

if TYPE_CHECKING:
    from transformers.models.llama.configuration_llama import LlamaConfig

_ATTENTION = "rayserve_paged"


class ShardedTransformer:
    """One rank's part of a Llama model; a `build.StepModel`.

    Args:
        source: The model; the rank reads its own slices of the weights.
        dtype: Of weights and activations.
        collectives: The ranks that hold the other parts.
        backend: Writes to and attends over the pool.
        device: Where weights and activations live.
        kv_dtype: Of the pool, which has scales where it is one of `SCALED_DTYPES`.

    Raises:
        InvalidInputError: The heads cannot be dealt over so many ranks, or a weight is missing or
            not of the shape that the configuration tells.
    """

    def __init__(
        self,
        source: LlamaSource,
        dtype: torch.dtype,
        collectives: Collectives,
        backend: AttentionBackend,
        device: torch.device,
        kv_dtype: torch.dtype,
    ) -> None:
        self.spec = source.spec
        shares = deal_heads(self.spec.num_heads, self.spec.num_kv_heads, collectives.world_size)
        self._share = shares[collectives.rank]
        self._kv_dtype = kv_dtype
        self._collectives = collectives
        self._backend = backend
        self._places = places_of(self.spec.layer_groups)
        builder = _ShardBuilder(
            WeightReader(source.directory, dtype, device), self._share, collectives
        )
        self._model: Any
        self._model, self._vocab_widths = builder.build(source, device)

    def kv_layout(self, block_size: int) -> KVLayout:
        """Layout of this rank's pool, which holds the KV heads that it was dealt."""
        return KVLayout(
            num_layers=len(self.spec.layer_groups[0].layers),
            num_kv_heads=len(self._share.kv_heads),
            block_size=block_size,
            head_dim=self.spec.head_dim,
            dtype=self._kv_dtype,
            scaled=self._kv_dtype in SCALED_DTYPES,
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        pool: KVPool,
        take_scored: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Compute a step; every rank of the group calls it with the same batch.

        Args:
            batch: The step.
            pool: Of `kv_layout`; the tokens' keys and values are written into it.
            take_scored: As `StepModel.forward`.

        Returns:
            fp32 [num_logits, vocab_size] on rank 0, None elsewhere.
        """
        # Without its head, whose logits are wanted for a few tokens alone, or in slices.
        output = self._model.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            pool=pool,
            backend=self._backend,
            metadata=batch.metadata,
            places=self._places,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        for rows in batch.scored_slices(self.spec.vocab_size):
            logits = self._logits(hidden[rows])
            if logits is not None and take_scored is not None:
                take_scored(logits)
        return self._logits(hidden[batch.logits_rows])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """fp32 [n, vocab_size] on rank 0 of this many last hidden states, None elsewhere."""
        logits = self._collectives.gather_rows(self._model.lm_head(hidden), self._vocab_widths)
        # Rows beyond the tokenizer's ids only pad the matrix.
        return None if logits is None else logits[:, : self.spec.vocab_size].float()


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    pool: KVPool,
    backend: AttentionBackend,
    metadata: Sequence[AttentionMetadata],
    places: Sequence[tuple[int, int]],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, after rotary embedding.

    Args:
        module: The layer's attention module.
        query: [1, num_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: As `key`.
        attention_mask: None; causality follows from the metadata.
        scaling: Factor on the scores.
        pool: Keys and values of all tokens.
        backend: Writes and attends.
        metadata: Of the step, one for each layer group.
        places: For each layer its group and its index in the group's blocks.

    Returns:
        [1, num_tokens, num_heads, head_dim], and no weights.
    """
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    group, layer = places[layer_idx]
    # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    backend.write(pool, layer, keys, values, metadata[group])
    return backend.attend(pool, layer, queries, metadata[group], scaling)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask that transformers asks for: the metadata says what each token may see."""


class _ShardBuilder:
    """Puts this rank's slices of the weights into a model that was built without any."""

    def __init__(self, reader: WeightReader, share: HeadShare, collectives: Collectives) -> None:
        self._reader = reader
        self._share = share
        self._collectives = collectives

    def build(self, source: LlamaSource, device: torch.device) -> tuple[nn.Module, tuple[int, ...]]:
        """The model, and the number of vocabulary rows of each rank."""
        from huggingface_hub.errors import StrictDataclassError

        # The module is imported by its own path: it loads in half the time of the top level.
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

        AttentionInterface.register(_ATTENTION, _attend)
        AttentionMaskInterface.register(_ATTENTION, _no_mask)
        try:
            config: LlamaConfig = LlamaConfig.from_pretrained(source.directory)
            config._attn_implementation = _ATTENTION
            with torch.device("meta"):
                model = LlamaForCausalLM(config)
            # Its frequencies are no weights, so nothing would fill those made on meta.
            model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
        # The latter for an activation or a rotary embedding that nobody knows.
        except (StrictDataclassError, KeyError) as error:
            accepted = f"a config.json that transformers takes ({' '.join(str(error).split())})"
            raise InvalidInputError("model", str(source.directory), accepted) from error
        for name, parameter in model.named_parameters():
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                self._reader.check(name, tuple(parameter.shape))
        vocab = deal(config.vocab_size, self._collectives.world_size)
        self._fill(model, config, vocab[self._collectives.rank])
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        return model.eval(), tuple(map(len, vocab))

    def _fill(self, model: Any, config: "LlamaConfig", vocab_rows: range) -> None:
        embedding = self._reader.read("model.embed_tokens.weight", vocab_rows)
        model.model.embed_tokens = VocabEmbedding(embedding, vocab_rows, self._collectives)
        tied = config.tie_word_embeddings
        head = embedding if tied else self._reader.read("lm_head.weight", vocab_rows)
        model.lm_head = ColumnLinear(head, None)
        model.model.norm.weight = self._parameter("model.norm.weight")
        columns = deal(config.intermediate_size, self._collectives.world_size)
        for index, layer in enumerate(model.model.layers):
            prefix = f"model.layers.{index}"
            self._fill_attention(layer.self_attn, f"{prefix}.self_attn")
            self._fill_mlp(layer.mlp, f"{prefix}.mlp", columns[self._collectives.rank])
            for norm in ("input_layernorm", "post_attention_layernorm"):
                getattr(layer, norm).weight = self._parameter(f"{prefix}.{norm}.weight")

    def _fill_attention(self, attention: Any, prefix: str) -> None:
        head_dim: int = attention.head_dim
        query_rows, kv_rows = (
            range(heads.start * head_dim, heads.stop * head_dim)
            for heads in (self._share.query_heads, self._share.kv_heads)
        )
        attention.q_proj = self._column(f"{prefix}.q_proj", query_rows)
        attention.k_proj = self._column(f"{prefix}.k_proj", kv_rows)
        attention.v_proj = self._column(f"{prefix}.v_proj", kv_rows)
        attention.o_proj = self._row(f"{prefix}.o_proj", query_rows)

    def _fill_mlp(self, mlp: Any, prefix: str, columns: range) -> None:
        mlp.gate_proj = self._column(f"{prefix}.gate_proj", columns)
        mlp.up_proj = self._column(f"{prefix}.up_proj", columns)
        mlp.down_proj = self._row(f"{prefix}.down_proj", columns)

    def _column(self, name: str, rows: range) -> ColumnLinear:
        bias = f"{name}.bias"
        return ColumnLinear(
            self._reader.read(f"{name}.weight", rows),
            self._reader.read(bias, rows) if bias in self._reader else None,
        )

    def _row(self, name: str, columns: range) -> RowLinear:
        bias = f"{name}.bias"
        return RowLinear(
            self._reader.read(f"{name}.weight", columns=columns),
            self._reader.read(bias) if bias in self._reader else None,
            self._collectives,
        )

    def _parameter(self, name: str) -> nn.Parameter:
        return nn.Parameter(self._reader.read(name), requires_grad=False)
