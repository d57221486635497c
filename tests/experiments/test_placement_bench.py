import json
import sys

import pytest

from rayserve_paged import cli
from rayserve_paged.experiments import actor_placement_bench, placement_bench
from rayserve_paged.experiments.placement_bench import rates


def test_each_placement_and_each_key_is_counted_and_prefixes_are_found() -> None:
    figures = rates(4, num_requests=400)
    assert min(figures.values()) > 0
    # 100 families share 768 of 1,024 tokens; each replica has to compute each of them once.
    assert 0.2 < figures["hit_rate"] <= 0.75
    assert figures["directory_updates_per_s"] > figures["reports_per_s"]


def test_without_an_actor_neither_ray_nor_psutil_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = actor_placement_bench.__name__
    monkeypatch.delattr("rayserve_paged.experiments.actor_placement_bench")
    for name in (module, "ray", "psutil"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(placement_bench, "rates", lambda num: {"placements_per_s": num / 2})
    monkeypatch.setattr(sys, "argv", ["rayserve-paged", "bench", "placement", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    figures = {f"placements_per_s_{num}": num / 2 for num in (8, 128, 1024)}
    assert json.loads(capsys.readouterr().out) == figures


@pytest.mark.ray
def test_an_actor_takes_in_placements_and_reports_side_by_side() -> None:
    figures = actor_placement_bench.rates(4, num_requests=400)
    assert min(figures.values()) > 0
    assert figures["directory_updates_per_s"] > figures["reports_per_s"]
