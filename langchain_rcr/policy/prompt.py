"""How a language model is prompted: one object shared by serving, training and evaluation."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar

from pydantic import Field, model_validator

from langchain_rcr.basics.items import escaped, names_in
from langchain_rcr.basics.section import OneOf, Section, contradiction, show
from langchain_rcr.errors import InputError
from langchain_rcr.policy.schema import fitted, of_others, tables_read

T = TypeVar("T")
_TASK = "Write one SQL query that answers the last question. Answer with the query alone."
_DATABASE = "The database:\n\n{schema}"
_SQL = f"{_TASK} {_DATABASE}"

PROMPTS: Mapping[str, Mapping[str, Any]] = {
    "appendix_d": {"form": "text", "question": "Source: {source}", "answer": "Target: {target}"},
    "chat": {"form": "chat", "question": "{source}", "answer": "{target}"},
    "sql": {
        "form": "text",
        "prefix": f"{_SQL}\n",
        "question": "Question: {source}",
        "answer": "SQL: {target}",
        "others": {
            "prefix": f"{_TASK} These are questions to other databases:\n",
            "example": "\nTables:\n{schema}",
            "suffix": f"\n{_DATABASE}\n",
        },
    },
    "sql_chat": {
        "form": "chat",
        "system": _SQL,
        "question": "{source}",
        "answer": "{target}",
        "others": {
            "system": f"{_TASK} The examples are of other databases.",
            "example": "Tables:\n{schema}\n",
            "suffix": f"{_DATABASE}\n",
        },
    },
}
"""Name → the fields of `Prompt` that it sets; the first is the default.

Examples of the question's own database follow its schema. Those of other databases precede it, each with the tables
that it reads; otherwise small models take the examples' tables for the database's own (docs/results.md)."""
_BY_NAME: Any = None
"""Default of a field that the named prompt sets."""
_ABOUT = {
    "appendix_d": "the paper's prompt, with Source: and Target: (appendix D)",
    "chat": "a human and an AI message for each example",
    "sql": "the database's schema, then Question: and SQL:",
    "sql_chat": "the schema as a system message, then as chat",
}


def _before(template: str) -> str:
    """The text before the only name in a template."""
    return template.format(source="\0", target="\0").partition("\0")[0]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat model's messages: a system message (empty: none), then alternately human and AI, a human one last."""

    system: str
    turns: tuple[str, ...]

    def __str__(self) -> str:
        """As one text, for a completion model."""
        return "\n\n".join(filter(None, (self.system, *self.turns)))


Request: TypeAlias = str | Conversation
"""A prompt for one question. Whether an instruction precedes the text depends on the kind of model."""


class Shown(Protocol):
    """An example that a prompt shows: an `Item`, or one that has further fields, such as its database's `schema`."""

    @property
    def source(self) -> str:
        """Its question."""

    @property
    def target(self) -> str:
        """Its program."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Its other fields, by name."""


