"""A GRPO run that is killed again and again ends like an undisturbed one, and asks nothing twice.

Every run is a process of its own, forked from one that has imported everything, because a start costs seconds; it goes
through `rcr_train run --resume` and dies by SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from answering import answering
from openai_server import OpenAIServer
from rcr_trainer.llm.cache import AnswerCache
from rcr_trainer.llm.model import open_llm
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.runs.folder import Run
from warm import REST, THIRD_PARTY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")]

CONFIG = """
data: {split: 110, train_size: 40, test_size: 4, dev_size: 8}
model: {family: lexical, dim: 8}
sft: {epochs: 1}
grpo: {enabled: true, epochs: 6, batch_size: 2, group_size: 4, lr: 0.003, evaluate_every: 2}
reward: {names: [structure_coverage]}
evaluation: {selectors: [random], answers: false}
llm: {model: m, base_url: ADDRESS}
threads: 1
"""

NURSERY = """
import gc, importlib, json, os, signal, sys, time

for name in sys.argv[1:]:
    importlib.import_module(name)
from langchain_rcr.basics import files
from rcr_trainer import cli, grpo, pipeline, sft
from rcr_trainer.training import runner

said = os.dup(1)
output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(output, 1)
os.dup2(output, 2)

def say(*words):
    os.write(said, (" ".join(map(str, [*words, time.monotonic()])) + "\\n").encode())

def mark(owner, name, word, pause=0.0):
    original = getattr(owner, name)
    def marked(self, *arguments, **named):
        say(word)
        found = original(self, *arguments, **named)
        time.sleep(pause)
        say("between")
        return found
    setattr(owner, name, marked)

def waiting(original):
    def roll_out(*arguments):
        job["steps"] -= 1
        if job["steps"] < 0:
            say("waiting")
            while True:
                signal.pause()
        return original(*arguments)
    return roll_out

grpo._GRPO.collect = waiting(grpo._GRPO.collect)
mark(grpo._GRPO, "collect", "rollout")
mark(grpo._GRPO, "learn", "update", pause=0.01)
mark(grpo._GRPO, "evaluate", "evaluation")
mark(runner.Runner, "_save", "save")
runner.SAVE_EVERY_S = 0
sync = files._sync
files._sync = lambda path: (sync(path), time.sleep(0.001))  # a slow disk

gc.freeze()  # or else each run copies all memory when it collects
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        os._exit(cli.main(job["command"]))
    say("pid", child)
    say("end", os.waitpid(child, 0)[1])
