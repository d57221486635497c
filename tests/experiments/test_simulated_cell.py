"""What the settings of a deployment do in a simulated run."""

from pathlib import Path

from small_experiment import SMALL, write

from rayserve_paged.experiments.matrix import read_experiment
from rayserve_paged.experiments.simulated_cell import cluster_of, run_simulated
from rayserve_paged.sim.cluster_spec import ClusterSpec

# A block and a half that all requests share.
WORKLOAD = {
    "synthetic": SMALL["workload"]["synthetic"] | {"system_prompts": {"count": 1, "num_tokens": 24}}
}


def spec_of(folder: Path, **changes: object) -> ClusterSpec:
    (cell,) = read_experiment(write(folder, axes=None, seeds=[0], **changes)).cells
    return cluster_of(cell.config)


def test_settings_of_a_deployment_reach_the_simulated_one(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        cache={"block_size": 16, "num_blocks": 64, "partial_reuse": True, "max_pinned_share": 0.25},
        recovery={"restart": False, "poison_deaths": 7},
        timeouts={"consumer_lease_s": 4.0},
        batch={"max_num_seqs": 5, "max_num_batched_tokens": 99},
        placement="least-loaded",
        failures={"start_s": 3.0, "notice_s": 0.25},
    )
    assert spec.partial_reuse
    assert (spec.limits.num_blocks, spec.limits.max_pinned_blocks) == (64, 16)
    assert (spec.recovery.restart, spec.recovery.poison_deaths) == (False, 7)
    assert spec.timeouts.consumer_lease_s == 4.0
    assert (spec.batch.max_num_seqs, spec.batch.max_num_batched_tokens) == (5, 99)
    assert spec.placement == "least-loaded"
    assert (spec.start_s, spec.notice_s) == (3.0, 0.25)


def test_a_part_of_a_block_is_found_where_that_is_asked_for(tmp_path: Path) -> None:
    found = []
    for partial_reuse in (False, True):
        cache = {"block_size": 16, "num_blocks": 200, "partial_reuse": partial_reuse}
        path = write(tmp_path, axes=None, seeds=[0], workload=WORKLOAD, cache=cache)
        (cell,) = read_experiment(path).cells
        requests = run_simulated(cell.config, cell.seed).requests
        found.append(int(requests["num_cached_tokens"].to_numpy().max()))
    assert found == [16, 24]
