"""Who reads the tokens of each row of the batch: its consumer, and the name of its stream."""

from operator import itemgetter

import numpy as np

from rayserve_paged.core.ids import ConsumerId
from rayserve_paged.core.step_messages import BoolArray, IntArray
from rayserve_paged.core.stream_messages import StreamName

Readers = list[tuple[ConsumerId, BoolArray | None, tuple[StreamName, ...]]]
"""Rows dealt by who reads them: (consumer, bool [n] or None for all, their streams)."""


class RowReaders:
    """The readers of all rows.

    Args:
        num_rows: Rows of the batch, all empty.
    """

    def __init__(self, num_rows: int) -> None:
        # Of an empty row, what was there last.
        self._names: list[StreamName | None] = [None] * num_rows
        # Of each row, an index into `_consumers`.
        self._consumer = np.zeros(num_rows, np.int32)
        self._consumers: list[ConsumerId] = []

    def enter(self, row: int, name: StreamName, consumer_id: ConsumerId) -> None:
        """Note who reads a row that was empty."""
        self._consumer[row] = self._consumer_index(consumer_id)
        self._names[row] = name

    def of(self, rows: IntArray) -> Readers:
        """Deal rows by who reads them.

        Args:
            rows: int32 [n], at least one, none of them empty.
        """
        consumers = self._consumer[rows]
        first = int(consumers[0])
        if np.count_nonzero(consumers == first) == len(consumers):
            return [(self._consumers[first], None, self._names_of(rows))]
        return [
            (self._consumers[consumer], consumers == consumer, names)
            for consumer in np.unique(consumers).tolist()
            for names in [self._names_of(rows[consumers == consumer])]
        ]

    def _names_of(self, rows: IntArray) -> tuple[StreamName, ...]:
        listed = rows.tolist()
        # A getter of one item returns it bare.
        names: tuple[StreamName, ...] = (
            itemgetter(*listed)(self._names) if len(listed) > 1 else (self._names[listed[0]],)
        )
        return names

    def _consumer_index(self, consumer_id: ConsumerId) -> int:
        try:
            return self._consumers.index(consumer_id)
        except ValueError:
            pass
        # A place that no row refers to, be it an empty one, is used again: there is at most one
        # place more than there are rows.
        taken = set(self._consumer.tolist())
        for index in range(len(self._consumers)):
            if index not in taken:
                self._consumers[index] = consumer_id
                return index
        self._consumers.append(consumer_id)
        return len(self._consumers) - 1
