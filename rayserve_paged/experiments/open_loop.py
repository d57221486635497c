"""Serves a workload through a live deployment: each request at its time, whatever others do."""

import asyncio
import secrets
import time
from collections.abc import Sequence

from rayserve_paged.consumer_loop import ConsumerLoop
from rayserve_paged.core.errors import PagedError
from rayserve_paged.core.ids import Attempt, ConsumerId, RequestId
from rayserve_paged.core.request import Request
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.deployment import Deployment
from rayserve_paged.experiments.stream_times import StreamTimes
from rayserve_paged.sim.requests import SimRequest

_LEAD_S = 0.2
"""From the call to the zero of the arrivals."""


async def serve_open_loop(deployment: Deployment, requests: Sequence[SimRequest]) -> StreamTimes:
    """Submit each request at its time and read all streams to their ends.

    Requests are greedy and end at their length alone, as simulated ones do.

    Args:
        deployment: Where they go.
        requests: The workload, in order of arrival.

    Returns:
        Their times on the monotonic clock, in the order of the workload; one that is refused or
        lost is among them.
    """
    consumer_id = ConsumerId(secrets.token_hex(4))
    # Made before the first arrives: in between it would keep the others' tokens waiting.
    made = [
        _request(number, request, consumer_id, deployment.limits.vocab_size)
        for number, request in enumerate(requests)
    ]
    times = StreamTimes()
    loop = ConsumerLoop(deployment, consumer_id)
    zero = time.monotonic() + _LEAD_S

    async def serve(request: Request, arrival_s: float) -> None:
        await asyncio.sleep(zero + arrival_s - time.monotonic())
        times.arrive(request.request_id, time.monotonic())
        try:
            async for update in loop.stream(request):
                times.watch(update, time.monotonic())
        except PagedError as error:
            times.fail(request.request_id, str(error), time.monotonic())

    try:
        arrivals = (request.arrival_s for request in requests)
        await asyncio.gather(*map(serve, made, arrivals))
    finally:
        await loop.close()
    times.requests = {request.request_id: times.requests[request.request_id] for request in made}
    return times


def _request(number: int, request: SimRequest, consumer_id: ConsumerId, vocab_size: int) -> Request:
    return Request(
        request_id=RequestId(f"{consumer_id}-{number}"),
        consumer_id=consumer_id,
        attempt=Attempt(0),
        prompt_token_ids=request.make_prompt(vocab_size),
        params=SamplingParams(
            max_tokens=request.num_output_tokens,
            temperature=0.0,
            seed=request.seed,
            ignore_eos=True,
        ),
    )