class Prompt(Section):
    """How prompts are written: as one text, or as the messages of a chat.

    `system`, `prefix` and `suffix` are templates: `{schema}`, `{db_id}` and so on stand for the question's other fields
    or, in a chain, for variables of these names. Literal braces are doubled. No example's text is read as a template.

    Raises:
        InputError: a template can't be used, or a field has a wrong value.
    """

    name: Annotated[str, OneOf(lambda: _ABOUT)] = Field(
        default="appendix_d",
        description="Built-in prompt for the language model; settings below that are null are taken from it.",
    )
    form: Literal["text", "chat"] = Field(
        default=_BY_NAME,
        description="text: examples and question in one text; chat: as messages, which needs llm.kind: chat.",
    )
    others: dict[Literal["system", "prefix", "example", "suffix"], str] = Field(
        default=_BY_NAME,
        description="What replaces system, prefix and suffix if most of the examples read tables that {schema} lacks; "
        "nothing if you set one of these yourself. example: what precedes each example whose own schema is known; "
        "there {schema} stands for the tables that it reads.",
    )
    system: str | None = Field(
        default=None,
        description="What comes first; for a chat model, the system message. null: for one text to a chat model, a "
        "sentence about its form; else nothing.",
    )
    prefix: str = Field(default=_BY_NAME, description="form text: lines before the examples.")
    question: str = Field(
        default=_BY_NAME, description="How a question is shown, also in examples: a text with {source}."
    )
    answer: str = Field(
        default=_BY_NAME, description="How a program is shown, on the lines after its question: a text with {target}."
    )
    suffix: str = Field(default=_BY_NAME, description="Lines between the examples and the question to answer.")
    db_schema: str = Field(
        default=_BY_NAME, description="What {schema} stands for, unless a question has a field schema."
    )
    schema_budget: int = Field(
        default=10_000,
        ge=1,
        description="Maximum characters of a schema. Of a longer one, only the tables are shown that the question, the "
        "picks or foreign keys mention.",
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Fill in fields that are missing or null from the named prompt."""
        if not isinstance(values, Mapping):
            return values
        none: dict[str, Any] = {**dict.fromkeys(("prefix", "suffix", "db_schema"), ""), "others": {}}
        named = PROMPTS.get(str(values.get("name") or "appendix_d"), PROMPTS["appendix_d"])
        given = {name: value for name, value in values.items() if value is not None}
        if given.keys() & {"system", "prefix", "suffix"}:
            named = {name: value for name, value in named.items() if name != "others"}
        return {**none, **named, **given}

    @model_validator(mode="after")
    def _agree(self) -> Prompt:
        wanted_in = {"question": ["source"], "answer": ["target"], "others.example": ["schema"]}
        templates = {field: getattr(self, field) for field in ("system", "prefix", "suffix")}
        templates |= {f"others.{field}": template for field, template in self.others.items()}
        templates = {field: template for field, template in templates.items() if template}
        for field, template in (templates | {"question": self.question, "answer": self.answer}).items():
            wanted = wanted_in.get(field)
            try:
                names = list(names_in(template))
                if wanted is None and {"source", "target"} & {*names}:
                    raise ValueError("the question is prompt.question's alone")
                if wanted is not None and names != wanted:
                    raise ValueError(f"must have {{{wanted[0]}}} once, and no other name")
            except ValueError as error:
                raise ValueError(f"prompt.{field} = {show(template)}: {error}") from None
        if self.form == "chat" and (prefix := self.prefix or self.others.get("prefix")):
            raise contradiction("prompt.prefix", prefix, "prompt.form", "chat", "put it into prompt.system")
        return self

    @property
    def elsewhere(self) -> Prompt:
        """The prompt to use when the examples come from other databases."""
        own = {str(field): template for field, template in self.others.items() if field != "example"}
        return self.model_copy(update=own | {"others": {}}) if self.others else self

    @property
    def variables(self) -> list[str]:
        """The other fields of a question that it shows, sorted."""
        others = self.elsewhere
        templates = (each or "" for own in (self, others) for each in (own.system, own.prefix, own.suffix))
        names = {name for template in templates for name in names_in(template)}
        return sorted(names - ({"schema"} if self.db_schema else set()))

    @property
    def shows_schema(self) -> bool:
        """Whether {schema} is among its names."""
        return "schema" in self.model_copy(update={"db_schema": ""}).variables

    @property
    def labels(self) -> tuple[str, str]:
        """What precedes a question and a program in a text: "Source:" and "Target:"."""
        return _before(self.question).strip(), self.cue.strip()

    @property
    def stop(self) -> tuple[str, ...]:
        """Where a completion model's answer ends; it would otherwise go on with invented questions.

        Stopping at a line break would cut off a model's reasoning or a program of several lines.
        """
        labels = (self.labels[0], self.others.get("example", "").partition("{schema}")[0].strip())
        return tuple(f"\n{label}" for label in labels if label)

    @property
    def instruction(self) -> str:
        """What a chat model is told before a single text, which it wouldn't simply continue."""
        asked, answered = (repr(label) if label else "on a line of its own" for label in self.labels)
        return (
            f"The text shows questions, each after {asked}, and their programs, each after {answered}. "
            "Answer with the program of the last question alone, in the same form, without explanation."
        )

    def shown(self, item: Shown) -> str:
        """An example in a text."""
        return f"{self.question.format(source=item.source)}\n{self.answer.format(target=item.target)}"

    def tables(self, program: str, schema: str, shown: int = 1) -> str:
        """What precedes an example of another database: the tables that it reads; empty if its schema shows none.

        Each of the `shown` examples gets an equal share of the characters in `schema_budget`.
        """
        before = self.others.get("example", "")
        read = tables_read(schema, program, self.schema_budget // shown) if before else ""
        return f"{before.format(schema=read)}\n" if read else ""

    def text(self, picks: Sequence[Shown], question: str, fields: Mapping[str, Any] | None = None) -> str:
        """The whole as one text, without `system`; an `InputError` if the question's `fields` lack one."""
        prompt, given, tables = self._placed(picks, question, fields)
        return prompt._text(picks, tables, question, given)

    def _text(self, picks: Sequence[Shown], tables: Iterable[str], question: str, given: Mapping[str, Any]) -> str:
        before = [self._filled("prefix", given)] if self.prefix else []
        shown = [f"{own}{self.shown(pick)}" for own, pick in zip(tables, picks, strict=True)]
        return "\n".join([*before, *shown, self._asked(question, given), self.cue])

    def request(self, picks: Sequence[Shown], question: str, fields: Mapping[str, Any] | None = None) -> Request:
        """The prompt for a language model; arguments and errors as for `text`."""
        prompt, given, tables = self._placed(picks, question, fields)
        system = None if prompt.system is None else prompt._filled("system", given)
        if self.form == "text":
            text = prompt._text(picks, tables, question, given)
            return text if system is None else Conversation(system, (text,))
        asked = [f"{own}{self.question.format(source=pick.source)}" for own, pick in zip(tables, picks, strict=True)]
        answered = [self.answer.format(target=pick.target) for pick in picks]
        turns = chain.from_iterable(zip(asked, answered, strict=True))
        return Conversation(system or "", (*turns, prompt._asked(question, given)))

    def continuation(self, program: str) -> str:
        """What completes a text: the program after the cue, and the line break that ends it.

        It includes no more of a stop sequence, as some models end where others go on with another question.
        """
        return self.answer.format(target=program)[len(self.cue) :] + "\n"

    @property
    def cue(self) -> str:
        """The start of the answer, on the last line of a text."""
        return _before(self.answer).rstrip()

    def _placed(
        self, picks: Sequence[Shown], question: str, fields: Mapping[str, Any] | None
    ) -> tuple[Prompt, dict[str, Any], list[str]]:
        """The prompt for these picks, what its templates' names stand for, and what precedes each pick."""
        given = {**({"schema": self.db_schema} if self.db_schema else {}), **(fields or {})}
        others = False
        if "schema" in given:
            schema, programs = str(given["schema"]), [pick.target for pick in picks]
            given["schema"] = fitted(schema, self.schema_budget, question, programs)
            others = bool(self.others) and of_others(schema, programs)
        if not others:
            return self, given, [""] * len(picks)
        schemas = [str(pick.fields.get("schema") or "") for pick in picks]
        tables = [self.tables(pick.target, own, len(picks)) for pick, own in zip(picks, schemas, strict=True)]
        return self.elsewhere, given, tables

    def _asked(self, question: str, given: Mapping[str, Any]) -> str:
        before = f"{self._filled('suffix', given)}\n" if self.suffix else ""
        return before + self.question.format(source=question)

    def _filled(self, field: str, given: Mapping[str, Any]) -> str:
        template: str = getattr(self, field)
        try:
            return template.format(**given)
        except KeyError as error:
            has = ", ".join(map(repr, given)) or "none"
            how = "set prompt.db_schema" if error.args == ("schema",) else "write another prompt"
            raise InputError(
                f"prompt.{field} shows {{{error.args[0]}}}, and a question's fields are {has}: bring it, or {how}"
            ) from None


def arranged(picks: Sequence[T], order: str) -> list[T]:
    """Picks as a prompt shows them: "reversed" has the first pick last, next to the question; "picked" as they are."""
    return list(reversed(picks)) if order == "reversed" else list(picks)


APPENDIX_D = Prompt()
"""The paper's prompt: `Source: …` and `Target: …` for each example, then the question."""


def renamed(template: str, names: Mapping[str, str]) -> str:
    """A template with some of its names replaced."""
    parts = string.Formatter().parse(template)
    return "".join(escaped(text) + ("" if name is None else f"{{{names.get(name, name)}}}") for text, name, *_ in parts)
