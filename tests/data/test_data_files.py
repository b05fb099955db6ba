from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
from rcr_trainer.data.examples import Example
from rcr_trainer.data.files import read_examples, unparsed
from rcr_trainer.errors import DataError

from langchain_rcr.programs import ProgramSpec

ROWS = [("how, many?", 'count("a")'), ("line\nbreak", "f\tg"), ("größer 本", "h()")]
EXAMPLES = [Example(str(number), *row, {"db_id": "geo"}) for number, row in enumerate(ROWS, start=1)]


def _write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def _write_rows(path: Path) -> Path:
    objects = [{"source": source, "target": target, "db_id": "geo"} for source, target in ROWS]
    if path.suffix in {".jsonl", ".ndjson"}:
        return _write(path, "".join(json.dumps(row) + "\n" for row in objects))
    if path.suffix == ".json":
        return _write(path, json.dumps(objects, indent=1))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([("source", "target", "db_id"), *((*row, "geo") for row in ROWS)])
    return path


@pytest.mark.parametrize("extension", [".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".JSONL"])
def test_every_format_gives_the_same_examples(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"data{extension.lower()}"
    examples, report = read_examples(_write_rows(path).rename(tmp_path / f"data{extension}"))
    assert examples == EXAMPLES
    assert (report.rows, report.empty, report.duplicates) == (3, [], [])


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".csv", ".tsv"])
def test_byte_order_mark_and_crlf_change_nothing(tmp_path: Path, extension: str) -> None:
    data = _write_rows(tmp_path / f"plain{extension}").read_bytes()
    if extension != ".csv" and extension != ".tsv":  # in a table the line break inside a cell would change too
        data = data.replace(b"\n", b"\r\n")
    examples, _ = read_examples(_write(tmp_path / f"dos{extension}", b"\xef\xbb\xbf" + data))
    assert examples == EXAMPLES


def test_keys_and_ids_are_configurable(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"q": "s", "sql": "t", "n": 7}\n\n{"q": "s2", "sql": "t2", "n": "x"}')
    examples, report = read_examples(path, source_key="q", target_key="sql", id_key="n")
    assert examples == [Example("7", "s", "t"), Example("x", "s2", "t2")]
    assert report.rows == 2


def test_empty_rows_are_dropped_and_duplicates_kept_and_both_reported(tmp_path: Path) -> None:
    rows = [("a", "f"), ("a", None), (" ", "f"), ("a", "f"), ("a", "g")]
    text = "".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in rows)
    path = _write(tmp_path / "a.jsonl", text)
    examples, report = read_examples(path)
    assert [example.id for example in examples] == ["1", "4", "5"]
    assert (report.rows, report.empty, report.duplicates) == (5, [2, 3], [4])


