"""Links and the network: latency, bandwidth and queues, computed by hand."""

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.links import Link, LinkSpec
from rayserve_paged.sim.network import Network, NetworkSpec, NodeId

# Powers of two, so that the sums are exact.
SPEC = NetworkSpec(in_node=LinkSpec(0.0625, 2048.0), between_nodes=LinkSpec(0.5, 1024.0))
A, B, C = NodeId(0), NodeId(1), NodeId(2)


class Wire:
    """A network of three nodes, and when what came."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.network = Network(self.engine, SPEC, 3)
        self.came: list[tuple[float, str]] = []

    def send(self, at_s: float, source: NodeId, target: NodeId, size: int, name: str) -> None:
        self.engine.at(at_s, self.network.send, source, target, size, self.note, name)

    def note(self, name: str) -> None:
        self.came.append((self.engine.now, name))

    def run(self) -> list[tuple[float, str]]:
        self.engine.run(until=100.0)
        return self.came


def test_a_message_that_meets_no_other_takes_the_latency_and_its_size_over_the_bandwidth() -> None:
    wire = Wire()
    wire.send(1.0, A, B, 256, "between nodes")
    wire.send(10.0, A, A, 256, "in a node")
    assert wire.run() == [(1.75, "between nodes"), (10.1875, "in a node")]
    assert wire.network.num_bytes == 512


def test_what_one_node_sends_leaves_one_after_the_other() -> None:
    wire = Wire()
    for name in ("first", "second", "third"):
        wire.send(0.0, A, B, 256, name)
    wire.send(0.0, A, C, 256, "to another")
    assert wire.run() == [(0.75, "first"), (1.0, "second"), (1.25, "third"), (1.5, "to another")]


def test_what_two_nodes_send_to_a_third_comes_in_one_after_the_other() -> None:
    wire = Wire()
    wire.send(0.0, A, C, 512, "long")
    wire.send(0.125, B, C, 128, "short")
    wire.send(0.125, C, C, 128, "own")
    assert wire.run() == [(0.25, "own"), (1.0, "long"), (1.125, "short")]


def test_a_message_that_waits_to_leave_does_not_take_the_targets_end_before_its_turn() -> None:
    wire = Wire()
    wire.send(0.0, A, B, 1024, "a burst")
    wire.send(0.0, A, C, 256, "behind it")
    wire.send(0.5, B, C, 256, "from another")
    # The burst leaves until 1.0; the other's message is at the target from 1.0 to 1.25.
    assert wire.run() == [(1.25, "from another"), (1.5, "a burst"), (1.75, "behind it")]


def test_a_link_is_free_again_when_its_queue_has_left() -> None:
    link = Link(LinkSpec(0.5, 1024.0))
    assert [link.take(0.0, 256), link.take(0.0, 256), link.take(2.0, 256)] == [0.0, 0.25, 2.0]
    assert (link.free_at, link.num_bytes) == (2.25, 768)
    assert link.spec.transfer_s(512) == 1.0


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "field"),
    [(-1.0, 1.0, "latency_s"), (float("nan"), 1.0, "latency_s"), (0.0, 0.0, "bytes_per_s")],
)
def test_a_link_that_cannot_be_is_refused(latency_s: float, bytes_per_s: float, field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        LinkSpec(latency_s, bytes_per_s)
    assert refused.value.field == field
