"""What all baselines promise: LangChain's interface, k, exclusion, prefixes, ties."""

from __future__ import annotations

import asyncio
import zlib

import numpy as np
import pytest
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from rcr_trainer import baselines
from rcr_trainer.baselines import LearnedSettings
from rcr_trainer.baselines.base import Resources
from rcr_trainer.baselines.dense import DenseSelector
from rcr_trainer.baselines.greedy import OracleSelector
from rcr_trainer.baselines.simple import BM25Selector, RandomSelector

from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
WORDS = ["river", "state", "city", "largest", "longest", "border", "capital", "population"]
EXAMPLES = [
    {
        "source": f"what {WORDS[i % 8]} {WORDS[(3 * i + 1) % 8]} ?",
        "target": f"{WORDS[i % 8]} ( {WORDS[(5 * i) % 7]} ( all ) )",
    }
    for i in range(30)
]
QUERIES = ["what river ?", "capital of the largest state", "", "zzz"]
REFERENCES = [
    "river ( state ( all ) )",
    "capital ( largest ( state ( all ) ) )",
    "not ( a program",
    "longest ( river )",
]


def embed(texts):
    vectors = np.zeros((len(texts), 64), dtype=np.float32)
    for row, text in enumerate(texts):
        for word in text.split():
            vectors[row, sum(word.encode()) % 64] += 1
    return vectors


def embed_tokens(texts):
    tokens = np.eye(64, dtype=np.float32)
    return [tokens[[sum(word.encode()) % 64 for word in text.split()]] for text in texts]


class Scores:
    """A scoring language model that likes long examples, and tells nearly all prompts apart."""

    def log_likelihoods(self, prompts, continuations):
        return [
            -1000 / len(p) - zlib.crc32((p + c).encode()) / 2**36 for p, c in zip(prompts, continuations, strict=True)
        ]


def policy(items):
    from langchain_rcr import TriEncoder

    return TriEncoder.build("lexical", items, dim=16)


RESOURCES = Resources(
    SPEC,
    seed=3,
    embed=embed,
    embed_tokens=embed_tokens,
    score=Scores(),
    policy=policy,
    encode=lambda name, base: embed,
    learning=LearnedSettings(queries=6, candidates=4, sets=3, epochs=1, batch_size=8),
)
INDEPENDENT = (RandomSelector, BM25Selector, DenseSelector)
"""Those whose later picks don't depend on the earlier ones."""


@pytest.fixture(params=baselines.BASELINES)
def cls(request):
    return baselines.get_baseline(request.param)


def make(cls, examples=EXAMPLES, **options):
    return cls(examples, **vars(RESOURCES), **options)


def test_pick_gives_distinct_positions(cls):
    positions = make(cls).pick(QUERIES, 30, references=REFERENCES)
    assert positions.shape == (4, 30)
    assert positions.dtype == np.int64
    assert (np.sort(positions, axis=1) == np.arange(30)).all()
    assert make(cls).pick([], 4, references=[]).shape == (0, 4)


def test_picks_for_k_begin_those_for_more(cls):
    selector = make(cls)
    exclude = [[1, 2], [], [29, 0, 0, 7], {5}]
    longest = selector.pick(QUERIES, 26, exclude, REFERENCES)
    for k in (1, 2, 5, 13):
        assert (selector.pick(QUERIES, k, exclude, REFERENCES) == longest[:, :k]).all()


def test_a_query_gets_the_same_picks_alone_and_in_a_batch(cls):
    selector = make(cls)
    exclude = [[1, 2], [], [29, 0], [5]]
    together = selector.pick(QUERIES, 6, exclude, REFERENCES)
    for i, query in enumerate(QUERIES):
        assert (selector.pick([query], 6, [exclude[i]], [REFERENCES[i]])[0] == together[i]).all()


def test_excluded_positions_are_skipped_and_nothing_else_changes(cls):
    selector = make(cls)
    before = selector.pick(QUERIES, 30, references=REFERENCES)
    exclude = [row[:3] for row in before]
    after = selector.pick(QUERIES, 27, exclude, REFERENCES)
    for row, entry in zip(after, exclude, strict=True):
        assert not np.isin(row, entry).any()
    if cls in INDEPENDENT:
        assert (after == before[:, 3:]).all()


def test_a_baseline_has_the_name_it_is_registered_by():
    assert [make(baselines.get_baseline(name)).name for name in baselines.BASELINES] == list(baselines.BASELINES)
    assert not baselines.get_baseline(baselines.STRONGEST).oracle


def test_equal_examples_are_picked_lowest_first(cls):
    if cls is RandomSelector:
        pytest.skip("draws")
    same = [{"source": "what river ?", "target": "river ( all )"}] * 9
    positions = make(cls, same).pick(["river"], 9, [[]], ["river ( all )"])
    assert positions.tolist() == [list(range(9))]