BAD = [
    (
        "a.jsonl",
        '{"source": "s", "target": "t"}\n{"question": "s", "sql": "t"}',
        {},
        "line 2: no field 'source' (fields: question, sql); name it with source_key",
    ),
    (
        "a.jsonl",
        '{"source": "s", "targets": "t"}',
        {},
        "line 1: no field 'target' (fields: source, targets); did you mean 'targets'?",
    ),
    ("a.jsonl", '{"source": "s", "target": "t"}\n{"source": ', {}, "line 2: invalid JSON (Expecting value, column 12)"),
    ("a.jsonl", '{"source": "s", "target": "t"}\n{"source": \n', {}, "line 2: invalid JSON (Expecting value"),
    ("a.jsonl", "[1]", {}, "line 1: expected a JSON object, got a list; a file that is one JSON list is named .json"),
    ("a.jsonl", '{"source": "s", "target": 3}', {}, "line 1: field 'target' must hold text, got a number"),
    ("a.jsonl", '{"source": "\\ud800", "target": "t"}', {}, "line 1: field 'source' holds half of a surrogate pair"),
    (
        "a.jsonl",
        '{"source": "s", "target": "t", "note": {"by": ["\\ud800"]}}',
        {},
        "line 1: field 'note' holds half of a surrogate pair",
    ),
    ("a.jsonl", "[" * 100_000, {}, "line 1: invalid JSON (too deep"),
    ("a.jsonl", '{"n": ' + "1" * 5000 + "}", {}, "line 1: invalid JSON (too deep, or a number too long)"),
    (
        "a.jsonl",
        b'{"source": "s", "target": "t"}\n{"source": "\xff"}',
        {},
        "line 2: not UTF-8 text (byte 13 of the line)",
    ),
    (
        "a.jsonl",
        '{"source": "s", "target": "t", "id": "x"}\n' * 2,
        {"id_key": "id"},
        "line 2: id 'x' was used before, in line 1",
    ),
    ("a.jsonl", '{"source": "s", "target": "t", "id": true}', {"id_key": "id"}, "field 'id' must hold text, got true"),
    ("a.jsonl", '{"source": "s", "target": "t", "id": ""}', {"id_key": "id"}, "line 1: the id in field 'id' is empty"),
    ("a.jsonl", "", {}, "a.jsonl is empty"),
    ("a.jsonl", "\n\n", {}, "holds no examples"),
    ("a.jsonl", '{"source": "", "target": "t"}', {}, "source or target is empty in each of its 1 rows"),
    ("a.json", "", {}, "a.json is empty"),
    ("a.json", "[]", {}, "holds no examples"),
    (
        "a.json",
        '{"source": "s"}',
        {},
        "must hold one JSON list of objects; a file with one object a line is named .jsonl",
    ),
    (
        "a.json",
        '{"source": "s", "target": "t"}\n' * 2,
        {},
        "line 2: invalid JSON (Extra data, column 1); a file with one object a line is named .jsonl",
    ),
    (
        "a.json",
        '[\n{"source": "s", "target": "t"},\n{"source": 1, "target": "t"}]',
        {},
        "entry 2: field 'source' must hold",
    ),
    ("a.json", '[\n{"source": "s", "target": "t"},\n{"source": }]', {}, "line 3: invalid JSON (Expecting value"),
    ("a.json", '[\n{"source": "s", "target": "t"},\n', {}, "line 2: invalid JSON"),
    ("a.json", '[{"source": "s", "target": "t"},]', {}, "line 1: invalid JSON"),
    ("a.json", '[{"source": "s", "target": "t"}', {}, "line 1: invalid JSON"),
    ("a.json", '[{"source": "s", "target": "t"}] x', {}, "line 1: invalid JSON (Extra data"),
    ("a.json", "[1]", {}, "entry 1: expected a JSON object, got a number"),
    ("a.csv", "question,sql\na,b\n", {}, "line 2: no field 'source' (fields: question, sql)"),
    ("a.csv", 'source,target\n"a\nb",c\nd\n', {}, "line 4: 1 field, where the first line names 2"),
    ("a.csv", "source,source\na,b\n", {}, "line 1: the field name 'source' occurs more than once"),
    ("a.csv", "source,target,,\na,b,,c\n", {}, "line 2: a value in a field that the first line gives no name"),
    ("a.csv", "source,target,,\na,b,,,c\n", {}, "line 2: 5 fields, where the first line names 2"),
    ("a.csv", "source,target,,\na\n", {}, "line 2: 1 field, where the first line names 2"),
    ("a.csv", "sep=,\n", {}, "holds no examples"),
    ("a.csv", 'source,target\na,b\nc,"d\ne,f\n', {}, "line 3: not readable as a table (unexpected end of data)"),
    ("a.csv", "source,target\ra,b\r", {}, "line 1: not readable as a table; its lines end in CR alone: save it"),
    ("a.csv", b"source,target\na,b\nc,\xe9\n", {}, "line 3: not UTF-8 text (byte 3 of the line): save it as UTF-8"),
    ("a.csv", "source,target\n", {}, "holds no examples"),
    ("a.tsv", "source\ttarget\na\tb\tc\n", {}, "line 2: 3 fields, where the first line names 2"),
    ("a.txt", "a", {}, "unknown extension '.txt'; examples are read from .jsonl"),
]


