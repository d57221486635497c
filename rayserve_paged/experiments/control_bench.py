"""What the control plane costs: µs per step of decoding, µs per request of a prefix-heavy load,
bytes per block of a large pool.

No model runs: results are made up, and everything that the replica does with them is real.
"""

import gc
import hashlib
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable

import numpy as np

from rayserve_paged.core.block_identity import BlockScope, extend_chain
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.chain_memo import ChainMemo
from rayserve_paged.core.config import BatchConfig, TimeoutConfig
from rayserve_paged.core.ids import (
    Attempt,
    BlockKey,
    ConsumerId,
    Incarnation,
    ReplicaId,
    RequestId,
)
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    PollTokens,
    ReplicaCommand,
    RunStep,
    StepFinished,
)
from rayserve_paged.core.request import ModelLimits, Request, admit
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import StepPlan, StepResult
from rayserve_paged.core.token_ids import TokenIds

BLOCK_SIZE = 16
PROMPT_LEN = 1024
BATCH_SIZES = (1, 32, 256, 1024)

_NUM_STEPS = 300
_MAX_TOKENS = 2000
_NUM_FAMILIES = 100
_SHARED_LEN = 768
_NUM_REQUESTS = 10_000
_NUM_LIVE = 200
_NUM_BLOCKS = 20_000
_VOCAB_SIZE = 49_152
_NUM_LARGE_POOL = 1_000_000
_READER = ConsumerId("bench")


def _scope() -> BlockScope:
    return BlockScope(b"bench", "bf16", "bf16", "bench", "rope", BLOCK_SIZE)


def _request(index: int, prompt: list[int], limits: ModelLimits) -> Request:
    request = Request(
        request_id=RequestId(str(index)),
        consumer_id=_READER,
        attempt=Attempt(0),
        prompt_token_ids=TokenIds.of(prompt),
        params=SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, seed=0),
    )
    return admit(request, limits)


def step_us(num_running: int, num_steps: int = _NUM_STEPS) -> float:
    """Return the median µs of a decode step: the commit of one and the plan of the next.

    The commit has stop checks, sealing and hashing of blocks that fill, and the delivery to a
    reader whose poll is pending. One step is decoded at a time.

    Args:
        num_running: Decoding sequences, with prompts of PROMPT_LEN tokens.
        num_steps: Steps to take the median of.
    """
    num_blocks = num_running * (PROMPT_LEN + _MAX_TOKENS) // BLOCK_SIZE + num_running
    limits = ModelLimits(
        vocab_size=_VOCAB_SIZE,
        max_model_len=8192,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        eos_token_ids=(2,),
        max_num_seqs=num_running,
    )
    batch = BatchConfig(max_num_seqs=num_running, max_num_batched_tokens=8192)
    scope = _scope()
    replica = Replica(ReplicaId("r0"), Incarnation(0), limits, scope, batch, TimeoutConfig())
    drawn = random.Random(0)
    plan: StepPlan | None = None
    for index in range(num_running):
        prompt = [drawn.randrange(_VOCAB_SIZE) for _ in range(PROMPT_LEN)]
        keys = tuple(extend_chain(scope.root(), prompt, BLOCK_SIZE))
        commands = replica.handle(AssignRequest(_request(index, prompt, limits), keys), 0.0)
        plan = _next_plan(commands) or plan
    assert plan is not None
    while len(plan.rows) < num_running or plan.num_tokens.max() > 1:
        plan = _finish(replica, plan)
    samples = []
    ack = 0
    gc.collect()
    gc.disable()
    try:
        for number in range(num_steps):
            answers = replica.handle(PollTokens(_READER, number, ack), 0.0)
            ack += len(answers)
            result = _result(plan)
            begin = time.perf_counter()
            commands = replica.handle(StepFinished(result), 0.0)
            samples.append(time.perf_counter() - begin)
            next_plan = _next_plan(commands)
            assert next_plan is not None
            plan = next_plan
    finally:
        gc.enable()
    return statistics.median(samples) * 1e6


def _next_plan(commands: list[ReplicaCommand]) -> StepPlan | None:
    return next((command.plan for command in commands if isinstance(command, RunStep)), None)


def _result(plan: StepPlan) -> StepResult:
    token_ids = np.full((1, len(plan.sample_indices)), 7, np.int32)
    return StepResult(plan.step_id, token_ids, {}, {})


def _finish(replica: Replica, plan: StepPlan) -> StepPlan:
    next_plan = _next_plan(replica.handle(StepFinished(_result(plan)), 0.0))
    assert next_plan is not None
    return next_plan


