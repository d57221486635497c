"""Runs a model of transformers over this rank's shards, with attention over the paged pool.

The batch is flattened to one sequence of `num_tokens`; there is no padding, no mask and no
Hugging Face cache. The pool, the backend and the metadata travel as keyword arguments through the
model's own forward to the attention function, so ranks may live in threads of one process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rayserve_kernels.attention import AttentionBackend
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout, KVPool
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_paged.model.layer_groups import places_of
from rayserve_paged.model.parallel import Collectives, deal_heads
from rayserve_paged.model.safetensors_files import WeightReader
from rayserve_paged.model.shard_builder import ShardBuilder
from rayserve_paged.model.spec import DirectorySource
from rayserve_paged.model.step_batch import StepBatch

_ATTENTION = "rayserve_paged"


class ShardedTransformer:
    """One rank's part of a model of transformers; a `build.StepModel`.

    Args:
        source: The model; the rank reads its own slices of the weights.
        dtype: Of weights and activations.
        collectives: The ranks that hold the other parts.
        backend: Writes to and attends over the pool.
        device: Where weights and activations live.
        kv_dtype: Of the pool, which has scales where it is one of `SCALED_DTYPES`.

    Raises:
        InvalidInputError: The heads cannot be dealt over so many ranks, transformers does not take
            the configuration, or a weight is missing or not of the shape that it tells.
    """

    def __init__(
        self,
        source: DirectorySource,
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
        _register_attention()
        reader = WeightReader(source.directory, dtype, device)
        builder = ShardBuilder(source, reader, self._share, collectives, device)
        self._model: Any
        self._model, self._vocab_widths = builder.build(_ATTENTION)
        config = self._model.config
        caps = source.architecture.caps_logits
        self._logit_cap: float | None = config.final_logit_softcapping if caps else None

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
        logits = self._model.lm_head(hidden)
        if self._logit_cap is not None:
            logits = (logits / self._logit_cap).tanh() * self._logit_cap
        logits = self._collectives.gather_rows(logits, self._vocab_widths)
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
    softcap: float | None = None,
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
        softcap: Bounds the scores; None for no bound.

    Returns:
        [1, num_tokens, num_heads, head_dim], and no weights.
    """
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    group, layer = places[layer_idx]
    # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    backend.write(pool, layer, keys, values, metadata[group])
    output = backend.attend(pool, layer, queries, metadata[group], scaling, soft_cap=softcap)
    return output[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask that transformers asks for: the metadata says what each token may see."""


def _register_attention() -> None:
    # The modules are imported by their own paths: they load in half the time of the top level.
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, _no_mask)
