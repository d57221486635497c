"""What the hosts of a simulated cluster do when things end early: cancels, losses, the end."""

import numpy as np
from sim_harness import make_spec, make_workload

from rayserve_paged.core import invariants
from rayserve_paged.core.controller_messages import EndDeployment, LoseReplica
from rayserve_paged.core.ids import Incarnation, ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.report import FINISHES, RequestColumns
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.token_streams import Segment

R0, R1 = ReplicaId("r0"), ReplicaId("r1")


def finish_of(columns: RequestColumns, number: int) -> FinishReason:
    (row,) = np.flatnonzero(columns.number == number).tolist()
    return FINISHES[columns.finish[row]]


def test_a_cancel_ends_its_stream_within_a_step_and_frees_its_blocks() -> None:
    cluster = Cluster(make_spec(num_replicas=1))
    long = SimRequest(0.0, (Segment(1, 20),), 100, seed=1)
    other = SimRequest(0.01, (Segment(2, 20),), 100, seed=2)
    consumers = cluster.consumers
    cluster.engine.at(0.1, consumers[0].cancel, RequestId("q0"))
    cluster.engine.at(0.2, consumers[0].cancel, RequestId("q0"))
    cluster.engine.at(0.2, consumers[0].cancel, RequestId("unknown"))
    report = cluster.run([long, other])
    columns = report.requests
    assert columns.number.tolist() == [0, 1]
    assert [finish_of(columns, 0), finish_of(columns, 1)] == [
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]
    assert 0 < columns.num_output_tokens[0] < 100
    assert columns.num_output_tokens[1] == 100
    step_s = report.token_gaps_s.percentile(99)
    assert step_s is not None
    assert columns.end_s[0] - 0.1 < 2 * step_s
    assert report.errors == {0: "cancelled by its consumer"}
    (host,) = cluster.replicas.values()
    invariants.check(host.replica)
    assert host.replica.kv.pool.num_held == 0


def test_an_answer_to_a_poll_that_was_repeated_is_not_followed_by_another_poll() -> None:
    requests = [SimRequest(0.0, (Segment(1, 20),), 200, seed=1)]
    num_events = []
    for num_late_answers in (0, 1):
        cluster = Cluster(make_spec(num_replicas=1, num_consumers=1))
        (host,), (consumer,) = cluster.replicas.values(), cluster.consumers
        late = Delivery(*host.source, 0, ())
        for _ in range(num_late_answers):
            cluster.engine.at(0.2, consumer.take_delivery, host, 0, late)
        report = cluster.run(requests)
        assert report.requests.num_output_tokens.tolist() == [200]
        num_events.append(report.num_events)
    assert num_events[1] == num_events[0] + 1


def test_the_requests_of_a_lost_replica_go_on_elsewhere_and_so_do_later_ones() -> None:
    cluster = Cluster(make_spec(num_blocks=400))
    requests = make_workload(4, num_requests=40, gap_s=0.02)
    lost_s = requests[20].arrival_s + 0.001
    lose = LoseReplica(R0, Incarnation(0), "a rank is silent")
    cluster.engine.at(lost_s, cluster.controller.take, lose)
    report = cluster.run(requests)
    columns = report.requests
    assert sorted(columns.number.tolist()) == list(range(40))
    assert report.errors == {}
    assert (columns.finish == FINISHES.index(FinishReason.LENGTH)).all()
    later = columns.end_s > lost_s + 0.01
    assert 20 < later.sum() < 40
    assert (columns.replica[later] == 1).all()
    assert set(cluster.controller.controller.replicas) == {R1}


def test_the_end_of_the_deployment_ends_every_request() -> None:
    cluster = Cluster(make_spec())
    requests = make_workload(5, num_requests=30, gap_s=0.02)
    ended_s = requests[15].arrival_s + 0.001
    cluster.engine.at(ended_s, cluster.controller.take, EndDeployment("done"))
    columns = cluster.run(requests).requests
    assert sorted(columns.number.tolist()) == list(range(30))
    served = columns.finish == FINISHES.index(FinishReason.LENGTH)
    assert (columns.end_s[served] <= ended_s + 0.01).all()
    assert not columns.is_placed[columns.arrival_s > ended_s].any()
    assert not served[columns.arrival_s > ended_s].any()
