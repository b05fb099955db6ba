"""`make fuzz`: parsers, answers, checkpoints, filters, groups, results and cache keys on inputs made from seeds.

    python tests/harness/fuzz.py --seconds 60              # all targets, the same time each
    python tests/harness/fuzz.py --target parsers --seed 7 # one input again

An input fails if it raises what the target doesn't promise, or takes more than 10 s of CPU time.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import shutil
import sqlite3
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from fuzzing import Fuzz
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, Generation
from rcr_trainer.llm.cache import Answer, AnswerCache, Use
from rcr_trainer.llm.client import Client, answer_of, plain
from rcr_trainer.llm.faults import MalformedResponseError
from rcr_trainer.llm.server import completed, identity_of
from rcr_trainer.llm.settings import LLMSettings
from safetensors.torch import load_file, save_file
from tenants import TENANTS, over, selection
from tiny_bert import tiny_bert
from toys import lexical, reseal

from langchain_rcr import Item, RCRError, SequentialCompositionalRetriever, TriEncoder, open_database
from langchain_rcr.chains.answers import program_of
from langchain_rcr.databases import worker as query_worker
from langchain_rcr.databases.database import Database, received, rows_of
from langchain_rcr.databases.results import Result
from langchain_rcr.errors import ProgramError
from langchain_rcr.families import encoding, pooled
from langchain_rcr.index.filters import Not, matches, parse_filter
from langchain_rcr.programs import LANGUAGES, ProgramSpec, anonymize, get_parser, local_structures

SLOW_S = 10.0
SQL = tuple(f"sql:{dialect}" for dialect in ("postgres", "sqlite", "mysql", "bigquery", "tsql", "snowflake", "duckdb"))
ROWS = [
    {"source": f"question {n} of {n % 3}", "target": f"f ( g ( {n % 3} ) , {n % 5} )", "db": n % 2} for n in range(12)
]


def refused(error: RCRError) -> str:
    """The error is one line."""
    assert "\n" not in str(error), str(error)
    return "refused"


def parsers(fuzz: Fuzz) -> str:
    """No text makes a parser raise; a tree has a text, structures and a key."""
    language = fuzz.one(*LANGUAGES, *SQL)
    text = fuzz.program(language)
    tree = get_parser(language).parse(text)
    if tree is None:
        return f"{language}: no program"
    assert str(tree) == str(get_parser(language).parse(text))
    assert local_structures(anonymize(tree))
    assert ProgramSpec(language).key(text) == str(anonymize(tree, everywhere=language == "tokens"))
    return f"{language}: program"


@cache
def answer_cache() -> AnswerCache:
    kept = AnswerCache(Path(tempfile.mkdtemp(prefix="rcr-fuzz-")) / "answers.sqlite")
    atexit.register(kept.close)
    return kept


def answers(fuzz: Fuzz) -> str:
    """Any answer is read and kept; any body of a response is completed or malformed."""
    language = fuzz.one(*LANGUAGES, "sql:postgres")
    text = fuzz.answer(language)
    info = {
        "finish_reason": fuzz.one("stop", "length", None, fuzz.value),
        **fuzz.one({}, {"prompt_tokens": fuzz.value()}),
    }
    generation: Generation = Generation(text=text, generation_info=info)
    if fuzz.random.random() < 0.5:
        usage: Any = {"input_tokens": fuzz.value(), "output_tokens": fuzz.value(), "total_tokens": 1}
        message = AIMessage(text)
        message.usage_metadata = usage
        generation = ChatGeneration(message=message, generation_info=info)
    found = answer_of(generation, ("\nSource:",))
    key = repr(fuzz.random.random()).encode()
    used = Use(1, max(0, found.prompt_tokens), max(0, found.completion_tokens))
    answer_cache().put("fuzz", {key: found}, "fuzz", used)
    again = answer_cache().get([key])[key]
    assert (again.text, again.reason) == (found.text, found.reason)
    program_of(found.text or "", language)
    good = {"choices": [{"text": text, "message": {"content": text}}], "usage": {"prompt_tokens": 1}, "model": "m"}
    body = json.dumps(fuzz.mutated(good)).encode()
    cut = fuzz.random.randint(0, len(body))
    try:
        completed(body if fuzz.random.random() < 0.8 else body[:cut] + b"[" * 2_000 + body[cut:])
    except MalformedResponseError:
        return "malformed"
    return "answer"


@cache
def checkpoints() -> tuple[Path, ...]:
    """Folders of retrievers that can be loaded."""
    folder = Path(tempfile.mkdtemp(prefix="rcr-fuzz-"))
    # 30 programs, enough for the structure family to be fitted.
    rows = [{"source": f"question {n} of {n % 3}", "target": f"f ( g ( x{n % 3} ) , y{n} )"} for n in range(30)]
    options: dict[str, Any] = {"k": 2, "language": "functional"}
    fitted = SequentialCompositionalRetriever.from_examples(rows, **options)
    items, base = [Item(row["source"], row["target"]) for row in ROWS], tiny_bert(folder / "base")
    bases = {"embeddings": base, "static": f"static:{base}", "transformer": base}
    models = [TriEncoder.build(name.replace("static", "embeddings"), items, base=at) for name, at in bases.items()]
    plain, *over_models = (
        SequentialCompositionalRetriever.from_encoder(model, ROWS, k=2) for model in (lexical(ROWS, 8), *models)
    )
    fitted.save(folder / "structure")
    plain.save(folder / "lexical")
    for retriever, name in zip(over_models, bases, strict=True):
        retriever.save(folder / name)
    for runtime in ("onnx", "onnx-int8"):
        over_models[0].save(folder / runtime, runtime=runtime)
    return tuple(folder / name for name in ("structure", "lexical", *bases, "onnx", "onnx-int8"))


def changed_tensors(fuzz: Fuzz, file: Path) -> None:
    """Change a tensor of a file: its shape, its numbers, or whether it is there."""
    tensors = load_file(file)
    name = fuzz.random.choice(list(tensors))
    tensor = tensors.pop(name)
    cut = fuzz.random.randint(0, tensor.numel())
    number = fuzz.one(-1, 0, 127, *((2**31 - 1, 1e9, -1e9) if tensor.dtype.itemsize > 1 else ()))
    some = tensor.clone()
    some.view(-1)[cut : cut + 3] = number
    changed = fuzz.one(
        torch.zeros(0, 10**12), torch.zeros(()), some, tensor.flatten()[:cut].clone(), tensor.double(), tensor[None]
    )
    if fuzz.random.random() < 0.9:
        tensors[name] = changed
    save_file(tensors, file, metadata={"format": "pt"})


@contextmanager
def forged(folder: Path) -> Iterator[None]:
    """Whoever wrote a checkpoint on purpose has computed every digest in it."""
    meta = json.loads((folder / "tri_encoder.json").read_text())
    fingerprint = meta.get("fingerprint") if isinstance(meta, dict) else None
    with (
        mock.patch.object(encoding, "check_digest"),
        mock.patch.object(pooled, "check_digest"),
        mock.patch.object(TriEncoder, "fingerprint", return_value=fingerprint),
    ):
        yield


def checkpoint_json(fuzz: Fuzz) -> str:
    """A checkpoint with a changed file loads, or is refused in one line that names it."""
    structure, plain, *over_models = checkpoints()
    source = fuzz.one(structure, *[plain] * 4, *over_models * 2)  # the first takes ten times as long
    with tempfile.TemporaryDirectory(prefix="rcr-fuzz-") as folder:
        copy = Path(folder) / "checkpoint"
        shutil.copytree(source, copy)
        files = sorted(path for path in copy.rglob("*") if path.suffix in (".json", ".jsonl", ".safetensors"))
        file = fuzz.one(*files)
        content, damage = file.read_bytes(), fuzz.random.random() < 0.2
        if file.suffix == ".json" and not damage:
            file.write_text(json.dumps(fuzz.mutated(json.loads(content))), encoding="utf-8")
        elif file.suffix == ".jsonl" and not damage:
            lines = content.decode().splitlines()
            at = fuzz.random.randrange(len(lines))
            lines[at] = json.dumps(fuzz.mutated(json.loads(lines[at])))
            file.write_text("\n".join(lines), encoding="utf-8")
        elif file.suffix == ".safetensors" and not damage:
            changed_tensors(fuzz, file)
        else:
            at = fuzz.random.randint(0, len(content))
            file.write_bytes(content[:at] + fuzz.one(b"", b"\x00", b"[" * 100_000, b"9" * 5_000) + content[at + 1 :])
        if fuzz.random.random() < 0.95 and file.name != "manifest.json":
            reseal(copy)
        readable = damage or file.name == "tri_encoder.json"
        try:
            with nullcontext() if readable or fuzz.random.random() < 0.2 else forged(copy):
                retriever = SequentialCompositionalRetriever.from_pretrained(copy)
                for question in ("question 1", "\u5e02 \U0001f600 \0", "x" * 10_000):
                    retriever.select_examples({"source": question})
        except RCRError as error:
            return f"{file.name}: {refused(error)}"
        return f"{file.name}: loaded"


def filters(fuzz: Fuzz) -> str:
    """A filter is read or refused in one line; what is read holds or doesn't, for any example."""
    operators = ("$eq", "$ne", "$lt", "$gte", "$in", "$nin", "$exists", "$in", "$like")

    def simple() -> Any:
        return fuzz.one(0, 1, 2.5, "x", "", None, True, 10**30, fuzz.value)

    def spec(depth: int) -> Any:
        if fuzz.random.random() < 0.05:
            return fuzz.value(1)
        if depth == 0:
            several = [simple() for _ in range(3)]
            test = {fuzz.one(*operators): fuzz.one(simple(), several, True)}
            return {fuzz.one("db", "x"): fuzz.one(simple(), test, test)}
        inner = [spec(depth - 1) for _ in range(2)]
        return fuzz.one({fuzz.one("$and", "$or"): inner}, {"$not": inner[0]}, {"$and": inner, "x": 1}, inner[0])

    given = spec(fuzz.one(0, 1, 2, 3))
    try:
        condition = parse_filter(given)
    except RCRError as error:
        return refused(error)
    for _ in range(3):
        example = {"db": fuzz.value(1), "x": fuzz.value(1)}
        assert matches(Not(condition), example) is not matches(condition, example)
    return "read"


