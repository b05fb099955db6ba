"""Where the program is in an answer."""

import json
import time

import pytest

from langchain_rcr.chains.answers import candidates, program_of, read_answer
from langchain_rcr.programs import get_parser


@pytest.mark.parametrize(
    ("answer", "first"),
    [
        ("SELECT 1", "SELECT 1"),
        (" SELECT a\nFROM b \n", "SELECT a\nFROM b"),
        ("Target: SELECT 1", "SELECT 1"),
        ("\nTarget:\nSELECT 1", "SELECT 1"),
        ("`SELECT 1`", "SELECT 1"),
        ("SELECT a FROM `t`", "SELECT a FROM `t`"),
        ("```SELECT 1```", "SELECT 1"),
        ("```sql SELECT 1```", "SELECT 1"),
        ("```SQL SELECT a\nFROM b\n```", "SELECT a\nFROM b"),
        ("It is ```sql SELECT 1```, or ```SELECT 2```.", "SELECT 2"),
        ("It is ```SELECT 1```.", "SELECT 1"),
        ("SELECT 1\nSource: next?\nTarget: SELECT 2", "SELECT 1"),
        ("SELECT 'Source: x'", "SELECT 'Source: x'"),
        ("SELECT x AS 'Target: y'", "SELECT x AS 'Target: y'"),
        ("Sure! Here it is:\n```sql\nSELECT a\nFROM b\n```\nIt selects a.", "SELECT a\nFROM b"),
        ("```\nSELECT 1", "SELECT 1"),
        ("```sql\nTarget: SELECT 1\n```", "SELECT 1"),
        ("The query:\nTarget: SELECT 1", "SELECT 1"),
        ("Source: the question\nTarget: SELECT 1\nSource: another", "SELECT 1"),
        ("<think>SELECT 0 would\n```\nSELECT 9\n```</think>\n\nSELECT 1", "SELECT 1"),
        ("<thinking>no</thinking>SELECT 1", "SELECT 1"),
        ("the prompt opened the thoughts\n</think>\nSELECT 1", "SELECT 1"),
        ("SELECT '<think>'", "SELECT '<think>'"),
    ],
)
def test_the_likeliest_place_of_a_program_of_several_lines(answer: str, first: str) -> None:
    for language in ("sql", "sql:postgres", "python", None):
        assert next(candidates(answer, language)) == first


@pytest.mark.parametrize("language", ["functional", "sexpr", "json"])
def test_a_program_of_one_line_comes_before_what_follows_it(language: str) -> None:
    assert [*candidates("count(a)\nThis counts.\n\nBye.", language)] == [
        "count(a)",
        "count(a)\nThis counts.\n\nBye.",
        "count(a)\nThis counts.",
    ]
    assert [*candidates('Target: {\n "a": 1\n}', language)][:2] == ["{", '{\n "a": 1\n}']
    assert [*candidates("<program>count(a)</program> counts", language)] == ["count(a)"]
    assert [*candidates("count(a)</program>\nIt counts.", language)] == ["count(a)"]


def test_what_comes_after_in_what_order() -> None:
    assert [*candidates("SELECT 1\nFROM a\n\nIt selects.", "sql")] == [
        "SELECT 1\nFROM a\n\nIt selects.",
        "SELECT 1\nFROM a",
    ]
    assert [*candidates("SELECT 1\nIt selects.\n\nBye.", "sql")][-1] == "SELECT 1"
    fences = "First:\n```sql\nSELECT 1\n```\nbetter:\n```sql\nSELECT 2\n```"
    assert [*candidates(fences, "sql")] == ["SELECT 2", "SELECT 1"]


