"""A workload that a profile's own figures say a machine can serve."""

from rayserve_paged.profiling.step_plans import chunk_shape, decode_shape
from rayserve_paged.sim.profiled_cost import ProfiledCost
from rayserve_paged.sim.synthetic import (
    Lengths,
    PoissonArrivals,
    SyntheticWorkload,
    SystemPrompts,
)

_PROMPT = Lengths(median=80, sigma=0.6, low=8, high=320)
_OUTPUT = Lengths(median=48, sigma=0.4, low=8, high=128)
_SYSTEM = SystemPrompts(count=8, num_tokens=48, share=0.5, zipf=1.0)
MAX_CONTEXT = 512
"""No sequence of the workload is longer."""
LOAD = 0.5
"""Share of the time in which replicas are to be busy, about: what steps take more or less, users
see at most half as much again."""

_BATCH = 4


def suitable_workload(
    cost: ProfiledCost, num_requests: int, num_replicas: int, load: float
) -> SyntheticWorkload:
    """Return short chats, some with a system prompt, that come at random times.

    Args:
        cost: Of a step.
        num_requests: How many.
        num_replicas: That serve them, all on one machine.
        load: Share of the time in which the replicas would be busy if each request were computed
            in turn and decoded beside three others.
    """
    prompt, output = round(_PROMPT.median), round(_OUTPUT.median)
    chunk, decode = chunk_shape(prompt, 0), decode_shape(_BATCH, prompt + output // 2)
    chunk_s, decode_s = (
        float(cost.step_seconds(s.num_computed, s.num_tokens, 0, 1, num_replicas)[0])
        for s in (chunk, decode)
    )
    request_s = chunk_s + output * decode_s / _BATCH
    return SyntheticWorkload(
        num_requests=num_requests,
        arrivals=PoissonArrivals(rate_per_s=load * num_replicas / request_s),
        prompt_tokens=_PROMPT,
        output_tokens=_OUTPUT,
        system_prompts=_SYSTEM,
    )
