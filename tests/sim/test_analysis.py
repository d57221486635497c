"""Figures of a workload against counts made slot by slot and block by block."""

import csv
import heapq
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from eviction_oracle import EvictionOracle
from hypothesis import given, settings
from hypothesis import strategies as st

from rayserve_paged import cli
from rayserve_paged.core.accounting import account
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.sim.analysis import (
    HitCounts,
    analyze_block_size,
    count_lru_hits,
    count_value_hits,
)
from rayserve_paged.sim.workload import TraceRequest, Workload, read_workload

DATA = Path(__file__).parent / "data"
TRACES = sorted(path.name for path in DATA.iterdir() if path.suffix in (".csv", ".jsonl"))

_Prompt = tuple[int, list[int]]  # Tokens, hash ids.


def rows_of(path: Path) -> list[tuple[int, int, list[int]]]:
    """Read (input length, output length, hash ids) without the reader under test."""
    with path.open(newline="") as file:
        if path.suffix == ".csv":
            columns = csv.DictReader(file)
            return [(int(r["ContextTokens"]), int(r["GeneratedTokens"]), []) for r in columns]
        rows = [json.loads(line) for line in file]
        return [(row["input_length"], row["output_length"], row["hash_ids"]) for row in rows]


def tables_of(rows: Iterable[tuple[int, int, list[int]]], block_size: int) -> list[list[int]]:
    """Write the KV of every token but a request's last one, slot by slot: tokens of each block."""
    tables = []
    for input_length, output_length, _ in rows:
        table: list[int] = []
        for _ in range(input_length + output_length - 1):
            if not table or table[-1] == block_size:
                table.append(0)
            table[-1] += 1
        tables.append(table)
    return tables


