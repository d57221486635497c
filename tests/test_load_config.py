"""The configuration from a file, the environment and flags, and the refusals in plain words."""

from pathlib import Path

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.load_config import load_config, user_cache_dir


def _write(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _refusal(
    path: Path | None = None,
    flags: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        load_config(path, flags, environ or {})
    return caught.value


def test_a_file_sets_fields_of_every_section(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        """
        name: lab
        model: {model: smollm2, dtype: bf16}
        cache: {block_size: 32, memory: 512MiB}
        batch: {max_num_seqs: 8}
        parallel: {tensor_parallel_size: 2, num_replicas: 3}
        timeouts: {consumer_lease_s: 1.5}
        keep_alive: true
        """,
    )
    config = load_config(path, environ={})
    assert config.name == "lab"
    assert (config.model.model, config.model.dtype) == ("smollm2", "bf16")
    assert (config.cache.block_size, config.cache.memory) == (32, 512 * 2**20)
    assert config.batch.max_num_seqs == 8
    assert (config.parallel.tensor_parallel_size, config.parallel.num_replicas) == (2, 3)
    assert config.timeouts.consumer_lease_s == 1.5
    assert config.keep_alive is True


def test_the_environment_wins_over_the_file_and_a_flag_over_both(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        """
        model: {model: from-file, dtype: fp16, max_model_len: 64}
        cache: {block_size: 8}
        """,
    )
    environ = {"RAYSERVE_MODEL__DTYPE": "bf16", "RAYSERVE_CACHE__BLOCK_SIZE": "32"}
    config = load_config(path, {"cache.block_size": 64}, environ)
    assert config.model.model == "from-file"
    assert config.model.max_model_len == 64
    assert config.model.dtype == "bf16"
    assert config.cache.block_size == 64


def test_variables_are_converted_to_the_type_of_their_field() -> None:
    config = load_config(
        environ={
            "RAYSERVE_MODEL__MODEL": "1234",
            "RAYSERVE_CACHE__MEMORY": "1GiB",
            "RAYSERVE_TIMEOUTS__POLL_TIMEOUT_S": "0.25",
            "RAYSERVE_KEEP_ALIVE": "true",
        }
    )
    assert config.model.model == "1234"
    assert config.cache.memory == 2**30
    assert config.timeouts.poll_timeout_s == 0.25
    assert config.keep_alive is True


def test_an_empty_variable_and_foreign_variables_count_as_unset() -> None:
    environ = {
        "RAYSERVE_CACHE__BLOCK_SIZE": "",
        "RAYSERVE_CACHE_DIR": "elsewhere",
        "RAY_ADDRESS": "auto",
        "BLOCK_SIZE": "99",
    }
    assert load_config(None, {"model.model": "fingerprint"}, environ).cache.block_size == 16


def test_flags_may_be_nested_or_dotted_and_none_is_not_given() -> None:
    config = load_config(
        None,
        {
            "model": {"model": "fingerprint", "dtype": None},
            "cache.num_blocks": 7,
            "parallel": {},
            "name": None,
        },
        {"RAYSERVE_NAME": "from-environment"},
    )
    assert config.model.model == "fingerprint"
    assert config.model.dtype == "fp32"
    assert config.cache.num_blocks == 7
    assert config.name == "from-environment"


def test_a_null_in_the_file_is_a_value(tmp_path: Path) -> None:
    path = _write(tmp_path, "model: {model: fingerprint, max_model_len: null}\ncache:\n")
    config = load_config(path, environ={})
    assert config.model.max_model_len is None
    assert config.cache.block_size == 16


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("cache.block_size", 0, "a number greater than or equal to 1"),
        ("cache.block_size", 1025, "a number less than or equal to 1024"),
        ("cache.block_size", "abc", "an integer"),
        ("cache.block_size", 16.5, "an integer"),
        ("cache.max_pinned_share", "half", "a number"),
        ("cache.partial_reuse", "maybe", "true or false"),
        ("cache.memory", "12 parsecs", 'a size such as 1048576 or "512MiB"'),
        ("model.dtype", "fp8", "'fp32', 'bf16' or 'fp16'"),
        ("model.kv_dtype", "int4", "'fp32', 'bf16', 'fp16', 'int8' or 'fp8'"),
        ("model.model", "", "text with at least 1 character"),
        ("timeouts.poll_timeout_s", float("nan"), "a number greater than 0"),
    ],
)
def test_a_refused_value_is_named_with_its_field_and_what_would_be_accepted(
    field: str, value: object, accepted: str
) -> None:
    error = _refusal(flags={"model.model": "fingerprint", field: value})
    assert error.field == field
    assert error.value is value
    assert error.accepted == accepted


def test_a_refused_name_of_a_deployment_shows_the_pattern() -> None:
    error = _refusal(flags={"model.model": "fingerprint", "name": "-x"})
    assert error.field == "name"
    assert error.accepted.startswith("text that matches pattern '^[A-Za-z0-9]")


def test_a_refusal_says_where_the_value_came_from(tmp_path: Path) -> None:
    path = _write(tmp_path, "model: {model: fingerprint, dtype: fp8}")
    assert _refusal(path).accepted.endswith(f"(set in {path})")
    error = _refusal(path, environ={"RAYSERVE_MODEL__DTYPE": "fp4"})
    assert error.value == "fp4"
    assert error.accepted.endswith("(set by RAYSERVE_MODEL__DTYPE)")
    error = _refusal(path, {"model.dtype": "fp2"}, {"RAYSERVE_MODEL__DTYPE": "fp4"})
    assert error.value == "fp2"
    assert "set " not in error.accepted


