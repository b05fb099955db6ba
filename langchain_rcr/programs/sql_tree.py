"""The tree of a SQL statement: sqlglot's syntax tree with the noise taken out.

- A node is named after its kind in lower case: select, from, join, where, eq, max. A chain of AND (OR) is one node,
  brackets vanish, `FROM a, b` is `FROM a CROSS JOIN b`, `OUTER APPLY` is a left join. ASC is the unmarked order, and so
  is the dialect's own order of NULLs.
- Tables are leaves under `from` and the joins; columns are leaves `table.column`. Aliases are names that the writer
  chose, so they don't appear: a column belongs to the table that its alias stands for (`subquery` and `cte` for what
  has no name itself), and an aliased expression is known by its column or kind. A column without a table gets it
  where the query reads just one. Two aliases of one table read the same.
- What changes a table as it is read (PIVOT, TABLESAMPLE, FOR SYSTEM_TIME, …) is below it, EXCEPT and REPLACE are below
  the star.
- Names are in lower case, unless quoted in a dialect where quoted names are case-sensitive.
- A string is a leaf in single quotes, a number a leaf as written; units and formats of date functions are words. In
  SQLite and in plain `sql`, a double-quoted name that something is compared with is a string: SQLite reads it so if no
  column has the name, and public text-to-SQL data (GeoQuery, Spider) writes strings that way.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from sqlglot import exp

from langchain_rcr.programs.anonymize import ANON_COLUMN, ANON_TABLE
from langchain_rcr.programs.tree import Tree, unfold

_COMPARISONS = ("eq", "neq", "gt", "gte", "lt", "lte", "like", "ilike", "glob", "is", "in", "between")
_SET_OPERATIONS = ("union", "except", "intersect")
_CHANGES = ("update", "delete", "merge")
_PLAIN_JOINS = frozenset({"INNER", "OUTER", "CROSS"})
_NOISE = frozenset({"alias", "over", "join_mark", "laterals"})
# Arguments that are True where a query says the word.
_FLAGS = {name: name for name in ("ignore", "overwrite", "only", "ordinality")} | {"offset": "ordinality"}
_TABLE_PARTS = ("pivots", "sample", "version", "when", "changes", "partition", "ordinality", "only")
_STAR_PARTS = ("except", "replace", "rename", "ilike")
_PIVOT_PARTS = ("expressions", "field", "fields", "using", "group", "default_on_null")
# Functions that take units or formats as strings, without underscores.
_DATED = re.compile(
    "strftime|strptime|timetostr|strto(time|date|unix)|unixtostr|fromunixtime|to(char|date|timestamp)"
    "|(parse|format)(date|time|datetime|timestamp)|(date|time)format|date(part|name|trunc)|trunc|extract"
)
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
_SEES_ALIASES = frozenset({"group", "having", "qualify", "order"})


@dataclass(slots=True)
class _Source:
    """What a table name or alias stands for, and what its aliased columns stand for."""

    label: str
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Scope:
    """The names that a query sees: its own, then those of the queries around it."""

    sources: ChainMap[str, _Source] = field(default_factory=ChainMap)
    ctes: ChainMap[str, _Source] = field(default_factory=ChainMap)
    derived: dict[str, _Source] = field(default_factory=dict)  # by the columns that subqueries and CTEs name
    aliases: dict[str, str] = field(default_factory=dict)
    sees_aliases: bool = False

    def source_of(self, column: str) -> _Source | None:
        """Return where a column without a table comes from: the only source, or the one that names it."""
        own = self.sources.maps[0]
        return next(iter(own.values())) if len(own) == 1 else self.derived.get(column)


# What `unfold` carries: a syntax node with its scope, or a label with what is below it.
_Piece = tuple[Any, Any]
_Node = tuple[str, Sequence[_Piece]]


class SqlExpander:
    """Expands one statement's syntax tree, node by node.

    Args:
        dialect: sqlglot's.
        double_quotes_are_strings: read a double-quoted name as a string where it is compared with something.
        names: keep the names of tables and columns; without them, queries to different databases look the same if they
            do the same.
    """

    def __init__(self, dialect: Any, double_quotes_are_strings: bool, *, names: bool = True) -> None:
        self._strategy, self._names = dialect.NORMALIZATION_STRATEGY.name, names
        self._nulls = dialect.NULL_ORDERING
        self._strings = double_quotes_are_strings
        self._opened: dict[int, _Scope] = {}
        self._rules: dict[str, Callable[[Any, _Scope], _Node]] = {
            "select": self._query,
            "column": lambda node, scope: (self._column_label(node, scope), self._star(node.this, scope)),
            "table": self._named,
            "identifier": lambda node, _: (self._fold(node) if names else ANON_COLUMN, []),
            "literal": lambda node, _: (_string(node.this) if node.is_string else node.this, []),
            "neg": self._negative,
            "null": lambda _node, _scope: ("null", []),
            "boolean": lambda node, _: (str(node.this).lower(), []),
            "star": lambda node, scope: ("*", self._star(node, scope)),
            "var": lambda node, _: (node.name.lower(), []),
            "datatype": self._data_type,
            "anonymous": lambda node, scope: (node.name.lower(), _worded(node, _pieces(node.expressions, scope))),
            "ordered": self._ordered,
            "pivot": self._pivot,
            "and": self._connector,
            "or": self._connector,
            **dict.fromkeys(_COMPARISONS, self._comparison),
            **dict.fromkeys((*_SET_OPERATIONS, *_CHANGES), self._query),
        }

    def tree(self, statement: Any) -> Tree:
        """Return the statement's tree."""
        return unfold((statement, _Scope()), self._expand)

    def _expand(self, piece: _Piece) -> _Node:
        if isinstance(piece[0], str):
            return piece
        node, scope = _bare(piece[0]), piece[1]
        rule = self._rules.get(node.key)
        return rule(node, scope) if rule else (node.key, self._below(node, scope))

    def _below(self, node: Any, scope: _Scope) -> list[_Piece]:
        return _worded(node, [piece for name in node.arg_types for piece in self._part(node, name, scope)])

    def _part(self, node: Any, name: str, scope: _Scope) -> list[_Piece]:
        value = node.args.get(name)
        if value is True:
            return [(_FLAGS[name], [])] if name in _FLAGS else []
        return [] if name in _NOISE else _pieces(value, scope)

    def _named(self, node: Any, scope: _Scope) -> _Node:
        """A table, or a function that returns one, with what is done to it."""
        is_function = _is_node(node.this) and not isinstance(node.this, exp.Identifier)
        label, below = self._expand((node.this, scope)) if is_function else (self._table(node, scope).label, ())
        return label, [*below, *(piece for name in _TABLE_PARTS for piece in self._part(node, name, scope))]

    def _star(self, node: Any, scope: _Scope) -> list[_Piece]:
        if not isinstance(node, exp.Star):
            return []
        parts: list[_Piece] = []
        for name in _STAR_PARTS:
            items = _arg(node, name)
            below = [
                (self._fold(item.args["alias"]) if self._names else ANON_COLUMN, [(item.this, scope)])
                if item.key == "alias"
                else (item, scope)
                for item in (items if isinstance(items, list) else filter(None, [items]))
            ]
            parts += [(name, below)] if below else []
        return parts

    def _ordered(self, node: Any, scope: _Scope) -> _Node:
        descends, nulls_first = bool(node.args.get("desc")), bool(node.args.get("nulls_first"))
        piece: _Piece = ("desc", [(node.this, scope)]) if descends else (node.this, scope)
        # sqlglot fills in what the dialect does by itself.
        if nulls_first == (self._nulls != "nulls_are_last" and descends != (self._nulls == "nulls_are_small")):
            return self._expand(piece)
        return f"nulls {'first' if nulls_first else 'last'}", [piece]

    def _query(self, node: Any, outer: _Scope) -> _Node:
        scope = self._open(node, outer)
        late = replace(scope, sees_aliases=True)
        below: list[_Piece] = []
        parts = {name.rstrip("_"): value for name, value in node.args.items() if value is not None}
        for name in _clauses(tuple(node.arg_types)):
            value = parts.get(name)
            if value is None:
                continue
            if name == "with":
                below.append(("with", [("cte", [(cte.this, scope)]) for cte in value.expressions]))
            elif name == "from":
                below.extend(self._from(node, scope))
            else:
                below.extend(_pieces(value, late if name in _SEES_ALIASES else scope))
        keeps_all = node.key in _SET_OPERATIONS and node.args.get("distinct") is False
        return node.key + (" all" if keeps_all else ""), below

    def _from(self, node: Any, scope: _Scope) -> list[_Piece]:
        tables: list[_Piece] = []
        joins: list[_Piece] = []
        for relation, join in _relations(node):
            words = [] if join is None else [str(join.args.get(name) or "") for name in ("method", "side", "kind")]
            if relation.key == "lateral" and (relation.args.get("outer") or relation.args.get("cross_apply") is False):
                words = ["left"]
            kind = " ".join(word.lower() for word in words if word and word.upper() not in _PLAIN_JOINS)
            condition = [] if join is None else _pieces([join.args.get("on"), *(join.args.get("using") or [])], scope)
            if kind or condition:
                joins.append((f"{kind} join".lstrip(), [(relation, scope), *condition]))
            else:
                tables.append((relation, scope))
        return [("from", tables), *joins]

    def _comparison(self, node: Any, scope: _Scope) -> _Node:
        subject, *others = self._below(node, scope)
        return node.key, [subject, *[self._operand(piece) for piece in others]]

    def _operand(self, piece: _Piece) -> _Piece:
        if self._strings and isinstance(piece[0], exp.Column) and not piece[0].table:
            name = piece[0].this
            if isinstance(name, exp.Identifier) and name.quoted:
                return _string(name.name), []
        return piece

    def _pivot(self, node: Any, scope: _Scope) -> _Node:
        parts = [piece for name in _PIVOT_PARTS for piece in _pieces(node.args.get(name), scope)]
        if not node.args.get("unpivot"):
            return "pivot", parts
        for part, _ in parts:
            # Names of new columns, which older sqlglot takes for columns of the table.
            new = part.this if part.key == "in" else part
            if new.key == "column":
                new.replace(new.this)
        return "unpivot", [piece for name in _PIVOT_PARTS for piece in _pieces(node.args.get(name), scope)]

    def _connector(self, node: Any, scope: _Scope) -> _Node:
        parts: list[_Piece] = []
        stack = [node]
        while stack:
            top = _bare(stack.pop())
            if top.key == node.key:
                stack += [top.expression, top.this]
            else:
                parts.append((top, scope))
        return node.key, parts

    def _negative(self, node: Any, scope: _Scope) -> _Node:
        inner = _bare(node.this)
        is_number = isinstance(inner, exp.Literal) and not inner.is_string
        return (f"-{inner.this}", []) if is_number else ("neg", [(inner, scope)])

    def _data_type(self, node: Any, scope: _Scope) -> _Node:
        kind = getattr(node.this, "value", None)
        if kind is None:
            return "datatype", self._below(node, scope)
        return str(kind).lower(), _pieces(node.expressions, scope)

    def _fold(self, identifier: Any) -> str:
        name = str(identifier.name)
        heeds_case = identifier.args.get("quoted") and self._strategy in ("LOWERCASE", "UPPERCASE")
        if heeds_case and not (self._strategy == "UPPERCASE" and name.isupper()):
            return name
        return name.lower()

    def _column_label(self, node: Any, scope: _Scope) -> str:
        parts = self._column(node, scope)
        is_alias = not parts[0] and parts[1] in scope.aliases.values()
        return ".".join(filter(None, parts)) if self._names or is_alias else "*" if parts[1] == "*" else ANON_COLUMN

    def _column(self, node: Any, scope: _Scope) -> tuple[str, str]:
        name = "*" if isinstance(node.this, exp.Star) else self._fold(node.this)
        if node.args.get("table") is not None:
            table = self._fold(node.args["table"])
            source = scope.sources.get(table)
        elif scope.sees_aliases and name in scope.aliases:
            return "", scope.aliases[name]
        else:
            table, source = "", scope.source_of(name)
        return (table, name) if source is None else (source.label, source.columns.get(name, name))

    def _table(self, node: Any, scope: _Scope) -> _Source:
        parts = [self._fold(part) for part in node.parts]
        return (len(parts) == 1 and scope.ctes.get(parts[0])) or _Source(".".join(parts) if self._names else ANON_TABLE)

    def _open(self, query: Any, outer: _Scope) -> _Scope:
        """Return what a query, and what is inside it, sees."""
        if id(query) in self._opened:
            return self._opened[id(query)]
        scope = self._opened[id(query)] = _Scope(_within(outer.sources), _within(outer.ctes))
        ctes = _arg(query, "with")
        for cte in ctes.expressions if ctes is not None else ():
            source = scope.ctes[self._fold(cte.args["alias"].this)] = _Source("cte")
            source.columns = self._columns(cte, scope)
        targets = [query.args.get(name) for name in ("this", "using")] if query.key in _CHANGES else []
        for relation in (*targets, *(relation for relation, _ in _relations(query))):
            if _is_node(relation):
                self._enter(relation, scope)
        if query.key == "select":
            aliased = [item for item in query.expressions if item.key == "alias"]
            scope.aliases = {self._fold(item.args["alias"]): self._meaning(item, scope, True) for item in aliased}
        elif query.key in _SET_OPERATIONS and query.args.get("order") is not None:
            first = _first_select(query)
            scope.aliases = self._open(first, scope).aliases if first is not None else {}
        return scope

    def _enter(self, relation: Any, scope: _Scope) -> None:
        """Add a table, or a relation in its place, to the sources."""
        pivots = relation.args.get("pivots") or [relation]
        alias = pivots[-1].args.get("alias") or relation.args.get("alias")
        name = alias.this if alias is not None and alias.this else relation.this
        if isinstance(relation, exp.Table) and isinstance(relation.this, exp.Identifier):
            source = self._table(relation, scope)
        elif isinstance(relation, exp.Subquery):
            source = _Source("subquery", self._columns(relation, scope))
        else:
            source = _Source(self._expand((relation, scope))[0])
        known_as = self._fold(name) if isinstance(name, exp.Identifier) else f" {len(scope.sources.maps[0])}"
        scope.sources[known_as] = source
        scope.derived.update(dict.fromkeys(source.columns, source))

    def _columns(self, derived: Any, outer: _Scope) -> dict[str, str]:
        """Return what each column of a subquery or CTE means."""
        select = _first_select(derived.this)
        if select is None:
            return {}
        scope = self._open(select, outer)
        alias = derived.args.get("alias")
        names = list(alias.args.get("columns") or []) if alias is not None else []
        columns = {}
        for index, item in enumerate(select.expressions):
            name = names[index] if index < len(names) else item.args.get("alias") or item.this
            if isinstance(name, exp.Identifier):
                columns[self._fold(name)] = self._meaning(item, scope)
        return columns

    def _meaning(self, item: Any, scope: _Scope, with_table: bool = False) -> str:
        node = _bare(item)
        if node.key == "column" and not self._names:
            return self._column_label(node, scope)
        if node.key == "column":
            return ".".join(part for part in self._column(node, scope)[0 if with_table else 1 :] if part)
        return "literal" if node.key == "literal" else self._expand((node, scope))[0]


