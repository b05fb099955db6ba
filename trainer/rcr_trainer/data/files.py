"""Reads example files (JSON lines, a JSON list, tables, Parquet) and split folders; errors name the place."""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from langchain_rcr.basics.extras import require
from langchain_rcr.basics.progress import track
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data.examples import PARTS, Example, Split, read_json_as
from rcr_trainer.errors import DataError

_Row = tuple[int, Any]
"""Line or entry, and the row; a `DataError` in place of a row that can't be read."""

SHOWN = 10
"""Places that a message lists."""
DELIMITERS = ",\t;|"
_SEP = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([!#-/:-@\[-`{-~]|\t)"?\s*', re.IGNORECASE)
"""A first line that tells spreadsheets the delimiter."""
_LIST = "; a file that is one JSON list is named .json"
_CR = "; its lines end in CR alone: save it with the line ends of Unix or Windows"
_NESTED = ("inputs", "outputs", "reference_outputs")
_ROLES = {"human": "user", "ai": "assistant", "developer": "system"}
"""LangChain's role names (and OpenAI's developer) → ours."""
_KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}


@dataclass(slots=True)
class ReadReport:
    """What reading a file found. Places are lines, or entries of a JSON list."""

    path: str
    unit: str = "line"  # or "entry"
    rows: int = 0  # without blank lines
    delimiter: str | None = None  # of a table
    places: list[int] = field(default_factory=list)  # of the examples, in order
    empty: list[int] = field(default_factory=list)  # rows dropped because source or target is null or blank
    duplicates: list[int] = field(default_factory=list)  # rows that repeat an earlier source and target; they are kept
    faults: list[str] = field(default_factory=list)  # what is wrong with rows that can't be used, if collected

    def at(self, places: Sequence[int]) -> str:
        """Places in words: "lines 2, 3"."""
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
    """Read a file of examples: .jsonl, .ndjson, .json (one list), .csv, .tsv or .parquet, by its extension.

    A further .gz means that it is compressed. Rows exported by LangSmith and OpenAI have fields such as
    `inputs.question` and `messages.user`; of a chat, the last answer and the last question before it count. Text is
    UTF-8, with or without a byte order mark. A table's first line names its fields; a line `sep=;` before it may give
    the delimiter, and if the usual one is missing from the header, the most common other one counts. Other fields are
    kept in `Example.fields`, except empty ones and those called id, source or target.

    Args:
        path: the file.
        source_key: the field of the question.
        target_key: the field of the program.
        id_key: the field of the id (text or a whole number); None: ids are the numbers of the rows, from 1.
        collect: report rows that can't be used instead of raising at the first.

    Returns:
        The examples in the file's order, and what was dropped or repeated.

    Raises:
        DataError: the file or a row can't be used; one line gives file and place.
    """
    report = ReadReport(str(path))
    keys = {"source_key": source_key, "target_key": target_key} | ({"id_key": id_key} if id_key else {})
    examples: list[Example] = []
    ids: dict[str, int] = {}
    pairs: set[tuple[str, str]] = set()
    for place, row in _rows(Path(path), report):
        report.rows += 1
        try:
            example = _example(row, keys, report, place, ids)
        except DataError as error:
            if not collect:
                raise
            report.faults.append(str(error).removeprefix(f"{path}, "))
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
    if not report.rows:
        raise DataError(f"{path} holds no examples")
    if not examples and not report.faults:
        raise DataError(f"{path} holds no examples: source or target is empty in each of its {report.rows} rows")
    return examples, report


def read_split(directory: str | Path) -> Split:
    """Read a folder written by `write_split`; a `DataError` if a file is damaged, or an id is in two parts."""
    directory = Path(directory)
    if not (directory / "split.json").is_file():
        raise DataError(f"no split at {directory}: it holds no split.json")
    meta = read_json_as(dict[str, Any], directory / "split.json", "a split's")
    split = Split(str(meta.pop("name", directory.name)), [])
    owner: dict[str, str] = {}
    for part in PARTS:
        path = directory / f"{part}.jsonl"
        if path.stat().st_size if path.exists() else part != "dev":
            setattr(split, part, read_examples(path, id_key="id")[0])
        for example in getattr(split, part):
            if (other := owner.setdefault(example.id, part)) != part:
                both = f"{other}.jsonl and in {part}.jsonl (without data.id_key, rows are numbered)"
                raise DataError(f"{directory}: id {example.id!r} is in {both}")
    if (counts := meta.pop("counts", split.counts())) != split.counts():
        raise DataError(f"{directory}: split.json announces {counts}, the files hold {split.counts()}")
    split.meta = meta
    return split


def text_fields(path: Path, sample: int) -> list[str]:
    """The fields that hold text, or null, in at least nine in ten of the first `sample` rows."""
    report = ReadReport(str(path))
    found = list(islice(_rows(path, report), sample))
    rows = [row for _, row in found if isinstance(row, dict)]
    if not found:
        raise DataError(f"{path} holds no examples")
    if not rows:
        _example(found[0][1], {}, report, found[0][0], {})  # raises an error that says what is wrong
    return [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(isinstance(row.get(name), str) and row[name] for row in rows)
        and 10 * sum(not isinstance(row.get(name), str | None) for row in rows) <= len(rows)
    ]


def unparsed(examples: Sequence[Example], spec: ProgramSpec) -> list[str]:
    """The ids of the examples whose target isn't a program in the language of `spec`."""
    return [each.id for each in track(examples, "reading programs") if not spec.structures(each.target)]


# ---------------------------------------------------------------- rows → examples


def _example(row: Any, keys: Mapping[str, str], report: ReadReport, place: int, ids: dict[str, int]) -> Example:
    """The example in a row; `ids` holds earlier ids with their places."""
    if isinstance(row, DataError):
        raise row
    where = f"{report.path}, {report.unit} {place}"
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {_kind(row)}{_LIST if isinstance(row, list) else ''}")
    source, target = (_text(row, keys, setting, where) for setting in ("source_key", "target_key"))
    id_ = str(report.rows)
    if "id_key" in keys:
        id_ = _text(row, keys, "id_key", where)
        if not id_.strip():
            raise DataError(f"{where}: the id in field {keys['id_key']!r} is empty")
        if (first := ids.setdefault(id_, place)) != place:
            raise DataError(f"{where}: id {id_!r} was used before, in {report.unit} {first}")
    own = {*keys.values(), "id", "source", "target"}
    others = {name: value for name, value in row.items() if name not in own and not isinstance(value, bytes)}
    fields = {name: value for name, value in others.items() if value not in (None, "")}
    for name in (*keys.values(), *fields):
        value = row[name]
        try:
            f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}".encode()
        except UnicodeEncodeError:
            raise DataError(f"{where}: field {name!r} holds half of a surrogate pair, which isn't text") from None
    return Example(id_, source, target, fields)


