"""The program language `tokens`: tokens and n-grams by hand, values, keys, very long texts."""

import time

import pytest

from langchain_rcr.chains.answers import program_of
from langchain_rcr.families.structure.inventory import Inventory
from langchain_rcr.programs import ProgramSpec, local_structures, parse


def tokens(text):
    tree = parse(text, "tokens")
    return [] if tree is None else [node.label for node in tree.walk()]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("f(x, y)", ["f", "(", "x", ",", "y", ")"]),
        ("SELECT t1.a FROM t1", ["SELECT", "t1", ".", "a", "FROM", "t1"]),
        ("x>=3.14 -5 1e-3 7.name 1.2.3", ["x", ">", "=", "3.14", "-", "5", "1e-3", "7", ".", "name", "1.2", ".", "3"]),
        ("3abc 1e5x _a 2.", ["3abc", "1e5x", "_a", "2", "."]),
        (r"""'it''s' "a \"b\" c" '' """, ["'it''s'", r'"a \"b\" c"', "''"]),
        ("the dog's 'red ball'", ["the", "dog", "'", "s", "'red ball'"]),
        ('say \'a b "c d"', ["say", "'", "a", "b", '"', "c", "d", '"']),
        ("été 日本 😀", ["été", "日本", "😀"]),
        ("नदी की cafe\u0301 12", ["नदी", "की", "cafe\u0301", "12"]),
        ("(", ["("]),
        ("'", ["'"]),
        ("", []),
        (" \n\t", []),
    ],
)
def test_tokens_by_hand(text, found):
    assert tokens(text) == found


def test_structures_are_the_ngrams():
    assert ProgramSpec("tokens", max_size=2).structures("f ( x ( f") == {
        "<root> -> f", "f", "(", "x", "f -> (", "( -> x", "x -> (", "( -> f",
    }  # fmt: skip
    assert ProgramSpec("tokens").structures("") == frozenset()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ngrams_as_in_a_plain_reading(size):
    words = ["a", "b", "c", "a", "b", "d", "a", "b", "c"]
    marked = ["<root>", *words]
    grams = {tuple(marked[at : at + n]) for n in range(1, size + 1) for at in range(len(marked) - n + 1)}
    expected = {" -> ".join(gram) for gram in grams} - {"<root>"}
    assert local_structures(parse(" ".join(words), "tokens"), size) == expected


def test_values_are_anonymised_wherever_they_stand():
    spec = ProgramSpec("tokens", max_size=1)
    assert spec.structures("a = 'x y' AND b > 3 ( _ )") == {
        "a", "=", "ANON_STRING", "AND", "b", ">", "ANON_NUMBER", "(", "ANON_VALUE", ")",
    }  # fmt: skip
    assert "'x y'" in ProgramSpec("tokens", anonymize=False, max_size=1).structures("a = 'x y' 3")


def test_other_languages_keep_the_heads_of_arguments():
    assert ProgramSpec().key("3 ( 4 )") == "3(ANON_NUMBER)"


def test_a_key_ignores_white_space_and_values():
    spec = ProgramSpec("tokens")
    assert spec.key("f( x ,'a'  ,3)\n") == spec.key('f ( x , "b", 4 )')
    assert len({spec.key(text) for text in ("f ( x )", "f x ( )", "f ( x", "f", "'f (' x )", "")}) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "a " * 100_000,
        "(" * 100_000,
        "'\\" * 50_000,
        "'" * 200_001,
        "\"'" * 100_000,
        "a'" * 50_000,
        "1" * 400_000 + "a",
        "1." * 100_000 + "1" * 100_000 + "e",
        "'" + "x" * 400_000,
    ],
    ids=lambda text: text[:4],
)
def test_huge_texts_are_quick(text):
    began = time.process_time()
    assert parse(text, "tokens") is not None
    assert time.process_time() - began < 2


@pytest.mark.slow
def test_a_chain_of_10_000_tokens():
    spec, text = ProgramSpec("tokens"), " ".join(f"w{n} 7" for n in range(5_000))
    began = time.process_time()
    found = spec.structures(text)
    # Each word and "7" by themselves; of 2, 3 and 4 tokens one at each place; 3 that follow the mark of the beginning.
    assert len(found) == 5_001 + 9_999 + 9_998 + 9_997 + 3
    assert "<root> -> w0 -> ANON_NUMBER -> w1" in found
    assert "ANON_NUMBER -> w4999 -> ANON_NUMBER" in found
    assert spec.key(text).startswith("w0(ANON_NUMBER(w1(")
    assert spec.key(text) != spec.key(text + " end")
    assert len(Inventory.fit(spec, [text, "w1 7"], 100)) > 1
    assert time.process_time() - began < 5


def test_a_model_may_answer_in_several_lines():
    assert program_of("a b\nc", "tokens") == "a b\nc"
