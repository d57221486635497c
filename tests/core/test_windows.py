"""Requests and models with windows: what is kept, what is let go, what is found again."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.attention_window import FULL_ATTENTION, ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.request import Request, admit
from rayserve_paged.sim.fingerprint_rank import ScheduledRow, oracle


def windowed(
    prompt: Sequence[int], max_tokens: int, window: int, sinks: int = 0, name: int = 0
) -> Request:
    return make_request(
        prompt, max_tokens, request_id=f"q{name}", window=window, num_sink_tokens=sinks
    )


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("max_decode_steps", [1, 8])
def test_a_long_output_runs_in_the_few_blocks_of_its_window(
    pipeline_depth: int, max_decode_steps: int
) -> None:
    # Window 16 of blocks of 4, and one block of sinks: at most 1 + 4 + 1 are held at once.
    driver = ReplicaDriver(
        make_limits(num_blocks=6),
        pipeline_depth=pipeline_depth,
        max_decode_steps=max_decode_steps,
    )
    request = windowed(range(10), 1000, 16, sinks=3)
    stream = driver.submit(request)
    most = 0
    while driver.step():
        most = max(most, driver.replica.kv.pool.num_held)
    driver.poll()
    assert most == 6
    assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)
    assert driver.replica.batcher.num_preemptions == 0
    assert driver.replica.kv.pool.num_held == 0


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_long_prompt_is_trimmed_between_its_chunks(pipeline_depth: int) -> None:
    driver = ReplicaDriver(
        make_limits(num_blocks=8), max_num_batched_tokens=64, pipeline_depth=pipeline_depth
    )
    request = windowed(range(90), 10, 8, sinks=4)
    (stream,) = driver.generate(request)
    assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)
    assert driver.replica.batcher.num_preemptions == 0
    chunks = [row.num_tokens for step in driver.rank.history for row in step if row.num_tokens > 1]
    # All 8 blocks at first; then 1 of sinks and 2 of the window are held, which leaves 5.
    assert chunks[:2] == [32, 20]


def test_a_prompt_with_a_window_takes_what_blocks_there_are_but_one_for_each_that_runs() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=9), max_num_batched_tokens=256)
    other = make_request([50] * 5, 20, request_id="other")
    driver.submit(other)
    request = windowed(range(60), 3, 8, sinks=4)
    driver.submit(request)
    driver.step()
    # The other one has two blocks, and one of the seven is left to it.
    assert driver.replica.kv.pool.num_available == 1
    driver.step()
    assert driver.rank.history[1] == [ScheduledRow(0, 5, 1, 1), ScheduledRow(1, 0, 4 * 6, 0)]
    driver.run()
    assert driver.replica.batcher.num_preemptions == 0
    for each in (other, request):
        stream = driver.reader().stream(each, 0)
        assert (stream.token_ids, stream.finish) == oracle(each, driver.limits)


@pytest.mark.parametrize(("num_blocks", "starts"), [(9, False), (10, True)])
def test_nobody_starts_on_blocks_that_a_prompt_with_a_window_is_yet_to_need(
    num_blocks: int, starts: bool
) -> None:
    driver = ReplicaDriver(make_limits(num_blocks), max_num_batched_tokens=8)
    request = windowed(range(40), 3, 16, sinks=4)
    driver.submit(request)
    driver.submit(make_request([50] * 12, 2, request_id="other"))
    driver.step()
    driver.step()
    # Two of its six blocks are there. The other one needs three, and leaves one to the first.
    assert request.num_blocks_needed(driver.limits) == 6
    step = [ScheduledRow(0, 8, 6, 0), ScheduledRow(1, 0, 2, 0)] if starts else None
    assert driver.rank.history[1] == (step or [ScheduledRow(0, 8, 8, 0)])
    driver.run()
    assert driver.replica.batcher.num_preemptions == 0


def test_the_window_and_not_the_length_is_checked_at_the_door() -> None:
    limits = make_limits(num_blocks=6)
    assert admit(windowed(range(10), 4000, 16, sinks=3), limits).params.max_tokens == 4000
    with pytest.raises(CapacityError) as refused:
        admit(windowed(range(10), 1000, 18, sinks=3), limits)
    assert (refused.value.num_blocks_needed, refused.value.num_blocks) == (7, 6)
    # One that ends before its window is full needs no more than its length.
    assert admit(windowed(range(10), 15, 4000), limits).params.max_tokens == 15
    open_ended = make_request(range(10), None, window=16)
    assert admit(open_ended, limits).params.max_tokens == limits.max_model_len - 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "window"),
        ({"window": -1}, "window"),
        ({"window": 2**31}, "window"),
        ({"window": True}, "window"),
        ({"window": 2.0}, "window"),
        ({"window": 4, "num_sink_tokens": -1}, "num_sink_tokens"),
        ({"window": 4, "num_sink_tokens": None}, "num_sink_tokens"),
        (
            {"num_sink_tokens": 1},
            "num_sink_tokens=1 is not accepted: expected 0 where there is no window",
        ),
    ],
)
def test_a_window_that_is_none_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        admit(make_request(range(3), **fields), make_limits())  # type: ignore[arg-type]


def test_what_falls_out_of_a_window_stays_cached_and_is_hit_again() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=16))
    first = windowed(range(20), 13, 4, sinks=2, name=0)
    driver.generate(first)
    # 32 tokens were computed: all 8 blocks are cached, though 3 were held at once.
    assert driver.replica.kv.pool.num_cached == 8
    (again,) = driver.generate(windowed(range(20), 5, 4, sinks=2, name=1))
    assert again.num_cached_tokens == 16
    assert again.token_ids == oracle(first, driver.limits).token_ids[:5]


def test_a_hit_needs_its_sinks_and_its_last_window_alone() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=16))
    first = windowed(range(24), 1, 5, sinks=4, name=0)
    driver.generate(first)
    kv = driver.replica.kv
    keys = driver.keys(first)
    blocks = [kv.index.block_of(key) for key in keys]
    assert None not in blocks
    # The blocks of positions 4 to 15 are gone; 16 to 19 are the window of position 20.
    lost = [block for block in blocks[1:4] if block is not None]
    kv.index.remove(lost)
    for block_id in lost:
        kv.pool.unseal(block_id)
    second = windowed(range(24), 9, 5, sinks=4, name=1)
    stream = driver.submit(second)
    sequence = driver.sequence(second)
    assert stream.num_cached_tokens == 0
    assert sequence.num_cached_tokens == 20
    assert sequence.table.places()[:5] == [blocks[0], None, None, None, blocks[4]]
    driver.run()
    assert stream.token_ids == oracle(second, driver.limits).token_ids
    # Without the sinks nothing is found, however much else there is.
    assert blocks[0] is not None
    kv.index.remove([blocks[0]])
    kv.pool.unseal(blocks[0])
    (third,) = driver.generate(windowed(range(24), 1, 5, sinks=4, name=2))
    assert third.num_cached_tokens == 0


def test_requests_of_different_windows_share_no_blocks() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64))
    policies = [(None, 0), (4, 0), (4, 1), (5, 0), (4000, 0)]
    for number, (window, sinks) in enumerate(policies * 2):
        request = make_request(
            range(12), 2, request_id=f"q{number}", window=window, num_sink_tokens=sinks
        )
        (stream,) = driver.generate(request)
        assert stream.num_cached_tokens == (8 if number >= len(policies) else 0)
        assert stream.token_ids == oracle(request, driver.limits).token_ids


def test_tokens_are_live_while_their_block_is_held() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=16))
    request = windowed(range(4), 40, 6)
    driver.submit(request)
    for _ in range(19):
        driver.step()
    # 22 tokens are computed and one is in flight. Position 22 reads from 17 on, which is in the
    # block of 16 to 19, so 16 is live; 20 to 22 are in the last block, whose fourth slot is waste.
    figures = driver.replica.accounting()
    assert driver.replica.batcher.num_computed(driver.sequence(request)) == 22
    assert (figures.unique_live_tokens, figures.allocated_slots) == (7, 8)
    assert figures.internal_fragmentation_slots == 1


def test_a_model_with_windowed_and_full_layers_keeps_a_table_for_each() -> None:
    groups = (FULL_ATTENTION, AttentionWindow(4))
    limits = make_limits(num_blocks=64, layer_groups=groups)
    driver = ReplicaDriver(limits, max_num_batched_tokens=7)
    request = make_request(range(30), 31)
    stream = driver.submit(request)
    most = 0
    while driver.step():
        figures = driver.replica.accounting()
        most = max(most, driver.replica.kv.pool.num_held)
        assert figures.internal_fragmentation_slots <= 2 * 3
    driver.poll()
    assert stream.token_ids == oracle(request, limits).token_ids
    # 60 tokens: 15 blocks of the full group, 2 of the other.
    assert most == 17
    assert admit(request, make_limits(num_blocks=17, layer_groups=groups)) is not None
    with pytest.raises(CapacityError):
        admit(request, make_limits(num_blocks=16, layer_groups=groups))
    assert make_limits(num_blocks=17, layer_groups=groups).served_len == 60


def test_a_hit_is_one_of_all_layer_groups() -> None:
    groups = (AttentionWindow(4), FULL_ATTENTION)
    limits = make_limits(num_blocks=64, layer_groups=groups)
    driver = ReplicaDriver(limits)
    driver.generate(make_request(range(24), 1, request_id="q0"))
    (again,) = driver.generate(make_request(range(24), 6, request_id="q1"))
    assert again.num_cached_tokens == 20
    kv = driver.replica.kv
    request = make_request(range(24), 6, request_id="q2")
    matched = kv.match(driver.keys(request), 24, groups)
    assert matched[0:8:2] == [None] * 4, "the windowed group needs the last block alone"
    # The full group loses its fourth block, so the hit ends before it, and so does the window's.
    lost = matched[7]
    assert lost is not None
    kv.index.remove([lost])
    kv.pool.unseal(lost)
    (third,) = driver.generate(request)
    assert third.num_cached_tokens == 12
    assert third.token_ids == oracle(request, limits).token_ids == again.token_ids


@pytest.mark.parametrize("sinks", [0, 3, 5])
@pytest.mark.parametrize("layer_groups", [ONE_FULL_GROUP, (AttentionWindow(100),)])
def test_what_fell_behind_a_window_is_evicted_first_and_the_sinks_last(
    layer_groups: tuple[AttentionWindow, ...], sinks: int
) -> None:
    """Blocks of 4, a window of 8: ten full blocks, of which a prompt that goes on reads the last
    two and those of its sinks.
    """
    driver = ReplicaDriver(make_limits(num_blocks=24, layer_groups=layer_groups))
    driver.generate(windowed(range(20), 21, 8, sinks))
    kv = driver.replica.kv
    (output,) = driver.reader().streams.values()
    longer = windowed([*range(20), *output.token_ids, 90], 1, 8, sinks, name=1)
    keys = driver.keys(longer)[:10]
    num_sinks, behind = -(-sinks // 4), 10 - 2
    places = [keys.index(kv.index.key_of(block_id)) for block_id in kv.pool.cached_ids]
    # What fell behind it in one step, the prompt's first three blocks, goes from its tail on.
    at_once, later = reversed(range(num_sinks, 3)), range(3, behind)
    assert places == [*at_once, *later, 9, 8, *reversed(range(num_sinks))]
    windows = longer.windows(layer_groups)
    table = kv.open([])
    assert kv.grow(table, 4 * kv.pool.num_free) is not None
    for num_gone in range(1, behind - num_sinks + 1):
        assert kv.grow(table, 4 * (table.num_places + 1)) is not None
        assert len(kv.match(keys, 41, windows)) == 10, f"lost after {num_gone} blocks"
    assert kv.grow(table, 4 * (table.num_places + 1)) is not None
    assert len(kv.match(keys, 41, windows)) == num_sinks


@st.composite
def cases(draw: st.DrawFn) -> tuple[ReplicaDriver, list[Request]]:
    sizes = st.sampled_from([1, 2, 3, 5, 8, 13])
    policies = st.tuples(sizes, st.integers(0, 6)) | st.just((None, 0))
    windows = st.builds(AttentionWindow, sizes, st.integers(0, 5)) | st.just(FULL_ATTENTION)
    groups = draw(st.just(ONE_FULL_GROUP) | st.lists(windows, min_size=1, max_size=3).map(tuple))
    limits = make_limits(
        num_blocks=draw(st.integers(4, 40)),
        block_size=draw(st.integers(1, 5)),
        vocab_size=31,
        layer_groups=groups,
    )
    driver = ReplicaDriver(
        limits,
        max_num_seqs=draw(st.integers(3, 6)),
        max_num_batched_tokens=draw(st.sampled_from([64, 7, 3, 1])),
        pipeline_depth=draw(st.sampled_from([2, 1])),
        max_decode_steps=draw(st.sampled_from([1, 6])),
    )
    requests = []
    for number in range(draw(st.integers(1, 6))):
        window, sinks = draw(policies)
        request = make_request(
            [7, 7, 3, 1, 2, *[5] * 20][: draw(st.integers(1, 24))],
            draw(st.integers(1, 30)),
            request_id=f"q{number}",
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=number,
            window=window,
            num_sink_tokens=sinks,
            n=draw(st.integers(1, 3)),
        )
        try:
            admit(request, limits)
        except CapacityError:
            continue
        requests.append(request)
    return driver, requests


@given(case=cases(), num_steps_between=st.sampled_from([0, 1, 9]))
def test_outputs_are_those_of_an_oracle_without_blocks(
    case: tuple[ReplicaDriver, list[Request]], num_steps_between: int
) -> None:
    driver, requests = case
    for request in requests:
        driver.submit(request)
        for _ in range(num_steps_between):
            driver.step()
    driver.run()
    for request in requests:
        for sibling in range(request.params.n):
            stream = driver.reader().stream(request, sibling)
            assert (stream.token_ids, stream.finish) == oracle(request, driver.limits, sibling)
    assert driver.replica.kv.pool.num_held == 0
    assert driver.num_free == driver.limits.num_blocks
