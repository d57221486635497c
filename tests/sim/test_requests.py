"""From a trace's rows to requests: equal ids give equal tokens, prompts are made one at a time."""

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.sampling_params import MAX_SEED
from rayserve_paged.sim.requests import requests_of
from rayserve_paged.sim.token_streams import make_prompt
from rayserve_paged.sim.workload import TraceRequest, Workload

VOCAB = 32_000
TRACE = Workload(
    (
        TraceRequest(0.0, 1300, 5, (0, 1, 2)),
        TraceRequest(1500.0, 1100, 7, (0, 1, 3)),
        TraceRequest(1500.0, 512, 1, (9,)),
    ),
    512,
)


def test_rows_with_leading_ids_in_common_have_leading_tokens_in_common() -> None:
    requests = list(requests_of(TRACE, 64))
    prompts = [make_prompt(request.segments, VOCAB) for request in requests]
    assert [len(prompt) for prompt in prompts] == [1300, 1100, 512]
    assert [request.num_prompt_tokens for request in requests] == [1300, 1100, 512]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][1024:1030] != prompts[1][1024:1030]
    assert prompts[0][0] != prompts[2][0]
    assert [request.arrival_s for request in requests] == [0.0, 1.5, 1.5]
    assert [request.num_output_tokens for request in requests] == [5, 7, 1]


def test_a_trace_without_ids_shares_nothing() -> None:
    rows = tuple(TraceRequest(float(number), 40, 3) for number in range(20))
    requests = list(requests_of(Workload(rows, None), 48))
    assert len({make_prompt(request.segments, VOCAB)[:8] for request in requests}) == 20


def test_another_seed_gives_other_tokens_and_other_answers() -> None:
    one, other = (list(requests_of(TRACE, 64, seed)) for seed in (0, 1))
    assert make_prompt(one[0].segments, VOCAB) != make_prompt(other[0].segments, VOCAB)
    seeds = {request.seed for request in (*one, *other)}
    assert len(seeds) == 6
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_b120_a_block_size_that_does_not_divide_the_tokens_of_an_id_is_refused() -> None:
    for block_size in (48, 1024):
        with pytest.raises(InvalidInputError, match="a divisor of 512"):
            requests_of(TRACE, block_size)
