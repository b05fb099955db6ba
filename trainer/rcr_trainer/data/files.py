"""Users' example files: JSON lines, a JSON list, CSV and TSV, with every fault named by line or entry."""

from __future__ import annotations

import csv
import difflib
import json
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rcr_trainer.data.examples import Example
from rcr_trainer.errors import DataError

if TYPE_CHECKING:
    from langchain_rcr.programs import ProgramSpec

_Row = tuple[int, Any]
"""Line or entry, and the row; a `DataError` instead of a row that can't be read."""

SHOWN = 10
"""Lines that a report names."""
DELIMITERS = ",\t;|"
# The most that C's long holds everywhere.
_FIELD_LIMIT = 2**31 - 1
_SEP = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([!#-/:-@\[-`{-~]|\t)"?\s*', re.IGNORECASE)
"""A first line that tells spreadsheets what separates the fields."""
_LIST = "; a file that is one JSON list is named .json"
_CR = "; its lines end in CR alone: save it with the line ends of Unix or Windows"
_KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}


@dataclass(slots=True)
class ReadReport:
    """What reading a file found.

    Args:
        path: the file.
        unit: what places are counted in: line, or entry of a JSON list.
        rows: rows in it, blank lines not counted.
        delimiter: of a table's fields; None: it is no table.
        places: of each example, in the file's order.
        empty: where rows were dropped because source or target is null, empty or blank.
        duplicates: where rows equal an earlier one in source and target; they are kept.
        faults: what is wrong with each row that can't be used, with its place; empty where the first one raised.
    """

    path: str
    unit: str = "line"
    rows: int = 0
    delimiter: str | None = None
    places: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def at(self, places: Sequence[int]) -> str:
        """Some places in words, as in "lines 2, 3"."""
        unit = self.unit if len(places) == 1 else {"line": "lines", "entry": "entries"}[self.unit]
        return f"{unit} {', '.join(map(str, places[:SHOWN]))}{', …' if len(places) > SHOWN else ''}"


def read_examples(
    path: str | Path,
    *,
    source_key: str = "source",
    target_key: str = "target",
    id_key: str | None = None,
    collect: bool = False,
) -> tuple[list[Example], ReadReport]:
    """Read examples from a file; its extension says how: .jsonl, .ndjson, .json (one list), .csv or .tsv.

    Text is UTF-8, with or without a byte order mark. CSV and TSV begin with a line of field names. Where that line has
    no comma (or tab) but a semicolon, a tab or a bar, this separates the fields; a line `sep=;` before it may say so,
    too. Further fields go along
    (`Example.fields`), save empty ones and those called id, source or target, which would hide our own.

    Args:
        path: the file.
        source_key: the field that holds the question.
        target_key: the field that holds the program.
        id_key: the field that holds the id (text or a whole number); without it, an example's id is the number of
            its row, the first being 1.
        collect: go on after a row that can't be used, and put it into the report, instead of raising.

    Returns:
        The examples in the file's order, and a report of what was dropped or repeated.

    Raises:
        DataError: the file or one of its rows can't be used; the message is one line with file and place.
    """
    keys = {"source_key": source_key, "target_key": target_key} | ({"id_key": id_key} if id_key else {})
    report = ReadReport(str(path))
    examples = _collect(_rows(path, report), keys, report, collect)
    if not report.rows:
        raise DataError(f"{path} holds no examples")
    if not examples and not report.faults:
        raise DataError(f"{path} holds no examples: source or target is empty in each of its {report.rows} rows")
    return examples, report


def text_fields(path: str | Path, sample: int) -> list[str]:
    """The fields that hold text where they hold anything, in as many of the first rows as `sample` says.

    One row in ten may hold something else there.

    Raises:
        DataError: the file can't be read, or none of these rows can.
    """
    report = ReadReport(str(path))
    found = list(islice(_rows(path, report), sample))
    rows = [row for _, row in found if isinstance(row, dict)]
    if found and not rows:
        _example(found[0][1], {}, report, found[0][0], {})  # which says what is wrong with it
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        name
        for name in names
        if any(isinstance(row.get(name), str) and row[name] for row in rows)
        and 10 * sum(not isinstance(row.get(name), str | None) for row in rows) <= len(rows)
    ]


