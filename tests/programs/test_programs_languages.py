from __future__ import annotations

import subprocess
import sys
import time
import warnings

import pytest
from rcr_trainer.settings import ProgramSettings

from langchain_rcr.chains.answers import candidates
from langchain_rcr.errors import InputError
from langchain_rcr.policy.hub import requirement
from langchain_rcr.programs import LANGUAGES, ProgramParser, ProgramSpec, Tree, get_parser, parse
from langchain_rcr.programs.json_ import tool_calls
from langchain_rcr.programs.languages import PARSERS, About

SEXPR = {
    '(Yield :output (CreateEvent :subject "x" #(Number 3)))': 'Yield(:output, CreateEvent(:subject, "x", Number(3)))',
    "( lambda $0 e ( and ( flight:t $0 ) ( from:t $0 boston:ci ) ) )": (
        "lambda($0, e, and(flight:t($0), from:t($0, boston:ci)))"
    ),
    "boston:ci": "boston:ci",
    "(f)": "f",
    "()": "<list>",
    "((f x) y)": "<list>(f(x), y)",
    "((f) y)": "<list>(f, y)",
    '("f" y)': '<list>("f", y)',
    '(f "a \\" ) b")': 'f("a \\\\" \\) b")',
    " (f\n(g x)(h y)) ": "f(g(x), h(y))",
    '; so (\n(f x) ; it "is\n;': "f(x)",
    '(f ; "\n x;y)': "f(x;y)",
    '(f ";" x)': 'f(";", x)',
    "'(f '(g x) y)": "quote(f(quote(g(x)), y))",
    "('(f) '() 'x')": "<list>(quote(f), quote(<list>), 'x')",
}

JSON = {
    '{"name": "f", "arguments": {"x": 1, "y": "b"}}': 'f(x(1), y("b"))',
    '{"arguments": {"y": "b", "x": 1.50}, "name": "f", "id": "call_1"}': 'f(x(1.50), y("b"))',
    '{"name": "f", "args": {}}': "f",
    '{"name": "f", "input": null}': "f",
    '{"name": "f", "parameters": ["a", true]}': 'f(array("a", true))',
    '{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"x\\": [1, null]}"}}': (
        "f(x(array(1, null)))"
    ),
    '{"function": {"name": "f", "arguments": "not json"}}': 'f("not json")',
    '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"x": {"y": 2}}}]': (
        "array(f(x(1)), g(x(object(y(2)))))"
    ),
    '{"action": "f", "action_input": {"x": 1}}': "f(x(1))",
    '{"thought": "so", "action": "f", "action_input": "b"}': 'f("b", thought("so"))',
    '[{"tool": "f", "tool_input": {"x": 1}, "id": "1"}, {"tool": "g", "tool_input": null}]': "array(f(x(1)), g)",
    '{"name": "f", "arguments": {"x": 1}, "reason": "so", "id": "1"}': 'f(x(1), reason("so"))',
    '{"name": "f", "args": {}, "type": "tool_call", "id": "1", "error": null}': "f(error(null))",
    '{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}", "id": "1"}, "reason": "so"}': (
        'f(x(1), reason("so"))'
    ),
    '{"name": "f", "description": "d", "parameters": {"x": 1}}': (
        'object(description("d"), name("f"), parameters(object(x(1))))'
    ),
    '{"name": "f", "arguments": "none", "year": 3}': 'object(arguments("none"), name("f"), year(3))',
    '{"action": "f", "tool": "g"}': 'object(action("f"), tool("g"))',
    '{"name": "Bo", "age": 3}': 'object(age(3), name("Bo"))',
    '{"name": 1, "arguments": {}}': "object(arguments(object), name(1))",
    '{"function": 1}': "object(function(1))",
    '"a \\"b\\""': '"a \\\\"b\\\\""',
    " 3e5 ": "3e5",
}

PYTHON = {
    'f(x, g(1), key="v")': "f(x, g(1), key=('v'))",
    "f(b=2, a=1, **rest, *more)".replace(", **rest, *more", ", *more, **rest"): "f(*(more), a=(1), b=(2), **(rest))",
    "a.b(c)": "a.b(c)",
    "a.b.c": "a.b.c",
    "f(x).g(y)": ".g(f(x), y)",
    "f(x).g": ".g(f(x))",
    "f(x)(y)": "call(f(x), y)",
    "-1 + x * 2": "+(-1, *(x, 2))",
    "not (a and b or c)": "not(or(and(a, b), c))",
    "a < b": "<(a, b)",
    "a < b is not c": "<\\,is not(a, b, c)",
    "[1, (2, 'a'), {3}, {'k': v, **m}]": "list(1, tuple(2, 'a'), set(3), dict(:('k', v), **(m)))",
    "x[1:2][...]": "[]([](x, slice(1, 2)), ...)",
    "[f(x) for x in y if x]": "listcomp(f(x), comprehension(x, y, x))",
    "a if b else c": "ifexp(b, a, c)",
    "lambda x: x + 1": "lambda(arguments(x), +(x, 1))",
    "x = f(1)\ng(x)": "module(assign(x, f(1)), g(x))",
    "x += 1": "augassign(x, +, 1)",
    "None": "None",
    "  f()  ": "f",
}


