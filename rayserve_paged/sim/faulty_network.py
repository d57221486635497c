"""A network on which messages are lost, repeated, delayed and cut off as a fault plan says."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.faults import DisturbMessages, FaultPlan, Partition
from rayserve_paged.sim.network import Network, NetworkSpec, NodeId


class FaultyNetwork(Network):
    """All links between the nodes of a cluster, and what goes wrong on them.

    Args:
        engine: The clock.
        spec: How fast they are.
        num_nodes: Machines.
        plan: What goes wrong; faults other than of messages are somebody else's.
        names: What stands on each node.
        seed: Of the draws.
    """

    def __init__(
        self,
        engine: Engine,
        spec: NetworkSpec,
        num_nodes: int,
        plan: FaultPlan,
        names: Mapping[NodeId, str],
        seed: int,
    ) -> None:
        super().__init__(engine, spec, num_nodes)
        self._names = names
        self._draw = random.Random(seed)
        self._disturbances = [one for one in plan.faults if isinstance(one, DisturbMessages)]
        self._partitions = [one for one in plan.faults if isinstance(one, Partition)]

    def send(
        self,
        source: NodeId,
        target: NodeId,
        size_bytes: int,
        deliver: Callable[..., None],
        *args: Any,  # noqa: ANN401
    ) -> None:
        """As `Network.send`, unless something goes wrong on the way."""
        now, ends = self._engine.now, (self._names[source], self._names[target])
        if any(one.covers(now) and one.parts(*ends) for one in self._partitions):
            return
        delays = [0.0]
        for one in self._disturbances:
            if not (one.covers(now) and one.concerns(*ends)):
                continue
            if self._draw.random() < one.lost:
                return
            if self._draw.random() < one.late:
                delays[0] += self._draw.uniform(0.0, one.late_s)
            if self._draw.random() < one.twice:
                delays.append(self._draw.uniform(0.0, one.late_s))
        for delay_s in delays:
            if delay_s:
                self._engine.at(
                    now + delay_s, super().send, source, target, size_bytes, deliver, *args
                )
            else:
                super().send(source, target, size_bytes, deliver, *args)
