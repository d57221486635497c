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
    directory.settle(1, KEYS[:2])
    assert match(directory, KEYS) == [3, 0, 0, 0]
    directory.expect(2, KEYS)
    directory.forget(2)
    assert directory.num_expected == 0


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
