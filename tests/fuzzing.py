"""Random inputs for the tests and `make fuzz`: programs by grammar, long literals, answers, JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

LONGEST = 6_000
"""Characters of the longest literals: beyond the 4,300 digits to which Python converts integers."""

_NAMES = ("a", "b", "city", "state", "population", "t", "u", '"Group"', "état", "_", "order1")
_OTHER_DIALECTS = ("[x y]", "`k`", "0x1f", "$1", "@v", "x'f'", "n'x'", "'\\'", "1_000", "e'\\n'", "#a", "?")
_TYPES = ("int", "text", "decimal(10, 2)", "timestamp", "varchar(5)", "array<int>", "json", "double precision")
_FUNCTIONS = ("coalesce", "f", "concat", "my_function", "greatest")
_BINARY = ("+", "-", "*", "/", "%", "||", "=", "<>", "<", ">=", "and", "or", "like", "is not distinct from")
_JOINS = (" join ", " left join ", " cross join ", ", ", " natural join ", " full outer join ")
_STATEMENTS = ("drop table", "alter table", "truncate table", "describe", "show", "set x =", "use", "values", "vacuum")
_LINKS = ("[1]", ".f()", "[1].f()", "::int", "->'a'", "[a:b]", "(1)", " is null", " collate x")
_JINJA = ("{{ ref('x') }}", "{{ x }}", "{% if x %}", "{% endif %}", "{# it's #}", "{{", "}}", "{%", "'{{ x }}'", "{{}}")
_PIECES = (
    *"()[]{}'\",:;.=+-*<>_#\\\n `$?@&|!%~^/\t\x00\ufeff\ud800é",
    *(
        "f",
        "g(",
        "1",
        "2.5",
        "0x",
        "'x'",
        '"y"',
        "[ color ]",
        "$0",
        "#(Number",
        ":key",
        "select",
        "from",
        "where",
        "((",
    ),
    *("group by", "union", "with", "case when", "end", '"name"', '"arguments"', "true", "null", "lambda", "for", "**"),
    *("Source:", "Target:", "```", "```sql\n", "<think>", "</think>", "</thinking>", "\n\n", "f'{", "match x:", "def"),
)
_SQLITE_FUNCTIONS = (
    *("json_each", "json_tree", "json_extract", "json_patch", "json_group_array", "printf", "char", "zeroblob", "hex"),
    *("strftime", "date", "julianday", "replace", "substr", "instr", "round", "abs", "max", "min", "group_concat"),
    *("fts3_tokenizer", "load_extension", "sqlite_log", "bm25", "snippet", "highlight", "matchinfo", "optimize"),
    *("rtreenode", "rtreecheck", "fts5", "match", "ntile", "lag", "sum", "total", "quote", "unicode", "randomblob"),
)


class Fuzz:
    """Makes inputs.

    Args:
        seed: of the random numbers.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, *choices: Any) -> Any:
        """One of the choices; called if it can be."""
        chosen = self.random.choice(choices)
        return chosen() if callable(chosen) else chosen

    def some(self, make: Callable[[], Any], least: int = 1, most: int = 3) -> list[Any]:
        return [make() for _ in range(self.random.randint(least, most))]

    def length(self) -> int:
        """Mostly small, now and then past every limit."""
        return self.random.choice((1, 1, 2, 3, 5, 8, 20, 100, 1_001, 4_299, LONGEST))

    # ------------------------------------------------------------ literals and text

    def number(self) -> str:
        digits = self.one("7", "0", "9", "1") * self.length()
        return str(
            self.one(
                digits, f"{digits}.{digits}", f"1e{digits}", f"0x{'f' * self.length()}", f"0o{digits}", f"-{digits}"
            )
        )

    def string(self) -> str:
        inside = self.one("x", "1", "é", "''", "%", " ", "\\\\", "a b") * self.length()
        return str(self.one(f"'{inside}'", f"x'{'f' * self.length()}'", f"n'{inside}'", "''"))

    def text(self) -> str:
        """Pieces of programs and answers in any order."""
        joint = self.one("", " ", "\n")
        return joint.join(self.one(*_PIECES, self.number, self.string) for _ in range(self.random.randint(0, 25)))

    # ------------------------------------------------------------ programs

    def functional(self, depth: int = 4) -> str:
        leaf = self.one("x", "all", "'new york'", "_", self.number, self.string)
        if depth == 0 or self.random.random() < 0.2:
            return str(leaf)
        name = self.one("f", "answer", "playing with", "größe", "0x1", "a" * self.length())
        arguments = ", ".join(self.some(lambda: self.functional(depth - 1)))
        return f"{name} {self.one('', f'[ {leaf} ] ')}( {arguments} )"

    def sexpr(self, depth: int = 4) -> str:
        leaf = self.one("x", "$0", '"a b"', self.number, "#(a)", ":k")
        if depth == 0 or self.random.random() < 0.2:
            return str(leaf)
        return f"( {self.one('lambda', 'f', leaf)} {' '.join(self.some(lambda: self.sexpr(depth - 1)))} )"

    def python(self, depth: int = 4) -> str:
        if depth == 0 or self.random.random() < 0.2:
            fields = "f'" + "{x}" * self.length() + "'"
            return str(self.one("x", "a.b", self.number, self.string, "None", fields, 'f"{x!r:>{y}}"', "b'\\xff'"))
        inner = self.some(lambda: self.python(depth - 1), 2, 3)
        return str(
            self.one(
                f"f({inner[0]}, key={inner[1]})",
                f"({inner[0]} + {inner[1]})",
                f"-{inner[0]}",
                f"[{', '.join(inner)}]",
                f"{{{inner[0]}: {inner[1]}}}",
                f"({inner[0]})[{inner[1]}:]",
                f"x{self.one('[1]', '.f()', '(1)') * self.one(1, 8, 40)}",
                f"(lambda x: {inner[0]})",
                f"[x for x in {inner[0]} if {inner[1]}]",
                f"({inner[0]} if {inner[1]} else {inner[-1]})",
                f"({inner[0]} < {inner[1]} is not {inner[-1]})",
            )
        )

    def json(self, depth: int = 4) -> str:
        """JSON, but for numbers that may be none."""
        if depth == 0 or self.random.random() < 0.3:
            text = json.dumps(self.one("x", "a b", "\ud800", "é" * self.length()))
            return str(self.one(text, self.number, "true", "null", "-0", "NaN", "1e400"))
        inner = self.some(lambda: self.json(depth - 1))
        keys = ("name", "arguments", "args", "function", "id", "x")
        entries = ", ".join(f'"{self.one(*keys)}": {value}' for value in inner)
        return str(self.one(f"[{', '.join(inner)}]", f"{{{entries}}}", f'{{"name": "f", "arguments": {inner[0]}}}'))

    def set(self) -> str:
        """A JSON list of names, or of something else."""
        others = ("", 1, ["x"]) if self.random.random() < 0.2 else ()
        return json.dumps(self.some(lambda: self.one("x", "a b", "\ud800", "é" * self.length(), *others), 0, 6))

    def sql(self) -> str:
        """SQL: a statement, now and then several, or with Jinja in it."""
        chance = self.random.random()
        if chance < 0.1:
            return self.one("; ", ";\n", " ; -- x\n").join(self.some(self._statement, 2, 4))
        if chance < 0.2:
            words = self._statement().split(" ")
            for _ in range(self.random.randint(1, 3)):
                words.insert(self.random.randint(0, len(words)), self.one(*_JINJA))
            return " ".join(words)
        return self._statement()

    def _statement(self) -> str:
        make = self.one(
            self._query,
            self._query,
            self._query,
            lambda: f"insert into {self._table()} ({self._name()}) {self._query(2)}",
            lambda: f"insert into t values ({', '.join(self.some(lambda: self._value(1)))})",
            lambda: f"update {self._name()} set {self._name()} = {self._value(2)} where {self._value(2)}",
            lambda: f"delete from {self._name()} where {self._value(2)}",
            lambda: f"create table {self._name()} as {self._query(2)}",
            lambda: f"create table x ({self._name()} {self.one(*_TYPES)} not null, primary key ({self._name()}))",
            lambda: f"{self.one('explain ', 'explain analyze ', 'call ', 'replace into t ')}{self._query(1)}",
            lambda: f"{self.one(*_STATEMENTS)} {self._name()}",
            lambda: f"select {self._name()}{self.one(*_LINKS) * self.length()} from t",
        )
        return str(make)

    def _name(self) -> str:
        if self.random.random() < 0.005:
            return str(self.one(*_OTHER_DIALECTS))
        return str(self.one(*_NAMES, lambda: "n" * self.length()))

    def _literal(self) -> str:
        digits = self.one("7", "10", "9") * self.length()
        inside = self.one("x", "1", "é", "''", "%", " ", "a b") * self.length()
        return str(self.one(digits, f"{digits}.5", f"'{inside}'", "1e5", "1e400", "null", "true"))

    def _query(self, depth: int = 3) -> str:
        def items() -> str:
            return self.one("*", f"{self._name()}.*", f"{self._value(depth)} as {self._name()}", self._value(depth))

        source = self.one(*_JOINS).join(self.some(lambda: self._source(depth)))
        text = f"select {self.one('', 'distinct ')}{', '.join(self.some(items))} from {source}"
        if self.random.random() < 0.3:
            text += f" join {self._name()} on {self._value(depth)}"
        for clause, share in (("where", 0.7), ("group by", 0.3), ("having", 0.2), ("order by", 0.3)):
            if self.random.random() < share:
                text += f" {clause} {self._value(depth)}{self.one('', ' desc') if clause == 'order by' else ''}"
        text += self.one("", "", " limit 5", f" limit 1{'0' * self.length()} offset 2")
        if depth and self.random.random() < 0.25:
            text += self.one(" union ", " union all ", " except ", " intersect ") + self._query(depth - 1)
        if depth and self.random.random() < 0.15:
            text = f"with {self.one('', 'recursive ')}{self.one('c', 'c (x, y)')} as ({self._query(depth - 1)}) {text}"
        return text

    def _source(self, depth: int) -> str:
        if depth == 0:
            return self._table()
        table = self._table
        values = f"(values ({self._literal()}, {self._literal()})) as v (p, q)"
        return str(self.one(table, table, lambda: f"({self._query(depth - 1)}) as {self._name()}", values))

    def _table(self) -> str:
        return f"{self.one('', 'main.', '')}{self._name()}{self.one('', ' as a', ' u')}"

    def _value(self, depth: int) -> str:
        if depth <= 0 or self.random.random() < 0.3:
            name = self._name
            return str(self.one(self._literal, self._literal, name, name, lambda: f"{name()}.{name()}"))
        value = self.some(lambda: self._value(depth - 1), 3, 3)
        inner = self._query(0)
        function = self.one(*_FUNCTIONS)
        return str(
            self.one(
                f"{value[0]} {self.one(*_BINARY)} {value[1]}",
                f"{value[0]} {self.one(*_BINARY)} {value[1]}",
                f"({value[0]})",
                f"not ({value[0]})",
                f"- ({value[0]})",
                f"{function}({', '.join(value)})",
                f"count(distinct {value[0]})",
                f"case when {value[0]} then {value[1]} else {value[2]} end",
                f"cast({value[0]} as {self.one(*_TYPES)})",
                f"{self._name()} in ({value[0]}, {value[1]})",
                f"{self._name()} not in ({inner})",
                f"exists ({inner})",
                f"({inner})",
                f"{self._name()} between {value[0]} and {value[1]}",
                f"{value[0]} is not null",
                f"sum({value[0]}) over (partition by {self._name()} order by {value[1]} rows 2 preceding)",
                f"interval '{self.length()}' day",
                f"{self._name()}[{self.length()}]",
                f"extract(year from {value[0]})",
                f"{self._name()} ->> 'a'",
            )
        )

    def tokens(self) -> str:
        return self.text()

    def program(self, language: str) -> str:
        """A program of a language, now and then cut off, doubled, or with a piece of something else in it."""
        text: str = getattr(self, language.partition(":")[0])()
        chance = self.random.random()
        if chance < 0.7:
            return text
        at = self.random.randint(0, len(text))
        if chance < 0.8:
            return text[:at]
        if chance < 0.95:
            return f"{text[:at]}{self.one(*_PIECES)}{text[at:]}"
        return self.text()

    def sqlite_query(self) -> str:
        """SQL for SQLite, and calls of its functions, some of which can do harm."""
        value = self.one(self._literal, self._literal, "words", "body", "null", "x'4141414141414141'", "'$.a[0]'")
        inner = (
            f"{self.one(*_SQLITE_FUNCTIONS)}({', '.join(self.some(lambda: self.one(self._literal, 'body', value)))})"
        )
        call = (
            f"{self.one(*_SQLITE_FUNCTIONS)}({', '.join(self.some(lambda: self.one(inner, self._literal, 'words')))})"
        )
        return str(
            self.one(
                lambda: self.program("sql:sqlite"),
                f"SELECT {call}, {inner}",
                f"SELECT {call} FROM words WHERE words MATCH {self.one(value, self.string)}",
                f"SELECT * FROM {call}",
                f"SELECT a, {inner} OVER (ORDER BY b) FROM t GROUP BY {self.one('a', inner)}",
                f"SELECT * FROM words ({value}) ORDER BY rank",
            )
        )

    def column_value(self, depth: int = 2) -> Any:
        """What a column of SQLite or PostgreSQL may hold."""
        number = self.one("0", "-1", "1.50", "0.1", "7" * self.length(), "NaN", "Infinity", f"1E{self.length() * 20}")
        zone = self.one(None, UTC, timezone(timedelta(seconds=1172)))
        leaf = self.one(
            *(None, True, 0, -1, 2**63 - 1, 10 ** self.length() % 10**4_000, 0.1, -0.0, 1e308, float("nan")),
            *(float("inf"), Decimal(number), Decimal(f"-1E-{self.length()}"), b"\xff" * self.length()),
            *(
                date(1, 1, 1),
                date(9999, 12, 31),
                datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=zone),
                time(3, 4, tzinfo=zone),
            ),
            *(timedelta(days=-999_999_999), timedelta(microseconds=7), "x" * self.length(), "\ud800", "", "\x00"),
        )
        if depth == 0 or self.random.random() < 0.7:
            return leaf
        inner = self.column_value(depth - 1)
        for _ in range(self.one(*[1] * 20, 40, 900, 3_000)):  # arrays, and JSON
            inner = [inner, leaf] if self.random.random() < 0.5 else {"a": inner}
        return inner

    # ------------------------------------------------------------ answers and JSON

    def answer(self, language: str) -> str:
        """What a language model might write."""
        program = self.program(language)
        parts = (
            f"<think>{self.text()}</think>",
            f"```{language}\n{program}\n```",
            f"Target: {program}",
            self.text(),
            "\n",
        )
        return "".join(self.one(*parts, program) for _ in range(self.random.randint(1, 4)))

    def value(self, depth: int = 3) -> Any:
        """What JSON can hold, with numbers that it shouldn't."""
        chance = self.random.random()
        if depth and chance < 0.25:
            return self.some(lambda: self.value(depth - 1), 0)
        if depth and chance < 0.5:
            return {self.one("a", "$eq", "$in", "name", "", "text", "usage"): self.value(depth - 1) for _ in range(2)}
        numbers = (0, -1, 1, 10**30, 1e308, -0.0, float("nan"), float("inf"), 2**63, True)
        return self.one(*numbers, None, "", "x", "\ud800", "\x00", "../../x", "a" * 5_000)

    def mutated(self, value: Any) -> Any:
        """A JSON value with one thing in it changed, dropped or added."""
        if self.random.random() < 0.15 or not isinstance(value, dict | list) or not value:
            return self.value()
        if isinstance(value, list):
            at = self.random.randrange(len(value))
            return [*value[:at], *self.one([], [self.mutated(value[at])], [value[at]] * 2), *value[at + 1 :]]
        key = self.random.choice(list(value))
        rest = {name: item for name, item in value.items() if name != key}
        return self.one(rest, {**value, "new": self.value()}, {**value, key: self.mutated(value[key])})
