"""Python programs in processes that have much imported when they begin: starting one anew takes five seconds.

As a script it is the server, one for each pytest worker: it imports torch and LangChain, and forks for each program
that imports the rest itself. For the others it forks another server, which imports both packages, too. `commands` makes
executables for what starts processes by itself, as make does.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any

JOBS = "WARM_JOBS"
"""Names the pipe of a server that runs, in the environment of `commands`."""
THIRD_PARTY = (
    "langchain_core.retrievers",
    "langchain_core.runnables",
    "safetensors.torch",
    "scipy.optimize",
    "scipy.sparse",
    "torch._dynamo",  # which transformers loads, and which takes longer than all else
)
"""Nothing that reads the environment at its import, as huggingface_hub and transformers do."""

REST = (
    "langchain_openai",
    "langchain_rcr.families.embeddings",
    "langchain_rcr.programs.functional",
    "rcr_trainer.evaluation.stage",
    "rcr_trainer.grpo",
    "rcr_trainer.llm.client",
    "rcr_trainer.llm.model",
    "rcr_trainer.pipeline",
    "rcr_trainer.race",
    "rcr_trainer.rewards.ours",
    "rcr_trainer.sft",
)


class Program:
    """A running `python ARGUMENTS`: -c CODE, -m MODULE or a file, each with arguments of its own.

    Args:
        arguments: after the interpreter's own name.
        cwd: where it runs.
        environ: what differs from this process's environment; None: not there. What is read at an import (HF_HOME, say)
            comes too late, except with `fresh`.
        fresh: whether it has `THIRD_PARTY` imported, but not `REST` and neither of our packages.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path | None = None,
        environ: Mapping[str, str | None] | None = None,
        fresh: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        job = {
            "words": [str(argument) for argument in arguments],
            "cwd": os.fspath(cwd or Path.cwd()),
            "environ": {name: value for name, value in {**os.environ, **(environ or {})}.items() if value is not None},
        }
        Path(self._folder.name, "job").write_text(json.dumps(job), encoding="utf-8")
        # Short lines, or else those of several writers would mix.
        _jobs().write(f"{json.dumps({'folder': self._folder.name, 'fresh': fresh})}\n".encode())

    @property
    def pid(self) -> int:
        """Of its process; it may take a moment until there is one."""
        while not (pid := self._read("pid")):
            time.sleep(0.01)
        return int(pid)

    def says(self, text: str, timeout: float = 100) -> bool:
        """Whether its output begins with a text, as soon as it does."""
        deadline = time.monotonic() + timeout
        while not (found := self._read("out").startswith(text)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def end(self, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """Wait until it has ended, or kill it."""
        deadline = time.monotonic() + timeout
        while not (code := self._read("code")):
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                deadline += 10
            time.sleep(0.01)
        done = subprocess.CompletedProcess([], int(code), self._read("out"), self._read("err"))
        self._folder.cleanup()
        return done

    def _read(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_text(encoding="utf-8") if path.exists() else ""


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """What came of a program; see `Program`."""
    return Program(*arguments, **options).end()


def commands(folder: Path) -> None:
    """Make `python` and `rcr-train` there, which run as a `Program` does; what they say comes at their end."""
    given = f"{JOBS}={shlex.quote(str(_jobs().name))} exec {shlex.join([sys.executable, __file__])}"
    for name, words in (("python", ""), ("rcr-train", "-m rcr_trainer.cli ")):
        (folder / name).write_text(f'#!/bin/sh\n{given} {words}"$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)


@cache
def _jobs() -> IO[bytes]:
    """The named pipe to the server."""
    if there := os.environ.get(JOBS):
        return Path(there).open("wb", buffering=0)
    pipe = Path(tempfile.mkdtemp(), "jobs")
    os.mkfifo(pipe)
    process = subprocess.Popen([sys.executable, __file__, "--serve", pipe])
    jobs = pipe.open("wb", buffering=0)

    @atexit.register
    def end() -> None:
        jobs.close()  # with no more lines to come the server ends
        process.wait()
        shutil.rmtree(pipe.parent)

    return jobs


def _serve(lines: Iterable[str], modules: Iterable[str], *, fresh: bool) -> None:
    """Run a program for each line; from here on this returns in the program's process, and where no line is left."""
    gc.disable()  # nothing that is imported is garbage
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # or else each program copies all memory when it collects
    gc.enable()
    rest = None
    for line in lines:
        job = json.loads(line)
        if job["fresh"] < fresh:
            if rest is None:
                here, there = os.pipe()
                if not os.fork():
                    os.close(there)
                    # Closed with the process: without a file object of its own, which would warn in each program.
                    return _serve(open(here, closefd=False), REST, fresh=False)
                rest = there
            os.write(rest, line.encode())
        elif not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            program = os.fork()
            if not program:
                return _become(job["folder"], **json.loads(Path(job["folder"], "job").read_text(encoding="utf-8")))
            _write(job["folder"], "pid", program)
            _write(job["folder"], "code", os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
            os._exit(0)


def _write(folder: str, name: str, number: int) -> None:
    path = Path(folder, name)
    path.with_suffix(".new").write_text(str(number), encoding="utf-8")
    path.with_suffix(".new").rename(path)


def _become(folder: str, words: list[str], cwd: str, environ: dict[str, str]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    warnings.simplefilter("error")
    option, *sys.argv = words if words[0] in ("-c", "-m") else ["", *words]
    sys.path[0] = "" if option else str(Path(sys.argv[0]).parent)
    sys.path += [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if option == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    script = Path(sys.argv[0])
    if option == "-c":
        script = Path(folder, "code.py")
        script.write_text(sys.argv[0], encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__" and sys.argv[1] == "--serve":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for those who watch
    os.dup2(os.open(sys.argv[2], os.O_RDONLY), 0)
    _serve(sys.stdin, THIRD_PARTY, fresh=True)
elif __name__ == "__main__":
    done = Program(*(word for word in sys.argv[1:] if word != "-u")).end(1000)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
