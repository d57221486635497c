from hypothesis import given
from hypothesis import strategies as st

from rayserve_paged.core.directory import Directory
from rayserve_paged.core.ids import BlockKey, ReplicaId

NAMES = [ReplicaId(f"r{i}") for i in range(4)]
KEYS = [BlockKey(bytes([i]) * 32) for i in range(5)]


def test_each_replica_gets_the_length_of_its_leading_run() -> None:
    directory = Directory()
    directory.update(NAMES[0], KEYS[:1], ())
    directory.update(NAMES[1], KEYS[:3], ())
    directory.update(NAMES[2], KEYS[1:], ())
    assert directory.match(KEYS) == {"r0": 1, "r1": 3}
    assert directory.match(KEYS[1:]) == {"r1": 2, "r2": 4}
    assert directory.match([]) == {}


def test_an_evicted_key_is_gone_for_its_replica_alone() -> None:
    directory = Directory()
    for name in NAMES[:2]:
        directory.update(name, KEYS[:2], ())
    directory.update(NAMES[0], (), KEYS[1:3])
    assert directory.match(KEYS) == {"r0": 1, "r1": 2}
    directory.update(NAMES[1], (), KEYS[:2])
    assert len(directory) == 1


def test_a_forgotten_replica_leaves_no_keys_and_its_place_is_used_again() -> None:
    directory = Directory()
    for name in NAMES[:3]:
        directory.update(name, KEYS[:2], ())
    directory.update(NAMES[1], KEYS[2:3], ())
    directory.forget(NAMES[1])
    directory.forget(NAMES[1])
    assert len(directory) == 2
    directory.update(NAMES[3], KEYS[:1], ())
    assert directory.match(KEYS) == {"r0": 2, "r2": 2, "r3": 1}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from(["publish", "evict", "forget"]),
            st.sets(st.sampled_from(KEYS)),
        ),
        max_size=30,
    ),
    st.lists(st.sampled_from(KEYS), max_size=6),
)
def test_a_directory_agrees_with_a_set_per_replica(
    changes: list[tuple[ReplicaId, str, set[BlockKey]]], wanted: list[BlockKey]
) -> None:
    directory = Directory()
    held: dict[ReplicaId, set[BlockKey]] = {name: set() for name in NAMES}
    for name, change, keys in changes:
        match change:
            case "publish":
                directory.update(name, keys, ())
                held[name] |= keys
            case "evict":
                directory.update(name, (), keys)
                held[name] -= keys
            case _:
                directory.forget(name)
                held[name] = set()
    expected = {}
    for name, keys in held.items():
        run = next((i for i, key in enumerate(wanted) if key not in keys), len(wanted))
        if run:
            expected[name] = run
    assert directory.match(wanted) == expected
    assert len(directory) == len(set().union(*held.values()))
