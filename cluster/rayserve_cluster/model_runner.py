"""Runs step plans on one rank: block tables by differences, the batch, the model, the choice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rayserve_cluster.decode_graphs import DecodeGraphs
from rayserve_kernels.block_copy import copy_blocks
from rayserve_kernels.gpu.prefix_groups import SharedPrefixes
from rayserve_kernels.host_metadata import HostMetadata
from rayserve_kernels.layout import KVPool
from rayserve_kernels.staging import Array, StepUploads
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import (
    IntArray,
    RowStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from rayserve_paged.model.build import StepModel
from rayserve_paged.model.host_batch import HostBatch
from rayserve_paged.model.prompt_scorer import PromptScorer
from rayserve_paged.model.row_content import RowContent
from rayserve_paged.model.row_grammar import GrammarMatchers, RowGrammar
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import LogitEdits, SamplingRow
from rayserve_paged.model.step_batch import StepBatch
from rayserve_paged.model.token_counts import TokenCounts

FindSharedPrefixes = Callable[
    [npt.NDArray[np.int32], Sequence[int], Sequence[int]], SharedPrefixes | None
]
"""From block tables, int32 [num_seqs, width], and the tokens of each sequence that are computed and
that are new."""

NO_WINDOW = int(np.iinfo(np.int32).max)

# What a choice for one row can raise. Whatever else is raised is no fault of a row.
_ROW_ERRORS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


class ModelRunner:
    """One rank's shard, its pool, and the rows that the plans speak of.

    Args:
        model: The shard.
        pool: Its blocks.
        max_num_seqs: Rows.
        max_model_len: Most tokens of one sequence, which bounds its block table.
        sampler: Chooses tokens; used on rank 0 alone.
        matchers: For rows whose output follows a grammar; on rank 0 alone.
        find_shared_prefixes: Tells which sequences of a step had better read their first blocks
            together; None where what attends reads each sequence by itself.
        with_graphs: Stage what steps need in pinned memory, and replay steps of decoding from
            graphs. The pool then has one block more than the plans know of, its last one.
    """

    def __init__(
        self,
        model: StepModel,
        pool: KVPool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        sampler: Sampler | None = None,
        matchers: GrammarMatchers | None = None,
        find_shared_prefixes: FindSharedPrefixes | None = None,
        with_graphs: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self._sampler = Sampler() if sampler is None else sampler
        self._matchers = matchers
        self.max_num_seqs = max_num_seqs
        self._block_size = pool.layout.block_size
        self._layer_windows = tuple(group.window for group in model.spec.layer_groups)
        num_groups = len(self._layer_windows)
        width = -(-max_model_len // self._block_size) * num_groups
        # By row: for each place one block of each layer group. Entries of a table beyond its length
        # are left over from earlier sequences, and so are those of places that a window has left.
        self._tables = np.zeros((max_num_seqs, width), np.int32)
        self._table_lens = np.zeros(max_num_seqs, np.int32)
        # By layer group and row; no window is one that no sequence leaves.
        self._windows = np.full((num_groups, max_num_seqs), NO_WINDOW, np.int32)
        self._num_sinks = np.zeros((num_groups, max_num_seqs), np.int32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self._params: list[SamplingParams | None] = [None] * max_num_seqs
        self._edits: list[LogitEdits | None] = [None] * max_num_seqs
        # Of the rows with penalties; on rank 0 alone.
        self._counts: dict[int, TokenCounts] = {}
        # Of the rows with a grammar; on rank 0 alone.
        self._grammars: dict[int, RowGrammar] = {}
        # Of the rows that have an adapter or attached content.
        self._contents: dict[int, RowContent] = {}
        # Of the step that was run last; on rank 0 alone.
        self._scorer: PromptScorer | None = None
        self._find_shared_prefixes = find_shared_prefixes
        self._uploads = StepUploads(pool.device) if with_graphs else None
        self._graphs = (
            None
            if self._uploads is None
            else DecodeGraphs(self._forward_all, pool, self._uploads, max_num_seqs)
        )
        self._history = hashlib.blake2b(digest_size=16)

    @property
    def history_digest(self) -> bytes:
        """Digest of every token computed so far and its place; equal on every rank of a group."""
        return self._history.digest()

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Apply a plan's differences and compute its tokens.

        Args:
            plan: A single step in which every token is known.

        Returns:
            On rank 0 the logits of each row that samples, fp32 [num_sampling, vocab_size]; None
            on other ranks.

        Raises:
            GroupBrokenError: A collective of the model failed.
        """
        if self.pool.device.type == "cuda":
            # Kernels run on the thread's own device.
            torch.cuda.set_device(self.pool.device)
        self._apply(plan)
        batch = self._host_batch(plan)
        for array in (plan.rows, plan.num_computed, plan.num_tokens, plan.token_ids):
            self._history.update(array.tobytes())
        self._scorer = scorer = self._make_scorer(plan)
        with torch.inference_mode():
            prefixes = self._shared_prefixes(plan, batch)
            if self._graphs is not None and self._graphs.takes(batch) and not any(prefixes):
                return self._graphs.run(batch)
            step = batch.on(self._send).with_shared_prefixes(prefixes)
            return self.model.forward(step, self.pool, None if scorer is None else scorer.take)

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> StepResult:
        """Choose the next tokens of a step; a row that has no choice fails alone.

        Args:
            plan: The plan that was run.
            logits: What `run` returned.
        """
        self._count(plan)
        indices = plan.sample_indices
        rows = plan.rows[indices]
        lengths = (plan.num_computed + plan.num_tokens)[indices]
        positions = lengths - self._num_prompt_tokens[rows]
        sampling_rows = []
        for row, position, sibling in zip(
            rows.tolist(), positions.tolist(), plan.sample_siblings.tolist(), strict=True
        ):
            params = self._params[row]
            assert params is not None, "a row is started before it samples"
            eos = self.model.spec.eos_token_ids
            counts, grammar = self._counts.get(row), self._grammars.get(row)
            sampling_rows.append(
                SamplingRow(params, position, eos, sibling, counts, grammar, self._edits[row])
            )
        if len(logits) < len(rows):
            # Siblings that are about to be forked draw from the same logits.
            sampling, each = np.unique(indices, return_inverse=True)
            assert len(sampling) == len(logits)
            logits = logits[torch.from_numpy(each).to(logits.device)]
        try:
            token_ids, logprobs, errors = self._sampler.sample(logits, sampling_rows)
        except _ROW_ERRORS:
            token_ids, logprobs, errors = self._sample_each(logits, sampling_rows)
        scores = () if self._scorer is None else self._scorer.scores
        return StepResult(plan.step_id, token_ids[None], logprobs, errors, scores)

    def _make_scorer(self, plan: StepPlan) -> PromptScorer | None:
        if plan.scored is None:
            return None
        ends = np.cumsum(plan.num_tokens)
        rows = plan.rows[np.searchsorted(ends, plan.scored.indices, side="right")]
        # A follower knows no parameters, and its model calls nobody.
        counts = [p.prompt_logprobs or 0 for row in rows.tolist() if (p := self._params[row])]
        vocab_size = self.model.spec.vocab_size
        return PromptScorer(plan.scored.targets.tolist(), counts, vocab_size)

    def _count(self, plan: StepPlan) -> None:
        """Note what a step computed beyond the history that its rows started with."""
        if not self._counts and not self._grammars:
            return
        ends = np.cumsum(plan.num_tokens)
        fields = (plan.rows, plan.num_computed, ends - plan.num_tokens, ends)
        for row, position, first, end in zip(*(field.tolist() for field in fields), strict=True):
            for known in (self._counts.get(row), self._grammars.get(row)):
                if known is not None:
                    known.extend(position, plan.token_ids[first:end])

    def _sample_each(
        self, logits: torch.Tensor, rows: list[SamplingRow]
    ) -> tuple[IntArray, dict[int, TokenLogprobs], dict[int, str]]:
        """Choose row by row, to find whose choice raises."""
        token_ids = np.zeros(len(rows), np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        errors: dict[int, str] = {}
        for index, row in enumerate(rows):
            try:
                ids, probs, reasons = self._sampler.sample(logits[index : index + 1], [row])
            except _ROW_ERRORS as error:
                errors[index] = f"sampling raised {type(error).__name__}: {error}"
                continue
            token_ids[index] = ids[0]
            if 0 in probs:
                logprobs[index] = probs[0]
            if 0 in reasons:
                errors[index] = reasons[0]
        return token_ids, logprobs, errors

    def _apply(self, plan: StepPlan) -> None:
        """Bring the rows up to date: starts, then the appended blocks; then copy blocks."""
        if len(plan.copies):
            # Whole blocks: what lies beyond the slots asked for is read by nobody.
            copy_blocks(self.pool, plan.copies[:, 0].tolist(), plan.copies[:, 1].tolist())
        for start in plan.starts:
            row, num_blocks = start.row, len(start.block_ids)
            self._tables[row, :num_blocks] = start.block_ids
            self._table_lens[row] = num_blocks
            self._set_windows(start)
            self._params[row] = start.params
            self._edits[row] = LogitEdits.of(start.params, self.model.spec.eos_token_ids)
            self._start_history(start)
            self._num_prompt_tokens[row] = start.num_prompt_tokens
            self._contents.pop(row, None)
            if start.adapter is not None or start.attachments:
                self._contents[row] = RowContent(start.adapter, start.attachments)
        if not len(plan.append_rows):
            return
        # The blocks of a row keep their order: a stable sort brings each row's together, and
        # their places count on from the end of its table.
        order = np.argsort(plan.append_rows, kind="stable")
        rows = plan.append_rows[order]
        unique, first, counts = np.unique(rows, return_index=True, return_counts=True)
        places = self._table_lens[rows] + np.arange(len(rows)) - np.repeat(first, counts)
        self._tables[rows, places] = plan.append_blocks[order]
        self._table_lens[unique] += counts.astype(np.int32)

    def _start_history(self, start: RowStart) -> None:
        self._counts.pop(start.row, None)
        self._grammars.pop(start.row, None)
        if start.history is None:
            return
        params, num_prompt = start.params, start.num_prompt_tokens
        if params.has_penalties:
            self._counts[start.row] = TokenCounts(start.history, num_prompt)
        if params.grammar is not None and self._matchers is not None:
            self._grammars[start.row] = RowGrammar(
                self._matchers, params, start.history, num_prompt
            )

    def _set_windows(self, start: RowStart) -> None:
        for group, layers in enumerate(self._layer_windows):
            window = layers.tighter(start.window)
            self._windows[group, start.row] = NO_WINDOW if window.size is None else window.size
            self._num_sinks[group, start.row] = window.num_sink_tokens

    def _forward_all(self, batch: StepBatch) -> torch.Tensor:
        logits = self.model.forward(batch, self.pool)
        assert logits is not None, "graphs are of a rank that has all logits"
        return logits

    def _shared_prefixes(
        self, plan: StepPlan, batch: HostBatch
    ) -> tuple[SharedPrefixes | None, ...]:
        """Of each layer group; none behind windows, which some of the sequences may have left."""
        find = self._find_shared_prefixes
        if find is None or len(plan.rows) < 2:
            return (None,) * len(batch.metadata)
        computed, new = plan.num_computed.tolist(), plan.num_tokens.tolist()
        return tuple(
            find(metadata.block_tables, computed, new) if metadata.windows is None else None
            for metadata in batch.metadata
        )

    def _send(self, arrays: Sequence[Array]) -> Sequence[torch.Tensor]:
        if self._uploads is not None:
            return self._uploads.upload(arrays)
        # The arrays are the batch's own, so that a CPU needs no copy of them.
        return [torch.from_numpy(array).to(self.pool.device) for array in arrays]

    def _metadata(self, plan: StepPlan, layer_group: int) -> HostMetadata:
        num_groups = len(self._layer_windows)
        width = -(-int((plan.num_computed + plan.num_tokens).max()) // self._block_size)
        windows = self._windows[layer_group, plan.rows]
        windowed = bool((windows < NO_WINDOW).any())
        return HostMetadata.for_step(
            # A copy: the next plan may change the rows before this step is computed.
            np.ascontiguousarray(
                self._tables[plan.rows, layer_group : width * num_groups : num_groups]
            ),
            plan.num_computed,
            plan.num_tokens,
            self._block_size,
            windows=windows if windowed else None,
            num_sinks=self._num_sinks[layer_group, plan.rows] if windowed else None,
        )

    def _host_batch(self, plan: StepPlan) -> HostBatch:
        """Flatten the scheduled tokens, row after row."""
        ends = np.cumsum(plan.num_tokens, dtype=np.int64)
        starts = ends - plan.num_tokens
        positions = np.arange(len(plan.token_ids)) + np.repeat(
            plan.num_computed - starts, plan.num_tokens
        )
        return HostBatch(
            token_ids=plan.token_ids.astype(np.int64),
            positions=positions,
            metadata=tuple(self._metadata(plan, g) for g in range(len(self._layer_windows))),
            logits_rows=ends[np.unique(plan.sample_indices)] - 1,
            salts=self._salts(plan),
            scored_rows=None if plan.scored is None else plan.scored.indices.astype(np.int64),
        )

    def _salts(self, plan: StepPlan) -> npt.NDArray[np.int64] | None:
        if not self._contents or self._contents.keys().isdisjoint(plan.rows.tolist()):
            return None
        plain = RowContent(None)
        fields = (plan.rows, plan.num_computed, plan.num_tokens)
        salts = [
            self._contents.get(row, plain).salts(position, num_tokens)
            for row, position, num_tokens in zip(*(f.tolist() for f in fields), strict=True)
        ]
        return np.concatenate(salts)
