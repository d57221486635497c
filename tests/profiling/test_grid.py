"""The grid of a profile: what it covers, how tables predict steps between its points."""

import dataclasses
import statistics

import pytest

from rayserve_paged.core.config import BatchConfig
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.profiling.grid import (
    choose_grid,
    held_out_errors,
    held_out_shapes,
    tables_of,
    time_shapes,
)
from rayserve_paged.profiling.ranks import ReplicaProcesses, Rounds
from rayserve_paged.profiling.step_plans import (
    StepShape,
    chunk_shape,
    decode_shape,
    make_plan,
    mixed_shape,
)
from rayserve_paged.sim.profile import Profile
from rayserve_paged.sim.profiled_cost import ProfiledCost

LIMITS = ModelLimits(1000, 4096, 40, 16, (), 16)
BATCH = BatchConfig(max_num_seqs=16, max_num_batched_tokens=256)


def law(shape: StepShape, level: int) -> float:
    """A step that takes time per step, token, sample, and pair of tokens, more where shared."""
    seconds = 0.02 + 0.003 * int(shape.num_tokens.sum()) + 0.001 * (len(shape.rows) - 1)
    for computed, tokens in shape.rows:
        seconds += 1e-6 * tokens * (computed + tokens / 2)
    return seconds * (1 + 0.3 * (level - 1))


def test_a_grid_reaches_to_the_bounds_of_a_batch_and_covers_what_lies_between() -> None:
    grid = choose_grid(BATCH, LIMITS, 512)
    assert grid.num_tokens == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert grid.num_sequences == (1, 2, 4, 8, 16)
    assert grid.decode_contexts == (16, 128, 512)
    assert grid.chunk_tokens == (16, 64, 256)
    assert grid.chunk_contexts == (0, 128, 512)
    small = choose_grid(BatchConfig(max_num_seqs=1, max_num_batched_tokens=8), LIMITS, 40)
    assert small.num_sequences == (1, 2)
    assert small.num_tokens == (1, 2, 4, 8)
    assert small.chunk_tokens == (8, 9)
    with pytest.raises(InvalidInputError, match="max_context=5000"):
        choose_grid(BATCH, LIMITS, 5000)


def test_tables_predict_steps_that_they_do_not_hold() -> None:
    grid = choose_grid(BATCH, LIMITS, 512)
    held_out = held_out_shapes(grid)
    kinds = {(min(s.num_tokens) > 1, max(s.num_tokens) > 1) for s in held_out}
    assert kinds == {(False, False), (True, True), (False, True)}
    levels = (1, 2)
    seconds = {(n, s): law(s, n) for n in levels for s in [*grid.shapes(), *held_out]}
    tables = tables_of(grid, seconds, levels)
    cost = ProfiledCost(Profile(model="law", dtype="fp32", device="none", tables=tables))
    for level in levels:
        for shape in grid.shapes():
            (predicted,) = cost.step_seconds(shape.num_computed, shape.num_tokens, 1, 1, level)
            assert predicted == pytest.approx(law(shape, level))
    errors = held_out_errors(cost, {job: seconds[job] for job in seconds if job[1] in held_out})
    assert errors.num_steps == 2 * len(set(held_out))
    assert errors.mean_error < 0.01
    assert errors.mean_error <= errors.p90_error < 0.03
    # One that is 10% off everywhere is 10% off.
    off = held_out_errors(cost, {job: 1.1 * seconds[job] for job in seconds})
    assert off.mean_error == pytest.approx(0.1 / 1.1, rel=0.05)


@dataclasses.dataclass
class FakeProcesses:
    """Gives samples by the law, some of them from a slow spell."""

    calls: list[tuple[int, StepShape]]

    def time_steps(self, shape: StepShape, num_active: int, rounds: Rounds) -> list[float]:
        self.calls.append((num_active, shape))
        slow = 3.0 if len(self.calls) % 3 == 0 else 1.0
        return [law(shape, num_active) * slow] * rounds.least


def test_every_pass_goes_through_all_steps_in_another_order_and_medians_shed_slow_spells() -> None:
    processes = FakeProcesses([])
    shapes = [decode_shape(n, 64) for n in (1, 2, 3, 4, 5)]
    told: list[str] = []
    got = time_shapes(processes, shapes, (1, 2), 5, Rounds(least=3), told.append)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert len(processes.calls) == len(told) == 50
    assert [set(processes.calls[i : i + 10]) for i in range(0, 50, 10)] == [set(got)] * 5
    assert processes.calls[:10] != processes.calls[10:20]
    right = [seconds == pytest.approx(law(shape, level)) for (level, shape), seconds in got.items()]
    assert statistics.mean(right) > 0.5


def test_a_plan_has_the_rows_and_the_blocks_of_its_shape() -> None:
    plan = make_plan(mixed_shape(decode_shape(3, 100), chunk_shape(40, 20)), LIMITS)
    assert plan.rows.tolist() == plan.sample_indices.tolist() == [0, 1, 2, 3]
    assert plan.num_computed.tolist() == [100, 100, 100, 20]
    assert plan.num_tokens.tolist() == [1, 1, 1, 40]
    assert len(plan.token_ids) == 43
    assert plan.token_ids.max() < LIMITS.vocab_size
    assert [len(start.block_ids) for start in plan.starts] == [7, 7, 7, 4]
    # Each has blocks of its own, as long as the pool has any.
    blocks = [block for start in plan.starts for block in start.block_ids.tolist()]
    assert blocks == list(range(25))
    crowded = make_plan(decode_shape(16, 100), LIMITS)
    assert max(start.block_ids.max() for start in crowded.starts) == LIMITS.num_blocks - 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_replicas_in_processes_of_their_own_run_steps_at_once(width: int) -> None:
    from rayserve_paged.load_config import load_config

    flags = {
        "model.model": "fingerprint",
        "cache.num_blocks": 64,
        "parallel.num_replicas": 2,
        "parallel.tensor_parallel_size": width,
        "batch.max_num_seqs": 8,
    }
    with ReplicaProcesses(load_config(flags=flags)) as processes:
        assert processes.limits.num_blocks == 64
        for num_active in (1, 2):
            rounds = Rounds(least=5, seconds=0.0)
            seconds = processes.time_steps(decode_shape(4, 30), num_active, rounds)
            assert len(seconds) == 5 * num_active
            assert min(seconds) > 0
        # As many rounds as fit the time, and not more than asked for.
        few = processes.time_steps(chunk_shape(20, 0), 1, Rounds(least=1, seconds=60.0, most=7))
        assert len(few) == 7


@pytest.mark.slow
def test_a_model_that_is_not_accepted_is_refused_by_its_field() -> None:
    from rayserve_paged.load_config import load_config

    config = load_config(flags={"model.model": "fingerprint", "cache.num_blocks": 10**9})
    with pytest.raises(InvalidInputError, match=r"cache\.num_blocks"):
        ReplicaProcesses(config)
