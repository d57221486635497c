import math

import numpy as np
import pytest
import torch

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.model.fingerprint import FingerprintOracle
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.spec import FingerprintConfig


def row(
    position: int = 0, eos: tuple[int, ...] = (), sibling: int = 0, /, **params: object
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), position, eos, sibling)  # type: ignore[arg-type]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample_ids(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    token_ids, _, errors = Sampler().sample(logits, rows)
    assert not errors
    assert token_ids.dtype == np.int32
    return token_ids.tolist()


def drawn(logits: list[float], num_draws: int, **params: object) -> np.ndarray:
    """How often each token comes in draws at the positions 0, 1, ... of seed 0."""
    rows = [row(position, seed=0, **params) for position in range(num_draws)]
    ids = sample_ids(torch.tensor([logits]).expand(num_draws, -1), rows)
    return np.bincount(ids, minlength=len(logits))


def test_greedy_takes_the_largest_logit_and_of_equal_ones_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 2.0, 3.0, 3.0]])
    assert sample_ids(logits, [row(temperature=0), row(temperature=0)]) == [1, 0]


def test_random_choice_follows_the_softmax_at_the_temperature() -> None:
    logits = [0.0, 1.0, 2.0, -math.inf, 1.5]
    for temperature in (0.5, 1.0, 2.0):
        weights = np.exp(np.array(logits) / temperature)
        expected = weights / weights.sum()
        found = drawn(logits, 20000, temperature=temperature) / 20000
        assert np.abs(found - expected).max() < 0.01
        assert found[3] == 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert drawn([0.0, 1.0, 1.001], 100, temperature=temperature).tolist() == [0, 0, 100]


def test_top_k_keeps_the_most_likely_and_of_equal_ones_the_lower_ids() -> None:
    logits = [1.0, 3.0, 2.0, 2.0, 2.0]
    assert np.flatnonzero(drawn(logits, 500, top_k=3)).tolist() == [1, 2, 3]
    assert np.flatnonzero(drawn(logits, 500, top_k=1)).tolist() == [1]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log([0.05, 0.5, 0.15, 0.3]).tolist()
    for top_p, kept in ((0.4, [1]), (0.6, [1, 3]), (0.9, [1, 2, 3]), (0.96, [0, 1, 2, 3])):
        assert np.flatnonzero(drawn(logits, 2000, top_p=top_p)).tolist() == kept


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = np.log([0.05, 0.5, 0.15, 0.3]).tolist()
    # Of the two that top_k keeps, the first has 0.625.
    assert np.flatnonzero(drawn(logits, 500, top_k=2, top_p=0.6)).tolist() == [1]
    assert np.flatnonzero(drawn(logits, 500, top_k=2, top_p=0.7)).tolist() == [1, 3]


def test_min_p_keeps_what_is_likely_enough_beside_the_most_likely() -> None:
    logits = np.log([0.05, 0.5, 0.15, 0.3]).tolist()
    for min_p, kept in ((1.0, [1]), (0.55, [1, 3]), (0.2, [1, 2, 3]), (0.05, [0, 1, 2, 3])):
        assert np.flatnonzero(drawn(logits, 500, min_p=min_p)).tolist() == kept


def test_top_p_applies_to_what_min_p_left() -> None:
    logits = np.log([0.05, 0.5, 0.15, 0.3]).tolist()
    # Of the two that min_p keeps, the first has 0.625.
    assert np.flatnonzero(drawn(logits, 500, min_p=0.5, top_p=0.6)).tolist() == [1]
    assert np.flatnonzero(drawn(logits, 500, min_p=0.5, top_p=0.7)).tolist() == [1, 3]


def test_top_p_over_a_flat_distribution_keeps_more_than_the_first_candidates() -> None:
    rows = [row(position, seed=3, top_p=0.9) for position in range(400)]
    ids = sample_ids(torch.zeros(400, 3000), rows)
    assert 2500 < max(ids) < 2701


