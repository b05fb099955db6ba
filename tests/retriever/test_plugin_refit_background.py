"""Refits in the background: one at a time, with nothing lost, and no process that waits for one."""

import copy
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from test_plugin_refit import NEW, make, shown
from test_plugin_relevance import ROWS, WordCounts

from langchain_rcr import OutcomeLog, SequentialCompositionalRetriever, TriEncoder, VectorStoreIndex
from langchain_rcr.pool import store as stores


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_BURST_S", 0.0)


@pytest.mark.usefixtures("soon")
def test_what_was_too_little_for_a_fit_is_tried_again_only_with_more() -> None:
    rows = [*ROWS[:8], *({"source": f"where is the {n}th cat", "target": f"no program (( {n}"} for n in range(13))]
    retriever = make.from_examples(rows[:20], WordCounts(), language="functional", k=2)
    retriever.add_example(rows[20])
    wait_until(lambda: retriever.store._fitting is None)
    assert retriever.store.encoder.is_fallback
    assert not retriever.needs_refit
    retriever = retriever.model_copy(update={"auto_refit": False})
    retriever.add_example(ROWS[8])
    assert not retriever.needs_refit
    retriever.add_examples(ROWS[9:])
    assert retriever.needs_refit
    retriever.refit()
    assert not retriever.store.encoder.is_fallback


