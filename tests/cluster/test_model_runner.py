"""One rank's runner: batches from plans, rows by differences, choices that fail alone."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from rayserve_cluster.model_runner import ModelRunner
from rayserve_kernels.attention import TorchBackend
from rayserve_kernels.layout import KVLayout, KVPool
from rayserve_paged.core.ids import Row, StepId
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import IntArray, RowStart, StepPlan, TokenLogprobs
from rayserve_paged.model.fingerprint import FingerprintModel, oracle
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.spec import FingerprintConfig, ModelSpec
from rayserve_paged.model.step_batch import StepBatch

BLOCK_SIZE = 4
CONFIG = FingerprintConfig(vocab_size=256)
GREEDY = SamplingParams(temperature=0.0)


class RecordingModel:
    """Keeps the batches; its logits are a constant that the test sets."""

    def __init__(self, logits: torch.Tensor | None = None) -> None:
        self.spec: ModelSpec = CONFIG.spec()
        self.logits = logits
        self.batches: list[StepBatch] = []

    def kv_layout(self, block_size: int) -> KVLayout:
        return KVLayout(1, 1, block_size, 1, torch.int64)

    def forward(
        self,
        batch: StepBatch,
        pool: KVPool,
        take_scored: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        self.batches.append(batch)
        return self.logits


def recording_runner(
    logits: torch.Tensor | None = None, sampler: Sampler | None = None
) -> tuple[ModelRunner, RecordingModel]:
    model = RecordingModel(logits)
    pool = model.kv_layout(BLOCK_SIZE).allocate(32)
    return ModelRunner(model, pool, max_num_seqs=4, max_model_len=40, sampler=sampler), model


def start(
    row: int, blocks: Sequence[int], params: SamplingParams = GREEDY, computed: int = 0
) -> RowStart:
    return RowStart(Row(row), computed, np.array(blocks, np.int32), params, num_prompt_tokens=3)


def step(
    step_id: int,
    rows: Sequence[tuple[int, int, Sequence[int], bool]],
    starts: Sequence[RowStart] = (),
    appends: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """A plan from (row, num_computed, tokens, samples) and (row, appended block)."""
    indices = np.flatnonzero([samples for *_, samples in rows]).astype(np.int32)
    return StepPlan(
        step_id=StepId(step_id),
        starts=tuple(starts),
        append_rows=np.array([row for row, _ in appends], np.int32),
        append_blocks=np.array([block for _, block in appends], np.int32),
        rows=np.array([row for row, *_ in rows], np.int32),
        num_computed=np.array([computed for _, computed, *_ in rows], np.int32),
        num_tokens=np.array([len(tokens) for _, _, tokens, _ in rows], np.int32),
        token_ids=np.array([t for _, _, tokens, _ in rows for t in tokens], np.int32),
        copies=np.zeros((0, 3), np.int32),
        late=np.zeros(0, np.int32),
        sample_indices=indices,
        sample_siblings=np.zeros_like(indices),
        num_steps=1,
    )


def test_a_batch_flattens_the_rows_of_a_plan() -> None:
    runner, model = recording_runner()
    starts = [start(2, [5, 1, 6]), start(0, [5, 3], computed=4)]
    rows = [(2, 0, range(10, 20), False), (0, 4, [30, 31, 32], True)]
    runner.run(step(0, rows, starts))
    (batch,) = model.batches
    assert batch.token_ids.tolist() == [*range(10, 20), 30, 31, 32]
    assert batch.positions.tolist() == [*range(10), 4, 5, 6]
    assert batch.logits_rows.tolist() == [12]
    assert batch.metadata[0].query_start.tolist() == [0, 10, 13]
    assert batch.metadata[0].seq_lens.tolist() == [10, 7]
    assert batch.metadata[0].block_tables[0].tolist() == [5, 1, 6]
    assert batch.metadata[0].block_tables[1, :2].tolist() == [5, 3]
    expected = [20, 21, 22, 23, 4, 5, 6, 7, 24, 25, 12, 13, 14]
    assert batch.metadata[0].slot_mapping.tolist() == expected


def test_appended_blocks_extend_the_tables_in_their_order() -> None:
    runner, model = recording_runner()
    runner.run(step(0, [(0, 0, [1], True), (3, 0, [2], True)], [start(0, [9]), start(3, [8])]))
    appends = [(3, 4), (0, 7), (3, 2), (0, 11), (3, 6)]
    runner.run(step(1, [(0, 1, [5] * 11, True), (3, 1, [6] * 15, True)], (), appends))
    tables = model.batches[1].metadata[0].block_tables
    assert tables[0, :3].tolist() == [9, 7, 11]
    assert tables[1, :4].tolist() == [8, 4, 2, 6]
    runner.run(step(2, [(0, 12, [5], True)], (), [(0, 1)]))
    assert model.batches[2].metadata[0].block_tables.tolist() == [[9, 7, 11, 1]]


def test_b28_a_step_that_is_computed_late_has_the_block_table_of_its_own_plan() -> None:
    runner, model = recording_runner()
    for number in range(0, 2000, 2):
        # Both are queued before either is computed, on one row of the runner's tables.
        runner.run(step(number, [(0, 0, [1] * 8, True)], [start(0, [5, 6])]))
        runner.run(step(number + 1, [(0, 0, [1] * 8, True)], [start(0, [9, 1])]))
    echoes = [batch.metadata[0].block_tables.tolist() for batch in model.batches]
    assert echoes == [[[5, 6]], [[9, 1]]] * 1000


def test_a_row_that_starts_again_forgets_its_former_table() -> None:
    runner, model = recording_runner()
    runner.run(step(0, [(0, 0, [1] * 12, True)], [start(0, [9, 8, 7])]))
    runner.run(step(1, [(0, 0, [1] * 6, True)], [start(0, [3])], [(0, 2)]))
    assert model.batches[1].metadata[0].block_tables.tolist() == [[3, 2]]


def test_tokens_equal_the_oracles_through_chunks_and_scattered_blocks() -> None:
    model = FingerprintModel(CONFIG, SoloCollectives(), TorchBackend())
    pool = model.kv_layout(BLOCK_SIZE).allocate(32)
    runner = ModelRunner(model, pool, max_num_seqs=2, max_model_len=64)
    known = [7, 3, 250, 9, 9, 1, 40]
    runner.run(step(0, [(1, 0, known[:5], False)], [start(1, [30, 2])]))
    expected = oracle(known, 9, CONFIG)
    computed, num_blocks, free = 5, 2, iter([17, 4, 21])
    for step_id in range(1, 10):
        appends = []
        if len(known) > num_blocks * BLOCK_SIZE:
            num_blocks += 1
            appends = [(1, next(free))]
        plan = step(step_id, [(1, computed, known[computed:], True)], (), appends)
        logits = runner.run(plan)
        assert logits is not None
        computed = len(known)
        known.append(int(runner.sample(plan, logits).token_ids[0, 0]))
    assert known[7:] == expected
    assert num_blocks == 4


def test_a_random_choice_depends_on_the_output_position_and_not_on_the_row() -> None:
    logits = torch.linspace(0, 1, 256).repeat(2, 1)
    runner, _ = recording_runner(logits)
    params = SamplingParams(temperature=1.0, seed=5)
    starts = [start(0, [1], params), start(2, [2], params)]
    plan = step(0, [(0, 0, [1, 2, 3], True), (2, 0, [1, 2, 3], True)], starts)
    runner.run(plan)
    first = runner.sample(plan, logits).token_ids[0]
    plan = step(1, [(2, 3, [4], True), (0, 3, [4], True)])
    runner.run(plan)
    second = runner.sample(plan, logits).token_ids[0]
    assert first[0] == first[1] != second[0] == second[1]


def test_b93_a_row_of_nan_fails_alone() -> None:
    logits = torch.zeros(3, 256)
    logits[:, 9] = 1.0
    logits[1, 7] = torch.nan
    runner, _ = recording_runner(logits)
    rows = [(row, 0, [1, 2, 3], True) for row in range(3)]
    plan = step(0, rows, [start(row, [row]) for row in range(3)])
    runner.run(plan)
    result = runner.sample(plan, logits)
    assert list(result.errors) == [1]
    assert "NaN" in result.errors[1]
    assert result.token_ids[0, [0, 2]].tolist() == [9, 9]


class PoisonedSampler(Sampler):
    """Raises for whoever asks for the seed 13."""

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[IntArray, dict[int, TokenLogprobs], dict[int, str]]:
        if any(row.params.seed == 13 for row in rows):
            raise ZeroDivisionError("poison")
        return super().sample(logits, rows)


def test_b93_a_row_whose_sampling_raises_fails_alone() -> None:
    logits = torch.zeros(4, 256)
    logits[:, 9] = 1.0
    logits[3, 0] = torch.nan
    seeds = [1, 13, 2, 3]
    params = [SamplingParams(temperature=0.0, seed=seed, logprobs=1) for seed in seeds]
    rows = [(row, 0, [1, 2, 3], True) for row in range(4)]
    plan = step(0, rows, [start(row, [row], params[row]) for row in range(4)])
    runner, _ = recording_runner(logits, PoisonedSampler())
    runner.run(plan)
    result = runner.sample(plan, logits)
    assert sorted(result.errors) == [1, 3]
    assert result.errors[1] == "sampling raised ZeroDivisionError: poison"
    assert result.token_ids[0, [0, 2]].tolist() == [9, 9]
    assert sorted(result.logprobs) == [0, 2]
    assert result.logprobs[2].top[0][0] == 9


def test_a_step_that_only_prefills_samples_nothing() -> None:
    logits = torch.empty(0, 256)
    runner, _ = recording_runner(logits)
    plan = step(0, [(0, 0, [1, 2], False)], [start(0, [1])])
    runner.run(plan)
    result = runner.sample(plan, logits)
    assert (result.token_ids.size, result.errors, result.logprobs) == (0, {}, {})


def test_the_history_digest_tells_histories_apart() -> None:
    digests = set()
    for tokens in ([1, 2, 3], [1, 2, 4]):
        runner, _ = recording_runner()
        runner.run(step(0, [(0, 0, tokens, True)], [start(0, [1])]))
        digests.add(runner.history_digest)
    assert len(digests) == 2


def test_a_table_too_short_for_its_tokens_is_refused() -> None:
    runner, _ = recording_runner()
    with pytest.raises(ValueError, match="block"):
        runner.run(step(0, [(0, 38, [1, 2, 3, 4], True)], [start(0, [1] * 10)]))
