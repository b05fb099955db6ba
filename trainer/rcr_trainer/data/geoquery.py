"""GeoQuery: the corpus file, and splits published by others."""

from __future__ import annotations

import hashlib
import logging
import random
import re
import urllib.request
from collections import Counter
from dataclasses import replace
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError
from xml.etree import ElementTree

from pydantic import BaseModel, BeforeValidator, Field

from langchain_rcr.basics.files import write_bytes
from rcr_trainer.data.examples import PARTS, Example, Split, read_json_as, read_text
from rcr_trainer.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

# The splits divide these; twelve more examples in the corpus file belong to no split.
_IDS = range(880)
_whole = BeforeValidator(lambda value: int(value) if isinstance(value, str) and value.isdecimal() else value)
_Part = Annotated[list[Annotated[int, _whole, Field(ge=0, lt=len(_IDS), strict=True)]], Field(min_length=1)]
_VALUE, _MARK = re.compile("'[^']*'"), re.compile(r"[\s?.!]+$")

CORPUS_URL = (
    "https://raw.githubusercontent.com/jkkummerfeld/text2sql-data/"
    "0da03bcc1abace30df3d4f1c7713c12f818a8f7e/data/non-sql-data/geography-multilingual.xml"
)
CORPUS_SHA256 = "38f90017a242236f6711dede9dda4ec9daa07b46206490cc4f82887566d67db1"
_MOST_BYTES, _TIMEOUT_S = 10_000_000, 30.0

_LANGUAGE = "https://raw.githubusercontent.com/google-research/language"
_NQG = f"{_LANGUAGE}/13fd14e1b285002412252097586f8fe405ba8a24/language/compgen/nqg/tasks/geoquery/splits"
_CSL = f"{_LANGUAGE}/bcc90d312aa355f507ed128e39b7f6ea4b709537/language/compgen/csl/tasks/geoquery/splits"
PUBLISHED = {
    "standard": (_NQG, "e05d48357694bfa7ce9b9257cc05aa413dc843b483af8b1a462f30cbebe8fbc8"),
    "template_1": (_CSL, "754c79278ce1beeeab03f6e627e425fe7f1d8977a1f55edaff67396ae4adb795"),
    "template_2": (_CSL, "37718b1315afc1aaed9e272f4eae3ff53ee309de29aad02197bed65d9ad999f4"),
    "template_3": (_CSL, "ff066cefe85c6d8b08771764650c500ca8b467a5011ba551cab666632d52d8f6"),
    "tmcd_1": (_CSL, "ca1612c00ab8de1ea62a5b18bd54dff8255bfb35e33c7c65fd681593fc083955"),
    "tmcd_2": (_CSL, "d334725fce0c014551fe47d8d708f266bd6987279f30c99b1ca336413a863b27"),
    "tmcd_3": (_CSL, "49793305f646a1cd9993f65e91cdd53292219d4e3285dc6db598093a4049bec6"),
    "length": (_CSL, "bfe1ea81769f9f8c424a77e907b6e57b0dfae66482b97a73301f51dc3e07a3b4"),
}
"""The paper's splits (sizes in its appendix A): the folder of NAME.json, which has the ids, and the file's sha256."""
SHORT = {"template": "template_1", "tmcd": "tmcd_1"}


class _Ids(BaseModel, extra="forbid"):
    train: _Part
    dev: _Part = []
    test: _Part


def download_geoquery(destination: str | Path, *, url: str = CORPUS_URL, sha256: str | None = None) -> Path:
    """Download the GeoQuery corpus (1.2 MB), or the ids of a published split, unless it is there already.

    Raises:
        DataError: no connection, or unexpected content, there or downloaded; the destination stays as it was.
        InputError: the destination can't be written.
    """
    destination, sha256 = Path(destination), sha256 or CORPUS_SHA256
    if destination.is_file():
        _check(destination, destination.read_bytes(), sha256)
        return destination
    logger.info("downloading %s (checksum tested) to %s", url, destination)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - the content is checked
            content = response.read(_MOST_BYTES + 1)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        reason = str(getattr(error, "reason", None) or error or type(error).__name__).splitlines()[0]
        raise DataError(f"can't download {url}: {reason}") from error
    _check(url, content, sha256)
    write_bytes(destination, content)
    return destination


