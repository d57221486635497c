"""Other implementations of the same attention, each where it is installed and takes the case.

Each builder makes what it needs of a step once, and returns what runs one layer. It may raise:
what it says is printed instead of figures.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rayserve_kernels.gpu_bench.step import Step

Attend = Callable[[int], torch.Tensor]
"""Attends over a layer; returns [num_tokens, num_q_heads, head_dim]."""

_WORKSPACE_BYTES = 256 << 20


def sdpa(step: Step) -> Attend:
    """Torch's attention over contiguous keys and values."""
    case = step.case
    is_prompt = case.num_queries == case.num_tokens
    if case.num_queries > 1 and not is_prompt:
        raise ValueError("takes no causal mask over a cached prefix without writing it out")
    queries = _by_sequence(step)

    def attend(layer: int) -> torch.Tensor:
        keys, values = step.contiguous[layer]
        output = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=is_prompt, scale=step.scale, enable_gqa=True
        )
        return _by_token(output)

    return attend


def grouped_sdpa(step: Step) -> Attend:
    """Torch's attention with the query heads of a KV head as if they were queries."""
    case = step.case
    if case.num_queries > 1:
        raise ValueError("decodes one token of each sequence only")
    queries = step.queries.unflatten(1, (case.num_kv_heads, -1))

    def attend(layer: int) -> torch.Tensor:
        keys, values = step.contiguous[layer]
        output = F.scaled_dot_product_attention(queries, keys, values, scale=step.scale)
        return output.flatten(1, 2)

    return attend


def flex(step: Step) -> Attend:
    """FlexAttention, compiled, over contiguous keys and values."""
    # Here alone: it brings the compiler, which takes seconds to import.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = step.case
    # Otherwise the compiler gives up after a few shapes, and runs what nobody would.
    torch.compiler.reset()
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    start = case.num_tokens - case.num_queries

    def is_seen(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query + start >= key

    mask = None
    if case.num_queries > 1:
        mask = create_block_mask(
            is_seen, None, None, case.num_queries, case.num_tokens, device=step.queries.device
        )
    queries = _by_sequence(step)

    def attend(layer: int) -> torch.Tensor:
        keys, values = step.contiguous[layer]
        output = compiled(queries, keys, values, block_mask=mask, scale=step.scale, enable_gqa=True)
        return _by_token(output)

    return attend


def flashinfer(step: Step) -> Attend:
    """FlashInfer's decode over the pool's own blocks."""
    module: Any = importlib.import_module("flashinfer")
    case, device = step.case, step.queries.device
    if case.num_queries > 1 or case.order not in ("nhd", "hnd"):
        raise ValueError("decodes one token of each sequence, in the orders nhd and hnd")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        workspace, case.order.upper(), use_tensor_cores=True
    )
    width = step.tables.shape[1]
    last = case.num_tokens - (width - 1) * case.block_size
    wrapper.plan(
        torch.arange(case.batch_size + 1, dtype=torch.int32, device=device) * width,
        step.metadata.block_tables.flatten(),
        torch.full((case.batch_size,), last, dtype=torch.int32, device=device),
        case.num_q_heads,
        case.num_kv_heads,
        case.head_dim,
        case.block_size,
        q_data_type=case.queries,
        kv_data_type=case.slots,
        sm_scale=step.scale,
    )
    views = [_physical(step, layer) for layer in range(step.num_layers)]

    def attend(layer: int) -> torch.Tensor:
        output: torch.Tensor = wrapper.run(step.queries, views[layer])
        return output

    return attend


def vllm_flash(step: Step) -> Attend:
    """FlashAttention over blocks, as vLLM ships it."""
    module: Any = importlib.import_module("vllm.vllm_flash_attn")
    utils: Any = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    views, version = _slots_first(step), utils.get_flash_attn_version()

    def attend(layer: int) -> torch.Tensor:
        keys, values = views[layer]
        output: torch.Tensor = module.flash_attn_varlen_func(
            q=step.queries,
            k=keys,
            v=values,
            max_seqlen_q=step.case.num_queries,
            cu_seqlens_q=step.metadata.query_start,
            max_seqlen_k=step.case.num_tokens,
            seqused_k=step.metadata.seq_lens,
            softmax_scale=step.scale,
            causal=True,
            block_table=step.metadata.block_tables,
            fa_version=version,
        )
        return output

    return attend


def vllm_triton(step: Step) -> Attend:
    """vLLM's Triton kernel over blocks, which does not split sequences when called so."""
    module: Any = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    views, outputs = _slots_first(step), torch.empty_like(step.queries)

    def attend(layer: int) -> torch.Tensor:
        keys, values = views[layer]
        module.unified_attention(
            q=step.queries,
            k=keys,
            v=values,
            out=outputs,
            cu_seqlens_q=step.metadata.query_start,
            max_seqlen_q=step.case.num_queries,
            seqused_k=step.metadata.seq_lens,
            max_seqlen_k=step.case.num_tokens,
            softmax_scale=step.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=step.metadata.block_tables,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return outputs

    return attend


RIVALS: Mapping[str, Callable[[Step], Attend]] = {
    "sdpa": sdpa,
    "grouped_sdpa": grouped_sdpa,
    "flex": flex,
    "flashinfer": flashinfer,
    "vllm_flash": vllm_flash,
    "vllm_triton": vllm_triton,
}
"""Builders by name."""


def _by_sequence(step: Step) -> torch.Tensor:
    """Queries as [batch_size, num_q_heads, num_queries, head_dim]."""
    case = step.case
    rows = step.queries.view(case.batch_size, case.num_queries, case.num_q_heads, case.head_dim)
    return rows.transpose(1, 2).contiguous()


def _by_token(output: torch.Tensor) -> torch.Tensor:
    return torch.flatten(output.transpose(1, 2), 0, 1)


def _physical(step: Step, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a plane order as they lie in memory."""
    keys, values = step.pool.key_view(layer), step.pool.value_view(layer)
    if step.case.order == "nhd":
        return keys.transpose(1, 2), values.transpose(1, 2)
    return keys, values


def _slots_first(step: Step) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if step.case.order != "nhd":
        raise ValueError("takes blocks in the order nhd")
    return [_physical(step, layer) for layer in range(step.num_layers)]
