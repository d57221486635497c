"""A step plan as bytes and back: int32 fields in a fixed order, integers only.

    header    step id (low, high), and how many of each that follows
    starts    row, num_computed, num_prompt_tokens, window (0 for none), num_sink_tokens, number of
              blocks: one field after another
    arrays    blocks of the starts, append_rows, append_blocks, copies, rows, num_computed,
              num_tokens, token_ids, sample_indices, sample_siblings, scored.indices,
              scored.targets
    contents  adapters and attachments of the starts, where any has some (`row_content_codec`)

A plan here is one step in which every token is known (`core.plan_steps`). Sampling parameters
stay on rank 0, which alone samples.
"""

import itertools

import numpy as np
import numpy.typing as npt

from rayserve_cluster.row_content_codec import encode_contents, with_contents
from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.ids import Row, StepId
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import IntArray, RowStart, ScoredTokens, StepPlan

FOLLOWER_PARAMS = SamplingParams(temperature=0.0)
"""What a decoded plan holds in place of sampling parameters."""

_INT32 = np.dtype("<i4")
_HEADER_FIELDS = 11
_START_FIELDS = 6


def encode_plan(plan: StepPlan) -> bytes:
    """Return a plan, without its sampling parameters, as bytes for the other ranks."""
    assert plan.num_steps == 1, "ranks are given single steps"
    assert not len(plan.late), "ranks are given every token"
    contents = encode_contents(plan.starts)
    header = [
        plan.step_id & 0xFFFFFFFF,
        plan.step_id >> 32,
        len(plan.starts),
        sum(len(start.block_ids) for start in plan.starts),
        len(plan.append_rows),
        len(plan.copies),
        len(plan.rows),
        len(plan.token_ids),
        len(plan.sample_indices),
        len(contents),
        0 if plan.scored is None else len(plan.scored.indices),
    ]
    starts = [
        (
            start.row,
            start.num_computed,
            start.num_prompt_tokens,
            start.window.size or 0,
            start.window.num_sink_tokens,
            len(start.block_ids),
        )
        for start in plan.starts
    ]
    parts: list[npt.ArrayLike] = [
        np.array(header, np.uint32).view(np.int32),
        np.array(starts, np.int32).reshape(len(starts), _START_FIELDS).T.ravel(),
        *(start.block_ids for start in plan.starts),
        plan.append_rows,
        plan.append_blocks,
        plan.copies.ravel(),
        plan.rows,
        plan.num_computed,
        plan.num_tokens,
        plan.token_ids,
        plan.sample_indices,
        plan.sample_siblings,
        contents,
        *(() if plan.scored is None else (plan.scored.indices, plan.scored.targets)),
    ]
    return np.concatenate(parts, dtype=_INT32, casting="unsafe").tobytes()


def decode_plan(payload: bytes) -> StepPlan:
    """Return the plan that `encode_plan` wrote, with `FOLLOWER_PARAMS` in its starts.

    Raises:
        ValueError: The bytes are no plan.
    """
    if len(payload) < 4 * _HEADER_FIELDS or len(payload) % 4:
        raise ValueError(f"{len(payload)} bytes are no step plan")
    fields = np.frombuffer(payload, _INT32)
    header = fields[:_HEADER_FIELDS].view(np.uint32).tolist()
    low, high, num_starts, num_start_blocks, num_appends, num_copies, *rest = header
    num_rows, num_tokens, num_samples, num_contents, num_scored = rest
    sizes = (
        *(num_starts,) * _START_FIELDS,
        num_start_blocks,
        *(num_appends,) * 2,
        3 * num_copies,
        *(num_rows,) * 3,
        num_tokens,
        *(num_samples,) * 2,
        num_contents,
        *(num_scored,) * 2,
    )
    if len(fields) != _HEADER_FIELDS + sum(sizes):
        raise ValueError(f"a step plan of {sum(sizes)} fields in {len(payload)} bytes")
    arrays = _cut(fields[_HEADER_FIELDS:], sizes)
    *starts, num_blocks = (array.tolist() for array in arrays[:_START_FIELDS])
    blocks = _cut(arrays[_START_FIELDS], num_blocks)
    arrays = arrays[_START_FIELDS + 1 :]
    return StepPlan(
        step_id=StepId(high << 32 | low),
        starts=with_contents(
            arrays[9],
            (
                RowStart(
                    Row(row),
                    computed,
                    block_ids,
                    FOLLOWER_PARAMS,
                    num_prompt,
                    window=AttentionWindow(size or None, num_sinks),
                )
                for row, computed, num_prompt, size, num_sinks, block_ids in zip(
                    *starts, blocks, strict=True
                )
            ),
        ),
        append_rows=arrays[0],
        append_blocks=arrays[1],
        copies=arrays[2].reshape(num_copies, 3),
        rows=arrays[3],
        num_computed=arrays[4],
        num_tokens=arrays[5],
        token_ids=arrays[6],
        late=np.zeros(0, np.int32),
        sample_indices=arrays[7],
        sample_siblings=arrays[8],
        num_steps=1,
        scored=ScoredTokens(arrays[10], arrays[11]) if num_scored else None,
    )


def _cut(array: IntArray, sizes: tuple[int, ...] | list[int]) -> list[IntArray]:
    ends = list(itertools.accumulate(sizes))
    if (ends[-1] if ends else 0) != len(array) or any(size < 0 for size in sizes):
        raise ValueError(f"parts of {sizes} in an array of {len(array)}")
    return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]
