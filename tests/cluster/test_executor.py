"""Rank 0 and its followers, run plan by plan."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from rayserve_cluster.executor import RankZeroExecutor, follow
from rayserve_cluster.model_runner import ModelRunner
from rayserve_cluster.tp_group import GroupBrokenError, TpGroup
from rayserve_kernels.attention import TorchBackend
from rayserve_kernels.layout import KVLayout, KVPool
from rayserve_paged.core.ids import Row, StepId
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import RowStart, StepPlan
from rayserve_paged.model.build import StepModel
from rayserve_paged.model.fingerprint import FingerprintModel
from rayserve_paged.model.spec import FingerprintConfig, ModelSpec
from rayserve_paged.model.step_batch import StepBatch

_LONG_S = 60.0
_BLOCK_SIZE = 16
_NUM_BLOCKS = 16
CONFIG = FingerprintConfig(vocab_size=256)


def fingerprint(group: TpGroup) -> StepModel:
    return FingerprintModel(CONFIG, group, TorchBackend())


class Gang:
    """Ranks in threads; each step decodes one row, or prefills it at first."""

    def __init__(
        self, world_size: int, build: Callable[[TpGroup], StepModel] = fingerprint
    ) -> None:
        self.groups = [TpGroup(rank, world_size, timeout_s=_LONG_S) for rank in range(world_size)]
        self._pool = ThreadPoolExecutor(world_size)
        store = HashStore()
        list(self._pool.map(lambda group: group.connect(store, "gang", _LONG_S), self.groups))
        self.runners = [self._runner(build(group)) for group in self.groups]
        self.executor = RankZeroExecutor(self.groups[0], self.runners[0])
        self.known = [5, 6, 7]
        self._num_computed = 0
        self.following: list[Future[None]] = []

    def _runner(self, model: StepModel) -> ModelRunner:
        pool = model.kv_layout(_BLOCK_SIZE).allocate(_NUM_BLOCKS)
        return ModelRunner(model, pool, max_num_seqs=1, max_model_len=_BLOCK_SIZE * _NUM_BLOCKS)

    def follow(self) -> None:
        """Start the followers' loops."""
        self.following = [
            self._pool.submit(follow, group, runner)
            for group, runner in zip(self.groups[1:], self.runners[1:], strict=True)
        ]

    def step(self, params: SamplingParams) -> None:
        """Run one step and take its token."""
        first = self._num_computed == 0
        blocks = np.arange(_NUM_BLOCKS, dtype=np.int32)[::-1].copy()
        new = np.array(self.known[self._num_computed :], np.int32)
        plan = StepPlan(
            step_id=StepId(len(self.known)),
            starts=(RowStart(Row(0), 0, blocks, params, 3),) if first else (),
            append_rows=np.zeros(0, np.int32),
            append_blocks=np.zeros(0, np.int32),
            rows=np.zeros(1, np.int32),
            num_computed=np.array([self._num_computed], np.int32),
            num_tokens=np.array([len(new)], np.int32),
            token_ids=new,
            copies=np.zeros((0, 3), np.int32),
            late=np.zeros(0, np.int32),
            sample_indices=np.zeros(1, np.int32),
            sample_siblings=np.zeros(1, np.int32),
            num_steps=1,
        )
        result = self.executor.execute(plan, lambda: False)
        self._num_computed = len(self.known)
        self.known.append(int(result.token_ids[0, 0]))


@pytest.mark.parametrize("seed", [3, 90210])
def test_b67_every_rank_has_the_same_token_history_whatever_its_random_state(seed: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=200)
    gang, alone = Gang(2), Gang(1)
    gang.follow()
    torch.rand(1)  # A draw from torch's own generator, which no choice depends on.
    for _ in range(200):
        gang.step(params)
        alone.step(params)
    gang.executor.shutdown()
    for future in gang.following:
        future.result(_LONG_S)
    assert gang.known == alone.known
    digests = {runner.history_digest for runner in (*gang.runners, *alone.runners)}
    assert len(digests) == 1
    assert len({group.plan_digest for group in gang.groups}) == 1
    assert len(set(gang.known)) > 50


class FailingModel:
    """Raises in its second step on one rank; on the others it waits for that rank."""

    def __init__(self, group: TpGroup, failing_rank: int) -> None:
        self.spec: ModelSpec = CONFIG.spec()
        self._group = group
        self._failing_rank = failing_rank
        self._num_steps = 0

    def kv_layout(self, block_size: int) -> KVLayout:
        return KVLayout(1, 1, block_size, 1, torch.int64)

    def forward(
        self,
        batch: StepBatch,
        pool: KVPool,
        take_scored: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        self._num_steps += 1
        if self._num_steps == 2 and self._group.rank == self._failing_rank:
            raise MemoryError("no room")
        self._group.all_reduce(torch.zeros(4))
        return torch.zeros(1, 256) if self._group.rank == 0 else None


GREEDY = SamplingParams(temperature=0.0)


def test_a_follower_that_raises_breaks_the_group_for_all() -> None:
    gang = Gang(3, lambda group: FailingModel(group, failing_rank=2))
    gang.follow()
    gang.step(GREEDY)
    with pytest.raises(GroupBrokenError):
        gang.step(GREEDY)
    with pytest.raises(MemoryError, match="no room"):
        gang.following[1].result(_LONG_S)
    with pytest.raises(GroupBrokenError):
        gang.following[0].result(_LONG_S)
    gang.executor.shutdown()


def test_followers_hear_of_an_abort_and_shutdown_after_it_is_silent() -> None:
    gang = Gang(3)
    gang.follow()
    gang.step(GREEDY)
    gang.executor.abort("enough")
    for future in gang.following:
        with pytest.raises(GroupBrokenError):
            future.result(_LONG_S)
    with pytest.raises(GroupBrokenError, match="enough"):
        gang.executor.heartbeat()
    gang.executor.shutdown()


def test_a_heartbeat_finds_out_that_a_follower_is_gone() -> None:
    gang = Gang(2)
    gang.groups[1].close()

    def beat() -> None:
        # The first may still fit into a socket whose other end has closed.
        for _ in range(100):
            gang.executor.heartbeat()

    with pytest.raises(GroupBrokenError, match="broke at rank 0"):
        beat()