def request_us(num_requests: int = _NUM_REQUESTS) -> dict[str, float]:
    """Return what a request of PROMPT_LEN tokens costs: hash, match, allocate, seal and free.

    Prompts come from 100 families of 768 shared tokens; the pool has 20,000 blocks, and some 200
    requests are live at a time. Prompts come as the controller gets them, and what it would be told
    of keys that come and go is gathered after each request.

    Returns:
        Medians in µs: `request_us`, of a request; `hash_us`, of its hashing, as at its placement;
        `sha256_floor_us`, of bare SHA-256 over the bytes of all its blocks; `pack_us`, of what its
        consumer does before, once: checking a list of ids and packing it. `hit_rate`: tokens found
        over tokens asked for.
    """
    drawn = random.Random(0)
    families = [
        [drawn.randrange(_VOCAB_SIZE) for _ in range(_SHARED_LEN)] for _ in range(_NUM_FAMILIES)
    ]
    prompts = [
        families[index % _NUM_FAMILIES]
        + [drawn.randrange(_VOCAB_SIZE) for _ in range(PROMPT_LEN - _SHARED_LEN)]
        for index in range(num_requests)
    ]
    drawn.shuffle(prompts)
    kv = KVManager(BlockPool(_NUM_BLOCKS), BLOCK_SIZE)
    memo = ChainMemo(BLOCK_SIZE)
    root = _scope().root()
    live: deque[BlockTable] = deque()
    pack_s: list[float] = []
    hash_s: list[float] = []
    request_s: list[float] = []
    num_cached = 0
    gc.collect()
    gc.disable()
    clock = time.perf_counter
    try:
        for prompt in prompts:
            listed = clock()
            token_ids = TokenIds.of(prompt, _VOCAB_SIZE)
            begin = clock()
            keys = memo.keys(root, token_ids)
            hashed = clock()
            table, matched = _serve(kv, keys)
            live.append(table)
            if len(live) > _NUM_LIVE:
                kv.close(live.popleft())
            kv.index.take_changes()
            request_s.append(clock() - begin)
            hash_s.append(hashed - begin)
            pack_s.append(begin - listed)
            num_cached += matched * BLOCK_SIZE
    finally:
        gc.enable()
    return {
        "request_us": statistics.median(request_s) * 1e6,
        "hash_us": statistics.median(hash_s) * 1e6,
        "sha256_floor_us": _sha256_floor_us(),
        "pack_us": statistics.median(pack_s) * 1e6,
        "hit_rate": num_cached / (num_requests * PROMPT_LEN),
    }


def _serve(kv: KVManager, keys: list[BlockKey]) -> tuple[BlockTable, int]:
    matched = kv.match(keys, PROMPT_LEN)
    table = kv.open(matched)
    assert kv.grow(table, PROMPT_LEN) is not None
    first = len(matched)
    kv.seal_run(table.run(first, len(keys)), keys[first:])
    return table, first


def manager_bytes_per_block(num_blocks: int = _NUM_LARGE_POOL) -> float:
    """Return what the ledger, the keys and the order of eviction take for each block of a pool.

    Every block is CACHED under a key of its own, in chains of PROMPT_LEN tokens. All that the
    manager keeps is counted, the keys included, as tracemalloc sees it: what is asked of the
    allocator, which rounds up to 16 bytes.

    Args:
        num_blocks: Blocks of the pool.
    """
    root = _scope().root()
    num_prompt_blocks = PROMPT_LEN // BLOCK_SIZE
    num_prompts = num_blocks // num_prompt_blocks
    gc.collect()
    tracemalloc.start()
    try:
        kv = KVManager(BlockPool(num_blocks), BLOCK_SIZE)
        for index in range(num_prompts):
            start = index * PROMPT_LEN
            prompt = np.arange(start, start + PROMPT_LEN, dtype=np.int32)
            keys = extend_chain(root, prompt, BLOCK_SIZE)
            kv.close(_serve(kv, keys)[0])
            # As a report to the controller does.
            kv.index.take_changes()
        return tracemalloc.get_traced_memory()[0] / kv.pool.num_cached
    finally:
        tracemalloc.stop()


def _sha256_floor_us(num_rounds: int = 2000) -> float:
    """Return the µs of hashing one prompt's blocks, each with a parent key, and nothing else."""
    block = bytes(4 * BLOCK_SIZE + 32)

    def one() -> None:
        for _ in range(PROMPT_LEN // BLOCK_SIZE):
            hashlib.sha256(block).digest()

    return _median_us(one, num_rounds)


def _median_us(work: Callable[[], None], num_rounds: int) -> float:
    samples = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        work()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e6
