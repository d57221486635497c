"""Cases of known faults about what makes two blocks equal: adapters and attached content."""

import dataclasses

import pytest
from replica_driver import ReplicaDriver, Stream, make_limits, make_request

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import Adapter, RequestScope
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import Request
from rayserve_paged.sim.fingerprint_rank import oracle

TEXT_IDS = tuple(range(20, 28))
D1 = bytes.fromhex("abcd" + 13 * "00" + "01")
D2 = bytes.fromhex("abcd" + 13 * "00" + "02")


def run(driver: ReplicaDriver, request: Request) -> Stream:
    """Run a request under a fresh id, and compare it with the same one alone and cold."""
    number = driver.replica.batcher.num_queried_tokens
    (stream,) = driver.generate(dataclasses.replace(request, request_id=f"q{number}"))
    assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert driver.num_free == driver.limits.num_blocks
    return stream


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_b04_an_adapter_loaded_anew_under_its_name_reuses_nothing(pipeline_depth: int) -> None:
    driver = ReplicaDriver(make_limits(32, 8), pipeline_depth=pipeline_depth)
    request = make_request(range(32))
    # What the name "a" stands for, in turn: loaded, loaded anew in place, then another adapter.
    w1, w2, namesake = Adapter("lora-1", "W1"), Adapter("lora-1", "W2"), Adapter("lora-2", "W1")
    runs = [
        run(driver, dataclasses.replace(request, scope=RequestScope(adapter=adapter)))
        for adapter in (w1, w2, w2, namesake, w1, None)
    ]
    assert [stream.num_cached_tokens for stream in runs] == [0, 0, 24, 0, 24, 0]
    # Not only the cache: the outputs show which weights computed the slots.
    assert len({stream.token_ids for stream in runs}) == 4


def test_b04_adapters_of_one_batch_do_not_mix() -> None:
    driver = ReplicaDriver(make_limits(64, 8), max_num_batched_tokens=24)
    adapters = [None, Adapter("a", "1"), Adapter("a", "2"), Adapter("b", "1")]
    requests = [
        make_request(range(32), 20, request_id=f"q{index}", adapter=adapter)
        for index, adapter in enumerate(adapters * 2)
    ]
    streams = driver.generate(*requests)
    for request, stream in zip(requests, streams, strict=True):
        assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert len({stream.token_ids for stream in streams}) == len(adapters)


def test_b05_an_adapter_does_not_find_what_another_one_left_in_the_cache() -> None:
    driver = ReplicaDriver(make_limits(32, 8))
    runs = [
        run(driver, make_request(range(32), adapter=Adapter(adapter_id, "1")))
        for adapter_id in ("a", "b", "a")
    ]
    assert [stream.num_cached_tokens for stream in runs] == [0, 0, 24]


def test_b06_placeholders_of_other_content_share_nothing() -> None:
    driver = ReplicaDriver(make_limits(32, 8))
    request = make_request((7,) * 16 + TEXT_IDS)
    attachments = [
        (Attachment(D1, 0, 16),),
        (Attachment(D2, 0, 16),),
        (Attachment(D1, 8, 16),),
        (Attachment(D1, 0, 16),),
    ]
    runs = [
        run(driver, dataclasses.replace(request, attachments=attached)) for attached in attachments
    ]
    assert [stream.num_cached_tokens for stream in runs] == [0, 0, 0, 16]
    assert runs[3].token_ids == runs[0].token_ids
    assert len({stream.token_ids for stream in runs}) == 3


def test_b06_a_missing_or_short_digest_is_refused_and_never_means_reuse() -> None:
    driver = ReplicaDriver(make_limits(32, 8))
    request = make_request((7,) * 16 + TEXT_IDS)
    run(driver, dataclasses.replace(request, attachments=(Attachment(D1, 0, 16),)))
    assert run(driver, request).num_cached_tokens == 0
    for digest in (None, b"", D1[:2], D1[:15]):
        with pytest.raises(InvalidInputError, match=r"attachment\.digest=.* 16 to 64 bytes"):
            Attachment(digest, 0, 16)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_b06_a_block_that_outputs_fill_still_holds_the_content_of_its_prompt_part() -> None:
    driver = ReplicaDriver(make_limits(32, 8))
    first = make_request((7,) * 12, 9, attachments=(Attachment(D1, 10, 2),))
    outputs = run(driver, first).token_ids
    # The next turn of a chat: the same tokens and content, then more; or with other content.
    turn = make_request((*first.prompt_token_ids, *outputs, 5), attachments=first.attachments)
    other = dataclasses.replace(turn, attachments=(Attachment(D2, 10, 2),))
    assert run(driver, other).num_cached_tokens == 8
    assert run(driver, turn).num_cached_tokens == 16


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_content_and_adapter_survive_preemption(pipeline_depth: int) -> None:
    driver = ReplicaDriver(
        make_limits(9, 4), max_num_batched_tokens=16, pipeline_depth=pipeline_depth
    )
    requests = [
        make_request(
            (7,) * 10,
            10,
            request_id=f"q{index}",
            adapter=Adapter("a", str(index)),
            attachments=(Attachment(digest, 3, 6),),
        )
        for index, digest in enumerate((D1, D2, D1))
    ]
    streams = driver.generate(*requests)
    assert driver.replica.batcher.num_preemptions > 0
    for request, stream in zip(requests, streams, strict=True):
        assert stream.token_ids == oracle(request, driver.limits).token_ids
