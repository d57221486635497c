import pytest

from rayserve_paged.experiments import actor_placement_bench
from rayserve_paged.experiments.placement_bench import rates


def test_each_placement_and_each_key_is_counted_and_prefixes_are_found() -> None:
    figures = rates(4, num_requests=400)
    assert min(figures.values()) > 0
    # 100 families share 768 of 1,024 tokens; each replica has to compute each of them once.
    assert 0.2 < figures["hit_rate"] <= 0.75
    assert figures["directory_updates_per_s"] > figures["reports_per_s"]


@pytest.mark.ray
def test_an_actor_takes_in_placements_and_reports_side_by_side() -> None:
    figures = actor_placement_bench.rates(4, num_requests=400)
    assert min(figures.values()) > 0
    assert figures["directory_updates_per_s"] > figures["reports_per_s"]
