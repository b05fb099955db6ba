"""ExamplePool: what it keeps, what it refuses, and the file it is stored in."""

import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_rcr import ExamplePool, InputError, Item, PoolError
from langchain_rcr.pool.examples import changed
from langchain_rcr.pool.saved import read_jsonl, write_jsonl
from langchain_rcr.programs import ProgramSpec

ROWS = [
    {"source": "how many states", "target": "count(state(all))", "level": 3, "id": "own"},
    {"source": "largest city", "target": "largest(city(all))", "tags": ["a", {"b": None}]},
    {"source": "number of states", "target": "count(state(all))"},
]


def test_shape() -> None:
    pool = ExamplePool(ROWS, ids=["a", "b", "c"])
    assert len(pool) == len(pool.examples) == len(pool.programs) == 3
    assert pool.ids == ("a", "b", "c")


def test_examples_are_kept_exactly_and_apart_from_the_users_dicts() -> None:
    rows = copy.deepcopy(ROWS)
    pool = ExamplePool(rows)
    rows[0]["source"] = "changed"
    assert list(pool.examples) == ROWS


def test_nested_values_are_copied_and_one_that_cannot_be_is_named() -> None:
    rows = copy.deepcopy(ROWS)
    pool = ExamplePool(rows)
    rows[1]["tags"][1]["b"] = "changed"
    assert list(pool.examples) == ROWS
    with pytest.raises(PoolError, match="example 'a' has a field that can't be copied"):
        pool.extended([{**ROWS[0], "lock": threading.Lock()}], ids=["a"])


def test_ids_are_random_unless_given() -> None:
    one, two = ExamplePool(ROWS), ExamplePool(ROWS)
    assert len({*one.ids, *two.ids}) == 6
    assert all(len(example_id) == 32 for example_id in one.ids)


def test_item_is_the_one_rendering_with_the_users_keys() -> None:
    pool = ExamplePool([{"q": "why", "sql": "SELECT 1", "source": "x"}], source_key="q", target_key="sql")
    assert pool.items() == [Item("why", "SELECT 1")]
    assert pool.texts(pool.examples) == ["Source: why\nTarget: SELECT 1"]


def test_braces_in_an_example_are_text() -> None:
    pool = ExamplePool([{"source": "{source} {0} {", "target": '{"a": {target}}'}])
    assert pool.texts(pool.examples) == ['Source: {source} {0} {\nTarget: {"a": {target}}']


def test_extended_is_another_pool_and_positions_stay() -> None:
    pool = ExamplePool(ROWS[:2], ids=["a", "b"])
    larger = pool.extended(ROWS[2:], ids=["c"])
    assert (pool.ids, larger.ids) == (("a", "b"), ("a", "b", "c"))
    assert larger.examples == (*pool.examples, ROWS[2])
    again = larger.extended([ROWS[0]], ids=["d"])
    assert again.ids.index("d") == 3
    with pytest.raises(PoolError, match=r"ids\[0\] is 'c', which another example has already"):
        again.extended([ROWS[0]], ids=["c"])


def test_a_part_of_a_pool_has_the_programs_of_its_spec() -> None:
    pool = ExamplePool([*ROWS, ROWS[0]], ids=["a", "b", "c", "d"])
    numbers, spec = pool.programs, ProgramSpec(anonymize=False)
    part = pool.only([3, 1], spec)
    assert (part.ids, part.examples) == (("d", "b"), (ROWS[0], ROWS[1]))
    assert part.items() == [pool.items()[3], pool.items()[1]]
    assert part.programs.tolist() == ExamplePool([ROWS[0], ROWS[1]], spec=spec).programs.tolist()
    assert pool.only([3, 1]).programs.tolist() == numbers[[3, 1]].tolist()


def test_programs_number_the_same_programs_equally() -> None:
    """Those with one `ProgramSpec.key`: apart from constants; a text that doesn't parse apart from white space."""
    targets = ["f ( 1 )", "f(2)", "no ( program", "g", "no  (\tprogram\n", "no ( programme"]
    rows = [{"source": "x", "target": target} for target in targets]
    pool = ExamplePool(rows)
    number = pool.programs.tolist()
    assert number[0] == number[1]
    assert number[2] == number[4]
    assert len(set(number)) == 4
    plain = ExamplePool(rows, spec=ProgramSpec(anonymize=False)).programs
    assert len(set(plain.tolist())) == 5
    assert pool.extended([{"source": "y", "target": "g"}]).programs.tolist() == [*number, number[3]]


def test_pickles_and_copies() -> None:
    pool = ExamplePool(ROWS)
    for other in (pickle.loads(pickle.dumps(pool)), copy.deepcopy(pool)):
        assert (other.ids, other.examples) == (pool.ids, pool.examples)
        assert other.extended(ROWS).programs.tolist() == pool.programs.tolist() * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"source": "x"}, r"examples\[1\] has no 'target' \(the program\): it has 'source'"),
        ({"target": "x", "question": 1}, r"examples\[1\] has no 'source': it has 'target', 'question'"),
        ({}, r"examples\[1\] has no 'source': it has nothing"),
        ({"source": 7, "target": "x"}, r"examples\[1\]: 'source' must be a string, not int"),
        ({"source": "x", "target": None}, r"examples\[1\]: 'target' \(the program\) must be a string, not NoneType"),
        ({"source": " \n", "target": "x"}, r"examples\[1\]: 'source' is blank"),
        ({"source": "x", "target": ""}, r"examples\[1\]: 'target' \(the program\) is blank"),
        ({"source": "a\ud800", "target": "x"}, r"examples\[1\]: 'source' is not valid Unicode .* at character 1"),
        ("source", r"examples\[1\] must be a mapping with 'source' and 'target', not str"),
        (None, r"examples\[1\] must be a mapping with 'source' and 'target', not NoneType"),
    ],
)
def test_a_bad_example_is_named_by_position_and_field(row: Any, message: str) -> None:
    with pytest.raises(PoolError, match=message):
        ExamplePool([ROWS[0], row])


