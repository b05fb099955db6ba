"""A question that stands word for word in the pool is shown its own example, whatever its program is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from langchain_rcr import SequentialCompositionalRetriever
from langchain_rcr.families.structure.inventory import Inventory
from langchain_rcr.programs import ProgramSpec

THINGS = ("city", "river", "lake", "state", "road", "mountain")
ASKED = [
    row
    for thing in THINGS
    for row in (
        (f"how many {thing} rows are there", f"select count(*) from {thing}"),
        (f"which {thing} is the largest", f"select name from {thing} order by size desc limit 1"),
        (f"name every {thing} that is larger than 5", f"select name from {thing} where size > 5"),
        (f"how large are the {thing} rows taken together", f"select sum(size) from {thing}"),
        (f"what is the average size for each kind of {thing}", f"select kind, avg(size) from {thing} group by kind"),
        (f"which {thing} rows have no name", f"select id from {thing} where name is null"),
    )
]
READ = [
    ("get rid of the table of lakes", "drop table lake"),
    ("add a column for the depth of lakes", "alter table lake add column depth int"),
    ("empty the table of roads", "truncate table road"),
    ("what columns does the table of rivers have", "describe river"),
    ("how is the number of cities computed", "explain select count(*) from city"),
    ("use at most four workers", "set workers = 4"),
    ("run the yearly clean-up", "call clean_up(2024)"),
    ("give me the numbers one and two", "values (1), (2)"),
    ("put Rome in, whether or not it is there", "replace into city values ('Rome', 3)"),
    ("rename the state and then show it", "update state set name = 'x' where id = 1; select * from state where id = 1"),
    ("the model of all cities", "select * from {{ ref('cities') }}"),
    (
        "the new cities of the incremental model",
        "select * from city {% if is_incremental() %} where id > 9 {% endif %}",
    ),
]
UNREAD = [
    ("list the tables that there are", "SHOW TABLES FROM atlas"),
    ("tidy up the table of rivers", "VACUUM FULL river"),
    ("let the owner in", "ALTER ROLE owner WITH LOGIN"),
    ("loop over all of the cities", "{% for c in cities %} select '{{ c }}' {% else %} from {% endfor %} union"),
    ("what the intern wrote", "SELEC name FORM city"),
]


@pytest.fixture(scope="module")
def retriever() -> Any:
    examples = [{"question": question, "sql": program} for question, program in (*ASKED, *READ, *UNREAD)]
    return SequentialCompositionalRetriever.from_examples(
        examples, input_keys=["question"], example_keys=("question", "sql"), language="sql", k=3
    )


@pytest.mark.slow
@pytest.mark.parametrize(("question", "program"), [*READ, *UNREAD])
def test_a_question_of_the_pool_finds_its_own_example(retriever: Any, question: str, program: str) -> None:
    assert program in [example["sql"] for example in retriever.select_examples({"question": question})]


@pytest.mark.slow
def test_other_questions_find_theirs_as_before(retriever: Any) -> None:
    read = {program for _, program in ASKED}
    for question, program in ASKED:
        picks = [example["sql"] for example in retriever.select_examples({"question": question})]
        assert program in picks
        assert picks[-1] in read


def test_what_is_read_is_no_token_chain() -> None:
    spec = ProgramSpec("sql")
    assert all(spec.structures(program) for _, program in READ)
    assert not any(spec.structures(program) for _, program in UNREAD)


def test_tokens_stand_for_the_structures_of_what_does_not_parse() -> None:
    spec = ProgramSpec("sql", max_size=2)
    inventory = Inventory.fit(spec, ["select a from t", "vacuum 'x'", "vacuum 'y'"], 100)
    assert {name for name in inventory.names if "~" in name} == {
        *("~vacuum", "~ANON_STRING", "<root> -> ~vacuum", "~vacuum -> ~ANON_STRING")
    }
    one, again, other = np.asarray(inventory.rows(["vacuum 'x'", "vacuum 'z'", "vacuum"]))
    assert (one == again).all()
    assert one.sum() == 1
    assert 0 < other.sum() <= 1
    assert inventory.spare("vacuum u") == {}


def test_a_program_that_comes_in_later_and_does_not_parse_is_a_label_of_its_own() -> None:
    inventory = Inventory.fit(ProgramSpec("sql"), ["select a from t"], 100)
    (label,) = inventory.spare("vacuum full t")
    assert inventory.spare("vacuum  full t").keys() == {label}
    assert inventory.spare("vacuum t").keys() != {label}
    assert inventory.spare(" ") == inventory.spare("") == {}


def test_of_a_long_text_that_does_not_parse_the_beginning_is_read() -> None:
    inventory = Inventory.fit(ProgramSpec("sql"), ["select a from t", "vacuum " + "x y " * 1_000_000], 10_000)
    assert len(inventory.names) < 5_000


def test_few_programs_that_do_not_parse_are_worth_their_share() -> None:
    notes = [("how many piers are there", "TODO"), ("which pier is the largest", "ask anna")]
    retriever = SequentialCompositionalRetriever.from_examples(
        [{"question": question, "sql": program} for question, program in (*ASKED, *notes)],
        input_keys=["question"],
        language="sql",
        k=3,
    )
    encoder = retriever.store.encoder.query
    names, worth = encoder.inventory.names, encoder.tensors()["worth"]
    share = np.mean([[name in encoder.inventory.spec.structures(sql) for name in names] for _, sql in ASKED], axis=0)
    unread = encoder.inventory.unread
    assert {name for name, each in zip(names, unread, strict=True) if each} >= {"~TODO", "<root> -> ~ask", "~ask"}
    share = np.where(unread, 1, share * len(ASKED)) / (len(ASKED) + 2)
    idf = -np.log(np.minimum(share, 0.98))
    expected = 0.5 * np.log(idf / idf.mean()) + np.log(np.where(unread, 2 / (len(ASKED) + 2), 1))
    assert worth == pytest.approx(expected, abs=1e-5)


def test_notes_in_place_of_programs_are_not_picked_among_programs() -> None:
    notes = [(f"what is the {which} of each {thing}", "TODO") for which in ("length", "age") for thing in THINGS[:2]]
    retriever = SequentialCompositionalRetriever.from_examples(
        [{"question": question, "sql": program} for question, program in (*ASKED, *notes)],
        input_keys=["question"],
        language="sql",
        k=3,
    )
    for thing in THINGS:
        picks = retriever.select_examples({"question": f"what is the size of each {thing}"})
        assert "TODO" not in [example["sql"] for example in picks]
