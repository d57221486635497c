"""The metadata of a step, from block tables to slots."""

import dataclasses

import numpy as np
import pytest
import torch

from rayserve_kernels.metadata import AttentionMetadata, SequenceSpan


def two_sequences() -> AttentionMetadata:
    tables = np.array([[5, 1, 6], [2, 3, -1]], dtype=np.int32)
    return AttentionMetadata.for_step(tables, [3, 7], [6, 1], block_size=4)


def test_slots_follow_the_block_tables() -> None:
    metadata = two_sequences()
    # Positions 3 to 8 of the first sequence, position 7 of the second.
    assert metadata.slot_mapping.tolist() == [23, 4, 5, 6, 7, 24, 15]
    assert metadata.query_start.tolist() == [0, 6, 7]
    assert metadata.seq_lens.tolist() == [9, 8]
    assert metadata.spans == (SequenceSpan(0, 6, 9), SequenceSpan(6, 7, 8))
    assert metadata.num_tokens == 7


def test_the_callers_table_may_change_afterwards() -> None:
    tables = np.array([[5, 1, 6]], dtype=np.int32)
    metadata = AttentionMetadata.for_step(tables, [3], [6], block_size=4)
    tables[:] = 0
    assert metadata.block_tables.tolist() == [[5, 1, 6]]


def test_slots_do_not_overflow_32_bits() -> None:
    tables = np.array([[2**31 - 1]], dtype=np.int32)
    metadata = AttentionMetadata.for_step(tables, [0], [32], block_size=32)
    assert metadata.slot_mapping.tolist()[-1] == (2**31 - 1) * 32 + 31


def test_a_step_without_sequences_is_empty() -> None:
    metadata = AttentionMetadata.for_step(np.zeros((0, 4), np.int32), [], [], block_size=4)
    assert metadata.num_tokens == 0
    assert metadata.spans == ()


def test_a_table_too_short_for_its_sequence_is_refused() -> None:
    tables = np.array([[5, 1]], dtype=np.int32)
    with pytest.raises(ValueError, match="has 9 tokens: the block table holds 2 blocks of 4"):
        AttentionMetadata.for_step(tables, [8], [1], block_size=4)


def test_a_padding_entry_in_use_is_refused() -> None:
    tables = np.array([[5, -1]], dtype=np.int32)
    with pytest.raises(ValueError, match="block id -1 in use"):
        AttentionMetadata.for_step(tables, [4], [1], block_size=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query_start", torch.zeros(2, dtype=torch.int32)),
        ("query_start", torch.zeros(3, dtype=torch.int64)),
        ("block_tables", torch.zeros(6, dtype=torch.int32)),
        ("block_tables", torch.zeros(3, 2, dtype=torch.int32).t()),
        ("slot_mapping", torch.zeros(7, dtype=torch.int32)),
    ],
)
def test_a_field_of_the_wrong_form_is_refused_by_name(field: str, value: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"{field} "):
        dataclasses.replace(two_sequences(), **{field: value})


@pytest.mark.parametrize(
    ("query_start", "message"),
    [([0, 6, 6], "from 0 to 6"), ([1, 6, 7], "from 1 to 7"), ([0, 7, 7], None), ([0, 8, 7], "-1")],
)
def test_spans_that_contradict_themselves_are_refused(
    query_start: list[int], message: str | None
) -> None:
    metadata = dataclasses.replace(
        two_sequences(), query_start=torch.tensor(query_start, dtype=torch.int32)
    )
    if message is None:
        assert metadata.spans[1] == SequenceSpan(7, 7, 8)
        return
    with pytest.raises(ValueError, match=message):
        _ = metadata.spans


def test_more_queries_than_tokens_are_refused() -> None:
    metadata = dataclasses.replace(
        two_sequences(), seq_lens=torch.tensor([5, 8], dtype=torch.int32)
    )
    with pytest.raises(ValueError, match="sequence 0 has 6 queries and 5 tokens"):
        _ = metadata.spans


def test_the_host_knows_the_sizes_of_a_step() -> None:
    metadata = AttentionMetadata.for_step(np.zeros((2, 4), np.int32), [9, 0], [1, 3], 4)
    assert metadata.query_lens is not None
    assert metadata.query_lens.tolist() == [1, 3]
    assert metadata.max_seq_len == 10
    with pytest.raises(ValueError, match=r"query_lens is \(1,\): expected \(2,\)"):
        dataclasses.replace(metadata, query_lens=metadata.query_lens[:1])
