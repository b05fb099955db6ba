from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import places
import pytest
from rcr_trainer.data import geoquery
from rcr_trainer.data.examples import write_split
from rcr_trainer.data.geoquery import CORPUS_SHA256, geoquery_split, read_corpus
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.runs.tasks import load_split
from rcr_trainer.settings import DataSettings

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.programs import ProgramSpec

DATA = places.DATA / "geoquery"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no GeoQuery corpus at {DATA}")

SPEC = ProgramSpec()
EXAMPLE = """<example id='{id}'><nl lang='de'>wie viele</nl><nl lang='en'>\n How  many &lt; {id} ?\n</nl>
<mrl lang='geo-prolog'>x</mrl><mrl lang='geo-funql'>\nanswer(f{kind}(stateid('s{id}')))\n</mrl></example>"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of that form, which counts as the corpus."""
    body = "\n".join(EXAMPLE.format(id=id_, kind=id_ % 97) for id_ in reversed(range(892)))
    path = tmp_path / "corpus.xml"
    path.write_text(f"<?xml version='1.0' encoding='UTF-8'?>\n<examples>\n{body}\n</examples>\n")
    monkeypatch.setattr(geoquery, "CORPUS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.mark.slow
def test_the_880_examples_in_order(corpus: Path) -> None:
    examples = read_corpus(corpus)
    assert list(examples) == list(range(880))
    assert examples[7].id == "7"
    assert examples[7].source == "How many < 7 ?"
    assert examples[7].target == "answer(f7(stateid('s7')))"


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.xml").write_text("<!DOCTYPE x [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;&a;&a;'>]><examples/>")
    with pytest.raises(DataError, match=r"corpus.xml is not the published file: its sha256 is"):
        read_corpus(tmp_path / "corpus.xml")


def test_missing_file_and_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"can't read .*nowhere\.xml"):
        read_corpus(tmp_path / "nowhere.xml")
    with pytest.raises(ConfigError, match="no GeoQuery split 'iid'; the splits are standard, template_1, template_2"):
        geoquery_split(tmp_path / "nowhere.xml", "iid")


def _ids(path: Path, record: object) -> Path:
    path.write_text(json.dumps(record))
    return path


def test_exactly_the_given_ids(corpus: Path, tmp_path: Path) -> None:
    ids = _ids(tmp_path / "mine_1.json", {"train": [3, 1], "test": list(range(100, 140))})
    split = geoquery_split(corpus, "template", ids)
    assert split.name == "geoquery-mine_1"
    assert [example.id for example in split.train] == ["3", "1"]
    assert split.counts() == {"train": 2, "dev": 10, "test": 30}
    assert sorted(int(example.id) for example in split.dev + split.test) == list(range(100, 140))
    assert geoquery_split(corpus, "standard", ids).counts() == {"train": 2, "dev": 0, "test": 40}
    own_dev = _ids(tmp_path / "b.json", {"train": ["3"], "dev": [4], "test": [5, 6]})
    assert geoquery_split(corpus, "template", own_dev).counts() == {"train": 1, "dev": 1, "test": 2}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "ids.json: not of a splits file's form: Input should be a valid dictionary"),
        ({"train": [1]}, "ids.json, test: not of a splits file's form: Field required"),
        ({"train": [1], "test": [2], "tset": [3]}, "ids.json, tset: not of a splits file's form"),
        ({"train": [], "test": [2]}, "ids.json, train: .*at least 1 item"),
        ({"train": [880], "test": [2]}, "ids.json, train, 0: .*Input should be less than 880"),
        ({"train": [True], "test": [2]}, "ids.json, train, 0: .*Input should be a valid integer"),
        ({"train": [1, 2], "test": [2]}, "ids.json: id 2 is there 2 times, in train, test"),
    ],
)
def test_faulty_ids_files(corpus: Path, tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        geoquery_split(corpus, "template", _ids(tmp_path / "ids.json", record))


@needs_data
def test_the_checksum_is_that_of_the_corpus() -> None:
    assert hashlib.sha256((DATA / "corpus.xml").read_bytes()).hexdigest() == CORPUS_SHA256


@needs_data
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("standard", (600, 0, 280)),
        ("template_1", (441, 110, 329)),
        ("tmcd_1", (440, 110, 330)),
        ("length_1", (440, 110, 330)),
    ],
)
def test_published_splits(name: str, counts: tuple[int, int, int]) -> None:
    path = DATA / "splits" / f"{name}.json"
    split = geoquery_split(DATA / "corpus.xml", name.split("_", maxsplit=1)[0], path)
    assert tuple(split.counts().values()) == counts
    record = json.loads(path.read_text())
    assert [example.id for example in split.train] == [str(id_) for id_ in record["train"]]
    assert {example.id for example in split.dev + split.test} == {str(id_) for id_ in record["test"]}


@needs_data
@pytest.mark.parametrize(("kind", "name"), [("template", "template_1"), ("tmcd_3", "tmcd_3"), ("length", "length")])
def test_without_ids_a_split_is_the_papers(kind: str, name: str) -> None:
    split = geoquery_split(DATA / "corpus.xml", kind)
    record = json.loads((DATA / "splits_csl" / f"{name}.json").read_text())
    assert split.name == f"geoquery-{name}"
    for part in ("train", "dev", "test"):
        assert [int(example.id) for example in getattr(split, part)] == [int(id_) for id_ in record[part]]


# Appendix D; its first program lacks "answer", and Appendix E prints it whole.
PRINTED = [
    (
        "which capitals are in the states that border texas",
        "answer(capital(loc_2(state(next_to_2(stateid('value'))))))",
    ),
    (
        "what is the largest city in states that border california",
        "answer(largest(city(loc_2(state(next_to_2(stateid('value')))))))",
    ),
    (
        "what are the capitals of the states that border texas",
        "answer(capital(loc_2(state(next_to_2(stateid('value'))))))",
    ),
    (
        "which state has the lowest point that borders idaho",
        "answer(state(loc_1(lowest(place(loc_2(next_to_2(stateid('value'))))))))",
    ),
    (
        "what is the highest point in states bordering georgia",
        "answer(highest(place(loc_2(state(next_to_2(stateid('value')))))))",
    ),
    (
        "what states have no bordering state",
        "answer(exclude(state(all), next_to_2(state(all))))",
    ),
]


@needs_data
def test_examples_as_the_paper_prints_them(tmp_path: Path) -> None:
    ids = DATA / "splits" / "standard.json"
    where = {"task": "geoquery", "split": "standard", "corpus": DATA / "corpus.xml", "ids": ids}
    split, plain = (load_split(DataSettings(**where, anonymize_values=on), 0) for on in (True, False))
    programs = {example.source: example.target for example in split.train + split.test}
    assert [(question, programs.get(question)) for question, _ in PRINTED] == PRINTED
    prompt = APPENDIX_D.text([Item(question, program) for question, program in PRINTED[:1]], "x")
    assert prompt.startswith(
        "Source: which capitals are in the states that border texas\nTarget: answer(capital(loc_2("
    )
    # Nothing but values and the questions' form differs.
    for ours, theirs in zip(split.train, plain.train, strict=True):
        assert ours.id == theirs.id
        assert SPEC.structures(ours.target) == SPEC.structures(theirs.target)
    write_split(tmp_path / "plain", plain)
    folder = DataSettings(task="geoquery", directory=tmp_path / "plain", anonymize_values=True)
    assert load_split(folder, 0) == split
    assert {value for text in programs.values() for value in re.findall("'[^']*'", text)} == {"'value'"}
