"""Adapters and attachments of row starts as int32 fields and back; JSON, as few rows have any."""

import base64
import dataclasses
import json
from collections.abc import Iterable

import numpy as np

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.step_messages import IntArray, RowStart

_INT32 = np.dtype("<i4")


def encode_contents(starts: Iterable[RowStart]) -> IntArray:
    """Return what a plan's starts hold of adapters and attachments, int32 [n]; empty for none."""
    contents = [
        [
            index,
            None if start.adapter is None else [start.adapter.adapter_id, start.adapter.version],
            [
                [base64.b64encode(a.digest).decode(), a.offset, a.num_tokens]
                for a in start.attachments
            ],
        ]
        for index, start in enumerate(starts)
        if start.adapter is not None or start.attachments
    ]
    if not contents:
        return np.zeros(0, _INT32)
    text = json.dumps(contents, separators=(",", ":")).encode()
    # JSON ends with as many spaces as one likes.
    return np.frombuffer(text.ljust(-(-len(text) // 4) * 4), _INT32)


def with_contents(fields: IntArray, starts: Iterable[RowStart]) -> tuple[RowStart, ...]:
    """Return starts with what `encode_contents` made of theirs.

    Raises:
        ValueError: The fields are none of it, or of other starts.
    """
    all_starts = list(starts)
    if not len(fields):
        return tuple(all_starts)
    try:
        for index, adapter, attachments in json.loads(fields.tobytes()):
            all_starts[index] = dataclasses.replace(
                all_starts[index],
                adapter=None if adapter is None else Adapter(*adapter),
                attachments=tuple(
                    Attachment(base64.b64decode(digest), offset, num_tokens)
                    for digest, offset, num_tokens in attachments
                ),
            )
    except (ValueError, TypeError, IndexError, InvalidInputError) as error:
        raise ValueError(f"contents that are none: {error}") from error
    return tuple(all_starts)
