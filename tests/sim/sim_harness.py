"""A small simulated cluster whose runs tests compare: streams, times, ledger, log."""

import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np

from rayserve_paged.core import invariants
from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.config import BatchConfig
from rayserve_paged.core.event_log import LogEntry, to_line
from rayserve_paged.core.ids import BlockKey, ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason, ModelLimits
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.cluster_spec import ClusterSpec
from rayserve_paged.sim.cost_model import RooflineCost
from rayserve_paged.sim.hardware import GPUS, MODEL_SHAPES
from rayserve_paged.sim.links import LinkSpec
from rayserve_paged.sim.network import NetworkSpec
from rayserve_paged.sim.report import SimReport
from rayserve_paged.sim.requests import SimRequest, request_seed
from rayserve_paged.sim.token_streams import Segment, stream_number

BLOCK_SIZE = 16
# Size does not matter on it, so that a delivery of many tokens is as fast as one of a single one.
IDEAL = NetworkSpec(LinkSpec(1e-5, float("inf")), LinkSpec(5e-5, float("inf")))


def make_spec(
    *,
    num_replicas: int = 2,
    num_blocks: int = 200,
    block_size: int = BLOCK_SIZE,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 512,
    max_decode_steps: int = 1024,
    pipeline_depth: int = 1,
    network: NetworkSpec = IDEAL,
    num_consumers: int = 2,
) -> ClusterSpec:
    shape = MODEL_SHAPES["llama-8b"]
    batch = BatchConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_decode_steps=max_decode_steps,
        pipeline_depth=pipeline_depth,
    )
    return ClusterSpec(
        num_replicas=num_replicas,
        limits=ModelLimits(
            shape.vocab_size, shape.max_model_len, num_blocks, block_size, (), max_num_seqs
        ),
        cost=RooflineCost(gpu=GPUS["H200"], shape=shape, tensor_parallel_size=1),
        batch=batch,
        network=network,
        num_consumers=num_consumers,
    )


def make_workload(seed: int, num_requests: int = 60, gap_s: float = 0.08) -> list[SimRequest]:
    """Requests that share prefixes of several lengths and arrive at uneven times."""
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(gap_s, num_requests)).tolist()
    requests = []
    for number, arrival_s in enumerate(arrivals):
        story = stream_number(seed, 1000 + int(draw.integers(3)))
        segments = (
            Segment(story, 1 + int(draw.integers(100))),
            Segment(stream_number(seed, number), 1 + int(draw.integers(300))),
        )
        num_outputs = 1 + int(draw.integers(120))
        requests.append(SimRequest(arrival_s, segments, num_outputs, request_seed(seed, number)))
    return requests


@dataclasses.dataclass
class Stream:
    """What a consumer accepted of one request."""

    token_ids: tuple[int, ...] = ()
    first_s: float | None = None
    end_s: float | None = None
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    num_ends: int = 0


@dataclasses.dataclass
class Outcome:
    """All that a run leaves."""

    report: SimReport
    streams: dict[RequestId, Stream]
    accountings: list[Accounting]
    keys: list[set[BlockKey]]
    placed: list[ReplicaId]
    log_digest: str
    num_steps: int
    num_plans: int


def simulate(
    spec: ClusterSpec, requests: Iterable[SimRequest], *, with_log: bool = False
) -> Outcome:
    streams: dict[RequestId, Stream] = {}
    digest = hashlib.sha256()

    def watch(update: StreamUpdate, now: float) -> None:
        stream = streams.setdefault(update.request_id, Stream())
        stream.token_ids += update.token_ids
        stream.num_cached_tokens = update.num_cached_tokens
        if update.token_ids and stream.first_s is None:
            stream.first_s = now
        if update.finish is not None:
            stream.end_s, stream.finish = now, update.finish
            stream.num_ends += 1

    def record(entry: LogEntry) -> None:
        digest.update(to_line(entry).encode() + b"\n")

    cluster = Cluster(spec, record if with_log else None, watch)
    report = cluster.run(requests)
    hosts = list(cluster.replicas.values())
    for host in hosts:
        invariants.check(host.replica)
        assert host.replica.sequences == ()
        assert host.replica.kv.pool.num_held == 0
        assert cluster.controller.controller.num_requests(host.replica.replica_id) == 0
        assert cluster.controller.controller.num_pending_tokens(host.replica.replica_id) == 0
        assert cluster.controller.controller.num_queued_tokens(host.replica.replica_id) == 0
    for consumer in cluster.consumers:
        assert consumer.consumer.open_requests == ()
    by_number = np.argsort(report.requests.number)
    return Outcome(
        report,
        streams,
        [host.replica.accounting() for host in hosts],
        [{key for key, _block in host.replica.kv.index.items()} for host in hosts],
        [ReplicaId(f"r{index}") for index in report.requests.replica[by_number].tolist()],
        digest.hexdigest(),
        int(report.replicas.num_steps.sum()),
        int(report.replicas.num_plans.sum()),
    )
