"""A deployment of two replicas of two ranks on a local cluster."""

import asyncio
import dataclasses
import ipaddress
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
from deliveries import unfold
from ray_harness import (
    deployment_config,
    environment,
    holdings,
    prompts,
    read_all,
    request,
    tokens,
    wait_for,
)

from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import Adapter, RequestScope
from rayserve_paged.core.consumer import Consumer
from rayserve_paged.core.controller_messages import Placed, Rejected, SubmitRequest
from rayserve_paged.core.errors import DeploymentError, InvalidInputError, PinLimitError
from rayserve_paged.core.ids import ConsumerId, PinId, ReplicaId, RequestId
from rayserve_paged.core.replica_messages import PinPrefix, UnpinPrefix
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.inprocess import InProcessShell

pytestmark = pytest.mark.ray

CONFIG = deployment_config("shell", ranks=2, replicas=2)


@pytest.fixture(scope="module")
def shell() -> Iterator[RayShell]:
    shell = RayShell(CONFIG)
    try:
        yield shell
    finally:
        shell.shutdown()


def test_streams_of_two_replicas_of_two_ranks_equal_those_of_one_process(shell: RayShell) -> None:
    requests = [request(f"r{i}", prompt, 40) for i, prompt in enumerate(prompts(8))]
    oracle = InProcessShell(deployment_config("oracle"))
    try:
        # One at a time: alone, without batch and without pressure.
        expected = [tokens(asyncio.run(read_all(oracle, [alone]))[0]) for alone in requests]
    finally:
        oracle.shutdown()

    streams = asyncio.run(read_all(shell, requests))

    assert [tokens(updates) for updates in streams] == expected
    assert [updates[-1].finish for updates in streams] == [FinishReason.LENGTH] * 8
    assert {updates[-1].replica_id for updates in streams} == {"r0", "r1"}


def test_adapters_attachments_and_scores_go_through_every_process(shell: RayShell) -> None:
    plain = request("s0", list(range(300, 340)), 6)
    variants = [
        dataclasses.replace(
            plain,
            request_id=RequestId(f"s{index}"),
            params=dataclasses.replace(plain.params, prompt_logprobs=2),
            scope=RequestScope(adapter=adapter),
            attachments=attachments,
        )
        for index, (adapter, attachments) in enumerate(
            [
                (None, ()),
                (Adapter("a", "1"), ()),
                (Adapter("a", "2"), ()),
                (None, (Attachment(bytes(16), 3, 20),)),
            ]
        )
    ]
    oracle = InProcessShell(deployment_config("oracle"))
    try:
        expected = [asyncio.run(read_all(oracle, [alone]))[0] for alone in variants]
    finally:
        oracle.shutdown()
    streams = asyncio.run(read_all(shell, variants))
    for updates, alone in zip(streams, expected, strict=True):
        assert tokens(updates) == tokens(alone)
        (scores,) = [update.prompt_logprobs for update in updates if update.prompt_logprobs]
        assert len(scores) == 39
        assert scores == alone[0].prompt_logprobs
    assert len({tuple(tokens(updates)) for updates in streams}) == len(variants)


def test_a_second_round_finds_its_prompts_in_the_cache_of_the_same_replicas(
    shell: RayShell,
) -> None:
    prompt = list(range(100, 150))
    first, second = (
        asyncio.run(read_all(shell, [request(name, prompt, 8)]))[0] for name in ("c0", "c1")
    )
    assert tokens(second) == tokens(first)
    assert second[-1].replica_id == first[-1].replica_id
    assert (first[-1].num_cached_tokens, second[-1].num_cached_tokens) == (0, 48)


def test_every_block_is_free_or_cached_once_all_requests_have_ended(shell: RayShell) -> None:
    asyncio.run(read_all(shell, [request(f"b{i}", p, 10) for i, p in enumerate(prompts(4))]))
    ledgers = dict(asyncio.run(shell.accounting()))
    assert sorted(ledgers) == ["r0", "r1"]
    for ledger in ledgers.values():
        assert ledger.num_free_blocks + ledger.num_cached_blocks == 256
        assert ledger.num_held_blocks == 0


