"""`make kills`: a run from data to evaluation, killed by SIGKILL again and again, ends like an undisturbed one.

    python tests/harness/kills.py --count 100

A round is a run that is resumed after each kill until it ends by itself; rounds follow until there have been enough
kills. The first of each comes as SFT saves its state; of the others, half come at a random moment, half at a random one
of the run's file operations. Each round must end with the weights, training states, losses, picks and figures of the
undisturbed run, and ask the language model, a server in this process, nothing whose answer was on disk: at most what
ran when a kill came. Each attempt is a process forked from one that has imported everything, since that takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from openai_server import OpenAIServer
from rcr_trainer.llm.cache import AnswerCache
from rcr_trainer.llm.model import open_llm
from rcr_trainer.llm.settings import LLMSettings

AT_ONCE = 4
CONFIG = f"""
data: {{split: 110, train_size: 24, test_size: 4, dev_size: 6}}
model: {{family: lexical, dim: 8}}
sft: {{epochs: 2}}
grpo: {{enabled: true, epochs: 2, batch_size: 2, group_size: 4, lr: 0.01, evaluate_every: 2}}
evaluation: {{selectors: [random, bm25], answers: true}}
llm: {{kind: completion, model: m, concurrency: {AT_ONCE}}}
threads: 1
"""
NURSERY = """
import gc, json, os, signal, sys

gc.disable()  # nothing that is imported is garbage
import anyio._backends._asyncio, langchain_openai, openai.resources.completions, scipy.cluster.hierarchy, torch._dynamo
import langchain_rcr.families.structure, rcr_trainer.baselines.simple, rcr_trainer.evaluation.stage
import rcr_trainer.llm.client, rcr_trainer.rewards.ours
from rcr_trainer import cli, grpo, pipeline, sft
from rcr_trainer.training import runner

gc.freeze()  # or else each child copies all memory when it collects
gc.enable()
runner.SAVE_EVERY_S = 0
os.fsync = lambda _: None  # no kill cuts the power
said = os.dup(1)
output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(output, 1)
os.dup2(output, 2)
here = os.getcwd()
TOUCHES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.listdir", "os.scandir", "os.link"}

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        seen = 0

        def hook(event, arguments):
            global seen
            if event in TOUCHES and arguments and here + job["below"] in os.path.abspath(str(arguments[0])):
                seen += 1
                if seen == job["operation"]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        status = cli.main(job["command"])
        os.write(said, f"{seen} ".encode())
        os._exit(status)
    os.write(said, f"{child} ".encode())
    os.write(said, f"{os.waitpid(child, 0)[1]}\\n".encode())
"""


class Nursery:
    """Starts attempts, and kills them."""

    def __init__(self, folder: Path, server: OpenAIServer) -> None:
        self.folder, self.server = folder, server
        (folder / "kills.yaml").write_text(CONFIG, encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
        )

    def attempt(
        self, name: str, seconds: float | None = None, operation: int = 0, below: str = ""
    ) -> tuple[int, int, float]:
        """Run until it ends or is killed; its status, file operations below a folder (0 if killed) and seconds."""
        flags = [f"--llm.base_url={self.server.base_url}", f"--llm.cache={self.folder / name}.sqlite"]
        command = ["run", "kills.yaml", "--resume", "--name", name, *flags]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(
            f"{json.dumps({'command': command, 'operation': operation, 'below': below})}\n".encode()
        )
        self.process.stdin.flush()
        word = b""
        while not word.endswith(b" "):
            word += self.process.stdout.read(1)
        begin = time.monotonic()
        timer = threading.Timer(seconds or 10**6, os.kill, (int(word), signal.SIGKILL))
        timer.daemon = True
        if seconds is not None:
            timer.start()
        words = self.process.stdout.readline().split()
        timer.cancel()
        return int(words[-1]), int(words[0]) if len(words) > 1 else 0, time.monotonic() - begin


def stage(folder: Path) -> str:
    """What a run was at: its first stage that isn't finished."""
    try:
        stages = json.loads((folder / "run.json").read_text(encoding="utf-8"))["stages"]
    except FileNotFoundError:
        return "before data"
    return next((name for name in ("data", "sft", "grpo", "evaluation") if name not in stages), "after evaluation")


