from __future__ import annotations

import json
import logging
import re
import time

import pytest
from places import DATA
from sqlglot.dialects.dialect import Dialects

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec, parse

GEOGRAPHY = DATA / "geography_sql" / "geography.json"

TREES = {
    'SELECT C0.CITY_NAME FROM CITY AS C0 WHERE C0.STATE_NAME = "texas" ;': (
        "select(city.city_name, from(city), where(eq(city.state_name, 'texas')))"
    ),
    "SELECT MAX(s.AREA) FROM STATE AS s WHERE s.X > 1.5 AND (s.Y < -2 AND NOT s.Z IS NULL)": (
        "select(max(state.area), from(state), where(and(gt(state.x, 1.5), lt(state.y, -2), not(is(state.z, null)))))"
    ),
    "select name from state": "select(state.name, from(state))",
    "select `a b`, u.`c` from `t t` u where d = '`'": "select(t t.a b, t t.c, from(t t), where(eq(t t.d, '`')))",
    "select a, b from t, u": "select(a, b, from(t, u))",
    "select t.a from t cross join u": "select(t.a, from(t, u))",
    "select distinct x.a from t x join u on x.i = u.j left join v using (k)": (
        "select(distinct, t.a, from(t), join(u, eq(t.i, u.j)), left join(v, k))"
    ),
    "select b, count(*) as n from t group by b having n > 3 order by n desc, b limit 2 offset 1": (
        "select(t.b, count(*), from(t), group(t.b), having(gt(count, 3)), order(desc(count), t.b), limit(2), offset(1))"
    ),
    "select max(d.n) from (select count(distinct t.a) as n from t) as d": (
        "select(max(subquery.count), from(select(count(distinct(t.a)), from(t))))"
    ),
    "with w as (select a as b from t) select w.b from w": "select(with(cte(select(t.a, from(t)))), cte.a, from(cte))",
    "select a from t union all select b from u": "union all(select(t.a, from(t)), select(u.b, from(u)))",
    "select a from t union select b from u": "union(select(t.a, from(t)), select(u.b, from(u)))",
    "select a from t where a in (select b from u where u.c = t.a) or a not between 1 and 2": (
        "select(t.a, from(t), where(or(in(t.a, select(u.b, from(u), where(eq(u.c, t.a)))), not(between(t.a, 1, 2)))))"
    ),
    "select case when a then 'it''s' else cast(b as int) end from t": (
        "select(case(if(t.a, 'it''s'), cast(t.b, int)), from(t))"
    ),
    "select my_func(a, 1) from db.t": "select(my_func(db.t.a, 1), from(db.t))",
    "delete from t as q where q.a = 1": "delete(t, where(eq(t.a, 1)))",
    "update t set a = 'x' where b = 2": "update(t, eq(t.a, 'x'), where(eq(t.b, 2)))",
}

RENAMED = [
    (
        "SELECT S0.NAME FROM STATE AS S0 WHERE S0.AREA = (SELECT MAX(S1.AREA) FROM STATE AS S1)",
        "select st.name from state st where st.area = (select max(other.area) from state other);",
    ),
    (
        "select x.m from (select max(y.m) as m from (select count(1) as m from t) y) x",
        "select a.p from (select max(b.q) as p from (select count(1) as q from t) b) a",
    ),
    ("with a as (select 1 as x) select x from a", "with b as (select 1 as y) select b.y from b"),
    (
        "with recursive a(n) as (select 1 union all select a.n from a) select n from a",
        "with recursive b(k) as (select 1 union all select b.k from b) select k from b",
    ),
    ("select sum(a) as s from t order by s", "select sum(a) as total from t order by total"),
    (
        "select a.x from (select k as x from t) a order by a.x",
        "select b.y from (select k as y from t) b order by b.y",
    ),
    ("select a from t where b in ('x', \"y\")", "select a from t where (b) in ('x', 'y')"),
]


