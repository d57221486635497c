"""The Triton kernels as an attention backend."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rayserve_kernels.attention import check_attend
from rayserve_kernels.gpu.cache_write import write_kv
from rayserve_kernels.gpu.configs import (
    DECODE_QUERIES,
    LaunchTable,
    check_support,
    gpu_family,
    width_of,
)
from rayserve_kernels.gpu.launch import LayerView, attend_layer, decode_config
from rayserve_kernels.gpu.prefix_groups import SharedPrefixes
from rayserve_kernels.layout import KVLayout, KVPool
from rayserve_kernels.metadata import AttentionMetadata


class TritonBackend:
    """Triton kernels over the pool's own blocks, for GPUs of any maker that Triton knows.

    The bits of a sequence's result depend on its own queries, on the table of launch
    configurations and on the GPU: neither on the rest of the batch, nor on the length of the block
    table, nor on the pool's layout. Neither `write` nor `attend` waits for the device.

    Args:
        gpu: Family of the GPU, as `configs.gpu_family` names it.
        table: Launch configurations; None for those that are shipped.

    Attributes:
        numerics: Class of results that agree bit for bit.
    """

    def __init__(self, gpu: str, table: LaunchTable | None = None) -> None:
        self._gpu = gpu
        self._table = LaunchTable.read() if table is None else table
        self.numerics = f"triton-{gpu}-{self._table.digest}"

    @classmethod
    def for_device(cls, device: torch.device) -> "TritonBackend":
        """Make the backend of a device, with the launch configurations that are shipped."""
        return cls(gpu_family(device))

    def write(
        self,
        pool: KVPool,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """As `AttentionBackend.write`."""
        write_kv(pool, layer, keys, values, metadata.slot_mapping)

    def attend(
        self,
        pool: KVPool,
        layer: int,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        soft_cap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`.

        Raises:
            ValueError: Also for a dtype that the GPU cannot read, or a head_dim above 256.
        """
        check_attend(pool, queries, metadata, soft_cap=soft_cap, alibi_slopes=alibi_slopes)
        check_support(self._gpu, pool.layout.dtype)
        return attend_layer(
            LayerView.of(pool, layer),
            queries,
            metadata,
            scale,
            gpu=self._gpu,
            table=self._table,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
        )

    def find_shared_prefixes(
        self,
        layout: KVLayout,
        num_q_heads: int,
        dtype: torch.dtype,
        block_tables: npt.NDArray[np.int32],
        num_computed: Sequence[int],
        num_new: Sequence[int],
        device: torch.device,
    ) -> SharedPrefixes | None:
        """Find prefixes for `AttentionMetadata.shared_prefixes`; None where sharing does not pay.

        Args:
            layout: Of the pool.
            num_q_heads: Query heads of this rank.
            dtype: Of queries.
            block_tables: int32 [num_seqs, width].
            num_computed: [num_seqs], tokens of each sequence already in the cache.
            num_new: [num_seqs], tokens of each sequence to compute now.
            device: Of the step's metadata.

        Raises:
            ValueError: Dtypes or a head_dim that no launch configuration is for.
        """
        config = decode_config(
            self._table,
            self._gpu,
            layout.head_dim,
            width_of(dtype, layout.dtype),
            num_q_heads // layout.num_kv_heads,
        )
        assert config.split_tokens is not None
        return SharedPrefixes.for_step(
            block_tables,
            num_computed,
            num_new,
            block_size=layout.block_size,
            split_tokens=config.split_tokens,
            most_queries=DECODE_QUERIES,
            device=device,
        )
