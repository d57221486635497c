"""Replicas that share a machine: a step goes on at another pace when a neighbour begins or ends."""

import dataclasses

import numpy as np
import pytest
from sim_harness import make_spec, make_workload, simulate

from rayserve_paged.core.ids import StepId
from rayserve_paged.core.step_messages import IntArray, StepPlan, StepResult
from rayserve_paged.sim.cost_model import FloatArray
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.executor import SimulatedExecutor
from rayserve_paged.sim.histogram import LogHistogram
from rayserve_paged.sim.machine import Machine


@dataclasses.dataclass(frozen=True)
class Crowded:
    """Every step takes 10 s for each replica that runs one."""

    max_active: int = 4
    step_s: float = 10.0

    def step_seconds(
        self,
        num_computed: IntArray,
        num_tokens: IntArray,
        num_samples: int,
        num_steps: int,
        num_active: int = 1,
    ) -> FloatArray:
        return np.full(num_steps, self.step_s * num_active)


def empty_plan(step_id: int, num_steps: int) -> StepPlan:
    nothing = np.zeros(0, np.int32)
    one = np.ones(1, np.int32)
    return StepPlan(
        step_id=StepId(step_id),
        starts=(),
        append_rows=nothing,
        append_blocks=nothing,
        copies=np.zeros((0, 3), np.int32),
        rows=nothing,
        num_computed=one,
        num_tokens=one,
        token_ids=one,
        late=nothing,
        sample_indices=nothing,
        sample_siblings=nothing,
        num_steps=num_steps,
    )


class Site:
    """Two replicas of one machine, and when their plans ended."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.machine = Machine()
        self.ends: list[tuple[str, float, int]] = []
        self.a, self.b = (self._executor(name) for name in "ab")

    def _executor(self, name: str) -> SimulatedExecutor:
        def finished(result: StepResult) -> None:
            self.ends.append((name, self.engine.now, len(result.token_ids)))

        gaps = LogHistogram()
        return SimulatedExecutor(self.engine, Crowded(), 4, 32, finished, gaps, self.machine)


def test_a_step_slows_down_when_a_neighbour_begins_and_speeds_up_when_it_ends() -> None:
    site = Site()
    site.engine.at(0.0, site.a.run, empty_plan(0, 1))
    site.engine.at(4.0, site.b.run, empty_plan(0, 1))
    site.engine.run(100.0)
    # After 4 s of 10, the other 60% take 12 s. By then b has run 60% too, and goes on alone.
    assert site.ends == [("a", pytest.approx(16.0), 1), ("b", pytest.approx(20.0), 1)]
    assert site.machine.num_active == 0
    assert (site.a.busy_s, site.b.busy_s) == (pytest.approx(16.0), pytest.approx(16.0))


def test_a_run_of_steps_is_paced_as_single_ones_are() -> None:
    ends = []
    for num_steps in (1, 3):
        site = Site()
        for step_id in range(3 // num_steps):
            site.engine.at(0.0, site.a.run, empty_plan(step_id, num_steps))
        site.engine.at(13.0, site.b.run, empty_plan(0, 1))
        site.engine.run(100.0)
        ends.append({name: end for name, end, _steps in site.ends})
    # a: 10 alone, then 3 of 10; with b the 7 left take 14, and of the third step 6 take the 6 s
    # until b has had its 20. The rest of it takes 7.
    assert ends == [{"a": pytest.approx(40.0), "b": pytest.approx(33.0)}] * 2


def test_a_run_that_was_cut_is_paced_too() -> None:
    site = Site()
    site.engine.at(0.0, site.a.run, empty_plan(0, 5))
    site.engine.at(12.0, site.a.interrupt)
    site.engine.at(15.0, site.b.run, empty_plan(0, 1))
    site.engine.run(100.0)
    # Half of the second step is left, which takes 10 s; b has 10 of its 20 by then, and 5 to go.
    assert site.ends == [("a", pytest.approx(25.0), 2), ("b", pytest.approx(30.0), 1)]


def test_a_neighbour_that_is_stopped_lets_the_others_go_faster() -> None:
    site = Site()
    site.engine.at(0.0, site.a.run, empty_plan(0, 1))
    site.engine.at(0.0, site.b.run, empty_plan(0, 1))
    site.engine.at(10.0, site.b.stop)
    site.engine.run(100.0)
    assert site.ends == [("a", pytest.approx(15.0), 1)]


def test_replicas_on_one_node_share_it_and_others_do_not() -> None:
    requests = make_workload(1, num_requests=20)
    spec = make_spec(num_replicas=2, max_decode_steps=1)
    times = []
    for cost, per_node in [(Crowded(1, 0.01), 2), (Crowded(2, 0.01), 2), (Crowded(2, 0.01), 1)]:
        chosen = dataclasses.replace(spec, cost=cost, ranks_per_node=per_node)
        times.append(float(simulate(chosen, requests).report.requests.e2e_s.mean()))
    alone, shared, apart = times
    assert apart == pytest.approx(alone)
    # Who is served more slowly meets more others in the batch: it may be a little over twice.
    assert 1.1 * alone < shared <= 2.1 * alone