@pytest.mark.parametrize(("name", "text", "options", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_a_fault_is_one_line_that_names_file_and_line(tmp_path: Path, name, text, options, message) -> None:
    path = _write(tmp_path / name, text)
    with pytest.raises(DataError) as caught:
        read_examples(path, **options)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_faults_are_collected_where_that_is_asked_for(tmp_path: Path) -> None:
    good = '{"source": "s", "target": "t"}'
    lines = [good, "not json", good, '{"source": "s"}', '{"source": 1, "target": "t"}', "[1]", good]
    path = _write(tmp_path / "a.jsonl", "\n".join(lines).encode() + b"\n\xff\n" + good.encode())
    examples, report = read_examples(path, collect=True)
    assert [fault.partition(":")[0] for fault in report.faults] == [f"line {n}" for n in (2, 4, 5, 6, 8)]
    assert (report.rows, len(examples), report.places) == (9, 4, [1, 3, 7, 9])
    table = _write(tmp_path / "a.csv", "source,target\na,b\nc\nd,e\nf,g,h\n")
    assert read_examples(table, collect=True)[1].faults == [
        "line 3: 1 field, where the first line names 2",
        "line 5: 3 fields, where the first line names 2",
    ]


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "|"), ("a.tsv", ",")])
def test_another_delimiter_than_the_extension_says_is_found(tmp_path: Path, name: str, sign: str) -> None:
    path = _write(tmp_path / name, f"source{sign}target{sign}note\nhow many{sign}f ( x ){sign}\n")
    examples, report = read_examples(path)
    assert (examples, report.delimiter) == ([Example("1", "how many", "f ( x )")], sign)


def test_columns_that_a_spreadsheet_leaves_behind_are_no_fields(tmp_path: Path) -> None:
    rows = ["how many,f(x),,", "largest,g(x)", "least,h(x),", "most,i(x), ,,,", ",,,", ""]
    path = _write(tmp_path / "a.csv", "\n".join(["source,target,,", *rows]))
    examples, report = read_examples(path)
    assert [(one.source, one.target, one.fields) for one in examples] == [
        (source, target, {})
        for source, target in [("how many", "f(x)"), ("largest", "g(x)"), ("least", "h(x)"), ("most", "i(x)")]
    ]
    assert (report.rows, report.empty) == (5, [6])
    inside = _write(tmp_path / "b.csv", ",,source,,target\n,,how many,,f(x)\n")
    assert read_examples(inside)[0] == [Example("1", "how many", "f(x)")]
    numbered = _write(tmp_path / "c.csv", ",source,target\n7,how many,f(x)\n")
    assert read_examples(numbered)[0] == [Example("1", "how many", "f(x)", {"": "7"})]


@pytest.mark.parametrize("sign", [",", ";", "\t", "|", ":"])
@pytest.mark.parametrize("line", ["sep={}\n", "SEP={}\r\n", '"sep={}"\n', "\ufeffsep={}\n"])
def test_a_first_line_may_say_what_separates_the_fields(tmp_path: Path, sign: str, line: str) -> None:
    text = f"{line.format(sign)}source{sign}target\nhow many{sign}f(x)\nodd\n"
    examples, report = read_examples(_write(tmp_path / "a.csv", text), collect=True)
    assert (examples, report.delimiter) == ([Example("1", "how many", "f(x)")], sign)
    assert (report.places, report.faults) == ([3], ["line 4: 1 field, where the first line names 2"])


def test_a_table_of_many_columns_is_read_in_linear_time(tmp_path: Path) -> None:
    """Twice the columns took four times as long: 40,000 took minutes."""
    header = ",".join(["source", "target", *(f"c{n}" for n in range(100_000))])
    path = _write(tmp_path / "a.csv", f"{header}\nq,p{',' * 100_000}\n")
    began = time.process_time()
    assert read_examples(path)[0] == [Example("1", "q", "p")]
    assert time.process_time() - began < 20  # it takes 0.1; counting each name in the header took 100


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file: .*nowhere\.csv"):
        read_examples(tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match="is a folder; give a file"):
        read_examples(tmp_path)


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".csv", ".tsv"])
def test_huge_fields_are_fine(tmp_path: Path, extension: str) -> None:
    huge = "x" * 1_000_000
    if extension in {".csv", ".tsv"}:
        text = "source{0}target\n{1}{0}f\n".format("," if extension == ".csv" else "\t", huge)
    else:
        text = json.dumps({"source": huge, "target": "f"})
        text = f"[{text}]" if extension == ".json" else text
    examples, _ = read_examples(_write(tmp_path / f"a{extension}", text))
    assert examples == [Example("1", huge, "f")]


def test_reading_streams(tmp_path: Path) -> None:
    """The first bad line stops the reading, so nothing after it can have been parsed or held."""
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.write("not json\n")
        file.truncate(10_000_000_000)  # sparse: reading it whole would take 10 GB of memory
    with pytest.raises(DataError, match="line 1: invalid JSON"):
        read_examples(path)


def test_unparsed_names_what_is_no_program() -> None:
    examples = [Example("a", "s", "f ( x )"), Example("b", "s", "f ( x"), Example("c", "s", ") (")]
    assert unparsed(examples, ProgramSpec()) == ["b", "c"]
