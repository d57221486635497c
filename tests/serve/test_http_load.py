"""Load over HTTP on Ray while processes die."""

import pytest

from rayserve_paged.experiments.http_load import HttpLoadConfig, as_fields, run_http_load

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_no_stream_is_wrong_and_no_block_is_lost_while_processes_die() -> None:
    config = HttpLoadConfig(
        num_clients=12, duration_s=12.0, disconnect_share=0.2, num_kills=4, num_ingress_kills=1
    )
    verdict = run_http_load(config)
    assert verdict.problems == []
    assert len(verdict.kills) == 5
    assert all(kill.restart_s is not None for kill in verdict.kills)
    assert verdict.counts["whole"] > 0
    assert verdict.counts["left"] > 0
    assert as_fields(verdict)["num_tokens"] > 0
