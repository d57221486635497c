"""Known faults of other runtimes: identity, ledger and prefix cache. Ids are those of the docs.

The numbers are the cases' own. "Free" is FREE + CACHED.
"""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from replica_driver import ReplicaDriver, depths, make_limits, make_request, make_scope, prompt_keys

from rayserve_paged.core.block_identity import RequestScope, extend_chain
from rayserve_paged.core.block_pool import BlockPool, BlockState
from rayserve_paged.core.block_table import BlockTable, num_blocks_for, num_tokens_in_last_block
from rayserve_paged.core.directory import Directory
from rayserve_paged.core.errors import LedgerError
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.replica_messages import AssignRequest
from rayserve_paged.sim.fingerprint_rank import oracle


def test_b01_blocks_share_a_key_only_where_parent_and_tokens_are_equal() -> None:
    prompts = [[i, 7 * i % 300, 1, 2, 3] for i in range(300)]
    keys = [extend_chain(make_scope().root(), prompt, 4)[0] for prompt in prompts]
    # Cut to 8 bits, at least 44 of them would collide.
    assert len(set(keys)) == 300
    driver = ReplicaDriver(make_limits(num_blocks=512, vocab_size=300))
    for num_cached in (0, 4):
        for prompt in prompts:
            request = make_request(prompt, max_tokens=1)
            (stream,) = driver.generate(request)
            assert stream.num_cached_tokens == num_cached
            assert stream.token_ids == oracle(request, driver.limits).token_ids


def test_b01_a_key_is_the_whole_sha_256_of_its_parent_and_its_tokens() -> None:
    root = make_scope().root()
    first, second = extend_chain(root, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    payload = np.array([1, 2, 3, 4, 5, 6, 7, 8], "<i4").tobytes()
    assert first == hashlib.sha256(root + payload[:16]).digest()
    assert second == hashlib.sha256(first + payload[16:]).digest()


_PRINT_KEYS = """
from rayserve_paged.core.block_identity import BlockScope, RequestScope, extend_chain
scope = BlockScope(b"toy", "fp32", "fp32", "exact", "absolute", 16)
for salt in (None, "t1"):
    print(*(key.hex() for key in extend_chain(scope.root(RequestScope(salt)), list(range(64)), 16)))
"""


def keys_of_another_process(hash_seed: str | None) -> list[list[BlockKey]]:
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    command = [sys.executable, "-c", _PRINT_KEYS]
    printed = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    lines = printed.stdout.splitlines()
    return [[BlockKey(bytes.fromhex(key)) for key in line.split()] for line in lines]


def test_b02_keys_are_equal_in_every_process_and_differ_between_salts() -> None:
    prompt = list(range(64))
    scope = make_scope(block_size=16)
    own = [extend_chain(scope.root(RequestScope(salt)), prompt, 16) for salt in (None, "t1")]
    workers = [keys_of_another_process(hash_seed) for hash_seed in (None, "0", "1")]
    restarted = keys_of_another_process(None)
    assert all(keys == own for keys in [*workers, restarted])
    assert [len(keys) for keys in own] == [4, 4]
    assert len({*own[0], *own[1]}) == 8
    directory = Directory()
    directory.update(0, workers[1][0], ())
    assert depths(directory, restarted[0][: (64 - 1) // 16], 1) == [3]
    driver = ReplicaDriver(make_limits(num_blocks=8, block_size=16))
    request = make_request(prompt, max_tokens=1)
    driver.generate(request)
    stream = driver.reader().open(request)
    driver.send(AssignRequest(request, tuple(restarted[0])))
    driver.run()
    assert stream.num_cached_tokens == 48


def test_b07_tenants_do_not_share_and_a_router_sees_no_overlap() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=16, block_size=16))
    a, b = (make_request(range(64), 1, tenant_salt=salt) for salt in ("a", "b"))
    cached, computed = [], []
    for request in (a, b, a):
        num_steps = len(driver.rank.history)
        cached.append(driver.generate(request)[0].num_cached_tokens)
        computed.append(sum(row.num_tokens for row in driver.rank.history[num_steps]))
    assert cached == [0, 0, 48]
    assert computed == [64, 64, 16]
    directory = Directory()
    directory.update(0, prompt_keys(a, driver.scope), ())
    assert depths(directory, prompt_keys(b, driver.scope), 1) == [0]


def test_b11_a_release_that_names_a_block_twice_frees_it_once() -> None:
    pool = BlockPool(8)
    allocation = pool.allocate(1)
    assert allocation is not None
    (b,) = allocation.block_ids
    pool.share([b])
    pool.release([b, b])
    assert pool.num_free == 8
    assert pool.free_ids.count(b) == 1


def test_b11_a_release_of_more_than_is_held_is_refused_at_the_second_one() -> None:
    pool = BlockPool(8)
    allocation = pool.allocate(2)
    assert allocation is not None
    c, other = allocation.block_ids
    with pytest.raises(LedgerError):
        pool.release([c, c])
    assert pool.free_ids.count(c) == 1
    assert (pool.num_free, pool.count(other)) == (7, 1)


def test_b11_a_table_has_no_null_blocks_and_a_release_of_one_block_frees_one() -> None:
    pool = BlockPool(8)
    manager = KVManager(pool, block_size=4)
    table = manager.open([])
    assert manager.grow(table, 1) == [0]
    assert table.block_ids == [0]
    manager.close(table)
    assert pool.num_free == 8


def test_b12_a_recycled_block_forgets_its_old_key_and_starts_with_one_holder() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=3))
    pool = driver.replica.kv.pool
    a, b = make_request(range(8), 1), make_request(range(50, 62), 1)
    driver.generate(a)
    assert pool.num_cached == 2
    driver.submit(b)
    assert driver.replica.kv.match(prompt_keys(a, driver.scope), 9) == []
    assert [pool.count(BlockId(block_id)) for block_id in range(3)] == [1, 1, 1]
    driver.run()
    assert driver.num_free == 3
    assert driver.generate(b)[0].num_cached_tokens == 8


