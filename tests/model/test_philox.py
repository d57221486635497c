import numpy as np
import pytest

from rayserve_paged.model.philox import philox4x32, uniform_draws


# Known answers of the Random123 library (kat_vectors, philox4x32 10).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_words_equal_the_published_known_answers(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> np.ndarray:
        return np.array([[int(word, 16) for word in text.split()]], dtype=np.uint64)

    assert np.array_equal(philox4x32(words(counter), words(key)), words(expected))


def draws(seeds: list[int], siblings: list[int], positions: list[int]) -> list[float]:
    arrays = (np.array(values, dtype=np.uint64) for values in (seeds, siblings, positions))
    return uniform_draws(*arrays).tolist()


def test_a_draw_depends_on_its_own_seed_sibling_and_position_alone() -> None:
    together = draws([42, 7, 42, 42, 2**63 - 1], [0, 0, 1, 0, 0], [3, 3, 3, 4, 3])
    assert len(set(together)) == 5
    assert draws([42], [0], [3]) == together[:1]
    assert draws([2**63 - 1], [0], [3]) == together[4:]


def test_draws_are_uniform_in_the_unit_interval() -> None:
    values = np.array(draws([9] * 20000, [0] * 20000, list(range(20000))))
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert np.abs(counts - 2000).max() < 150
