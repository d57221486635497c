"""One random run of simulated chaos: a cluster, its requests and its faults, all from a seed."""

import dataclasses
import random
from collections.abc import Callable

from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.config import BatchConfig, PlacementPolicy, RecoveryConfig
from rayserve_paged.core.errors import PagedError
from rayserve_paged.core.ids import Attempt, ConsumerId, RequestId
from rayserve_paged.core.request import ModelLimits, Request, admit
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.sim.faults import (
    DisturbMessages,
    Fault,
    FaultPlan,
    KillController,
    KillRank,
    KillReplica,
    Partition,
    PinBlocks,
    PoisonRequest,
    ResetCaches,
    SlowReplica,
)

HORIZON_S = 20.0
"""Nothing goes wrong after this long, but what a death sets off."""
_ARRIVALS_S = 12.0
_VOCAB_SIZE = 31
_UNLIMITED_S = 1e6


_DrawFault = Callable[[random.Random, list[str], list[str], int], Fault]


@dataclasses.dataclass(frozen=True, slots=True)
class ChaosRequest:
    """A request of a run.

    Args:
        number: Names it; of those that a run leaves out the numbers are not given to others.
        arrival_s: When it is submitted.
        request: What is submitted.
        cancel_at_s: When it is cancelled; None for never.
        cancelled_sibling: Which sample is; None for all.
    """

    number: int
    arrival_s: float
    request: Request
    cancel_at_s: float | None = None
    cancelled_sibling: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ChaosCase:
    """A run.

    Args:
        seed: That it was drawn from, and that decides which messages are disturbed.
        num_replicas: Replicas.
        num_consumers: Consumers.
        limits: Of each replica.
        batch: Of each replica.
        placement: How replicas are chosen.
        recovery: What is done about deaths.
        partial_reuse: Of each replica.
        step_s: How long a step takes.
        start_s: How long a replica takes to start.
        requests: In the order of their numbers.
        plan: What goes wrong.
    """

    seed: int
    num_replicas: int
    num_consumers: int
    limits: ModelLimits
    batch: BatchConfig
    placement: PlacementPolicy
    recovery: RecoveryConfig
    partial_reuse: bool
    step_s: float
    start_s: float
    requests: tuple[ChaosRequest, ...]
    plan: FaultPlan


def draw_case(seed: int) -> ChaosCase:
    """Draw the run of a seed; the same seed gives the same run."""
    draw = random.Random(seed)
    batch = _draw_batch(draw)
    limits = _draw_limits(draw, batch.max_num_seqs)
    num_replicas, num_consumers = draw.choice([1, 2, 2, 3]), draw.choice([1, 2])
    requests = _draw_requests(draw, limits, num_consumers)
    has_poison = draw.random() < 0.1
    names = [f"r{i}" for i in range(num_replicas)]
    plan = _draw_plan(draw, names, num_consumers, len(requests), has_poison=has_poison)
    # Chance may kill a replica while a harmless request is on trial.
    recovery = RecoveryConfig(
        patience_s=_UNLIMITED_S,
        restart_delay_s=draw.choice([0.0, 0.5]),
        max_restart_delay_s=4.0,
        poison_deaths=2 if has_poison else 1000,
    )
    case = ChaosCase(
        seed=seed,
        num_replicas=num_replicas,
        num_consumers=num_consumers,
        limits=limits,
        batch=batch,
        placement=draw.choice(["round-robin", "least-loaded", "prefix-aware", "prefix-aware"]),
        recovery=recovery,
        partial_reuse=draw.random() < 0.3,
        step_s=draw.choice([0.005, 0.05, 0.2, 0.4]),
        start_s=draw.choice([0.5, 2.0, 6.0]),
        requests=requests,
        plan=plan,
    )
    if has_poison or draw.random() < 0.7:
        return case
    rank = KillRank(at_s=_moment(draw), replica=draw.choice(names))
    return dataclasses.replace(case, plan=FaultPlan(faults=(*plan.faults, rank)))