@cache
def _clauses(arguments: tuple[str, ...]) -> tuple[str, ...]:
    names = dict.fromkeys((*_CLAUSES, *(name.rstrip("_") for name in arguments)))
    return tuple(name for name in names if name not in _NOISE and name != "joins")


def _within(names: ChainMap[str, _Source]) -> ChainMap[str, _Source]:
    # Without the maps that are empty: in a chain of 3,000 unions, all but a query's own.
    return ChainMap({}, *filter(None, names.maps))


def _arg(node: Any, name: str) -> Any:
    # sqlglot 28 renamed `from` and `with` to `from_` and `with_`.
    value = node.args.get(name)
    return node.args.get(f"{name}_") if value is None else value


def _is_node(value: Any) -> bool:
    return hasattr(value, "arg_types")


def _pieces(value: Any, scope: _Scope) -> list[_Piece]:
    pieces: list[_Piece] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            pieces.append((item.lower(), []))
        elif _is_node(item):
            pieces.append((item, scope))
    return pieces


def _bare(node: Any) -> Any:
    """Strip what has no meaning: brackets, aliases."""
    while _means_nothing(node) and _is_node(node.this):
        node = node.this
    return node


def _means_nothing(node: Any) -> bool:
    if node.key == "subquery":
        return not any(value for name, value in node.args.items() if name not in ("this", "alias"))
    return node.key in ("paren", "alias", "datatypeparam")


