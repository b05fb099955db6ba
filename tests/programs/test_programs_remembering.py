from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from langchain_rcr.programs import ProgramSpec, Tree
from langchain_rcr.programs.remembering import remembered

MIB = 1 << 20


class Counted:
    """A function that remembers, of a number and a text, and its calls."""

    def __init__(self, max_bytes: int, result: Any = lambda number, text: text * 2) -> None:
        self.called: list[int] = []

        @remembered(max_bytes)
        def function(number: int, text: str) -> Any:
            self.called.append(number)
            return result(number, text)

        self.function = function

    def new(self, *numbers: int, text: str = "x") -> list[int]:
        """Call it with each number; return those for which it wasn't remembered."""
        del self.called[:]
        for number in numbers:
            assert self.function(number, text) in (text * 2, None)
        return self.called[:]


def test_a_result_is_computed_once() -> None:
    counted = Counted(MIB)
    assert counted.new(1, 2, 1) == [1, 2]
    assert counted.new(2, 1) == []
    nothing = Counted(MIB, lambda number, text: None)
    assert nothing.new(1, 1) == [1]


def test_results_within_the_bytes_are_remembered_and_no_more() -> None:
    counted, text = Counted(MIB), "x" * 40_000  # with its result, 120 kB
    assert counted.new(*range(8), text=text) == [*range(8)]
    assert counted.new(*range(8), text=text) == []
    assert counted.new(8, 9, text=text) == [8, 9]
    assert counted.new(*range(2, 10), text=text) == []
    assert counted.new(0, text=text) == [0]


@pytest.mark.parametrize(
    "result",
    [
        lambda number, text: None,
        lambda number, text: (frozenset({text}),),
        lambda number, text: Tree("f", (Tree(text),)),
    ],
    ids=["of the text", "in a set", "in a tree"],
)
def test_all_that_a_result_refers_to_counts_and_so_does_the_text(result: Any) -> None:
    called = []

    @remembered(MIB)
    def function(number: int, text: str) -> Any:
        called.append(number)
        return result(number, f"{text} ")

    for number in (*range(20), *range(20)):
        function(number, "x" * 100_000)
    assert called == [*range(20), *range(20)]


def test_what_is_too_much_by_itself_pushes_nothing_out() -> None:
    counted = Counted(MIB)
    assert counted.new(1, 2) == [1, 2]
    assert counted.new(3, text="x" * MIB) == [3]
    assert counted.new(3, text="x" * MIB) == [3]
    assert counted.new(1, 2) == []


def test_a_result_that_refers_to_itself_is_not_kept() -> None:
    circle: list[Any] = []
    circle.append(circle)
    called = []

    @remembered(MIB)
    def function(text: str) -> list[Any]:
        called.append(text)
        return circle

    assert function("x") is function("x") is circle
    assert called == ["x", "x"]


def test_an_error_is_not_remembered() -> None:
    attempts = []

    @remembered(MIB)
    def function(text: str) -> str:
        attempts.append(text)
        if len(attempts) == 1:
            raise ValueError(text)
        return text

    with pytest.raises(ValueError, match="x"):
        function("x")
    assert function("x") == "x"


def test_threads_share_what_is_remembered() -> None:
    counted, wrong = Counted(MIB // 8, lambda number, text: (number, text)), []

    def work(offset: int) -> None:
        for turn in range(400):
            number = (turn * 7 + offset) % 60
            if counted.function(number, "x" * 3_000) != (number, "x" * 3_000):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 60 <= len(counted.called) <= 2_400


@pytest.mark.slow
def test_programs_that_a_language_model_sends_are_remembered_within_bytes() -> None:
    """A tree of 1 MiB of text takes 100 MB; it was 4,096 of them."""

    def trees() -> int:
        gc.collect()
        return sum(type(each) is Tree for each in gc.get_objects())

    spec, before = ProgramSpec(), trees()
    for number in range(16):
        text = f"f{number}({'a,' * 40_000} a)"
        assert spec.values(text) == set()
    assert trees() - before < 400_000
