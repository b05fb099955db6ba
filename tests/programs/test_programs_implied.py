"""Values that questions imply and don't name: which they are, and what they change."""

from __future__ import annotations

import itertools

import pytest

from langchain_rcr import SequentialCompositionalRetriever
from langchain_rcr.basics.items import Item
from langchain_rcr.errors import InputError
from langchain_rcr.families import get_family
from langchain_rcr.families.structure.inventory import Inventory
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec, implied_values
from langchain_rcr.programs.spec import MOST

SPEC = ProgramSpec()


def implied(*pairs: tuple[str, str], spec: ProgramSpec = SPEC) -> tuple[str, ...]:
    return implied_values(pairs, spec)


def asked(value: str, *questions: str) -> tuple[str, ...]:
    """Whether a value is implied by questions whose programs all have it."""
    return implied(*((question, f"f({value})") for question in questions))


@pytest.mark.parametrize(
    ("value", "questions"),
    [
        ("1200", ["after noon", "past midday", "in the afternoon"]),
        ("1200", ["after noon", "past 1200", "in the afternoon"]),  # one of three names it
        ("'NO'", ["direct", "no stops there, nonstop", "without stops", "straight", "not via"]),
        ("1", ["the first", "only one", "in 1991"]),
        ("2014", ["since 14", "at 20.14", "20,14"]),
        ("'여'", ["보여줘", "여자", "여성"]),  # a letter may be part of any word
        ("'>='", ["at least >= two", "two and more", "not under two"]),  # nothing of it is a word
        ("'new york'", ["in the big apple", "new, as in york", "york"]),
    ],
)
def test_values_that_most_questions_do_not_name_are_implied(value, questions):
    assert asked(value, *questions) == (value,)


@pytest.mark.parametrize(
    ("value", "questions"),
    [
        ("1200", ["after noon", "past midday"]),  # two are too few
        ("1200", ["after noon", "past 1200", "1200 ?", "midday"]),  # half of them name it
        ("1200", ["over 1,200", "1,200", "more than 1,200."]),
        ("15L", ["in 15 minutes", "the 15 people", "15"]),  # as Lispress writes whole numbers
        ("'new york'", ["in New York", "of new-york", "NEW_YORK's"]),
        ("'restaurant'", ["restaurants", "the restaurants of", "a restaurant"]),
        ("'été'", ["en ÉTÉ", "l'été", "d'été"]),
        ("'东京'", ["东京有多少人口", "在东京的河流", "谁住在东京？"]),
        ("500", ["长度超过500公里", "超过５００的", "500以上"]),
        ("'นนทบุรี'", ["ในนนทบุรีมี", "นนทบุรี", "จากนนทบุรี"]),
        ("'दिल्ली'", ["दिल्ली में", "दिल्ली की", "से दिल्ली तक"]),
        ("'서울'", ["서울에 있는 강", "서울의 학교", "서울에서 가장 긴"]),
        ("'תל אביב'", ["כמה אנשים בתל אביב", "מתל אביב", "תל אביב"]),
        ("'কলকাতা'", ["কলকাতায় কত নদী", "কলকাতার", "কলকাতা"]),
        ("'Donau'", ["die Do\u00adnau", "der Do\u200bnau", "Donau\ufeff"]),
        ("'Hauptstraße'", ["in der Hauptstrasse", "HAUPTSTRASSE", "Hauptstraße"]),
        ("500", ["أطول من ٥٠٠", "५०० से अधिक", "over 500"]),
        ("1500", ["über 1.500 km", "plus de 1\u202f500 km", "1’500"]),
        ("150000", ["over 1,50,000", "150.000", "150000"]),
        ("2014", ["am 01.05.2014", "5,2014", "2014"]),
        ("'İZMİR'", ["İzmir'de", "izmir", "İZMİR'in"]),
        ("'Isparta'", ["ısparta'da", "ISPARTA", "Isparta"]),
    ],
)
def test_values_that_questions_name_are_not(value, questions):
    assert asked(value, *questions) == ()


def test_symbols_of_a_program_are_no_values():
    assert implied(*((question, "f(noon, _, 7(x))") for question in "abcd")) == ()


def test_a_pair_that_is_repeated_counts_once():
    assert implied(*[("a", "f(5)")] * 3, ("b", "f(5)")) == ()


