"""What sqlglot's nodes hold: their arguments in order, what they read from, and what is noise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from sqlglot import exp

SET_OPERATIONS = ("union", "except", "intersect")
CHANGES = ("update", "delete", "merge")
QUERIES = ("select", *SET_OPERATIONS, *CHANGES)
# All that sqlglot knows about a statement is in its tree, except these arguments ("argument" or "node.argument").
_LEFT_OUT = {
    "a name that the writer chose": "alias pivot.columns",
    "how it is written": "datatype.nested literal.is_string limitoptions.rows coalesce.is_nvl coalesce.is_null "
    "array.bracket_notation array.value_constructor variant_extract",
    "said by the kind of join": "lateral.outer lateral.cross_apply",
    "what a dialect's operator or function does, whatever the query": "typed div.safe dpipe.safe concat.safe "
    "concat.coalesce concatws.safe concatws.coalesce concatws.flatten trycast.safe count.big_int round_input "
    "only_json_types scalar_only json_subtype null_propagation null_safe null_is_empty null_delim_is_null "
    "null_returns_null null_on_zero_variance null_if_no_match null_if_pos_overflow nulls_excluded check_null "
    "zero_on_all_null zero_is_msb zero_based zero_start empty_is_zero empty_if_group_missing "
    "empty_delimiter_returns_whole negative_length_returns_empty part_index_zero_as_one clamp_position "
    "casts_non_integer_decimals fractions_supported requires_int128 date_part_boundary preserve_end_of_month "
    "input_type_preserved struct_name_inheritance full_match uuid.is_string identify_pivot_strings "
    "prefixed_pivot_columns pivot_column_naming value_columns_first",
}
_NOT_SAID = frozenset(" ".join(_LEFT_OUT.values()).split())
# The words for True and False, where they aren't the argument's name, or nothing.
_TRUE = {"unnest.offset": "ordinality", "lock.wait": "nowait"}
_FALSE = {"lock.wait": "skip locked", "cte.materialized": "not materialized"}
_TABLE_PARTS = ("pivots", "sample", "version", "when", "changes", "partition", "ordinality", "only")
_PIVOT_PARTS = ("expressions", "field", "fields", "using", "group", "default_on_null")
_UNIT = re.compile(
    "(millennium|century|decade|year|quarter|month|week|day|hour|minute|second|millisecond|microsecond)s?"
    "|(iso)?(dow|doy|year)|epoch|weekday|dayof(week|month|year)|[dhimqswy]|dw|dy|mon|ww|iw",
    re.IGNORECASE,
)
_FORMAT = re.compile(r"%\w|yy|mm|dd|hh|mi", re.IGNORECASE)
# The order of a query's parts in its node; others follow.
_CLAUSES = (
    *("with", "this", "expression", "distinct", "expressions", "from", "where", "group", "having", "qualify"),
    *("order", "limit", "offset"),
)


@cache
def arguments(kind: Any) -> tuple[str, ...]:
    """The arguments that are in the tree, in their order there."""
    first = {"table": _TABLE_PARTS, "pivot": _PIVOT_PARTS, "drop": ("kind",)}.get(
        kind.key, _CLAUSES if kind.key in QUERIES else ()
    )
    names = sorted(kind.arg_types, key=lambda name: first.index(said) if (said := name.rstrip("_")) in first else 99)
    return tuple(name for name in names if not {name, f"{kind.key}.{name}"} & _NOT_SAID)


def argument(node: Any, name: str) -> Any:
    """The value of an argument, by its name in older versions."""
    # sqlglot 28 renamed `from` and `with` to `from_` and `with_`.
    value = node.args.get(name)
    return node.args.get(f"{name}_") if value is None else value


def is_node(value: Any) -> bool:
    """Whether a value is part of the syntax tree."""
    return hasattr(value, "arg_types")


def said_of(value: Any, name: str) -> str | None:
    """The word for an argument's plain value; for True and False it depends on the argument's name; None: no word."""
    if isinstance(value, bool):
        return _TRUE.get(name, name.partition(".")[2].strip("_").replace("_", " ")) if value else _FALSE.get(name)
    return None if value is None else str(getattr(value, "value", value)).lower()


def bare(node: Any) -> Any:
    """Strip what has no meaning: brackets, aliases."""
    while _means_nothing(node) and is_node(node.this):
        node = node.this
    return node


def _means_nothing(node: Any) -> bool:
    if node.key == "subquery":
        return not _said(node, "this", "alias")
    return node.key in ("paren", "alias") or (node.key == "datatypeparam" and not _said(node, "this"))


def _said(node: Any, *but: str) -> bool:
    """Whether a node has more arguments than these."""
    return any(value for name, value in node.args.items() if name not in but)


def relations_of(query: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a query reads from, each with its join (None for the first), joins in brackets flattened."""
    source = argument(query, "from")
    first = [] if source is None else [(source.this, None)]
    return flattened([*first, *joins_of(query, "joins"), *joins_of(query, "laterals")])


def joins_of(node: Any, name: str) -> list[tuple[Any, Any]]:
    """The relations joined to a node, each with its join."""
    joined = node.args.get(name) or []
    return [(item.this, item) if name == "joins" else (item, None) for item in joined]


def flattened(relations: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield relations, each with its join; those in brackets one by one."""
    stack = [*relations][::-1]
    while stack:
        relation, join = stack.pop()
        while is_node(relation):
            stack += [*joins_of(relation, "joins"), *joins_of(relation, "laterals")][::-1]
            inner, is_bare = relation.this, not _said(relation, "this", "joins", "laterals")
            if relation.key != "subquery" or not (is_bare and is_node(inner) and inner.key in ("table", "subquery")):
                yield relation, join
                break
            relation = inner


def word_of(node: Any) -> str:
    """The word that a string stands for as a unit or a format; empty if it is neither."""
    text = node.name if isinstance(node, exp.Literal) and node.is_string else ""
    return text.lower() if _UNIT.fullmatch(text) else text if _FORMAT.search(text) else ""


def first_select(query: Any) -> Any:
    """The first SELECT of a query, such as a union; None if there is none."""
    while query is not None and query.key in (*SET_OPERATIONS, "subquery", "paren"):
        query = query.this
    return query if query is not None and query.key == "select" else None