def test_b17_a_request_whose_step_fails_after_it_got_blocks_gives_them_back() -> None:
    request = make_request(range(12), 4)
    driver = ReplicaDriver(make_limits(num_blocks=6), poison=[(0, 0)])
    for _ in range(10):
        stream = driver.submit(request)
        assert driver.num_free == 3
        driver.run()
        assert stream.error == "draw 0 is poisoned"
        assert driver.num_free == 6
    driver.rank.poison.clear()
    (stream,) = driver.generate(request)
    assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)


def test_b17_a_request_without_a_row_takes_no_blocks() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=6), max_num_seqs=1)
    first, second = (make_request([i], 12, request_id=f"q{i}") for i in range(2))
    driver.submit(first)
    stream = driver.submit(second)
    for _ in range(10):
        driver.step()
        assert driver.sequence(second).table.block_ids == []
        held = driver.sequence(first).table.block_ids
        assert driver.num_free == 6 - len(held)
    driver.run()
    assert stream.token_ids == oracle(second, driver.limits).token_ids


def test_b22_matched_blocks_are_protected_before_anything_is_allocated() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=4))
    pool = driver.replica.kv.pool
    driver.generate(make_request(range(8), 1))
    chain, plain = pool.cached_ids, pool.free_ids
    request = make_request(range(16), 1)
    stream = driver.submit(request)
    assert driver.sequence(request).table.block_ids[:2] == sorted(chain)
    assert set(driver.sequence(request).table.block_ids[2:]) == set(plain)
    driver.run()
    assert stream.num_cached_tokens == 8


def test_b22_a_chain_of_the_least_value_is_protected_from_its_own_request() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=5))
    pool = driver.replica.kv.pool
    driver.generate(make_request(range(8), 1))
    for _ in range(3):
        driver.generate(make_request(range(50, 59), 1))
    assert (pool.cached_ids, pool.free_ids) == ((1, 0, 3, 2), (4,))
    request = make_request(range(20), 1)
    stream = driver.submit(request)
    assert driver.sequence(request).table.block_ids == [0, 1, 4, 3, 2]
    driver.run()
    assert stream.num_cached_tokens == 8


def test_b39_cached_blocks_count_as_available_at_admission() -> None:
    driver = ReplicaDriver(make_limits(100, 16, vocab_size=2000), max_num_batched_tokens=2048)
    driver.generate(make_request(range(95 * 16), 1))
    figures = driver.replica.accounting()
    assert (figures.num_cached_blocks, figures.num_free_blocks) == (95, 5)
    assert figures.num_held_blocks == 0
    empty = driver.replica.kv.pool.free_ids
    request = make_request([5] * 160, 1)
    driver.submit(request)
    assert driver.plan is not None
    assert len(driver.plan.starts) == 1
    held = driver.sequence(request).table.block_ids
    assert len(held) == 10
    assert set(empty) < set(held)
    assert driver.replica.kv.pool.num_cached == 90


def test_b50_the_last_token_of_a_wholly_cached_prompt_is_computed() -> None:
    driver = ReplicaDriver(make_limits())
    prompts = [range(8), range(8), range(8), range(9), range(12)]
    cached = []
    for prompt in prompts:
        request = make_request(prompt, 3)
        num_steps = len(driver.rank.history)
        (stream,) = driver.generate(request)
        cached.append(stream.num_cached_tokens)
        assert driver.rank.history[num_steps][0].num_tokens == len(prompt) - cached[-1]
        assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert cached == [0, 4, 4, 8, 8]


def test_b50_a_prompt_of_one_token_is_never_cached() -> None:
    driver = ReplicaDriver(make_limits(block_size=1))
    for _ in range(2):
        (stream,) = driver.generate(make_request([1], 1))
        assert stream.num_cached_tokens == 0