CLAUSES = {
    ("tsql", "select a from t pivot (sum(x) for y in (p, q)) as z"): (
        "select(t.a, from(t(pivot(sum(t.x), in(t.y, t.p, t.q)))))"
    ),
    ("tsql", "select z.x from t unpivot (x for y in (p, q)) as z"): "select(t.x, from(t(unpivot(x, in(y, t.p, t.q)))))",
    ("snowflake", "select * from t pivot (sum(x) for y in ('p'))"): "select(*, from(t(pivot(sum(t.x), in(t.y, 'p')))))",
    ("snowflake", "select * exclude (a) from t"): "select(*(except(t.a)), from(t))",
    ("bigquery", "select t.* except (a, b) from t"): "select(t.*(except(t.a, t.b)), from(t))",
    ("bigquery", "select * replace (b + 1 as a) from t"): "select(*(replace(a(add(t.b, 1)))), from(t))",
    ("bigquery", "select a from t for system_time as of b"): "select(t.a, from(t(version(timestamp, as of, t.b))))",
    ("postgres", "select a from t tablesample system (10)"): "select(t.a, from(t(tablesample(system, percent(10)))))",
    ("postgres", "select * from f(1) with ordinality as u"): "select(*, from(f(1, ordinality)))",
    ("", "select * from unnest([1]) with ordinality as u"): "select(*, from(unnest(array(1), ordinality)))",
    ("", "select a from t order by a nulls last, b desc"): "select(t.a, from(t), order(nulls last(t.a), desc(t.b)))",
    ("postgres", "select a from t order by a desc nulls last, b"): (
        "select(t.a, from(t), order(nulls last(desc(t.a)), t.b))"
    ),
    ("mysql", "insert ignore into t values (1)"): "insert(t, values(tuple(1)), ignore)",
    ("tsql", "select t.a from t cross apply f(t.x) as g"): "select(t.a, from(t, lateral(f(t.x))))",
    ("tsql", "select t.a from t outer apply f(t.x) as g"): "select(t.a, from(t), left join(lateral(f(t.x))))",
}


@pytest.mark.parametrize("text", TREES)
def test_tree(text: str) -> None:
    assert str(parse(text, "sql")) == TREES[text]


@pytest.mark.parametrize(("dialect", "text"), CLAUSES)
def test_no_clause_is_dropped(dialect: str, text: str) -> None:
    assert str(parse(text, f"sql:{dialect}" if dialect else "sql")) == CLAUSES[dialect, text]


@pytest.mark.parametrize("dialect", sorted({member.value for member in Dialects} - {""}))
def test_the_dialects_own_order_of_nulls_is_unmarked(dialect: str) -> None:
    if (tree := parse("select a from t order by a, b desc", f"sql:{dialect}")) is not None:
        assert str(tree) == "select(t.a, from(t), order(t.a, desc(t.b)))"


@pytest.mark.parametrize("language", ["sql", "sql:sqlite", "sql:duckdb", "sql:postgres", "sql:mysql"])
@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("date_trunc('year', d)", "date_trunc('month', d)"),
        ("strftime('%Y', d)", "strftime('%m', d)"),
        ("date_part('year', d)", "date_part('month', d)"),
        ("to_char(d, 'YYYY')", "to_char(d, 'MM')"),
        ("date_format(d, '%Y')", "date_format(d, '%m')"),
        ("date_diff('day', d, e)", "date_diff('year', d, e)"),
    ],
)
def test_units_and_formats_of_dates_are_no_values(language: str, text: str, other: str) -> None:
    spec = ProgramSpec(language)
    assert spec.tree(f"select {text} from t") != spec.tree(f"select {other} from t")


@pytest.mark.parametrize("text", ["strftime('%Y', '2020-01-01') = 'year'", "a = '%Y'", "f('day') = date('2020-01-01')"])
def test_other_strings_beside_dates_are_values(text: str) -> None:
    query = f"select a from t where {text}"
    again = query.replace("2020-01-01", "2021-12-31").replace("'year'", "'x'").replace("= '%Y'", "= 'x'")
    spec = ProgramSpec("sql")
    assert spec.key(query) == spec.key(again.replace("'day'", "'x'"))


