"""The simulator knows the gold program, and says only what its prompt shows."""

from __future__ import annotations

import itertools
import random

import pytest
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.simulator import StructureBoundLLM, _all_structures, _parse, read_prompt

from langchain_rcr.errors import InputError
from langchain_rcr.items import Item
from langchain_rcr.programs import ProgramSpec, Tree, local_structures
from langchain_rcr.prompt import APPENDIX_D

GOLD = "answer(river(loc_2(stateid('texas'))))"
CAPITAL = "answer(capital(loc_2(stateid('utah'))))"
FUNQL = [
    GOLD,
    CAPITAL,
    "answer(river(all))",
    "answer(river(traverse_2(stateid('ohio'))))",
    "answer(count(state(next_to_2(stateid('iowa')))))",
    "answer(exclude(river(all), river(loc_2(stateid('utah')))))",
]
COVR = [
    "count ( with_relation ( find ( dog ) , playing with , find ( cat ) ) )",
    "eq ( query_attr [ color ] ( find ( dog ) ) , black )",
    "exists ( filter ( white , find ( mouse ) ) )",
    "count ( with_relation ( scene ( ) , looking at , filter ( round , find ( cat ) ) ) )",
]
SQL = [
    "SELECT name FROM city",
    "SELECT COUNT(name) FROM city WHERE pop > 10",
    "SELECT pop FROM state WHERE name = 'texas'",
    "SELECT name FROM state ORDER BY pop LIMIT 1",
]
SEXPR = ["(call f (a b) (c))", "(call g (a d))", "(call f (c))", "(a (b c) (call d))"]
JSON = ['{"a": [1, {"b": "x"}]}', '{"a": {"c": 2}}', '{"b": ["y", "z"]}', '{"c": {"b": 1}}']
PYTHON = ["f(a, b=g(1))", "g(a)[0]", "f(x.y, 2)", "g(b=f(x))"]


def prompt(shown: list[str], question: str = "q") -> str:
    return APPENDIX_D.text([Item(f"s {n}", program) for n, program in enumerate(shown)], question)


def simulator(gold: str = GOLD, **options: object) -> StructureBoundLLM:
    return StructureBoundLLM(programs={"q": gold}, **options)


def test_covered_is_answered_with_the_gold_program() -> None:
    shown = ["answer(river(loc_2(riverid('x'))))", CAPITAL]
    assert simulator().answer(prompt(shown)) == GOLD
    assert simulator().invoke(prompt(shown)) == GOLD


def test_a_missing_structure_is_replaced_by_what_is_shown_in_its_place() -> None:
    """river → loc_2 is missing. Of what is shown, river → traverse_2 fits; all fits too, but takes no argument."""
    shown = ["answer(river(all))", CAPITAL, "answer(river(traverse_2(stateid('ohio'))))"]
    assert simulator().answer(prompt(shown)) == "answer(river(traverse_2(stateid('texas'))))"


def test_if_nothing_fits_the_most_frequent_label_of_the_same_arity_is_used() -> None:
    """Below river only all is shown; with one argument: answer twice, capital, river and stateid once."""
    assert simulator().answer(prompt(["answer(river(all))", CAPITAL])) == "answer(river(answer(stateid('texas'))))"


def test_size_1_asks_for_symbols_alone_and_size_3_for_more() -> None:
    shown = ["answer(river(all))", CAPITAL]
    assert simulator(size=1).answer(prompt(shown)) == GOLD
    shown = ["answer(river(loc_2(riverid('x'))))", CAPITAL]
    # river → loc_2 → stateid is missing; its last node is stateid. riverid is what river → loc_2 has below it.
    assert simulator(size=3).answer(prompt(shown)) == "answer(river(loc_2(riverid('texas'))))"


def test_siblings_are_structures_too() -> None:
    gold = "f ( a , b )"
    shown = ["f ( a , c )", "g ( b )", "f ( b )"]
    # a <-> b is missing, b is its last node. c comes after a.
    assert simulator(gold).answer(prompt(shown)) == "f ( a , c )"


def test_values_count_as_one_and_a_replaced_one_brings_its_own_text() -> None:
    shown = ["answer(river(loc_2(stateid('utah'))))"]
    assert simulator().answer(prompt(shown)) == GOLD
    assert simulator("answer(river(loc_2(stateid(all))))").answer(prompt(shown)) == (
        "answer(river(loc_2(stateid('utah'))))"
    )


