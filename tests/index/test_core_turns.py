"""No more threads pick at once than there are cores, and a process forked meanwhile has turns of its own."""

import os
import signal
import threading
import time
import warnings

import numpy as np
import pytest

from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index import local
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.local import Table
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.policy.selection import Options, select

VECTORS = np.eye(5, dtype=np.float32)
INDEX = MemoryIndex()
INDEX.add([Row(str(n), {}, n) for n in range(5)], PoolVectors(VECTORS, VECTORS))


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    local._turns.cache_clear()
    yield
    local._turns.cache_clear()


def picks():
    async def selected():
        async with INDEX.read() as reader:
            return await select(VECTORS[:1], AdditiveState(0.0), Options(1), reader)

    return INDEX.run(selected())


def test_threads_wait_for_a_turn(monkeypatch):
    at_once, most, lock, real = 0, 0, threading.Lock(), Table.search
    pair = threading.Barrier(2)

    def counted(*arguments):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        pair.wait(60)  # two have a turn at once
        time.sleep(0.01)
        try:
            return real(*arguments)
        finally:
            with lock:
                at_once -= 1

    monkeypatch.setattr(Table, "search", counted)
    threads = [threading.Thread(target=picks) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2


def test_an_error_gives_the_turn_back(monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(Table, "search", lambda *arguments: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                picks()
    assert picks().positions.shape == (1, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_all_turns():
    with warnings.catch_warnings(), local._turns(os.getpid()), local._turns(os.getpid()):
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, for forking with threads
        child = os.fork()
        if not child:
            signal.alarm(20)  # were there none left, it would wait for good
            picks()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
