import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.fingerprint import FingerprintModel, FingerprintOracle, oracle
from rayserve_paged.model.row_content import RowContent
from rayserve_paged.model.spec import FingerprintConfig

MakeGang = Callable[..., Any]

CONFIG = FingerprintConfig()
PROMPT = [(37 * place + 11) % 1000 for place in range(29)]


@pytest.fixture
def gang_of(make_gang: MakeGang) -> Callable[..., Any]:
    def make(
        world_size: int = 1, block_size: int = 4, config: FingerprintConfig = CONFIG
    ) -> object:
        return make_gang(
            lambda collectives: FingerprintModel(config, collectives, TorchBackend()),
            world_size,
            block_size=block_size,
        )

    return make


def oracle_logits(token_ids: list[int], config: FingerprintConfig = CONFIG) -> torch.Tensor:
    state = FingerprintOracle(config)
    for token_id in token_ids:
        state.append(token_id)
    return state.logits()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_outputs_equal_the_oracle_at_every_width(
    gang_of: Callable[..., Any], world_size: int
) -> None:
    prompts = [PROMPT, PROMPT[:4], PROMPT[3:4]]
    outputs = gang_of(world_size).greedy(prompts, 8, budget=7)
    assert outputs == [oracle(prompt, 8) for prompt in prompts]


def test_three_kv_heads_give_the_oracle_too(gang_of: Callable[..., Any]) -> None:
    config = FingerprintConfig(num_layers=3, num_heads=9, num_kv_heads=3, vocab_size=257)
    for world_size in (2, 6, 9):
        outputs = gang_of(world_size, config=config).greedy([PROMPT], 5)
        assert outputs == [oracle(PROMPT, 5, config)]
    with pytest.raises(InvalidInputError, match="tensor_parallel_size=4"):
        gang_of(4, config=config)


@pytest.mark.parametrize("chunks", [(), (1,), (4, 4), (3, 17), tuple([1] * 28)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_logits_are_bitwise_equal_however_the_prompt_is_chunked(
    gang_of: Callable[..., Any], chunks: tuple[int, ...], block_size: int
) -> None:
    logits = gang_of(block_size=block_size).logits(PROMPT, chunks)
    assert torch.equal(logits, oracle_logits(PROMPT))


def prefilled(gang: Any) -> Any:  # noqa: ANN401
    sequence = gang.start(PROMPT)
    gang.step([(sequence, 28)])
    return sequence


def test_two_swapped_blocks_show(gang_of: Callable[..., Any]) -> None:
    gang = gang_of()
    sequence = prefilled(gang)
    ids = sequence.block_ids
    ids[1], ids[2] = ids[2], ids[1]
    assert not torch.equal(gang.step([(sequence, 1)])[0], oracle_logits(PROMPT))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("position", [0, 13, 27])
def test_one_wrong_slot_of_one_head_on_any_rank_shows(
    gang_of: Callable[..., Any], rank: int, part: str, position: int
) -> None:
    gang = gang_of(2)
    sequence = prefilled(gang)
    layer, head = 1, 1
    where = (layer, sequence.block_ids[position // 4], head, position % 4, 0)
    getattr(gang.pools[rank], part)[where] += 1
    assert not torch.equal(gang.step([(sequence, 1)])[0], oracle_logits(PROMPT))


def test_a_slot_that_was_never_written_shows(gang_of: Callable[..., Any]) -> None:
    gang = gang_of()
    sequence = gang.start(PROMPT)
    gang.step([(sequence, 12)])
    sequence.num_computed = 16
    sequence.block_ids.append(gang.take_block())
    assert not torch.equal(gang.step([(sequence, 13)])[0], oracle_logits(PROMPT))


def test_a_block_of_another_sequence_shows_and_one_of_the_same_tokens_does_not(
    gang_of: Callable[..., Any],
) -> None:
    gang = gang_of()
    first, twin = prefilled(gang), prefilled(gang)
    other = gang.start([*PROMPT[:4], 999, *PROMPT[5:]])
    gang.step([(other, 28)])
    first.block_ids[1] = twin.block_ids[1]
    assert torch.equal(gang.step([(first, 1)])[0], oracle_logits(PROMPT))
    twin.block_ids[1] = other.block_ids[1]
    assert not torch.equal(gang.step([(twin, 1)])[0], oracle_logits(PROMPT))


CONTENTS = [
    RowContent(None, (Attachment(bytes(16), 5, 9),)),
    RowContent(None, (Attachment(bytes(15) + b"1", 5, 9),)),
    RowContent(None, (Attachment(bytes(16), 6, 9),)),
    RowContent(None, (Attachment(bytes(16), 5, 8),)),
    RowContent(Adapter("a", "1")),
    RowContent(Adapter("a", "2")),
    RowContent(Adapter("1", "a")),
    RowContent(Adapter("a", "1"), (Attachment(bytes(16), 5, 9),)),
]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_batch_mixes_adapters_and_attachments(
    gang_of: Callable[..., Any], world_size: int
) -> None:
    contents = [None, *CONTENTS]
    expected = [oracle(PROMPT, 6, content=content) for content in contents]
    assert len({tuple(output) for output in expected}) == len(contents)
    gang = gang_of(world_size, block_size=8)
    assert gang.greedy([PROMPT] * len(contents), 6, budget=40, contents=contents) == expected


def test_blocks_of_other_content_show(gang_of: Callable[..., Any]) -> None:
    gang = gang_of()
    own = gang.start(PROMPT, CONTENTS[0])
    other = gang.start(PROMPT, CONTENTS[1])
    gang.step([(own, 28), (other, 28)])
    own.block_ids[1] = other.block_ids[1]
    state = FingerprintOracle(CONFIG, CONTENTS[0])
    for token_id in PROMPT:
        state.append(token_id)
    assert not torch.equal(gang.step([(own, 1)])[0], state.logits())


def test_blocks_of_another_weights_version_show(gang_of: Callable[..., Any]) -> None:
    changed = dataclasses.replace(CONFIG, weights_version=1)
    assert not torch.equal(oracle_logits(PROMPT), oracle_logits(PROMPT, changed))
    assert CONFIG.spec().fingerprint != changed.spec().fingerprint
    gang, donor = gang_of(), gang_of(config=changed)
    sequence = prefilled(gang)
    other = donor.start(PROMPT)
    donor.step([(other, 28)])
    gang.pools[0].blocks[sequence.block_ids[0]] = donor.pools[0].blocks[other.block_ids[0]]
    assert not torch.equal(gang.step([(sequence, 1)])[0], oracle_logits(PROMPT))


def test_logits_are_spread_and_have_one_maximum() -> None:
    logits = oracle_logits(PROMPT)
    assert logits.dtype == torch.float32
    assert 0 <= float(logits.min()) < 0.2
    assert 15.8 < float(logits.max()) < 16
    assert int((logits == logits.max()).sum()) == 1


def test_a_block_holds_one_number_a_slot_and_head(gang_of: Callable[..., Any]) -> None:
    model = gang_of(3).models[0]
    layout = model.kv_layout(16)
    assert layout.dtype == torch.int64
    assert layout.num_kv_heads == 2
    assert layout.block_bytes == 2 * 2 * 2 * 16 * 8