def unparsed(examples: Sequence[Example], spec: ProgramSpec) -> list[str]:
    """The ids of the examples whose target isn't a program of the language of `spec`."""
    return [example.id for example in examples if not spec.structures(example.target)]


def _rows(path: str | Path, report: ReadReport) -> Iterator[_Row]:
    """The rows of a file, as far as they are asked for; what is found out about it goes into the report."""
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if path.is_dir():
        raise DataError(f"{path} is a folder; give a file ({', '.join(_READERS)})")
    if reader is None:
        raise DataError(f"{path}: unknown extension {path.suffix!r}; examples are read from {', '.join(_READERS)}")
    try:
        with path.open("rb") as file:
            yield from reader(file, path, report)
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error


def _collect(rows: Iterator[_Row], keys: Mapping[str, str], report: ReadReport, collect: bool) -> list[Example]:
    examples: list[Example] = []
    ids: dict[str, int] = {}
    pairs: set[tuple[str, str]] = set()
    for place, row in rows:
        report.rows += 1
        try:
            example = _example(row, keys, report, place, ids)
        except DataError as error:
            if not collect:
                raise
            report.faults.append(str(error).removeprefix(f"{report.path}, "))
            continue
        if not example.source.strip() or not example.target.strip():
            report.empty.append(place)
            continue
        pair = (example.source, example.target)
        if pair in pairs:
            report.duplicates.append(place)
        pairs.add(pair)
        examples.append(example)
        report.places.append(place)
    return examples


def _example(row: Any, keys: Mapping[str, str], report: ReadReport, place: int, ids: dict[str, int]) -> Example:
    """The example in a row; `ids` holds the ids so far with their places."""
    if isinstance(row, DataError):
        raise row
    where = f"{report.path}, {report.unit} {place}"
    if not isinstance(row, dict):
        hint = _LIST if isinstance(row, list) else ""
        raise DataError(f"{where}: expected a JSON object, got {_kind(row)}{hint}")
    source, target = _text(row, keys, "source_key", where), _text(row, keys, "target_key", where)
    id_ = str(report.rows)
    if "id_key" in keys:
        id_ = _id(row, keys, where)
        if (first := ids.setdefault(id_, place)) != place:
            raise DataError(f"{where}: id {id_!r} was used before, in {report.unit} {first}")
    hidden = {*keys.values(), "id", "source", "target"}
    fields = {name: value for name, value in row.items() if name not in hidden and value not in (None, "")}
    return Example(id_, source, target, fields)


def _value(row: Mapping[str, Any], keys: Mapping[str, str], setting: str, where: str) -> Any:
    key = keys[setting]
    if key in row:
        return row[key]
    close = difflib.get_close_matches(key, list(row), n=1)
    guess = f"; did you mean {close[0]!r}?" if close else f"; name it with {setting}"
    names = [name if len(name) <= 40 else f"{name[:37]}..." for name in row]
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "") or "none"
    raise DataError(f"{where}: no field {key!r} (fields: {shown}){guess}")


