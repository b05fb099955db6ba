"""Users' example files: JSON lines, a JSON list, CSV and TSV, read row by row with every fault named by line."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rcr_trainer.data.examples import Example
from rcr_trainer.errors import DataError

if TYPE_CHECKING:
    from rcr_trainer.programs import ProgramSpec

_Row = tuple[int, Mapping[str, Any]]

_SHOWN = 5
_SPACE = re.compile(r"[ \t\r\n]*")
# The most that C's long holds everywhere.
_FIELD_LIMIT = 2**31 - 1


@dataclass(slots=True)
class ReadReport:
    """What reading a file found.

    Args:
        path: the file.
        rows: rows in it, blank lines not counted.
        kept: examples returned.
        empty: rows dropped because source or target is empty or blank.
        empty_lines: the lines of the first few of these.
        duplicates: rows whose source and target both equal an earlier row's.
        duplicate_lines: the lines of the first few of these.
        duplicates_dropped: whether duplicates were left out.
    """

    path: str
    rows: int = 0
    kept: int = 0
    empty: int = 0
    empty_lines: list[int] = field(default_factory=list)
    duplicates: int = 0
    duplicate_lines: list[int] = field(default_factory=list)
    duplicates_dropped: bool = False

    def summary(self) -> str:
        """The report as one paragraph of plain text."""
        text = f"{self.path}: {_count(self.rows, 'row')}, {_count(self.kept, 'example')} kept."
        if self.empty:
            where = _lines(self.empty_lines, self.empty)
            text += f" {_count(self.empty, 'row')} without source or target dropped ({where})."
        if self.duplicates:
            fate = "dropped" if self.duplicates_dropped else "kept"
            where = _lines(self.duplicate_lines, self.duplicates)
            text += f" {_count(self.duplicates, 'duplicate')} of earlier rows {fate} ({where})."
        return text


def read_examples(
    path: str | Path,
    *,
    source_key: str = "source",
    target_key: str = "target",
    id_key: str | None = None,
    drop_duplicates: bool = False,
) -> tuple[list[Example], ReadReport]:
    """Read examples from a file; its extension says how: .jsonl, .ndjson, .json (one list), .csv or .tsv.

    Text is UTF-8, with or without a byte order mark. CSV and TSV begin with a line of field names.

    Args:
        path: the file.
        source_key: the field that holds the question.
        target_key: the field that holds the program.
        id_key: the field that holds the id (text or a whole number); without it, an example's id is the number of
            its row, the first being 1.
        drop_duplicates: leave out rows whose source and target both equal an earlier row's. They are reported in
            either case.

    Returns:
        The examples in the file's order, and a report of what was dropped or repeated.

    Raises:
        DataError: the file or one of its rows can't be used; the message is one line with file and line.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if path.is_dir():
        raise DataError(f"{path} is a folder; give a file ({', '.join(_READERS)})")
    if reader is None:
        raise DataError(f"{path}: unknown extension {path.suffix!r}; examples are read from {', '.join(_READERS)}")
    keys = {"source_key": source_key, "target_key": target_key} | ({"id_key": id_key} if id_key else {})
    report = ReadReport(str(path), duplicates_dropped=drop_duplicates)
    try:
        with path.open("rb") as file:
            examples = _collect(reader(file, path), keys, report)
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
    if not report.rows:
        raise DataError(f"{path} holds no examples")
    if not examples:
        raise DataError(f"{path} holds no examples: source or target is empty in each of its {report.rows} rows")
    return examples, report


def unparsed(examples: Sequence[Example], spec: ProgramSpec) -> list[str]:
    """The ids of the examples whose target isn't a program of the language of `spec`."""
    return [example.id for example in examples if spec.tree(example.target) is None]


def _collect(rows: Iterator[_Row], keys: Mapping[str, str], report: ReadReport) -> list[Example]:
    examples: list[Example] = []
    lines_of_ids: dict[str, int] = {}
    pairs: set[tuple[str, str]] = set()
    for line, row in rows:
        report.rows += 1
        where = f"{report.path}, line {line}"
        source, target = _text(row, keys, "source_key", where), _text(row, keys, "target_key", where)
        id_ = str(report.rows)
        if "id_key" in keys:
            id_ = _id(row, keys, where)
            first = lines_of_ids.setdefault(id_, line)
            if len(lines_of_ids) < report.rows:
                raise DataError(f"{where}: id {id_!r} was used before, in line {first}")
        if not source.strip() or not target.strip():
            report.empty += 1
            _note(report.empty_lines, line)
            continue
        if (source, target) in pairs:
            report.duplicates += 1
            _note(report.duplicate_lines, line)
            if report.duplicates_dropped:
                continue
        pairs.add((source, target))
        examples.append(Example(id_, source, target))
    report.kept = len(examples)
    return examples


def _value(row: Mapping[str, Any], keys: Mapping[str, str], setting: str, where: str) -> Any:
    key = keys[setting]
    if key in row:
        return row[key]
    close = difflib.get_close_matches(key, list(row), n=1)
    guess = f"; did you mean {close[0]!r}?" if close else f"; name it with {setting}"
    raise DataError(f"{where}: no field {key!r} (fields: {_names(row)}){guess}")