"""


class Nursery:
    """Starts runs, hears what they are at, and kills them."""

    def __init__(self, folder: Path, server: OpenAIServer) -> None:
        self.folder, self.server = folder, server
        (folder / "demo.yaml").write_text(CONFIG.replace("ADDRESS", server.base_url), encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", NURSERY, *THIRD_PARTY, *REST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
        )

    def start(self, name: str, *flags: str, steps: int = 10**9) -> Iterator[tuple[str, str, float]]:
        """What a run says from now on: word, number, time; ends with its end. It waits after so many steps."""
        command = ["run", "demo.yaml", "--resume", "--name", name, f"--llm.cache={name}.sqlite", *flags]
        job = {"command": command, "steps": steps}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(job)}\n".encode())
        self._process.stdin.flush()
        word = ""
        while word != "end":
            words = self._process.stdout.readline().decode().split()
            assert words, (self.folder / "output.txt").read_text()
            word = words[0]
            yield word, words[-2], float(words[-1])

    def undisturbed(self, name: str, *flags: str) -> dict[str, list[float]]:
        """Take a run to its end; how long it was at what."""
        lengths: dict[str, list[float]] = {}
        before, since = "", 0.0
        for word, number, now in self.start(name, *flags):
            lengths.setdefault(before, []).append(now - since)
            before, since = word, now
            assert word != "end" or number == "0", (self.folder / "output.txt").read_text()
        return lengths

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with answering() as server:
        nursery = Nursery(tmp_path, server)
        yield nursery
        nursery.close()


def logged(folder: Path) -> dict[int, dict[str, Any]]:
    """The loss curve: what metrics.jsonl has for each step, which must agree where a step is there twice."""
    found: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = {k: v for k, v in json.loads(line).items() if k != "time" and not k.startswith("llm_")}
        if row["stage"] == "grpo":
            assert found.setdefault(row["step"], row) == row
    return found


def files(folder: Path) -> dict[str, bytes]:
    """What training leaves, name → content, but for the model card, which names the run."""
    paths = [path for path in folder.glob("checkpoint*/**/*") if path.is_file() and path.name != "README.md"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def same(killed: Path, whole: Path) -> bool:
    assert Run.open(killed).status == "finished"
    assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert list(logged(killed).values()) == list(logged(whole).values())
    assert any("safetensors" in name for name in files(whole))
    return files(killed) == files(whole)


def test_a_run_killed_20_times_ends_with_the_weights_of_an_undisturbed_one(nursery: Nursery) -> None:
    draw = random.Random(20)
    lengths = nursery.undisturbed("whole")
    killed = nursery.folder / "runs" / "killed"
    aims = [*["rollout"] * 6, *["update"] * 6, *["save"] * 6, *["pid"] * 2]
    draw.shuffle(aims)
    found: Counter[str] = Counter()
    position, progress = 0, 0
    for aim in aims:
        skipped, moment = draw.choice([1, 2]), draw.random() * statistics.median(lengths[aim])
        pid, last, rollouts = 0, "", 0
        for word, number, _ in nursery.start("killed", steps=skipped + 2):
            rollouts += word == "rollout"
            if word == "pid":
                pid = int(number)
            elif word == "end":
                assert int(number) == signal.SIGKILL
            else:
                last = word
            if pid and (word == "waiting" or (word == aim and (rollouts > skipped or word == "pid"))):
                time.sleep(moment)
                os.kill(pid, signal.SIGKILL)
                pid = 0  # It may have said more by now, and its number may be another's.
        found[last] += 1
        state = killed / "state" / "grpo" / "state.json"
        before, position = position, json.loads(state.read_text())["steps"] if state.exists() else 0
        progress += position > before
        # What the last kill left of a write, and nothing of those before.
        assert len([*killed.glob(".*"), *killed.glob("state/.*")]) <= 1
    # Spread over what a run does; on a busy machine some come later than they were meant.
    assert sum(found.values()) == 20
    assert min(found["rollout"], found["update"], found["save"]) >= 2, found
    assert progress >= 15
    nursery.undisturbed("killed")
    assert same(killed, nursery.folder / "runs" / "whole")


def test_what_a_killed_run_has_written_is_not_asked_again(nursery: Nursery) -> None:
    draw, kills, at_once = random.Random(4), 4, 4
    path, server = nursery.folder / "killed.sqlite", nursery.server
    server.delay = 0.05
    flags = ["--grpo.epochs=2", f"--llm.concurrency={at_once}"]
    nursery.undisturbed("whole", *flags)
    prompts = set(server.paid)
    assert len(server.paid) == len(prompts) > 60
    server.requests.clear()
    with open_llm(LLMSettings(model="m", base_url=server.base_url), None) as llm:
        keys = {llm._client.key(prompt): prompt for prompt in prompts}
    written: list[tuple[int, set[str]]] = []
    for number in range(1, kills + 1):
        goal = number * len(prompts) // (kills + 2)
        run = nursery.start("killed", *flags)
        pid = next(int(number) for word, number, _ in run if word == "pid")
        deadline = time.monotonic() + 60
        while len(server.paid) < goal and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        assert [int(status) for word, status, _ in run if word == "end"] == [signal.SIGKILL]
        time.sleep(0.2)  # what the dead run had sent is still being answered
        with closing(AnswerCache(path)) as cache:
            written.append((len(server.requests), {keys[each] for each in cache.get(list(keys))}))
    nursery.undisturbed("killed", *flags)
    asked = [request.prompt for request in server.requests]
    assert set(asked) == prompts
    assert len(asked) <= len(prompts) + kills * at_once
    for begun, there in written:
        assert not there & set(asked[begun:])
    assert 0 < len(written[0][1]) < len(written[1][1]) < len(written[2][1]) < len(written[3][1]) < len(prompts)
    assert same(nursery.folder / "runs" / "killed", nursery.folder / "runs" / "whole")
