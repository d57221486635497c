"""Retention that requests ask for, on a replica whose clock is set by hand."""

import pytest
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.request import Request
from rayserve_paged.core.retention import RetentionRange
from rayserve_paged.sim.fingerprint_rank import oracle

KEEP_10_S = (RetentionRange(priority=80, duration_s=10.0),)


def prompt(first: int, num_blocks: int = 4) -> range:
    """Whole blocks of 4 tokens and one token more, so that they all can be found again."""
    return range(first, first + 4 * num_blocks + 1)


def ask(driver: ReplicaDriver, request: Request) -> int:
    """Serve a request; return how many tokens it found."""
    (stream,) = driver.generate(request)
    assert stream.token_ids == oracle(request, driver.limits).token_ids
    return stream.num_cached_tokens


@pytest.mark.parametrize(("seconds", "num_found"), [(9.0, 16), (11.0, 0)])
def test_a_prompt_is_kept_for_its_time_while_others_pass(seconds: float, num_found: int) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=10))
    assert ask(driver, make_request(prompt(0), 1, request_id="kept", retention=KEEP_10_S)) == 0
    driver.tick(seconds)
    for index in range(3):
        assert ask(driver, make_request(prompt(20 * index + 30), 1, request_id=f"q{index}")) == 0
    assert ask(driver, make_request(prompt(0), 1, request_id="again")) == num_found


def test_a_prompt_that_is_not_to_be_kept_makes_way_for_older_ones() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=10))
    drop = (RetentionRange(priority=0),)
    ask(driver, make_request(prompt(0), 1, request_id="old"))
    for index in range(3):
        request = make_request(
            prompt(20 * index + 30), 1, request_id=f"once{index}", retention=drop
        )
        ask(driver, request)
    assert ask(driver, make_request(prompt(0), 1, request_id="again")) == 16


def test_only_the_named_part_of_a_prompt_is_kept() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=10))
    system = (RetentionRange(0, 8, 80),)
    ask(driver, make_request(prompt(0), 1, request_id="kept", retention=system))
    for index in range(3):
        ask(driver, make_request(prompt(20 * index + 30), 1, request_id=f"q{index}"))
    assert ask(driver, make_request(prompt(0), 1, request_id="again")) == 8


@pytest.mark.parametrize(("end", "num_found"), [(None, 12), (8, 8)])
def test_a_range_without_an_end_keeps_the_outputs_as_well(end: int | None, num_found: int) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8))
    first = make_request(
        range(8), 5, request_id="kept", retention=(RetentionRange(0, end, priority=80),)
    )
    (stream,) = driver.generate(first)
    for index in range(3):
        ask(driver, make_request(prompt(20 * index + 30, 3), 1, request_id=f"q{index}"))
    turn = make_request([*range(8), *stream.token_ids, 90], 1, request_id="turn")
    assert ask(driver, turn) == num_found


def test_a_request_that_is_preempted_keeps_what_it_asked_for() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=9))
    kept = make_request(range(9), 16, request_id="kept", retention=KEEP_10_S)
    urgent = make_request(range(40, 60), 14, request_id="urgent", priority=-1)
    streams = [driver.submit(kept)]
    for _ in range(3):
        driver.step()
    streams.append(driver.submit(urgent))
    driver.step()
    assert driver.replica.batcher.num_preemptions == 1
    # Four steps have computed 9 tokens of the prompt and 3 of the outputs.
    assert [asked for _block_id, asked in steps(driver)] == [((10.0, 80),)] * 3
    driver.run()
    for stream, request in zip(streams, (kept, urgent), strict=True):
        assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert ask(driver, make_request(range(9), 1, request_id="again")) == 8


def test_siblings_keep_one_prompt() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=24))
    request = make_request(prompt(0), 6, temperature=1.0, n=3, retention=KEEP_10_S)
    driver.generate(request)
    driver.tick(9.0)
    # The prompt's four blocks, and of each sample one that is full of outputs.
    assert len(steps(driver)) == 4 + 3
    driver.tick(1.0)
    assert steps(driver) == []


def test_blocks_behind_a_window_are_kept_from_when_it_let_go_of_them() -> None:
    limits = make_limits(num_blocks=24, layer_groups=(AttentionWindow(4, 0),))
    driver = ReplicaDriver(limits)
    request = make_request(range(9), 20, request_id="kept", retention=KEEP_10_S)
    stream = driver.submit(request)
    for _ in range(4):
        driver.step()
    driver.tick(6.0)
    early = len(steps(driver))
    assert early >= 1
    driver.run()
    driver.tick(4.0)
    # Those that were let go at the start are over, and those of later are not.
    assert len(steps(driver)) == 28 // 4 - early
    assert stream.token_ids == oracle(request, limits).token_ids


def steps(driver: ReplicaDriver) -> list[tuple[int, tuple[tuple[float, int], ...]]]:
    return list(driver.replica.kv.retention.items())


def test_replicas_without_retention_keep_no_notes() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=10))
    for index in range(4):
        ask(driver, make_request(prompt(index), 1, request_id=f"q{index}"))
    assert len(driver.replica.kv.retention) == 0