def test_b51_tokens_in_the_last_block_at_exact_multiples() -> None:
    lengths = [0, 1, 3, 4, 5, 8, 9]
    assert [num_tokens_in_last_block(n, 4) for n in lengths] == [0, 1, 3, 4, 1, 4, 1]
    assert [num_blocks_for(n, 4) for n in lengths] == [0, 1, 1, 1, 2, 2, 3]
    tables = [BlockTable(4, map(BlockId, range(num_blocks_for(n, 4)))) for n in lengths]
    new_blocks = [table.num_missing(n + 1) for table, n in zip(tables, lengths, strict=True)]
    assert new_blocks == [1, 0, 0, 1, 0, 1, 0]
    for table, length in zip(tables, lengths, strict=True):
        if length in (0, 4, 8):
            with pytest.raises(IndexError):
                table.slot(length)
            table.append([BlockId(9)])
            assert table.slot(length) == 9 * 4
        else:
            assert table.slot(length) == length


def test_b55_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=3))
    index = driver.replica.kv.index
    request = make_request(range(12), 1)
    keys = prompt_keys(request, driver.scope)
    driver.generate(request)
    for repeat in range(200):
        assert len(index.match(keys)) == 3
        driver.generate(make_request([90, repeat % 90], 1))
        assert len(index.match(keys)) == 2
        assert driver.generate(request)[0].num_cached_tokens == 8


def test_b55_a_chain_that_two_computed_at_once_is_evicted_from_its_tail() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8))
    pool, index = driver.replica.kv.pool, driver.replica.kv.index
    short, long = (make_request(range(5), n, request_id=f"q{n}") for n in (4, 12))
    # Both write the same outputs. The short one publishes the second block and lets go of it, the
    # long one fills two more on its own copy.
    stream = driver.generate(short, long)[1]
    known = make_request([*range(5), *stream.token_ids], 1)
    keys = prompt_keys(known, driver.scope)
    chain = index.match(keys)
    assert pool.cached_ids == tuple(reversed(chain))
    assert len(chain) == 4
    table = driver.replica.kv.open([])
    for num_left in (3, 2, 1, 0):
        assert driver.replica.kv.grow(table, 4 * (8 - num_left)) is not None
        assert index.match(keys) == chain[:num_left]


def test_b56_blocks_that_can_never_match_are_used_before_cached_ones() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=4))
    pool = driver.replica.kv.pool
    a = make_request(range(9), 1)
    driver.generate(a)
    worthless = set(pool.free_ids)
    assert len(worthless) == 2
    b = make_request(range(60, 67), 1)
    driver.submit(b)
    assert set(driver.sequence(b).table.block_ids) == worthless
    driver.run()
    assert driver.generate(a)[0].num_cached_tokens == 8


def test_b56_prompts_that_nobody_sends_again_do_not_push_out_one_that_comes_back() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8))
    a = make_request(range(9), 1)
    for _ in range(4):
        driver.generate(a)
    # By age alone the two blocks of A would be gone after seven.
    for number in range(9):
        driver.generate(make_request([60 + number] * 4, 1))
    assert driver.generate(a)[0].num_cached_tokens == 8


@pytest.mark.parametrize("num_cached", [0, 16, 48, 96])
@pytest.mark.parametrize("chunk", [1, 16, 17, 52])
def test_b58_chunks_after_a_hit_begin_where_the_hit_ends(num_cached: int, chunk: int) -> None:
    driver = ReplicaDriver(make_limits(16, 16, vocab_size=200), max_num_batched_tokens=chunk)
    request = make_request(range(100), 1)
    if num_cached:
        driver.generate(make_request(range(num_cached), 1))
    num_steps = len(driver.rank.history)
    (stream,) = driver.generate(request)
    rows = [row for (row,) in driver.rank.history[num_steps:]]
    starts = list(range(num_cached, 100, chunk))
    assert [row.num_computed for row in rows] == starts
    assert [row.num_tokens for row in rows] == [min(chunk, 100 - start) for start in starts]
    if (num_cached, chunk) == (48, 17):
        assert [row.num_tokens for row in rows] == [17, 17, 17, 1]
    assert stream.num_cached_tokens == num_cached
    assert stream.token_ids == oracle(request, driver.limits).token_ids


def test_b109_a_restarted_replica_scores_nothing_until_it_reports() -> None:
    directory = Directory()
    keys = extend_chain(make_scope().root(), range(12), 4)
    directory.update(1, keys, ())
    assert depths(directory, keys, 2) == [0, 3]
    directory.forget(1)
    assert depths(directory, keys, 2) == [0, 0]
    assert len(directory) == 0
    directory.update(1, keys[:1], ())
    assert depths(directory, keys, 2) == [0, 1]


def test_an_evicted_block_is_free_of_its_key_before_it_is_granted() -> None:
    pool = BlockPool(1)
    manager = KVManager(pool, block_size=4)
    (key,) = extend_chain(make_scope().root(), range(4), 4)
    table = manager.open([])
    manager.grow(table, 4)
    manager.seal(table.block_ids[0], key)
    manager.close(table)
    assert pool.state(BlockId(0)) is BlockState.CACHED
    manager.grow(manager.open([]), 1)
    assert manager.match([key], 5) == []
