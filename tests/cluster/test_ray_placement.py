"""Where ranks go, what they ask for, and what they are called."""

from rayserve_cluster.placement import (
    group_name,
    namespace_of,
    rank_name,
    rank_resources,
    spread,
)
from rayserve_paged.core.ids import Incarnation, ReplicaId

CPU_RANK = {"CPU": 0.125}
GPU_RANK = {"GPU": 1.0, "CPU": 1.0}


def test_a_rank_asks_for_a_gpu_and_a_core_where_there_are_gpus() -> None:
    assert rank_resources({"CPU": 64.0, "GPU": 8.0}) == GPU_RANK


def test_elsewhere_four_ranks_and_a_controller_fit_on_two_cores() -> None:
    asked = rank_resources({"CPU": 2.0})
    assert asked == CPU_RANK
    assert 4 * asked["CPU"] <= 2.0


def test_replicas_go_where_most_room_is_left() -> None:
    nodes = {"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 8.0, "GPU": 4.0}, "c": {"CPU": 8.0}}
    assert spread(3, [GPU_RANK, GPU_RANK], nodes) == ["b", "a", "b"]


def test_a_replica_without_room_anywhere_gets_no_node() -> None:
    nodes = {"a": {"CPU": 8.0, "GPU": 2.0}}
    assert spread(2, [GPU_RANK, GPU_RANK], nodes) == ["a", None]
    assert spread(1, [GPU_RANK], {}) == [None]


def test_equal_nodes_are_taken_in_order_of_their_ids() -> None:
    nodes = {node: {"CPU": 1.0} for node in ("c", "a", "b")}
    assert spread(4, [CPU_RANK], nodes) == ["a", "b", "c", "a"]


def test_names_of_one_deployment_are_none_of_another() -> None:
    replica, life = ReplicaId("r0"), Incarnation(2)
    assert rank_name(replica, life, 1) == "r0.2.rank1"
    assert namespace_of("a") == "rayserve-paged.a"
    assert not group_name("a.b", replica, life).startswith(f"{namespace_of('a')}/")
    assert group_name("a", replica, life).startswith(f"{namespace_of('a')}/")
