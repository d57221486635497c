"""The network of a simulated cluster: carries messages from node to node.

A node has one link out and one link in, and a loopback for messages that stay on it:

    node a ==out==> [latency] ==in==> node b

A message passes a node's end at the link's bandwidth behind those queued before it. It is passed on
while it still comes in (cut-through), so that a message which meets no other takes the latency and
once its size over the bandwidth.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NewType

from rayserve_paged.core.block_identity import KEY_BYTES
from rayserve_paged.core.controller_messages import SubmitRequest
from rayserve_paged.core.replica_messages import (
    AnswerPoll,
    AssignRequest,
    ControllerMessage,
    RegisterReplica,
    ReplicaReport,
)
from rayserve_paged.core.request import Request
from rayserve_paged.core.stream_messages import StreamItem
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.links import Link, LinkSpec

NodeId = NewType("NodeId", int)
"""Index of a machine."""

HEADER_BYTES: Final = 128
"""A message's envelope: names, counters, framing."""
TOKEN_BYTES: Final = 4
STREAM_BYTES: Final = 32
"""What names a stream within a delivery."""


_LOCAL: Final = LinkSpec(latency_s=10e-6, bytes_per_s=10e9)
_ETHERNET: Final = LinkSpec(latency_s=50e-6, bytes_per_s=12.5e9)


@dataclasses.dataclass(frozen=True, slots=True)
class NetworkSpec:
    """How fast messages travel. The defaults are of a 100 Gbit/s network with kernel sockets.

    Args:
        in_node: Between processes of a node.
        between_nodes: Between any two nodes; each node's end is shared by all that it sends, and
            likewise by all that it receives.
    """

    in_node: LinkSpec = _LOCAL
    between_nodes: LinkSpec = _ETHERNET


class Network:
    """All links between the nodes of a cluster.

    Args:
        engine: The clock.
        spec: How fast they are.
        num_nodes: Machines.
    """

    def __init__(self, engine: Engine, spec: NetworkSpec, num_nodes: int) -> None:
        self._engine = engine
        self._spec = spec
        self._out = [Link(spec.between_nodes) for _ in range(num_nodes)]
        self._in = [Link(spec.between_nodes) for _ in range(num_nodes)]
        self._loopback = [Link(spec.in_node) for _ in range(num_nodes)]

    @property
    def num_bytes(self) -> int:
        """Bytes sent so far, each message once."""
        return sum(link.num_bytes for link in (*self._out, *self._loopback))

    def send(
        self,
        source: NodeId,
        target: NodeId,
        size_bytes: int,
        deliver: Callable[..., None],
        *args: Any,  # noqa: ANN401
    ) -> None:
        """Carry a message now; `deliver(*args)` is called when its last byte has come."""
        engine = self._engine
        if source == target:
            link = self._loopback[source]
            start = link.take(engine.now, size_bytes)
            engine.at(start + link.spec.transfer_s(size_bytes), deliver, *args)
            return
        start = self._out[source].take(engine.now, size_bytes)
        if start > engine.now:
            # Others may come to the target's end before it does.
            engine.at(start, self._arrive, target, size_bytes, deliver, args)
        else:
            self._arrive(target, size_bytes, deliver, args)

    def _arrive(
        self, target: NodeId, size_bytes: int, deliver: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        """Queue a message whose first byte leaves now at its target's end."""
        link = self._in[target]
        spec = link.spec
        start = link.take(self._engine.now + spec.latency_s, size_bytes)
        self._engine.at(start + size_bytes / spec.bytes_per_s, deliver, *args)


def message_bytes(message: object) -> int:
    """Return how many bytes a message takes on the wire, about: envelope, token ids and keys."""
    match message:
        case AnswerPoll(delivery=delivery):
            num_bytes = HEADER_BYTES
            for item in delivery.items:
                if isinstance(item, StreamItem):
                    num_bytes += STREAM_BYTES + TOKEN_BYTES * len(item.token_ids)
                else:
                    num_bytes += STREAM_BYTES * len(item.names) + TOKEN_BYTES * item.token_ids.size
            return num_bytes
        case SubmitRequest(request):
            return HEADER_BYTES + _request_bytes(request)
        case ControllerMessage(event=event):
            return message_bytes(event)
        case RegisterReplica(inventory=inventory):
            if inventory is None:
                return HEADER_BYTES
            num_keys = 0 if inventory.keys is None else len(inventory.keys)
            return HEADER_BYTES + STREAM_BYTES * len(inventory.served) + KEY_BYTES * num_keys
        case AssignRequest(request, keys):
            return HEADER_BYTES + _request_bytes(request) + KEY_BYTES * len(keys)
        case ReplicaReport():
            num_keys = len(message.published) + len(message.evicted)
            num_names = len(message.prefilled) + len(message.finished)
            return HEADER_BYTES + KEY_BYTES * num_keys + STREAM_BYTES * num_names
        case _:
            return HEADER_BYTES


def _request_bytes(request: Request) -> int:
    num_tokens = len(request.prompt_token_ids)
    num_tokens += sum(len(sample.token_ids) for sample in request.delivered)
    return TOKEN_BYTES * num_tokens
