"""Values that questions imply and don't name: 1200 and 1800 for the afternoon, `'NO'` for a flight without stops.

A value that stands in the question can be copied, so it is anonymised: which it is has no bearing on the structure of
the program (section 3). One that doesn't has to be shown to the language model, as any symbol of the program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from langchain_rcr.basics.progress import track
from langchain_rcr.programs.spec import ProgramSpec

FEWEST = 3
"""Questions whose programs have a value, at the least, for it to be a symbol and no accident."""
MOST = 4000
"""Pairs that are read; of more, as many evenly chosen."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_BETWEEN_WORDS = re.compile(r"[\W_]+")


def implied_values(pairs: Sequence[tuple[str, str]], spec: ProgramSpec) -> tuple[str, ...]:
    """The values of programs that most of their questions don't name.

    Args:
        pairs: questions and their programs; a pair that is repeated counts once.
        spec: how programs are read.

    Returns:
        The values as `ProgramSpec.values` has them, sorted; none where nothing is anonymised.
    """
    if not spec.anonymize:
        return ()
    found: Counter[str] = Counter()
    named: Counter[str] = Counter()
    read = min(len(pairs), MOST)
    chosen = dict.fromkeys(pairs[at * len(pairs) // read] for at in range(read))
    for question, program in track([*chosen], "reading values"):
        text = _words(question)
        values = spec.values(program)
        found.update(values)
        named.update(value for value in values if _names(text, value))
    return tuple(sorted(value for value, count in found.items() if count >= FEWEST and 2 * named[value] < count))


def _names(text: str, value: str) -> bool:
    """Whether a value's words stand in a question's; the last, if it is long, may begin one, as of a plural."""
    words = _words(value)
    last = words.split()[-1:]
    if last and last[0].isalpha() and len(last[0]) > 3:
        words = words.rstrip()
    return bool(last) and words in text


def _words(text: str) -> str:
    return f" {_BETWEEN_WORDS.sub(' ', _THOUSANDS.sub('', text.casefold())).strip()} "
