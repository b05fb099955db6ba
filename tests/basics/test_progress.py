"""Progress bars: on a terminal alone, with the time left, gone when the work is done."""

import io
import sys

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from rcr_trainer.data.examples import Example
from rcr_trainer.data.files import unparsed

from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder, VectorStoreIndex
from langchain_rcr.basics import progress
from langchain_rcr.programs import ProgramSpec


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