def _text(row: Mapping[str, Any], keys: Mapping[str, str], setting: str, where: str) -> str:
    """The text in a field; null is empty, and an id may be a whole number."""
    key = keys[setting]
    if key not in row:
        close = difflib.get_close_matches(key, list(row), n=1)
        guess = f"did you mean {close[0]!r}?" if close else f"name it with {setting}"
        names = [name if len(name) <= 40 else f"{name[:37]}..." for name in row]
        listed = ", ".join(names[:10]) + (", …" if len(names) > 10 else "") or "none"
        raise DataError(f"{where}: no field {key!r} (fields: {listed}); {guess}")
    value = row[key]
    if isinstance(value, str) or value is None:
        return value or ""
    if setting == "id_key" and type(value) is int:
        return str(value)
    raise DataError(f"{where}: field {key!r} must hold text, got {_kind(value)}")


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


# ---------------------------------------------------------------- files → rows


def _rows(path: Path, report: ReadReport) -> Iterator[_Row]:
    """The rows of a file, one by one; its unit and delimiter go into the report."""
    packed = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix if packed else path.suffix
    reader = _READERS.get(suffix.lower())
    if path.is_dir():
        raise DataError(f"{path} is a folder; give a file ({', '.join(_READERS)})")
    if reader is None:
        raise DataError(f"{path}: unknown extension {suffix!r}; examples are read from {', '.join(_READERS)}")
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            if not file.peek(1):
                raise DataError(f"{path} is empty")
            for place, row in reader(file, path, report):  # type: ignore[arg-type]
                yield place, opened(row)
    except FileNotFoundError:
        where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
        raise DataError(f"no such file: {path}{where}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from error


def _read_jsonl(file: BinaryIO, path: Path, report: ReadReport) -> Iterator[_Row]:
    for line, data in enumerate(file, start=1):
        try:
            if (text := _decoded(data, path, line)).strip():
                hint = _CR if "\r" in text.rstrip("\r\n") else _LIST if text.lstrip().startswith("[") else ""
                yield line, _parsed(text, path, line, hint)
        except DataError as error:
            yield line, error


def _read_json(file: BinaryIO, path: Path, report: ReadReport) -> Iterator[_Row]:
    report.unit = "entry"
    text = "".join(_texts(file, path))
    hint = "; a file with one object a line is named .jsonl" if text.lstrip().startswith("{") else ""
    rows = _parsed(text, path, 1, hint)
    if not isinstance(rows, list):
        raise DataError(f"{path}: must hold one JSON list of objects{hint}")
    yield from enumerate(rows, start=1)


def _read_parquet(file: BinaryIO, path: Path, report: ReadReport) -> Iterator[_Row]:
    report.unit = "entry"
    require("pyarrow", "parquet")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file)
        _check_names(table.schema_arrow.names, path)
        rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
        yield from enumerate(({name: _plain(value) for name, value in row.items()} for row in rows), start=1)
    except ArrowException as error:
        raise DataError(f"can't read {path}: {' '.join(str(error).split())}") from error