def _check(place: str | Path, content: bytes, sha256: str) -> None:
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(f"{place} is not the published file: its sha256 is {digest}, expected {sha256}")


def published_ids(folder: Path, name: str) -> Path:
    """The file of ids of one of the paper's splits, downloaded beside the corpus if missing, or a `DataError`."""
    source, sha256 = PUBLISHED[name]
    path = folder / ("splits" if name == "standard" else "splits_csl") / f"{name}.json"
    return download_geoquery(path, url=f"{source}/{path.name}", sha256=sha256)


def read_corpus(path: Path) -> dict[int, Example]:
    """The English questions and FunQL programs of the 880 examples in the splits, by id in order, or a `DataError`."""
    text = read_text(path)
    _check(path, text.encode(), CORPUS_SHA256)
    found: dict[int, Example] = {}
    for element in ElementTree.fromstring(text).iter("example"):  # noqa: S314 - a file of known content
        id_ = element.get("id", "")
        texts = (element.findtext("nl[@lang='en']"), element.findtext("mrl[@lang='geo-funql']"))
        source, target = (" ".join((each or "").split()) for each in texts)
        found[int(id_)] = Example(id_, source, target)
    return {id_: found[id_] for id_ in _IDS}


def geoquery_split(corpus: str | Path, kind: str, ids: str | Path | None = None) -> Split:
    """One GeoQuery split; ids are those of the corpus.

    Args:
        corpus: the corpus file.
        kind: one of PUBLISHED or SHORT.
        ids: a JSON file ``{"train": [ids], "test": [ids]}``. It may have a ``dev``; otherwise a fixed quarter of test
            becomes dev, except for ``standard``, which has none. None: the published file in the corpus' folder,
            downloaded if missing.

    Raises:
        ConfigError: no such kind.
        DataError: the corpus or the ids can't be used or downloaded.
    """
    name = SHORT.get(kind, kind)
    if name not in PUBLISHED:
        raise ConfigError(f"there is no GeoQuery split {kind!r}; the splits are {', '.join(PUBLISHED)}")
    examples = read_corpus(Path(corpus))
    path = published_ids(Path(corpus).parent, name) if ids is None else Path(ids)
    parts: dict[str, list[int]] = read_json_as(_Ids, path, "a splits file's").model_dump()
    (most, times), *_ = Counter(chain(*parts.values())).most_common(1)
    if times > 1:
        there = ", ".join(part for part, of in parts.items() if most in of)
        raise DataError(f"{path}: id {most} is there {times} times, in {there}")
    if name != "standard" and not parts["dev"]:
        rest = parts["test"]
        draw = random.Random("geoquery-dev-0").random  # noqa: S311 - data, not secrets
        dev = {id_ for _, id_ in sorted((draw(), id_) for id_ in sorted(rest))[: round(len(rest) / 4)]}
        parts["dev"], parts["test"] = [i for i in rest if i in dev], [i for i in rest if i not in dev]
    meta = {"task": "geoquery", "split": kind, "how": f"the ids of {path.name}"}
    found = {part: [examples[id_] for id_ in parts[part]] for part in PARTS}
    return Split(f"geoquery-{path.stem}", **found, meta=meta)


def printed(split: Split) -> Split:
    """A split as printed in the paper's Appendix D: 'value' for names, lower-case questions without a final mark."""

    def one(each: Example) -> Example:
        return replace(each, source=_MARK.sub("", each.source.lower()), target=_VALUE.sub("'value'", each.target))

    return replace(split.mapped(one), meta={**split.meta, "values": "as the paper prints them"})
