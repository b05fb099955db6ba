"""Programs run in the sandbox from a process of its own, and what each takes of CPU time and memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

ATTACKS = """
import json, resource, sys
from contextlib import suppress
from itertools import chain
from langchain_rcr.databases.database import Database
from langchain_rcr.errors import ProgramError

starting = None  # CPU time of a process that starts; whoever exceeds a limit may have taken two
for program in chain(["not a query"], map(json.loads, sys.stdin)):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Database(sys.argv[1], timeout_s=float(sys.argv[2])) as run:
        try:
            rows = run(program)
        except ProgramError as error:
            rows = str(error)
        alive = False
        for _ in range(20):  # on a busy machine even this may take longer
            with suppress(ProgramError):
                alive = alive or run("SELECT 1") == [(1,)]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Not ru_maxrss, which begins with the parent's.
    own = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
    if starting is not None:
        told = {"rows": rows, "alive": alive, "cpu": cpu - starting, "kilobytes": after.ru_maxrss, "own": own}
        print(json.dumps(told), flush=True)
    starting = starting or cpu
"""


def attacked(database: Any, limit: float, programs: list[str]) -> Iterator[dict[str, Any]]:
    """For each program its `rows` or the error, whether the sandbox is `alive` after it, `cpu` seconds, `kilobytes`.

    A program is run once it is asked for.
    """
    command = [sys.executable, "-c", ATTACKS, str(database), str(limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for program in programs:
            print(json.dumps(program), file=process.stdin, flush=True)
            told = json.loads(cast("TextIO", process.stdout).readline())
            assert told["own"] < 200_000  # kB: what isn't passed on is in no memory here
            yield told
    assert process.returncode == 0