@pytest.mark.parametrize(
    ("language", "text", "shown"),
    [
        (language, text, shown)
        for language, cases in (("sexpr", SEXPR), ("json", JSON), ("python", PYTHON))
        for text, shown in cases.items()
    ],
)
def test_tree(language: str, text: str, shown: str) -> None:
    assert str(parse(text, language)) == shown


@pytest.mark.parametrize(
    ("language", "text"),
    [
        *(("sexpr", text) for text in ("", " ", "(", ")", "(f", "(f))", "(f) g", "a b", '(f "x)', '"', "; (f)", "'(f")),
        *(("json", text) for text in ("", "{", "f(x)", "{'a': 1}", "NaN", "[Infinity]", "1 2", "[1,]", "\ufeff1")),
        *(("python", text) for text in ("", " ", "f(", "a b", "f(x))", "1 +", "\0", "'", "f(=1)", "\ud800")),
    ],
)
def test_what_is_not_a_program_is_none(language: str, text: str) -> None:
    assert parse(text, language) is None


def test_order_of_named_arguments_means_nothing() -> None:
    assert parse("f(a=1, b=2)", "python") == parse("f(b=2, a=1)", "python")
    one = '{"name": "f", "arguments": {"a": 1, "b": 2}}'
    assert parse(one, "json") == parse('{"name": "f", "arguments": {"b": 2, "a": 1}}', "json")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x[1:]", "x[:1]"),
        ("x[a:b]", "x[a::b]"),
        ("x[:a:b]", "x[::a]"),
        ("lambda a: a", "lambda *a: a"),
        ("lambda a, b: a", "lambda a=b: a"),
        ("if a:\n  b\n  c", "if a:\n  b\nelse:\n  c"),
        ("for a in b:\n  c\n  d", "for a in b:\n  c\nelse:\n  d"),
        ("try: a\nexcept b: c", "try: a\nexcept:\n  b\n  c"),
        ("class A(b): c", "class A:\n  b\n  c"),
        *(("f(list(a))", "f([a])"), ("f(dict)", "f({})"), ("set(a)", "{a}"), ("tuple(a)", "(a,)")),
        *(("f'{a!r}'", "f'{a}'"), ("[a async for a in b]", "[a for a in b]"), ("from . import a", "from .. import a")),
        ("match a:\n  case None: b", "match a:\n  case True: b"),
    ],
)
def test_python_tells_parts_apart(one: str, other: str) -> None:
    assert parse(one, "python") != parse(other, "python")


