"""The step plan's bytes: what goes in comes out, and nothing else is taken."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rayserve_cluster.plan_codec import FOLLOWER_PARAMS, decode_plan, encode_plan
from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.ids import Row, StepId
from rayserve_paged.core.request import MAX_WINDOW
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import RowStart, ScoredTokens, StepPlan

INT32 = st.integers(-(2**31), 2**31 - 1)


def ints(size: int) -> st.SearchStrategy[npt.NDArray[Any]]:
    return arrays(np.int32, size, elements=INT32)


@st.composite
def row_starts(draw: st.DrawFn) -> RowStart:
    text = st.text(st.characters(exclude_categories=()), min_size=1, max_size=5)
    adapters = st.none() | st.builds(Adapter, text, text)
    attachments = st.builds(
        Attachment,
        st.binary(min_size=16, max_size=64),
        st.integers(0, 2**40),
        st.integers(1, 2**40),
    )
    counts = st.integers(0, MAX_WINDOW)
    sizes = st.none() | st.integers(1, MAX_WINDOW)
    windows = st.builds(AttentionWindow, sizes, counts)
    return RowStart(
        row=Row(draw(st.integers(0, 2**31 - 1))),
        num_computed=draw(st.integers(0, 2**31 - 1)),
        block_ids=draw(ints(draw(st.integers(0, 5)))),
        params=SamplingParams(temperature=0.5, seed=7, stop="never sent"),
        num_prompt_tokens=draw(st.integers(1, 2**31 - 1)),
        adapter=draw(adapters),
        attachments=tuple(draw(st.lists(attachments, max_size=2))),
        window=draw(windows),
    )


@st.composite
def step_plans(draw: st.DrawFn) -> StepPlan:
    num_appends, num_rows, num_samples = (draw(st.integers(0, 6)) for _ in range(3))
    num_scored = draw(st.integers(1, 6))
    return StepPlan(
        step_id=StepId(draw(st.integers(0, 2**63 - 1))),
        starts=tuple(draw(st.lists(row_starts(), max_size=4))),
        append_rows=draw(ints(num_appends)),
        append_blocks=draw(ints(num_appends)),
        rows=draw(ints(num_rows)),
        num_computed=draw(ints(num_rows)),
        num_tokens=draw(ints(num_rows)),
        token_ids=draw(ints(draw(st.integers(0, 20)))),
        copies=draw(ints(3 * draw(st.integers(0, 4)))).reshape(-1, 3),
        late=np.zeros(0, np.int32),
        sample_indices=draw(ints(num_samples)),
        sample_siblings=draw(ints(num_samples)),
        num_steps=1,
        scored=draw(st.none() | st.builds(ScoredTokens, ints(num_scored), ints(num_scored))),
    )


def plain(plan: StepPlan) -> dict[str, Any]:
    """The plan as values that compare, without the sampling parameters."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    fields["starts"] = [
        (
            start.row,
            start.num_computed,
            start.block_ids.tolist(),
            start.num_prompt_tokens,
            start.adapter,
            start.attachments,
        )
        for start in plan.starts
    ]
    if plan.scored is not None:
        fields["scored"] = (plan.scored.indices.tolist(), plan.scored.targets.tolist())
    return {
        name: (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }


@given(step_plans())
def test_a_plan_survives_the_round_trip_but_for_its_sampling_parameters(plan: StepPlan) -> None:
    decoded = decode_plan(encode_plan(plan))
    assert plain(decoded) == plain(plan)
    assert all(start.params is FOLLOWER_PARAMS for start in decoded.starts)


@given(step_plans(), st.data())
def test_a_plan_cut_short_or_grown_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    payload = encode_plan(plan)
    kept = data.draw(st.integers(0, len(payload) - 1))
    for wrong in (payload[:kept], payload + b"\0", payload + bytes(4)):
        with pytest.raises(ValueError, match="plan"):
            decode_plan(wrong)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_plan_raise_value_error_and_nothing_else(payload: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode_plan(payload)


def test_a_decode_step_of_64_rows_fits_into_2_kib() -> None:
    rows = np.arange(64, dtype=np.int32)
    plan = StepPlan(
        step_id=StepId(9),
        starts=(),
        append_rows=rows[:4],
        append_blocks=rows[:4],
        rows=rows,
        num_computed=rows,
        num_tokens=np.ones(64, np.int32),
        token_ids=rows,
        copies=np.zeros((0, 3), np.int32),
        late=np.zeros(0, np.int32),
        sample_indices=rows,
        sample_siblings=np.zeros(64, np.int32),
        num_steps=1,
    )
    assert len(encode_plan(plan)) == 4 * (11 + 2 * 4 + 6 * 64)