def test_the_map_of_every_replica_is_its_ledgers_and_a_cell_is_asked_of_one(
    shell: RayShell,
) -> None:
    asyncio.run(read_all(shell, [request(f"m{i}", p, 10) for i, p in enumerate(prompts(4))]))
    view = asyncio.run(shell.cluster_view())
    ledgers = dict(asyncio.run(shell.accounting()))
    maps = {each.replica_id: each.blocks.cells for each in view.replicas}
    assert maps == {name: ledger.block_map for name, ledger in ledgers.items()}
    assert view.term == 0
    kinds = Counter(event.kind for event in view.events)
    assert kinds == {"controller term": 1, "replica started": 2}
    (asked,) = asyncio.run(shell.cluster_view((ReplicaId("r1"), 255))).replicas
    assert asked.replica_id == "r1"
    assert asked.blocks.cell is not None
    assert (asked.blocks.cell.first_block, asked.blocks.cell.holders) == (255, ())


def test_after_a_reset_no_replica_finds_what_was_computed_before(shell: RayShell) -> None:
    # No other test on this cluster begins like that.
    prompt = list(range(350, 300, -1))
    first = asyncio.run(read_all(shell, [request("d0", prompt, 8)]))[0]
    asyncio.run(shell.reset_cache())
    second = asyncio.run(read_all(shell, [request("d1", prompt, 8)]))[0]
    assert (first[-1].num_cached_tokens, second[-1].num_cached_tokens) == (0, 0)
    assert tokens(second) == tokens(first)


def test_a_pin_is_answered_by_every_replica_and_refused_by_each_that_may_not_hold_it(
    shell: RayShell,
) -> None:
    prompt = list(range(400, 450))
    (updates,) = asyncio.run(read_all(shell, [request("e0", prompt, 8)]))
    answers = dict(asyncio.run(shell.pin_prefix(PinPrefix(PinId("p"), TokenIds.of(prompt)))))
    assert sorted(answers) == ["r0", "r1"]
    assert [answer.num_tokens for answer in answers.values()] == [0, 0]
    # Nothing may be pinned here. One replica has three full blocks; the other has nothing to hold.
    replica_id = updates[-1].replica_id
    assert replica_id is not None
    has, other = answers.pop(replica_id), *answers.values()
    assert str(has.refused) == str(PinLimitError("p", 3, 0, 0))
    assert other.refused is None
    asyncio.run(shell.unpin_prefix(UnpinPrefix(PinId("p"))))
    for ledger in dict(asyncio.run(shell.accounting())).values():
        assert (ledger.num_pinned_blocks, ledger.num_held_blocks) == (0, 0)


