"""Python programs in processes that have everything imported when they begin: starting one anew takes five seconds.

As a script it is the server, one for each pytest worker: it imports torch and both packages and forks for each program.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

IMPORTED = (
    "torch._dynamo",  # which the optimisers load
    "langchain_openai",
    "rcr_trainer.evaluation.stage",
    "rcr_trainer.grpo",
    "rcr_trainer.llm.openai_",
    "rcr_trainer.sft",
)


class Program:
    """A running `python ARGUMENTS`: -c CODE, -m MODULE or a file, each with arguments of its own.

    Args:
        arguments: after the interpreter's own name.
        cwd: where it runs.
        environ: what differs from this process's environment. What is read at an import (HF_HOME, say) comes too late.
    """

    def __init__(self, *arguments: object, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        job = {
            "words": [str(argument) for argument in arguments],
            "cwd": os.fspath(cwd or Path.cwd()),
            "environ": {**os.environ, **(environ or {})},
            "folder": self._folder.name,
        }
        server = _server()
        assert server.stdin is not None
        server.stdin.write(f"{json.dumps(job)}\n".encode())
        server.stdin.flush()

    def end(self, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """Wait until it has ended, or kill it."""
        deadline = time.monotonic() + timeout
        while not (code := self._read("code")):
            if time.monotonic() > deadline and (pid := self._read("pid")):
                os.kill(int(pid), signal.SIGKILL)
                deadline += 10
            time.sleep(0.01)
        done = subprocess.CompletedProcess([], int(code), self._read("out"), self._read("err"))
        self._folder.cleanup()
        return done

    def _read(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_text(encoding="utf-8") if path.exists() else ""


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What came of a program; see `Program`."""
    return Program(*arguments, cwd=cwd).end()


@cache
def _server() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE)


def _serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for those who watch
    for line in sys.stdin:
        job = json.loads(line)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            program = os.fork()
            if not program:
                _become(**job)
                return
            _write(job["folder"], "pid", program)
            _write(job["folder"], "code", os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
            os._exit(0)


def _write(folder: str, name: str, number: int) -> None:
    path = Path(folder, name)
    path.with_suffix(".new").write_text(str(number), encoding="utf-8")
    path.with_suffix(".new").rename(path)


def _become(words: list[str], cwd: str, environ: dict[str, str], folder: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    warnings.simplefilter("error")
    option, *sys.argv = words if words[0] in ("-c", "-m") else ["", *words]
    sys.path[0] = "" if option else str(Path(sys.argv[0]).parent)
    if option == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    script = Path(sys.argv[0])
    if option == "-c":
        script = Path(folder, "code.py")
        script.write_text(sys.argv[0], encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    _serve()