@pytest.mark.parametrize(("exclude", "left"), [(None, 30), ([[], [], [], [0, 1, 1]], 28)])
def test_too_large_k_names_both_numbers(cls, exclude, left):
    with pytest.raises(InputError, match=rf"k is 31.* {left} examples"):
        make(cls).pick(QUERIES, 31, exclude, REFERENCES)
    with pytest.raises(InputError, match=r"k is 4.* 0 examples"):
        make(cls, []).pick(QUERIES, 4, references=REFERENCES)


def test_bad_arguments_are_named(cls):
    selector = make(cls)
    with pytest.raises(InputError, match="k is 0"):
        selector.pick(QUERIES, 0, references=REFERENCES)
    with pytest.raises(InputError, match="1 entries for 4 queries"):
        selector.pick(QUERIES, 2, [[1]], REFERENCES)
    with pytest.raises(InputError, match=r"exclude\[0\].*pool of 30"):
        selector.pick(["a"], 2, [[30]], ["b"])


def test_langchain_interface(cls):
    selector = make(cls, k=3)
    assert isinstance(selector, BaseExampleSelector)
    variables = {"source": "what river ?"}
    if cls.oracle:
        with pytest.raises(InputError, match="no key 'target'"):
            selector.select_examples(variables)
        variables["target"] = "river ( state ( all ) )"
    picked = selector.select_examples(variables)
    positions = selector.pick(["what river ?"], 3, references=["river ( state ( all ) )"])[0]
    assert picked == [EXAMPLES[p] for p in positions if cls.shows]
    assert asyncio.run(selector.aselect_examples(variables)) == picked
    for each in picked:
        each["source"] = "changed"
    assert selector.examples == EXAMPLES


def test_an_added_example_takes_effect(cls):
    selector = make(cls)
    query, gold = "how unusual", "unusual ( thing )"
    assert selector.pick([query], 30, references=[gold]).max() == 29
    assert selector.add_example({"source": query, "target": gold}) == "30"
    asyncio.run(selector.aadd_example({"source": "another", "target": "state ( x )"}))
    positions = selector.pick([query], 32, references=[gold])
    assert sorted(positions[0]) == list(range(32))
    if cls.shows and cls is not RandomSelector and "score" not in cls.needs:
        assert positions[0, 0] == 30


def test_examples_without_their_keys_are_refused(cls):
    selector = make(cls)
    with pytest.raises(PoolError, match="no key 'source'; it has 'question'"):
        selector.add_example({"question": "a"})
    with pytest.raises(PoolError, match="'source' is not a string but int"):
        selector.add_example({"source": 1, "target": "a"})
    if "spec" in cls.needs:
        with pytest.raises(PoolError, match="no key 'target'"):
            selector.add_example({"source": "a"})
    assert len(selector.examples) == 30


def test_the_query_is_all_variables_but_the_target():
    selector = BM25Selector([{"source": "river"}, {"source": "city"}, {"source": "lake"}], k=1)
    assert selector.select_examples({"question": "city", "target": "river river"}) == [{"source": "city"}]
    with pytest.raises(InputError, match="no variable besides 'target'"):
        selector.select_examples({"target": "a"})


def test_drops_into_a_few_shot_prompt():
    prompt = FewShotPromptTemplate(
        example_selector=BM25Selector(EXAMPLES, k=2),
        example_prompt=PromptTemplate.from_template("Source: {source}\nTarget: {target}"),
        suffix="Source: {source}\nTarget:",
        input_variables=["source"],
        example_separator="\n",
    )
    assert prompt.format(source="what longest ?").count("Source: ") == 3


def test_random_depends_on_seed_and_query():
    def first(seed, query):
        return RandomSelector(EXAMPLES, seed=seed).pick([query], 30)[0].tolist()

    assert first(0, "a") == first(0, "a")
    assert first(0, "a") != first(1, "a")
    assert first(0, "a") != first(0, "b")
    counts = np.bincount(RandomSelector(EXAMPLES).pick([str(i) for i in range(3000)], 1)[:, 0], minlength=30)
    assert counts.min() > 60
    assert counts.max() < 140


def test_oracle_follows_the_gold_program():
    examples = [{"source": "", "target": t} for t in ("x", "a ( b )", "a ( b ( c ) )", "d ( c )", "a")]
    selector = OracleSelector(examples, spec=SPEC)
    # c and d are new after a ( b ( c ) ) only in position 3; then nothing gains, and most overlap decides.
    assert selector.pick(["q"], 5, references=["a ( b ( c ) , d ( c ) )"])[0, :2].tolist() == [2, 3]
    assert selector.pick(["q"], 5, references=["x"]).tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(InputError, match="gold programs"):
        selector.pick(["q"], 1)


@pytest.mark.parametrize("given", [np.arange(4), np.tile(np.arange(4) + 0.5, (2, 1)), np.arange(8)])
def test_picks_of_a_selector_of_ones_own_that_are_no_positions_are_named(given):
    """NumPy would repeat one query's row for all, and round scores down to positions."""

    class Own(BM25Selector):
        def _pick(self, queries, k, excluded):
            return given

    with pytest.raises(InputError, match=r"the Own selector picked .*, not positions \(2, 4\)"):
        Own(EXAMPLES).pick(QUERIES[:2], 4)