def _text(row: Mapping[str, Any], keys: Mapping[str, str], setting: str, where: str) -> str:
    value = _value(row, keys, setting, where)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: field {keys[setting]!r} must hold text, got {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: field {keys[setting]!r} holds half of a surrogate pair, which is no text") from None
    return value


def _id(row: Mapping[str, Any], keys: Mapping[str, str], where: str) -> str:
    value = _value(row, keys, "id_key", where)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    id_ = _text(row, keys, "id_key", where)
    if not id_.strip():
        raise DataError(f"{where}: the id in field {keys['id_key']!r} is empty")
    return id_


def _read_jsonl(file: BinaryIO, path: Path, report: ReadReport) -> Iterator[_Row]:
    for line, text in _decoded_lines(file, path):
        if isinstance(text, DataError):
            yield line, text
        elif text.strip():
            try:
                yield line, _parsed(text, path, line)
            except DataError as error:
                hint = _LIST if text.lstrip().startswith("[") else ""
                hint = _CR if "\r" in text.rstrip("\r\n") else hint
                yield line, DataError(f"{error}{hint}") if hint else error


def _read_json(file: BinaryIO, path: Path, report: ReadReport) -> Iterator[_Row]:
    report.unit = "entry"
    rows = _parsed("".join(_texts(file, path)), path, 1)
    if not isinstance(rows, list):
        hint = "; a file with one object a line is named .jsonl" if isinstance(rows, dict) else ""
        raise DataError(f"{path}: must hold one JSON list of objects{hint}")
    yield from enumerate(rows, start=1)


def _read_table(file: BinaryIO, path: Path, report: ReadReport, *, delimiter: str) -> Iterator[_Row]:
    # The limit is the process's; it is only ever raised, since lowering it again could fail another thread.
    if csv.field_size_limit() < _FIELD_LIMIT:
        csv.field_size_limit(_FIELD_LIMIT)
    first = file.readline()
    said = _SEP.fullmatch(first)
    report.delimiter = said[1].decode() if said else _delimiter(first, delimiter)
    file.seek(0)
    texts, before = _texts(file, path), 0
    if said:
        next(texts)
        before = 1
    reader = csv.reader(texts, delimiter=report.delimiter, strict=True)
    header: list[str] = []
    named, line = 0, 1 + before
    try:
        for cells in reader:
            where, begins, line = f"{path}, line {line}", line, reader.line_num + 1 + before
            if not header:
                header = [cell.strip() for cell in cells]
                if repeated := sorted(name for name, count in Counter(header).items() if name and count > 1):
                    raise DataError(f"{where}: the field name {repeated[0]!r} occurs more than once")
                unnamed = [at for at, name in enumerate(header) if not name]
                named = max((at for at, name in enumerate(header, start=1) if name), default=0)
                continue
            # Spreadsheets write columns without a name that were used once, and leave them out in some rows.
            while len(cells) > named and not cells[-1].strip():
                cells.pop()
            if not cells:
                continue
            if not named <= len(cells) <= len(header):
                expected = f"where the first line names {named}"
                yield begins, DataError(f"{where}: {_count(len(cells), 'field')}, {expected}")
            elif unnamed[1:] and any(cells[at].strip() for at in unnamed if at < len(cells)):
                yield begins, DataError(f"{where}: a value in a field that the first line gives no name")
            else:
                yield begins, dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not readable as a table ({error})") from error


def _delimiter(header: bytes, usual: str) -> str:
    """What separates the fields of a table's first line: the usual sign, or, where it has none, the commonest other."""
    counts = {sign: header.count(sign.encode()) for sign in DELIMITERS}
    return usual if counts[usual] or not any(counts.values()) else max(counts, key=lambda sign: counts[sign])


_READERS: Mapping[str, Callable[[BinaryIO, Path, ReadReport], Iterator[_Row]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
}


def _texts(file: BinaryIO, path: Path) -> Iterator[str]:
    """Lines with their endings; one that is no text raises."""
    for _, text in _decoded_lines(file, path):
        if isinstance(text, DataError):
            raise text
        yield text


def _decoded_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str | DataError]]:
    """Lines with their endings; decoded one by one, so that bad bytes are found in their line."""
    line = 0
    for line, data in enumerate(file, start=1):
        try:
            yield line, data.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            hint = ": it is UTF-16, save it as UTF-8" if line == 1 and data[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else ""
            yield line, DataError(f"{path}, line {line}: not UTF-8 text (byte {error.start + 1} of the line){hint}")
    if not line:
        raise DataError(f"{path} is empty")


def _parsed(text: str, path: Path, line: int) -> Any:
    """The JSON value of a text that begins on a line of the file."""
    try:
        return json.loads(text.rstrip("\r\n"))  # an error at the end is one of the last line, not of the next
    except json.JSONDecodeError as error:
        where = f"{path}, line {line + error.lineno - 1}"
        raise DataError(f"{where}: invalid JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {line}: invalid JSON (too deep, or a number too long)") from error


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
