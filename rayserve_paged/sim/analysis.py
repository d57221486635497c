"""What a workload costs and shares at a block size, by arithmetic alone."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rayserve_paged.core.block_table import num_blocks_for
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.eviction import ValueEviction
from rayserve_paged.core.ids import BlockId
from rayserve_paged.sim.workload import TraceRequest, Workload

POLICIES: Final = ("lru", "value")
"""What leaves a full cache: see `count_lru_hits` and `count_value_hits`."""

_Run = tuple[int, int]  # Hash id, and the first of its blocks that belongs to the run.


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizeFigures:
    """A workload at one block size.

    A request at its end holds input_length + output_length - 1 KV slots: the KV of the last token
    is never written.

    Args:
        block_size: Slots per block.
        num_requests: Requests of the workload.
        live_slots: KV slots that all requests hold at their ends.
        allocated_slots: Slots of the blocks that these need, each request on its own.
        internal_fragmentation_slots: Allocated slots that hold no token.
        internal_fragmentation_share: The same as a share of the allocated slots.
        mean_table_blocks: Blocks of a request's table at its end, on average.
        max_table_blocks: Blocks of the longest table.
        block_hit_rate: Share of the prompts' blocks that are cached; None without hash ids.
        token_hit_rate: Share of the prompts' tokens that these blocks hold; None without hash ids.
    """

    block_size: int
    num_requests: int
    live_slots: int
    allocated_slots: int
    internal_fragmentation_slots: int
    internal_fragmentation_share: float
    mean_table_blocks: float
    max_table_blocks: int
    block_hit_rate: float | None
    token_hit_rate: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class HitCounts:
    """What prompts found cached.

    Args:
        num_blocks: Blocks of all prompts, the partly filled ones included.
        num_hit_blocks: Those that were found.
        num_tokens: Tokens of all prompts.
        num_hit_tokens: Those in blocks that were found.
    """

    num_blocks: int
    num_hit_blocks: int
    num_tokens: int
    num_hit_tokens: int


def analyze_block_size(
    workload: Workload,
    block_size: int,
    num_cache_blocks: int | None = None,
    policy: str = "lru",
) -> BlockSizeFigures:
    """Return the figures of a workload at one block size.

    Args:
        workload: The requests.
        block_size: Slots per block, at least 1; with hash ids a divisor of their block size.
        num_cache_blocks: Blocks of `block_size` slots that the cache holds; None: no limit.
        policy: One of `POLICIES`.

    Raises:
        InvalidInputError: A block size, a number of blocks or a policy that cannot be.
    """
    if policy not in POLICIES:
        raise InvalidInputError("policy", policy, " or ".join(POLICIES))
    _check_block_size(block_size, workload.trace_block_size)
    live = [request.input_length + request.output_length - 1 for request in workload.requests]
    tables = [num_blocks_for(num_slots, block_size) for num_slots in live]
    allocated = sum(tables) * block_size
    wasted = allocated - sum(live)
    hits = None
    if workload.trace_block_size is not None:
        count_hits = count_lru_hits if policy == "lru" else count_value_hits
        hits = count_hits(
            workload.requests, workload.trace_block_size, block_size, num_cache_blocks
        )
    return BlockSizeFigures(
        block_size=block_size,
        num_requests=len(live),
        live_slots=sum(live),
        allocated_slots=allocated,
        internal_fragmentation_slots=wasted,
        internal_fragmentation_share=wasted / allocated,
        mean_table_blocks=sum(tables) / len(tables),
        max_table_blocks=max(tables),
        block_hit_rate=None if hits is None else hits.num_hit_blocks / hits.num_blocks,
        token_hit_rate=None if hits is None else hits.num_hit_tokens / hits.num_tokens,
    )


def count_lru_hits(
    requests: Iterable[TraceRequest],
    trace_block_size: int,
    block_size: int,
    num_cache_blocks: int | None = None,
) -> HitCounts:
    """Count what prompts find in an LRU cache of blocks that answers one request at a time.

    A prompt hits the longest run of its leading blocks that are cached, a partly filled last one
    included: blocks with equal ids are equal. An engine computes at least a prompt's last token
    itself and so reuses up to one token less. Then all blocks of the prompt are touched, head
    first, and the oldest leave where the cache is over its size. Generated tokens are not cached:
    a trace says nothing of them.

    Args:
        requests: In order of arrival, all with hash ids.
        trace_block_size: Tokens of a hash id.
        block_size: Slots per block, a divisor of `trace_block_size`.
        num_cache_blocks: Blocks of `block_size` slots that the cache holds; None: no limit.

    Raises:
        InvalidInputError: A block size or a number of blocks that cannot be.
    """
    _check_cache(trace_block_size, block_size, num_cache_blocks)
    prompts = [
        (request.input_length, _blocks_of_ids(request, trace_block_size, block_size))
        for request in requests
    ]
    ends = _ends_of_runs(blocks for _, blocks in prompts)
    cache = _LruRuns(num_cache_blocks)
    num_hit_blocks = num_hit_tokens = 0
    for input_length, blocks in prompts:
        runs = _runs(blocks, ends)
        num_hits = cache.num_leading_hits(runs)
        num_hit_blocks += num_hits
        num_hit_tokens += min(input_length, num_hits * block_size)
        cache.touch(runs)
    return HitCounts(
        num_blocks=sum(num_blocks_for(length, block_size) for length, _ in prompts),
        num_hit_blocks=num_hit_blocks,
        num_tokens=sum(length for length, _ in prompts),
        num_hit_tokens=num_hit_tokens,
    )


def count_value_hits(
    requests: Iterable[TraceRequest],
    trace_block_size: int,
    block_size: int,
    num_cache_blocks: int | None = None,
) -> HitCounts:
    """Count what prompts find in a cache of blocks that evicts by value, one request at a time.

    A prompt holds the blocks that it hits and those that it computes, then lets go of all of them
    at once; what it needs beyond the free blocks is evicted by `ValueEviction`. Where a prompt has
    more blocks than the cache, the last ones are not kept. All else is as in `count_lru_hits`, but
    that a block is known by all that precedes it, whatever its id.

    Args:
        requests: In order of arrival, all with hash ids.
        trace_block_size: Tokens of a hash id.
        block_size: Slots per block, a divisor of `trace_block_size`.
        num_cache_blocks: Blocks of `block_size` slots that the cache holds; None: no limit.

    Raises:
        InvalidInputError: A block size or a number of blocks that cannot be.
    """
    _check_cache(trace_block_size, block_size, num_cache_blocks)
    if num_cache_blocks is None:
        # Nothing is ever evicted.
        return count_lru_hits(requests, trace_block_size, block_size)
    cache = _ValueCache(num_cache_blocks)
    chains = _Chains(trace_block_size // block_size)
    num_blocks = num_hit_blocks = num_tokens = num_hit_tokens = 0
    for request in requests:
        contents = chains.contents(_blocks_of_ids(request, trace_block_size, block_size))
        num_hits = cache.answer(contents)
        num_blocks += len(contents)
        num_hit_blocks += num_hits
        num_tokens += request.input_length
        num_hit_tokens += min(request.input_length, num_hits * block_size)
    return HitCounts(num_blocks, num_hit_blocks, num_tokens, num_hit_tokens)


def _check_cache(trace_block_size: int, block_size: int, num_cache_blocks: int | None) -> None:
    _check_block_size(block_size, trace_block_size)
    if num_cache_blocks is not None and num_cache_blocks < 1:
        raise InvalidInputError("num_cache_blocks", num_cache_blocks, "at least 1 block")


def _check_block_size(block_size: int, trace_block_size: int | None) -> None:
    if block_size < 1:
        raise InvalidInputError("block_size", block_size, "at least 1 slot")
    if trace_block_size is not None and trace_block_size % block_size:
        accepted = f"a divisor of {trace_block_size}, the tokens of a hash id"
        raise InvalidInputError("block_size", block_size, accepted)


def _blocks_of_ids(
    request: TraceRequest, trace_block_size: int, block_size: int
) -> list[tuple[int, int]]:
    """Return each hash id of a prompt with the number of blocks that its tokens fill or begin."""
    if request.hash_ids is None:
        raise InvalidInputError("hash_ids", None, "hash ids on every request")
    blocks = [(hash_id, trace_block_size // block_size) for hash_id in request.hash_ids]
    head_tokens = (len(blocks) - 1) * trace_block_size
    last_blocks = num_blocks_for(request.input_length - head_tokens, block_size)
    blocks[-1] = (request.hash_ids[-1], last_blocks)
    return blocks


# A run is the blocks of one hash id that every prompt touches either all or not at all, so that one
# entry stands for up to 512 blocks. An id that prompts fill to 3 and to 5 blocks has two:
#
#     block    0   1   2 | 3   4
#     run      (id, 0)   | (id, 3)


def _ends_of_runs(prompts: Iterable[Sequence[tuple[int, int]]]) -> dict[int, list[int]]:
    lengths: dict[int, set[int]] = {}
    for prompt in prompts:
        for hash_id, num_blocks in prompt:
            lengths.setdefault(hash_id, set()).add(num_blocks)
    return {hash_id: sorted(ends) for hash_id, ends in lengths.items()}


def _runs(blocks: Sequence[tuple[int, int]], ends: dict[int, list[int]]) -> list[tuple[_Run, int]]:
    """Return the runs of a prompt, head first, each with its number of blocks."""
    runs = []
    for hash_id, num_blocks in blocks:
        start = 0
        for end in ends[hash_id]:
            if end > num_blocks:
                break
            runs.append(((hash_id, start), end - start))
            start = end
    return runs


class _LruRuns:
    """An LRU cache of blocks, kept as runs.

    To touch blocks one by one, evicting in between, leaves the blocks that were touched last,
    which is also what is left where the eviction waits for the end of the prompt. The blocks of a
    run are touched in order, so it loses its head first, and without its head it gives no hit.
    """

    def __init__(self, num_blocks: int | None) -> None:
        self._num_blocks = num_blocks
        self._num_used = 0
        self._cached: OrderedDict[_Run, int] = OrderedDict()  # Blocks left, the last of the run.

    def num_leading_hits(self, runs: Sequence[tuple[_Run, int]]) -> int:
        num_hits = 0
        for run, num_blocks in runs:
            if self._cached.get(run) != num_blocks:
                break
            num_hits += num_blocks
        return num_hits

    def touch(self, runs: Sequence[tuple[_Run, int]]) -> None:
        for run, num_blocks in runs:
            self._num_used += num_blocks - self._cached.get(run, 0)
            self._cached[run] = num_blocks
            self._cached.move_to_end(run)
        if self._num_blocks is None:
            return
        while self._num_used > self._num_blocks:
            run, num_left = next(iter(self._cached.items()))
            num_evicted = min(num_left, self._num_used - self._num_blocks)
            self._num_used -= num_evicted
            if num_evicted == num_left:
                del self._cached[run]
            else:
                self._cached[run] = num_left - num_evicted


class _Chains:
    """Numbers the blocks of prompts, each by its own hash id and all that precede it."""

    def __init__(self, blocks_per_id: int) -> None:
        self._blocks_per_id = blocks_per_id
        self._nodes: dict[tuple[int, int], int] = {}

    def contents(self, blocks: Sequence[tuple[int, int]]) -> list[int]:
        contents: list[int] = []
        node = 0  # The root; others are numbered from 1.
        for hash_id, num_blocks in blocks:
            node = self._nodes.setdefault((node, hash_id), len(self._nodes) + 1)
            first = node * self._blocks_per_id
            contents += range(first, first + num_blocks)
        return contents


class _ValueCache:
    """A pool of blocks that evicts by value and answers one prompt at a time."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = [BlockId(block_id) for block_id in reversed(range(num_blocks))]
        self._content_of = [0] * num_blocks
        self._block_of: dict[int, BlockId] = {}
        self._order = ValueEviction(num_blocks, self._fingerprint_of)

    def answer(self, contents: Sequence[int]) -> int:
        """Return how many leading blocks were cached, and keep them all."""
        block_ids = list(self._leading(contents))
        num_hits = len(block_ids)
        self._order.used(block_ids)
        self._order.taken(block_ids)
        computed = contents[num_hits : self._num_blocks]
        for block_id in self._order.evict(max(0, len(computed) - len(self._free))):
            del self._block_of[self._content_of[block_id]]
            self._free.append(block_id)
        for content in computed:
            block_id = self._free.pop()
            self._content_of[block_id] = content
            self._block_of[content] = block_id
            block_ids.append(block_id)
        self._order.released(block_ids)
        return num_hits

    def _leading(self, contents: Iterable[int]) -> Iterator[BlockId]:
        for content in contents:
            block_id = self._block_of.get(content)
            if block_id is None:
                return
            yield block_id

    def _fingerprint_of(self, block_id: BlockId) -> int:
        # Consecutive numbers, spread over 64 bits by the golden ratio.
        return self._content_of[block_id] * 0x9E3779B97F4A7C15 % 2**64
