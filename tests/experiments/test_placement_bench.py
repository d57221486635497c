from rayserve_paged.experiments.placement_bench import rates


def test_each_placement_and_each_key_is_counted_and_prefixes_are_found() -> None:
    figures = rates(4, num_requests=400)
    assert min(figures.values()) > 0
    # 100 families share 768 of 1,024 tokens; each replica has to compute each of them once.
    assert 0.2 < figures["hit_rate"] <= 0.75
    assert figures["directory_updates_per_s"] > figures["reports_per_s"]
