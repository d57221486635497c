"""Ranks in threads, a driver with scattered block tables, and small random models."""

import dataclasses
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from random_model import make_llama, make_model

from rayserve_kernels.metadata import AttentionMetadata
from rayserve_paged.model.build import StepModel
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import Collectives, SoloCollectives
from rayserve_paged.model.row_content import RowContent
from rayserve_paged.model.spec import DirectorySource
from rayserve_paged.model.step_batch import StepBatch

__all__ = ["make_llama", "make_model"]

TIMEOUT_S = 60.0
# Padding, and what windows hide, may hold anything: a block that does not exist shows who looks.
NO_BLOCK = 2**31 - 1

T = TypeVar("T")


class ThreadCollectives:
    """Ranks in threads of one process, which meet at a barrier and read each other's tensors."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.rank = rank
        self.world_size = len(box)
        self._barrier = barrier
        self._box = box

    def all_reduce(self, tensor: torch.Tensor) -> None:
        parts = self._exchange(tensor.clone())
        tensor.copy_(sum(parts[1:], start=parts[0]))
        self._barrier.wait(TIMEOUT_S)

    def gather_rows(self, rows: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        parts = self._exchange(rows)
        assert [part.shape[1] for part in parts] == list(widths)
        joined = torch.cat(parts, dim=1) if self.rank == 0 else None
        self._barrier.wait(TIMEOUT_S)
        return joined

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._box[self.rank] = tensor
        self._barrier.wait(TIMEOUT_S)
        return list(self._box)


def run_ranks(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run one call per rank in a thread of its own; the first error is raised here."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = calls[rank]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]
    return results


@dataclasses.dataclass
class DrivenSequence:
    """A sequence of the driver: all its tokens, how many are computed, and its blocks.

    For each place of `block_size` tokens it has one block of each layer group.
    """

    token_ids: list[int]
    num_computed: int
    block_ids: list[int]
    content: RowContent | None = None


class Gang:
    """The ranks of one model over pools of their own, driven step by step.

    Block tables are drawn at random from the free blocks, so that they are scattered, and the
    same table serves all ranks. Pools start full of garbage.
    """

    def __init__(
        self,
        build: Callable[[Collectives], StepModel],
        world_size: int = 1,
        block_size: int = 16,
        num_blocks: int = 64,
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        self.world_size = world_size
        barrier = threading.Barrier(world_size)
        box: list[Any] = [None] * world_size
        group: list[Collectives] = (
            [SoloCollectives()]
            if world_size == 1
            else [ThreadCollectives(rank, barrier, box) for rank in range(world_size)]
        )
        self.models = [build(collectives) for collectives in group]
        self.pools = [model.kv_layout(block_size).allocate(num_blocks) for model in self.models]
        for pool in self.pools:
            pool.keys.fill_(77)
            pool.values.fill_(-99)
            if pool.key_scales is not None and pool.value_scales is not None:
                pool.key_scales.fill_(77)
                pool.value_scales.fill_(-99)
        self._windows = [group.window for group in self.models[0].spec.layer_groups]
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()

    def start(self, token_ids: Sequence[int], content: RowContent | None = None) -> DrivenSequence:
        return DrivenSequence(list(token_ids), 0, [], content)

    def take_block(self) -> int:
        return self._free.pop()

    def step(self, work: Sequence[tuple[DrivenSequence, int]]) -> torch.Tensor:
        """Compute `count` tokens of each sequence; logits of each one's last token of the step."""
        for sequence, count in work:
            num_places = -(-(sequence.num_computed + count) // self.block_size)
            while len(sequence.block_ids) < num_places * len(self._windows):
                sequence.block_ids.append(self.take_block())
        batch = self.batch(work)
        calls = [
            lambda model=model, pool=pool: model.forward(batch, pool)
            for model, pool in zip(self.models, self.pools, strict=True)
        ]
        results = run_ranks(calls) if len(calls) > 1 else [calls[0]()]
        for sequence, count in work:
            sequence.num_computed += count
        assert all(result is None for result in results[1:])
        assert results[0] is not None
        return results[0]

    def batch(self, work: Sequence[tuple[DrivenSequence, int]]) -> StepBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        for sequence, count in work:
            end = sequence.num_computed + count
            assert end <= len(sequence.token_ids)
            token_ids += sequence.token_ids[sequence.num_computed : end]
            positions += range(sequence.num_computed, end)
        counts = [count for _, count in work]
        salts = None
        if any(sequence.content for sequence, _ in work):
            plain = RowContent(None)
            of_each = [(s.content or plain).salts(s.num_computed, count) for s, count in work]
            salts = torch.from_numpy(np.concatenate(of_each))
        return StepBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            metadata=tuple(self._metadata(work, group) for group in range(len(self._windows))),
            logits_rows=torch.tensor(np.cumsum(counts) - 1),
            salts=salts,
        )

    def _metadata(
        self, work: Sequence[tuple[DrivenSequence, int]], group: int
    ) -> AttentionMetadata:
        window, of_each = self._windows[group], []
        for sequence, _ in work:
            table = np.array(sequence.block_ids[group :: len(self._windows)])
            table[: window.num_unread_blocks(sequence.num_computed, self.block_size)] = NO_BLOCK
            of_each.append(table)
        tables = np.full((len(work), max(map(len, of_each))), NO_BLOCK, dtype=np.int32)
        for row, table in enumerate(of_each):
            tables[row, : len(table)] = table
        masks = {}
        if window.size is not None:
            masks["windows"] = np.full(len(work), window.size, np.int32)
            masks["num_sinks"] = np.full(len(work), window.num_sink_tokens, np.int32)
        num_computed = [sequence.num_computed for sequence, _ in work]
        counts = [count for _, count in work]
        return AttentionMetadata.for_step(tables, num_computed, counts, self.block_size, **masks)

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int] = ()) -> torch.Tensor:
        """fp32 [vocab_size] after the last token, computed in these chunks and then the rest."""
        sequence = self.start(token_ids)
        for count in chunks:
            self.step([(sequence, count)])
        rest = len(token_ids) - sequence.num_computed
        return self.step([(sequence, rest)])[0]

    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        budget: int = 1 << 20,
        contents: Sequence[RowContent | None] | None = None,
    ) -> list[list[int]]:
        """Greedy outputs of several prompts, batched, at most `budget` tokens a step."""
        logits = self.greedy_logits(prompts, num_tokens, budget, contents)
        return [rows.argmax(dim=1).tolist() for rows in logits]

    def greedy_logits(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        budget: int = 1 << 20,
        contents: Sequence[RowContent | None] | None = None,
    ) -> list[torch.Tensor]:
        """As `greedy`, what the tokens were chosen by: fp32 [num_tokens, vocab_size] of each."""
        of_each = contents or [None] * len(prompts)
        sequences = [
            self.start(prompt, content) for prompt, content in zip(prompts, of_each, strict=True)
        ]
        ends = [len(prompt) + num_tokens for prompt in prompts]
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        while True:
            left, work, sampled = budget, [], []
            for sequence, end, rows in zip(sequences, ends, logits, strict=True):
                known = len(sequence.token_ids)
                count = min(known - sequence.num_computed, left)
                if count and known < end:
                    work.append((sequence, count))
                    sampled.append(rows)
                    left -= count
            if not work:
                break
            for (sequence, _), rows, row in zip(work, sampled, self.step(work), strict=True):
                if sequence.num_computed == len(sequence.token_ids):
                    rows.append(row)
                    sequence.token_ids.append(int(row.argmax()))
        return [torch.stack(rows) for rows in logits]


@pytest.fixture
def make_gang() -> type[Gang]:
    return Gang


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    path = Path(__file__).with_name("golden_sample.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2() -> Iterator[DirectorySource]:
    # Not pytest's own temporary directory, which is kept: the copy has half a gigabyte.
    with tempfile.TemporaryDirectory(prefix="rayserve-paged-test-") as directory:
        source = resolve_model("smollm2", Path(directory))
        assert isinstance(source, DirectorySource)
        yield source