def _check_names(names: Sequence[str], where: str | Path) -> None:
    if repeated := sorted(name for name, count in Counter(names).items() if name and count > 1):
        raise DataError(f"{where}: the field name {repeated[0]!r} occurs more than once")


def _plain(value: Any) -> Any:
    """A value in its JSON form, where dates, decimal numbers and the like are text; bytes stay."""
    known = value is None or isinstance(value, str | int | float | bytes)
    return value if known else json.loads(json.dumps(value, default=str))


def _read_table(file: BinaryIO, path: Path, report: ReadReport, *, delimiter: str) -> Iterator[_Row]:
    # To what a C long holds everywhere. It is process-wide, so only raise it, or another thread could fail.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    first = file.readline()
    file.seek(0)
    texts, skipped = _texts(file, path), 0
    if said := _SEP.fullmatch(first):
        delimiter, skipped = said[1].decode(), 1
        next(texts)
    elif delimiter.encode() not in first:
        found = max(DELIMITERS, key=lambda sign: first.count(sign.encode()))
        delimiter = found if found.encode() in first else delimiter
    report.delimiter = delimiter
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    header: list[str] = []
    named, line = 0, 1 + skipped
    try:
        for cells in reader:
            begins, line = line, reader.line_num + 1 + skipped
            where = f"{path}, line {begins}"
            if not header:
                header = [cell.strip() for cell in cells]
                _check_names(header, where)
                unnamed = [at for at, name in enumerate(header) if not name]
                named = max((at for at, name in enumerate(header, start=1) if name), default=0)
                continue
            # Spreadsheets write unnamed columns that were once used, and omit them in some rows.
            while len(cells) > named and not cells[-1].strip():
                cells.pop()
            if not cells:
                continue
            if not named <= len(cells) <= len(header):
                count = f"{len(cells):,} field{'' if len(cells) == 1 else 's'}"
                yield begins, DataError(f"{where}: {count}, where the first line names {named}")
            elif unnamed[1:] and any(cells[at].strip() for at in unnamed if at < len(cells)):
                yield begins, DataError(f"{where}: a value in a field that the first line gives no name")
            else:
                yield begins, dict(zip(header, cells, strict=False))
    except csv.Error as error:
        reason = _CR if "new-line character" in str(error) else f" ({error})"
        raise DataError(f"{path}, line {line}: not readable as a table{reason}") from error