def test_a_missing_model_is_named() -> None:
    error = _refusal()
    assert error.field == "model.model"
    assert error.value is None
    assert error.accepted == "a value (the field has no default)"


def test_values_that_exclude_each_other_are_named_together() -> None:
    flags = {"model.model": "fingerprint", "cache.memory": "1MiB", "cache.num_blocks": 4}
    error = _refusal(flags=flags)
    assert error.field == "cache"
    assert error.value == {"memory": "1MiB", "num_blocks": 4}
    assert error.accepted == "values that fit together: give num_blocks or memory, not both"


@pytest.mark.parametrize(
    ("field", "near"),
    [
        ("cache.blocksize", "cache.block_size"),
        ("block_size", "cache.block_size"),
        ("parallel.tensor_parallel", "parallel.tensor_parallel_size"),
        ("keepalive", "keep_alive"),
    ],
)
def test_an_unknown_field_is_refused_with_near_misses(field: str, near: str) -> None:
    error = _refusal(flags={"model.model": "fingerprint", field: 1})
    assert error.field == field
    assert error.accepted.startswith("a known name: did you mean ")
    assert near in error.accepted


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("RAYSERVE_CACHE_BLOCK_SIZE", "RAYSERVE_CACHE__BLOCK_SIZE"),
        ("RAYSERVE_MODEL", "RAYSERVE_MODEL__MODEL"),
        ("RAYSERVE_CACHEDIR", "RAYSERVE_CACHE_DIR"),
    ],
)
def test_an_unknown_variable_is_refused_with_near_misses(variable: str, near: str) -> None:
    error = _refusal(flags={"model.model": "fingerprint"}, environ={variable: "1"})
    assert error.field == variable
    assert near in error.accepted


def test_a_name_that_resembles_nothing_is_answered_with_all_names() -> None:
    error = _refusal(flags={"zzz": 1})
    assert error.accepted.startswith("one of the names name, model.model, model.dtype, ")


@pytest.mark.parametrize("empty", ["null", "{}"])
def test_an_unknown_section_is_refused_even_if_empty(tmp_path: Path, empty: str) -> None:
    path = _write(tmp_path, f"model: {{model: fingerprint}}\ncaches: {empty}\n")
    assert _refusal(path).field == "caches"


def test_a_section_that_is_no_section_is_refused_with_its_fields() -> None:
    error = _refusal(flags={"model": "smollm2"})
    assert error.field == "model"
    assert error.accepted == (
        "a section with the fields model.model, model.dtype, model.kv_dtype, "
        "model.cpu_attention, model.max_model_len"
    )


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    error = _refusal(path)
    assert (error.field, error.value) == ("config", str(path))
    assert error.accepted == "a readable YAML file (No such file or directory)"


@pytest.mark.parametrize("text", ["cache: [1, 2", "a: b: c", "\tcache: 1"])
def test_a_file_that_is_not_yaml_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    error = _refusal(_write(tmp_path, text))
    assert error.field == "config"
    assert error.accepted.startswith("a valid YAML file (")
    assert "line " in error.accepted
    assert "\n" not in str(error)


def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path) -> None:
    error = _refusal(_write(tmp_path, "- smollm2\n"))
    assert error.accepted == "a YAML file that holds a mapping of fields"


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path, "# nothing yet\n")
    assert load_config(path, {"model.model": "fingerprint"}, {}).name == "default"


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSERVE_MODEL__MODEL", "fingerprint")
    monkeypatch.setenv("RAYSERVE_BATCH__MAX_NUM_SEQS", "3")
    assert load_config().batch.max_num_seqs == 3


def test_the_cache_directory_follows_the_users_variables(tmp_path: Path) -> None:
    own, xdg = str(tmp_path / "own"), str(tmp_path / "xdg")
    both = {"RAYSERVE_CACHE_DIR": own, "XDG_CACHE_HOME": xdg}
    assert user_cache_dir(both) == tmp_path / "own" / "rayserve-paged"
    assert user_cache_dir({"XDG_CACHE_HOME": xdg}) == tmp_path / "xdg" / "rayserve-paged"
    assert user_cache_dir({}) == Path.home() / ".cache" / "rayserve-paged"


def test_a_relative_xdg_directory_is_ignored_and_our_own_is_made_absolute() -> None:
    home = Path.home()
    assert user_cache_dir({"XDG_CACHE_HOME": "here"}) == home / ".cache" / "rayserve-paged"
    assert user_cache_dir({"RAYSERVE_CACHE_DIR": "here"}) == Path.cwd() / "here" / "rayserve-paged"
    assert user_cache_dir({"RAYSERVE_CACHE_DIR": "~/c"}) == home / "c" / "rayserve-paged"


def test_weights_of_tenants_come_from_a_file_or_as_json_from_the_environment(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {model: fingerprint}\nbatch: {tenant_weights: {gold: 2, tin: 0.5}}\n")
    config = load_config(path, environ={})
    assert config.batch.tenant_weights == {"gold": 2.0, "tin": 0.5}
    variable = "RAYSERVE_BATCH__TENANT_WEIGHTS"
    config = load_config(path, environ={variable: '{"gold": 3}'})
    assert config.batch.tenant_weights == {"gold": 3.0}
    with pytest.raises(InvalidInputError, match="a JSON object of numbers by name"):
        load_config(path, environ={variable: "gold=3"})
