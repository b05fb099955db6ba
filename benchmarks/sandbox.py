"""Checks that a weak model's SQL writes nothing in the sandbox and keeps to every limit, and what that costs a query.

    python benchmarks/sandbox.py --spider ../shared/data/spider --databases spider/database --out sandbox.json

The queries come not from a model but from a seeded mutator of Spider's gold queries: broken names and syntax, cross
joins, recursion, values of 1 MB, PRAGMA, writes, harmful functions. A query's overhead is its time in the sandbox minus
SQLite's own, when opened read-only in this process to fetch the same rows. Both are the shortest of several runs; on
Linux also the CPU time of both processes, which other work on the machine affects less. Queries that time out have
none. Queries are ordered by database, as in the reward.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from common import files_of, table

SECONDS, ROWS, BYTES = 1.0, 10_000, 8 << 20
"""A query's limits."""
QUICK_S, TIMES = 0.3, 9
"""A query quicker than QUICK_S is timed TIMES times."""
LATE_S = 1.0
"""Seconds after its deadline (`Database`) within which a query must return, on a busy machine."""


def broken_name(sql: str, draw: random.Random, tables: Sequence[str]) -> str:
    """Misspell a name or keyword."""
    words = list(re.finditer(r"[A-Za-z_]{3,}", sql))
    word = draw.choice(words)
    return f"{sql[: word.start()]}{word[0][1:]}{word[0][0]}{sql[word.end() :]}"


def broken_syntax(sql: str, draw: random.Random, tables: Sequence[str]) -> str:
    """Cut the query off, lose a bracket, or add something."""
    return draw.choice(
        [sql[: draw.randint(1, len(sql))], sql.replace("(", "", 1), f"{sql} ))", f"{sql} '", f"```{sql}"]
    )


def cross_join(sql: str, draw: random.Random, tables: Sequence[str]) -> str:
    """Two to five tables without a condition."""
    joined = ", ".join(f'"{draw.choice(tables)}" AS t{number}' for number in range(draw.randint(2, 5)))
    return f"SELECT {draw.choice(['*', 'count(*)', 't0.rowid'])} FROM {joined}"


def recursion(sql: str, draw: random.Random, tables: Sequence[str]) -> str:
    """A common table expression that ends late or never."""
    end = draw.choice(["", " WHERE x < 100", " WHERE x < 20000", " WHERE x < 3000000"])
    rows = f"WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n{end})"
    return f"{rows} SELECT {draw.choice(['x', 'count(*)', 'max(x)'])} FROM n"


def large_value(sql: str, draw: random.Random, tables: Sequence[str]) -> str:
    """Values of up to 1 MB and more."""
    size = draw.choice([1_000, 100_000, 500_000, 520_000, 100_000_000])
    value = draw.choice(
        ["hex(zeroblob({}))", "zeroblob({})", "printf('%.{}c', 'x')", "replace(hex(zeroblob({})), '0', 'é')"]
    )
    return f'SELECT {value.format(size)} FROM "{draw.choice(tables)}" LIMIT {draw.choice([1, 1, 3, 100])}'


def pragma(sql: str, draw: random.Random, tables: Sequence[str]) -> str:
    """PRAGMA, harmful functions, EXPLAIN."""
    harmful = ["load_extension('x')", "fts3_tokenizer('simple')", "writefile('x', 'y')", "readfile('/etc/passwd')"]
    pragmas = ["query_only = OFF", "writable_schema = ON", "table_info(x)", "journal_mode = WAL", "trusted_schema = 1"]
    said = [f"PRAGMA {draw.choice(pragmas)}", f"SELECT {draw.choice(harmful)}", f"EXPLAIN {sql}"]
    return draw.choice([*said, "SELECT * FROM sqlite_master"])


def write(sql: str, draw: random.Random, tables: Sequence[str]) -> str:
    """A statement that writes."""
    name = f'"{draw.choice(tables)}"'
    said = [
        f"DELETE FROM {name}",
        f"DROP TABLE {name}",
        f"INSERT INTO {name} SELECT * FROM {name}",
        "VACUUM",
        "ANALYZE",
    ]
    said += ["CREATE TABLE made (x)", "CREATE TEMP TABLE made (x)", f"ALTER TABLE {name} RENAME TO made", "REINDEX"]
    said += [f"{sql}; DROP TABLE {name}", f"WITH x AS ({sql}) DELETE FROM {name}", "BEGIN EXCLUSIVE"]
    return draw.choice([*said, "ATTACH 'made.sqlite' AS x", "VACUUM INTO 'made.sqlite'"])


def gold(sql: str, draw: random.Random, tables: Sequence[str]) -> str:
    """The query unchanged."""
    return sql


Mutator = Callable[[str, random.Random, Sequence[str]], str]
MUTATORS: Mapping[str, Mutator] = {
    each.__name__.replace("_", " "): each
    for each in (gold, broken_name, broken_syntax, cross_join, recursion, large_value, pragma, write)
}


