"""Programs run in the sandbox from a process of its own, and what each takes of CPU time and memory."""

import json
import subprocess
import sys
from typing import Any

ATTACKS = """
import json, resource, sys
from contextlib import suppress
from langchain_rcr.databases.database import Database
from langchain_rcr.errors import ProgramError

found = []
for program in ["not a query", *json.load(sys.stdin)]:
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
    found.append({"rows": rows, "alive": alive, "cpu": cpu, "kilobytes": after.ru_maxrss})
# Not ru_maxrss, which begins with the parent's.
own = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
starting = found.pop(0)["cpu"]  # of a process; whoever exceeds a limit may have taken two
for told in found:
    told["cpu"] -= starting
print(json.dumps({"own": own, "found": found}))
"""


def attacked(database: Any, limit: float, programs: list[str]) -> list[dict[str, Any]]:
    """For each program its `rows` or the error, whether the sandbox is `alive` after it, `cpu` seconds, `kilobytes`."""
    command = [sys.executable, "-c", ATTACKS, str(database), str(limit)]
    done = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["own"] < 200_000  # kB: what isn't passed on is in no memory here
    found: list[dict[str, Any]] = told["found"]
    return found
