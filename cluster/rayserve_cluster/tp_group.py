"""One rank's ends of a tensor-parallel group: tensors for the model, plans for control.

Control and tensors have a link each, so that a plan never queues behind a tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from rayserve_cluster.links import GlooLink, Link, NcclLink
from rayserve_paged.core.errors import PagedError

LOOPBACK = "127.0.0.1"

# A control message is a first part of fixed size, so that the receiver can post it before it
# knows what comes, and a second part with what the first could not hold.
_FIRST_BYTES = 4096
_HEADER = struct.Struct("<IIq16s")  # kind, payload bytes, sequence, digest
_INLINE_BYTES = _FIRST_BYTES - _HEADER.size
_PLAN, _HEARTBEAT, _SHUTDOWN = 1, 2, 3

_MEET_INTERVAL_S = 0.02
_SOURCE_PLACE = re.compile(r"^\[\S+:\d+\] ")


class GroupBrokenError(PagedError):
    """A tensor-parallel group lost a rank, ran into its timeout, or was aborted.

    Args:
        rank: The rank that noticed.
        reason: What it noticed, for a person.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return f"the tensor-parallel group broke at rank {self.rank}: {self.reason}"


def serve_store(hostname: str = LOOPBACK, *, timeout_s: float) -> TCPStore:
    """Open a group's store on a free port (`store.port`) of one address.

    A TCPStore that opens its own socket listens on every interface, whatever its host name; one
    that is handed a bound socket does not.

    Args:
        hostname: Address to listen on.
        timeout_s: Limit of each of this process's requests to the store.
    """
    family, kind, protocol, _name, address = socket.getaddrinfo(
        hostname, 0, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.bind(address)
    return TCPStore(
        host_name=hostname,
        port=listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(hostname: str, port: int, *, timeout_s: float) -> TCPStore:
    """Reach a store that another process serves.

    Args:
        hostname: As given to `serve_store`.
        port: Its `port`.
        timeout_s: Limit of each request to the store.
    """
    return TCPStore(
        host_name=hostname,
        port=port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


class TpGroup:
    """One rank's ends of a tensor-parallel group; implements the model's `Collectives`.

    A group that failed once is broken for good: every later call raises GroupBrokenError again,
    and the break travels to the peers, whose sockets to this rank close. One thread makes the
    calls; `abort` comes from any. A group of one rank opens nothing and exchanges nothing.

    Args:
        rank: Place of this rank, from 0.
        world_size: Ranks of the group.
        timeout_s: Limit of each exchange; also how long a follower waits for a plan or heartbeat.
        hostname: Address of this rank's sockets.
        device: Where the model's tensors live: NCCL carries them on CUDA, gloo elsewhere.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        hostname: str = LOOPBACK,
        device: torch.device | None = None,
    ) -> None:
        assert 0 <= rank < world_size
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.hostname = hostname
        self.device = torch.device("cpu") if device is None else device
        self._peers = tuple(peer for peer in range(world_size) if peer != rank)
        self._control: GlooLink | None = None
        self._tensors: Link | None = None
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._sequence = 0
        self._digest = bytes(16)

    @property
    def plan_digest(self) -> bytes:
        """Digest of all control messages so far; equal on every rank that has seen as many."""
        return self._digest

    # --- coming and going -------------------------------------------------------------------

    def connect(self, store: Store, name: str, timeout_s: float) -> None:
        """Meet the other ranks and build the groups.

        Args:
            store: Shared by the ranks.
            name: Of this gathering; never used before with this store.
            timeout_s: How long to wait for the other ranks.

        Raises:
            GroupBrokenError: They did not come in time, or the group was aborted.
        """
        if self.world_size == 1:
            return
        store = PrefixStore(name, store)
        with self._guard():
            self._meet(store, timeout_s)
            control = self._build_gloo(PrefixStore("control", store))
            tensors: Link
            if self.device.type == "cuda":
                tensors = NcclLink(
                    PrefixStore("tensors", store),
                    self.rank,
                    self.world_size,
                    device=self.device,
                    timeout_s=self.timeout_s,
                )
            else:
                tensors = self._build_gloo(PrefixStore("tensors", store))
        with self._lock:
            self._control, self._tensors = control, tensors
            broken = self._broken
        if broken is not None:
            # Aborted meanwhile, when there was no link yet to abort.
            self._abort_links()
            raise GroupBrokenError(self.rank, broken)

    def abort(self, reason: str) -> None:
        """Break the group, from any thread: whoever waits inside raises at once, peers too."""
        self._break(reason)

    def close(self) -> None:
        """Give back sockets and threads. Idempotent; no call may be under way."""
        with self._lock:
            if self._broken is None:
                self._broken = "it was closed"
            self._control = self._tensors = None

    # --- Collectives ------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over the ranks, in place, with equal bits on every rank.

        Args:
            tensor: Contiguous, of one shape and dtype on all ranks, on `device`.

        Raises:
            GroupBrokenError: A rank is gone or late, or the group was aborted.
        """
        if self.world_size == 1 or tensor.numel() == 0:
            return
        with self._guard():
            self._tensor_link().all_reduce(tensor)

    def gather_rows(self, rows: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Lay the ranks' columns side by side on rank 0.

        Args:
            rows: [num_rows, widths[rank]], contiguous; `num_rows` and dtype equal on all ranks.
            widths: Columns of each rank, known to all; they may differ and may be 0.

        Returns:
            [num_rows, sum(widths)] on rank 0, None elsewhere.

        Raises:
            GroupBrokenError: A rank is gone or late, or the group was aborted.
        """
        if self.world_size == 1:
            return rows
        assert rows.shape[1] == widths[self.rank]
        if self.rank > 0:
            if rows.numel():
                with self._guard():
                    self._tensor_link().exchange([(0, rows)], [])
            return None
        parts = [rows] + [rows.new_empty(rows.shape[0], widths[peer]) for peer in self._peers]
        receives = [(peer, parts[peer]) for peer in self._peers if parts[peer].numel()]
        with self._guard():
            self._tensor_link().exchange([], receives)
        return torch.cat(parts, dim=1)

    def smallest(self, value: int) -> int:
        """Return the smallest of the ranks' values, on every rank.

        Raises:
            GroupBrokenError: A rank is gone or late, or the group was aborted.
        """
        if self.world_size == 1:
            return value
        with self._guard():
            parts = self._control_link().swap(torch.tensor([value]))
        return min(value, *(int(part) for part in parts))

    # --- control ----------------------------------------------------------------------------

    def send_plan(self, payload: bytes) -> None:
        """Rank 0: give every follower the next plan.

        Raises:
            GroupBrokenError: A rank is gone or late, or the group was aborted.
        """
        self._send(_PLAN, payload)

    def send_heartbeat(self) -> None:
        """Rank 0: keep the followers' receives from running into their timeout.

        Raises:
            GroupBrokenError: A rank is gone or late, or the group was aborted.
        """
        self._send(_HEARTBEAT, b"")

    def send_shutdown(self) -> None:
        """Rank 0: let the followers leave in order.

        Raises:
            GroupBrokenError: A rank is gone or late, or the group was aborted.
        """
        self._send(_SHUTDOWN, b"")

    def receive_plan(self) -> bytes | None:
        """Followers: wait for the next plan; None once rank 0 has shut down.

        Raises:
            GroupBrokenError: Rank 0 is gone or silent, the group was aborted, or this rank has not
                seen the same plans as rank 0.
        """
        while True:
            kind, payload = self._receive()
            if kind == _PLAN:
                return payload
            if kind == _SHUTDOWN:
                return None

    def _send(self, kind: int, payload: bytes) -> None:
        assert self.rank == 0
        if self.world_size == 1:
            return
        digest = _advance(self._digest, kind, payload)
        header = _HEADER.pack(kind, len(payload), self._sequence, digest)
        first = header + payload[:_INLINE_BYTES].ljust(_INLINE_BYTES, b"\0")
        messages = [_as_tensor(first)]
        if len(payload) > _INLINE_BYTES:
            messages.append(_as_tensor(payload[_INLINE_BYTES:]))
        sends = [(peer, message) for peer in self._peers for message in messages]
        with self._guard():
            self._control_link().exchange(sends, [])
        self._sequence += 1
        self._digest = digest

    def _receive(self) -> tuple[int, bytes]:
        assert self.rank > 0
        first = self._receive_bytes(_FIRST_BYTES)
        kind, size_bytes, sequence, digest = _HEADER.unpack_from(first)
        payload = first[_HEADER.size : _HEADER.size + size_bytes]
        if size_bytes > _INLINE_BYTES:
            payload += self._receive_bytes(size_bytes - _INLINE_BYTES)
        expected = _advance(self._digest, kind, payload)
        if (sequence, digest) != (self._sequence, expected):
            raise self._break(
                f"the ranks diverged: control message {sequence} of rank 0 has the digest "
                f"{digest.hex()}, expected {self._sequence} with {expected.hex()}"
            )
        self._sequence += 1
        self._digest = digest
        return kind, payload

    def _receive_bytes(self, size_bytes: int) -> bytes:
        message = torch.empty(size_bytes, dtype=torch.uint8)
        with self._guard():
            self._control_link().exchange([], [(0, message)])
        return message.numpy().tobytes()

    # --- underneath -------------------------------------------------------------------------

    def _meet(self, store: Store, timeout_s: float) -> None:
        """Wait until every rank is here; by looking, since a wait in the store has no way out."""
        deadline = time.monotonic() + timeout_s
        missing = [f"here/{peer}" for peer in self._peers]
        store.set(f"here/{self.rank}", "")
        while not store.check(missing):
            self._check()
            if time.monotonic() > deadline:
                raise self._break(f"not all of {self.world_size} ranks came within {timeout_s:g} s")
            time.sleep(_MEET_INTERVAL_S)

    def _build_gloo(self, store: Store) -> GlooLink:
        return GlooLink(
            store, self.rank, self.world_size, hostname=self.hostname, timeout_s=self.timeout_s
        )

    def _control_link(self) -> GlooLink:
        self._check()
        assert self._control is not None, "not connected"
        return self._control

    def _tensor_link(self) -> Link:
        self._check()
        assert self._tensors is not None, "not connected"
        return self._tensors

    def _check(self) -> None:
        if self._broken is not None:
            raise GroupBrokenError(self.rank, self._broken)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn an error of the transport into the group's one error, and break the group."""
        try:
            yield
        except RuntimeError as error:
            # Without torch's C++ stack, and without the place in its source.
            reason = _SOURCE_PLACE.sub("", str(error).partition("\n")[0])
            raise self._break(reason) from error

    def _break(self, reason: str) -> GroupBrokenError:
        """Break the group unless it is broken; return why it broke first."""
        with self._lock:
            if self._broken is not None:
                return GroupBrokenError(self.rank, self._broken)
            self._broken = reason
        self._abort_links()
        return GroupBrokenError(self.rank, reason)

    def _abort_links(self) -> None:
        with self._lock:
            links = [link for link in (self._control, self._tensors) if link is not None]
        for link in links:
            link.abort()


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _advance(digest: bytes, kind: int, payload: bytes) -> bytes:
    rolling = hashlib.blake2b(digest, digest_size=16)
    rolling.update(bytes([kind]))
    rolling.update(payload)
    return rolling.digest()