QUERY = "SELECT a FROM b"
LONGER = "WITH c AS (\n\n  SELECT a FROM b\n)\n\nSELECT a\nFROM c"
FORMS = [
    # Drafts precede what they become.
    f"```sql\nSELECT x FROM y\n```\nBetter:\n```sql\n{QUERY}\n```",
    f"```sql\nSELECT x FROM y\n```\nBetter:\n```sql\n{QUERY}\n```\nor\n```sql\nSELECT FROM (\n```",
    f"```sql\n{QUERY}\n```\nIt prints\n```\na | 1\n--+--\n```",
    f"```sql\n{QUERY}\n```\nRun it so:\n```bash\nsqlite3 x\n```",
    f"```sql\n{QUERY}\n```\n```python\nSELECT\n```",
    f"```\r\n{QUERY}\r\n```\r\nIt selects.",
    f"Target: SELECT x FROM y\nWait, that is wrong.\nTarget: {QUERY}",
    f"SELECT x FROM y\n\nThat has no a, so:\n\n{QUERY}",
    f"[SQL]SELECT x FROM y[/SQL] No: [SQL]{QUERY}[/SQL]",
    # Words before it.
    f"Here is the query: {QUERY}",
    f"Here is the query:\n{QUERY}",
    f"Sure! Here's the SQL query that you asked for:\n\n{QUERY}\n\nIt selects a.",
    f"I would select the rows so:\n{QUERY}",
    f"The SQL is {QUERY}",
    f"You can use `{QUERY}`, which selects a.",
    f"SQLQuery: {QUERY}",
    f"SQL Query: {QUERY}",
    f"**SQL:**\n{QUERY}",
    f"### Query\n{QUERY}",
    f"Final answer: `{QUERY}`",
    f"A: {QUERY}",
    f"1. {QUERY}",
    f"- {QUERY}",
    # Tags.
    f"[SQL]{QUERY}[/SQL]",
    f"[SQL] {QUERY}",
    f"{QUERY} [/SQL]",
    f"<sql>\n{QUERY}\n</sql>\nDone.",
    f"<answer>\n```sql\n{QUERY}\n```\n</answer>",
    f"Sure: <query>{QUERY}</query>",
    # Words after it.
    f"{QUERY};\nThis selects a.",
    f"{QUERY}; This selects a.",
    f"The query would be {QUERY}; it selects a.",
    f"Here:\n{QUERY};\nThis selects a. Note that b has it.",
    f"{QUERY}\n\nExplanation: it selects a.",
    f"{QUERY}\nExplanation: it selects a.",
    # Quotes around it.
    f'"{QUERY}"',
    f"'{QUERY};'",
    f"{QUERY}\nSource: another\nTarget: SELECT x FROM y",
    # JSON around it.
    json.dumps({"sql": QUERY}),
    f"Here: {json.dumps({'query': QUERY, 'reason': 'it selects'})}",
    json.dumps({"reason": "it\nselects", "SQLQuery": QUERY}).replace("\\n", "\n"),
    json.dumps({"function": {"name": "run", "arguments": json.dumps({"sql": QUERY})}}),
    f"<tool_call>{json.dumps({'name': 'run', 'arguments': {'query': QUERY}})}</tool_call>",
    f"```json\n{json.dumps([{'sql': 'SELECT x FROM y'}, {'sql': QUERY}])}\n```",
    f"<think>SELECT x FROM y</think>Here is the query: {QUERY}",
]


@pytest.mark.parametrize("language", ["sql", "sql:sqlite", "sql:postgres", "sql:tsql"])
@pytest.mark.parametrize("answer", FORMS)
def test_the_forms_in_which_models_write_a_query(answer: str, language: str) -> None:
    found = program_of(answer, language)
    assert (found or "").rstrip(";") == QUERY


@pytest.mark.parametrize(
    "form", ["{}", "Here it is:\n{}", "Sure!\n\n{}", "```sql\n{}\n```", "Sure.\n\n{}\n\nThat is all."]
)
def test_a_query_with_blank_lines_stays_whole(form: str) -> None:
    assert program_of(form.format(LONGER), "sql") == LONGER


@pytest.mark.parametrize(
    "answer",
    [
        "Here: SELECT a FROM (SELECT b FROM c",
        "SELECT COUNT(*)\nFROM a\nWHERE b = 'O'Brien'",
        "```sql\nselect count(*)\n\nfrom a\nwhere b = 'O'Brien'\n```",
        "So:\n\nSELECT COUNT(*) AS n\n  FROM a WHERE b = 'O'Brien'\n\nIt counts.",
        "SELECT COUNT(*)\nFROM a\nWHERE b > (SELECT",
        "SELECT a\nFROM b\nINTERSECT\nSELECT a\nFROM b\nWHERE c = 'O'Brien'",
        "SELECT a FROM (\n\n  SELECT b FROM c",
        "I can't select that. With more time I would.",
        "Please update the schema: it has no such table.",
        "[1] and {2}",
    ],
)
def test_no_part_of_a_broken_query_and_no_prose_is_a_program(answer: str) -> None:
    assert read_answer(answer, get_parser("sql").parse, "sql").program is None


@pytest.mark.parametrize(
    "literal", ["'Here is the query: x'", "'<code>x</code>'", "'a: <sql>'", "'[SQL]x[/SQL]'", '\'{"sql": "SELECT 2"}\'']
)
def test_what_a_literal_holds_is_no_program(literal: str) -> None:
    assert program_of(f"SELECT a FROM b WHERE c = {literal}", "sql") == f"SELECT a FROM b WHERE c = {literal}"


