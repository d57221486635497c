"""An experiment's YAML: what it lays out, and what it refuses in words that help."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_experiment import SMALL, write

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.experiments.check import check_cells
from rayserve_paged.experiments.matrix import Experiment, read_experiment

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "experiments").glob("*.yaml"))
TRACE = Path(__file__).parents[1] / "sim" / "data" / "mooncake_conversation.jsonl"


def read(folder: Path, **changes: object) -> Experiment:
    return read_experiment(write(folder, **changes))


# --- what is laid out -----------------------------------------------------------------------


def test_the_matrix_is_the_product_of_axes_and_seeds_in_order(tmp_path: Path) -> None:
    experiment = read(tmp_path)
    assert [(*cell.labels.values(), cell.seed) for cell in experiment.cells] == [
        (placement, scale, seed)
        for placement in ("round-robin", "prefix-aware")
        for scale in ("1", "0.25")
        for seed in (0, 1)
    ]
    last = experiment.cells[-1].config
    assert (last.placement, last.workload.time_scale) == ("prefix-aware", 0.25)
    assert len({cell.digest for cell in experiment.cells}) == 8


def test_an_axis_may_have_labels_or_change_several_fields_under_a_name_of_its_own(
    tmp_path: Path,
) -> None:
    axes = {
        "batch.max_num_waiting": {"short": 2, "endless": None},
        "shape": {
            "two of one": {"parallel.num_replicas": 2, "simulation.gpu": "H100"},
            "one of two": {"parallel.num_replicas": 1, "parallel.tensor_parallel_size": 2},
        },
    }
    cells = read(tmp_path, axes=axes, seeds=[7]).cells
    assert [tuple(cell.labels.values()) for cell in cells] == [
        ("short", "two of one"),
        ("short", "one of two"),
        ("endless", "two of one"),
        ("endless", "one of two"),
    ]
    assert [cell.config.batch.max_num_waiting for cell in cells] == [2, 2, None, None]
    assert [cell.config.parallel.num_replicas for cell in cells] == [2, 1, 2, 1]
    assert [cell.config.simulation.gpu for cell in cells] == ["H100", "H200", "H100", "H200"]


def test_without_axes_there_is_one_cell_for_each_seed(tmp_path: Path) -> None:
    assert [cell.seed for cell in read(tmp_path, axes=None).cells] == [0, 1]


@pytest.mark.parametrize(
    ("axes", "x", "expected"),
    [
        (
            {"cache.block_size": [16, 32], "workload.time_scale": [1, 2]},
            None,
            "workload.time_scale",
        ),
        ({"placement": ["round-robin"], "cache.block_size": [16, 32]}, None, "cache.block_size"),
        ({"placement": ["round-robin"]}, None, None),
        ({"placement": ["round-robin"], "cache.block_size": [16]}, "placement", "placement"),
    ],
)
def test_pictures_run_along_the_load_or_else_along_numbers(
    tmp_path: Path, axes: Mapping[str, Any], x: str | None, expected: str | None
) -> None:
    found = read(tmp_path, axes=axes, x=x).x
    assert (found and found.name) == expected


def test_a_digest_depends_on_settings_and_files_and_on_nothing_else(tmp_path: Path) -> None:
    one = read(tmp_path).cells
    renamed = read(tmp_path, title="Other words", slo={"ttft_s": 9}, name="other").cells
    assert [cell.digest for cell in one] == [cell.digest for cell in renamed]
    grown = read(tmp_path, axes=SMALL["axes"] | {"placement": ["prefix-aware", "least-loaded"]})
    assert len({cell.digest for cell in grown.cells} & {cell.digest for cell in one}) == 4
    other = read(tmp_path, cache={"block_size": 16, "num_blocks": 65}).cells
    assert not {cell.digest for cell in one} & {cell.digest for cell in other}

    trace = tmp_path / "trace.jsonl"
    lines = TRACE.read_text().splitlines(keepends=True)
    digests = []
    for number in (3, 4):
        trace.write_text("".join(lines[:number]))
        workload = {"trace": "trace.jsonl"}
        digests.append(read(tmp_path, workload=workload, axes=None, seeds=[0]).cells[0].digest)
    assert digests[0] != digests[1]


def test_a_trace_is_looked_up_beside_the_file_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(TRACE.read_text())
    experiment = read(tmp_path, workload={"trace": "mine.jsonl"})
    assert experiment.cells[0].config.workload.trace == tmp_path / "mine.jsonl"
    settings = {"workload.synthetic": None, "workload.trace": str(TRACE), "workload.limit": 2}
    given = read_experiment(write(tmp_path), settings)
    assert {cell.config.workload.trace for cell in given.cells} == {TRACE}
    check_cells(given.cells)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_experiment_can_be_run_and_says_how(path: Path) -> None:
    text = path.read_text()
    # A trace does not ship with the project.
    given = {} if "synthetic:" in text else {"workload.trace": str(TRACE)}
    experiment = read_experiment(path, given)
    check_cells(experiment.cells)
    assert experiment.question.endswith("?")
    assert experiment.question in text.splitlines()[0]
    assert f"rayserve-paged experiment configs/experiments/{path.name} --out" in text


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"title": None}, ["title", "a value"]),
        ({"cahce": {"block_size": 16}}, ["cahce", "did you mean cache"]),
        ({"cache": {"block_sise": 16}}, ["cache.block_sise", "cache.block_size"]),
        ({"cache": {"block_size": 0}}, ["cache.block_size=0", "greater than or equal to 1"]),
        (
            {"placement": "random", "axes": None},
            ["placement='random'", "'round-robin'", "'prefix-aware'"],
        ),
        ({"mode": "dream"}, ["mode='dream'", "'simulate' or 'live'"]),
        ({"workload": {}}, ["workload", "give either synthetic or trace"]),
        ({"workload": {"trace": "none.jsonl"}}, ["workload.trace", "none.jsonl", "No such file"]),
        (
            {"workload": SMALL["workload"] | {"sample": 0.5}},
            ["sample is for a trace"],
        ),
        (
            {"workload": {"synthetic": SMALL["workload"]["synthetic"] | {"arrivals": {}}}},
            ["workload.synthetic.arrivals"],
        ),
        (
            {
                "workload": {
                    "synthetic": SMALL["workload"]["synthetic"]
                    | {"arrivals": {"kind": "poisson", "rate_per_s": -1}}
                }
            },
            ["workload.synthetic.arrivals.rate_per_s=-1", "greater than 0"],
        ),
        ({"keep_alive": True}, ["keep_alive is false"]),
        ({"seeds": []}, ["seeds=[]", "at least 1"]),
        ({"seeds": [1, 1]}, ["seeds=[1, 1]"]),
        ({"seeds": [-1]}, ["seeds.0=-1"]),
        ({"x": "load"}, ["x='load'", "placement, workload.time_scale"]),
        ({"slo": {"ttft": 1}}, ["slo.ttft", "slo"]),
        ({"axes": {"placement": []}}, ["axis 'placement'", "at least one"]),
        ({"axes": {"placement": "round-robin"}}, ["axes.placement"]),
        ({"axes": {"placement": ["round-robin", "round-robin"]}}, ["axes.placement", "once"]),
        ({"axes": {"placemnt": ["round-robin"]}}, ["axes.placemnt", "did you mean placement"]),
        ({"axes": {"cache.blocksize": [16]}}, ["cache.blocksize", "cache.block_size"]),
        ({"axes": {"shape": {"small": 4}}}, ["axes.shape.small=4", "fields and their values"]),
        ({"axes": {"seed": {"one": {"batch.max_num_seqs": 1}}}}, ["axes.seed", "another name"]),
        ({"axes": {"replica": {"a": {"batch.max_num_seqs": 1}}}}, ["axes.replica", "another"]),
        ({"axes": {"placement.kind": [1]}}, ["placement={'kind': 1}"]),
        ({"axes": {"batch.max_num_seqs": [1, "many"]}}, ["batch.max_num_seqs='many'", "integer"]),
        ({"seeds": list(range(5000))}, ["20000 cells", "at most 10000"]),
    ],
)
def test_what_cannot_be_is_refused_by_file_field_and_value(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read(tmp_path, **changes)
    for word in ["experiment.yaml", *words]:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"simulation": {"gpu": "V100"}}, ["gpu='V100'", "H200"]),
        ({"simulation": {"model_shape": "gpt"}}, ["model_shape='gpt'"]),
        ({"cache": {"memory": "1KiB"}}, ["cache.memory=1024", "at least one block"]),
        ({"parallel": {"tensor_parallel_size": 64}}, ["tensor_parallel_size=64"]),
        (
            {"workload": {"trace": str(TRACE)}, "cache": {"block_size": 48, "num_blocks": 9}},
            ["block_size=48", "512"],
        ),
        ({"axes": {"simulation.gpu": ["H200", "TPU"]}, "seeds": [3]}, ["TPU", "seed=3"]),
    ],
)
def test_cells_that_cannot_be_run_are_found_before_any_is(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    experiment = read(tmp_path, **changes)
    with pytest.raises(InvalidInputError) as refused:
        check_cells(experiment.cells)
    told = " ".join([str(refused.value), *refused.value.__notes__])
    for word in [*words, "in "]:
        assert word in told


@pytest.mark.parametrize(
    ("text", "words"),
    [("title: [", ["valid YAML"]), ("- title", ["mapping"]), ("", ["title"])],
)
def test_a_file_that_is_no_experiment_is_refused(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as refused:
        read_experiment(path)
    for word in words:
        assert word in str(refused.value)
