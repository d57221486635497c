"""The books of placement: slots of dead replicas, kinds of replicas, turns."""

import dataclasses

from replica_driver import make_limits, make_request, make_scope, prompt_keys

from rayserve_paged.core.config import BatchConfig
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.placement import Placement

LIMITS = make_limits(num_blocks=16)
SCOPE = make_scope()
NAMES = [ReplicaId(f"r{i}") for i in range(4)]


def test_in_a_round_robin_a_replica_that_joins_is_next_and_then_has_its_turn() -> None:
    placement = Placement("round-robin", BatchConfig())
    for name in NAMES[:2]:
        placement.add(name, LIMITS)
    placed = [placement.place(make_request([i], request_id=f"q{i}"), ()) for i in range(3)]
    placement.add(NAMES[2], LIMITS)
    placed += [placement.place(make_request([i], request_id=f"q{i}"), ()) for i in range(3, 7)]
    assert placed == ["r0", "r1", "r0", "r2", "r1", "r0", "r2"]


def test_whoever_takes_the_slot_of_a_dead_replica_has_neither_its_load_nor_its_keys() -> None:
    placement = Placement("prefix-aware", BatchConfig())
    for name in NAMES[:3]:
        placement.add(name, LIMITS)
    request = make_request(range(12), 2)
    keys = prompt_keys(request, SCOPE)
    placement.update(NAMES[1], keys, ())
    assert placement.place(request, keys) == "r1"
    placement.remove(NAMES[1])
    placement.add(NAMES[3], LIMITS)
    assert (placement.num_requests(NAMES[3]), placement.num_pending_tokens(NAMES[3])) == (0, 0)
    placement.update(NAMES[2], keys[:1], ())
    assert placement.place(request, keys) == "r2"


def test_a_replica_that_is_left_out_is_given_nothing_whatever_it_has_cached() -> None:
    placement = Placement("prefix-aware", BatchConfig())
    for name in NAMES[:3]:
        placement.add(name, LIMITS)
    request = make_request(range(12), 2)
    keys = prompt_keys(request, SCOPE)
    placement.update(NAMES[1], keys, ())
    placement.update(NAMES[2], keys[:1], ())
    assert placement.place(request, keys, NAMES[:3]) is None
    assert placement.place(request, keys, [NAMES[1]]) == "r2"
    placement.settle(NAMES[2], request.request_id)
    # It is left out once, and not for ever.
    assert placement.place(request, keys) == "r1"
    assert [placement.num_requests(name) for name in NAMES[:3]] == [0, 1, 0]


def test_of_idle_replicas_the_next_is_the_one_that_had_fewer_samples_of_late() -> None:
    placement = Placement("prefix-aware", BatchConfig())
    for name in NAMES[:2]:
        placement.add(name, LIMITS)
    four = make_request(range(10), 2, request_id="q0", n=4, temperature=1.0)
    long = make_request(range(20, 70), 2, request_id="q1")
    for request, expected in ((four, "r0"), (long, "r1")):
        replica_id = placement.place(request, ())
        assert replica_id == expected
        placement.settle(ReplicaId(expected), request.request_id)
    # Four rows and 10 tokens took more than one row and 50.
    assert placement.place(make_request([1], 2, request_id="q2"), ()) == "r1"


def test_a_request_goes_where_it_fits_whatever_is_cached_elsewhere() -> None:
    placement = Placement("prefix-aware", BatchConfig())
    small = dataclasses.replace(LIMITS, num_blocks=4)
    for name, limits in zip(NAMES, (small, small, LIMITS), strict=False):
        placement.add(name, limits)
    assert placement.largest_limits == LIMITS
    request = make_request(range(12), 20)
    placement.update(NAMES[0], prompt_keys(request, SCOPE), ())
    assert placement.place(request, prompt_keys(request, SCOPE)) == "r2"
    placement.remove(NAMES[2])
    assert placement.largest_limits == small
