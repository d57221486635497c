import random

import numpy as np

from rayserve_paged.core.ids import Attempt, ConsumerId, RequestId
from rayserve_paged.core.row_readers import RowReaders
from rayserve_paged.core.stream_messages import StreamName


def test_rows_are_dealt_to_whoever_reads_them_while_consumers_come_and_go() -> None:
    draw, readers = random.Random(0), RowReaders(6)
    entered: dict[int, tuple[ConsumerId, StreamName]] = {}
    for number in range(400):
        row = draw.randrange(6)
        entered.pop(row, None)
        name = StreamName(RequestId(f"q{number}"), Attempt(0), 0)
        entered[row] = (ConsumerId(f"c{draw.randrange(number // 10, number // 10 + 3)}"), name)
        readers.enter(row, name, entered[row][0])
        rows = np.array(draw.sample(sorted(entered), draw.randint(1, len(entered))), np.int32)
        dealt = {}
        for consumer, chosen, names in readers.of(rows):
            mine = rows if chosen is None else rows[chosen]
            assert consumer not in dealt
            dealt[consumer] = list(zip(mine.tolist(), names, strict=True))
        expected: dict[ConsumerId, list[tuple[int, StreamName]]] = {}
        for each in rows.tolist():
            expected.setdefault(entered[each][0], []).append((each, entered[each][1]))
        assert dealt == expected
