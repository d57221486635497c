import random

import pytest

from rayserve_paged.model.detokenizer import Detokenizer


def byte(token_id: int) -> bytes:
    return bytes([token_id])


def deltas(detokenizer: Detokenizer, token_ids: bytes) -> list[str]:
    return [detokenizer.push([token_id]).text for token_id in token_ids]


def test_b96_characters_split_over_tokens_come_whole() -> None:
    detokenizer = Detokenizer(byte)
    output = bytes.fromhex("61 F0 9F 8C B6 20 E2 82 AC")
    assert deltas(detokenizer, output) == ["a", "", "", "", "\U0001f336", " ", "", "", "€"]
    assert detokenizer.finish() == ""


def test_b96_a_character_cut_off_by_the_end_is_one_replacement_character() -> None:
    detokenizer = Detokenizer(byte)
    assert deltas(detokenizer, bytes.fromhex("61 E2 82")) == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"


def test_b96_a_lone_continuation_byte_is_one_replacement_character() -> None:
    detokenizer = Detokenizer(byte)
    text = "".join(deltas(detokenizer, bytes.fromhex("80"))) + detokenizer.finish()
    assert text == "\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_deltas_add_up_to_the_full_decode_of_any_bytes_in_any_chunks(seed: int) -> None:
    rng = random.Random(seed)
    output = b"".join(
        rng.choice(["a", "é", "€", "🌶", "\ufffd"]).encode()
        if rng.random() < 0.7
        else bytes([rng.randrange(256)])
        for _ in range(60)
    )
    detokenizer = Detokenizer(byte, stop=["never in it", "€€€€€€€€"])
    text, rest = "", list(output)
    while rest:
        count = rng.randint(1, 7)
        text += detokenizer.push(rest[:count]).text
        rest = rest[count:]
    assert text + detokenizer.finish() == output.decode("utf-8", errors="replace")


PIECES = ["DEF", "G", "HI", "JK", "L"]


def piece(token_id: int) -> bytes:
    return PIECES[token_id].encode()


def b98(stop: list[str], chunk: int) -> tuple[str, str | None, int]:
    """Text, stop string and tokens taken of the five pieces, handed over in chunks."""
    detokenizer = Detokenizer(piece, stop)
    text, num_tokens = "", 0
    for start in range(0, 5, chunk):
        delta = detokenizer.push(range(start, min(start + chunk, 5)))
        text += delta.text
        num_tokens += delta.num_tokens
        if delta.stop is not None:
            return text, delta.stop, num_tokens
    return text + detokenizer.finish(), None, num_tokens


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_b98_stop_strings_over_token_and_chunk_borders(chunk: int) -> None:
    assert b98(["DEFGHIJ"], chunk) == ("", "DEFGHIJ", 4)
    assert b98(["GHX"], chunk) == ("DEFGHIJKL", None, 5)
    assert b98(["IJ", "HIJK"], chunk) == ("DEFG", "HIJK", 4)
    assert b98(["HIJK", "IJ"], chunk) == ("DEFG", "HIJK", 4)
    assert b98(["L"], chunk) == ("DEFGHIJK", "L", 5)
    # A stop string of the prompt alone: the stream never sees it.
    assert b98(["prompt"], chunk) == ("DEFGHIJKL", None, 5)


def test_b98_nothing_of_a_stop_string_is_sent_early() -> None:
    detokenizer = Detokenizer(piece, ["GHIJKX"])
    assert [detokenizer.push([token]).text for token in range(5)] == ["DEF", "", "", "", "GHIJKL"]


def test_b98_a_stop_string_with_a_two_byte_character() -> None:
    detokenizer = Detokenizer(byte, ["né"])
    released = [detokenizer.push([token]) for token in "anémone".encode()[:4]]
    assert [delta.text for delta in released] == ["a", "", "", ""]
    assert [delta.stop for delta in released] == [None, None, None, "né"]
    assert detokenizer.finish() == ""


def test_text_behind_a_stop_string_in_the_same_chunk_is_dropped() -> None:
    delta = Detokenizer(piece, ["I"]).push(range(5))
    assert (delta.text, delta.num_tokens, delta.stop) == ("DEFGH", 3, "I")


def test_held_text_is_released_as_soon_as_it_cannot_be_a_stop_string() -> None:
    detokenizer = Detokenizer(byte, ["aab"])
    assert deltas(detokenizer, b"aaab") == ["", "", "a", ""]
    assert detokenizer.finish() == ""


def test_held_text_comes_at_the_end() -> None:
    detokenizer = Detokenizer(byte, ["abc"])
    assert deltas(detokenizer, b"xab") == ["x", "", ""]
    assert detokenizer.finish() == "ab"


def test_b99_a_stop_string_before_min_tokens_does_not_end_the_text() -> None:
    detokenizer = Detokenizer(byte, ["\n"], min_tokens=10)
    stops = [detokenizer.push([token]).stop for token in b"x\nxxxxxxxxx\nxx"[:12]]
    assert stops == [None] * 11 + ["\n"]


def test_b99_a_stop_string_completed_early_does_not_count_later() -> None:
    detokenizer = Detokenizer(byte, ["ab", "abcd"], min_tokens=3)
    # "ab" is complete at two tokens, too early; it is held as the start of "abcd".
    texts = deltas(detokenizer, b"abc")
    assert texts == ["", "", ""]
    assert detokenizer.push(b"d").stop == "abcd"


def test_b99_min_tokens_counts_the_token_that_completes_the_stop_string() -> None:
    detokenizer = Detokenizer(byte, ["b"], min_tokens=2)
    assert detokenizer.push(b"ab").stop == "b"
