import pytest
from pydantic import ValidationError

from rayserve_paged.core.config import (
    BatchConfig,
    CacheConfig,
    DeploymentConfig,
    ModelConfig,
    ParallelConfig,
    TimeoutConfig,
)


def test_a_model_alone_makes_a_deployment() -> None:
    config = DeploymentConfig(model=ModelConfig(model="fingerprint"))
    assert (config.cache.block_size, config.cache.num_blocks) == (16, None)
    assert (config.parallel.tensor_parallel_size, config.parallel.num_replicas) == (1, 1)
    assert not config.keep_alive
    assert config.timeouts.poll_timeout_s < config.timeouts.consumer_lease_s


def test_memory_is_read_with_its_unit() -> None:
    assert CacheConfig.model_validate({"memory": "512MiB"}).memory == 512 * 2**20


@pytest.mark.parametrize(
    ("section", "fields", "named"),
    [
        (CacheConfig, {"num_blocks": 0}, "num_blocks"),
        (CacheConfig, {"block_size": 0}, "block_size"),
        (CacheConfig, {"block_size": 1025}, "block_size"),
        (CacheConfig, {"num_blocks": 4, "memory": "1MiB"}, "num_blocks or memory"),
        (BatchConfig, {"max_num_seqs": 0}, "max_num_seqs"),
        (BatchConfig, {"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        (ParallelConfig, {"tensor_parallel_size": 0}, "tensor_parallel_size"),
        (ParallelConfig, {"num_replicas": 0}, "num_replicas"),
        (TimeoutConfig, {"consumer_lease_s": 0}, "consumer_lease_s"),
        (ModelConfig, {"model": ""}, "model"),
        (ModelConfig, {"model": "x", "dtype": "fp8"}, "dtype"),
        (ModelConfig, {"model": "x", "max_model_len": 0}, "max_model_len"),
        (BatchConfig, {"max_num_sequences": 4}, "max_num_sequences"),
        (DeploymentConfig, {"model": {"model": "x"}, "name": "a b"}, "name"),
    ],
)
def test_a_value_that_is_not_accepted_is_named(
    section: type[CacheConfig], fields: dict[str, object], named: str
) -> None:
    with pytest.raises(ValidationError, match=named):
        section.model_validate(fields)


def test_a_configuration_cannot_be_changed() -> None:
    config = BatchConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.max_num_seqs = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