def test_what_another_process_adds_is_learnt_while_it_serves(
    fitted: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = InMemoryVectorStore(WordCounts())

    class Shared(InMemoryVectorStore):
        def __init__(self, embedding: Any) -> None:
            super().__init__(embedding)
            self.store = shared.store

    writer, reader = (
        make.from_encoder(copy.deepcopy(fitted.store.encoder), ROWS, index=VectorStoreIndex(Shared), k=2)
        for _ in range(2)
    )
    learn, read = stores._learn_stored, []
    monkeypatch.setattr(stores, "_learn_stored", lambda *given: read.append(learn(*given)))

    def look(one: SequentialCompositionalRetriever) -> int:
        one.store._look_at = 0.0
        one.invoke(ROWS[0]["source"])
        wait_until(lambda: one.store._look_at not in (0.0, math.inf))
        return len(read)

    writer.add_examples(NEW)
    writer.delete([writer.store.index.rows()[0].id])
    assert shown(reader) != shown(writer)
    assert look(writer) == 0  # what it has changed itself, it knows
    assert look(reader) == 1
    assert shown(reader) == shown(writer)
    assert look(reader) == 1


class Gate:
    """Holds up fits until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.begun, refitted = threading.Event(), 0, TriEncoder.refitted

        def held_up(encoder: TriEncoder, *arguments: Any, **options: Any) -> TriEncoder:
            self.begun += 1
            assert self.opened.wait(60)
            return refitted(encoder, *arguments, **options)

        monkeypatch.setattr(TriEncoder, "refitted", held_up)


def test_in_the_background_it_is_the_same(
    retriever: SequentialCompositionalRetriever, soon: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    gate, before = Gate(monkeypatch), retriever.store.encoder
    caplog.set_level(logging.INFO, "langchain_rcr.pool")
    retriever.add_examples(NEW)
    wait_until(lambda: gate.begun == 1)
    assert retriever.needs_refit
    late = [{"source": "where do the hens live", "target": "home(hens)"}]
    for example in late:  # each asks for a fit, of which one is on its way
        retriever.add_example(example)
    assert retriever.store.encoder is before
    assert retriever.invoke(late[0]["source"])[-1].metadata["target"] == late[0]["target"]
    gate.opened.set()
    wait_until(lambda: retriever.store.encoder is not before)
    expected = make.from_examples([*ROWS, *NEW], WordCounts(), language="functional", k=2)
    expected.add_examples(late)
    assert shown(retriever) == shown(expected)
    assert retriever.invoke(late[0]["source"])[-1].metadata["target"] == late[0]["target"]
    wait_until(lambda: "fitted anew to 36 examples" in caplog.text)
    assert not retriever.needs_refit
    assert gate.begun == 1
    assert "call refit()" not in caplog.text


@pytest.mark.slow
def test_questions_are_answered_and_examples_added_and_deleted_all_the_while(
    retriever: SequentialCompositionalRetriever, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_REST", 0.0)
    wrong: list[BaseException] = []

    def asking() -> None:
        try:
            while not done.is_set():
                assert len(retriever.invoke("how many cats")) == 2
        except BaseException as error:
            wrong.append(error)

    done, first = threading.Event(), retriever.store.encoder
    threads = [threading.Thread(target=asking) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(30):
        retriever.add_example({"source": f"where is thing {number}", "target": f"home(t{number})"}, id=f"t{number}")
        if number % 10 == 9:
            assert retriever.delete([f"t{number}"]) == 1
    wait_until(lambda: not retriever.needs_refit)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert retriever.store.encoder is not first
    left = {f"t{number}" for number in range(30) if number % 10 != 9}
    rows = retriever.store.index.rows()
    assert len(rows) == 32 + len(left)
    assert left <= {row.id for row in rows}


def test_two_at_once_lose_nothing(
    retriever: SequentialCompositionalRetriever, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    by_hand = [threading.Thread(target=retriever.refit) for _ in range(2)]
    for thread in by_hand:
        thread.start()
    wait_until(lambda: gate.begun == 1)
    retriever.add_examples(NEW, list("abcd"))
    gate.opened.set()
    for thread in by_hand:
        thread.join()
    assert {"a", "b", "c", "d"} <= {row.id for row in retriever.store.index.rows()}
    assert gate.begun >= 2


FORKING = """
import os, signal, sys, threading, time

sys.path[:] = {path}
from test_plugin_refit import NEW, ROWS, WordCounts, make

from langchain_rcr.families.structure.needs import _GROWING

retriever = make.from_examples(ROWS, WordCounts(), language="functional", k=2)
index = retriever.store.index
held, done = threading.Barrier(4), threading.Event()

def refitting():
    with retriever.store._refitting, retriever.store._changing:
        held.wait()
        done.wait()

def changing():
    with index._lock, index._now.rows.lock:  # as a change to the pool and the first look at a filter do
        held.wait()
        done.wait()

def growing():
    with _GROWING:
        held.wait()
        time.sleep(0.2)

for work in (refitting, changing, growing):
    threading.Thread(target=work).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    retriever.add_examples(NEW)
    assert retriever.invoke(NEW[0]["source"], filter={{"source": NEW[0]["source"]}})
    retriever.refit()
    os._exit(0)
done.set()
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_meanwhile_waits_for_no_other() -> None:
    """In an interpreter of its own: BLAS and other tests' threads may not survive a fork."""
    command = [sys.executable, "-W", "ignore", "-c", FORKING.format(path=sys.path)]
    assert subprocess.run(command, timeout=200, check=False).returncode == 0


FORKING_THREADS = """
import os, signal, sys, threading

sys.path[:] = {path}
import torch
from test_plugin_refit import NEW, ROWS, WordCounts, make
from langchain_rcr import FaissIndex

questions, numbers = [row["source"] for row in [*ROWS, *NEW]], torch.ones(1_000_000)
retriever = make.from_examples(ROWS, WordCounts(), language="functional", k=2, index=FaissIndex("hnsw"))
before, total = retriever.batch(questions), (numbers * numbers).sum()  # both in several threads
searching, done = threading.Event(), threading.Event()

def search():
    with retriever.store.index._now._shared.entered():
        searching.set()
        done.wait()

threading.Thread(target=search).start()
searching.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    assert retriever.batch(questions) == before
    assert (numbers * numbers).sum() == total
    retriever.add_examples(NEW)
    os._exit(0)
done.set()
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_a_process_forked_after_searches_waits_for_no_thread_of_its_parent() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING_THREADS.format(path=sys.path)]
    several = {**os.environ, "OMP_NUM_THREADS": "2"}
    assert subprocess.run(command, env=several, timeout=200, check=False).returncode == 0


def test_one_that_fails_says_so_and_is_not_tried_again(
    retriever: SequentialCompositionalRetriever, soon: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*arguments: Any, **options: Any) -> TriEncoder:
        raise MemoryError("no room")

    original = TriEncoder.refitted
    monkeypatch.setattr(TriEncoder, "refitted", fail)
    retriever.add_examples(NEW)
    wait_until(lambda: "a refit in the background failed; refit() tries again" in caplog.text)
    assert "no room" in caplog.text
    retriever.add_example({"source": "where do the hens live", "target": "home(hens)"})
    assert retriever.needs_refit
    monkeypatch.setattr(TriEncoder, "refitted", original)
    retriever.refit()
    assert not retriever.needs_refit
    fitted = retriever.store.encoder
    retriever.add_examples([{**row, "source": f"please tell me {row['source']}"} for row in ROWS])
    wait_until(lambda: retriever.store.encoder is not fitted and not retriever.needs_refit)  # again by itself


def test_a_log_of_outcomes_tells_of_one_policy(
    retriever: SequentialCompositionalRetriever, soon: None, tmp_path: Path, caplog: Any
) -> None:
    others = {*threading.enumerate()}  # of earlier tests, which rest after a fit
    retriever.model_copy(update={"log": OutcomeLog(tmp_path / "log.jsonl")}).add_examples(NEW)
    assert "call refit(), or await arefit()" in caplog.text
    assert not any(thread.name == "langchain-rcr-store" for thread in {*threading.enumerate()} - others)


ENDING = """
import sys, threading, time
sys.path[:0] = {path!r}
from test_plugin_relevance import ROWS, WordCounts
from langchain_rcr import SequentialCompositionalRetriever
from langchain_rcr.pool import store as stores

class Slow(WordCounts):
    def embed_documents(self, texts):
        reading.set()
        time.sleep(0.5)
        return super().embed_documents(texts)

reading = threading.Event()
retriever = SequentialCompositionalRetriever.from_examples(ROWS, Slow(), language="functional", k=2)
stores._BURST_S = {pause}
reading.clear()
retriever.add_examples([{{"source": f"where do the {{one}} live", "target": f"home({{one}})"}} for one in "abcdef"])
reading.clear()
if not stores._BURST_S:
    reading.wait()
print("end")
"""


@pytest.mark.parametrize("pause", [0.0, 3600.0], ids=["while it fits", "before it fits"])
@pytest.mark.slow
def test_a_process_may_end_meanwhile(pause: float) -> None:
    code = ENDING.format(path=sys.path, pause=pause)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "end\n", "")
