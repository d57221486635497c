"""What the controller can take: placements per second, keys of its directory per second.

The controller, its requests and the reports are real; nothing travels over a network.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    ControllerEvent,
    SendToReplica,
    SubmitRequest,
)
from rayserve_paged.core.ids import (
    Attempt,
    BlockKey,
    ConsumerId,
    Incarnation,
    ReplicaId,
    RequestId,
)
from rayserve_paged.core.replica_messages import AssignRequest, RegisterReplica, ReplicaReport
from rayserve_paged.core.request import ModelLimits, Request
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.token_ids import TokenIds

BLOCK_SIZE = 16
PROMPT_LEN = 1024
NUM_REPLICAS = (8, 128, 1024)
NUM_REQUESTS = 10_000
NUM_OPEN_EACH = 8

_NUM_FAMILIES = 100
_SHARED_LEN = 768
_BATCH = 50
_NUM_BLOCKS_EACH = 2_000
_MAX_TOKENS = 128
_VOCAB_SIZE = 49_152

LIMITS = ModelLimits(
    vocab_size=_VOCAB_SIZE,
    max_model_len=8192,
    num_blocks=_NUM_BLOCKS_EACH,
    block_size=BLOCK_SIZE,
    eos_token_ids=(2,),
    max_num_seqs=256,
)
SCOPE = BlockScope(b"bench", "bf16", "bf16", "bench", "rope", BLOCK_SIZE)

Handle = Callable[[ControllerEvent], list[ControllerCommand]]


def requests(num_requests: int, seed: int = 0) -> Iterator[Request]:
    """Yield requests of PROMPT_LEN tokens from 100 families of 768 shared tokens."""
    draw = np.random.default_rng(seed)
    families = draw.integers(_VOCAB_SIZE, size=(_NUM_FAMILIES, _SHARED_LEN), dtype=np.int32)
    for number in range(num_requests):
        own = draw.integers(_VOCAB_SIZE, size=PROMPT_LEN - _SHARED_LEN, dtype=np.int32)
        prompt = np.concatenate([families[draw.integers(_NUM_FAMILIES)], own])
        yield Request(
            request_id=RequestId(f"q{number}"),
            consumer_id=ConsumerId("bench"),
            attempt=Attempt(0),
            prompt_token_ids=TokenIds.of(prompt),
            params=SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, seed=0),
        )


class MadeUpReplica:
    """Reports what a replica would: prompts that are computed, keys that come and go.

    Args:
        index: It is named r0, r1, ...
    """

    def __init__(self, index: int) -> None:
        self.replica_id = ReplicaId(f"r{index}")
        self._num_reports = 0
        # The one matched longest ago first.
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    @property
    def registration(self) -> RegisterReplica:
        """What it begins with."""
        return RegisterReplica(self.replica_id, Incarnation(0), LIMITS, SCOPE)

    def finish(self, assigned: AssignRequest) -> ReplicaReport:
        """Return the report that a request has ended, with the keys that it has computed."""
        published = []
        for key in assigned.prompt_keys:
            if key not in self._keys:
                published.append(key)
                self._keys[key] = None
            self._keys.move_to_end(key)
        num_over = max(0, len(self._keys) - _NUM_BLOCKS_EACH)
        evicted = [self._keys.popitem(last=False)[0] for _ in range(num_over)]
        request = assigned.request
        name = (request.request_id, request.attempt)
        report = ReplicaReport(
            replica_id=self.replica_id,
            incarnation=Incarnation(0),
            sequence=self._num_reports,
            published=tuple(published),
            evicted=tuple(evicted),
            prefilled=(name,),
            finished=(name,),
            num_running=0,
            num_waiting=0,
            num_free_blocks=0,
            num_cached_blocks=len(self._keys),
            num_queried_tokens=0,
            num_hit_tokens=0,
            num_resumed_tokens=0,
            fenced=None,
        )
        self._num_reports += 1
        return report


def rates(num_replicas: int, num_requests: int = NUM_REQUESTS) -> dict[str, float]:
    """Return what a controller with so many replicas takes in, on one core.

    Each replica has 8 requests open and 2,000 keys at most. The first requests, which fill the
    replicas, are not counted.

    Args:
        num_replicas: Live replicas.
        num_requests: That are counted.

    Returns:
        Per second: `placements_per_s`, of prompts of PROMPT_LEN tokens, hashing included;
        `directory_updates_per_s`, keys that came or went. Of all prompt tokens, `hit_rate`: those
        cached where the request was placed.
    """
    controller = Controller(None)
    return measure(lambda event: controller.handle(event, 0.0), num_replicas, num_requests)


def measure(handle: Handle, num_replicas: int, num_requests: int) -> dict[str, float]:
    """As `rates`, through what hands an event to a controller without replicas."""
    replicas = [MadeUpReplica(index) for index in range(num_replicas)]
    by_name = {replica.replica_id: replica for replica in replicas}
    for replica in replicas:
        handle(replica.registration)
    in_flight: deque[tuple[ReplicaId, AssignRequest]] = deque()
    made_up = requests(num_replicas * NUM_OPEN_EACH + num_requests)
    for request in islice(made_up, num_replicas * NUM_OPEN_EACH):
        in_flight.append(_sent(handle(SubmitRequest(request))))
    place_s = update_s = 0.0
    num_keys = num_known = 0
    # Many at a time, since it may take longer to ask for the time than to place a request.
    while batch := [SubmitRequest(request) for request in islice(made_up, _BATCH)]:
        begin = time.process_time()
        answers = [handle(event) for event in batch]
        place_s += time.process_time() - begin
        in_flight.extend(map(_sent, answers))
        ended = [in_flight.popleft() for _ in batch]
        reports = [by_name[replica_id].finish(assigned) for replica_id, assigned in ended]
        begin = time.process_time()
        for report in reports:
            handle(report)
        update_s += time.process_time() - begin
        for (_, assigned), report in zip(ended, reports, strict=True):
            num_keys += len(report.published) + len(report.evicted)
            num_known += len(assigned.prompt_keys) - len(report.published)
    return {
        "placements_per_s": num_requests / place_s,
        "directory_updates_per_s": num_keys / update_s,
        "reports_per_s": num_requests / update_s,
        "hit_rate": num_known * BLOCK_SIZE / (num_requests * PROMPT_LEN),
    }


def _sent(commands: list[ControllerCommand]) -> tuple[ReplicaId, AssignRequest]:
    sent = commands[0]
    assert isinstance(sent, SendToReplica)
    assignment = sent.event.event
    assert isinstance(assignment, AssignRequest)
    return sent.replica_id, assignment
