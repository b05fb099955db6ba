"""Selectors that know which words of a question name tables, columns and values: schema linking by words.

A word links to a schema if, in the singular, it is a word of one of its names (partial matches count): Guo et al.,
"Towards Complex Text-to-SQL in Cross-Domain Database with Intermediate Representation", ACL 2019, section 2.2; Wang et
al., "RAT-SQL", ACL 2020, section 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np

from langchain_rcr.basics.items import WORD
from langchain_rcr.policy.schema import words
from langchain_rcr.programs import ProgramSpec, Tree, get_parser
from rcr_trainer.baselines.base import TradeOff
from rcr_trainer.baselines.dense import DenseSelector
from rcr_trainer.baselines.simple import BM25Selector
from rcr_trainer.data.arrays import top_k
from rcr_trainer.data.coverage import PoolStructures
from rcr_trainer.data.okapi import BM25Scorer

MASK, UNKNOWN = "<mask>", "<unk>"  # placeholders for names and for values
_TOKEN = re.compile(rf"""(?<!\w)"[^"]*"|(?<!\w)'[^']*'(?!\w)|\d[\d.,]*\b|{WORD}|[^\w\s]""")
_NEVER = re.compile(
    "a|all|an|and|are|as|at|be|by|do|does|each|every|find|for|from|give|have|how|in|is|it|list|many|me|most|much|not|of|on|"
    "or|show|than|that|the|their|there|to|was|were|what|when|where|which|who|whose|with",
    re.IGNORECASE,
)
"""Words that occur in names but don't stand for one on their own."""
_SQL = re.compile(
    "bigint|blob|boolean|char|character|check|constraint|create|date|datetime|decimal|default|delete|double|exist|float|"
    "foreign|if|int|integer|key|not|null|number|numeric|other|primary|real|reference|smallint|table|text|time|timestamp|"
    "unique|update|value|varchar|view"
)
"""Words of CREATE TABLE statements that aren't names, in the singular."""
_ALIKE = 4.0  # more than any two cosines differ by


class BM25SchemaSelector(BM25Selector):
    """BM25 over the words of questions and of names in their programs; a query's words that are names count twice."""

    needs: ClassVar[tuple[str, ...]] = ("spec",)

    def _fit(self) -> None:
        spec = self.resources.spec
        self._names = linker(self.examples, self.resources.schemas, spec)
        texts = zip(self._questions, self._programs, strict=True)
        self._scorer = BM25Scorer([" ".join([*words(q), *program_words(p, spec.language)]) for q, p in texts])

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        found = [(words(query), self._names(query)) for query in queries]
        asked = [" ".join([*said, *(word for word in said if is_linked(word, names))]) for said, names in found]
        return top_k(self._scorer.scores(asked), k, excluded)


class DAILSQLSelector(DenseSelector):
    """DAIL-SQL's selection: the most similar masked questions, first those whose SQL has the likely skeleton.

    Gao et al., "Text-to-SQL Empowered by Large Language Models: A Benchmark Evaluation", VLDB 2024, arXiv 2308.15363,
    section 3.2. Departures: they take the skeleton of a preliminary model's answer; here it is that of the program of
    the most similar masked question, so that no model is asked twice. Skeletons are compared by the Jaccard coefficient
    of their programs' symbols without names and values. A prompt shows the first pick last, as theirs does.

    The pool's examples have a field `schema` where it is known; `Resources.schemas` has the queries'.

    Attributes:
        threshold: the Jaccard coefficient from which a skeleton counts as the likely one, in (0, 1].
    """

    needs: ClassVar[tuple[str, ...]] = ("embed", "spec")
    trade_off: ClassVar[TradeOff | None] = TradeOff("threshold", (0.5, 0.7, 0.85, 1.0))
    threshold: float = 0.85

    def _fit(self) -> None:
        spec = self.resources.spec
        self._names = linker(self.examples, self.resources.schemas, spec)
        super()._fit()
        nameless: bool | Literal["names"] = "names" if hasattr(get_parser(spec.language), "shape") else True
        skeletons = replace(spec, anonymize=nameless, max_size=1, implied=())
        self._symbols = PoolStructures(skeletons, self._programs).matrix.astype(np.float64)
        self._sizes = np.asarray(self._symbols.sum(axis=1)).ravel()

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        return super()._embed([mask_question(text, self._names(text)) for text in texts])

    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        similarity = np.round(similarity, 6)
        nearest = top_k(similarity.copy(), 1, excluded)[:, 0]
        shared = (self._symbols[nearest] @ self._symbols.T).toarray()
        union = np.maximum(self._sizes[nearest][:, None] + self._sizes - shared, 1)
        return top_k(similarity + _ALIKE * (shared / union >= self.threshold), k, excluded)


def mask_question(question: str, names: Set[str]) -> str:
    """The question without anything specific to its database: runs of words in `names` become MASK, values UNKNOWN."""
    masked: list[str] = []
    for token in _TOKEN.findall(question):
        if token[0].isdigit() or (token[0] in "\"'" and len(token) > 2):
            masked.append(UNKNOWN)
        elif not is_linked(token, names):
            masked.append(token)
        elif masked[-1:] != [MASK]:
            masked.append(MASK)
    return " ".join(masked)


def is_linked(word: str, names: Set[str]) -> bool:
    """Whether a word of a question names a table or column."""
    return not _NEVER.fullmatch(word) and any(part in names for part in words(word))


def schema_words(schema: str) -> frozenset[str]:
    """The words of the names in CREATE TABLE statements."""
    return frozenset(word for word in words(re.sub(r"--[^\n]*", "", schema)) if not _SQL.fullmatch(word))


def program_words(program: str, language: str) -> list[str]:
    """The words of the tables and columns that a program names, with repetitions; empty if it has no names."""
    parser: Any = get_parser(language)
    whole, shape = parser.parse(program), parser.shape(program) if hasattr(parser, "shape") else None
    return [] if whole is None or shape is None else [word for name in _names(whole, shape) for word in words(name)]


def _names(tree: Tree, shape: Tree) -> list[str]:
    """The labels that a program's shape replaces by constants."""
    if tree.label != shape.label and len(tree.children) == len(shape.children):
        return [tree.label]
    return [name for pair in zip(tree.children, shape.children, strict=False) for name in _names(*pair)]


def linker(
    examples: Sequence[Mapping[str, Any]], schemas: Mapping[str, str], spec: ProgramSpec
) -> Callable[[str], frozenset[str]]:
    """Maps a question to the words of the names in its schema or, if that isn't known, in all the pool's programs."""
    known = {str(each["source"]): str(each["schema"]) for each in examples if each.get("schema")} | dict(schemas)
    own = cache(schema_words)
    pool = frozenset(word for each in examples for word in program_words(str(each["target"]), spec.language))
    return lambda question: own(known[question]) if known.get(question) else pool
