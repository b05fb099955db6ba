"""Python calls and expressions, parsed with the standard library's `ast`; nothing is evaluated.

- `f(x, key=1)` is the node `f` with the children x and `key=` → 1; keyword arguments are sorted by name, since their
  order means nothing. `a.b(c)` is the node `a.b`; a method of anything but a name is `.method`, with that object as its
  first child: `f(x).g(y)` is `.g` with the children f → x and y.
- Operators are their signs, with their operands below; `a < b < c` is `<,<`. A number with a sign is one leaf.
- Displays are `list`, `tuple`, `set` and `dict` (a child `:` per entry), and these names `builtins.list` and so on;
  subscripts are `[]`.
- Everything else is named after its `ast` class in lower case, with the names it carries as leaves in front. What could
  be mistaken for another part is below its own name: `x[:1]` has `upper` where `x[1:]` has none. Several statements are
  the children of `module`.
- A string is a leaf in Python's own quoting, a number is a leaf as Python writes it.
"""

from __future__ import annotations

import ast
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from langchain_rcr.programs.languages import About
from langchain_rcr.programs.tree import Tree, unfold

logger = logging.getLogger(__name__)

_MAX_CHARACTERS = 400_000  # takes about a second if the statements are as short as possible
_MAX_FIELDS = 8_000  # of f-strings: Python up to 3.11 takes quadratic time, 11 s for 130,000
_F_STRING = re.compile(r"""(?<!\w)(?:[fF][rR]?|[rR][fF])['"]""")


_SIGNS: dict[type[ast.AST], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.MatMult: "@", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"},
    **{ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>", ast.BitOr: "|", ast.BitXor: "^", ast.BitAnd: "&"},
    **{ast.UAdd: "+", ast.USub: "-", ast.Invert: "~", ast.Not: "not", ast.And: "and", ast.Or: "or"},
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
}

_DISPLAYS = ("list", "tuple", "set", "dict")
_PARAMETERS = ("posonlyargs", "vararg", "kwonlyargs", "kw_defaults", "kwarg", "defaults")
_APART = {*_PARAMETERS, "bases", "decorator_list", "returns", "orelse", "finalbody"}
"""Fields that follow lists: without their names, what is in them would seem to be in the list."""

_NUMBERS = ("conversion", "is_async", "level")
"""Fields that tell `f"{x!r}"` from `f"{x}"`, `async for` from `for`, and `from ..` from `from .`."""

# What `unfold` handles: a piece of syntax, or a (label, pieces) pair for a node that ast doesn't have.
_Piece = ast.AST | tuple[str, Sequence[Any]]


class PythonParser:
    """Parses Python expressions and statements (see the module's rules)."""

    about = About(like_prose=True, fences=("py",))

    def parse(self, text: str) -> Tree | None:
        """Return the program's tree, or None for what is not Python, or too much for Python's own parser."""
        has_fields = text.count("{") > _MAX_FIELDS and _F_STRING.search(text)
        if len(text) > _MAX_CHARACTERS or has_fields:
            said = f"f-strings of more than {_MAX_FIELDS:,} fields" if has_fields else f"more than {_MAX_CHARACTERS:,}"
            logger.warning("Python of %d characters is not read: %s", len(text), said)
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as an invalid escape in a string
                module = ast.parse(text.strip())
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
        program: _Piece = module.body[0] if len(module.body) == 1 else module
        return unfold(program, _expand) if module.body else None


def _expand(piece: _Piece) -> tuple[str, Sequence[_Piece]]:
    while isinstance(piece, ast.Expr):
        piece = piece.value
    if isinstance(piece, tuple):
        return piece
    return _RULES.get(type(piece), _other)(piece)


def _call(node: ast.Call) -> tuple[str, Sequence[_Piece]]:
    named: list[_Piece] = [
        ("**" if keyword.arg is None else f"{keyword.arg}=", [keyword.value])
        for keyword in sorted(node.keywords, key=lambda keyword: (keyword.arg is None, keyword.arg or ""))
    ]
    is_named = isinstance(node.func, ast.Name | ast.Attribute)
    label, below = _expand(node.func) if is_named else ("call", [node.func])
    return label, [*below, *node.args, *named]


def _attribute(node: ast.Attribute) -> tuple[str, Sequence[_Piece]]:
    parts, owner = [node.attr], node.value
    while isinstance(owner, ast.Attribute):
        parts.append(owner.attr)
        owner = owner.value
    if isinstance(owner, ast.Name):
        return ".".join([owner.id, *reversed(parts)]), []
    return f".{node.attr}", [node.value]


def _unary(node: ast.UnaryOp) -> tuple[str, Sequence[_Piece]]:
    sign, operand = _SIGNS[type(node.op)], node.operand
    if sign in "+-" and isinstance(operand, ast.Constant) and type(operand.value) in (int, float, complex):
        return f"{sign}{_written(operand.value)}".removeprefix("+"), []
    return sign, [operand]


def _written(value: object) -> str:
    try:
        return "..." if value is ... else repr(value)
    except ValueError:  # an integer of over 4,300 digits, which Python only writes in hexadecimal
        return f"{value:#x}"


def _dict(node: ast.Dict) -> tuple[str, Sequence[_Piece]]:
    entries = zip(node.keys, node.values, strict=True)
    return "dict", [("**", [value]) if key is None else (":", [key, value]) for key, value in entries]


def _other(node: ast.AST) -> tuple[str, Sequence[_Piece]]:
    below: list[_Piece] = []
    lacks = False
    for name, value in ast.iter_fields(node):
        if name in _NUMBERS and value > 0:
            below.append((f"{name} {value}", []))
        items = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str | ast.AST)]
        part: list[_Piece] = [
            (item, []) if isinstance(item, str) else item for item in items if not isinstance(item, ast.expr_context)
        ]
        is_named = lacks or (name in _APART and not isinstance(node, ast.IfExp))
        below += [(name, part)] if part and is_named else part
        lacks = lacks or value is None
    return type(node).__name__.lower(), below


_RULES: dict[type[ast.AST], Callable[[Any], tuple[str, Sequence[_Piece]]]] = {
    **dict.fromkeys(_SIGNS, lambda node: (_SIGNS[type(node)], [])),
    ast.Call: _call,
    ast.Attribute: _attribute,
    ast.Name: lambda node: (f"builtins.{node.id}" if node.id in _DISPLAYS else node.id, []),
    ast.Constant: lambda node: (_written(node.value), []),
    ast.MatchSingleton: lambda node: ("matchsingleton", [(_written(node.value), [])]),
    ast.UnaryOp: _unary,
    ast.BinOp: lambda node: (_SIGNS[type(node.op)], [node.left, node.right]),
    ast.BoolOp: lambda node: (_SIGNS[type(node.op)], node.values),
    ast.Compare: lambda node: (",".join(_SIGNS[type(op)] for op in node.ops), [node.left, *node.comparators]),
    ast.Dict: _dict,
    ast.Subscript: lambda node: ("[]", [node.value, node.slice]),
    ast.Starred: lambda node: ("*", [node.value]),
    ast.arg: lambda node: (node.arg, [] if node.annotation is None else [node.annotation]),
}