_READERS: Mapping[str, Callable[[BinaryIO, Path, ReadReport], Iterator[_Row]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
    ".parquet": _read_parquet,
}


def _texts(file: BinaryIO, path: Path) -> Iterator[str]:
    """Lines with their endings, decoded one by one, so that an error names the line of bad bytes."""
    return (_decoded(data, path, line) for line, data in enumerate(file, start=1))


def _decoded(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        known = "it is UTF-16, " if line == 1 and data[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else ""
        reason = f"not UTF-8 text (byte {error.start + 1} of the line): {known}save it as UTF-8"
        raise DataError(f"{path}, line {line}: {reason}") from None


def _parsed(text: str, path: Path, line: int, hint: str) -> Any:
    """The JSON value of a text that begins on a line of the file; an error ends with the hint."""
    try:
        return json.loads(text.rstrip("\r\n"))  # an error at the end belongs to the last line, not the next
    except json.JSONDecodeError as error:
        where = f"{path}, line {line + error.lineno - 1}"
        raise DataError(f"{where}: invalid JSON ({error.msg}, column {error.colno}){hint}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {line}: invalid JSON (too deep, or a number too long){hint}") from error


# ---------------------------------------------------------------- rows that other tools exported


def opened(row: Any) -> Any:
    """The row with nested objects and chats turned into fields: `inputs.question`, `messages.user`.

    Opens `inputs`, `outputs` and `messages`; of the latter, only the last answer and the last question before it count.
    An answer that calls tools is a program in JSON: `[{"name": …, "arguments": {…}}, …]`, or a single call by itself.
    Everything else stays.
    """
    return dict(_fields(row, "")) if isinstance(row, dict) else row


def _fields(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name in _NESTED and isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        elif name == "messages" and isinstance(value, list) and all(isinstance(one, dict) for one in value):
            yield from ((f"{prefix}messages.{role}", text) for role, text in _exchange(value).items())
        else:
            yield f"{prefix}{name}", value


def _exchange(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By role: the system's text, the last answer, and the last question before it (the last of all if no answer)."""
    roles = (str(one.get("role") or one.get("type")) for one in messages)
    said = [(_ROLES.get(role, role), _content(one)) for role, one in zip(roles, messages, strict=True)]
    answers = [at for at, (role, text) in enumerate(said) if role == "assistant" and text]
    end = answers[-1] if answers else len(said)
    found = {role: text for role, text in said[:end] if role in ("system", "user")}
    return found | ({"assistant": said[end][1]} if answers else {})


def _content(message: Mapping[str, Any]) -> str:
    if isinstance(inner := message.get("data"), dict):  # LangChain's format
        message = inner
    calls = [call for call in map(_call, message.get("tool_calls") or ()) if call is not None]
    if calls:
        return json.dumps(calls if calls[1:] else calls[0], ensure_ascii=False)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else ""


def _call(call: Any) -> dict[str, Any] | None:
    """A tool call in OpenAI's form (`function`, with arguments as text) or LangChain's (`name` and `args`)."""
    if not isinstance(call, dict):
        return None
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    arguments = inner.get("arguments", inner.get("args"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return {"name": inner.get("name"), "arguments": arguments or {}}
