"""A chain from a question to SQL and its rows: puts the schema in the prompt, runs SQL read-only, repairs errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable

from langchain_rcr.basics.section import check_limits
from langchain_rcr.chains.few_shot import prompt_for
from langchain_rcr.chains.semantic_parsing import SemanticParsingChain, semantic_parsing_chain
from langchain_rcr.databases.database import address_of, open_database
from langchain_rcr.databases.many import Databases, are_many
from langchain_rcr.databases.schema import schema_text
from langchain_rcr.errors import InputError
from langchain_rcr.policy.prompt import Prompt


def text_to_sql_chain(
    llm: Runnable[Any, Any],
    retriever: BaseExampleSelector | Runnable[str, list[Document]],
    database: str | Path,
    *,
    schema: str | None = None,
    samples: int = 0,
    prompt: Prompt | BasePromptTemplate[Any] | None = None,
    repairs: int = 1,
    drafts: int = 0,
    needs_examples: bool = False,
    timeout_s: float = 5.0,
    max_rows: int = 10_000,
    max_processes: int = 8,
    **keys: str | None,
) -> SemanticParsingChain:
    """A chain that picks examples, has the model write SQL, and runs it read-only.

    SQL that the database refuses goes back to the model with the error. The chain returns a `ParsedProgram`: `program`
    is the SQL, `result` its rows (a list of tuples), `error` the database's message if no attempt could be run.

    Args:
        llm: a chat or completion model; see `semantic_parsing_chain`.
        retriever: our retriever, or any other example selector.
        database: `postgresql://…` or the path of a SQLite file, also as SQLAlchemy takes them (`sqlite:///…`). Give
            PostgreSQL a role that may only SELECT. Or many SQLite files, one of which each question names with a
            variable: a folder with `{db_id}/{db_id}.sqlite`, or a template such as `data/{tenant}.sqlite`.
        schema: what the prompt says about the database; None: a `Prompt`'s own, else `schema_text(database)`. If it is
            longer than the prompt's `schema_budget`, it is reduced to the tables that question and picks mention.
        samples: see `schema_text`.
        prompt: as in `semantic_parsing_chain`; `{schema}` is filled in (of many databases, by a `Prompt` alone). None:
            the one that the retriever's checkpoint was trained with if it shows a schema, else the one named `sql`, or
            `sql_chat` for a chat model.
        repairs: how many times at most an error goes back to the model.
        drafts: as in `semantic_parsing_chain`.
        needs_examples: as in `semantic_parsing_chain`.
        timeout_s: seconds a query may take.
        max_rows: rows it may return.
        max_processes: queries that may run at the same time, including those that PostgreSQL's server can't stop; with
            many databases, how many are open.
        **keys: `source_key`, `target_key`, `query_key`: as in `semantic_parsing_chain`.

    Raises:
        InputError: the database can't be opened, or as for `semantic_parsing_chain`.
        MissingExtraError: PostgreSQL without psycopg.
    """
    check_limits(least=0, repairs=repairs, samples=samples)
    name, language = ("PostgreSQL", "sql:postgres") if address_of(database)[1] else ("SQLite", "sql:sqlite")
    if prompt is None:
        trained = prompt_for(llm, retriever, "sql", "sql_chat")
        prompt = trained if trained.shows_schema else prompt_for(llm, None, "sql", "sql_chat")
    limits: dict[str, Any] = {"timeout_s": timeout_s, "max_rows": max_rows}
    execute: Databases | Callable[[str], Any]
    schema_of: Callable[[Mapping[str, Any]], str] | None = None
    if are_many(database):
        execute = several = Databases(database, max_databases=max_processes, **limits)
        schema_of = None if schema else partial(several.schema, samples=samples)
    else:
        execute = open_database(database, max_processes=max_processes, **limits)

    def shown() -> str:
        return f"-- {name}\n{schema or schema_text(database, samples=samples)}"

    if isinstance(prompt, Prompt) and prompt.shows_schema:
        if schema_of is None and (schema or not prompt.db_schema):
            prompt = prompt.model_copy(update={"db_schema": shown()})
    elif isinstance(prompt, BasePromptTemplate) and "schema" in prompt.input_variables:
        prompt = prompt if schema_of else prompt.partial(schema=shown())
    elif schema:
        raise InputError("schema is given, but prompt has no {schema}")
    return semantic_parsing_chain(
        llm,
        retriever,
        language,
        prompt=prompt,
        execute=execute,
        retries=repairs,
        drafts=drafts,
        needs_examples=needs_examples,
        schema_of=schema_of,
        **keys,
    )
