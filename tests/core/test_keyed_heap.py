import random

from rayserve_paged.core.keyed_heap import KeyedHeap


def test_the_first_has_the_smallest_key_and_of_equal_ones_was_put_first() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    assert heap.first() is None
    heap.put("b", (2.0,))
    heap.put("a", (2.0,))
    heap.put("c", (3.0,))
    assert heap.first() == "b"
    heap.put("c", (1.0,))
    assert (heap.first(), heap.key("c"), len(heap)) == ("c", (1.0,), 3)
    heap.put("c", (9.0,))
    heap.remove("b")
    heap.remove("nobody")
    assert heap.first() == "a"
    assert "b" not in heap
    assert set(heap) == {"a", "c"}


def test_an_item_that_leaves_and_comes_back_has_its_new_key() -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    heap.put("a", (1.0,))
    heap.put("b", (2.0,))
    heap.remove("a")
    heap.put("a", (3.0,))
    assert heap.first() == "b"
    heap.remove("b")
    assert heap.first() == "a"


def test_whatever_is_put_changed_and_removed_it_agrees_with_a_plain_search_and_stays_small() -> (
    None
):
    draw = random.Random(0)
    heap: KeyedHeap[int] = KeyedHeap()
    keys: dict[int, tuple[float, int]] = {}
    for _ in range(20_000):
        item = draw.randrange(40)
        if draw.random() < 0.4:
            heap.remove(item)
            keys.pop(item, None)
        else:
            keys[item] = (draw.randrange(8), item)
            heap.put(item, keys[item])
        assert heap.first() == min(keys, key=lambda item: keys[item], default=None)
        assert len(heap) == len(keys)
        assert heap.num_entries <= 2 * len(keys) + 8


def test_items_that_leave_from_behind_do_not_stay() -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    heap.put(-1, (0.0,))
    for item in range(10_000):
        heap.put(item, (1.0,))
        heap.remove(item)
    assert heap.first() == -1
    assert heap.num_entries <= 10
