"""What held-out examples share with the training data: pairs, questions, programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rcr_trainer.data.examples import Example

if TYPE_CHECKING:
    from langchain_rcr.programs import ProgramSpec


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many held-out examples are in the training data, too.

    Args:
        n: held-out examples.
        pairs: those with question and program, up to case and spaces.
        questions: those with their question, up to case and spaces, `pairs` included.
        programs: those whose program, up to anonymised values, is one of the training data's.
    """

    n: int
    pairs: int
    questions: int
    programs: int

    def warning(self, part: str, training: str) -> str:
        """What makes figures look better than they are, in a line; empty if nothing does.

        Args:
            part: what the held-out examples are called, e.g. test.
            training: what the training data are called.
        """
        others = self.questions - self.pairs
        said = []
        if self.pairs:
            said.append(f"{self.pairs} of {self.n} {part} pairs are also in {training}")
        if others:
            said.append(f"{others} of {self.n} {part} questions are in {training} with another program")
        return f"{', '.join(said)}: figures on them say nothing about new questions" if said else ""

    def note(self, part: str, training: str) -> str:
        """How many programs repeat, in a line; empty if none does. The arguments are those of `warning`."""
        if not self.programs:
            return ""
        return (
            f"{self.programs} of {self.n} {part} programs (values aside) also occur in {training}: normal where both "
            "come from one source; they don't test new combinations"
        )


def overlap(held_out: Sequence[Example], training: Sequence[Example], spec: ProgramSpec) -> Overlap:
    """Compare held-out examples with the training data.

    Args:
        held_out: development or test examples.
        training: the pool and whatever else is trained on.
        spec: decides what the same program is.
    """
    pairs, questions = shared(held_out, training)
    programs = {spec.key(target) for target in {example.target for example in training}}
    return Overlap(
        n=len(held_out),
        pairs=len(pairs),
        questions=len(pairs) + len(questions),
        programs=sum(spec.key(example.target) in programs for example in held_out),
    )


def shared(held_out: Sequence[Example], training: Sequence[Example]) -> tuple[list[int], list[int]]:
    """Which held-out examples are in the training data, too, up to case and spaces.

    Returns:
        Positions of those with question and program, and of those with their question but another program.
    """
    pairs = {(plain(example.source), plain(example.target)) for example in training}
    questions = {source for source, _ in pairs}
    both: list[int] = []
    question: list[int] = []
    for number, example in enumerate(held_out):
        source = plain(example.source)
        if (source, plain(example.target)) in pairs:
            both.append(number)
        elif source in questions:
            question.append(number)
    return both, question


def shared_pairs(held_out: Sequence[Example], training: Sequence[Example]) -> int:
    """How many held-out examples are in the training data with question and program, up to case and spaces."""
    return len(shared(held_out, training)[0])


def plain(text: str) -> str:
    """A text without its case and with one space wherever it has some."""
    return " ".join(text.split()).casefold()
