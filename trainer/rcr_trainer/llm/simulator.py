"""An offline simulator of a language model that can only put together what its prompt shows.

It is no language model: it knows the gold programs. It stands in for one where none knows the language of a domain,
so that the training loop, and the order of selectors, can be looked at without a network. Its numbers say nothing
about any real model.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, LLMResult
from pydantic import Field, PrivateAttr

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec, Tree, local_structures
from langchain_rcr.programs.structures import CHILD, ROOT, SIBLING
from langchain_rcr.programs.tree import unfold

Structure = tuple[tuple[str | None, ...], tuple[str, ...]]
"""A local structure: the labels of its chain from the top (None: the virtual root) and of its run of siblings."""

_SHOWN = re.compile(r"^Source:[ \t]*(.*?)\nTarget:[ \t]*(.*?)(?=\nSource:|\Z)", re.DOTALL | re.MULTILINE)
_QUERY = re.compile(r".*^Source:[ \t]*(.*?)\nTarget:[ \t]*\Z", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"""'[^']*'|"[^"]*"|[^\s()\[\]{},'"]+""")
_MARK = "structureboundmark"
_WIDEST = 2
"""Words that may write a node together, such as `playing with`."""


@dataclass(frozen=True, slots=True)
class _Program:
    """A parsed program, its nodes in preorder.

    Attributes:
        text: as written.
        labels: of the nodes.
        arities: their numbers of children.
        ending: for each node, the local structures whose last node it is; every structure ends at one node.
        spans: where the text writes a node; None for one that isn't written by words of its own (a keyword, say).
    """

    text: str
    labels: tuple[str, ...]
    arities: tuple[int, ...]
    ending: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]
    spans: tuple[tuple[int, int] | None, ...]

    def structures(self, node: int, labels: Sequence[str]) -> Iterator[Structure]:
        """The structures that end at a node, were the nodes labelled so."""
        for chain, run in self.ending[node]:
            above = tuple([None if place < 0 else labels[place] for place in chain])
            yield above, tuple([labels[place] for place in run])


