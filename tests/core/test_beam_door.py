"""Which searches are taken, and how many tokens they may have."""

import math
from typing import Any

import pytest
from beam_checks import check_streams
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.request import admit
from rayserve_paged.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p"),
        ({"beam_width": 2, "top_k": 4}, "top_k"),
        ({"beam_width": 2, "min_p": 0.1}, "min_p"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"beam_width": 2, "presence_penalty": 0.1}, "presence_penalty"),
        ({"beam_width": 2, "frequency_penalty": 0.1}, "frequency_penalty"),
        ({"beam_width": 2, "logit_bias": {3: 1.0}}, "logit_bias"),
        ({"beam_width": 2, "stop": "x"}, "stop"),
        ({"beam_width": 2, "logprobs": 1}, "logprobs"),
        ({"beam_width": 2, "stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"beam_width": 2, "n": 2, "allowed_token_ids": [4]}, "allowed_token_ids"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "sometimes"}, "early_stopping"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        SamplingParams(**fields)
    assert refused.value.field == field
    assert refused.value.value is fields.get(field) or field in fields


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "width", "needed"),
    [
        # 2 full blocks of prompt are shared, then 3 tokens in 1 block for each beam.
        (8, 4, 4, 2 + 4 * 1),
        # The tail of the prompt is copied for each beam.
        (9, 4, 4, 2 + 4 * 1),
        (9, 5, 4, 2 + 4 * 2),
        # A search of one token forks nothing.
        (9, 1, 4, 3),
        (8, 1, 4, 2),
    ],
)
def test_the_worst_case_of_a_search_alone_must_fit(
    num_prompt: int, max_tokens: int, width: int, needed: int
) -> None:
    request = make_request(range(num_prompt), max_tokens, beam_width=width)
    assert admit(request, make_limits(num_blocks=needed)) is not None
    with pytest.raises(CapacityError) as refused:
        admit(request, make_limits(num_blocks=needed - 1))
    error = refused.value
    assert (error.num_blocks_needed, error.num_blocks) == (needed, needed - 1)
    assert (error.beam_width, error.field) == (width, "max_tokens")
    assert f"max_tokens={max_tokens} and beam_width={width} needs {needed} blocks" in str(error)


@pytest.mark.parametrize("num_prompt", range(1, 14))
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_search_without_a_length_gets_what_fits_and_no_token_more(
    num_prompt: int, width: int
) -> None:
    limits = make_limits(num_blocks=16)
    max_tokens = admit(make_request(range(num_prompt), None, beam_width=width), limits).params
    assert max_tokens.max_tokens is not None
    with pytest.raises(CapacityError):
        admit(make_request(range(num_prompt), max_tokens.max_tokens + 1, beam_width=width), limits)


def test_a_search_fills_its_pool_to_the_last_block_and_ends() -> None:
    # Beams that part at once and never meet again.
    limits = make_limits(num_blocks=3 + 6 * 3, block_size=2, vocab_size=97)
    driver = ReplicaDriver(limits)
    request = make_request(range(6), 7, n=6, beam_width=6)
    driver.generate(request)
    check_streams(driver, request)
    assert driver.replica.batcher.num_preemptions == 0


def test_more_beams_than_rows_or_more_outputs_than_words_are_refused() -> None:
    limits = make_limits(num_blocks=64, vocab_size=3, max_num_seqs=4)
    with pytest.raises(InvalidInputError) as refused:
        admit(make_request([1], 4, beam_width=5), limits)
    assert (refused.value.field, refused.value.value) == ("beam_width", 5)
    with pytest.raises(InvalidInputError) as refused:
        admit(make_request([1], 4, n=4, beam_width=4), limits)
    assert (refused.value.field, refused.value.value) == ("n", 4)


def test_a_search_with_a_window_is_refused_where_its_beams_could_not_come_back() -> None:
    # Beams that gave way are each promised blocks of their own: 3 beams of 2.
    request = make_request(range(3), 3, beam_width=3, window=3, num_sink_tokens=1)
    with pytest.raises(CapacityError) as refused:
        admit(request, make_limits(num_blocks=5, block_size=3))
    assert refused.value.num_blocks_needed == 6
    assert admit(request, make_limits(num_blocks=6, block_size=3)).params.max_tokens == 3
