"""Links between the ranks of one group, built directly on a store: gloo for CPUs, NCCL for GPUs.

Not through torch's process-wide default group, so that groups with different members live side by
side in one process. Every failure of a link is a RuntimeError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, Store

_TAG = 0
_ABORT_TAG = 1 << 30


class Link(Protocol):
    """One rank's connections to its peers. One thread exchanges; `abort` comes from any."""

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Send and receive contiguous, non-empty tensors, each to or from a peer; wait for all.

        Tensors to one peer arrive in the order of the calls, and of the sequence.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous, non-empty tensor by its sum over the ranks."""
        ...

    def abort(self) -> None:
        """Make whatever is under way fail, here and at the peers."""
        ...


class GlooLink:
    """A link over TCP, for tensors on the CPU.

    Args:
        store: Where the ranks find each other; all must be building theirs.
        rank: Of the caller.
        world_size: Ranks.
        hostname: Address of this rank's sockets.
        timeout_s: Limit of each exchange.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, hostname: str, timeout_s: float
    ) -> None:
        # torch's type stubs know neither the options' name nor the constructor that takes them.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=hostname)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        self._group: Any = gloo(store, rank, world_size, options)
        self._rank = rank
        self._peers = tuple(peer for peer in range(world_size) if peer != rank)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """As `Link.exchange`."""
        works = [self._group.recv([tensor], peer, _TAG) for peer, tensor in receives]
        works += [self._group.send([tensor], peer, _TAG) for peer, tensor in sends]
        for work in works:
            work.wait()

    def swap(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Send a tensor to every peer; return theirs in rank order, in memory used again."""
        size_bytes = tensor.numel() * tensor.itemsize
        # Strides of 64 keep every part aligned for every dtype.
        stride = -(-size_bytes // 64) * 64
        if self._scratch.numel() < stride * len(self._peers):
            self._scratch = torch.empty(stride * len(self._peers), dtype=torch.uint8)
        parts = [
            self._scratch[i * stride : i * stride + size_bytes].view(tensor.dtype).view_as(tensor)
            for i in range(len(self._peers))
        ]
        self.exchange(
            [(peer, tensor) for peer in self._peers], list(zip(self._peers, parts, strict=True))
        )
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """As `Link.all_reduce`: the ranks swap their tensors, and each adds them in rank order.

        For the few ranks of a CPU group this is one exchange without a change of thread, and
        unlike in gloo's own all-reduce an element's bits never depend on where in the batch it is.
        """
        parts = self.swap(tensor)
        if self._rank > 0:
            before = parts[0]
            for part in parts[1 : self._rank]:
                before.add_(part)
            tensor.add_(before)
        for part in parts[self._rank :]:
            tensor.add_(part)

    def abort(self) -> None:
        """As `Link.abort`.

        The abort() of ProcessGroupGloo does nothing (torch 2.13). What does break a gloo group is
        a receive that runs into its timeout: it fails all that is pending with any peer, in
        whichever thread, and closes the sockets. Where a peer's socket is closed already the
        receive fails without that effect, hence one for each peer.
        """
        for peer in self._peers:
            nothing = torch.empty(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                self._group.recv([nothing], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


class NcclLink:
    """A link between GPUs.

    Args:
        store: Where the ranks find each other; all must be building theirs.
        rank: Of the caller.
        world_size: Ranks.
        device: This rank's GPU.
        timeout_s: Limit of each exchange.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, device: torch.device, timeout_s: float
    ) -> None:
        # CPU builds of torch have no such class.
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._device = device
        with torch.cuda.device(device):
            self._group: Any = ProcessGroupNCCL(store, rank, world_size, options)

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """As `Link.exchange`, in the order of the current stream."""
        with torch.cuda.device(self._device):
            works = [self._group.recv([tensor], peer, _TAG) for peer, tensor in receives]
            works += [self._group.send([tensor], peer, _TAG) for peer, tensor in sends]
            for work in works:
                work.wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """As `Link.all_reduce`, in the order of the current stream."""
        with torch.cuda.device(self._device):
            self._group.allreduce([tensor]).wait()

    def abort(self) -> None:
        """As `Link.abort`."""
        self._group.abort()
