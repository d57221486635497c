"""What the tests of LLM on the fingerprint model share: the right tokens, and the ledger."""

from collections.abc import Iterator

import pytest

from rayserve_paged import LLM
from rayserve_paged.model.fingerprint import oracle

NUM_BLOCKS = 256


def greedy(prompt: str | list[int], num_tokens: int) -> tuple[int, ...]:
    """The greedy tokens of a prompt, computed without a cache."""
    return tuple(oracle(prompt.encode() if isinstance(prompt, str) else prompt, num_tokens))


def num_unused_blocks(llm: LLM) -> int:
    """FREE and CACHED blocks; the step that is under way may hold some until it has ended."""
    num_unused = 0
    for _ in range(300):
        (ledger,) = llm.accounting().replicas.values()
        num_unused = ledger.num_free_blocks + ledger.num_cached_blocks
        if ledger.num_held_blocks == 0:
            break
    return num_unused


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    """One deployment for a file's tests."""
    with LLM("fingerprint", shell="inprocess", block_size=4, num_blocks=NUM_BLOCKS) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """No test may leave a block held."""
    yield shared_llm
    assert num_unused_blocks(shared_llm) == NUM_BLOCKS