def _relations(query: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a query reads from, each with its join (None for the first), joins in brackets flattened."""
    source = _arg(query, "from")
    stack = [] if source is None else [(source.this, None)]
    stack += [(join.this, join) for join in query.args.get("joins") or []]
    stack += [(lateral, None) for lateral in query.args.get("laterals") or []]
    stack.reverse()
    while stack:
        relation, join = stack.pop()
        while _is_node(relation) and relation.key == "subquery" and not relation.alias:
            if not _is_node(relation.this) or relation.this.key not in ("table", "subquery"):
                break
            relation = relation.this
        if _is_node(relation):
            stack += [(inner.this, inner) for inner in reversed(relation.args.get("joins") or [])]
            yield relation, join


def _worded(node: Any, below: list[_Piece]) -> list[_Piece]:
    """What is below a node, with the units and formats of a date function as words."""
    name = (node.name if node.key == "anonymous" else node.key).replace("_", "").lower()
    if not _DATED.fullmatch(name) and not isinstance(node, exp.TimeUnit):
        return below
    return [(_word(piece[0]), []) if _word(piece[0]) else piece for piece in below]


def _word(node: Any) -> str:
    """The word that a string is as a unit or a format; empty where it is neither."""
    text = node.name if isinstance(node, exp.Literal) and node.is_string else ""
    return text.lower() if _UNIT.fullmatch(text) else text if _FORMAT.search(text) else ""


def _first_select(query: Any) -> Any:
    while query is not None and query.key in (*_SET_OPERATIONS, "subquery", "paren"):
        query = query.this
    return query if query is not None and query.key == "select" else None


def _string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
