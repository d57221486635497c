"""Windows, sinks and layer groups from a request down to the slots of a real pool."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_rank import drive
from replica_driver import make_request

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.core.errors import CapacityError
from rayserve_paged.core.request import admit
from rayserve_paged.model.fingerprint import FingerprintModel, oracle
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.model.spec import FingerprintConfig

PROMPT = [(37 * place + 11) % 256 for place in range(50)]
LAYER_WINDOWS = [
    None,
    (FULL_ATTENTION, AttentionWindow(6, 1)),
    (AttentionWindow(5),) * 2,
    (FULL_ATTENTION, AttentionWindow(3), FULL_ATTENTION, AttentionWindow(3)),
    (AttentionWindow(3), AttentionWindow(3), AttentionWindow(3), FULL_ATTENTION),
]


def config_of(layer_windows: tuple[AttentionWindow, ...] | None) -> FingerprintConfig:
    return FingerprintConfig(
        num_layers=len(layer_windows or (None, None)),
        num_heads=4,
        num_kv_heads=2,
        vocab_size=256,
        max_model_len=256,
        layer_windows=layer_windows,
    )


def model_of(config: FingerprintConfig) -> FingerprintModel:
    return FingerprintModel(config, SoloCollectives(), TorchBackend())


@pytest.mark.parametrize("layer_windows", LAYER_WINDOWS)
@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 3), (9, 0), (1, 0)])
def test_the_fingerprint_model_reads_exactly_what_the_windows_show(
    window: int | None,
    sinks: int,
    pipeline_depth: int,
    layer_windows: tuple[AttentionWindow, ...] | None,
) -> None:
    config = config_of(layer_windows)
    driver, _rank = drive(
        model_of(config), 96, 4, max_num_batched_tokens=13, pipeline_depth=pipeline_depth
    )
    own = AttentionWindow(window, sinks)
    requests = [
        make_request(
            PROMPT[:length], 20, request_id=f"q{length}", window=window, num_sink_tokens=sinks
        )
        for length in (50, 3, 50 - 1, 17)
    ]
    streams = driver.generate(*requests)
    for request, stream in zip(requests, streams, strict=True):
        prompt = request.prompt_token_ids
        assert list(stream.token_ids) == oracle(prompt, 20, config, window=own)
    # Another turn starts on what is cached, with a hole where no token needs it.
    turn = [*requests[0].prompt_token_ids, *streams[0].token_ids, 5, 6]
    request = make_request(turn, 9, request_id="turn", window=window, num_sink_tokens=sinks)
    (stream,) = driver.generate(request)
    assert stream.num_cached_tokens == 68
    assert list(stream.token_ids) == oracle(turn, 9, config, window=own)
    assert driver.replica.kv.pool.num_held == 0


def test_layers_in_groups_share_one_pool_and_its_blocks_hold_one_group_each() -> None:
    config = config_of(LAYER_WINDOWS[4])
    spec = config.spec()
    assert [(group.window.size, group.layers) for group in spec.layer_groups] == [
        (3, (0,)),
        (3, (1,)),
        (3, (2,)),
        (None, (3,)),
    ]
    layout = model_of(config).kv_layout(16)
    assert layout.num_layers == 1
    halves = config_of(LAYER_WINDOWS[3])
    assert [group.layers for group in halves.spec().layer_groups] == [(0, 2), (1, 3)]
    assert model_of(halves).kv_layout(16).num_layers == 2
    assert halves.spec().fingerprint != config_of((FULL_ATTENTION,) * 4).spec().fingerprint


@pytest.mark.parametrize("wrong", ["window", "sinks"])
def test_a_mask_that_is_off_by_one_shows(wrong: str) -> None:
    config = config_of(None)
    right = oracle(PROMPT[:20], 4, config, window=AttentionWindow(5, 2))
    other = AttentionWindow(6, 2) if wrong == "window" else AttentionWindow(5, 3)
    assert oracle(PROMPT[:20], 4, config, window=other) != right


@st.composite
def mixes(draw: st.DrawFn) -> dict[str, object]:
    sizes = st.sampled_from([1, 2, 3, 5, 8, 13])
    return {
        "layer_windows": draw(st.sampled_from(LAYER_WINDOWS)),
        "num_blocks": draw(st.integers(12, 60)),
        "block_size": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.sampled_from([64, 7, 1])),
        "pipeline_depth": draw(st.sampled_from([2, 1])),
        "max_decode_steps": draw(st.sampled_from([1, 6])),
        "partial_reuse": draw(st.booleans()),
        "requests": draw(
            st.lists(
                st.tuples(
                    st.integers(1, 30),
                    st.integers(1, 16),
                    st.tuples(sizes, st.integers(0, 5)) | st.just((None, 0)),
                    st.sampled_from([1, 1, 2]),
                ),
                min_size=1,
                max_size=5,
            )
        ),
    }


@settings(max_examples=40)
@given(mix=mixes())
def test_any_mix_of_windows_in_a_small_pool_gives_the_oracles_tokens(
    mix: dict[str, object],
) -> None:
    wanted = mix.pop("requests")
    config = config_of(mix.pop("layer_windows"))  # type: ignore[arg-type]
    driver, _rank = drive(model_of(config), **mix)  # type: ignore[arg-type]
    expected = {}
    for number, (num_prompt, num_outputs, (window, sinks), n) in enumerate(wanted):  # type: ignore[var-annotated, arg-type]
        request = make_request(
            PROMPT[:num_prompt],
            num_outputs,
            request_id=f"q{number}",
            window=window,
            num_sink_tokens=sinks,
            n=n,
        )
        try:
            admit(request, driver.limits)
        except CapacityError:
            continue
        driver.submit(request)
        expected[request.request_id] = (
            request,
            oracle(PROMPT[:num_prompt], num_outputs, config, window=AttentionWindow(window, sinks)),
        )
        driver.step()
    driver.run()
    for request, token_ids in expected.values():
        for sibling in range(request.params.n):
            assert list(driver.reader().stream(request, sibling).token_ids) == token_ids
    assert driver.num_free == driver.limits.num_blocks


def test_hidden_places_of_a_rank_may_name_any_block() -> None:
    config = config_of(None)
    driver, _rank = drive(model_of(config), 32, 4)
    driver.generate(make_request(PROMPT, 1, request_id="q0", window=6))
    request = make_request(PROMPT, 8, request_id="q1", window=6)
    stream = driver.submit(request)
    assert driver.plan is not None
    (start,) = driver.plan.starts
    assert start.window == AttentionWindow(6)
    assert start.block_ids[:10].tolist() == [0] * 10
    start.block_ids[:10] = np.int32(2**31 - 1)
    driver.run()
    assert list(stream.token_ids) == oracle(PROMPT, 8, config, window=AttentionWindow(6))
