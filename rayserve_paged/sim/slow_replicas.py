"""Steps of a replica that take longer for a while, as a fault plan says."""

from rayserve_paged.core.step_messages import IntArray
from rayserve_paged.sim.cost_model import CostModel, FloatArray
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.faults import FaultPlan, SlowReplica


def slowed(cost: CostModel, engine: Engine, plan: FaultPlan, replica: str) -> CostModel:
    """Return the cost of a replica's steps under a fault plan."""
    spells = [one for one in plan.faults if isinstance(one, SlowReplica)]
    own = tuple(one for one in spells if one.replica == replica)
    return SlowedCost(cost, engine, own) if own else cost


class SlowedCost:
    """Steps that take longer while a spell lasts; a `CostModel`.

    A plan of several steps is as slow throughout as when it begins.

    Args:
        cost: Without the spells.
        engine: The clock.
        spells: Whose factors multiply where they overlap.
    """

    def __init__(self, cost: CostModel, engine: Engine, spells: tuple[SlowReplica, ...]) -> None:
        self._cost = cost
        self._engine = engine
        self._spells = spells

    @property
    def max_active(self) -> int:
        """As `CostModel.max_active`."""
        return self._cost.max_active

    def step_seconds(
        self,
        num_computed: IntArray,
        num_tokens: IntArray,
        num_samples: int,
        num_steps: int,
        num_active: int = 1,
    ) -> FloatArray:
        """As `CostModel.step_seconds`."""
        factor, now = 1.0, self._engine.now
        for spell in self._spells:
            if spell.covers(now):
                factor *= spell.factor
        seconds = self._cost.step_seconds(
            num_computed, num_tokens, num_samples, num_steps, num_active
        )
        return seconds * factor
