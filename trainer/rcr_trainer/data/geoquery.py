"""GeoQuery: the corpus file, its published splits, and splits drawn by the same procedures."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.parsers import expat

from rcr_trainer.data.download import Opener, download, open_https
from rcr_trainer.data.examples import PARTS, Example, Split
from rcr_trainer.data.splits import length_split, random_split, template_split, tmcd_split
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.programs import ProgramSpec, Tree

# The sizes of train (Appendix A); template, TMCD and length leave 440 ids for dev and test.
_TRAIN = {"standard": 600, "template": 440, "tmcd": 440, "length": 440}
KINDS = tuple(_TRAIN)

# The splits divide these; the corpus file has twelve more examples that belong to none.
_IDS = range(880)
_PROGRAM = "geo-funql"


CORPUS_URL = (
    "https://raw.githubusercontent.com/jkkummerfeld/text2sql-data/"
    "0da03bcc1abace30df3d4f1c7713c12f818a8f7e/data/non-sql-data/geography-multilingual.xml"
)
CORPUS_SHA256 = "38f90017a242236f6711dede9dda4ec9daa07b46206490cc4f82887566d67db1"


def download_geoquery(
    destination: str | Path, *, url: str = CORPUS_URL, timeout: float = 30.0, opener: Opener = open_https
) -> Path:
    """Download the GeoQuery corpus (1.2 MB) from the public text2sql-data repository, at a fixed revision.

    Args:
        destination: the file to write.
        url: where from; a mirror must hold the very same bytes.
        timeout: seconds without an answer after which to give up.
        opener: opens the address; the default takes https only.

    Returns:
        The destination. It holds the corpus, or is what it was before.

    Raises:
        DataError: no connection, another content, or a destination that can't be written.
    """
    return download(url, destination, sha256=CORPUS_SHA256, max_bytes=10_000_000, timeout=timeout, opener=opener)


def read_corpus(path: str | Path) -> dict[int, Example]:
    """Read the corpus: the English question and the FunQL program of each example that the splits know.

    Entity declarations are refused, so that a crafted file can neither blow up in memory nor read other files.

    Args:
        path: the corpus as `download_geoquery` brings it (XML).

    Returns:
        880 examples by id, 0 to 879, in this order.

    Raises:
        DataError: the file is missing, isn't such a corpus, or lacks an example.
    """
    reader = _CorpusReader()
    try:
        with Path(path).open("rb") as file:
            reader.parser.ParseFile(file)
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
    except expat.ExpatError as error:
        raise DataError(
            f"{path}, line {error.lineno}: not well-formed XML ({expat.ErrorString(error.code)})"
        ) from error
    except DataError as error:
        raise DataError(f"{path}, line {reader.parser.CurrentLineNumber}: {error}") from error
    missing = [id_ for id_ in _IDS if id_ not in reader.examples]
    if missing:
        raise DataError(
            f"{path} isn't the GeoQuery corpus: {len(missing)} of 880 examples are missing, id {missing[0]} first"
        )
    return {id_: reader.examples[id_] for id_ in _IDS}


class _CorpusReader:
    """Collects examples while the parser streams through the file."""

    def __init__(self) -> None:
        self.examples: dict[int, Example] = {}
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.EntityDeclHandler = self._entity
        self._fields: dict[str, str] = {}
        self._id = ""
        self._field = ""
        self._pieces: list[str] = []

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._pieces = []
        self._field = {("nl", "en"): "source", ("mrl", _PROGRAM): "target"}.get((tag, attributes.get("lang", "")), "")
        if tag == "example":
            self._id, self._fields = attributes.get("id", ""), {}

    def _text(self, text: str) -> None:
        if self._field:
            self._pieces.append(text)

    def _end(self, tag: str) -> None:
        if self._field:
            self._fields.setdefault(self._field, " ".join("".join(self._pieces).split()))
            self._field = ""
        if tag != "example":
            return
        if not self._id.isdecimal():
            raise DataError(f"an example's id is a number, got {self._id!r}")
        if not all(self._fields.get(field) for field in ("source", "target")):
            raise DataError(f"example {self._id} has no English question or no {_PROGRAM} program")
        if int(self._id) in self.examples:
            raise DataError(f"example {self._id} occurs twice")
        self.examples[int(self._id)] = Example(self._id, self._fields["source"], self._fields["target"])

    def _entity(self, name: str, *_: Any) -> None:
        raise DataError(f"the file declares an entity ({name}), which the GeoQuery corpus doesn't")


def geoquery_split(corpus: str | Path, kind: str, ids: str | Path | None = None, seed: int = 0) -> Split:
    """One GeoQuery split (sizes: the paper's Appendix A).

    Dev is a quarter of the ids outside train (110 of 440); the standard split has none.

    Args:
        corpus: the corpus file.
        kind: ``standard`` (at random), ``template`` (no anonymised program on both sides), ``tmcd`` (compounds of
            test as unlike those of train as can be) or ``length`` (the longest programs in test); see `splits`.
        ids: a JSON file ``{"train": [ids], "test": [ids]}``, such as the published splits: exactly those ids. With
            a ``dev`` of its own, also exactly that; without, dev is drawn from test, always the same for a file.
        seed: of the draw, without `ids`.

    Returns:
        The split; its examples' ids are those of the corpus.

    Raises:
        ConfigError: no such kind.
        DataError: the corpus or the ids file can't be used.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no GeoQuery split {kind!r}; the splits are {', '.join(KINDS)}")
    examples = read_corpus(corpus)
    meta: dict[str, Any] = {"task": "geoquery", "split": kind}
    if ids is not None:
        parts = _read_ids(Path(ids))
        name, meta["how"] = Path(ids).stem, f"the ids of {Path(ids).name}"
    else:
        parts = _drawn_ids(examples, kind, seed)
        name, meta["how"], meta["seed"] = kind, "drawn by the procedure", seed
    if kind != "standard" and not parts["dev"]:
        parts["dev"], parts["test"] = _take_dev(parts["test"], seed if ids is None else 0)
    train, dev, test = ([examples[id_] for id_ in parts[part]] for part in PARTS)
    return Split(f"geoquery-{name}", train, dev, test, meta)


def _drawn_ids(examples: Mapping[int, Example], kind: str, seed: int) -> dict[str, list[int]]:
    spec = ProgramSpec(language="functional", anonymize=True)
    ids, programs = list(examples), [example.target for example in examples.values()]
    name = f"geoquery-{kind}-{seed}"
    if kind == "standard":
        sides = random_split(len(ids), _TRAIN[kind], name)
    elif kind == "template":
        sides = template_split([spec.key(program) for program in programs], _TRAIN[kind], name)
    else:
        trees = [_tree(spec, example) for example in examples.values()]
        if kind == "tmcd":
            sides = tmcd_split(trees, _TRAIN[kind], name)
        else:
            sides = length_split([len(tree) for tree in trees], _TRAIN[kind], name)
    train, test = ([ids[position] for position in side] for side in sides)
    return {"train": train, "dev": [], "test": test}


def _tree(spec: ProgramSpec, example: Example) -> Tree:
    tree = spec.tree(example.target)
    if tree is None:
        raise DataError(f"example {example.id} holds no FunQL program: {example.target}")
    return tree


def _take_dev(test: list[int], seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(f"geoquery-dev-{seed}").random  # noqa: S311 - data, not secrets
    dev = {id_ for _, id_ in sorted((draw(), id_) for id_ in sorted(test))[: round(len(test) / 4)]}
    return [id_ for id_ in test if id_ in dev], [id_ for id_ in test if id_ not in dev]


def _read_ids(path: Path) -> dict[str, list[int]]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON file: {str(error).splitlines()[0]}") from error
    if not isinstance(record, dict) or not {"train", "test"} <= record.keys() <= set(PARTS):
        raise DataError(f'{path}: a splits file looks like {{"train": [ids], "test": [ids]}}, "dev" if you like')
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    owner: dict[int, str] = {}
    for part, values in record.items():
        if not isinstance(values, list) or not values:
            raise DataError(f"{path}: {part!r} must be a list of ids, with at least one")
        for value in values:
            id_ = _id(value)
            if id_ is None:
                raise DataError(f"{path}: {value!r} in {part!r} is no GeoQuery id; they run from 0 to {_IDS[-1]}")
            if id_ in owner:
                raise DataError(f"{path}: id {id_} stands in {owner[id_]!r} and again in {part!r}")
            owner[id_] = part
            parts[part].append(id_)
    return parts


def _id(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value in _IDS else None