def test_b89_top_k_off_in_one_row_and_beyond_the_vocabulary_in_another() -> None:
    logits = random_logits(6, 128)
    rows = [
        row(temperature=0),
        *(row(seed=5, temperature=1.5, top_k=top_k) for top_k in (64, 0, -1, 128, 9999999)),
    ]
    together = sample_ids(logits, rows)
    assert together == [sample_ids(logits[i : i + 1], [rows[i]])[0] for i in range(6)]
    same = logits[2:3].expand(4, -1)
    assert len(set(sample_ids(same, rows[2:]))) == 1
    with pytest.raises(InvalidInputError, match=r"top_k=0\.5"):
        row(top_k=0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (math.nan, math.inf, -1, 1e308, "1")),
        *(("top_p", value) for value in (math.nan, 0, -1, 1.1)),
        *(("min_p", value) for value in (math.nan, -0.1, 2)),
        *(("repetition_penalty", value) for value in (math.nan, 0, -1)),
        ("presence_penalty", 1e9),
    ],
)
def test_b88_nonsense_sampling_numbers_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=field):
        row(**{field: value})


def test_end_ids_are_not_chosen_before_min_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0]])
    params: dict[str, object] = {"temperature": 0, "min_tokens": 3, "stop_token_ids": [1]}
    assert sample_ids(logits, [row(0, (0,), **params)]) == [2]
    assert sample_ids(logits, [row(1, (0,), **params)]) == [2]
    # The third token may be the end id: with it the output has three.
    assert sample_ids(logits, [row(2, (0,), **params)]) == [0]
    assert sample_ids(logits, [row(0, (0,), ignore_eos=True, **params)]) == [0]
    assert float(logits[0, 0]) == 9.0


def test_logprobs_are_those_of_the_model_whatever_the_sampling() -> None:
    logits = random_logits(2, 50)
    reference = torch.log_softmax(logits.double(), dim=-1)
    rows = [
        row(0, (1,), seed=1, temperature=0.3, top_k=2, min_tokens=4, logprobs=5),
        row(temperature=0, logprobs=0),
    ]
    token_ids, logprobs, errors = Sampler().sample(logits, rows)
    assert not errors
    assert logprobs[0].logprob == pytest.approx(float(reference[0, token_ids[0]]), abs=1e-9)
    top = reference[0].topk(5)
    assert [token_id for token_id, _ in logprobs[0].top] == top.indices.tolist()
    assert [value for _, value in logprobs[0].top] == pytest.approx(top.values.tolist())
    assert logprobs[1].top == ()
    assert logprobs[1].logprob == pytest.approx(float(reference[1].max()))


def test_more_logprobs_than_tokens_give_all_tokens() -> None:
    _, logprobs, _ = Sampler().sample(random_logits(1, 7), [row(temperature=0, logprobs=20)])
    assert len(logprobs[0].top) == 7


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_poisoned_row_fails_alone(poison: float, temperature: float) -> None:
    logits = random_logits(8, 100)
    rows = [row(seed=index, temperature=temperature, logprobs=2) for index in range(8)]
    expected = sample_ids(logits, rows)
    logits[3, 17] = poison
    token_ids, logprobs, errors = Sampler().sample(logits, rows)
    assert list(errors) == [3]
    assert "NaN" in errors[3]
    assert sorted(logprobs) == [0, 1, 2, 4, 5, 6, 7]
    del expected[3]
    assert np.delete(token_ids, 3).tolist() == expected


def test_rows_that_cannot_be_sampled_fail_alone() -> None:
    logits = random_logits(4, 100)
    logits[2, 5] = math.nan
    rows = [
        row(temperature=0.5),
        row(temperature=0, min_tokens=2, stop_token_ids=[100]),
        row(temperature=0, min_tokens=2, stop_token_ids=[5]),
        row(temperature=0),
    ]
    token_ids, _, errors = Sampler().sample(logits, rows)
    assert errors == {
        0: "a random choice needs a seed",
        1: "id 100 is outside the vocabulary of 100",
        2: "the logits hold NaN or infinity, or allow no token",
    }
    assert token_ids[3] == int(logits[3].argmax())


