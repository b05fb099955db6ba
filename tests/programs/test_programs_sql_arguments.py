"""Nothing that sqlglot tells of a statement is dropped: every argument of every class of its syntax trees, and SQL."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import sqlglot
from sqlglot import exp
from sqlglot.dialects.dialect import Dialect

from langchain_rcr.programs import ProgramSpec, parse
from langchain_rcr.programs.sql_nodes import _LEFT_OUT
from langchain_rcr.programs.sql_tree import SqlExpander

IS_OLD = int(sqlglot.__version__.split(".")[0]) < 30
KINDS = [kind for kind in vars(exp).values() if inspect.isclass(kind) and issubclass(kind, exp.Expression)]
LEFT_OUT = frozenset(" ".join(_LEFT_OUT.values()).split())
# Read by a rule of their own, each with its tests here or in test_programs_sql.py.
BY_RULE = {"identifier.quoted", "literal.this", "boolean.this", "ordered.nulls_first"}


def named(name: str) -> Any:
    return exp.Identifier(this=name, quoted=False)


def relation(name: str) -> Any:
    return exp.Table(this=named(name))


def value(kind: Any, argument: str, name: str) -> Any:
    """What such an argument may be."""
    argument = argument.strip("_")
    if argument == "joins":
        return [exp.Join(this=relation(name))]
    if argument == "laterals":
        return [exp.Lateral(this=exp.Anonymous(this=name))]
    if argument in ("from", "with"):
        query = exp.Select(expressions=[exp.Var(this=name)])
        cte = exp.CTE(this=query, alias=exp.TableAlias(this=named("cte")))
        return exp.From(this=relation(name)) if argument == "from" else exp.With(expressions=[cte])
    if kind.key in ("column", "table") and argument in ("this", "table", "db", "catalog"):
        return named(name)
    if kind.key in ("anonymous", "identifier", "literal", "var"):
        return name
    return [exp.Var(this=name)] if argument == "expressions" else exp.Var(this=name)


def tree(node: Any) -> str:
    return str(SqlExpander(Dialect.get_or_raise(""), False).tree(node))


def made(kind: Any, /, **more: Any) -> Any:
    needed = {name: value(kind, name, f"own_{name}") for name, is_needed in kind.arg_types.items() if is_needed}
    if more.keys() & {"db", "catalog"}:
        needed = {**needed, "table": named("own_table")} if kind.key == "column" else needed
    node = kind.__new__(kind)
    exp.Expression.__init__(node, **{**needed, **more})
    return node


def is_flag(argument: str, kind: Any) -> bool:
    return argument.strip("_") not in ("joins", "laterals", "from", "with", "this", "expression", "expressions") and (
        kind.key not in ("column", "table", "star", "identifier", "literal", "anonymous", "with", "cte")
    )


def dropped(kind: Any) -> list[str]:
    """Arguments of a class that make no difference to the tree, with the value that makes none."""
    found = []
    without = tree(made(kind, **({"table": named("own_table")} if kind.key == "column" else {})))
    for name, is_needed in kind.arg_types.items():
        if {name, f"{kind.key}.{name}"} & (LEFT_OUT | BY_RULE):
            continue
        values = [value(kind, name, "probe")]
        if is_flag(name, kind) and not is_needed and name != "distinct":
            values += [True, "probe", 7, [exp.Var(this="probe")]]
        found += [f"{kind.key}.{name}: {each!r}" for each in values if tree(made(kind, **{name: each})) == without]
    return found


def test_no_argument_is_dropped() -> None:
    assert len(KINDS) > 500
    assert [argument for kind in KINDS for argument in dropped(kind)] == []


def test_arguments_that_sqlglot_gets_one_day_are_not_dropped() -> None:
    query = sqlglot.parse_one("select a from t where a like 'x'")
    without = tree(query)
    query.find(exp.Like).args["accent"] = True
    assert tree(query) == without.replace("'x'", "'x', accent")


def test_what_is_left_out_is_named_once() -> None:
    names = " ".join(_LEFT_OUT.values()).split()
    assert len(names) == len(set(names))
    if not IS_OLD:  # and is in the newest sqlglot
        known = {f"{kind.key}.{name}" for kind in KINDS for name in kind.arg_types}
        known |= {name for kind in KINDS for name in kind.arg_types}
        assert set(names) - known == set()


CONDITIONS = ("like 'x'", "ilike 'x'", "like any ('x', 'y')", "like 'x' escape '!'", "in (1)", "between 1 and 2")


@pytest.mark.parametrize("language", ["sql", "sql:sqlite", "sql:postgres", "sql:mysql", "sql:snowflake", "sql:duckdb"])
@pytest.mark.parametrize("condition", [*CONDITIONS, "is null", "is true", "is distinct from b"])
@pytest.mark.parametrize(
    "query",
    [
        "select a from t where {}",
        "select case when {} then 1 end from t",
        "select b from t group by b having {}",
        "select a from t where b = 1 or ({} and c = 2)",
        "delete from t where {}",
    ],
)
def test_a_negated_condition_is_its_negation(language: str, condition: str, query: str) -> None:
    spec = ProgramSpec(language)
    plain = query.format(f"a {condition}")
    if spec.tree(plain) is None:
        pytest.skip("not in this dialect")
    word = "is not" if condition.startswith("is ") else "not"
    written = query.format(f"a {word} {condition.removeprefix('is ')}")
    assert spec.key(written) != spec.key(plain)
    assert not spec.structures(written) <= spec.structures(plain)
    if "distinct" not in condition:
        assert spec.key(written) == spec.key(query.format(f"not (a {condition})"))
        assert spec.key(written) == spec.key(query.format(f"not a {condition}"))


@pytest.mark.parametrize(
    ("language", "same"),
    [
        ("sql:postgres", ("a is not null", "a notnull", "not (a is null)", "not a isnull")),
        ("sql:sqlite", ("a is not null", "a notnull", "a not null", "not (a is null)")),
        ("sql:sqlite", ("a is not 3", "not (a is 3)", "not a is 3")),
        ("sql:postgres", ("a not like b", "not (a like b)", "not a like b", "(not a like b)")),
    ],
)
def test_spellings_of_a_negation_are_one_program(language: str, same: tuple[str, ...]) -> None:
    spec = ProgramSpec(language)
    queries = [f"select a from t where {condition}" for condition in same]
    keys = {spec.key(query) for query in queries if not IS_OLD or spec.tree(query)}
    assert len(keys) == 1
    assert "where(not(" in keys.pop()


DIFFERENT = [
    ("oracle", "select a from t, u where t.a = u.a(+)", "select a from t, u where t.a = u.a"),
    ("oracle", "select a from t order by a fetch first 3 rows with ties", "… 3 rows only"),
    ("oracle", "select a from t order by a fetch first 3 percent rows only", "… 3 rows only"),
    ("oracle", "select a from t connect by nocycle prior a = b", "select a from t connect by prior a = b"),
    ("oracle", "select max(a) keep (dense_rank last order by b) from t", "select max(a) from t"),
    ("snowflake", "select a from t asof join u match_condition (t.a >= u.a)", "… match_condition (t.a <= u.a)"),
    ("snowflake", "select try_to_timestamp(a, 'yy') from t", "select to_timestamp(a, 'yy') from t"),
    ("duckdb", "select a from t union by name select b from u", "select a from t union select b from u"),
    ("duckdb", "select a[1:] from t", "select a[:1] from t"),
    ("duckdb", "select a from t using sample 10%", "select a from t using sample 10 rows"),
    ("clickhouse", "select a from t group by a with totals", "select a from t group by a"),
    ("clickhouse", "select a from t order by a with fill", "select a from t order by a"),
    ("clickhouse", "select a from t global join u on t.a = u.a", "select a from t join u on t.a = u.a"),
    ("postgres", "select a from t for update skip locked", "select a from t for update"),
    ("postgres", "select a from t for update nowait", "select a from t for update skip locked"),
    (
        "postgres",
        "with recursive r as (select a from t) select a from r",
        "with r as (select a from t) select a from r",
    ),
    (
        "postgres",
        "with r as materialized (select 1) select * from r",
        "with r as not materialized (select 1) select * from r",
    ),
    ("postgres", "create unique index i on t (a)", "create index i on t (a)"),
    ("postgres", "create table if not exists t (a int)", "create table t (a int)"),
    ("postgres", "select substring(a from 2) from t", "select substring(a for 2) from t"),
    ("postgres", "select cast(a as foo) from t", "select cast(a as bar) from t"),
    ("postgres", "select db.t.a, other.t.a from db.t, other.t", "select db.t.a, db.t.a from db.t, other.t"),
    ("sqlite", "insert or replace into t values (1)", "insert into t values (1)"),
    ("mysql", "update t join u on t.a = u.a set t.b = 1", "update t set t.b = 1"),
    ("mysql", "update t join u on t.a = u.a set t.b = 1", "update t join u on t.a = u.b set t.b = 1"),
    ("mysql", "select lpad(a, 3, 'x') from t", "select rpad(a, 3, 'x') from t"),
    ("", "select a from ((t join u on t.a = u.a) join v on t.a = v.a)", "select a from (t join u on t.a = u.a)"),
    ("tsql", "select a from #t", "select a from t"),
]
if not IS_OLD:  # sqlglot 26 doesn't read it
    DIFFERENT.append(("postgres", "select a from t where a between symmetric 1 and 2", "… between 1 and 2"))


@pytest.mark.parametrize(("dialect", "one", "other"), DIFFERENT)
def test_what_changes_a_query_changes_its_key(dialect: str, one: str, other: str) -> None:
    spec = ProgramSpec(f"sql:{dialect}" if dialect else "sql", anonymize=False)
    if other.startswith("… "):
        other = other.removeprefix("… ")
        other = one[: one.index(" ".join(other.split()[:1]))] + other
    trees = spec.tree(one), spec.tree(other)
    assert None not in trees
    assert spec.key(one) != spec.key(other)


def test_a_field_of_a_column_is_no_name_of_a_database() -> None:
    query = "select x.b.c from t as x where x.b.c > 1"
    assert str(parse(query, "sql:bigquery")) == "select(t.b.c, from(t), where(gt(t.b.c, 1)))"
    assert parse(query, "sql:bigquery") == parse(query.replace("x", "other"), "sql:bigquery")
