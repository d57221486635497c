from rayserve_paged.core.ids import BlockKey
from rayserve_paged.core.prefix_heat import PrefixHeat

KEYS = [BlockKey(bytes([i]) * 32) for i in range(12)]


def test_a_block_is_as_hot_as_the_hottest_behind_it() -> None:
    heat = PrefixHeat()
    for index in (2, 2, 2, 5, 7, 7):
        heat.note(KEYS[index])
    assert heat.up_to(KEYS, [3, 6, 8]) == [3, 2, 2]
    assert heat.up_to(KEYS, [3, 6]) == [3, 1]
    assert heat.up_to(KEYS, [1, 2]) == [0, 0]
    assert heat.up_to(KEYS, []) == []


def test_what_was_counted_longest_ago_is_forgotten() -> None:
    heat = PrefixHeat(max_partings=10)
    for _ in range(3):
        heat.note(KEYS[0])
    for key in KEYS[1:10]:
        heat.note(key)
    heat.note(KEYS[0])
    for key in KEYS[10:]:
        heat.note(key)
        assert len(heat) <= 10
    assert heat.up_to(KEYS, [1]) == [4]
    assert heat.up_to(KEYS, [2]) == [0]
