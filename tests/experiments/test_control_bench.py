from rayserve_paged.experiments.control_bench import manager_bytes_per_block, request_us


def test_a_cached_block_takes_less_than_200_bytes_of_the_manager() -> None:
    # A pool just over half of the size at which Python's table of keys grows.
    assert 120 < manager_bytes_per_block(25_600) < 200


def test_three_quarters_of_a_prefix_heavy_load_are_found() -> None:
    figures = request_us(num_requests=400)
    # 300 of 400 requests follow another one of their family, of whose 1,024 tokens they share 768.
    assert 0.5 < figures["hit_rate"] <= 0.75 * 0.75 + 0.01