class Frame(list[str]):
    """A data frame, which yields the names of its columns."""

    columns = ("source", "target")


@pytest.mark.parametrize(
    "examples", ["abc", {"source": "x", "target": "y"}, 3, (row for row in ROWS), Frame(Frame.columns)]
)
def test_what_is_no_sequence_of_examples_is_refused(examples: Any) -> None:
    with pytest.raises(InputError, match="examples must be a sequence of mappings, not"):
        ExamplePool(examples)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (["a", "b"], InputError, "sequence of 3 strings, one for each example, not list of 2"),
        ("abc", InputError, "not str of 3"),
        (["a", "b", 3], PoolError, r"ids\[2\] must be a non-empty string, not 3"),
        (["a", "", "c"], PoolError, r"ids\[1\] must be a non-empty string, not ''"),
        (["a", "b", "a"], PoolError, r"ids\[2\] is 'a', which another example has already"),
    ],
)
def test_bad_ids_are_named(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExamplePool(ROWS, ids=ids)


def test_a_failed_extension_changes_nothing() -> None:
    pool = ExamplePool(ROWS, ids=["a", "b", "c"])
    with pytest.raises(PoolError):
        pool.extended([ROWS[0], {}])
    assert pool.ids == ("a", "b", "c")


def test_the_two_keys_must_differ() -> None:
    with pytest.raises(InputError, match="both 'text'"):
        ExamplePool([], source_key="text", target_key="text")


def test_the_file_is_flat_and_readable(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pool.jsonl", ExamplePool([{"source": "où", "target": "f", "n": 1}], ids=["a"]))
    assert (tmp_path / "pool.jsonl").read_text("utf-8") == '{"id": "a", "source": "où", "target": "f", "n": 1}\n'


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
fields = st.dictionaries(
    st.sampled_from(["id", "example", "n", "é"]), st.none() | st.integers() | text | st.lists(text)
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(text, text, fields), max_size=4))
def test_write_then_read_gives_the_pool_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("pool") / "pool.jsonl"
    pool = ExamplePool([{"source": source, "target": target, **more} for source, target, more in rows])
    write_jsonl(path, pool)
    again = read_jsonl(path)
    assert (again.ids, again.examples) == (pool.ids, pool.examples)


def test_a_row_without_id_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n\n{"source": "c", "target": "d"}', encoding="utf-8")
    pool = read_jsonl(path)
    assert [example["source"] for example in pool.examples] == ["a", "c"]
    assert len(set(pool.ids)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"pool.jsonl, line 3: not JSON"),
        ('{"source": "a", "target": "b"}, {"source": "c", "target": "d"}', r"pool.jsonl, line 3: not JSON"),
        ("[" * 100_000, r"pool.jsonl, line 3: not JSON"),
        ("[1]", r"pool.jsonl, line 3: must be a JSON object, not list"),
        ('{"source": "x"}', r"pool.jsonl, line 3 has no 'target' \(the program\)"),
        ('{"id": 3, "source": "x", "target": "y"}', r"pool.jsonl, line 3: the id 3 is not a string"),
        ('{"id": 0, "source": "x", "target": "y"}', r"pool.jsonl, line 3: the id 0 is not a string"),
        ('{"id": "a", "source": "x", "target": "y"}', r"pool.jsonl, line 3: the id 'a' .* not the only one"),
        ('{"id": "b", "example": {"source": "x"}}', r"pool.jsonl, line 3 has no 'target'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text(json.dumps({"id": "a", **ROWS[1]}) + "\n\n" + line + "\n", encoding="utf-8")
    with pytest.raises(PoolError, match=message):
        read_jsonl(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"missing\.jsonl can't be read"):
        read_jsonl(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PoolError, match=r"binary\.jsonl can't be read"):
        read_jsonl(tmp_path / "binary.jsonl")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({1, 2}, "set is not JSON serializable"),
        ("a\ud800", "surrogates not allowed"),
        ((1, 2), "JSON would make a list of the tuple"),
        ([{"a": (1,)}], "JSON would make a list of the tuple"),
        ({1: "a"}, "the key 1 is not a string"),
        ([{"a": {None: 2}}], "the key None is not a string"),
        ({(1, 2): 3}, "keys must be str"),
    ],
)
def test_a_field_that_json_cannot_hold_is_named_and_the_old_file_stays(tmp_path: Path, value: Any, why: str) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text("old", encoding="utf-8")
    pool = ExamplePool([{"source": "x", "target": "y", "more": value}], ids=["a"])
    with pytest.raises(PoolError, match=rf"example 'a' can't be written to .*pool\.jsonl: field 'more': .*{why}"):
        write_jsonl(path, pool)
    assert [file.name for file in tmp_path.iterdir()] == ["pool.jsonl"]
    assert path.read_text("utf-8") == "old"


@pytest.mark.parametrize(
    ("value", "there", "differs"),
    [
        ((1, 2), [1, 2], False),
        (1e23, int(1e23), False),
        (2.0**53, 2**53, False),
        (True, 1, True),
        (1, 1.0, True),
        (2**53 + 1, 2.0**53, True),
        ("1", 1, True),
    ],
)
def test_an_example_that_an_engine_holds_is_the_same_as_far_as_json_tells(value, there, differs):
    pool = ExamplePool([ROWS[0] | {"extra": value}], ids=["a"])
    assert changed(pool, {"a": ROWS[0] | {"extra": there}, "b": {}}) == [0] * differs
