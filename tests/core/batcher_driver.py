"""One request on a batcher and a toy rank, without a replica around."""

from collections import deque

from replica_driver import make_scope, prompt_keys

from rayserve_paged.core.batcher import Batcher
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.request import ModelLimits, Request
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.core.step_messages import StepPlan
from rayserve_paged.sim.fingerprint_rank import FingerprintRank


class BatcherDriver:
    """Runs steps of one request, and of what is forked from it.

    Args:
        request: The request.
        limits: Of pool and rank.
        budget: Of a step.
        pipeline_depth: Steps in flight.
    """

    def __init__(
        self, request: Request, limits: ModelLimits, budget: int = 64, pipeline_depth: int = 1
    ) -> None:
        self.limits = limits
        num_groups = len(limits.layer_groups)
        self.kv = KVManager(
            BlockPool(limits.num_blocks), limits.block_size, num_layer_groups=num_groups
        )
        self.pool = self.kv.pool
        self.batcher = Batcher(self.kv, 4, budget, pipeline_depth)
        self.rank = FingerprintRank(limits)
        self.plans: deque[StepPlan] = deque()
        self.copies: list[list[int]] = []
        scope = make_scope(limits.block_size)
        self.first = SequenceState(
            request,
            prompt_keys(request, scope),
            scope.root(request.scope),
            0,
            (),
            limits.block_size,
            request.params.n,
            limits.layer_groups,
        )
        self.batcher.add(self.first)

    def step(self) -> tuple[SequenceState, ...]:
        """Plan what may be planned, and finish the oldest step; return the running samples."""
        while self.batcher.can_plan and (plan := self.batcher.plan_step()) is not None:
            self.plans.append(plan)
            self.copies += plan.copies.tolist()
        return self.finish_oldest()

    def finish_oldest(self) -> tuple[SequenceState, ...]:
        self.batcher.commit(self.rank.run(self.plans.popleft()))
        return self.batcher.running
