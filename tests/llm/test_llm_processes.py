"""Processes that ask the same HTTP server: killed, and several at once on one file of answers."""

from __future__ import annotations

import itertools
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from openai_server import OpenAIServer, prompts_of
from places import TESTS
from rcr_trainer.llm.model import open_llm
from rcr_trainer.llm.settings import LLMSettings
from warm import Program

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-any")


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from openai_server import prompts_of
from rcr_trainer.llm.model import open_llm
from rcr_trainer.llm.settings import LLMSettings
settings = {"kind": sys.argv[2], "model": "m", "base_url": sys.argv[3], "concurrency": 4, "timeout": 30}
with open_llm(LLMSettings(**settings), sys.argv[4]) as llm:
    print([answer.text for answer in llm.generate(prompts_of(int(sys.argv[5])))])
"""


def child(server: OpenAIServer, kind: str, cache: Path, count: int) -> Program:
    return Program("-c", CHILD, TESTS, kind, server.base_url, cache, count)


def kept(cache: Path) -> int:
    if not cache.exists():
        return 0
    with closing(sqlite3.connect(cache)) as database:
        tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'answers'").fetchone()[0]
        return int(database.execute("SELECT count(*) FROM answers").fetchone()[0]) if tables else 0


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_after_kill_9_nothing_that_was_paid_is_asked_again(kind: str, tmp_path: Path) -> None:
    cache = tmp_path / "a.sqlite"
    late = set(prompts_of(30)[18:])
    with OpenAIServer(lambda prompt: f" f ( {prompt.split()[2]} )") as server:
        server.fault_of = lambda request: "hang" if request.prompt in late else None
        process = child(server, kind, cache, 30)
        deadline = time.monotonic() + 60
        while kept(cache) < 18 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.end(timeout=0).returncode == -9
        assert kept(cache) == 18
        assert sorted(server.paid) == sorted(prompts_of(18))
        server.fault_of = None
        settings = {"kind": kind, "model": "m", "base_url": server.base_url}
        with open_llm(LLMSettings(**settings), cache) as llm:
            assert [each.text for each in llm.generate(prompts_of(30))] == [f"f ( {n} )" for n in range(30)]
            assert (llm.stats.cached, llm.stats.paid) == (18, 12)
        assert len(set(server.paid)) == len(server.paid) == 30


def test_processes_that_share_a_cache_ask_once_and_go_on_with_the_same_answers(tmp_path: Path) -> None:
    numbers = itertools.count()
    with OpenAIServer(lambda prompt: f"f ( {next(numbers)} )", delay=0.02) as server:
        processes = [child(server, "completion", tmp_path / "a.sqlite", 60) for _ in range(2)]
        ended = [process.end() for process in processes]
    assert [done.returncode for done in ended] == [0, 0]
    assert ended[0].stdout == ended[1].stdout != ""
    assert kept(tmp_path / "a.sqlite") == len(server.requests) == 60
