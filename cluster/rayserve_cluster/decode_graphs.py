"""Replays steps of decoding from graphs, one for each padded size of the batch.

A graph launches the hundreds of kernels of a step at once, on inputs at fixed addresses. A step is
padded to the size of its graph with sequences of one token in a block that nobody holds, so that no
kernel needs to know of padding. On a CPU there are no graphs: the same code computes the padded
step instead, which is how its bookkeeping is tested.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rayserve_kernels.layout import KVPool
from rayserve_kernels.staging import StepUploads
from rayserve_paged.model.host_batch import HostBatch
from rayserve_paged.model.step_batch import StepBatch

logger = logging.getLogger(__name__)

Forward = Callable[[StepBatch], torch.Tensor]


class _Key(NamedTuple):
    """What is fixed in a graph."""

    num_seqs: int
    width: int
    windowed: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Graph:
    """A step at fixed addresses.

    Args:
        inputs: uint8 [n], the bytes of its batch.
        replay: Computes the logits of what `inputs` holds, always into the same tensor.
    """

    inputs: torch.Tensor
    replay: Callable[[], torch.Tensor]


class DecodeGraphs:
    """The graphs of one rank, captured when they are first needed.

    Args:
        forward: Computes the logits of a batch, fp32 [num_seqs, vocab_size], without waiting for
            the device.
        pool: What `forward` reads and writes; its last block is held by no sequence.
        uploads: Sends batches to the device.
        max_num_seqs: Most sequences of a step.
    """

    def __init__(
        self, forward: Forward, pool: KVPool, uploads: StepUploads, max_num_seqs: int
    ) -> None:
        self._forward = forward
        self._uploads = uploads
        self._max_num_seqs = max_num_seqs
        self._spare_block = pool.num_blocks - 1
        self._block_size = pool.layout.block_size
        self._device = pool.device
        self._graphs: dict[_Key, _Graph] = {}
        self._memory: Any = None
        # Of all graphs, which would each keep logits of their own.
        self._logits: torch.Tensor | None = None
        self._is_refused = False

    @property
    def num_graphs(self) -> int:
        """Graphs that have been captured."""
        return len(self._graphs)

    def takes(self, batch: HostBatch) -> bool:
        """Whether `run` is for this step."""
        return batch.is_plain_decode and not self._is_refused

    def run(self, batch: HostBatch) -> torch.Tensor:
        """Compute a step.

        Args:
            batch: One that `takes` is true of.

        Returns:
            fp32 [num_seqs, vocab_size].
        """
        num_seqs = len(batch.token_ids)
        key = _Key(
            padded_size(num_seqs, self._max_num_seqs),
            # Narrow tables keep grids small; a power of two, so that there are few of them.
            1 << (max(m.block_tables.shape[1] for m in batch.metadata) - 1).bit_length(),
            tuple(metadata.windows is not None for metadata in batch.metadata),
        )
        padded = batch.padded(key.num_seqs, key.width, self._spare_block, self._block_size)
        sent, specs = self._uploads.upload_bytes(padded.arrays())
        graph = self._graphs.get(key)
        if graph is None:
            inputs = sent.clone()
            static = [spec.view(inputs) for spec in specs]
            # Made anew each time where there is no graph: metadata keeps what it worked out.
            replay = self._captured(lambda: self._kept(self._forward(padded.step_batch(static))))
            if replay is None:
                return self._forward(padded.step_batch([s.view(sent) for s in specs]))[:num_seqs]
            graph = self._graphs[key] = _Graph(inputs, replay)
        graph.inputs.copy_(sent)
        # A copy: the next replay writes over the logits.
        return graph.replay()[:num_seqs].clone()

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits to where those of every graph are left."""
        if self._logits is None:
            most = max(self._max_num_seqs, len(logits))
            self._logits = logits.new_empty(most, logits.shape[1])
        kept = self._logits[: len(logits)]
        return kept.copy_(logits)

    def _captured(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor] | None:
        """A way to compute again what `compute` does; None where no graph can be made of it."""
        if self._device.type == "cpu":
            return compute
        # Kernels are compiled, and libraries set up, before the capture, on a stream of its own.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        if not self._never_waits(compute):
            self._is_refused = True
            return None
        return self._capture(compute)

    def _never_waits(self, compute: Callable[[], torch.Tensor]) -> bool:
        """Whether a step can be captured: one that fails in the middle leaves torch unusable."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            compute()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.warning("no CUDA graphs, steps are launched kernel by kernel: %s", error)
            return False
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return True

    def _capture(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Graphs never run at the same time, so that they can share their memory. Other threads of
        # this process may be ranks of their own, which go on meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = compute()
        self._memory = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def padded_size(num_seqs: int, most: int) -> int:
    """Sequences of the graph that a step takes: few sizes, and little padding in large ones.

    Args:
        num_seqs: Of the step, at least 1.
        most: Sequences that a step can have.
    """
    step = max(1, 1 << max(0, (num_seqs - 1).bit_length() - 3))
    return min(-(-num_seqs // step) * step, max(most, num_seqs))