def left(folder: Path) -> dict[str, Any]:
    """What a finished run leaves, without times, and its own name and address."""
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"] == "finished"
    found: dict[str, Any] = {}
    for path in [*folder.glob("checkpoint*/**/*"), *folder.glob("state/**/*.safetensors"), *folder.glob("data/*")]:
        if path.is_file() and path.name not in ("README.md", "manifest.json"):
            found[str(path.relative_to(folder))] = path.read_bytes()
    figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    for of_one in figures["selectors"].values():
        of_one.pop("latency_ms")
        of_one.pop("latency_batch_ms")
    found["evaluation.json"] = figures["selectors"]
    found["picks.jsonl"] = (folder / "picks.jsonl").read_bytes()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = {k: v for k, v in json.loads(line).items() if k != "time" and not k.startswith("llm_") and "_ms" not in k}
        place = f"metrics of {row['stage']}, {row.get('step', row.get('epoch'))}, {sorted(row)}"
        assert found.setdefault(place, row) == row, (place, found[place], row)
    found["files"] = sorted(path.name for path in folder.iterdir())
    return found


def last_shown(prompt: str) -> str:
    """Answers with the program of the last example."""
    return prompt.rpartition("Target: ")[2].partition("\n")[0]


def killed(folder: Path, least: int, seed: int = 0) -> Counter[str]:
    """Kill runs at least so many times and compare each round with an undisturbed run; the kills by stage."""
    draw, stages = random.Random(seed), Counter[str]()
    with OpenAIServer(last_shown, delay=0.01) as server:
        nursery = Nursery(folder, server)
        status, operations, seconds = nursery.attempt("whole")
        assert status == 0, (folder / "output.txt").read_text(encoding="utf-8")
        whole, prompts = left(folder / "runs" / "whole"), sorted(set(server.paid))
        print(
            f"undisturbed: {seconds:.1f} s, {operations} file operations, {len(prompts)} prompts, {len(whole)} results"
        )
        with open_llm(LLMSettings(model="m", base_url=server.base_url), None) as llm:
            keys = {llm._client.key(prompt): prompt for prompt in prompts}
        rounds, asked_twice = 0, 0
        while stages.total() < least:
            rounds += 1
            name, before = f"round{rounds}", stages.total()
            server.requests.clear()
            written: list[tuple[int, set[str]]] = []
            while True:
                if stages.total() == before:
                    status, _, _ = nursery.attempt(
                        name, operation=draw.randint(1, 60), below=f"/runs/{name}/state/.sft"
                    )
                elif draw.random() < 0.5:
                    status, _, _ = nursery.attempt(name, seconds=draw.random() * seconds / 3)
                else:
                    status, _, _ = nursery.attempt(name, operation=draw.randint(1, operations // 3))
                if status != signal.SIGKILL:
                    assert status == 0, (folder / "output.txt").read_text(encoding="utf-8")[-3000:]
                    break
                stages[stage(folder / "runs" / name)] += 1
                time.sleep(0.05)  # what the dead process had sent is still being answered
                with closing(AnswerCache(folder / f"{name}.sqlite")) as cache:
                    written.append((len(server.requests), {keys[each] for each in cache.get(list(keys))}))
            different = [key for key, value in left(folder / "runs" / name).items() if whole.get(key) != value]
            assert not different, f"{name} in {folder} differs in {different}"
            assert left(folder / "runs" / name).keys() == whole.keys()
            asked, kills = [request.prompt for request in server.requests], stages.total() - before
            assert sorted(set(asked)) == prompts
            for begun, there in written:
                assert not there & set(asked[begun:]), "what a killed run had written was asked again"
            twice = len(asked) - len(prompts)
            assert twice <= kills * AT_ONCE, f"{twice} prompts were asked again in {kills} kills"
            asked_twice += twice
            print(f"{name}: {kills} kills, {twice} of {len(prompts)} prompts asked again", flush=True)
        nursery.process.communicate(timeout=60)
    told = ", ".join(f"{name} {count}" for name, count in stages.most_common())
    print(f"{stages.total()} kills ({told}), {rounds} runs resumed to their end, all like the undisturbed one")
    print(f"{asked_twice} prompts asked again, which ran when a kill came ({AT_ONCE} at a time)")
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kills (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rcr-kills-"))
    killed(folder, arguments.count, arguments.seed)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