class StructureBoundLLM(BaseLLM):
    """A simulator, no language model: it knows the gold programs and is bound to the structures its prompt shows.

    The prompt is in the paper's format; its last "Source:" is the query. If every local structure of up to `size`
    nodes of the query's gold program occurs in the programs of the prompt, the simulator answers with that program.
    Else it answers with the gold program in which each node that ends a missing structure (its last node in preorder)
    gets another label, from the top down: of the labels that the prompt's programs write out, other than its own, the
    one with which the node

    1. has a number of children that the label has somewhere in the prompt,
    2. then completes most structures that the prompt shows, given the labels answered above and left of it,
    3. then occurs most often in the prompt; then comes first in the alphabet.

    The answer so keeps the form of the gold program. Where that can't be written (a missing structure ends at a
    keyword, or the result doesn't parse, both in SQL), the answer is the shown program that shares most with the gold
    one (the largest Jaccard coefficient of their structures, the first of equals), as a whole; without any example it
    is empty. It is never the gold program.

    Args:
        programs: question → gold program, of all queries that may come.
        spec: how programs are read; anonymised values count as shown if any value is.
        size: nodes of the largest structures that must be shown.
    """

    programs: dict[str, str] = Field(exclude=True, repr=False)
    spec: ProgramSpec = ProgramSpec()
    size: int = Field(2, ge=1)

    _read: dict[str, _Program | None] = PrivateAttr(default_factory=dict)
    _gold: dict[str, str] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Index the questions, blanks aside."""
        super().model_post_init(context)
        self._gold = {_squeeze(question): program for question, program in self.programs.items()}

    @property
    def _llm_type(self) -> str:
        return "structure-bound-simulator"

    def answer(self, prompt: str) -> str:
        """What the simulator answers.

        Raises:
            InputError: the prompt is in another format, or asks for a question without a gold program.
        """
        shown, query = read_prompt(prompt)
        gold_text = self._gold.get(_squeeze(query))
        if gold_text is None:
            raise InputError(f"the simulator knows no program for the question {query!r}")
        gold = self._program(gold_text)
        if gold is None:
            # Nothing to compare: right only if the very program is shown.
            return gold_text if any(_squeeze(text) == _squeeze(gold_text) for text in shown) else ""
        return self._bounded(gold, shown)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        generations = []
        for prompt in prompts:
            text = self.answer(prompt)
            counts = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(text.split())}
            generations.append([Generation(text=text, generation_info={"finish_reason": "stop", **counts})])
        return LLMResult(generations=generations)

    async def _agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        return self._generate(prompts)  # a thread for each prompt would only cost time

    def _bounded(self, gold: _Program, shown: Sequence[str]) -> str:
        known = [program for text in shown if (program := self._program(text)) is not None]
        there = {
            structure
            for program in known
            for node in range(len(program.labels))
            for structure in program.structures(node, program.labels)
        }
        wrong = [node for node in range(len(gold.labels)) if not there.issuperset(gold.structures(node, gold.labels))]
        if not wrong:
            return gold.text
        words = _Words(known)
        labels = list(gold.labels)
        for node in wrong:
            best = words.nearest(gold, node, labels, there) if gold.spans[node] is not None else None
            if best is None:
                return self._nearest_program(gold, known)
            labels[node] = best
        answer = _rewrite(gold, {node: words.written[labels[node]] for node in wrong})
        tree = self.spec.tree(answer)
        if tree is None or [node.label for node in tree.walk()] != labels:
            return self._nearest_program(gold, known)
        return answer

    def _nearest_program(self, gold: _Program, known: Sequence[_Program]) -> str:
        own = _all_structures(gold)

        def shared(program: _Program) -> float:
            other = _all_structures(program)
            return len(own & other) / len(own | other)

        return max(known, key=shared).text if known else ""

    def _program(self, text: str) -> _Program | None:
        if text not in self._read:
            tree = self.spec.tree(text)
            self._read[text] = None if tree is None else _parse(text, tree, self.spec, self.size)
        return self._read[text]


class _Words:
    """The labels that programs write out, how often, with how many children, and by which words."""

    def __init__(self, programs: Sequence[_Program]) -> None:
        self.written: dict[str, str] = {}
        self._count: Counter[str] = Counter()
        self._arities: set[tuple[str, int]] = set()
        for program in programs:
            for label, arity, span in zip(program.labels, program.arities, program.spans, strict=True):
                if span is not None:
                    self.written.setdefault(label, program.text[slice(*span)])
                    self._count[label] += 1
                    self._arities.add((label, arity))

    def nearest(self, gold: _Program, node: int, labels: Sequence[str], there: set[Structure]) -> str | None:
        """The label that replaces the gold one at a node; None if there is none."""

        def rank(label: str) -> tuple[bool, int, int]:
            tried = [*labels[:node], label, *labels[node + 1 :]]
            fitting = sum(structure in there for structure in gold.structures(node, tried))
            return (label, gold.arities[node]) in self._arities, fitting, self._count[label]

        others = sorted(set(self.written) - {gold.labels[node]})
        return max(others, key=rank) if others else None


def read_prompt(prompt: str) -> tuple[list[str], str]:
    """The programs that a prompt in the paper's format shows, in order, and the question it asks.

    Raises:
        InputError: it doesn't end with a "Source:" line and an open "Target:".
    """
    asked = _QUERY.match(prompt)
    if asked is None:
        raise InputError("the simulator reads prompts that end with 'Source: …' and 'Target:' on lines of their own")
    before = prompt[: asked.start(1)].rpartition("Source:")[0]
    return [program.strip() for _, program in _SHOWN.findall(before)], asked[1].strip()


def _parse(text: str, tree: Tree, spec: ProgramSpec, size: int) -> _Program:
    nodes = list(tree.walk())
    labels = tuple([node.label for node in nodes])
    arities = tuple([len(node.children) for node in nodes])
    return _Program(text, labels, arities, _endings(tree, size), _spans(text, labels, arities, spec))


def _endings(tree: Tree, size: int) -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]:
    """For each node the structures (chain, run of siblings) that end there, as places in preorder; −1: virtual root."""
    places = itertools.count()
    numbered = unfold(tree, lambda node: (str(next(places)), node.children))
    found: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in tree.walk()]
    for name in local_structures(numbered, size):
        *chain, run = name.split(CHILD)
        end = tuple(map(int, run.split(SIBLING)))
        found[end[-1]].append((tuple(-1 if place == ROOT else int(place) for place in chain), end))
    return tuple(map(tuple, found))


def _spans(
    text: str, labels: Sequence[str], arities: Sequence[int], spec: ProgramSpec
) -> tuple[tuple[int, int] | None, ...]:
    """Which words write which node: the parser itself tells, when they are replaced."""
    spans: list[tuple[int, int] | None] = [None] * len(labels)
    words = [match.span() for match in _WORD.finditer(text)]
    used = [False] * len(words)
    for width in range(1, _WIDEST + 1):
        for first in range(len(words) - width + 1):
            if any(used[first : first + width]):
                continue
            start, end = words[first][0], words[first + width - 1][1]
            tree = spec.tree(text[:start] + _MARK + text[end:])
            nodes = list(tree.walk()) if tree is not None else []
            if tuple([len(node.children) for node in nodes]) != tuple(arities):
                continue
            changed = [place for place, node in enumerate(nodes) if node.label != labels[place]]
            if len(changed) == 1 and spans[changed[0]] is None and _MARK in nodes[changed[0]].label:
                spans[changed[0]] = (start, end)
                used[first : first + width] = [True] * width
    return tuple(spans)


def _rewrite(program: _Program, words: Mapping[int, str]) -> str:
    text = program.text
    for (start, end), word in sorted(
        ((span, word) for node, word in words.items() if (span := program.spans[node]) is not None), reverse=True
    ):
        text = text[:start] + word + text[end:]
    return text


def _all_structures(program: _Program) -> set[Structure]:
    return {structure for node in range(len(program.labels)) for structure in program.structures(node, program.labels)}


def _squeeze(text: str) -> str:
    return " ".join(text.split())
