from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from langchain_rcr.programs.remembering import remembered


class Counted:
    """A function that remembers, of a number and a text, and its calls."""

    def __init__(self, most: int, result: Any = lambda number, text: text * 2) -> None:
        self.called: list[int] = []

        @remembered(most)
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
    counted = Counted(1000)
    assert counted.new(1, 2, 1) == [1, 2]
    assert counted.new(2, 1) == []
    nothing = Counted(1000, lambda number, text: None)
    assert nothing.new(1, 1) == [1]


def test_calls_within_the_characters_are_remembered_and_no_more() -> None:
    counted, text = Counted(1000), "x" * 100  # each call counts for 200
    assert counted.new(*range(5), text=text) == [*range(5)]
    assert counted.new(*range(5), text=text) == []
    assert counted.new(5, 6, text=text) == [5, 6]
    assert counted.new(*range(2, 7), text=text) == []
    assert counted.new(0, text=text) == [0]


def test_what_is_too_much_by_itself_pushes_nothing_out() -> None:
    counted = Counted(1000)
    assert counted.new(1, 2) == [1, 2]
    assert counted.new(3, text="x" * 1000) == [3]
    assert counted.new(3, text="x" * 1000) == [3]
    assert counted.new(1, 2) == []


def test_an_error_is_not_remembered() -> None:
    attempts = []

    @remembered(1000)
    def function(text: str) -> str:
        attempts.append(text)
        if len(attempts) == 1:
            raise ValueError(text)
        return text

    with pytest.raises(ValueError, match="x"):
        function("x")
    assert function("x") == "x"


def test_threads_share_what_is_remembered() -> None:
    counted, wrong = Counted(100_000, lambda number, text: (number, text)), []

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


def test_forgetting_takes_no_longer_the_more_is_remembered() -> None:
    count, times = 60_000, []
    counted = Counted(count * 101)
    for numbers in (range(count), range(count, 2 * count)):
        began = time.process_time()
        counted.new(*numbers)
        times.append(time.process_time() - began)
    assert times[1] < 4 * times[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_forked_while_a_result_is_stored_waits_for_none() -> None:
    turns, storing, go = iter(range(9)), threading.Event(), threading.Event()

    class Slow:
        """Looked up first, then stored."""

        def __hash__(self) -> int:
            if next(turns) == 1:
                storing.set()
                go.wait()
            return 0

    counted = Counted(1000)
    thread = threading.Thread(target=counted.function, args=(Slow(), "x"))
    thread.start()
    storing.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)
        counted.function(2, "x")
        os._exit(0)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