@cache
def database() -> Database:
    """A SQLite database with the tables and columns of the programs that are made."""
    path = Path(tempfile.mkdtemp(prefix="rcr-fuzz-")) / "x.sqlite"
    connection = sqlite3.connect(path)
    for name in ("city", "state", "population", "a", "t", "u"):
        connection.execute(f'CREATE TABLE {name} (a, b INT, city TEXT, state REAL, population BLOB, "Group", order1)')
        connection.execute(f"INSERT INTO {name} (a, b, city, state) VALUES (1, 9e999, 'x', x'ff'), (NULL, -1, '', 0.1)")
    connection.execute("CREATE VIRTUAL TABLE words USING fts5 (body)")
    connection.execute("INSERT INTO words VALUES ('some words')")
    connection.commit()
    connection.close()
    return open_database(path, timeout_s=0.5)


def results(fuzz: Fuzz) -> str:
    """A program gives rows or a ProgramError and crashes nothing; any rows of either database are compared or not."""
    if fuzz.random.random() < 0.2:
        said = ""
        try:
            rows = database()(fuzz.sqlite_query())
        except ProgramError as error:
            said = str(error)
        if said:
            assert said != "its process failed"
            return "sqlite: refused"
        assert (found := Result.of(rows)) is not None
        assert found == Result.of(list(rows))
        return "sqlite: rows"
    width = fuzz.random.randint(1, 3)
    rows = [tuple(fuzz.some(fuzz.column_value, width, width)) for _ in range(fuzz.random.randint(0, 3))]
    passed_on = over_the_wire(rows)
    if passed_on is None:
        return "rows: not passed on"
    found = Result.of(passed_on)
    assert found == Result.of(passed_on)
    assert found is None or Result.of(passed_on[::-1]).rows == found.rows
    assert Result.of(rows) == found
    return "rows: not compared" if found is None else "rows: compared"