def test_python_parsing_leaks_no_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert parse(r'f("\d") is 1', "python") is not None
    assert caught == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "calls"),
    [
        ('{"name": "f", "arguments": {"a": [1, 2.5], "b": {"c": null}}}', [("f", {"a": [1, 2.5], "b": {"c": None}})]),
        ('{"function": {"name": "f", "arguments": "{\\"a\\": 1e2}"}, "id": "x"}', [("f", {"a": 100.0})]),
        ('[{"tool": "f", "tool_input": {}}, {"name": "g", "args": null}]', [("f", {}), ("g", {})]),
        *(
            (text, [])
            for text in ('[{"name": "f", "args": {}}, 1]', "{", "1", "f(x)", '{"action": "f", "action_input": "x"}')
        ),
        *((text, []) for text in ('{"a": ' * 20_000, f'{{"name": "f", "args": {{"a": {"9" * 5000}}}}}')),
    ],
)
def test_the_calls_of_a_program(program: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    assert tool_calls(program) == calls


@pytest.mark.parametrize(
    ("language", "text", "nodes"),
    [
        ("sexpr", "(f " * 10_000 + "x" + ")" * 10_000, 10_001),
        ("sexpr", "(" * 1_000_000, None),
        ("sexpr", '"\\' * 500_000, None),
        ("sexpr", '(f "' + "x" * 1_000_000 + '")', 2),
        ("json", '{"a":' * 10_000 + "1" + "}" * 10_000, None),
        ("json", "[" * 1_000_000, None),
        ("json", '"' + "x" * 1_000_000 + '"', 1),
        ("json", "9" * 1_000_000, 1),
        ("json", "[" + "1," * 99_999 + "1]", 100_001),
        ("python", "f(" * 10_000 + "x" + ")" * 10_000, None),
        ("python", "-" * 1_000_000 + "1", None),
        ("python", "f('" + "x" * 300_000 + "')", 2),
        ("python", "f('" + "x" * 1_000_000 + "')", None),
        ("python", "9" * 1_000_000, None),
        ("python", "a.b" * 100_000, None),
        ("python", "f()" * 300_000, None),
        ("python", "a\n" * 500_000, None),
        ("python", "+".join(["1"] * 50_000), None),
        ("python", "f'" + "{x}" * 133_000 + "'", None),
        ("python", 'x + rF"' + "{x!r:{y}}" * 40_000 + '"', None),
        ("python", "f'{x}' " * 66_000, None),
        ("python", "f'" + "{x}" * 7_000 + "'", 14_001),
        ("python", "[" + "{}, " * 20_000 + "'{']", 20_002),
    ],
    ids=lambda value: f"{value[:12]}…" if isinstance(value, str) else str(value),
)
def test_deep_or_huge_text_is_quick(language: str, text: str, nodes: int | None) -> None:
    started = time.process_time()
    tree = parse(text, language)
    assert time.process_time() - started < 2
    assert (None if tree is None else len(tree)) == nodes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f'" + "{x}" * 10_000 + "'", "Python of 30003 characters is not read: f-strings of more than 8,000 fields"),
        ("x" * 400_001, "Python of 400001 characters is not read: more than 400,000"),
    ],
    ids=["fields", "characters"],
)
def test_python_that_takes_too_long_is_refused_in_a_line(
    text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse(text, "python") is None
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_a_parser(language: str) -> None:
    parser = get_parser(language)
    assert isinstance(parser, ProgramParser)
    assert parser is get_parser(language)
    assert parser.parse("") is None


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("functinal", "did you mean 'functional'"),
        ("SQL", "did you mean 'sql'"),
        ("sqlite", "unknown 'sqlite'; did you mean 'sql:sqlite'"),
        ("PostgreSQL", "did you mean 'sql:postgres'"),
        ("sql:postgress", "did you mean 'postgres'"),
        ("json:strict", "unknown 'json:strict'"),
        ("", f"known: {', '.join(sorted(LANGUAGES))}"),
    ],
)
def test_unknown_language_is_an_error_with_a_suggestion(language: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        get_parser(language)


def test_sqlglot_is_imported_only_for_sql_and_named_where_missing() -> None:
    code = """
import sys
sys.modules["sqlglot"] = None
from langchain_rcr import programs
from langchain_rcr.errors import MissingExtraError
assert programs.parse("f(x)") is not None
try:
    programs.ProgramSpec("sql")
except MissingExtraError as error:
    assert str(error) == "sqlglot is not installed: pip install 'langchain-rcr[sql]'", error
else:
    raise AssertionError("sqlglot was not missed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Reversed:
    """A language from elsewhere, to be registered: words from the last, which is the root, to the first."""

    def parse(self, text):
        tree = None
        for word in text.split():
            tree = Tree(word, () if tree is None else (tree,))
        return tree


class Shouted(Reversed):
    """Another: what is told of it beside its parser is used wherever it matters."""

    about = About(
        extra="sql", on_one_line=True, inner_values=True, fences=("loud",), in_prose=lambda text: [text.upper()]
    )


def test_what_is_known_of_a_language_is_on_its_parser(monkeypatch):
    monkeypatch.setitem(PARSERS, "shouted", f"{__name__}:Shouted")
    assert ProgramSpec("shouted").key("3 4 f") == "f(ANON_NUMBER(ANON_NUMBER))"
    assert [*candidates("a b\nc", "shouted")] == ["a b", "a b\nc", "A B\nC"]
    assert next(candidates("```loud\na\n```\n```sql\nb\n```", "shouted")) == "a"
    assert requirement(None, ProgramSpec("shouted")) == "langchain-rcr[sql]"


def test_a_new_language_is_a_file_and_a_line_of_the_registry(monkeypatch):
    with pytest.raises(InputError, match="unknown 'reversed'"):
        ProgramSpec("reversed")
    monkeypatch.setitem(PARSERS, "reversed", f"{__name__}:Reversed")
    assert "reversed" in LANGUAGES
    spec = ProgramSpec("reversed")
    assert str(parse("all city answer", "reversed")) == "answer(city(all))"
    assert spec.structures("3 f") == ProgramSpec().structures("f ( 4 )")
    assert spec.key("3 f") == spec.key(" 4  f")
    assert ProgramSettings(language="reversed").language == "reversed"