@pytest.mark.parametrize("text", ["select a; -- done", "/* c */ select a; /* d */", "select a -- d\n;;\n-- e"])
def test_comments_are_blanks(text: str) -> None:
    assert str(parse(text, "sql")) == "select(a)"


@pytest.mark.parametrize(("left", "right"), RENAMED)
def test_alias_names_mean_nothing(left: str, right: str) -> None:
    tree = parse(left, "sql")
    assert tree is not None
    assert tree == parse(right, "sql")


def test_column_and_table_names_mean_something() -> None:
    trees = {parse(text, "sql") for text in ("select a from t", "select b from t", "select a from u")}
    assert len(trees) == 3


def test_case_of_names_follows_the_dialect() -> None:
    assert parse("SELECT Name FROM State", "sql") == parse("select NAME from STATE", "sql")
    quoted = 'SELECT "Name" FROM state'
    assert str(parse(quoted, "sql:postgres")) == "select(state.Name, from(state))"
    assert str(parse(quoted, "sql:sqlite")) == "select(state.name, from(state))"
    assert str(parse('SELECT "NAME" FROM state', "sql:snowflake")) == "select(state.name, from(state))"


def test_double_quotes_follow_the_dialect() -> None:
    text = 'select a from t where a = "x"'
    assert "'x'" in str(parse(text, "sql:sqlite"))
    assert "'x'" in str(parse(text, "sql:mysql"))
    assert "t.x" in str(parse(text, "sql:postgres"))


def test_values_are_anonymised() -> None:
    spec = ProgramSpec("sql")
    assert spec.key("select a from t where b = 'x' and c > -3.5 limit 3") == (
        "select(t.a, from(t), where(and(eq(t.b, ANON_STRING), gt(t.c, ANON_NUMBER))), limit(ANON_NUMBER))"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "hello world",
        "name",
        "1 + 1",
        "select",
        "select from",
        "-- select 1",
        "select a from t where",
        "select 'a",
        "select (a from t",
        "show me the cities",
        "alter table t foo bar baz",
        "explain this",
        "call me",
        "select 1; the end",
        "select {{ a",
        "{{ a }}",
        "{{ a }} {{ b }}",
        "answer(city(all))",
        "\0",
    ],
)
def test_what_is_no_statement_is_none(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert parse(text, "sql") is None
    assert caplog.records == []


STATEMENTS = {
    ("", "drop table if exists t"): "drop(table, t, exists)",
    ("sqlite", "alter table t add column a int"): "alter(t, table, columndef(a, int))",
    ("", "truncate table t"): "truncatetable(t)",
    ("", "describe t"): "describe(t)",
    ("mysql", "show tables"): "show(tables)",
    ("", "set x = 1"): "set(setitem(eq(x, 1)))",
    ("", "values (1, 2)"): "values(tuple(1, 2))",
    ("", "call f(1)"): "call(f(1))",
    ("", "explain select 1"): "explain(select(1))",
    ("postgres", "explain (costs off) select 1"): "explain(\\(costs off\\), select(1))",
    (
        "sqlite",
        "explain query plan select 1; drop table t",
    ): "statements(explain(query plan, select(1)), drop(table, t))",
    ("sqlite", "replace into t values (1)"): "insert(t, values(tuple(1)), replace)",
    ("mysql", "select 2; replace into t values (1)"): "statements(select(2), insert(t, values(tuple(1)), replace))",
    ("", "select 1; -- a\nselect 2"): "statements(select(1), select(2))",
    ("tsql", "declare @d int = 3; select @d"): (
        "statements(declare(declareitem(parameter(d), int, 3)), select(parameter(d)))"
    ),
    ("", "select x.a from {{ ref('o') }} x where x.a > {{ var('n') }}"): (
        "select({{ ref\\('o'\\) }}.a, from({{ ref\\('o'\\) }}), where(gt({{ ref\\('o'\\) }}.a, {{ var\\('n'\\) }})))"
    ),
    ("", "{{ config() }} -- it's\nselect a from t {% if x %} {{ tail() }} where a {# {{ no }} #} > 1 {% endif %}"): (
        "statements({{ config\\(\\) }}, {% if x %}, {% endif %}, "
        "select(t.a, from(t), where(gt(t.a, 1))), {{ tail\\(\\) }})"
    ),
    ("", "select '{{ a }}' from db.{{ b }}"): "select('{{ a }}', from(db.{{ b }}))",
}


@pytest.mark.parametrize(("dialect", "text"), STATEMENTS)
def test_statements_of_all_kinds_are_read(dialect: str, text: str) -> None:
    assert str(parse(text, f"sql:{dialect}" if dialect else "sql")) == STATEMENTS[dialect, text]


def test_the_macros_of_a_template_are_no_names_of_tables() -> None:
    shapes = ProgramSpec("sql", anonymize="names")
    assert shapes.key("select a from {{ ref('o') }}") == shapes.key("select b from t")
    assert ProgramSpec("sql").key("select a from {{ ref('o') }}") != ProgramSpec("sql").key(
        "select a from {{ ref('p') }}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "select a from t where interval_days = 30 and note like '{long}'",
        "select a from t where d > now() - interval '3' day and note like '{long}'",
        "select a from t where note = '{long}' and d > now() - interval '3 days'",
        "select a <-> '[{long}]' from t where d > now() - interval '1' day and interval_in_days = '{long}'",
    ],
)
def test_a_long_string_beside_an_interval_is_read(text: str) -> None:
    assert parse(text.format(long="0.1," * 100), "sql:postgres") is not None