def brute_force_hits(
    prompts: Iterable[_Prompt], trace_block_size: int, block_size: int, capacity: int | None
) -> HitCounts:
    """One entry per block, touched and evicted one at a time."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    num_blocks = num_hit_blocks = num_tokens = num_hit_tokens = 0
    for length, ids in prompts:
        starts = range(0, length, block_size)
        keys = [(ids[s // trace_block_size], s % trace_block_size) for s in starts]
        for start, key in zip(starts, keys, strict=True):
            if key not in cache:
                break
            num_hit_blocks += 1
            num_hit_tokens += min(block_size, length - start)
        for key in keys:
            cache[key] = None
            cache.move_to_end(key)
            if capacity is not None and len(cache) > capacity:
                cache.popitem(last=False)
        num_blocks += len(keys)
        num_tokens += length
    return HitCounts(num_blocks, num_hit_blocks, num_tokens, num_hit_tokens)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("name", TRACES)
def test_wasted_slots_and_tables_are_those_of_writing_slot_by_slot(
    name: str, block_size: int
) -> None:
    tables = tables_of(rows_of(DATA / name), block_size)
    num_wasted = sum(block_size - tokens for table in tables for tokens in table)
    num_blocks = sum(len(table) for table in tables)

    figures = analyze_block_size(read_workload(DATA / name), block_size)

    assert figures.internal_fragmentation_slots == num_wasted
    assert figures.allocated_slots == num_blocks * block_size
    assert figures.live_slots == sum(sum(table) for table in tables)
    assert figures.internal_fragmentation_share == num_wasted / (num_blocks * block_size)
    assert figures.mean_table_blocks == num_blocks / len(tables)
    assert figures.max_table_blocks == max(len(table) for table in tables)
    assert num_wasted <= (block_size - 1) * figures.num_requests


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("name", ["azure_conv.csv", "azure_code.csv"])
def test_the_ledger_wastes_what_writing_slot_by_slot_wastes(name: str, block_size: int) -> None:
    rows = rows_of(DATA / name)
    tables = tables_of(rows, block_size)
    kv = KVManager(BlockPool(sum(len(table) for table in tables)), block_size)
    holders = []
    for input_length, output_length, _ in rows:
        table = kv.open([])
        num_tokens = input_length + output_length - 1
        # The prompt in one go, then a token at a time.
        for end in range(input_length, num_tokens + 1):
            assert kv.grow(table, end) is not None
        holders.append((table.block_ids, num_tokens))

    figures = account(holders, kv.pool, block_size)

    num_wasted = sum(block_size - tokens for table in tables for tokens in table)
    assert figures.internal_fragmentation_slots == num_wasted
    assert figures.unique_live_tokens == sum(sum(table) for table in tables)
    assert figures.num_held_blocks == kv.pool.num_blocks


@pytest.mark.parametrize("num_cache_blocks", [None, 3000, 300, 1])
@pytest.mark.parametrize("block_size", [8, 64, 512])
@pytest.mark.parametrize("name", [name for name in TRACES if name.endswith(".jsonl")])
def test_hits_of_a_trace_are_those_of_a_cache_that_keeps_every_block_apart(
    name: str, block_size: int, num_cache_blocks: int | None
) -> None:
    prompts = [(length, ids) for length, _, ids in rows_of(DATA / name)]
    expected = brute_force_hits(prompts, 512, block_size, num_cache_blocks)
    workload = read_workload(DATA / name)
    assert count_lru_hits(workload.requests, 512, block_size, num_cache_blocks) == expected
    figures = analyze_block_size(workload, block_size, num_cache_blocks)
    assert figures.block_hit_rate == expected.num_hit_blocks / expected.num_blocks
    assert figures.token_hit_rate == expected.num_hit_tokens / expected.num_tokens


@settings(derandomize=True, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), st.integers(1, 8)
        ),
        min_size=1,
        max_size=20,
    ),
    block_size=st.sampled_from([1, 2, 4, 8]),
    num_cache_blocks=st.none() | st.integers(1, 40),
)
def test_hits_are_exact_where_prompts_fill_one_id_to_different_lengths(
    prompts: list[tuple[list[int], int]], block_size: int, num_cache_blocks: int | None
) -> None:
    lengths = [(8 * (len(ids) - 1) + last, ids) for ids, last in prompts]
    requests = [TraceRequest(0, length, 1, tuple(ids)) for length, ids in lengths]
    expected = brute_force_hits(lengths, 8, block_size, num_cache_blocks)
    assert count_lru_hits(requests, 8, block_size, num_cache_blocks) == expected


def value_hits_by_oracle(prompts: Iterable[_Prompt], capacity: int) -> tuple[int, int]:
    """Keep every block apart, and choose each victim among all of them."""
    content_of: dict[int, tuple[int, ...]] = {}
    block_of: dict[tuple[int, ...], int] = {}
    free = list(range(capacity))
    numbers: dict[tuple[int, ...], int] = {}

    def fingerprint_of(block_id: int) -> int:
        # Which ghosts share a slot hangs on this, so it is the one that the cache has.
        return numbers[content_of[block_id]] * 0x9E3779B97F4A7C15 % 2**64

    oracle = EvictionOracle(capacity, fingerprint_of)
    num_hit_blocks = num_hit_tokens = 0
    for length, ids in prompts:
        paths = [tuple(ids[: end + 1]) for end in range(len(ids))]
        for path in paths:
            numbers.setdefault(path, len(numbers) + 1)
        table = []
        for path in paths:
            if path not in block_of:
                break
            table.append(block_of[path])
        num_hit_blocks += len(table)
        num_hit_tokens += min(length, 512 * len(table))
        oracle.used(table)
        oracle.taken(table)
        for path in paths[len(table) : capacity]:
            if not free:
                (evicted,) = oracle.evict(1)
                del block_of[content_of.pop(evicted)]
                free.append(evicted)
            block_id = free.pop()
            content_of[block_id], block_of[path] = path, block_id
            table.append(block_id)
        oracle.released(table, None)
    return num_hit_blocks, num_hit_tokens


@pytest.mark.parametrize("num_cache_blocks", [400, 150, 20])
@pytest.mark.parametrize("name", [name for name in TRACES if name.endswith(".jsonl")])
def test_hits_by_value_are_those_of_a_cache_that_looks_at_every_block(
    name: str, num_cache_blocks: int
) -> None:
    prompts = [(length, ids) for length, _, ids in rows_of(DATA / name)]
    expected = value_hits_by_oracle(prompts, num_cache_blocks)
    figures = count_value_hits(read_workload(DATA / name).requests, 512, 512, num_cache_blocks)
    assert (figures.num_hit_blocks, figures.num_hit_tokens) == expected
    assert figures.num_blocks == sum(len(ids) for _, ids in prompts)
    assert figures.num_tokens == sum(length for length, _ in prompts)


@pytest.mark.parametrize("block_size", [64, 512])
def test_without_a_limit_the_policy_makes_no_difference(block_size: int) -> None:
    requests = read_workload(DATA / "mooncake_synthetic.jsonl").requests
    unlimited = count_lru_hits(requests, 512, block_size)
    assert count_value_hits(requests, 512, block_size) == unlimited
    assert count_value_hits(requests, 512, block_size, unlimited.num_blocks) == unlimited


def conversations(seed: int, num_sessions: int, p_another_turn: float) -> list[TraceRequest]:
    """Users who share one of three system prompts, read, think for a minute or so and answer."""
    draws = random.Random(seed)
    next_id = iter(range(10**9))
    system_prompts = [[next(next_id) for _ in range(4)] for _ in range(3)]
    arrivals = [(draws.uniform(0, 500), session) for session in range(num_sessions)]
    heapq.heapify(arrivals)
    histories: dict[int, list[int]] = {}
    requests = []
    while arrivals:
        time_s, session = heapq.heappop(arrivals)
        history = histories.setdefault(session, list(draws.choice(system_prompts)))
        history += [next(next_id) for _ in range(draws.randint(1, 4))]
        # A last block that the next turn will have filled, so under another id.
        ids = (*history, next(next_id))
        requests.append(TraceRequest(1000 * time_s, 512 * len(ids) - 100, 200, ids))
        if draws.random() < p_another_turn:
            heapq.heappush(arrivals, (time_s + draws.lognormvariate(4, 1), session))
    return requests


@pytest.mark.parametrize("p_another_turn", [0.4, 0.6, 0.8])
def test_eviction_by_value_loses_nothing_where_uses_tell_nothing(p_another_turn: float) -> None:
    # Here another turn is as likely after the first as after the tenth, which suits LRU best.
    num_lru_hits = num_hits = 0
    for seed in (1, 2, 3):
        requests = conversations(seed, 400, p_another_turn)
        for num_cache_blocks in (60, 200, 600):
            lru = count_lru_hits(requests, 512, 512, num_cache_blocks)
            by_value = count_value_hits(requests, 512, 512, num_cache_blocks)
            assert by_value.num_blocks == lru.num_blocks
            assert by_value.num_hit_blocks >= 0.98 * lru.num_hit_blocks
            num_lru_hits += lru.num_hit_blocks
            num_hits += by_value.num_hit_blocks
    assert num_hits >= num_lru_hits


def test_a_prompt_longer_than_the_cache_leaves_its_head_in_it() -> None:
    requests = [TraceRequest(0, 40, 1, (0, 1, 2, 3, 4))] * 2
    hits = count_value_hits(requests, 8, 8, 3)
    assert (hits.num_hit_blocks, hits.num_hit_tokens) == (3, 24)


def test_the_oldest_blocks_leave_head_first() -> None:
    ids = [(0, 1), (2, 3), (0, 1), (2, 3)]
    requests = [TraceRequest(0, 16, 1, each) for each in ids]
    # Three of four blocks are kept: the head of the older prompt is gone whenever it comes again.
    assert count_lru_hits(requests, 8, 8, 3).num_hit_blocks == 0
    assert count_lru_hits(requests, 8, 8, 4).num_hit_blocks == 4


def test_a_whole_prompt_that_is_cached_is_hit_whole_and_no_slot_beyond_it() -> None:
    requests = [TraceRequest(0, 11, 1, (0, 1))] * 2
    hits = count_lru_hits(requests, 8, 8)
    assert (hits.num_hit_blocks, hits.num_hit_tokens, hits.num_tokens) == (2, 11, 22)


def test_a_request_that_ends_at_a_block_edge_wastes_nothing() -> None:
    # 12 + 5 tokens, of which the last is never written: two blocks of 8, full.
    figures = analyze_block_size(Workload((TraceRequest(0, 12, 5),), None), 8)
    assert (figures.internal_fragmentation_slots, figures.max_table_blocks) == (0, 2)
    assert (figures.block_hit_rate, figures.token_hit_rate) == (None, None)


@pytest.mark.parametrize("block_size", [0, -8, 24, 1024])
def test_a_block_size_that_does_not_divide_that_of_the_ids_is_refused(block_size: int) -> None:
    workload = Workload((TraceRequest(0, 600, 1, (0, 1)),), 512)
    with pytest.raises(InvalidInputError) as refused:
        analyze_block_size(workload, block_size)
    assert (refused.value.field, refused.value.value) == ("block_size", block_size)


def test_a_cache_without_blocks_and_requests_without_ids_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="num_cache_blocks=0"):
        count_lru_hits([TraceRequest(0, 600, 1, (0, 1))], 512, 16, 0)
    with pytest.raises(InvalidInputError, match="hash_ids=None"):
        count_lru_hits([TraceRequest(0, 600, 1)], 512, 16)
    with pytest.raises(InvalidInputError, match="num_cache_blocks=0"):
        count_value_hits([TraceRequest(0, 600, 1, (0, 1))], 512, 16, 0)
    with pytest.raises(InvalidInputError, match=r"policy='fifo' .* lru or value"):
        analyze_block_size(Workload((TraceRequest(0, 600, 1),), None), 16, policy="fifo")


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rayserve-paged", "analyze", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_one_json_object_with_a_row_for_each_block_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = DATA / "mooncake_synthetic.jsonl"
    arguments = [str(path), "--block-size", "16,512", "--cache-blocks", "500", "--json"]
    assert run_cli(monkeypatch, *arguments) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (printed["num_requests"], printed["num_skipped"]) == (24, 0)
    assert (printed["policy"], printed["cache_blocks"]) == ("lru", 500)
    prompts = [(length, ids) for length, _, ids in rows_of(path)]
    for row, block_size in zip(printed["block_sizes"], (16, 512), strict=True):
        hits = brute_force_hits(prompts, 512, block_size, 500)
        assert row["block_size"] == block_size
        assert row["block_hit_rate"] == hits.num_hit_blocks / hits.num_blocks


def test_the_command_evicts_by_value_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, picture = str(DATA / "mooncake_synthetic.jsonl"), tmp_path / "hits.png"
    arguments = [trace, "--block-size", "64,512", "--cache-blocks", "400", "--policy", "value"]
    assert run_cli(monkeypatch, *arguments, "--json", "--plot", str(picture)) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["policy"] == "value"
    requests = read_workload(Path(trace)).requests
    for row, block_size in zip(printed["block_sizes"], (64, 512), strict=True):
        hits = count_value_hits(requests, 512, block_size, 400)
        assert row["token_hit_rate"] == hits.num_hit_tokens / hits.num_tokens
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_a_trace_without_ids(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "waste.svg"
    assert run_cli(monkeypatch, str(DATA / "azure_code.csv"), "--plot", str(picture)) == 0
    assert "100 requests" in capsys.readouterr().out
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_the_command_prints_a_table_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, str(DATA / "azure_conv.csv"), "--block-size", "16") == 0
    wasted = sum(16 - t[-1] for t in tables_of(rows_of(DATA / "azure_conv.csv"), 16))
    printed = capsys.readouterr().out
    assert "100 requests" in printed
    assert f" {wasted:,} " in printed


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--block-size", "16,"], "--block-size"),
        (["--block-size", "24"], "block_size"),
        (["--cache-blocks", "0"], "--cache-blocks"),
        (["--policy", "magic"], "--policy"),
        (["--plot", "hits.pdf"], "--plot"),
        (["--plot", "no/such/folder/hits.png"], "--plot"),
    ],
)
def test_the_command_refuses_in_one_line_what_it_cannot_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    field: str,
) -> None:
    assert run_cli(monkeypatch, str(DATA / "mooncake_synthetic.jsonl"), *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"rayserve-paged: {field}=")
    assert shown.err.count("\n") == 1