def test_no_actor_call_lies_on_the_path_of_a_token(shell: RayShell) -> None:
    max_tokens = 400
    consumer = Consumer(ConsumerId("silent"))
    requests = [request(f"n{i}", [i + 1, 2, 3], max_tokens, consumer="silent") for i in range(4)]
    before = asyncio.run(shell.stats())
    # Nobody polls meanwhile, so that every call that is counted is one that a step needs.
    answers = [asyncio.run(shell.submit(SubmitRequest(one))) for one in requests]
    placed = [answer for answer in answers if isinstance(answer, Placed)]
    assert Counter(answer.replica_id for answer in placed) == {"r0": 2, "r1": 2}

    def all_ended() -> bool:
        ledgers = asyncio.run(shell.accounting())
        return all(ledger.num_held_blocks == 0 for _, ledger in ledgers)

    wait_for(all_ended, "the end of 4 requests")
    after = asyncio.run(shell.stats())
    generated = 0
    for answer in placed[:2]:
        source = (answer.replica_id, answer.incarnation)
        delivery = asyncio.run(shell.poll(*source, consumer.poll(*source, time.monotonic())))
        generated += sum(len(item.token_ids) for item in unfold(delivery))

    assert generated == 4 * max_tokens
    for old, new in zip(before.ranks, after.ranks, strict=True):
        calls = Counter(new.calls) - Counter(old.calls)
        # What health and this test ask, whether tokens are made or not.
        for kept in ("ping", "stats", "accounting"):
            calls.pop(kept, None)
        assert calls == ({"post": 2} if new.rank == 0 else {})
        # A report tells the controller of sealed blocks, first tokens and ended requests, and of
        # no other token.
        num_reports = new.num_reports - old.num_reports
        assert num_reports <= (2 * (max_tokens // 16 + 2) if new.rank == 0 else 0)


def test_what_runs_a_step_does_not_know_ray() -> None:
    code = "import sys, rayserve_cluster.rank; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_a_cancelled_stream_ends_as_cancelled_and_frees_its_blocks(shell: RayShell) -> None:
    async def cancel_after_first() -> FinishReason | None:
        one = request("k0", [5, 6, 7], 2000, consumer="canceller")
        consumer = Consumer(one.consumer_id)
        consumer.open(one, time.monotonic())
        placed = await shell.submit(SubmitRequest(one))
        assert isinstance(placed, Placed)
        consumer.placed(placed, time.monotonic())
        source = (placed.replica_id, placed.incarnation)
        finish = None
        cancelled = False
        while finish is None:
            poll = consumer.poll(*source, time.monotonic())
            delivery = await shell.poll(*source, poll)
            for update in consumer.deliver(delivery, time.monotonic()):
                finish = update.finish
                if not cancelled:
                    consumer.cancel(one.request_id, None, time.monotonic())
                    await shell.cancel(one.request_id, one.attempt)
                    cancelled = True
        return finish

    assert asyncio.run(cancel_after_first()) == FinishReason.CANCELLED
    ledgers = dict(asyncio.run(shell.accounting()))
    assert [ledger.num_held_blocks for ledger in ledgers.values()] == [0, 0]


def test_a_prompt_over_the_models_limit_is_refused_at_the_door(shell: RayShell) -> None:
    answer = asyncio.run(shell.submit(SubmitRequest(request("f0", [1] * 4096, 10))))
    assert isinstance(answer, Rejected)
    assert isinstance(answer.error, InvalidInputError)
    assert "4096 tokens" in str(answer.error)
    assert "at most 4095 tokens" in str(answer.error)


def test_each_rank_is_a_process_of_its_own_with_its_figures(shell: RayShell) -> None:
    stats = asyncio.run(shell.stats())
    assert [(rank.replica_id, rank.rank) for rank in stats.ranks] == [
        ("r0", 0), ("r0", 1), ("r1", 0), ("r1", 1),
    ]  # fmt: skip
    pids = {rank.pid for rank in stats.ranks}
    assert len(pids - {os.getpid()}) == 4
    assert all(rank.rss_bytes > 2**20 and rank.num_threads == 1 for rank in stats.ranks)
    assert stats.timings.keys() == {
        "ray_init_s", "controller_s", "ranks_ready_s", "model_load_s",
    }  # fmt: skip


def test_nothing_listens_beyond_loopback(shell: RayShell) -> None:
    hosts: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    for process in psutil.Process().children(recursive=True):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                host = ipaddress.ip_address(connection.laddr.ip)
                mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
                hosts.add(mapped or host)
    assert hosts == {ipaddress.ip_address("127.0.0.1")}


def test_a_second_shell_of_the_same_configuration_joins_and_leaves_the_deployment_alone(
    shell: RayShell,
) -> None:
    guest = RayShell(CONFIG)
    streams = asyncio.run(read_all(guest, [request("g0", [1, 2], 4, "guest")], "guest"))
    guest.shutdown()
    assert len(tokens(streams[0])) == 4
    assert len(holdings("shell")) == 1 + 4 + 2
    assert len(tokens(asyncio.run(read_all(shell, [request("g1", [1, 2], 4)]))[0])) == 4


def test_another_configuration_of_a_running_deployment_is_refused(shell: RayShell) -> None:
    with pytest.raises(DeploymentError, match="runs already, with another configuration"):
        RayShell(deployment_config("shell", ranks=1))
    assert len(holdings("shell")) == 1 + 4 + 2