@pytest.mark.parametrize(
    "text",
    [
        "select interval '{digits}' day",
        "select interval '1' day '{digits}' hour",
        "select interval '1' day + '{digits}' hour",
        "select interval {digits} day",
        "select generate_series(a, b, '{digits}')",
    ],
)
@pytest.mark.parametrize("language", ["sql", "sql:postgres", "sql:mysql", "sql:snowflake"])
def test_a_long_interval_is_refused_in_a_line(text: str, language: str, caplog: pytest.LogCaptureFixture) -> None:
    started = time.thread_time()
    assert parse(text.format(digits="9" * 20_000), language) is None
    assert time.thread_time() - started < 0.5
    assert [record.getMessage() for record in caplog.records if record.name.startswith("langchain_rcr")] == [
        f"SQL of {len(text) - 8 + 20_000} characters is not read: an interval of "
        f"{'20,000' if '{digits} day' in text and 'interval {' in text else '20,002'} characters"
    ]


OTHERS = ("postgres", "duckdb", "bigquery", "snowflake")


@pytest.mark.parametrize("link", ["[1]", ".f()", "[a:b]", "[1].f()", "(1)[1]"])
@pytest.mark.parametrize("language", ["sql", *(pytest.param(f"sql:{each}", marks=pytest.mark.slow) for each in OTHERS)])
def test_a_long_chain_is_refused_in_a_line(link: str, language: str, caplog: pytest.LogCaptureFixture) -> None:
    started = time.thread_time()
    assert parse(f"select f(a){link * 5_000} from t", language) is None
    assert parse(f"select a from t where {' and '.join([f'f(a){link * 40} = 1'] * 30)}", language) is None
    assert time.thread_time() - started < 0.5
    assert {record.getMessage().partition(": ")[2] for record in caplog.records} == {
        "more than 30,000 tokens, each [1] or .f() of a chain counting all before it"
    }
    caplog.clear()
    parse(f"select {', '.join([f'f(a){link * 3} + g(b){link}'] * 100)} from t", language)
    assert caplog.records == []


