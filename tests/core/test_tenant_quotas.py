"""What tenants may use: at once, per minute, and of the blocks; and who is not touched by it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from controller_driver import (
    LIMITS,
    R0,
    R1,
    inventory,
    lost,
    make_controller,
    number_of,
    placement,
    postponement,
    refusal,
    register,
    report,
    serve,
    submit,
    tick,
    with_attempt,
)
from replica_driver import make_request

from rayserve_paged.core.book_invariants import check_books
from rayserve_paged.core.config import BatchConfig, RecoveryConfig
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import ControllerCommand
from rayserve_paged.core.errors import InvalidInputError, OverloadedError, QuotaExceededError
from rayserve_paged.core.ids import Term
from rayserve_paged.core.request import Request, admit
from rayserve_paged.core.tenant_books import InUse
from rayserve_paged.core.tenant_quota import TenantQuota


def named(
    index: int,
    tenant: str | None = "a",
    num_prompt: int = 4,
    max_tokens: int | None = 4,
    n: int = 1,
    **limits: Any,  # noqa: ANN401
) -> Request:
    """A request whose prompt is as long as a block of 4 slots."""
    quota = TenantQuota(**limits) if limits else None
    name = f"{tenant}{index}"
    return make_request(
        [index] * num_prompt, max_tokens, request_id=name, tenant=tenant, quota=quota, n=n
    )


def exceeded(commands: Sequence[ControllerCommand]) -> QuotaExceededError:
    error = refusal(commands)
    assert isinstance(error, QuotaExceededError)
    return error


def in_use(controller: Controller) -> dict[str, tuple[int, int]]:
    check_books(controller)
    books = controller.fleet.tenants.in_use
    return {tenant: (use.num_requests, use.num_blocks) for tenant, use in books.items()}


# --- at once ------------------------------------------------------------------------------


def test_requests_beyond_those_at_once_are_refused_until_one_has_ended() -> None:
    controller = make_controller(R0, R1)
    requests = [named(i, max_concurrent_requests=2) for i in range(4)]
    placed = [placement(submit(controller, request)) for request in requests[:2]]
    assert sorted(placed) == ["r0", "r1"]
    error = exceeded(submit(controller, requests[2]))
    assert error.args == ("a", "max_concurrent_requests", 2, 2, 1, None)
    controller.handle(report(R0, requests[placed.index("r0")]), 1.0)
    placement(submit(controller, requests[2]))
    exceeded(submit(controller, requests[3]))
    assert in_use(controller) == {"a": (2, 4)}


def test_no_tenant_is_touched_by_the_quota_of_another() -> None:
    controller = make_controller(R0)
    limits: dict[str, Any] = {
        "max_concurrent_requests": 1,
        "requests_per_minute": 1,
        "block_share": 0.2,
    }
    placement(submit(controller, named(0, "a", **limits)))
    for index in range(3):
        exceeded(submit(controller, named(1, "a", **limits)))
        placement(submit(controller, named(index, "b", max_concurrent_requests=3)))
        placement(submit(controller, named(index, None)))
    exceeded(submit(controller, named(3, "b", max_concurrent_requests=3)))


def test_the_latest_request_brings_the_quota_that_is_in_force() -> None:
    controller = make_controller(R0)
    placement(submit(controller, named(0)))
    exceeded(submit(controller, named(1, max_concurrent_requests=1)))
    placement(submit(controller, named(1, max_concurrent_requests=2)))
    placement(submit(controller, named(2)))


def test_the_same_submission_once_more_is_answered_and_not_counted_again() -> None:
    controller = make_controller(R0)
    request = named(0, max_concurrent_requests=1, requests_per_minute=1, tokens_per_minute=8)
    for now in (0.0, 1.0, 2.0):
        assert placement(submit(controller, request, now, is_repeated=now > 0)) == "r0"
    assert in_use(controller) == {"a": (1, 2)}
    controller.handle(report(R0, request), 3.0)
    # It has ended, and says so however often it is asked.
    assert placement(submit(controller, request, 4.0, is_repeated=True)) == "r0"
    assert in_use(controller) == {}


# --- blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "n", "num_blocks"),
    [(4, 1, 1, 1), (4, 2, 1, 2), (4, 5, 3, 6), (9, 8, 2, 8), (32, 30, 2, 16)],
)
def test_a_request_counts_with_the_blocks_of_all_its_samples_up_to_those_of_a_replica(
    num_prompt: int, max_tokens: int, n: int, num_blocks: int
) -> None:
    controller = make_controller(R0, R1)
    placement(submit(controller, named(0, num_prompt=num_prompt, max_tokens=max_tokens, n=n)))
    assert in_use(controller) == {"a": (1, num_blocks)}


def test_a_tenant_is_promised_no_more_than_its_share_of_all_live_blocks() -> None:
    controller = make_controller(R0, R1)  # 16 blocks each.
    requests = [named(i, num_prompt=8, max_tokens=5, block_share=0.25) for i in range(4)]
    for request in requests[:2]:
        placement(submit(controller, request))
    error = exceeded(submit(controller, requests[2]))
    assert error.args == ("a", "block_share", 8, 6, 3, None)
    # A smaller one fits beside them.
    placement(submit(controller, named(9, max_tokens=5, block_share=0.25)))
    assert in_use(controller) == {"a": (3, 8)}


def test_a_share_shrinks_with_the_replicas_and_what_runs_goes_on() -> None:
    controller = make_controller(R0, R1)
    on = {}
    for i in range(4):
        request = named(i, num_prompt=8, max_tokens=5, block_share=0.5)
        on[request] = placement(submit(controller, request))
    assert in_use(controller) == {"a": (4, 12)}
    controller.handle(lost(R1), 1.0)
    assert in_use(controller) == {"a": (2, 6)}
    # All of them come back, beyond what one replica alone would have let in.
    for request, replica_id in on.items():
        if replica_id == "r1":
            assert placement(submit(controller, with_attempt(request, 1), 1.0)) == "r0"
    assert in_use(controller) == {"a": (4, 12)}
    error = exceeded(submit(controller, named(4, block_share=0.5), 1.0))
    assert (error.limit, error.used) == (8, 12)


def test_what_alone_is_more_than_a_share_is_bad_input_unless_a_replica_may_come_back() -> None:
    recovery = RecoveryConfig(restart_delay_s=5.0)
    controller = make_controller(R0, R1, recovery=recovery)
    big = named(0, num_prompt=20, max_tokens=13, block_share=0.25)
    assert placement(submit(controller, big)) == "r0"
    bigger = named(1, num_prompt=32, max_tokens=5, block_share=0.25)
    error = refusal(submit(controller, bigger))
    assert isinstance(error, InvalidInputError)
    assert str(error) == (
        "max_tokens=5 is not accepted: expected what needs at most 8 blocks and not 9, since "
        "tenant 'a' has block_share=0.25 of 32"
    )
    controller.handle(lost(R1), 1.0)
    assert "r1 is lost" in postponement(
        submit(controller, named(2, num_prompt=20, block_share=0.25))
    )


def test_a_request_without_max_tokens_gets_what_its_quota_leaves_room_for() -> None:
    def most(num_prompt: int, n: int = 1, **limits: Any) -> int | None:  # noqa: ANN401
        request = named(0, num_prompt=num_prompt, max_tokens=None, n=n, **limits)
        return admit(request, LIMITS).params.max_tokens

    assert most(10) == 55
    assert most(10, block_share=1.0) == 55
    assert most(10, n=2, block_share=1.0) == 55
    assert most(10, block_share=0.25) == 7
    assert most(8, n=2, block_share=0.5) == 9
    assert most(10, tokens_per_minute=30) == 20
    assert most(10, n=3, tokens_per_minute=30) == 6
    small: list[dict[str, Any]] = [{"block_share": 0.5}, {"tokens_per_minute": 30}]
    for limits in small:
        request = named(0, num_prompt=10, max_tokens=None, n=2, **limits)
        placement(submit(make_controller(R0), request))


# --- per minute ---------------------------------------------------------------------------


def test_requests_per_minute_come_back_at_exactly_the_time_that_is_told() -> None:
    controller = make_controller(R0)
    at = 1000.0
    for i in range(6):
        placement(submit(controller, named(i, requests_per_minute=6), at))
    error = exceeded(submit(controller, named(6, requests_per_minute=6), at))
    assert error.args == ("a", "requests_per_minute", 6, 6, 1, 10.0)
    error = exceeded(submit(controller, named(6, requests_per_minute=6), at + 4.0))
    assert error.retry_after_s == pytest.approx(6.0)
    exceeded(submit(controller, named(6, requests_per_minute=6), at + 9.8))
    placement(submit(controller, named(6, requests_per_minute=6), at + 10.0))
    exceeded(submit(controller, named(7, requests_per_minute=6), at + 10.0))


@pytest.mark.parametrize("limit", [1, 7, 60, 1_000_003])
@pytest.mark.parametrize("start", [0.0, 12345.678, 3e7])
def test_whoever_comes_back_after_the_time_that_was_told_is_let_in(
    limit: int, start: float
) -> None:
    controller = make_controller(R0)
    now, num_refused = start, 0
    for i in range(40):
        request = named(i, max_tokens=min(limit, 40) + i % 7, tokens_per_minute=limit + 70)
        commands = submit(controller, request, now)
        if len(commands) == 1:
            num_refused += 1
            wait_s = exceeded(commands).retry_after_s
            assert wait_s is not None
            now += wait_s
            placement(submit(controller, request, now))
        controller.handle(report(R0, request, sequence=i), now)
    assert num_refused > 0 or limit > 1000


def test_tokens_per_minute_count_the_prompt_once_and_the_output_of_each_sample() -> None:
    controller = make_controller(R0)
    placement(submit(controller, named(0, max_tokens=3, n=2, tokens_per_minute=60)))
    error = exceeded(submit(controller, named(1, max_tokens=56, tokens_per_minute=60)))
    assert error.args == ("a", "tokens_per_minute", 60, 10, 60, 10.0)


def test_of_two_rates_the_one_is_told_for_which_to_wait_longer() -> None:
    limits: dict[str, Any] = {"requests_per_minute": 2, "tokens_per_minute": 16}
    controller = make_controller(R0)
    for i in range(2):
        placement(submit(controller, named(i, **limits)))
    assert exceeded(submit(controller, named(2, **limits))).retry_after_s == 30.0
    error = exceeded(submit(controller, named(2, max_tokens=12, **limits)))
    assert (error.name, error.retry_after_s) == ("tokens_per_minute", 60.0)


def test_what_is_refused_for_whatever_reason_costs_nothing() -> None:
    controller = make_controller(R0, batch=BatchConfig(max_num_seqs=256, max_pending_tokens=20))
    limits: dict[str, Any] = {"requests_per_minute": 2, "tokens_per_minute": 100}
    placement(submit(controller, named(0, **limits)))
    assert isinstance(
        refusal(submit(controller, named(1, max_tokens=30, **limits))), OverloadedError
    )
    for _ in range(3):
        error = refusal(submit(controller, named(2, num_prompt=70, **limits)))
        assert isinstance(error, InvalidInputError)
    placement(submit(controller, named(3, **limits)))
    assert exceeded(submit(controller, named(4, **limits))).name == "requests_per_minute"


def test_more_tokens_than_a_minute_has_are_bad_input() -> None:
    with pytest.raises(InvalidInputError) as refused:
        admit(named(0, max_tokens=9, n=2, tokens_per_minute=20), LIMITS)
    assert str(refused.value) == (
        "max_tokens=9 is not accepted: expected at most 8 after this prompt of 4 tokens, in each "
        "of 2 samples, since tenant 'a' has tokens_per_minute=20"
    )
    with pytest.raises(InvalidInputError, match="at most 0 after this prompt of 4 tokens"):
        admit(named(0, tokens_per_minute=4), LIMITS)


def test_a_changed_rate_leaks_as_fast_as_it_says_from_then_on() -> None:
    controller = make_controller(R0)
    for i in range(6):
        placement(submit(controller, named(i, requests_per_minute=6)))
    placement(submit(controller, named(6, requests_per_minute=12), 0.0))
    # 7 are used of 3: it has to leak 5 at 3 a minute.
    assert exceeded(submit(controller, named(7, requests_per_minute=3))).retry_after_s == 100.0
    placement(submit(controller, named(7), 1.0))
    placement(submit(controller, named(8, requests_per_minute=3), 101.0))


# --- losses, and a controller that was started anew ---------------------------------------


def test_an_attempt_after_the_first_is_neither_refused_nor_charged_again() -> None:
    controller = make_controller(R0, R1)
    limits: dict[str, Any] = {
        "max_concurrent_requests": 1,
        "requests_per_minute": 1,
        "tokens_per_minute": 10,
    }
    request = named(0, **limits)
    replica_id = placement(submit(controller, request))
    controller.handle(lost(R0 if replica_id == "r0" else R1), 1.0)
    assert in_use(controller) == {}
    # Another one has taken its place by the time it comes back.
    other = named(1, max_concurrent_requests=1)
    placement(submit(controller, other, 1.0))
    placement(submit(controller, with_attempt(request, 1), 2.0))
    assert in_use(controller) == {"a": (2, 4)}
    placement(submit(controller, with_attempt(request, 2), 3.0))
    assert in_use(controller) == {"a": (2, 4)}
    error = exceeded(submit(controller, named(2, requests_per_minute=1, tokens_per_minute=10), 3.0))
    assert (error.name, error.used) == ("requests_per_minute", 1)
    assert error.retry_after_s == pytest.approx(57.0)


def test_a_controller_that_was_started_anew_learns_from_inventories_what_is_in_use() -> None:
    controller = make_controller(term=Term(1), expected=[R0])
    limits: dict[str, Any] = {
        "max_concurrent_requests": 2,
        "block_share": 0.5,
        "requests_per_minute": 1,
    }
    served = [named(i, num_prompt=8, n=2, **limits) for i in range(2)]
    has = inventory(*(serve(request) for request in served), serve(named(7, None)))
    controller.handle(register(R0, inventory=has), 0.0)
    assert in_use(controller) == {"a": (2, 12)}
    assert exceeded(submit(controller, named(2, **limits))).name == "max_concurrent_requests"
    controller.handle(report(R0, served[0]), 1.0)
    assert in_use(controller) == {"a": (1, 6)}
    # Rates begin anew.
    placement(submit(controller, named(3, **limits), 1.0))
    assert in_use(controller) == {"a": (2, 8)}


def test_what_an_inventory_says_is_gone_is_in_use_no_more() -> None:
    controller = make_controller(R0)
    placement(submit(controller, named(0)))
    number = number_of(tick(controller, 40.0))
    controller.handle(register(R0, inventory=inventory(number=number)), 41.0)
    assert in_use(controller) == {}


# --- the books ----------------------------------------------------------------------------


def test_tenants_that_are_idle_for_a_minute_are_forgotten() -> None:
    controller = make_controller(R0)
    most = 0
    for i in range(3000):
        now = float(i)
        request = named(0, f"t{i}", requests_per_minute=5)
        placement(submit(controller, request, now))
        controller.handle(report(R0, request, sequence=i), now)
        most = max(most, len(controller.fleet.tenants))
    assert most <= 130
    assert in_use(controller) == {}
    assert controller.fleet.tenants.in_use.get("t0", InUse()) == InUse()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_concurrent_requests": 0}, "quota.max_concurrent_requests=0 .* an integer from 1"),
        ({"requests_per_minute": 1.5}, "quota.requests_per_minute=1.5 .* an integer from 1"),
        ({"tokens_per_minute": True}, "quota.tokens_per_minute=True .* an integer from 1"),
        ({"block_share": 0.0}, "quota.block_share=0.0 .* a number above 0 and up to 1"),
        ({"block_share": 1.01}, "quota.block_share=1.01 .* a number above 0 and up to 1"),
        ({"block_share": float("nan")}, "quota.block_share=nan .* a number above 0 and up to 1"),
    ],
)
def test_a_limit_that_is_none_is_refused_by_name(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        TenantQuota(**limits)


def test_a_quota_needs_a_tenant_that_it_is_of() -> None:
    request = dataclasses.replace(named(0, None), quota=TenantQuota(requests_per_minute=1))
    with pytest.raises(InvalidInputError, match="None for a request without a tenant"):
        admit(request, LIMITS)


@pytest.mark.parametrize(("share", "num_blocks", "expected"), [(0.29, 100, 29), (0.1, 30, 3)])
def test_a_share_is_not_a_block_less_than_what_it_says(
    share: float, num_blocks: int, expected: int
) -> None:
    assert TenantQuota(block_share=share).num_blocks(num_blocks) == expected
