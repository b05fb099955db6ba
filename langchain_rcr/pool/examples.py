"""The examples that a prompt can show: their ids, the fields as the user gave them, and what the encoders read."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from hashlib import blake2b
from pprint import pformat
from typing import Any

import numpy as np

from langchain_rcr.basics.items import Item, copied, text_hash
from langchain_rcr.basics.rows import IntArray
from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.programs.remembering import remembered

Example = Mapping[str, Any]
"""One example: a question under the source key, its program under the target key, and any other fields."""


class ExamplePool:
    """A pool that never changes: `extended` returns a larger one, so a reader never sees half a change.

    Args:
        examples: mappings with the two keys; further fields, of any type, are kept as they are.
        ids: one unique string for each example; a random UUID (hex) each when left out. An example's field named "id"
            is a field like any other, not its id.
        source_key: the key of the question, or several, whose values, joined by spaces in the order of the sorted keys,
            are the question, as in LangChain's selectors.
        target_key: the key of the program.
        spec: decides which programs are the same (`ProgramSpec.key`); the encoder's, if there is one.

    Raises:
        PoolError: an example or an id can't be used; the message names position and field.
        InputError: the keys are the same, `examples` is not a sequence, or the number of ids differs.
    """

    def __init__(
        self,
        examples: Sequence[Example] = (),
        *,
        ids: Sequence[str] | None = None,
        source_key: str | Sequence[str] = "source",
        target_key: str = "target",
        spec: ProgramSpec | None = None,
    ) -> None:
        self.source_keys = _names(source_key)
        """The keys of the question, sorted."""
        self.target_key = target_key
        if target_key in self.source_keys:
            raise InputError(f"source_key and target_key are both '{target_key}': they must differ")
        self.spec = spec or ProgramSpec()
        self.ids: tuple[str, ...] = ()
        """(N,) the ids, by position."""
        self.of_content = False
        """Whether the ids are derived from the examples' content, so that a changed example has another id."""
        self.examples: tuple[dict[str, Any], ...] = ()
        """(N,) the examples, by position. Not to be changed in place."""
        self._items: tuple[Item, ...] = ()
        self._append(examples, ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"ExamplePool({len(self)} examples, keys {self.keys})"

    @property
    def keys(self) -> str:
        """The keys of question and program, in words."""
        return f"{' + '.join(map(repr, self.source_keys))} and '{self.target_key}'"

    def extended(self, examples: Sequence[Example], ids: Sequence[str] | None = None) -> ExamplePool:
        """This pool with more examples at the end; old positions stay. Arguments and errors as for the class."""
        pool = copy.copy(self)
        pool._append(examples, ids)
        return pool

    def filled(self, examples: Mapping[str, dict[str, Any]], places: Sequence[str]) -> ExamplePool:
        """A pool with this one's keys that holds these examples themselves, by id; `places` names each in errors."""
        pool = copy.copy(self)
        pool.ids, pool.examples = tuple(examples), tuple(examples.values())
        pool._items = self._read(pool.examples, places.__getitem__)
        return pool

    def only(self, positions: Sequence[int], spec: ProgramSpec | None = None) -> ExamplePool:
        """A pool of the examples at these positions; `spec` replaces this pool's."""
        pool = copy.copy(self)
        pool.spec = spec or self.spec
        pool.ids = tuple(self.ids[at] for at in positions)
        pool.examples = tuple(self.examples[at] for at in positions)
        pool._items = tuple(self._items[at] for at in positions)
        return pool

    def item(self, example: Example, where: str = "the example") -> Item:
        """What the encoders read of an example, or a `PoolError`. Its fields become text only here."""
        if not isinstance(example, Mapping):
            raise PoolError(f"{where} must be a mapping with {self.keys}, not {type(example).__name__}")
        several = len(self.source_keys) > 1  # then one may be blank
        advice = "" if len(self) else "; source_key and target_key say which of these are question and program"
        question = " ".join(_text(example, key, where, blank=several, advice=advice) for key in self.source_keys)
        if not question.strip():
            raise PoolError(f"{where}: {' and '.join(map(repr, self.source_keys))} are blank")
        return Item(question, _text(example, self.target_key, where, what=" (the program)", advice=advice))

    def items(self, prefer: str | None = None) -> list[Item]:
        """(N,) what the encoders read of each example; `prefer` names the field for `home`."""
        if prefer is None:
            return list(self._items)
        values = [example.get(prefer) for example in self.examples]
        # An enum of texts prints as something else.
        homes = ("" if one is None else str.__str__(one) if isinstance(one, str) else str(one) for one in values)
        return [item._replace(home=home) for item, home in zip(self._items, homes, strict=True)]

    def texts(self, examples: Sequence[Example]) -> list[str]:
        """Examples as a prompt shows them: "Source: …", line break, "Target: …" (the paper's appendix D)."""
        return [APPENDIX_D.shown(item) for item in self._read(examples, lambda at: "the example")]

    @property
    def programs(self) -> IntArray:
        """(N,) equal numbers for the same programs, as `Row.program`.

        A hash of each program's key, the same in every process, so that pools can grow and be pickled.
        """
        numbers = map(_numbers(self.spec), (item.target for item in self._items))
        return np.fromiter(numbers, dtype=np.int64, count=len(self._items))

    def _append(self, examples: Sequence[Example], ids: Sequence[str] | None) -> None:
        # Anything with a length will do, such as a Hugging Face dataset, but neither a generator, as it is read more
        # than once, nor a data frame, which yields the names of its columns.
        sized = isinstance(examples, Sized) and isinstance(examples, Iterable) and not hasattr(examples, "columns")
        if not sized or isinstance(examples, (str, bytes, Mapping)):
            raise InputError(f"examples must be a sequence of mappings, not {type(examples).__name__}")
        rows = [*examples]
        items = self._read(rows, "examples[{}]".format)
        new = random_ids(len(rows)) if ids is None else self._checked(ids, len(rows))
        self.examples += tuple(copied(rows, new))
        self.ids += new
        self.of_content = False
        self._items += items

    def _read(self, examples: Sequence[Example], where: Callable[[int], str]) -> tuple[Item, ...]:
        """What the encoders read of each example; `where` names an example in errors, given its position."""
        if len(self.source_keys) == 1 and {*map(type, examples)} <= {dict}:
            try:
                texts = [[example[key] for example in examples] for key in (*self.source_keys, self.target_key)]
                if all(map(_readable, texts)):
                    return tuple(map(Item, *texts))
            except KeyError:
                pass
        # One by one, to find what is wrong.
        return tuple(self.item(example, where(n)) for n, example in enumerate(examples))

    def _checked(self, ids: Sequence[str], count: int) -> tuple[str, ...]:
        if isinstance(ids, str) or len(ids) != count:
            given = f"{type(ids).__name__} of {len(ids)}"
            raise InputError(f"ids must be a sequence of {count} strings, one for each example, not {given}")
        seen = set(self.ids)
        for n, example_id in enumerate(ids):
            if not isinstance(example_id, str) or not example_id:
                raise PoolError(f"ids[{n}] must be a non-empty string, not {example_id!r}")
            if example_id in seen:
                raise PoolError(f"ids[{n}] is {example_id!r}, which another example has already")
            seen.add(example_id)
        return tuple(ids)


def pool_of(
    examples: Sequence[Example], ids: Sequence[str] | None, source_key: str | Sequence[str], target_key: str
) -> ExamplePool:
    """A pool of examples; without ids, they are derived from content, so that the same list gets the same ids again.

    Equal examples get different ids: the second one's ends in "-2".
    """
    pool = ExamplePool(examples, ids=ids, source_key=source_key, target_key=target_key)
    if ids is None:
        seen: Counter[str] = Counter()
        made = []
        for example in pool.examples:
            digest = blake2b(_content(example).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            seen[digest] += 1
            made.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
        pool.ids, pool.of_content = tuple(made), True
    return pool


def changed(pool: ExamplePool, there: Mapping[str, Example]) -> list[int]:
    """The positions of examples that an engine holds under the same id with different content."""
    return [
        at
        for at, (example_id, example) in enumerate(zip(pool.ids, pool.examples, strict=True))
        if example_id in there and not _same(example, there[example_id])
    ]


def earlier(pool: ExamplePool, fresh: Sequence[int], others: Mapping[str, Example]) -> list[str]:
    """The ids of an engine's other examples (by id) that are earlier versions of fresh ones (by position), one to one.

    An earlier version differs only in metadata. It may instead differ only in its question, or only in its program, if
    at least as many examples are unchanged or differ only in metadata. Without that condition an unrelated pool would
    match too, as few programs answer many questions.
    """
    question, program = {*pool.source_keys}, {pool.target_key}
    metadata = {name for example in (*pool.examples, *others.values()) for name in example} - question - program
    new, old, gone = {at: pool.examples[at] for at in fresh}, dict(others), list[str]()
    asked = 0
    for free in (metadata, question, program):
        versions: defaultdict[str, list[int]] = defaultdict(list)
        for at, example in new.items():
            versions[_content(example, free)].append(at)
        for example_id, other in [*old.items()]:
            if same := versions[_content(other, free)]:
                del new[same.pop()], old[example_id]
                gone.append(example_id)
        if free is metadata:
            asked = len(gone)
    return gone if len(gone) - asked <= len(pool) - len(fresh) + asked else gone[:asked]


def _content(example: Example, without: Collection[str] = ()) -> str:
    """An example's content as text, the same for equal content in any order of fields."""
    kept = {name: value for name, value in example.items() if name not in without} if without else dict(example)
    try:
        return json.dumps(kept, sort_keys=True, default=repr)
    except (TypeError, ValueError):  # keys that aren't strings, or a field that contains itself
        return pformat(kept)


def _same(example: Example, other: Example) -> bool:
    """Whether one could be the other after a round trip through an engine that keeps JSON."""
    if repr(example) == repr(other):  # faster
        return True
    texts = _content(example), _content(other)
    try:
        first, second = (json.dumps(json.loads(text, parse_float=_number), sort_keys=True) for text in texts)
    except ValueError:  # written by pformat
        first, second = texts
    return first == second


def _number(text: str) -> float:
    """A float; as a whole number from 2**53 on, where all floats are, as PostgreSQL keeps it."""
    number = float(text)
    return int(number) if 2**53 <= abs(number) < float("inf") else number


def _readable(texts: Sequence[Any]) -> bool:
    """Whether these are all texts in which `flaw_of` finds nothing."""
    try:
        "".join(texts).encode("utf-8")
    except (TypeError, UnicodeEncodeError):
        return False
    return all(map(str.strip, texts))


def _names(source_key: object) -> tuple[str, ...]:
    names = {source_key} if isinstance(source_key, str) else source_key
    if not isinstance(names, Iterable) or not (names := [*names]) or not all(isinstance(name, str) for name in names):
        raise InputError(f"source_key must be a name or several, not {source_key!r}")
    return tuple(sorted({*names}))


def _text(example: Example, key: str, where: str, what: str = "", *, blank: bool = False, advice: str = "") -> str:
    if key not in example:
        has = ", ".join(repr(name) for name in example) or "nothing"
        raise PoolError(f"{where} has no '{key}'{what}: it has {has}{advice}")
    value = example[key]
    if not isinstance(value, str):
        raise PoolError(f"{where}: '{key}'{what} must be a string, not {type(value).__name__}")
    wrong = None if blank and not value.strip() else flaw_of(value)
    if wrong:
        raise PoolError(f"{where}: '{key}'{what} {wrong}")
    return value


@lru_cache(maxsize=16)
def _numbers(spec: ProgramSpec) -> Callable[[str], int]:
    """A cached function from a program to its number; keyed by the text alone, it takes a tenth of the time."""
    return remembered(1 << 25)(lambda program: text_hash(spec.key(program)))


def random_ids(count: int) -> tuple[str, ...]:
    """Unique ids: 128 random bits each."""
    digits = os.urandom(16 * count).hex()
    return tuple(digits[at : at + 32] for at in range(0, len(digits), 32))


def flaw_of(text: str) -> str | None:
    """What is wrong with a text, or None. Tokenizers fail obscurely on blank texts and invalid Unicode."""
    if not text.strip():
        return "is blank"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"is not valid Unicode text: lone surrogate at character {error.start}"
    return None
