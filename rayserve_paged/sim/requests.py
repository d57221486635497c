"""Requests of a simulation: when they arrive, what their prompts are cut from, how they end."""

import dataclasses
from collections.abc import Iterator

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.sampling_params import MAX_SEED
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.sim.token_streams import Segment, make_prompt, stream_number
from rayserve_paged.sim.workload import TraceRequest, Workload

_HASH_ID = 0x68617368  # Keeps the streams of hash ids apart from others.
_PROMPT = 0x70726F6D7074
_SEED = 0x73656564


@dataclasses.dataclass(frozen=True, slots=True)
class SimRequest:
    """One request before it arrives; its prompt's tokens are made when it does.

    Args:
        arrival_s: When it arrives, in seconds of the simulation.
        segments: What the prompt consists of, head first.
        num_output_tokens: Tokens of its answer: it ends there and not before.
        seed: Decides its answer (`token_streams.answer_stream`), so that a later turn can quote it.
        token_ids: Its prompt, where that is known, in place of segments.
    """

    arrival_s: float
    segments: tuple[Segment, ...]
    num_output_tokens: int
    seed: int
    token_ids: TokenIds | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return sum(segment.num_tokens for segment in self.segments)

    def make_prompt(self, vocab_size: int) -> TokenIds:
        """Return the token ids of its prompt; those that are made up are below `vocab_size`."""
        return make_prompt(self.segments, vocab_size) if self.token_ids is None else self.token_ids


def request_seed(workload_seed: int, number: int) -> int:
    """Return the seed of one request of a workload."""
    return stream_number(_SEED, workload_seed, number) & MAX_SEED


def requests_of(workload: Workload, block_size: int, seed: int = 0) -> Iterator[SimRequest]:
    """Yield the requests of a trace, one at a time.

    Equal hash ids give equal tokens. A trace without ids gives prompts that share nothing. The
    prompts of a recorded run are what they were.

    Args:
        workload: The trace.
        block_size: Slots per block of the cluster.
        seed: Another one gives other tokens.

    Raises:
        InvalidInputError: A block size that does not divide the tokens of a hash id: what
            prompts share would be cut inside a block, where the trace says nothing.
    """
    trace_block_size = workload.trace_block_size
    if trace_block_size is not None and trace_block_size % block_size:
        accepted = f"a divisor of {trace_block_size}, the tokens of a hash id"
        raise InvalidInputError("block_size", block_size, accepted)
    return (
        SimRequest(
            request.arrival_ms / 1000,
            _segments(request, trace_block_size, seed, number),
            request.output_length,
            request_seed(seed, number),
            request.token_ids,
        )
        for number, request in enumerate(workload.requests)
    )


def _segments(
    request: TraceRequest, trace_block_size: int | None, seed: int, number: int
) -> tuple[Segment, ...]:
    if request.token_ids is not None:
        return ()
    if request.hash_ids is None or trace_block_size is None:
        return (Segment(stream_number(_PROMPT, seed, number), request.input_length),)
    full = [
        Segment(stream_number(_HASH_ID, seed, hash_id), trace_block_size)
        for hash_id in request.hash_ids
    ]
    num_tail = request.input_length - trace_block_size * (len(full) - 1)
    full[-1] = dataclasses.replace(full[-1], num_tokens=num_tail)
    return tuple(full)