def test_a_row_whose_every_token_is_masked_fails() -> None:
    rows = [row(temperature=0, min_tokens=2, stop_token_ids=[0, 1])]
    _, _, errors = Sampler().sample(torch.zeros(1, 2), rows)
    assert list(errors) == [0]


def test_results_of_a_row_are_bitwise_equal_in_any_batch() -> None:
    logits = random_logits(24, 5003)
    choices: list[dict[str, object]] = [
        {"temperature": 0.8},
        {"temperature": 1.7, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 2.5, "top_k": 700, "top_p": 0.7},
        {"temperature": 0},
    ]
    rows = [row(index, seed=1000 + index, logprobs=20, **choices[index % 5]) for index in range(24)]
    token_ids, logprobs, _ = Sampler().sample(logits, rows)
    for order in (list(range(23, -1, -1)), [5], [3, 11], list(range(0, 24, 3))):
        ids, found, _ = Sampler().sample(logits[order], [rows[index] for index in order])
        assert ids.tolist() == [token_ids[index] for index in order]
        assert [found[place] for place in range(len(order))] == [logprobs[i] for i in order]


def b100_tokens(
    start: int, history: list[int], neighbours: list[SamplingRow], place: int, sibling: int = 0
) -> list[int]:
    """Continue a seeded request of 16 tokens, with neighbours around it in every step."""
    oracle = FingerprintOracle(FingerprintConfig())
    for token_id in [1, 2, 3, *history]:
        oracle.append(token_id)
    output = list(history)
    for position in range(start, 16):
        logits = random_logits(len(neighbours) + 1, 1000, seed=position)
        logits[place] = oracle.logits()
        rows = list(neighbours)
        rows.insert(place, row(position, (), sibling, seed=42, temperature=0.8))
        output.append(sample_ids(logits, rows)[place])
        oracle.append(output[-1])
    return output


def test_b100_a_seeded_output_does_not_depend_on_its_neighbours() -> None:
    alone = b100_tokens(0, [], [], 0)
    assert len(set(alone)) > 8
    greedy = [row(temperature=0)]
    seeded = [row(3, seed=seed, temperature=1.0, top_p=0.9) for seed in range(7)]
    assert b100_tokens(0, [], greedy, 0) == alone
    assert b100_tokens(0, [], seeded, 0) == alone
    assert b100_tokens(0, [], seeded, 5) == alone
    # Another replica that takes over after eight tokens draws what this one would have.
    assert b100_tokens(8, alone[:8], seeded, 7) == alone
    # n=2: the first sibling is the request alone; the other is another and the same each time.
    other = b100_tokens(0, [], [], 0, sibling=1)
    assert other != alone
    assert b100_tokens(0, [], seeded, 3, sibling=1) == other


def test_siblings_draw_apart_from_the_same_logits() -> None:
    rows = [row(3, (), sibling, seed=9) for sibling in range(16)]
    ids = sample_ids(random_logits(1, 1000).expand(16, -1), rows)
    assert len(set(ids)) > 8
    assert ids[5:6] == sample_ids(random_logits(1, 1000), rows[5:6])


def test_large_batches_are_sampled_in_parts_with_the_same_result() -> None:
    logits = random_logits(2, 1 << 22)
    rows = [row(seed=1), row(seed=2)]
    together = sample_ids(logits, rows)
    assert together == [sample_ids(logits[i : i + 1], rows[i : i + 1])[0] for i in (0, 1)]


def test_no_rows_give_no_tokens() -> None:
    token_ids, logprobs, errors = Sampler().sample(torch.empty(0, 10), [])
    assert token_ids.shape == (0,)
    assert not logprobs
    assert not errors