def over_the_wire(rows: list[Any]) -> list[Any] | None:
    """Rows as they come back from the process that runs queries; None where they can't."""
    try:
        line, attached = query_worker.table([rows] if rows else [], "tag", 10, 1 << 23)
    except (RecursionError, ValueError):  # it refuses these
        return None
    reply = received(f'{{"rows":[{line}]}}', memoryview(b"".join(attached)), "tag")
    return rows_of(reply) if "rows" in reply else None


def cache_keys(fuzz: Fuzz) -> str:
    """Settings have one key where the same is sent, and only there; no secret of theirs is in a key."""
    has_secrets = fuzz.random.random() < 0.05  # they take time
    secret = f"sk-{fuzz.random.getrandbits(80):020x}" if has_secrets else "none"

    def settings() -> dict[str, Any]:
        name = fuzz.one("eos_token", "password", "headers") if has_secrets else fuzz.one("top_k", "grammar", "x")
        texts = secret, {"X-Any": secret}, [secret], f"token={secret}" if has_secrets else "root"
        value = fuzz.one(*texts, fuzz.value, {1: 1, "a": fuzz.value(0)})
        login, query = ((f"me:{secret}@", f"{fuzz.text()[:5]}:pw@"), f"?key={secret}") if has_secrets else ((), "/")
        return {
            "temperature": fuzz.one(0.0, 0.5, None),
            "base_url": f"http://{fuzz.one('', *login)}127.0.0.1/v1{fuzz.one('', query)}",
            "extra_body": fuzz.one({}, {name: value}, {name: value, "seed": fuzz.value(1)}),
        }

    def sent(given: dict[str, Any], text: str) -> str:
        # As the client writes it: names are text, whatever they were, and an address ends with a slash or without.
        told = json.loads(json.dumps({**given, "base_url": given["base_url"].rstrip("/")}))
        return json.dumps([told, text], sort_keys=True)

    one = settings()
    # Mostly a neighbour of the first, or the same in another order.
    changed = {**one, **dict(fuzz.random.sample(list(settings().items()), 1))}
    other = fuzz.one(changed, changed, {**one, "extra_body": dict(reversed(one["extra_body"].items()))})
    texts = [fuzz.one("a", "chat:[]", fuzz.text) for _ in range(2)]
    try:
        known = [(LLMSettings(model="m", **given), plain(fuzz.one(*texts))) for given in (one, other)]
    except ValueError:
        return "no settings"
    keys = [Client(FakeListLLM(responses=["x"]), given, identity=identity_of(given)).key(text) for given, text in known]
    same = sent(one, known[0][1]) == sent(other, known[1][1])
    assert (keys[0] == keys[1]) is same
    if has_secrets:
        with tempfile.TemporaryDirectory(prefix="rcr-fuzz-") as folder:
            with closing(AnswerCache(Path(folder) / "answers.sqlite")) as kept:
                kept.put("m", {key: Answer("f ( x )") for key in keys}, "run", Use())
                files = b"".join(path.read_bytes() for path in Path(folder).iterdir())
            assert secret.encode() not in files
    return "the same" if same else "different"