@pytest.mark.parametrize(
    ("answer", "language", "program"),
    [
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "json", '{"name": "f", "arguments": {"x": 1}}'),
        ('<tool_call>\n{"name": "f"}\n</tool_call>\n', "json", '{"name": "f"}'),
        (2 * '<tool_call>\n{"name": "f"}\n</tool_call>\n', "json", '{"name": "f"}'),
        ('<tool_call>{"a": 1}</tool_call>\n<tool_call>{"b":\n2}</tool_call>', "json", '[{"a": 1}, {"b":\n2}]'),
        ('<tool_call>{"a": 1}</tool_call>\n<tool_call>{"b": 2', "json", '{"a": 1}'),
        ('[TOOL_CALLS][{"name": "f"}]', "json", '[{"name": "f"}]'),
        ('Here: {"name": "f"}', "json", '{"name": "f"}'),
        ('Here: {"name": "f"} as in [1].', "json", '{"name": "f"}'),
        ('I would call {"name": "g"}, no, {"name": "f"}.', "json", '{"name": "f"}'),
        ('Call it so:\n{\n  "name": "f"\n}\nDone.', "json", '{\n  "name": "f"\n}'),
        ('```json\n{"name": "g"}\n```\n```json\n{"name": "f"}\n```\n```text\n[1]\n```', "json", '{"name": "f"}'),
        ('```json\n{"program": "count ( a )"}\n```', "functional", "count ( a )"),
        ("Here is the program: count ( a )", "functional", "count ( a )"),
        ("Here is the program:\ncount ( a )\nIt counts.", "functional", "count ( a )"),
        ("Answer: ( count a )", "sexpr", "( count a )"),
        ("Die Antwort lautet:\ncount ( a )", "functional", "count ( a )"),
        ("SELECT a FROM t -- once: SELECT b FROM u", "sql", "SELECT a FROM t -- once: SELECT b FROM u"),
        ("La respuesta es: count ( a )", "functional", "count ( a )"),
        ("以下是程序：\ncount ( a )\n\n它计数。", "functional", "count ( a )"),
        ("**答案：** ( count a )", "sexpr", "( count a )"),
        ("查询：SELECT a FROM b", "sql", "SELECT a FROM b"),
        ("答案：f(x)", "python", "f(x)"),
        ("count ( '答案：x' )", "functional", "count ( '答案：x' )"),
        ("答案：甲", "tokens", "答案：甲"),
        ("<answer>count ( a )</answer>", "functional", "count ( a )"),
        ("Here is the code:\nf(x)", "python", "f(x)"),
        ("result: int = f(x)", "python", "result: int = f(x)"),
        ("answer: a b", "tokens", "answer: a b"),
    ],
)
def test_forms_of_other_languages(answer: str, language: str, program: str) -> None:
    assert program_of(answer, language) == program


def test_words_behind_a_query_of_several_lines_end_it() -> None:
    query = "SELECT COUNT(*)\n  , b\nFROM a\nLEFT JOIN c USING (d)\nGROUP BY b\nUNION ALL\nSELECT 1, 2"
    for form in ("{}\nFrom this you can see how many there are.", "```sql\n{}\nThis counts.\n```"):
        assert program_of(form.format(query), "sql") == query


def test_prose_around_a_fence_is_no_program() -> None:
    """It would be one in a language where a word alone is."""
    assert [*candidates("Sure\n```\ncount((\n```\nBye", "functional")] == ["count(("]


@pytest.mark.parametrize(
    "answer", ["", " \n\t", "``", "<think>hm</think>", "<think>cut off", "Source: x", "Target:", "Target: \n"]
)
def test_nothing_is_no_candidate(answer: str) -> None:
    assert [*candidates(answer, "sql")] == [*candidates(answer, "functional")] == []


PIECES = [
    "`",
    "```\n",
    "<think>",
    "\n",
    "Target: ",
    "\nTarget:",
    "\n \n",
    "x\nSource:",
    "[",
    "{",
    '{"a":',
    "\n<sql>",
    "[/SQL]",
    "SELECT ",
    "\n\nSELECT (",
    ": ",
    "is ",
    "\n- ",
    "the ",
    "`` `",
    "[1] ",
]


@pytest.mark.parametrize("piece", PIECES)
def test_odd_answers_take_no_time(piece: str) -> None:
    began = time.process_time()
    for language in ("sql", "json", "functional"):
        list(candidates(piece * 50_000, language))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (" answer ( all ) ", "answer ( all )"),
        ("\n\nanswer ( all )\nand more", "answer ( all )"),
        ("answer ( all )\nSource: next\nTarget: other", "answer ( all )"),
        ("Source: next\nTarget: other", "other"),
        ("Source: next", None),
        ("Target: answer ( all )", "answer ( all )"),
        ("```\nanswer ( all )\n```\nThis asks for all.", "answer ( all )"),
        ("Here you are:\n```funql\nTarget: answer ( all )\n```", "answer ( all )"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("`answer ( all )`", "answer ( all )"),
        ("<think>\nTarget: no\n</think>answer(city(all))", "answer(city(all))"),
        ("<think>answer(city(all))", None),
        ("not ( a program", "not ( a program"),
        ("", None),
        (" \n ", None),
        ("Resource: x", "x"),  # a label of the model's own
    ],
)
def test_the_program_in_an_answer(text: str, program: str | None) -> None:
    assert program_of(text, "functional") == program


@pytest.mark.parametrize(
    ("language", "program"),
    [("sql", "SELECT a\nFROM b"), ("sql:postgres", "SELECT a\nFROM b"), ("tokens", "SELECT a\nFROM b")]
    + [(language, "SELECT a") for language in ("functional", "sexpr", "json")],
)
def test_the_language_says_how_many_lines_a_program_has(language: str, program: str) -> None:
    for text in ("```\nSELECT a\nFROM b\n```\nWell.", "SELECT a\nFROM b\nSource: next\nTarget: c"):
        assert program_of(text, language) == program
