"""What a request may ask for, and what that means for each of its blocks."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import make_limits, make_request

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.event_log import decode, encode
from rayserve_paged.core.request import admit
from rayserve_paged.core.retention import RetentionPlan, RetentionRange, Steps, highest

FOREVER = math.inf


@pytest.mark.parametrize(
    ("ranges", "field"),
    [
        ([RetentionRange()], "retention"),
        ((RetentionRange(), None), "retention"),
        ((RetentionRange(),) * 65, "retention"),
        ((RetentionRange(-1),), "retention[0].start"),
        ((RetentionRange(True),), "retention[0].start"),
        ((RetentionRange(0.5),), "retention[0].start"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        ((RetentionRange(10),), "retention[0].start"),
        ((RetentionRange(0, 5), RetentionRange(4, 8)), "retention[1].start"),
        ((RetentionRange(5, 8), RetentionRange(0, 5)), "retention[1].start"),
        ((RetentionRange(0, None), RetentionRange(9)), "retention[1].start"),
        ((RetentionRange(3, 3),), "retention[0].end"),
        ((RetentionRange(3, 11),), "retention[0].end"),
        ((RetentionRange(3, 5), RetentionRange(5, False)), "retention[1].end"),
        ((RetentionRange(priority=-1),), "retention[0].priority"),
        ((RetentionRange(priority=101),), "retention[0].priority"),
        ((RetentionRange(priority=True),), "retention[0].priority"),
        ((RetentionRange(priority=math.nan),), "retention[0].priority"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        ((RetentionRange(duration_s=0),), "retention[0].duration_s"),
        ((RetentionRange(duration_s=-1.0),), "retention[0].duration_s"),
        ((RetentionRange(duration_s=math.nan),), "retention[0].duration_s"),
        ((RetentionRange(duration_s=math.inf),), "retention[0].duration_s"),
        ((RetentionRange(duration_s=True),), "retention[0].duration_s"),
        ((RetentionRange(duration_s="1"),), "retention[0].duration_s"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_not_accepted_is_named(ranges: tuple[RetentionRange, ...], field: str) -> None:
    request = dataclasses.replace(make_request(range(10)), retention=ranges)
    with pytest.raises(InvalidInputError) as refused:
        admit(request, make_limits())
    assert refused.value.args[0] == field


def test_whoever_asks_for_what_is_not_accepted_is_told_what_is() -> None:
    for ranges, accepted in (
        ((RetentionRange(0, 4), RetentionRange(10)), "an integer from 4 to 9: ranges follow"),
        ((RetentionRange(3, 3),), "an integer from 4 to 10, or None"),
        ((RetentionRange(),) * 65, "a tuple of at most 64 RetentionRange"),
    ):
        request = dataclasses.replace(make_request(range(10)), retention=ranges)
        with pytest.raises(InvalidInputError, match=accepted):
            admit(request, make_limits())


def test_as_many_ranges_as_there_may_be_are_accepted() -> None:
    ranges = tuple(RetentionRange(start, start + 1) for start in range(64))
    request = dataclasses.replace(make_request(range(64)), retention=ranges)
    assert admit(request, make_limits(64)).retention == ranges


def test_a_range_of_the_default_priority_asks_for_nothing() -> None:
    assert RetentionRange().steps == RetentionRange(0, 4, 35, 10.0).steps == ()
    assert RetentionPlan((RetentionRange(0, 4),), 4).at(0) == ()


def test_ranges_at_the_edges_are_accepted_and_survive_a_log() -> None:
    ranges = (
        RetentionRange(0, 1, 0, 1e9),
        RetentionRange(1, 9, 100, 1),
        RetentionRange(9, None, 35, None),
    )
    request = dataclasses.replace(make_request(range(10)), retention=ranges)
    admitted = admit(request, make_limits())
    assert admitted.retention == ranges
    assert decode(encode(admitted)) == admitted
    whole = (RetentionRange(0, 10, 80),)
    assert admit(dataclasses.replace(request, retention=whole), make_limits()).retention == whole


def test_a_block_asks_for_the_highest_of_its_tokens() -> None:
    ranges = (
        RetentionRange(2, 5, 80, 10.0),
        RetentionRange(5, 12, 60),
        RetentionRange(14, None, 10),
    )
    plan = RetentionPlan(ranges, 4)
    assert [plan.at(place) for place in range(6)] == [
        ((10.0, 80),),
        ((10.0, 80), (FOREVER, 60)),
        ((FOREVER, 60),),
        (),  # Tokens 12 and 13 are of no range, and so of the default.
        ((FOREVER, 10),),
        ((FOREVER, 10),),  # Outputs follow the last range, which has no end.
    ]


def test_outputs_behind_a_range_that_ends_have_the_default() -> None:
    plan = RetentionPlan((RetentionRange(0, 8, 90),), 4)
    assert [plan.at(place) for place in range(3)] == [((FOREVER, 90),), ((FOREVER, 90),), ()]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((), ((5.0, 10),), ()),
        (((5.0, 10),), ((3.0, 20),), ((3.0, 20),)),
        (((5.0, 10),), ((FOREVER, 20),), ((5.0, 20),)),
        (((5.0, 80),), ((9.0, 50),), ((5.0, 80), (9.0, 50))),
        (((5.0, 80),), ((9.0, 80),), ((9.0, 80),)),
        (((5.0, 80),), ((3.0, 90), (FOREVER, 50)), ((3.0, 90), (5.0, 80), (FOREVER, 50))),
    ],
)
def test_of_two_wishes_the_higher_one_counts_at_each_time(
    a: Steps, b: Steps, expected: Steps
) -> None:
    assert highest(a, b) == highest(b, a) == expected


@given(
    block_size=st.integers(1, 8),
    asked=st.lists(
        st.tuples(
            st.integers(1, 4), st.sampled_from([0, 20, 35, 50, 80]), st.sampled_from([None, 1, 2])
        ),
        max_size=6,
    ),
)
def test_what_a_block_wants_below_the_default_is_one_step_and_all_it_wants(
    block_size: int, asked: list[tuple[int, int, int | None]]
) -> None:
    starts = list(itertools.accumulate((each[0] for each in asked), initial=0))
    ranges = tuple(
        RetentionRange(start, start + num_tokens, priority, duration_s)
        for start, (num_tokens, priority, duration_s) in zip(starts, asked, strict=False)
    )
    plan = RetentionPlan(ranges, block_size)
    for place in range(starts[-1] // block_size + 1):
        priorities = [priority for _until, priority in plan.at(place)]
        assert priorities == sorted(priorities, reverse=True)
        assert len(priorities) == 1 or all(priority > 35 for priority in priorities)


@st.composite
def wishes(draw: st.DrawFn) -> Steps:
    times = sorted(draw(st.sets(st.integers(1, 6), max_size=3)))
    priorities = sorted(draw(st.permutations([36, 50, 80]))[: len(times)], reverse=True)
    if times and draw(st.booleans()):
        return ((float(times[0]), draw(st.sampled_from([0, 34]))),)
    return tuple(zip(map(float, times), priorities, strict=True))


def value_at(steps: Steps, now: float) -> int:
    for until, priority in steps:
        if now < until:
            return priority
    return 35


@given(wishes(), wishes(), wishes())
def test_the_highest_of_wishes_is_what_each_time_says(a: Steps, b: Steps, c: Steps) -> None:
    both = highest(highest(a, b), c)
    for now in range(8):
        assert value_at(both, now) == max(value_at(steps, now) for steps in (a, b, c))
    assert both == highest(a, highest(b, c)), "one way to write it"