def with_plan(case: ChaosCase, plan: FaultPlan) -> ChaosCase:
    """Return a case with other faults.

    Raises:
        InvalidInputError: They name a place that the case does not have.
    """
    plan.check_names("faults", case.num_replicas, case.num_consumers, f" with seed {case.seed}")
    return dataclasses.replace(case, plan=plan)


def _draw_batch(draw: random.Random) -> BatchConfig:
    return BatchConfig(
        max_num_seqs=draw.choice([2, 3, 5, 8]),
        max_num_batched_tokens=draw.choice([4, 8, 16, 64]),
        pipeline_depth=draw.choice([1, 2]),
        max_decode_steps=draw.choice([1, 1, 4, 16]),
        max_prefix_wait_steps=draw.choice([0, 4, 64]),
        policy=draw.choice(
            ["fcfs", "priority", "weighted-fair", "shortest-remaining", "longest-prefix-first"]
        ),
    )


def _draw_limits(draw: random.Random, max_num_seqs: int) -> ModelLimits:
    block_size = draw.choice([1, 2, 3, 4, 8])
    groups: tuple[AttentionWindow, ...] = ONE_FULL_GROUP
    if draw.random() < 0.2:
        groups = (AttentionWindow(), AttentionWindow(draw.choice([3, 8])))
    # The longest request, 40 + 16 tokens, and a little: most do not fit beside each other.
    num_blocks = (-(-56 // block_size) + 1) * len(groups) * draw.choice([1, 1, 2, 4])
    return ModelLimits(
        vocab_size=_VOCAB_SIZE,
        max_model_len=256,
        num_blocks=num_blocks + 4,
        block_size=block_size,
        eos_token_ids=(0,),
        max_num_seqs=max_num_seqs,
        layer_groups=groups,
        max_pinned_blocks=4,
    )


def _draw_requests(
    draw: random.Random, limits: ModelLimits, num_consumers: int
) -> tuple[ChaosRequest, ...]:
    stems = [[draw.randrange(_VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    requests = []
    for number in range(draw.randint(4, 24)):
        drawn = _draw_request(draw, number, limits, stems, num_consumers)
        try:
            admit(drawn.request, limits)
        except PagedError:
            continue
        requests.append(drawn)
    return tuple(requests)


def _draw_request(
    draw: random.Random,
    number: int,
    limits: ModelLimits,
    stems: list[list[int]],
    num_consumers: int,
) -> ChaosRequest:
    prompt = draw.choice(stems)[: draw.randint(1, 24)]
    prompt = prompt + [draw.randrange(_VOCAB_SIZE) for _ in range(draw.randint(0, 16))]
    is_beam = draw.random() < 0.08
    n = draw.choice([1, 1, 1, 2, 3])
    max_tokens = draw.randint(1, 16)
    arrival_s = round(draw.uniform(0.0, _ARRIVALS_S), 3)
    params = SamplingParams(
        n=min(n, limits.max_num_seqs, 2 if is_beam else n),
        beam_width=min(2, limits.max_num_seqs) if is_beam else None,
        temperature=0.0 if is_beam else draw.choice([0.0, 1.0]),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, draw.choice([0, 0, 3])),
        seed=number,
        ignore_eos=draw.random() < 0.5,
    )
    window = draw.choice([None, None, None, AttentionWindow(5, draw.choice([0, 2]))])
    request = Request(
        request_id=RequestId(f"q{number}"),
        consumer_id=ConsumerId(f"c{draw.randrange(num_consumers)}"),
        attempt=Attempt(0),
        prompt_token_ids=TokenIds.of(prompt),
        params=params,
        priority=draw.choice([0, 0, 1]),
        scope=RequestScope(draw.choice([None, None, None, "a", "b"]), window=window),
        deadline_s=round(draw.uniform(0.2, 20.0), 3) if draw.random() < 0.1 else None,
    )
    request = dataclasses.replace(request, tenant=request.scope.tenant_salt)
    cancel_at_s = None
    if draw.random() < 0.2:
        cancel_at_s = round(arrival_s + draw.expovariate(0.5), 3)
    sibling = draw.choice([None, draw.randrange(params.n)]) if not is_beam else None
    return ChaosRequest(number, arrival_s, request, cancel_at_s, sibling)


def _draw_plan(
    draw: random.Random,
    replicas: list[str],
    num_consumers: int,
    num_requests: int,
    *,
    has_poison: bool,
) -> FaultPlan:
    places = [*replicas, *(f"c{i}" for i in range(num_consumers)), "controller"]
    faults: list[Fault] = []
    if has_poison and num_requests:
        faults.append(
            PoisonRequest(
                request=draw.randrange(num_requests), output_index=draw.choice([0, 0, 1, 5])
            )
        )
    harmless: list[_DrawFault] = [_draw_slow, _draw_pin, _draw_reset]
    harmful: list[_DrawFault] = [
        _draw_death,
        _draw_death,
        _draw_controller,
        _draw_messages,
        _draw_messages,
    ]
    kinds = harmless if has_poison else [*harmless, *harmful, _draw_partition]
    faults.extend(
        draw.choice(kinds)(draw, replicas, places, num_requests) for _ in range(draw.randint(0, 6))
    )
    return FaultPlan(faults=tuple(faults))


def _draw_death(
    draw: random.Random, replicas: list[str], _places: list[str], _num: int
) -> KillReplica:
    return KillReplica(at_s=_moment(draw), replica=draw.choice(replicas), hangs=draw.random() < 0.4)


def _draw_controller(
    draw: random.Random, _replicas: list[str], _places: list[str], _num: int
) -> KillController:
    return KillController(at_s=_moment(draw), down_s=draw.choice([0.01, 0.5, 4.0]))


def _draw_messages(
    draw: random.Random, _replicas: list[str], places: list[str], _num: int
) -> DisturbMessages:
    begin, end = _spell(draw)
    lost = draw.choice([0.0, 0.05, 0.3])
    return DisturbMessages(
        from_s=begin,
        until_s=end,
        ends=("any", draw.choice(["any", *places])),
        lost=lost,
        twice=draw.choice([0.0, 0.1, 0.5]),
        late=draw.choice([0.0, 0.1, 0.5]),
        late_s=draw.choice([0.05, 0.5, 3.0]),
    )


def _draw_partition(
    draw: random.Random, _replicas: list[str], places: list[str], _num: int
) -> Partition:
    begin, end = _spell(draw)
    cut_off = draw.sample(places, draw.randint(1, max(1, len(places) // 2)))
    return Partition(from_s=begin, until_s=end, places=tuple(sorted(cut_off)))


def _draw_slow(
    draw: random.Random, replicas: list[str], _places: list[str], _num: int
) -> SlowReplica:
    begin, end = _spell(draw)
    return SlowReplica(
        from_s=begin, until_s=end, replica=draw.choice(replicas), factor=draw.choice([3.0, 30.0])
    )


def _draw_pin(
    draw: random.Random, replicas: list[str], _places: list[str], num_requests: int
) -> PinBlocks:
    begin, end = _spell(draw)
    numbers = sorted({draw.randrange(max(1, num_requests)) for _ in range(2)})
    return PinBlocks(
        from_s=begin, until_s=end, replica=draw.choice(replicas), requests=tuple(numbers)
    )


def _draw_reset(
    draw: random.Random, replicas: list[str], _places: list[str], _num: int
) -> ResetCaches:
    return ResetCaches(at_s=_moment(draw), replica=draw.choice(replicas))


def _moment(draw: random.Random) -> float:
    # Most of them while requests come.
    return round(draw.triangular(0.0, HORIZON_S, _ARRIVALS_S / 2), 3)


def _spell(draw: random.Random) -> tuple[float, float]:
    begin = round(draw.uniform(0.0, HORIZON_S * 0.8), 3)
    return begin, round(min(HORIZON_S, begin + draw.choice([0.3, 2.0, 8.0])), 3)
