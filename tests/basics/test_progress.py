"""Progress bars: on a terminal alone, with the time left, gone when the work is done."""

import io
import os
import sys
import threading

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from rcr_trainer.data.examples import Example
from rcr_trainer.data.files import unparsed

from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder, VectorStoreIndex
from langchain_rcr.basics import progress
from langchain_rcr.programs import ProgramSpec

CORES = os.cpu_count() or 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, delay: float = 0) -> str:
    """What a counted piece of work and a loop write to a stream."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY_S", delay)
    with progress.bar("adding", 10, done=4) as bar:
        bar.update(3)
        bar.refresh()
    assert list(progress.track(range(5), "encoding")) == [0, 1, 2, 3, 4]
    assert list(progress.track([1], "alone")) == [1]
    return stream.getvalue()


def test_a_terminal_shows_what_is_done_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown_on(Terminal(), monkeypatch)
    for part in ("adding: 4/10", "adding: 7/10", "encoding: 0/5", " left"):
        assert part in said
    assert "alone" not in said
    assert said.endswith(" \r")  # removed


def test_nothing_is_written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_on(io.StringIO(), monkeypatch) == ""
    monkeypatch.setenv("RANK", "1")  # a second process
    assert shown_on(Terminal(), monkeypatch) == ""


def test_adding_examples_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"source": f"how many {name}", "target": f"count({name})"} for name in ("cats", "dogs", "owls")]
    encoder = TriEncoder.build("structure", [Item(**row) for row in rows[:2]])
    index = VectorStoreIndex(InMemoryVectorStore)
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, rows[:1], index=index)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "DELAY_S", 0)
    retriever.add_examples([{**row, "source": f"{row['source']} {n}"} for n in range(100) for row in rows])
    for part in ("reading programs: 0/3", "adding to InMemoryVectorStore: 0/2"):
        assert part in screen.getvalue()


def test_quick_work_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "encoding" not in shown_on(Terminal(), monkeypatch, delay=60)


@pytest.mark.parametrize("reader", ["file", "fit"])
def test_reading_programs_for_the_first_time_shows_how_far_it_is(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    examples, screen = [Example(str(n), f"question {n}", f"count({n})") for n in range(30)], Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "DELAY_S", 0)
    if reader == "file":
        assert unparsed(examples, ProgramSpec()) == []
    else:
        monkeypatch.setattr(TriEncoder, "build", lambda *items, **settings: 1 / 0)  # would read them again
        with pytest.raises(ZeroDivisionError):
            TriEncoder.fitted([each.item for each in examples], spec=ProgramSpec(), family="lexical")
    assert "reading programs: 0/30" in screen.getvalue()


@pytest.mark.parametrize(("limit", "most"), [("1", 1), ("3", 3), ("", CORES), ("2,2", CORES)])
def test_work_goes_on_as_many_threads_as_allowed_and_results_come_in_order(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    together = threading.Barrier(most)

    def work(number: int) -> tuple[int, int]:
        together.wait(timeout=60)  # fails unless as many are at it at once
        return number * number, threading.get_ident()

    found = list(progress.spread(work, range(6 * most), "working"))
    assert [square for square, _ in found] == [n * n for n in range(6 * most)]
    assert len({thread for _, thread in found}) == most


def test_a_single_piece_of_work_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert list(progress.spread(lambda _: threading.get_ident(), ["one"], "working")) == [threading.get_ident()]


def test_what_is_no_longer_wanted_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    event, done = threading.Event(), list[int]()

    def work(number: int) -> None:
        event.wait(0.01)
        done.append(number)

    with progress.stoppable(event):
        results = progress.spread(work, range(1000), "working")
        next(results)
        event.set()
        with pytest.raises(progress.Stopped):
            next(results)
    assert len(done) < 1000


def test_the_end_of_the_process_waits_for_no_work_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with progress.stoppable(threading.Event()):
        assert {*progress.spread(lambda _: threading.get_ident(), range(9), "working")} == {threading.get_ident()}


def test_an_error_of_some_work_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(ZeroDivisionError):
        list(progress.spread(lambda number: 1 / number, [2, 1, 0, 1], "working"))