def test_other_uses_of_sqlglot_still_log(caplog: pytest.LogCaptureFixture) -> None:
    assert parse("select 1", "sql") is not None
    logging.getLogger("sqlglot").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("select " + "f(" * 10_000 + "1" + ")" * 10_000, False),
        ("select " + "(" * 20 + "1" + ")" * 20, True),
        ("select a from t where a = " + "(select a from t where a = " * 12 + "1" + ")" * 12, True),
        ("select '" + "x" * 1_000_000 + "'", True),
        ("select '" + "(" * 1_000_000 + "'", True),
        ("select " + "not " * 10_000 + "a", False),
        ("select " + "case when a then " * 10_000, False),
        ("select " + "+".join(["1"] * 10_000), True),
        ("select a from t where " + " and ".join(["a = 1"] * 5_000), True),
        (" union ".join(["select 1"] * 3_000), True),
        ("(" * 1_000_000, False),
        ("'" * 1_000_001, False),
        ("select " + "a, " * 300_000 + "a", False),
    ],
    ids=lambda value: f"{value[:24]}…" if isinstance(value, str) else str(value),
)
def test_deep_or_huge_text_is_quick(text: str, answers: bool) -> None:
    started = time.thread_time()  # of this thread alone: others in the process have work of their own
    tree = parse(text, "sql")
    assert time.thread_time() - started < 2
    assert (tree is not None) == answers


@pytest.mark.slow
@pytest.mark.skipif(not GEOGRAPHY.exists(), reason=f"{GEOGRAPHY} is not there (RCR_DATA)")
def test_geography_queries_parse_whatever_their_aliases() -> None:
    groups = json.loads(GEOGRAPHY.read_text(encoding="utf-8"))
    assert len(groups) == 246
    for text in (query for group in groups for query in group["sql"]):
        tree = parse(text, "sql")
        assert tree is not None, text
        assert tree == parse(text, "sql:sqlite")
        if text.startswith("SELECT DERIVED_TABLEalias1.STATE_NAME"):  # an alias that stands for nothing
            continue
        assert "alias" not in str(tree), text
        renamed = re.sub(r"(\w+?)alias(\d+)", lambda m: f"x{m[2]}_{m[1].lower()}", text)
        assert tree == parse(renamed, "sql"), text


SHAPES = {
    "select name from state": "select(ANON_COLUMN, from(ANON_TABLE))",
    "select t.*, db.u.b from db.t as t join db.u using (k)": (
        "select(*, ANON_COLUMN, from(ANON_TABLE), join(ANON_TABLE, ANON_COLUMN))"
    ),
    "select b, count(*) as n from t group by b having n > 3 order by n desc, b": (
        "select(ANON_COLUMN, count(*), from(ANON_TABLE), group(ANON_COLUMN), having(gt(count, ANON_NUMBER)), "
        "order(desc(count), ANON_COLUMN))"
    ),
    "with w as (select a as b from t) select w.b from w where w.b = 'x'": (
        "select(with(cte(select(ANON_COLUMN, from(ANON_TABLE)))), ANON_COLUMN, from(cte), "
        "where(eq(ANON_COLUMN, ANON_STRING)))"
    ),
    "select max(d.n) from (select count(distinct t.a) as n from t) as d": (
        "select(max(ANON_COLUMN), from(select(count(distinct(ANON_COLUMN)), from(ANON_TABLE))))"
    ),
    "delete from t where a = 1": "delete(ANON_TABLE, where(eq(ANON_COLUMN, ANON_NUMBER)))",
}


@pytest.mark.parametrize("text", SHAPES)
def test_without_names_queries_to_different_databases_have_one_shape(text: str) -> None:
    shapes = ProgramSpec("sql", anonymize="names")
    assert str(shapes.tree(text)) == SHAPES[text]
    renamed = re.sub(r"\b([abknst]|name|state)\b(?!\()", r"other_\1", text)
    assert renamed != text
    assert shapes.key(renamed) == shapes.key(text)
    assert shapes.structures(renamed) == shapes.structures(text)
    assert shapes.named.key(renamed) != shapes.named.key(text)


def test_only_a_language_with_tables_has_shapes() -> None:
    with pytest.raises(InputError, match="anonymize: names: programs in 'functional' have no tables and columns"):
        ProgramSpec("functional", anonymize="names")
