"""Every configuration that ships is accepted, and fits the machines that it names."""

import re
from pathlib import Path

import pytest

from rayserve_paged.load_config import load_config_as
from rayserve_paged.serve.serve_config import EndpointConfig
from rayserve_paged.sim.hardware import GPUS, MODEL_SHAPES
from rayserve_paged.sizing.memory import plan_memory

FOLDER = Path(__file__).parent.parent.parent / "configs" / "cluster"
CONFIGS = sorted(FOLDER.glob("*.yaml"))


def test_there_are_some() -> None:
    assert len(CONFIGS) >= 5


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_accepted_and_names_itself(path: Path) -> None:
    load_config_as(EndpointConfig, path, environ={})
    assert f"--config configs/cluster/{path.name}" in path.read_text("utf-8")


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if "h200" in path.stem], ids=lambda path: path.stem
)
def test_a_configuration_for_gpus_fits_on_them(path: Path) -> None:
    config = load_config_as(EndpointConfig, path, environ={})
    shape = MODEL_SHAPES[Path(config.model.model).name]
    memory = plan_memory(shape, GPUS["H200"], config, shape.max_model_len)
    assert memory.num_at_once(1300) == config.batch.max_num_seqs
    nodes = re.search(r"(\d+)-nodes?", path.stem)
    num_gpus = 8 * int(nodes[1]) if nodes else 8
    assert config.parallel.num_replicas * config.parallel.tensor_parallel_size == num_gpus
