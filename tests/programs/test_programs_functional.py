from __future__ import annotations

import time

import pytest

from langchain_rcr.programs import Tree, parse


def t(label: str, *children: Tree) -> Tree:
    return Tree(label, children)


GOOD = {
    "answer(city(loc_2(stateid('virginia'))))": t("answer", t("city", t("loc_2", t("stateid", t("'virginia'"))))),
    "cityid('new york', _)": t("cityid", t("'new york'"), t("_")),
    "state(all)": t("state", t("all")),
    "all": t("all"),
    "3": t("3"),
    "f(-1.5e3, x)": t("f", t("-1.5e3"), t("x")),
    "'a value'": t("'a value'"),
    "count ( with_relation ( filter ( black , find ( mouse ) ) , playing with , find ( dog ) ) )": t(
        "count",
        t(
            "with_relation",
            t("filter", t("black"), t("find", t("mouse"))),
            t("playing", t("with")),
            t("find", t("dog")),
        ),
    ),
    "query_attr [ color ] ( find ( cat ) )": t("query_attr", t("color"), t("find", t("cat"))),
    "scene ( )": t("scene"),
    "f[a, b](c)": t("f", t("a"), t("b"), t("c")),
    "f[a][b]": t("f", t("a"), t("b")),
    "f[g[a](b)](c)": t("f", t("g", t("a"), t("b")), t("c")),
    "f[](x)": t("f", t("x")),
    "f[x]()": t("f", t("x")),
    "playing with": t("playing", t("with")),
    "playing with ( x )": t("playing", t("with", t("x"))),
    "f(playing well with [a] (b), c)": t("f", t("playing", t("well", t("with", t("a"), t("b")))), t("c")),
    " \n f ( a )\t": t("f", t("a")),
    "f('a, (b]')": t("f", t("'a, (b]'")),
    r"f('it\'s', 'it''s', ''," + r' "say \"a\"")': t("f", t(r"'it\'s'"), t("'it''s'"), t("''"), t(r'"say \"a\""')),
    "f(coeur_d'alene, x)": t("f", t("coeur_d'alene"), t("x")),
    "größe(中)": t("größe", t("中")),
}

BAD = [
    "",
    "   ",
    "f(a,)",
    "f(,a)",
    "f(a,,b)",
    "f(,)",
    "f(a",
    "f(a))",
    "f)",
    "(a)",
    "((a))",
    "()",
    "[a]",
    "f([a])",
    "f(a]",
    "f[a)",
    "f[a",
    "f[a,](b)",
    "f(a) b",
    "f(a)(b)",
    "f(a)[b]",
    "f[a] b",
    "a, b",
    ",",
    "f(a) ,",
    "'a' b",
    "a 'b'",
    "'a' 'b'",
    "'f'(x)",
    "'abc",
    'f("x',
    "f('x)",
    "f(a) 'x'",
    "f[a] 'x'",
]


@pytest.mark.parametrize("text", GOOD)
def test_tree(text: str) -> None:
    assert parse(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_what_is_not_a_program_is_none(text: str) -> None:
    assert parse(text) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("f(" * 10_000 + "x" + ")" * 10_000, 10_001),
        ("f ( g [ a ] ( " * 3_000 + "x" + " ) ) " * 3_000, 9_001),
        ("f('" + "x" * 1_000_000 + "')", 2),
        ("f(" + "a," * 99_999 + "a)", 100_001),
        ("x" * 1_000_000, 1),
        ("f(" * 10_000, None),
        ("(" * 1_000_000, None),
        (")" * 1_000_000, None),
        ("'" * 1_000_001, None),
        (r"'\'" * 300_000, None),
        ("'a" + r"\'" * 500_000, None),
        (" " * 1_000_000, None),
        ("f(a)" * 250_000, None),
    ],
    ids=lambda value: f"{value[:12]}…" if isinstance(value, str) else str(value),
)
def test_deep_or_huge_text_is_quick(text: str, nodes: int | None) -> None:
    started = time.process_time()
    tree = parse(text)
    assert time.process_time() - started < 2
    assert (None if tree is None else len(tree)) == nodes


def test_a_text_that_is_no_str_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        parse(3)  # type: ignore[arg-type]
