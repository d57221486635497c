"""What HTTP costs, and how soon who leaves is gone, are measured on Ray."""

import pytest

from rayserve_paged.experiments.disconnect_bench import departures
from rayserve_paged.experiments.http_bench import http_delay, http_overheads, percentile

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def test_rounds_are_timed_in_pairs_and_every_process_has_its_share() -> None:
    one, three = http_overheads([1, 3], num_tokens=30, num_rounds=2)
    assert (one.num_streams, three.num_streams) == (1, 3)
    for figures in (one, three):
        assert len(figures.direct_us) == len(figures.http_us) == 2
        assert min(figures.direct_us + figures.http_us) > 0.0
        parts = {"client", "proxy", "ingress", "ranks", "direct reader", "direct ranks"}
        assert set(figures.cpu_us) == parts


def test_each_token_of_a_stream_alone_has_a_delay_after_its_step() -> None:
    delay = http_delay(num_tokens=20, num_rounds=2)
    for delays in (delay.direct_us, delay.http_us):
        assert len(delays) == 40
        assert min(delays) > 0.0
    assert delay.added_median_us == percentile(delay.http_us, 0.5) - percentile(
        delay.direct_us, 0.5
    )


def test_every_client_that_leaves_is_seen_to_be_gone() -> None:
    found = departures(num_streams=3, num_departures=4)
    assert len(found) == 4
    for one in found:
        assert 0.0 < one.told_s <= one.free_s
