"""The tree of a SQL statement: sqlglot's syntax tree without the noise.

- A node is named after its kind in lower case: select, from, join, where, eq, max. A chain of AND (OR) is one node,
  brackets vanish, `FROM a, b` is `FROM a CROSS JOIN b`, `OUTER APPLY` is a left join. ASC is left out, and so is the
  dialect's own order of NULLs.
- Tables are leaves under `from` and the joins; columns are leaves `table.column`. Aliases are names that the writer
  chose, so they don't appear: a column belongs to the table that its alias stands for (`subquery` and `cte` for what
  has no name itself), and an aliased expression goes by its column or kind. A column without a table gets one if the
  query reads just one. Two aliases of one table look the same.
- What changes a table as it is read (PIVOT, TABLESAMPLE, …) is below it; EXCEPT and REPLACE are below the star.
- Names are in lower case, unless quoted in a dialect where quoted names are case-sensitive.
- A string is a leaf in single quotes, a number a leaf as written; units and formats of date functions are words. In
  SQLite and in plain `sql`, a double-quoted name in a comparison is a string: SQLite reads it so if no column has the
  name, and public text-to-SQL data (GeoQuery, Spider) writes strings that way.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlglot import exp

from langchain_rcr.programs.sql_nodes import (
    CHANGES,
    QUERIES,
    SET_OPERATIONS,
    argument,
    arguments,
    bare,
    first_select,
    flattened,
    is_node,
    joins_of,
    relations_of,
    said_of,
    word_of,
)
from langchain_rcr.programs.tree import Tree, unfold

ANON_TABLE, ANON_COLUMN = "ANON_TABLE", "ANON_COLUMN"
PLACEHOLDER = "__jinja"
"""Prefix of a name that stands for something other than a column or table."""
_COMPARISONS = ("eq", "neq", "gt", "gte", "lt", "lte", "like", "ilike", "glob", "is", "in", "between")
_BINARY = ("bytestring", "hexstring", "bitstring")
_PLAIN_JOINS = frozenset({"INNER", "OUTER", "CROSS"})
# Nodes whose parts are identified by their kind, so that none needs a name when an earlier one is missing.
_BY_KIND = frozenset({*QUERIES, "insert", "create", "case", "table", "in", "limit", "offset", "order"})
_STAR_PARTS = ("except", "replace", "rename", "ilike")
# Functions that take units or formats as strings, without underscores.
_DATED = re.compile(
    "strftime|strptime|timetostr|strto(time|date|unix)|unixtostr|fromunixtime|to(char|date|timestamp)"
    "|(parse|format)(date|time|datetime|timestamp)|(date|time)format|date(part|name|trunc)|trunc|extract"
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
    derived: dict[str, _Source] = field(default_factory=dict)  # keyed by the columns that subqueries and CTEs name
    aliases: dict[str, str] = field(default_factory=dict)
    sees_aliases: bool = False

    def source_of(self, column: str) -> _Source | None:
        """Return the source of a column without a table: the only source, or the one that names it."""
        own = self.sources.maps[0]
        return next(iter(own.values())) if len(own) == 1 else self.derived.get(column)


# What `unfold` handles: a syntax node with its scope, or a label with what is below it.
_Piece = tuple[Any, Any]
_Node = tuple[str, Sequence[_Piece]]


class SqlExpander:
    """Expands one statement's syntax tree, node by node.

    Args:
        dialect: sqlglot's.
        double_quotes_are_strings: read a double-quoted name in a comparison as a string.
        names: keep the names of tables and columns; without them, queries on different databases look the same if they
            do the same.
    """

    def __init__(self, dialect: Any, double_quotes_are_strings: bool, *, names: bool = True) -> None:
        self._strategy, self._names = dialect.NORMALIZATION_STRATEGY.name, names
        self._nulls = dialect.NULL_ORDERING
        self._strings = double_quotes_are_strings
        self._opened: dict[int, _Scope] = {}
        self._flattened: set[int] = set()  # the nodes whose joins appear elsewhere
        self._rules: dict[str, Callable[[Any, _Scope], _Node]] = {
            "column": self._column_node,
            "table": self._named,
            "identifier": lambda node, _: (self._fold(node) if names else ANON_COLUMN, []),
            "literal": lambda node, _: (_string(node.this) if node.is_string else node.this, []),
            **dict.fromkeys(("rawstring", "national"), lambda node, _: (_string(node.name), [])),
            **dict.fromkeys(_BINARY, self._binary),
            "neg": self._negative,
            "boolean": lambda node, _: (str(node.this).lower(), []),
            "star": lambda node, scope: ("*", self._star(node, scope)),
            "var": lambda node, _: (node.name.lower(), []),
            "datatype": self._data_type,
            "anonymous": lambda node, scope: (node.name.lower(), self._below(node, scope, "this")),
            "escape": self._escape,
            "ordered": self._ordered,
            "pivot": self._pivot,
            "and": self._connector,
            "or": self._connector,
            **dict.fromkeys(_COMPARISONS, lambda node, scope: (node.key, self._compared(node, scope))),
            **dict.fromkeys(QUERIES, self._query),
        }
        if type(dialect).__name__ == "SQLite":  # there IS compares anything, which newer sqlglot calls null-safe
            self._rules["nullsafeeq"] = lambda node, scope: ("is", self._compared(node, scope))
            self._rules["nullsafeneq"] = lambda node, scope: ("not", [("is", self._compared(node, scope))])

    def tree(self, statement: Any) -> Tree:
        """Return the tree of a statement, or of a label with the statements and labels below it."""
        return unfold((statement, _Scope()), self._expand)

    def _expand(self, piece: _Piece) -> _Node:
        node, scope = piece
        if isinstance(node, str):
            return node, scope
        if isinstance(node, tuple):
            return node[0], [(each, _Scope()) for each in node[1]]
        node = bare(node)
        rule = self._rules.get(node.key)
        expanded = rule(node, scope) if rule else (node.key, self._below(node, scope))
        # To sqlglot, NOT LIKE is a LIKE with this argument; to older versions, a NOT with LIKE below it.
        return ("not", [expanded]) if node.args.get("negate") else expanded

    def _below(self, node: Any, scope: _Scope, *taken: str) -> list[_Piece]:
        """What is below a node, except some arguments, with the units and formats of a date function as words."""
        pieces: list[_Piece] = []
        names, lacks = arguments(node.__class__), False
        for name in names if node.args.keys() <= node.arg_types.keys() else dict.fromkeys((*names, *node.args)):
            if name in taken:
                continue
            part = self._part(node, name, scope)
            if not part:
                lacks = lacks or not node.arg_types.get(name)
            elif lacks and node.key not in _BY_KIND and is_node(node.args[name]) and not node.arg_types.get(name):
                # `a[:1]` lacks what `a[1:]` has in its place.
                said = name.rstrip("_")
                is_known = node.args[name].key.startswith(("var", said.replace("_", "")))
                part = part if is_known else [(said, part)]
            pieces += part
        function = (node.name if node.key == "anonymous" else node.key).replace("_", "").lower()
        if _DATED.fullmatch(function) or isinstance(node, exp.TimeUnit):
            return [(word, []) if (word := word_of(piece[0])) else piece for piece in pieces]
        return pieces

    def _part(self, node: Any, name: str, scope: _Scope) -> list[_Piece]:
        value = node.args.get(name)
        if value is None or name == "negate":
            return []
        if name in ("joins", "laterals"):
            return [] if id(node) in self._flattened else self._joined(flattened(joins_of(node, name)), scope)
        return _pieces(value, scope, f"{node.key}.{name}")

    def _column_node(self, node: Any, scope: _Scope) -> _Node:
        below = self._star(node.this, scope)
        return self._column_label(node, scope), [*below, *self._below(node, scope, "this", "table", "db", "catalog")]

    def _named(self, node: Any, scope: _Scope) -> _Node:
        """A table, or a function that returns one, with its modifiers."""
        is_function = is_node(node.this) and not isinstance(node.this, exp.Identifier)
        label, below = self._expand((node.this, scope)) if is_function else (self._table(node, scope).label, ())
        return label, [*below, *self._below(node, scope, "this", "db", "catalog")]

    def _star(self, node: Any, scope: _Scope) -> list[_Piece]:
        if not isinstance(node, exp.Star):
            return []
        parts: list[_Piece] = []
        for name in _STAR_PARTS:
            items = argument(node, name)
            below = [
                (self._fold(item.args["alias"]) if self._names else ANON_COLUMN, [(item.this, scope)])
                if item.key == "alias"
                else (item, scope)
                for item in (items if isinstance(items, list) else filter(None, [items]))
            ]
            parts += [(name, below)] if below else []
        return parts + self._below(node, scope, *_STAR_PARTS, *(f"{name}_" for name in _STAR_PARTS))

    def _ordered(self, node: Any, scope: _Scope) -> _Node:
        descends, nulls_first = bool(node.args.get("desc")), bool(node.args.get("nulls_first"))
        piece: _Piece = ("desc", [(node.this, scope)]) if descends else (node.this, scope)
        # sqlglot fills in the dialect's default.
        if nulls_first != (self._nulls != "nulls_are_last" and descends != (self._nulls == "nulls_are_small")):
            piece = (f"nulls {'first' if nulls_first else 'last'}", [piece])
        rest = self._below(node, scope, "this", "desc", "nulls_first")
        return ("ordered", [piece, *rest]) if rest else self._expand(piece)

    def _query(self, node: Any, outer: _Scope) -> _Node:
        scope = self._open(node, outer)
        late = replace(scope, sees_aliases=True)
        below: list[_Piece] = []
        for name in arguments(node.__class__):
            value = node.args.get(name)
            if value is None or (name == "distinct" and isinstance(value, bool)):
                continue
            if name in ("with", "with_"):
                ctes: list[_Piece] = [("cte", self._below(cte, scope)) for cte in value.expressions]
                below.append(("with", [*self._below(value, scope, "expressions"), *ctes]))
            elif name in ("from", "from_"):
                self._flattened.add(id(node))
                below += self._joined(relations_of(node), scope)
            else:
                below += self._part(node, name, late if name in _SEES_ALIASES else scope)
        keeps_all = node.key in SET_OPERATIONS and node.args.get("distinct") is False
        return node.key + (" all" if keeps_all else ""), below

    def _joined(self, relations: Iterable[tuple[Any, Any]], scope: _Scope) -> list[_Piece]:
        tables: list[_Piece] = []
        joins: list[_Piece] = []
        for relation, join in relations:
            self._flattened.add(id(relation))
            words = [] if join is None else [str(join.args.get(name) or "") for name in ("method", "side", "kind")]
            if relation.key == "lateral" and (relation.args.get("outer") or relation.args.get("cross_apply") is False):
                words = ["left"]
            kind = " ".join(word.lower() for word in words if word and word.upper() not in _PLAIN_JOINS)
            condition = [] if join is None else self._below(join, scope, "this", "method", "side", "kind")
            if kind or condition:
                joins.append((f"{kind} join".lstrip(), [(relation, scope), *condition]))
            else:
                tables.append((relation, scope))
        return [("from", tables), *joins] if tables else joins

    def _compared(self, node: Any, scope: _Scope) -> list[_Piece]:
        subject, *others = self._below(node, scope)
        return [subject, *[self._operand(piece) for piece in others]]

    def _escape(self, node: Any, scope: _Scope) -> _Node:
        """LIKE with its escape character; in `a NOT LIKE b ESCAPE c`, too, the whole is negated."""
        below = self._below(node, scope)
        if not node.this.args.get("negate"):
            return "escape", below
        return "not", [("escape", [*self._expand(below[0])[1], *below[1:]])]

    def _operand(self, piece: _Piece) -> _Piece:
        if self._strings and isinstance(piece[0], exp.Column) and not piece[0].table:
            name = piece[0].this
            if isinstance(name, exp.Identifier) and name.quoted:
                return _string(name.name), []
        return piece

    def _pivot(self, node: Any, scope: _Scope) -> _Node:
        if not node.args.get("unpivot"):
            return "pivot", self._below(node, scope)
        for part, _ in self._below(node, scope, "unpivot"):
            # Names of new columns, which older sqlglot mistakes for columns of the table.
            new = part.this if getattr(part, "key", "") == "in" else part
            if getattr(new, "key", "") == "column":
                new.replace(new.this)
        return "unpivot", self._below(node, scope, "unpivot")

    def _connector(self, node: Any, scope: _Scope) -> _Node:
        parts: list[_Piece] = []
        stack = [node]
        while stack:
            top = bare(stack.pop())
            if top.key == node.key:
                stack += [top.expression, top.this]
            else:
                parts.append((top, scope))
        return node.key, parts

    def _binary(self, node: Any, scope: _Scope) -> _Node:
        return node.key, [(_string(node.name), []), *self._below(node, scope, "this")]

    def _negative(self, node: Any, scope: _Scope) -> _Node:
        inner = bare(node.this)
        is_number = isinstance(inner, exp.Literal) and not inner.is_string
        return (f"-{inner.this}", []) if is_number else ("neg", [(inner, scope)])

    def _data_type(self, node: Any, scope: _Scope) -> _Node:
        kind = getattr(node.this, "value", None)
        if kind is None:
            return "datatype", self._below(node, scope)
        return str(kind).lower(), self._below(node, scope, "this")

    def _fold(self, identifier: Any) -> str:
        name = str(identifier.name)
        if identifier.args.get("temporary") or identifier.args.get("global") or identifier.args.get("global_"):
            name = f"#{name}" if identifier.args.get("temporary") else f"##{name}"  # as T-SQL writes it
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
            parts = [self._fold(node.args[part]) for part in ("catalog", "db", "table") if node.args.get(part)]
            table, source = ".".join(parts), scope.sources.get(parts[-1])
            if len(parts) > 1 and (source is None or not f".{source.label}".endswith(f".{table}")):
                # A field of a field, or one of several tables of this name.
                source, head = None, scope.sources.get(parts[0])
                table = table if head is None else ".".join([head.label, *parts[1:]])
        elif scope.sees_aliases and name in scope.aliases:
            return "", scope.aliases[name]
        else:
            table, source = "", None if name.startswith(PLACEHOLDER) else scope.source_of(name)
        return (table, name) if source is None else (source.label, source.columns.get(name, name))

    def _table(self, node: Any, scope: _Scope) -> _Source:
        parts = [self._fold(part) for part in node.parts]
        return (len(parts) == 1 and scope.ctes.get(parts[0])) or _Source(".".join(parts) if self._names else ANON_TABLE)

    def _open(self, query: Any, outer: _Scope) -> _Scope:
        """Return the scope of a query and what is inside it."""
        if id(query) in self._opened:
            return self._opened[id(query)]
        scope = self._opened[id(query)] = _Scope(_within(outer.sources), _within(outer.ctes))
        ctes = argument(query, "with")
        for cte in ctes.expressions if ctes is not None else ():
            source = scope.ctes[self._fold(cte.args["alias"].this)] = _Source("cte")
            source.columns = self._columns(cte, scope)
        targets = [query.args.get(name) for name in ("this", "using")] if query.key in CHANGES else []
        for relation, _ in (*flattened([(target, None) for target in targets]), *relations_of(query)):
            self._enter(relation, scope)
        if query.key == "select":
            aliased = [item for item in query.expressions if item.key == "alias"]
            scope.aliases = {self._fold(item.args["alias"]): self._meaning(item, scope, True) for item in aliased}
        elif query.key in SET_OPERATIONS and query.args.get("order") is not None:
            first = first_select(query)
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
        select = first_select(derived.this)
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
        node = bare(item)
        if node.key == "column" and not self._names:
            return self._column_label(node, scope)
        if node.key == "column":
            return ".".join(part for part in self._column(node, scope)[0 if with_table else 1 :] if part)
        return "literal" if node.key == "literal" else self._expand((node, scope))[0]


def _within(names: ChainMap[str, _Source]) -> ChainMap[str, _Source]:
    # Drops empty maps: in a chain of 3,000 unions, all but a query's own.
    return ChainMap({}, *filter(None, names.maps))


def _pieces(value: Any, scope: _Scope, name: str = "") -> list[_Piece]:
    """What represents the value of an argument; for True and False, by the argument's name."""
    if is_node(value):
        return [(value, scope)]
    if isinstance(value, list):
        return [piece for item in value for piece in _pieces(item, scope)]
    word = said_of(value, name)
    return [] if word is None else [(word, [])]


def _string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
