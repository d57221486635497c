"""Penalties see the tokens of their own sequence, whatever became of its row and its blocks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from replica_driver import ReplicaDriver, Stream, make_limits, make_request
from torch.distributed import HashStore

from rayserve_cluster.executor import RankZeroExecutor
from rayserve_cluster.model_runner import ModelRunner
from rayserve_cluster.plan_codec import decode_plan, encode_plan
from rayserve_cluster.tp_group import TpGroup
from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.request import ModelLimits, Request
from rayserve_paged.core.step_messages import StepPlan, StepResult
from rayserve_paged.model.fingerprint import FingerprintModel, FingerprintOracle
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.spec import FingerprintConfig
from rayserve_paged.model.token_counts import TokenCounts

CONFIG = FingerprintConfig(vocab_size=97)
# Strong enough to change most tokens of so small a vocabulary.
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 2.0,
    "frequency_penalty": 1.5,
}
PROMPTS = [[7, 7, 8, 9, 9, 9, 10, 11, *([40 + i] * (i + 1))] for i in range(6)]


class Rank:
    """The only rank of a replica; keeps the plans that it ran."""

    def __init__(self, limits: ModelLimits) -> None:
        group = TpGroup(0, 1, timeout_s=60.0)
        group.connect(HashStore(), "alone", 60.0)
        model = FingerprintModel(CONFIG, group, TorchBackend())
        pool = model.kv_layout(limits.block_size).allocate(limits.num_blocks)
        runner = ModelRunner(
            model, pool, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len
        )
        self._executor = RankZeroExecutor(group, runner)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return self._executor.execute(plan, lambda: False)


def replica(num_blocks: int, **options: Any) -> tuple[ReplicaDriver, Rank]:  # noqa: ANN401
    driver = ReplicaDriver(make_limits(num_blocks, vocab_size=CONFIG.vocab_size), **options)
    rank = Rank(driver.limits)
    driver.rank = rank  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    return driver, rank


def alone(request: Request, sibling: int = 0) -> tuple[int, ...]:
    """The request's tokens without rows, blocks or steps: counted anew at each position."""
    params, prompt = request.params, list(request.prompt_token_ids)
    state = FingerprintOracle(CONFIG)
    for token_id in prompt:
        state.append(token_id)
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        counts = TokenCounts(np.array(prompt + output, np.int32), len(prompt))
        row = SamplingRow(params, len(output), (), sibling, counts)
        token_ids, _, errors = Sampler().sample(state.logits()[None], [row])
        assert not errors
        output.append(int(token_ids[0]))
        state.append(output[-1])
    return tuple(output)


def requests(max_tokens: int, **fields: Any) -> list[Request]:  # noqa: ANN401
    chosen: list[dict[str, Any]] = [PENALTIES | {"seed": i} | fields for i in range(len(PROMPTS))]
    return [
        make_request(prompt, max_tokens, request_id=f"q{i}", **chosen[i])
        for i, prompt in enumerate(PROMPTS)
    ]


def tokens(streams: Sequence[Stream]) -> list[tuple[int, ...]]:
    assert [stream.error for stream in streams] == [None] * len(streams)
    return [stream.token_ids for stream in streams]


def test_penalties_change_what_is_generated() -> None:
    (request,) = requests(40)[:1]
    plain = dataclasses.replace(
        request.params, repetition_penalty=1, presence_penalty=0, frequency_penalty=0
    )
    repeated = alone(dataclasses.replace(request, params=plain))
    assert len(set(alone(request))) > len(set(repeated))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"pipeline_depth": 2},
        {"max_decode_steps": 8},
        {"pipeline_depth": 2, "max_decode_steps": 8, "max_num_batched_tokens": 7},
    ],
)
def test_penalties_survive_preemption_and_cached_prefixes(
    options: dict[str, int], temperature: float
) -> None:
    asked = requests(24, temperature=temperature)
    driver, rank = replica(18, **options)
    streams = driver.generate(*asked)
    assert driver.replica.batcher.num_preemptions > 0
    starts = [start for plan in rank.plans for start in plan.starts]
    # Tokens that were computed before and that no plan will name again, outputs known.
    assert any(
        start.history is not None
        and start.num_computed > 0
        and len(start.history) > start.num_prompt_tokens
        for start in starts
    )
    assert tokens(streams) == [alone(request) for request in asked]


@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_count_their_own_tokens(depth: int) -> None:
    (request,) = requests(20, temperature=1.0, n=3)[:1]
    driver, _ = replica(40, pipeline_depth=depth)
    driver.generate(request)
    streams = [driver.reader().stream(request, sibling) for sibling in range(3)]
    expected = [alone(request, sibling) for sibling in range(3)]
    assert tokens(streams) == expected
    assert len(set(expected)) == 3


def test_a_row_forgets_the_counts_of_its_former_sequence() -> None:
    driver, _ = replica(40, max_num_seqs=1)
    first, second = requests(12)[:2]
    # Shorter than the prefix that the next one takes from the cache.
    short = make_request([5], 1, request_id="short", presence_penalty=1.0)
    plain = make_request(list(range(20)), 12, request_id="plain")
    again = dataclasses.replace(plain, request_id=RequestId("again"))
    for request in (first, plain, short, again, second):
        assert tokens(driver.generate(request)) == [alone(request)]


def test_only_rows_with_penalties_carry_a_history_and_followers_get_none() -> None:
    driver, rank = replica(60)
    penalised = requests(4)[:2]
    plain = make_request([1, 2, 3], 4, request_id="plain")
    driver.generate(*penalised, plain)
    starts = [start for plan in rank.plans for start in plan.starts]
    assert len(starts) == 3
    for start in starts:
        assert (start.history is not None) == start.params.has_penalties
    assert starts[0].history is not None
    assert starts[0].history.tolist() == PROMPTS[0]
    for plan in rank.plans:
        if not len(plan.late):
            assert all(start.history is None for start in decode_plan(encode_plan(plan)).starts)
