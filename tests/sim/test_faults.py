"""Fault plans, and the network that follows one."""

import pytest
from pydantic import ValidationError

from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.faults import (
    DisturbMessages,
    FaultPlan,
    KillController,
    KillRank,
    KillReplica,
    Partition,
    PoisonRequest,
)
from rayserve_paged.sim.faulty_network import FaultyNetwork
from rayserve_paged.sim.links import LinkSpec
from rayserve_paged.sim.network import NetworkSpec, NodeId

NAMES = {NodeId(0): "r0", NodeId(1): "r1", NodeId(2): "controller"}
FAST = NetworkSpec(LinkSpec(0.0, float("inf")), LinkSpec(0.001, float("inf")))


def arrivals(
    plan: FaultPlan, sends: list[tuple[float, int, int]], seed: int = 0
) -> list[tuple[int, float]]:
    """Send a message at each (time, source, target); return (its place, when it came)."""
    engine = Engine()
    network = FaultyNetwork(engine, FAST, 3, plan, NAMES, seed)
    came: list[tuple[int, float]] = []

    def deliver(place: int) -> None:
        came.append((place, engine.now))

    for place, (at_s, source, target) in enumerate(sends):
        engine.at(at_s, network.send, NodeId(source), NodeId(target), 10, deliver, place)
    engine.run(100.0)
    return came


def test_a_partition_cuts_off_both_ways_for_as_long_as_it_lasts() -> None:
    plan = FaultPlan(faults=(Partition(from_s=1.0, until_s=2.0, places=("r0",)),))
    sends = [
        (0.9, 0, 2),
        (1.0, 0, 2),
        (1.5, 2, 0),
        (1.5, 1, 2),
        (1.5, 2, 1),
        (1.999, 0, 1),
        (2.0, 2, 0),
    ]
    assert [place for place, _at in arrivals(plan, sends)] == [0, 3, 4, 6]


def test_all_messages_between_two_ends_are_lost_and_no_others() -> None:
    ends = ("controller", "r1")
    plan = FaultPlan(faults=(DisturbMessages(from_s=0, until_s=9, ends=ends, lost=1.0),))
    sends = [(1.0, source, target) for source in range(3) for target in range(3)]
    came = {sends[place][1:] for place, _at in arrivals(plan, sends)}
    assert came == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 2)}


def test_messages_come_late_and_twice_and_so_out_of_order() -> None:
    plan = FaultPlan(
        faults=(DisturbMessages(from_s=0, until_s=9, twice=1.0, late=1.0, late_s=3.0),)
    )
    came = arrivals(plan, [(1.0 + 0.01 * i, 0, 1) for i in range(20)])
    assert sorted(place for place, _at in came) == sorted([*range(20)] * 2)
    assert [place for place, _at in came] != sorted(place for place, _at in came)
    assert all(1.0 <= at <= 4.3 for _place, at in came)


def test_the_same_seed_disturbs_the_same_messages() -> None:
    plan = FaultPlan(faults=(DisturbMessages(from_s=0, until_s=9, lost=0.5),))
    sends = [(0.1 * i, 0, 1) for i in range(40)]
    first, other = arrivals(plan, sends, seed=3), arrivals(plan, sends, seed=4)
    assert first == arrivals(plan, sends, seed=3)
    assert first != other
    assert 5 < len(first) < 35


def test_a_plan_is_read_back_from_what_it_is_written_as() -> None:
    plan = FaultPlan(
        faults=(
            KillReplica(at_s=1.5, replica="r1", hangs=True),
            KillRank(at_s=3.0, replica="r0"),
            KillController(at_s=2.0, down_s=4.0),
            PoisonRequest(request=3),
        )
    )
    assert FaultPlan.model_validate(plan.model_dump(mode="json")) == plan
    assert plan.end_s == 6.0
    assert plan.without([0, 1, 3]).faults == (plan.faults[2],)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"kind": "kill-replica", "at_s": -1, "replica": "r0"}, "at_s"),
        ({"kind": "kill-replica", "at_s": 1}, "replica"),
        ({"kind": "nonsense"}, "kind"),
        ({"kind": "partition", "from_s": 2, "until_s": 1, "places": ["r0"]}, "until_s"),
        ({"kind": "partition", "from_s": 0, "until_s": 1, "places": []}, "places"),
        ({"kind": "disturb-messages", "from_s": 0, "until_s": 1, "lost": 1.5}, "lost"),
        ({"kind": "slow-replica", "from_s": 0, "until_s": 1, "replica": "r0", "factor": 0}, "fac"),
        ({"kind": "kill-controller", "at_s": 1, "down_s": 1, "up_s": 2}, "up_s"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fault: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        FaultPlan.model_validate({"faults": [fault]})