def test_a_chain_of_words_that_is_one_class_is_replaced_as_one() -> None:
    spec = ProgramSpec(covr_classes=True)
    shown = ["count ( with_relation ( find ( dog ) , count ( dog ) ) )", "find ( cat ) "]
    assert simulator(COVR[0], spec=spec, size=1).answer(prompt(shown)) == (
        "count ( with_relation ( find ( dog ) , dog , find ( cat ) ) )"
    )


def test_without_examples_or_without_a_program_there_is_no_answer() -> None:
    assert simulator().answer(prompt([])) == ""
    assert simulator("not ( a program").answer(prompt([CAPITAL])) == ""
    assert simulator("not ( a program").answer(prompt([CAPITAL, "not ( a  program"])) == "not ( a program"


def test_in_sql_a_missing_clause_gives_the_nearest_shown_program() -> None:
    spec = ProgramSpec("sql")
    gold = "SELECT name FROM state ORDER BY pop LIMIT 1"
    shown = ["SELECT pop FROM city", "SELECT name FROM state WHERE pop > 5", "SELECT area FROM lake"]
    assert simulator(gold, spec=spec, size=1).answer(prompt(shown)) == "SELECT name FROM state WHERE pop > 5"
    # A column, on the other hand, is a word of the text.
    gold = "SELECT name FROM state WHERE pop > 5"
    shown = ["SELECT pop FROM state WHERE pop > 7"]
    assert simulator(gold, spec=spec, size=1).answer(prompt(shown)) == "SELECT pop FROM state WHERE pop > 5"


@pytest.mark.parametrize(
    ("programs", "spec"),
    [
        (FUNQL, ProgramSpec()),
        (COVR, ProgramSpec()),
        (COVR, ProgramSpec(covr_classes=True)),
        (SQL, ProgramSpec("sql")),
        (SEXPR, ProgramSpec("sexpr")),
        (JSON, ProgramSpec("json")),
        (PYTHON, ProgramSpec("python")),
    ],
    ids=["funql", "covr", "covr-classes", "sql", "sexpr", "json", "python"],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_right_exactly_where_all_structures_are_shown_and_always_a_program(
    programs: list[str], spec: ProgramSpec, size: int
) -> None:
    sized = ProgramSpec(spec.language, spec.anonymize, spec.covr_classes, size)
    knowing = StructureBoundLLM(programs={program: program for program in programs}, spec=spec, size=size)
    right = []
    for gold in programs:
        for shown in itertools.permutations(programs, 2):
            answer = knowing.answer(prompt(list(shown), gold))
            covered = sized.structures(gold) <= sized.structures(shown[0]) | sized.structures(shown[1])
            assert (spec.key(answer) == spec.key(gold)) is covered
            assert (answer == gold) or not covered
            assert spec.tree(answer) is not None
            right.append(covered)
    assert 0 < sum(right) < len(right)


def random_tree(draw: random.Random, depth: int = 0) -> Tree:
    count = draw.choice([0, 1, 2, 3]) if depth < 4 else 0
    return Tree(draw.choice("abcd"), tuple(random_tree(draw, depth + 1) for _ in range(count)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_its_structures_are_the_local_structures(size: int) -> None:
    draw = random.Random(size)
    for _ in range(50):
        tree = random_tree(draw)
        program = _parse(str(tree), tree, ProgramSpec(), size)
        names = {
            " -> ".join([*("<root>" if label is None else label for label in chain), " <-> ".join(run)])
            for chain, run in _all_structures(program)
        }
        assert names == local_structures(tree, size)


def test_reading_prompts() -> None:
    text = "Read this.\nSource: a\nTarget: f ( x )\n\nSource: b \nTarget: SELECT 1\nFROM c\nSource: the query\nTarget:"
    assert read_prompt(text) == (["f ( x )", "SELECT 1\nFROM c"], "the query")
    assert read_prompt("Source: a\nTarget: ") == ([], "a")
    with pytest.raises(InputError, match="prompts that end with"):
        read_prompt("Source: a\nTarget: b")


def test_an_unknown_question_is_a_mistake() -> None:
    with pytest.raises(InputError, match="no program for the question 'another'"):
        simulator().answer(prompt([GOLD], "another"))
    assert simulator().answer(prompt([GOLD], " q ")) == GOLD
    with LanguageModel(simulator()) as llm, pytest.raises(InputError, match="no program"):
        llm.generate([prompt([GOLD], "another")])


def test_it_is_called_a_simulator() -> None:
    assert "simulator" in (StructureBoundLLM.__doc__ or "").split("\n")[0]
    assert "simulator" in simulator()._llm_type