def drawn(spider: Path, databases: Path, count: int, most: int, seed: int) -> list[tuple[str, str, str]]:
    """(database, kind, query), sorted by database; half of the queries are gold."""
    draw = random.Random(seed)
    golds: dict[str, list[str]] = {}
    for row in json.loads((spider / "train_spider.json").read_text(encoding="utf-8")):
        if (databases / row["db_id"] / f"{row['db_id']}.sqlite").is_file():
            golds.setdefault(row["db_id"], []).append(row["query"])
    if len(golds) < most:
        sys.exit(f"sandbox.py: error: {databases} has {len(golds)} of Spider's databases, and --number is {most}")
    names = sorted(draw.sample(sorted(golds), most))
    found = []
    for number in range(count):
        name = names[number % len(names)]
        with closing(opened(databases, name)) as connection:
            tables = [each for (each,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        kind = draw.choice([*MUTATORS, *["gold"] * (len(MUTATORS) - 2)])
        found.append((name, kind, MUTATORS[kind](draw.choice(golds[name]), draw, tables)))
    return sorted(found, key=lambda each: each[0])


def opened(databases: Path, name: str) -> sqlite3.Connection:
    """SQLite without the sandbox, but read-only and with its limit on the length of a value."""
    connection = sqlite3.connect(f"file:{databases / name / f'{name}.sqlite'}?mode=ro", uri=True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 20)
    return connection


def own_time(connection: sqlite3.Connection, sql: str) -> tuple[float, float] | None:
    """Wall and CPU seconds that SQLite takes for the rows that the sandbox gives; None if over the limit."""
    begun, cpu = time.perf_counter(), time.thread_time()
    connection.set_progress_handler(lambda: time.perf_counter() > begun + SECONDS, 1000)
    try:
        connection.execute(sql).fetchmany(ROWS + 1)
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            return None
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        pass
    return time.perf_counter() - begun, time.thread_time() - cpu


def cpu_time(database: Any) -> float:
    """CPU seconds used so far by this thread and a database's process; except on Linux, only by this thread."""
    process = next(iter(database._idle), None)
    where = Path(f"/proc/{process._process.pid}/schedstat") if process is not None else None
    worker = int(where.read_text().split()[0]) / 1e9 if where is not None and where.exists() else 0.0
    return time.thread_time() + worker


def measured(databases: Path, queries: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Each query's `outcome`, and in ms `wall`, `cpu`, and SQLite's `own`, `own_cpu`; None if too long."""
    from langchain_rcr.databases.many import Databases
    from langchain_rcr.errors import ProgramError

    results = []
    with Databases(databases, timeout_s=SECONDS, max_rows=ROWS, max_bytes=BYTES) as run:
        for number, (name, kind, sql) in enumerate(queries):
            taken, owns, rows = [], [], None
            run("SELECT 1", {"db_id": name})  # starts the process
            database = run._idle[run.path({"db_id": name})]
            with closing(opened(databases, name)) as connection:
                for _ in range(TIMES):
                    begun, cpu = time.perf_counter(), cpu_time(database)
                    try:
                        rows, outcome = run(sql, {"db_id": name}), "rows"
                    except ProgramError as error:
                        outcome = str(error)
                    taken.append((time.perf_counter() - begun, cpu_time(database) - cpu))
                    if kind in ("pragma", "write"):  # refused before SQLite begins
                        owns.append((0.0, 0.0))
                    elif (own := own_time(connection, sql)) is not None:
                        owns.append(own)
                    if taken[-1][0] > QUICK_S:
                        break
            sizes = (len(value) for row in rows or () for value in row if isinstance(value, str | bytes))
            if len(rows or ()) > ROWS or sum(sizes) > BYTES:
                raise AssertionError(f"a limit doesn't hold: {name}: {sql}")
            wall, cpu = (1000 * min(column) for column in zip(*taken, strict=True))
            if wall > 1250 * SECONDS + 1000 * LATE_S:
                raise AssertionError(f"{wall:.0f} ms: {name}: {sql}")
            own_wall, own_cpu = (1000 * min(column) for column in zip(*owns, strict=True)) if owns else (None, None)
            figures = {"wall": wall, "cpu": cpu, "own": own_wall, "own_cpu": own_cpu}
            results.append({"kind": kind, "outcome": outcome, **figures, "sql": sql})
            print(f"\r{number + 1}/{len(queries)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def digests(folder: Path) -> dict[str, str]:
    """Every file below a folder, with a digest of its contents."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """For each kind of query, how many gave rows, were refused or timed out, and the overhead."""
    import numpy as np

    lines = []
    for kind in [*MUTATORS, "all"]:
        own = [each for each in results if kind in (each["kind"], "all")]
        told = [each for each in own if each["own"] is not None]
        over = [[each["wall"] - each["own"] for each in told], [each["cpu"] - each["own_cpu"] for each in told]]
        late = sum(each["outcome"].startswith("longer than") or each["own"] is None for each in own)
        gave = sum(each["outcome"] == "rows" for each in own)
        figures = [f"{v:.2f}" for kind in over for v in np.percentile(kind, [50, 95])] if told else ["–"] * 4
        lines.append([kind, str(len(own)), str(gave), str(late), str(len(own) - gave - late), *figures])
    head = ["queries", "number", "rows", "too long", "refused", "ms, median", "95th percentile", "CPU ms", "95th"]
    return table(head, lines)


def main() -> int:
    """Run the benchmark from the command line."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--spider", type=Path, required=True, help="folder with train_spider.json")
    flags.add_argument("--databases", type=Path, required=True, help="folder with DB/DB.sqlite")
    flags.add_argument("--queries", type=int, default=1000)
    flags.add_argument("--number", type=int, default=30, help="databases (default 30)")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--out", type=Path, help="JSON file to write")
    arguments = flags.parse_args()
    with files_of(flags):
        queries = drawn(arguments.spider, arguments.databases, arguments.queries, arguments.number, arguments.seed)
    before, here = digests(arguments.databases), set(Path.cwd().iterdir())
    results = measured(arguments.databases, queries)
    if digests(arguments.databases) != before or set(Path.cwd().iterdir()) != here:
        raise AssertionError("something was written")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
