"""Results are shown in their order, and none is waited for by those that hand it over."""

import threading

import pytest

from rayserve_paged.ordered_printer import OrderedPrinter


def test_results_are_shown_in_their_order_as_soon_as_those_before_them_are_there() -> None:
    shown: list[str] = []
    both = threading.Event()

    def show(result: str) -> None:
        shown.append(result)
        if len(shown) == 2:
            both.set()

    with OrderedPrinter(show) as printer:
        printer.put(1, "b")
        printer.put(3, "d")
        printer.put(0, "a")
        # Before the end, and the third one does not hold them up.
        assert both.wait(60)
        assert shown == ["a", "b"]
        printer.put(2, "c")
    assert shown == ["a", "b", "c", "d"]


def test_who_hands_over_does_not_wait_for_what_is_shown() -> None:
    may_go_on = threading.Event()
    shown: list[int] = []

    def show(result: int) -> None:
        assert may_go_on.wait(60)
        shown.append(result)

    with OrderedPrinter(show) as printer:
        for number in range(100):
            printer.put(number, number)
        assert shown == []
        may_go_on.set()
    assert shown == list(range(100))


def test_what_cannot_be_shown_is_raised_where_results_come_from() -> None:
    failed = threading.Event()

    def show(result: int) -> None:
        failed.set()
        raise BrokenPipeError(result)

    def hand_over() -> None:
        with OrderedPrinter(show) as printer:
            printer.put(0, 5)
            assert failed.wait(60)
            while True:
                printer.put(1, 6)

    with pytest.raises(BrokenPipeError, match="5"):
        hand_over()


def test_what_cannot_be_shown_at_the_end_is_raised_there_unless_something_else_is() -> None:
    def show(result: int) -> None:
        raise BrokenPipeError(result)

    def hand_over(interrupt: BaseException | None) -> None:
        with OrderedPrinter(show) as printer:
            printer.put(0, 5)
            if interrupt is not None:
                raise interrupt

    with pytest.raises(BrokenPipeError):
        hand_over(None)
    with pytest.raises(KeyboardInterrupt):
        hand_over(KeyboardInterrupt())