def test_nothing_is_implied_where_nothing_is_anonymised_or_parses():
    pairs = [(question, "f('x')") for question in "abc"]
    assert implied(*pairs) == ("'x'",)
    assert implied(*pairs, spec=ProgramSpec(anonymize=False)) == ()
    assert implied(*((question, "f((") for question in "abc")) == ()
    assert implied() == ()


@pytest.mark.parametrize(
    ("language", "program", "value"),
    [
        ("sql", "SELECT a FROM t WHERE b > 1200", "1200"),
        ("json", '{"name": "f", "arguments": {"unit": "celsius"}}', '"celsius"'),
        ("python", "f(unit='celsius')", "'celsius'"),
        ("tokens", "f unit 1200", "1200"),
    ],
)
def test_every_language_has_them(language, program, value):
    spec = ProgramSpec(language)
    assert implied(*((question, program) for question in "abc"), spec=spec) == (value,)
    kept = ProgramSpec(language, implied=(value,))
    assert value in kept.structures(program)
    assert value not in spec.structures(program)


def test_those_of_a_schema_without_names_are_found_too():
    spec = ProgramSpec("sql", anonymize="names")
    assert implied(*((q, "SELECT a FROM t WHERE b > 1200") for q in "abc"), spec=spec) == ("1200",)


def test_of_many_pairs_as_many_are_read_evenly():
    many = [(f"q{i}", f"f({'7' if i % 2 else '8'})") for i in range(2 * MOST)]
    assert implied(*many) == ("8",)  # every other one was read
    assert implied(*many[: MOST // 2 * 3]) == ("7", "8")


def test_implied_values_stay_in_structures_and_not_in_keys():
    spec = ProgramSpec(implied=("1200", "'a'"))
    assert str(spec.tree("f(1200, 5, 'a', 'b')")) == "f(1200, ANON_NUMBER, 'a', ANON_STRING)"
    assert spec.structures("f(1200)") == {"f", "1200", "f -> 1200", "<root> -> f", "<root> -> f -> 1200"}
    assert spec.key("f(1200, 'a')") == spec.key("f(5, 'b')") == SPEC.key("f(7, 'c')")


def test_a_spec_in_json_is_the_spec():
    spec = ProgramSpec("sql", implied=("1200",))
    assert ProgramSpec.from_json({**spec.to_json(), "implied": ["1200"]}) == spec
    assert "implied" not in SPEC.to_json()
    with pytest.raises(InputError, match="implied: strings were expected"):
        ProgramSpec(implied=(1200,))


TIMES = {"morning": "between(0, 1200)", "afternoon": "between(1200, 1800)", "evening": "between(1800, 2400)"}
PLACES = ["boston", "denver", "dallas", "oakland", "atlanta", "newark", "phoenix", "memphis"]
EXAMPLES = [
    {"source": f"{what} to {place} in the {time}", "target": f"{what}(to('{place}'), {when})"}
    for what, place, (time, when) in itertools.product(["flights", "fares", "meals"], PLACES, TIMES.items())
]


@pytest.mark.slow
def test_a_fitted_retriever_shows_the_value_that_a_question_implies():
    spec = ProgramSpec(implied=("0", "1200", "1800", "2400"))
    retriever = SequentialCompositionalRetriever.from_examples(EXAMPLES, k=2, language="functional")
    inventory = retriever.store.encoder.query.inventory
    assert inventory.spec == spec
    # The questions are of places and things that no example has together with a time.
    for time, when in TIMES.items():
        picks = retriever.select_examples({"source": f"buses to tulsa in the {time}"})
        assert any(when in pick["target"] for pick in picks), time


def test_implied_values_are_told_apart_unless_the_settings_say_otherwise():
    items = [Item(example["source"], example["target"]) for example in EXAMPLES]
    inventories = [
        TriEncoder.build("structure", items, spec=SPEC, implied=implied).query.inventory for implied in (True, False)
    ]
    assert ["1200" in inventory.names for inventory in inventories] == [True, False]
    assert get_family("structure").settings().implied
    again = Inventory.from_json(inventories[0].to_json())
    assert again.spec == inventories[0].spec
    assert again.digest == inventories[0].digest