def _text(row: Mapping[str, Any], keys: Mapping[str, str], setting: str, where: str) -> str:
    value = _value(row, keys, setting, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: field {keys[setting]!r} must hold text, got {_kind(value)}")
    if not value.isascii() and not _encodable(value):
        raise DataError(f"{where}: field {keys[setting]!r} holds half of a surrogate pair, which is no text")
    return value


def _id(row: Mapping[str, Any], keys: Mapping[str, str], where: str) -> str:
    value = _value(row, keys, "id_key", where)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    id_ = _text(row, keys, "id_key", where)
    if not id_.strip():
        raise DataError(f"{where}: the id in field {keys['id_key']!r} is empty")
    return id_


def _read_jsonl(file: BinaryIO, path: Path) -> Iterator[_Row]:
    for line, text in _decoded_lines(file, path):
        if text.strip():
            row = _parsed(partial(json.loads, text), path, line, origin=line)
            hint = "; a file that is one JSON list is named .json" if isinstance(row, list) else ""
            yield line, _object(row, f"{path}, line {line}", hint)


def _read_json(file: BinaryIO, path: Path) -> Iterator[_Row]:
    """Objects one by one, so that a long list is never held as objects and as examples at once."""
    text = "".join(line for _, line in _decoded_lines(file, path))
    decode = json.JSONDecoder().raw_decode
    position = _skip_space(text, 0)
    if not text.startswith("[", position):
        hint = "; a file with one object a line is named .jsonl" if text.startswith("{", position) else ""
        raise DataError(f"{path}: must hold one JSON list of objects{hint}")
    line, counted = 1, 0
    position = _skip_space(text, position + 1)
    while not (text.startswith("]", position) and counted == 0):
        line, counted = line + text.count("\n", counted, position), position
        row, position = _parsed(partial(decode, text, position), path, line, origin=1)
        yield line, _object(row, f"{path}, line {line}", "")
        position = _skip_space(text, position)
        if text.startswith("]", position):
            break
        if not text.startswith(",", position):
            line += text.count("\n", counted, position)
            raise DataError(f"{path}, line {line}: expected ',' or ']' after an object of the list")
        position = _skip_space(text, position + 1)
    if _skip_space(text, position + 1) < len(text):
        raise DataError(f"{path}: something follows the end of the JSON list")


def _read_table(delimiter: str) -> Callable[[BinaryIO, Path], Iterator[_Row]]:
    def read(file: BinaryIO, path: Path) -> Iterator[_Row]:
        # The limit is the process's; it is only ever raised, since lowering it again could fail another thread.
        if csv.field_size_limit() < _FIELD_LIMIT:
            csv.field_size_limit(_FIELD_LIMIT)
        lines = (text for _, text in _decoded_lines(file, path))
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        start = 1
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(f"{path}, line {start}: {_csv_reason(error)}") from error
            where, line, start = f"{path}, line {start}", start, reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = _header(cells, where)
            elif len(cells) != len(header):
                raise DataError(f"{where}: {_count(len(cells), 'field')}, where the first line names {len(header)}")
            else:
                yield line, dict(zip(header, cells, strict=True))

    return read


_READERS: Mapping[str, Callable[[BinaryIO, Path], Iterator[_Row]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_table(","),
    ".tsv": _read_table("\t"),
}


def _decoded_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their endings; decoded one by one, so that bad bytes are found in their line."""
    line = 0
    for line, data in enumerate(file, start=1):
        try:
            text = data.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {line}: not UTF-8 text (byte {error.start + 1} of the line)") from error
        yield line, text
    if not line:
        raise DataError(f"{path} is empty")


def _parsed(parse: Callable[[], Any], path: Path, line: int, *, origin: int) -> Any:
    """What `parse` returns; `origin` is the line of the file at which the text that it parses begins."""
    try:
        return parse()
    except json.JSONDecodeError as error:
        line = origin + error.lineno - 1
        raise DataError(f"{path}, line {line}: invalid JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {line}: invalid JSON (too deep, or a number too long)") from error


def _object(row: Any, where: str, hint: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {_kind(row)}{hint}")
    return row


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{where}: the field name {repeated[0]!r} occurs more than once")
    return names


def _csv_reason(error: csv.Error) -> str:
    text = str(error)
    if "new-line" in text:
        return "a carriage return outside quotes; lines end with \\n or \\r\\n"
    if "unexpected end" in text:
        return "a quoted field that begins here never ends"
    return f"not readable as a table ({text})"


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return names.get(type(value), type(value).__name__)


def _names(row: Mapping[str, Any]) -> str:
    names = [name if len(name) <= 40 else f"{name[:37]}..." for name in row]
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "none"


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _note(lines: list[int], line: int) -> None:
    if len(lines) < _SHOWN:
        lines.append(line)


def _lines(lines: list[int], count: int) -> str:
    more = ", …" if count > len(lines) else ""
    return f"line{'s' if count > 1 else ''} {', '.join(map(str, lines))}{more}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