@cache
def shared() -> SequentialCompositionalRetriever:
    """A retriever over several tenants' examples."""
    return over(None)


def groups(fuzz: Fuzz) -> str:
    """Whatever a group's value is, no selection reads another's examples, and no filter is dropped."""
    made = fuzz.one(None, *TENANTS, fuzz.value, fuzz.value, lambda: fuzz.value(40))
    return selection(shared(), fuzz.random, made)


TARGETS: dict[str, Callable[[Fuzz], str]] = {
    "parsers": parsers,
    "answers": answers,
    "checkpoints": checkpoint_json,
    "filters": filters,
    "results": results,
    "keys": cache_keys,
    "groups": groups,
}


def run(name: str, seed: int) -> tuple[str, float, str | None]:
    """What came of an input, its seconds of CPU time, and why it failed."""
    begin, failure, outcome = time.process_time(), None, "failed"
    try:
        outcome = TARGETS[name](Fuzz(seed))
    except Exception:  # of whatever kind: that is what is looked for
        failure = traceback.format_exc(limit=-6)
    seconds = time.process_time() - begin
    if failure is None and seconds > SLOW_S:
        failure = f"{seconds:.1f} s of CPU time"
    return outcome, seconds, failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (default: %(default)s)")
    parser.add_argument("--target", choices=TARGETS, help="one alone")
    parser.add_argument("--seed", type=int, help="one input alone, of --target")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default: %(default)s)")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    names = [arguments.target] if arguments.target else list(TARGETS)
    failures = 0
    for name in names:
        run(name, 0)  # imports, fixtures
        until = time.monotonic() + arguments.seconds / len(names)
        seeds = iter([arguments.seed]) if arguments.seed is not None else iter(range(arguments.start, sys.maxsize))
        outcomes: Counter[str] = Counter()
        slowest, kinds = (0.0, 0), Counter[str]()
        for seed in seeds:
            outcome, seconds, failure = run(name, seed)
            outcomes[outcome] += 1
            slowest = max(slowest, (seconds, seed))
            if failure is not None:
                failures += 1
                kind = failure.splitlines()[-1][:60]
                kinds[kind] += 1
                if kinds[kind] <= 3:
                    print(f"{name}, seed {seed}:\n{failure}", flush=True)
            if time.monotonic() > until:
                break
        told = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(outcomes.items()))
        counts = f"{outcomes.total():,} inputs, {kinds.total()} failures"
        print(f"{name}: {counts}, slowest {slowest[0]:.2f} s of CPU time (seed {slowest[1]})")
        print(f"  {told}", flush=True)
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main())
