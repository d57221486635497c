"""The cases of the kernel suites hold what they promise."""

import itertools

from pairwise import pairwise, product


def test_every_pair_of_choices_is_in_a_case_and_the_cases_are_few() -> None:
    axes = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0, 1, 2, 3]}
    cases = pairwise(axes)
    for first, second in itertools.combinations(axes, 2):
        wanted = set(itertools.product(axes[first], axes[second]))
        assert {(case[first], case[second]) for case in cases} == wanted
    assert 12 <= len(cases) <= 18
    assert pairwise(axes) == cases
    assert len(product(axes)) == 48
    assert product({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
