"""Several tenants' examples in one pool, and selections of all kinds that must read those of one alone."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.language_models import FakeListLLM
from langchain_core.runnables import ConfigurableField
from toys import lexical

from langchain_rcr import InputError, PoolError, SequentialCompositionalRetriever, semantic_parsing_chain

TENANTS: tuple[Any, ...] = (
    "a",
    "A",
    "ａ",
    "b",
    "1",
    "true",
    "",
    "$exists",
    "a' OR ''='",
    1,
    0,
    2**53,
    2**53 + 1,
    True,
    False,
)
ROWS = [
    {"source": f"list all {thing} number {n}", "target": f"all ( {thing} , {n} )", "tenant": tenant, "level": n}
    for tenant in TENANTS
    for n, thing in enumerate(("rivers", "lakes", "roads"))
]
THREADS = 8


def over(index: Any, **fields: Any) -> SequentialCompositionalRetriever:
    """A retriever over the tenants' examples, whose own filter leaves two of three."""
    encoder = lexical(ROWS, 8)
    fields = {"k": 4, "group": "tenant", "filter": {"level": {"$gte": 1}}, **fields}
    return SequentialCompositionalRetriever.from_encoder(
        encoder, ROWS, ids=[*map(str, range(len(ROWS)))], index=index, **fields
    )


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def selection(retriever: SequentialCompositionalRetriever, dice: random.Random, made: Any = None) -> str:
    """Make one selection, and look whether it reads another tenant's examples or drops a filter.

    Args:
        retriever: of `over`.
        dice: what is drawn.
        made: a value for the group, instead of a tenant's or one that reads like a condition.

    Returns:
        What came of it: its kind, and "refused" or how many examples.
    """
    tenant, other = dice.choice(TENANTS), dice.choice(TENANTS)
    wrong = (
        {"$exists": True},
        {"$ne": tenant},
        {"$in": [*TENANTS]},
        [tenant, other],
        None,
        {"$or": [{}]},
        float("nan"),
    )
    value = dice.choice((tenant, tenant, tenant, dice.choice(wrong))) if made is None else made
    wheres = (None, {}, {"level": 2}, {"tenant": other}, {"tenant": {"$exists": True}}, {"tenant": value})
    where = dice.choice((*wheres, {"$or": [{"tenant": tenant}, {"tenant": other}]}, {"$not": {"tenant": tenant}}))
    question = f"list all {dice.choice(('rivers', 'lakes', 'roads'))}"
    asked: Any = {"source": question, "tenant": value}
    narrow = retriever.configurable_fields(filter=ConfigurableField(id="where"))
    config: Any = {"configurable": {"where": {"level": 2}}}

    def chain(over: Any) -> Any:
        return semantic_parsing_chain(FakeListLLM(responses=["f ( x )"]), over, "functional")

    def fields(documents: Any) -> list[Any]:
        return [document.metadata for document in documents]

    def explained(found: Any) -> list[Any]:
        return [ROWS[int(one.id)] for step in found.steps for one in (step.pick, *step.runner_ups)]

    kinds: dict[str, Callable[[], list[Any]]] = {
        "select": lambda: retriever.select_examples(asked),
        "aselect": lambda: asyncio.run(retriever.aselect_examples(asked)),
        "within": lambda: fields(retriever.invoke(question, within=value, filter=where)),
        "filter": lambda: fields(retriever.invoke(question, filter=where)),
        "pinned": lambda: fields(retriever.invoke(question, filter={"tenant": value})),
        "batch": lambda: fields(retriever.batch([question, "all"], within=value, filter=where)[1]),
        "explain": lambda: explained(retriever.explain(question, within=value, filter=where)),
        "configured": lambda: fields(narrow.invoke(question, config, within=value)),
        "chain": lambda: fields(chain(retriever).invoke(asked, filter=where).picks),
        "bound": lambda: fields(chain(retriever.bind(filter={"level": 2})).batch([asked])[0].picks),
        "bound tenant": lambda: fields(chain(retriever.bind(within=other)).invoke(asked).picks),
        "configured chain": lambda: fields(chain(narrow).invoke(asked, config).picks),
    }
    name = dice.choice(list(kinds))
    try:
        found = kinds[name]()
    except (InputError, PoolError):  # the latter: there is nothing to explain
        return f"{name}: refused"
    least = 2 if name in ("configured", "bound", "configured chain") else 1
    assert all(row["level"] >= least for row in found), (name, value, where, found)
    named = where["tenant"] if name == "filter" and found else value
    if name in ("filter", "pinned") and isinstance(named, dict):
        (named,) = named.values() if [*named] == ["$eq"] else [named]
    assert all(same(row["tenant"], named) for row in found), (name, value, where, found)
    assert name != "bound tenant" or all(same(row["tenant"], other) for row in found), (value, other, found)
    return f"{name}: {len(found)}"


def selections(index: Any, count: int, seed: int = 0) -> Counter[str]:
    """That many selections from several threads, and what came of them."""
    retriever = over(index)
    with ThreadPoolExecutor(THREADS) as threads:
        return Counter(threads.map(lambda n: selection(retriever, random.Random(seed + n)), range(count)))
