"""The tensor-parallel group: what it exchanges, how it breaks, where it listens."""

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch.distributed import HashStore

from rayserve_cluster import tp_group
from rayserve_cluster.links import GlooLink
from rayserve_cluster.tp_group import GroupBrokenError, TpGroup, join_store, serve_store

T = TypeVar("T")

_LONG_S = 100.0
"""Far above what anything here takes: a call that returns sooner did not wait for a timeout."""


def connect(
    world_size: int,
    timeout_s: float = _LONG_S,
    store: HashStore | None = None,
    name: str = "group",
) -> list[TpGroup]:
    meeting = HashStore() if store is None else store
    groups = [TpGroup(rank, world_size, timeout_s=timeout_s) for rank in range(world_size)]
    on_all(groups, lambda group: group.connect(meeting, name, _LONG_S))
    return groups


def begin(call: Callable[[], T]) -> "Future[T]":
    """Run a call in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def on_all(groups: Sequence[TpGroup], call: Callable[[TpGroup], T]) -> list[T]:
    """Run a call on every rank at once."""
    return [future.result() for future in [begin(partial(call, group)) for group in groups]]


def reduce_own(groups: Sequence[TpGroup], tensors: Sequence[torch.Tensor]) -> None:
    """All-reduce tensors[rank] on every rank."""
    on_all(groups, lambda group: group.all_reduce(tensors[group.rank]))


@pytest.fixture
def trio() -> Iterator[list[TpGroup]]:
    groups = connect(3)
    yield groups
    for group in groups:
        group.abort("the test is over")
        group.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_all_reduce_gives_every_rank_the_same_sum(world_size: int, dtype: torch.dtype) -> None:
    groups = connect(world_size)
    generator = torch.Generator().manual_seed(world_size)
    parts = [torch.randint(-8, 8, (5, 7), generator=generator) for _ in groups]
    tensors = [part.to(dtype, copy=True) for part in parts]
    reduce_own(groups, tensors)
    for tensor in tensors:
        assert torch.equal(tensor, sum(parts, torch.zeros_like(parts[0])).to(dtype))
    for group in groups:
        group.close()


def test_a_rows_sum_has_the_same_bits_in_any_batch(trio: list[TpGroup]) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(64, 33, generator=generator) for _ in trio]
    alone = [part[40:41].clone() for part in parts]
    together = [part.clone() for part in parts]
    reduce_own(trio, alone)
    reduce_own(trio, together)
    expected = parts[0] + parts[1] + parts[2]
    for rank in range(3):
        assert torch.equal(together[rank], expected)
        assert torch.equal(alone[rank], expected[40:41])


@pytest.mark.parametrize("widths", [(3, 2, 2), (4, 0, 1), (0, 1, 1)])
def test_gather_rows_lays_uneven_columns_side_by_side(
    trio: list[TpGroup], widths: tuple[int, ...]
) -> None:
    whole = torch.arange(4 * sum(widths), dtype=torch.float32).view(4, -1)
    parts = [part.contiguous() for part in whole.split(widths, dim=1)]
    gathered = on_all(trio, lambda group: group.gather_rows(parts[group.rank], widths))
    assert gathered[0] is not None
    assert torch.equal(gathered[0], whole)
    assert gathered[1:] == [None, None]


def test_gather_rows_of_no_rows_has_the_full_width(trio: list[TpGroup]) -> None:
    gathered = on_all(trio, lambda g: g.gather_rows(torch.empty(0, 2), (2, 2, 2)))
    assert gathered[0] is not None
    assert gathered[0].shape == (0, 6)


def test_every_rank_learns_the_smallest_value(trio: list[TpGroup]) -> None:
    assert on_all(trio, lambda group: group.smallest(10 - group.rank)) == [8, 8, 8]


def test_a_group_of_one_needs_no_store_and_opens_no_socket() -> None:
    group = TpGroup(0, 1, timeout_s=_LONG_S)
    before = len(os.listdir("/proc/self/fd"))
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    assert torch.equal(tensor, torch.ones(3))
    assert group.gather_rows(tensor.view(1, 3), (3,)) is not None
    assert group.smallest(5) == 5
    group.send_plan(b"plan")
    group.send_heartbeat()
    group.send_shutdown()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size_bytes", [0, 1, 4063, 4064, 4065, 100_000])
def test_a_plan_of_any_size_reaches_every_follower(trio: list[TpGroup], size_bytes: int) -> None:
    plan = bytes(i % 251 for i in range(size_bytes))
    received = [begin(group.receive_plan) for group in trio[1:]]
    trio[0].send_plan(plan)
    assert [future.result(_LONG_S) for future in received] == [plan, plan]


def test_plans_arrive_in_order_between_heartbeats_until_the_shutdown(trio: list[TpGroup]) -> None:
    def receive_all(group: TpGroup) -> list[bytes]:
        return list(iter(group.receive_plan, None))

    received = [begin(partial(receive_all, group)) for group in trio[1:]]
    trio[0].send_heartbeat()
    for plan in (b"first", b"second"):
        trio[0].send_plan(plan)
        trio[0].send_heartbeat()
    trio[0].send_shutdown()
    assert [future.result(_LONG_S) for future in received] == [[b"first", b"second"]] * 2
    assert len({group.plan_digest for group in trio}) == 1


class CorruptingLink(GlooLink):
    """Flips a bit of every long message on its way out."""

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        for _peer, tensor in sends:
            tensor.view(-1)[100:101] ^= 1
        super().exchange(sends, receives)


def test_a_follower_that_sees_another_plan_than_rank_0_breaks_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tp_group, "GlooLink", CorruptingLink)
    leader, follower = connect(2)
    received = begin(follower.receive_plan)
    leader.send_plan(bytes(200))
    with pytest.raises(GroupBrokenError, match="the ranks diverged: control message 0 of rank 0"):
        received.result(_LONG_S)
    with pytest.raises(GroupBrokenError):
        leader.all_reduce(torch.ones(1))


CALLS: dict[str, Callable[[TpGroup], object]] = {
    "receive_plan": lambda group: group.receive_plan(),
    "all_reduce": lambda group: group.all_reduce(torch.ones(4)),
    "gather_rows": lambda group: group.gather_rows(torch.ones(50_000, 200), (200,) * 3),
    "smallest": lambda group: group.smallest(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_abort_frees_the_thread_inside_a_call_at_once(trio: list[TpGroup], name: str) -> None:
    inside = begin(lambda: CALLS[name](trio[1]))
    with pytest.raises(TimeoutError):
        inside.result(0.2)
    trio[1].abort("enough")
    with pytest.raises(GroupBrokenError, match="broke at rank 1: enough"):
        inside.result(_LONG_S / 2)
    with pytest.raises(GroupBrokenError, match="enough"):
        CALLS[name](trio[1])


def test_a_break_travels_to_ranks_that_wait_for_others(trio: list[TpGroup]) -> None:
    # Rank 2 waits for rank 0 alone, and rank 1 for both; the one that aborts is rank 1.
    waiting = begin(trio[2].receive_plan)
    reducing = begin(lambda: trio[0].all_reduce(torch.ones(4)))
    trio[1].abort("enough")
    with pytest.raises(GroupBrokenError, match="broke at rank 0"):
        reducing.result(_LONG_S / 2)
    with pytest.raises(GroupBrokenError, match="broke at rank 2"):
        waiting.result(_LONG_S / 2)


def test_an_aborted_group_gives_its_sockets_and_threads_back() -> None:
    gc.collect()  # Of other tests.
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    groups = connect(3)
    assert len(os.listdir("/proc/self/fd")) > before[0]
    for group in groups:
        group.abort("enough")
        group.close()
        group.close()
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


def test_a_peer_that_closed_gives_an_error_that_says_so(trio: list[TpGroup]) -> None:
    trio[2].close()
    with pytest.raises(GroupBrokenError, match=r"broke at rank 0: .*closed by peer"):
        trio[0].smallest(1)


def test_a_peer_that_never_calls_gives_an_error_at_the_timeout() -> None:
    leader, follower = connect(2, timeout_s=0.5)
    with pytest.raises(GroupBrokenError, match=r"broke at rank 1: .*[Tt]imed out"):
        follower.receive_plan()
    with pytest.raises(GroupBrokenError, match="broke at rank 0"):
        leader.send_plan(b"too late")


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_told() -> None:
    group = TpGroup(0, 2, timeout_s=_LONG_S)
    with pytest.raises(GroupBrokenError, match=r"not all of 2 ranks came within 0\.1 s"):
        group.connect(HashStore(), "alone", timeout_s=0.1)


def test_a_group_that_waits_for_its_ranks_can_be_aborted() -> None:
    group = TpGroup(0, 2, timeout_s=_LONG_S)
    connecting = begin(lambda: group.connect(HashStore(), "alone", _LONG_S))
    group.abort("enough")
    with pytest.raises(GroupBrokenError, match="enough"):
        connecting.result(_LONG_S / 2)


def test_groups_with_different_members_live_side_by_side() -> None:
    pair, other, trio = connect(2), connect(2), connect(3)
    other[0].abort("only this one")
    for groups in (pair, trio):
        sums = [torch.ones(2) for _ in groups]
        reduce_own(groups, sums)
        assert all(torch.equal(total, torch.full((2,), float(len(groups)))) for total in sums)
        for group in groups:
            group.close()
    with pytest.raises(GroupBrokenError):
        other[1].receive_plan()


def test_a_replacement_joins_under_a_fresh_name() -> None:
    store = HashStore()
    for incarnation in range(3):
        groups = connect(2, store=store, name=f"r0.{incarnation}")
        assert on_all(groups, lambda group: group.smallest(group.rank)) == [0, 0]
        groups[1].abort("replaced")
        groups[0].close()


def test_a_broken_groups_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(GroupBrokenError(2, "silence")))
    assert str(error) == "the tensor-parallel group broke at rank 2: silence"


PEER = """
import sys, torch
from rayserve_cluster.tp_group import TpGroup, join_store
group = TpGroup(1, 2, timeout_s=100.0)
group.connect(join_store("127.0.0.1", int(sys.argv[1]), timeout_s=100.0), "pair", 100.0)
print(group.receive_plan().decode(), flush=True)
group.receive_plan()
"""


def listening() -> set[str]:
    """Local addresses, in hexadecimal, on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_a_killed_peer_breaks_the_group_and_all_sockets_listen_on_loopback_alone() -> None:
    store = serve_store(timeout_s=_LONG_S)
    with subprocess.Popen(
        [sys.executable, "-c", PEER, str(store.port)], stdout=subprocess.PIPE, text=True
    ) as peer:
        group = TpGroup(0, 2, timeout_s=_LONG_S)
        group.connect(store, "pair", _LONG_S)
        # 127.0.0.1 in the kernel's byte order; a second listener is the store's.
        assert listening() == {"0100007F"}
        group.send_plan(b"hello")
        assert peer.stdout is not None
        assert peer.stdout.readline() == "hello\n"
        peer.kill()
        with pytest.raises(GroupBrokenError, match="broke at rank 0"):
            group.all_reduce(torch.ones(1))
        group.close()


def test_a_store_is_reached_where_it_listens() -> None:
    store = serve_store("127.0.0.1", timeout_s=_LONG_S)
    join_store("127.0.0.1", store.port, timeout_s=_LONG_S).set("key", "value")
    assert store.get("key") == b"value"


def test_heartbeats_keep_an_idle_group_beyond_ten_timeouts() -> None:
    timeout_s = 0.5
    leader, follower = connect(2, timeout_s)
    received = begin(follower.receive_plan)
    pause = threading.Event()
    for _ in range(44):
        pause.wait(timeout_s / 4)
        leader.send_heartbeat()
    leader.send_plan(b"still here")
    assert received.result(_LONG_S) == b"still here"


def test_none_of_the_modules_loads_ray() -> None:
    modules = ["executor", "links", "model_runner", "plan_codec", "rank", "step_loop", "tp_group"]
    imports = "; ".join(f"import rayserve_cluster.{module}" for module in modules)
    code = f"import sys, rayserve_paged.inprocess; {imports}; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
