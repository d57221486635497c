"""A simulated cluster: the third shell, in which real state machines run on a virtual clock."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.consumer import Consumer
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import LoseReplica
from rayserve_paged.core.event_log import (
    CONTROLLER,
    ControllerStart,
    LoggedStart,
    Record,
    ReplicaStart,
)
from rayserve_paged.core.ids import (
    Attempt,
    ConsumerId,
    Incarnation,
    ReplicaId,
    RequestId,
    Term,
)
from rayserve_paged.core.open_request import Source
from rayserve_paged.core.replay import new_controller, new_replica
from rayserve_paged.core.replica_messages import RegisterReplica
from rayserve_paged.core.request import Request
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.sim.cluster_spec import ClusterSpec
from rayserve_paged.sim.collector import spared_by_collector
from rayserve_paged.sim.consumer_host import ConsumerHost, Watch
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.executor import Ranks, Unfinished
from rayserve_paged.sim.faults import (
    FaultPlan,
    KillController,
    KillRank,
    KillReplica,
    Partition,
)
from rayserve_paged.sim.faulty_network import FaultyNetwork
from rayserve_paged.sim.histogram import LogHistogram
from rayserve_paged.sim.hosts import ControllerHost, ReplicaHost, machine_name
from rayserve_paged.sim.machine import Machine
from rayserve_paged.sim.network import Network, NodeId
from rayserve_paged.sim.report import (
    Death,
    LoadLog,
    ReplicaColumns,
    RequestLog,
    SimReport,
)
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.slow_replicas import slowed
from rayserve_paged.sim.step_ratios import StepRatios
from rayserve_paged.sim.token_streams import stream_number

_NO_FAULTS = FaultPlan()
_FIRST_LIFE = Incarnation(0)
_SETTLE_S = 1.0
"""How long the cluster runs on after the last request, so that the last reports come in."""


class Cluster:
    """One simulation.

    Args:
        spec: What the cluster consists of.
        record: Takes the event logs of the controller and of all replicas, as `core.event_log`
            writes them and `core.replay` replays them.
        watch: Called with each update of a stream as its consumer accepts it, and the time.
        plan: What goes wrong.
        seed: Of the draws of that.
        make_ranks: Makes what computes the plans of a life of a replica; None to sample by seeds
            alone.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        record: Record | None = None,
        watch: Watch | None = None,
        plan: FaultPlan = _NO_FAULTS,
        seed: int = 0,
        make_ranks: Callable[[ReplicaId], Ranks] | None = None,
    ) -> None:
        self.spec = spec
        self._record = record
        self.engine = Engine()
        self.log = RequestLog()
        self._loads = LoadLog()
        self._gaps = LogHistogram()
        self._unfinished: Unfinished | None = {} if plan.faults else None
        self._deaths: list[Death] = []
        # Replicas of a node share it where that makes their steps longer.
        self._machines: dict[NodeId, Machine] = {}
        self._num_arrived = 0
        self._shared_nodes = self._replica_nodes(spec.ranks_per_node)
        replica_nodes = self._shared_nodes
        if plan.disturbs_messages:
            # A fault names one replica, and its neighbours have messages of their own.
            replica_nodes = self._replica_nodes(min(spec.tensor_parallel_size, spec.ranks_per_node))
        num_gpu_nodes = max(replica_nodes) + math.ceil(
            spec.tensor_parallel_size / spec.ranks_per_node
        )
        num_nodes = num_gpu_nodes + 1 + spec.num_consumers
        self._plan = plan
        self._partitions = sorted(
            (one for one in plan.faults if isinstance(one, Partition)), key=lambda one: one.from_s
        )
        self._make_ranks = make_ranks
        names = {node: f"r{index}" for index, node in enumerate(replica_nodes)}
        names[NodeId(num_gpu_nodes)] = CONTROLLER
        names |= {NodeId(num_gpu_nodes + 1 + i): f"c{i}" for i in range(spec.num_consumers)}
        self.network = Network(self.engine, spec.network, num_nodes)
        if plan.disturbs_messages:
            self.network = FaultyNetwork(self.engine, spec.network, num_nodes, plan, names, seed)
        self.controller = ControllerHost(
            self.engine,
            self.network,
            NodeId(num_gpu_nodes),
            self._new_controller(Term(0)),
            self._start_life,
            self._stop_life,
            record,
        )
        self._scope = BlockScope(
            hashlib.sha256(repr(spec.limits).encode()).digest(),
            "simulated",
            "simulated",
            "exact",
            "absolute",
            spec.limits.block_size,
        )
        # Of each replica its latest life, and those before.
        self.replicas: dict[Source, ReplicaHost] = {}
        self._latest: dict[ReplicaId, ReplicaHost] = {}
        self._by_machine: dict[str, ReplicaHost] = {}
        self._starting: set[Source] = set()
        self._nodes = replica_nodes
        self.controller.replicas = self.replicas
        self.consumers: list[ConsumerHost] = []
        for index in range(spec.num_consumers):
            consumer = Consumer(
                ConsumerId(f"c{index}"), spec.recovery, spec.timeouts.poll_timeout_s
            )
            node = NodeId(num_gpu_nodes + 1 + index)
            self.consumers.append(
                ConsumerHost(
                    self.engine,
                    self.network,
                    node,
                    consumer,
                    self.controller,
                    self.replicas,
                    self.log,
                    watch,
                )
            )
        by_id: dict[str, ConsumerHost] = {
            host.consumer.consumer_id: host for host in self.consumers
        }
        self.controller.consumers = by_id
        for index in range(spec.num_replicas):
            host = self._add_host(index, _FIRST_LIFE)
            self.controller.take(
                RegisterReplica(*host.source, host.replica.limits, host.replica.scope)
            )
        self._schedule_faults(plan)

    def run(self, requests: Iterable[SimRequest]) -> SimReport:
        """Serve these requests to their ends.

        Args:
            requests: In order of arrival; each is taken when the one before has arrived.

        Raises:
            ValueError: They are out of order.
        """
        with spared_by_collector():
            return self._run(iter(requests))

    def _run(self, arrivals: Iterator[SimRequest]) -> SimReport:
        self._await_next(arrivals)
        self._take_loads()
        self.engine.run_while(lambda: self.log.num_ended < self._num_arrived)
        assert self.log.num_ended == self._num_arrived, "nothing happens and requests are open"
        self.engine.run(self.engine.now + _SETTLE_S)
        self._add_loads()
        return self._report()

    def _replica_nodes(self, per_node: int) -> list[NodeId]:
        width = self.spec.tensor_parallel_size
        if width >= per_node:
            stride = math.ceil(width / per_node)
            return [NodeId(index * stride) for index in range(self.spec.num_replicas)]
        fit = per_node // width
        return [NodeId(index // fit) for index in range(self.spec.num_replicas)]

    def latest(self, replica_id: ReplicaId) -> ReplicaHost:
        """Return the latest life of a replica."""
        return self._latest[replica_id]

    def life(self, machine: str) -> ReplicaHost:
        """Return a life of a replica by its name in the event log."""
        return self._by_machine[machine]

    # --- lives and deaths -----------------------------------------------------------------

    def _schedule_faults(self, plan: FaultPlan) -> None:
        """Plan deaths; messages and slow steps are seen to where they happen."""
        at = self.engine.at
        for fault in plan.faults:
            if isinstance(fault, KillReplica):
                at(fault.at_s, self._kill, ReplicaId(fault.replica), fault.hangs)
            elif isinstance(fault, KillRank):
                at(fault.at_s, self.kill_rank, ReplicaId(fault.replica))
            elif isinstance(fault, KillController):
                at(fault.at_s, self.kill_controller)
                at(fault.at_s + fault.down_s, self.restart_controller)
            elif isinstance(fault, Partition):
                at(fault.from_s, self._miss_answers)

    def _miss_answers(self) -> None:
        """Let the controller give up the replicas that it does not reach for too long."""
        given_up_at = self.engine.now + self.spec.timeouts.rank_liveness_s
        for host in self._latest.values():
            if self._reached_at(host) > given_up_at:
                self.engine.at(given_up_at, self._give_up, host)

    def _give_up(self, host: ReplicaHost) -> None:
        """Let the controller take a life for lost, which it may not be."""
        if self._reached_at(host) > self.engine.now:
            reason = f"no answer for {self.spec.timeouts.rank_liveness_s:g} s"
            self.controller.take(LoseReplica(*host.source, reason))

    def _reached_at(self, host: ReplicaHost) -> float:
        """Return when a message of the controller can come to a replica, by the partitions."""
        reached_at = self.engine.now
        for fault in self._partitions:
            if fault.covers(reached_at) and fault.parts(CONTROLLER, host.replica.replica_id):
                reached_at = fault.until_s
        return reached_at

    def _kill(self, replica_id: ReplicaId, hangs: bool) -> None:
        self.kill_replica(replica_id, silent=hangs)

    def kill_replica(self, replica_id: ReplicaId, *, silent: bool = False) -> None:
        """End the processes of a replica; one that is down stays down.

        Args:
            replica_id: The replica.
            silent: They hang instead: no connection breaks, and the controller has to notice.
        """
        host = self._latest[replica_id]
        if host.stopped is not None:
            return
        self._deaths.append(Death(self.engine.now, replica_id, silent))
        reason = "its process hangs" if silent else "its process was killed"
        host.stop(reason, silent=silent)
        notice_s = self.spec.timeouts.rank_liveness_s if silent else self.spec.notice_s
        lost = LoseReplica(*host.source, reason)
        self.engine.at(self.engine.now + notice_s, self.controller.take, lost)

    def kill_rank(self, replica_id: ReplicaId) -> None:
        """End a rank of a replica that is not its first; of one that is down none is left."""
        host = self._latest[replica_id]
        if host.stopped is not None:
            return
        self._deaths.append(Death(self.engine.now, replica_id, hangs=False))
        reason = "one of its ranks was killed"
        host.break_group(reason)
        lost = LoseReplica(*host.source, reason)
        self.engine.at(self.engine.now + self.spec.notice_s, self.controller.take, lost)

    def kill_controller(self) -> None:
        """End the controller's process, and all that it knows; one that is down stays down."""
        if not self.controller.is_dead:
            self._deaths.append(Death(self.engine.now, CONTROLLER, hangs=False))
        self.controller.die()

    def restart_controller(self) -> None:
        """Start the controller anew, as its next term; one that lives goes on."""
        if not self.controller.is_dead:
            return
        self._end_death(CONTROLLER)
        self._miss_answers()
        term = Term(self.controller.controller.term + 1)
        self.controller.replace(self._new_controller(term))

    def _new_controller(self, term: Term) -> Controller:
        spec = self.spec
        names = [ReplicaId(f"r{index}") for index in range(spec.num_replicas)]
        start = ControllerStart(
            deployment_lease_s=None,
            batch=spec.batch,
            placement=spec.placement,
            recovery=spec.recovery,
            start_timeout_s=spec.timeouts.start_timeout_s,
            term=term,
            expected=tuple(names) if term else (),
        )
        if self._record is not None:
            self._record(LoggedStart(CONTROLLER, start))
        return new_controller(start)

    def _start_life(self, source: Source) -> None:
        """Load a replica's weights anew; what is left of its lives before is ended."""
        self._end_life(self._latest[source[0]], "another life of it is started")
        self._starting = {other for other in self._starting if other[0] != source[0]} | {source}
        self.engine.at(self.engine.now + self.spec.start_s, self._begin_life, source)

    def _begin_life(self, source: Source) -> None:
        if source in self._starting:
            self._starting.remove(source)
            self._end_death(source[0])
            self._add_host(self._latest[source[0]].index, source[1]).register()

    def _end_death(self, name: str) -> None:
        """Note that somebody has taken the place of who died under this name."""
        for death in self._deaths:
            if death.name == name and death.back_s is None:
                death.back_s = self.engine.now

    def _stop_life(self, source: Source, reason: str) -> None:
        self._starting.discard(source)
        host = self.replicas.get(source)
        if host is not None:
            self._end_life(host, reason)

    def _end_life(self, host: ReplicaHost, reason: str) -> None:
        """End the processes of a life; one that is cut off lingers, and may serve, until then."""
        reached_at = self._reached_at(host)
        if reached_at > self.engine.now:
            self.engine.at(reached_at, self._end_life, host, reason)
        else:
            host.stop(reason)

    def _add_host(self, index: int, incarnation: Incarnation) -> ReplicaHost:
        spec = self.spec
        start = ReplicaStart(
            replica_id=ReplicaId(f"r{index}"),
            incarnation=incarnation,
            limits=spec.limits,
            scope=self._scope,
            batch=spec.batch,
            timeouts=spec.timeouts,
            partial_reuse=spec.partial_reuse,
            term=self.controller.controller.term,
        )
        if self._record is not None:
            name = machine_name((start.replica_id, incarnation))
            self._record(LoggedStart(name, start))
        before = self._latest.get(start.replica_id)
        machine = None
        if spec.cost.max_active > 1:
            machine = self._machines.setdefault(self._shared_nodes[index], Machine())
        replica = new_replica(start)
        host = ReplicaHost(
            self.engine,
            self.network,
            self._nodes[index],
            index,
            replica,
            slowed(spec.cost, self.engine, self._plan, start.replica_id),
            self._gaps,
            machine,
            self._record,
            before,
            None if self._make_ranks is None else self._make_ranks(start.replica_id),
            self._unfinished,
            StepRatios(spec.step_ratios, stream_number(index, replica.incarnation))
            if spec.step_ratios
            else None,
        )
        host.controller = self.controller
        host.consumers = self.controller.consumers
        self._latest[start.replica_id] = self.replicas[host.source] = host
        self._by_machine[machine_name(host.source)] = host
        return host

    # --- arrivals -------------------------------------------------------------------------

    def _await_next(self, arrivals: Iterator[SimRequest]) -> None:
        request = next(arrivals, None)
        if request is not None:
            self._num_arrived += 1
            self.engine.at(request.arrival_s, self._arrive, request, arrivals)

    def _arrive(self, request: SimRequest, arrivals: Iterator[SimRequest]) -> None:
        number = self._num_arrived - 1
        consumer = self.consumers[number % len(self.consumers)]
        submitted = Request(
            request_id=RequestId(f"q{number}"),
            consumer_id=consumer.consumer.consumer_id,
            attempt=Attempt(0),
            prompt_token_ids=request.make_prompt(self.spec.limits.vocab_size),
            params=SamplingParams(
                max_tokens=request.num_output_tokens, seed=request.seed, ignore_eos=True
            ),
        )
        self._await_next(arrivals)
        consumer.submit(submitted, number)

    # --- what it was like -----------------------------------------------------------------

    def _take_loads(self) -> None:
        """Take the state of the replicas down, and again as long as anything else is to come."""
        self._add_loads()
        if self.engine.num_scheduled:
            self.engine.at(self.engine.now + self.spec.load_interval_s, self._take_loads)

    def _add_loads(self) -> None:
        for host in self._latest.values():
            if host.has_changed:
                host.has_changed = False
                batcher = host.replica.batcher if host.stopped is None else None
                self._loads.add(self.engine.now, host.index, batcher, host.totals)

    def _report(self) -> SimReport:
        totals = [host.totals for host in self._latest.values()]
        columns = zip(*map(dataclasses.astuple, totals), strict=True)
        return SimReport(
            requests=self.log.columns(),
            errors=self.log.errors,
            loads=self._loads.columns(),
            replicas=ReplicaColumns(*map(np.array, columns)),
            token_gaps_s=self._gaps,
            deaths=tuple(self._deaths),
            end_s=self.log.last_end_s,
            num_events=self.engine.num_events,
            num_network_bytes=self.network.num_bytes,
        )
