from hypothesis import given
from hypothesis import strategies as st
from replica_driver import depths

from rayserve_paged.core.directory import Directory
from rayserve_paged.core.ids import BlockKey

NUM_SLOTS = 4
KEYS = [BlockKey(bytes([i]) * 32) for i in range(5)]


def match(directory: Directory, keys: list[BlockKey]) -> list[int]:
    return depths(directory, keys, NUM_SLOTS)


def test_each_replica_gets_the_length_of_its_leading_run() -> None:
    directory = Directory()
    directory.update(0, KEYS[:1], ())
    directory.update(1, KEYS[:3], ())
    directory.update(2, KEYS[1:], ())
    assert match(directory, KEYS) == [1, 3, 0, 0]
    assert match(directory, KEYS[1:]) == [0, 2, 4, 0]
    assert match(directory, []) == [0, 0, 0, 0]


def test_an_evicted_key_is_gone_for_its_replica_alone() -> None:
    directory = Directory()
    for slot in range(2):
        directory.update(slot, KEYS[:2], ())
    directory.update(0, (), KEYS[1:3])
    assert match(directory, KEYS) == [1, 2, 0, 0]
    directory.update(1, (), KEYS[:2])
    assert len(directory) == 1


def test_a_forgotten_replica_leaves_no_keys() -> None:
    directory = Directory()
    for slot in range(3):
        directory.update(slot, KEYS[:2], ())
    directory.update(1, KEYS[2:3], ())
    directory.forget(1)
    directory.forget(1)
    assert len(directory) == 2
    directory.update(3, KEYS[:1], ())
    assert match(directory, KEYS) == [2, 0, 2, 1]


def test_keys_are_expected_until_they_are_settled_whether_reported_or_not() -> None:
    directory = Directory()
    directory.update(0, KEYS[:1], ())
    directory.expect(0, KEYS[1:4])
    directory.expect(1, KEYS[:2])
    assert match(directory, KEYS) == [4, 2, 0, 0]
    assert directory.num_expected == 4
    directory.update(0, KEYS[1:3], ())
    directory.settle(0, KEYS[1:4])
    assert match(directory, KEYS) == [3, 2, 0, 0]
    assert directory.num_expected == 2
    directory.settle(1, KEYS[:2])
    assert directory.num_expected == 0
    assert match(directory, KEYS) == [3, 0, 0, 0]
    directory.expect(2, KEYS)
    directory.forget(2)
    assert directory.num_expected == 0


def test_each_depth_is_told_once_with_all_who_hold_so_much() -> None:
    directory = Directory()
    for slot, num_keys in enumerate((3, 1, 3, 5)):
        directory.update(slot, KEYS[:num_keys], ())
    levels = [(depth, slots.tolist()) for depth, slots in directory.match(KEYS)]
    assert levels == [(1, [1]), (3, [0, 2]), (5, [3])]


def test_an_inventory_takes_the_place_of_what_was_known_of_its_replica_alone() -> None:
    directory = Directory()
    directory.update(0, KEYS[:3], ())
    directory.update(1, KEYS[:2], ())
    directory.expect(0, KEYS[3:4])
    directory.replace(0, KEYS[1:3])
    assert (directory.held(0), directory.held(1)) == ({*KEYS[1:3]}, {*KEYS[:2]})
    assert directory.expected(0) == {KEYS[3]}
    directory.replace(0, ())
    assert directory.held(0) == set()
    assert len(directory) == 2


def make_keys(num_keys: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32)) for number in range(num_keys)]


def test_a_full_directory_keeps_all_and_forgets_the_oldest_tenth_beyond_that() -> None:
    keys = make_keys(21)
    directory = Directory(max_keys=20)
    directory.update(0, keys[:20], ())
    assert directory.held(0) == {*keys[:20]}
    directory.update(1, keys[20:], ())
    assert (directory.held(0), directory.held(1)) == ({*keys[3:20]}, {keys[20]})


def test_matches_count_while_a_directory_is_more_than_half_full() -> None:
    for num_before, counts in ((10, False), (11, True)):
        keys = make_keys(21)
        directory = Directory(max_keys=20)
        directory.update(0, keys[:num_before], ())
        assert match(directory, keys[:1]) == [1, 0, 0, 0]
        directory.update(0, keys[num_before:], ())
        assert len(directory) == 18
        assert (keys[0] in directory.held(0)) is counts


def test_what_was_expected_alone_is_matched_in_a_directory_that_is_nearly_full() -> None:
    keys = make_keys(14)
    directory = Directory(max_keys=20)
    directory.update(0, keys[:12], ())
    directory.expect(1, keys[12:])
    assert match(directory, keys[12:]) == [0, 2, 0, 0]
    assert match(directory, make_keys(20)[14:]) == [0, 0, 0, 0]
    assert directory.held(0) == {*keys[:12]}


def test_the_longest_run_that_was_matched_outlasts_others_and_its_head_its_tail() -> None:
    keys = make_keys(24)
    directory = Directory(max_keys=20)
    directory.update(0, keys[:5], ())
    directory.update(1, keys[:1], ())
    directory.update(0, keys[5:18], ())
    # All but the fourth: what is behind a gap was not found.
    directory.update(0, (), keys[3:4])
    assert match(directory, keys[:5]) == [3, 1, 0, 0]
    directory.update(2, keys[18:22], ())
    # The fifth and two more were published longest ago.
    assert directory.held(0) == {*keys[:3], *keys[7:18]}
    for number in range(22, 60):
        directory.update(3, [BlockKey(bytes([number]) * 32)], ())
        if not directory.held(0) >= {*keys[:3]}:
            break
    assert keys[0] in directory.held(0)
    assert keys[2] not in directory.held(0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 62, 63, 64, 130]),
            st.sampled_from(["publish", "evict", "forget"]),
            st.sets(st.sampled_from(KEYS)),
        ),
        max_size=30,
    ),
    st.lists(st.sampled_from(KEYS), max_size=6),
)
def test_a_directory_agrees_with_a_set_per_replica(
    changes: list[tuple[int, str, set[BlockKey]]], wanted: list[BlockKey]
) -> None:
    directory = Directory()
    held: list[set[BlockKey]] = [set() for _ in range(131)]
    for slot, change, keys in changes:
        match change:
            case "publish":
                directory.update(slot, keys, ())
                held[slot] |= keys
            case "evict":
                directory.update(slot, (), keys)
                held[slot] -= keys
            case _:
                directory.forget(slot)
                held[slot] = set()
    expected = [
        next((i for i, key in enumerate(wanted) if key not in keys), len(wanted)) for keys in held
    ]
    assert depths(directory, wanted, 131) == expected
    assert len(directory) == len(set().union(*held))
