"""evaluate(), choose and plain_selectors, end to end on a handful of examples."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from rcr_trainer import baselines
from rcr_trainer.baselines.base import Baseline, Resources, TradeOff
from rcr_trainer.baselines.dense import DenseSelector
from rcr_trainer.data.arrays import top_k
from rcr_trainer.data.examples import Example
from rcr_trainer.evaluation.harness import evaluate
from rcr_trainer.evaluation.plain import PlainSelectors, choose, plain_selectors
from rcr_trainer.evaluation.report import EvaluationReport
from rcr_trainer.evaluation.table import table
from rcr_trainer.settings import EvaluationSettings

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
NAMES = ["river", "state", "city", "lake", "town", "road"]


def example(i):
    a, b, c = NAMES[i % 6], NAMES[(i * 5 + 1) % 6], NAMES[(i // 6) % 6]
    return Example(str(i), f"{a} of {b} in {c} ?", f"{a} ( {b} ( {c} ) )")


POOL = [example(i) for i in range(24)]
QUERIES = [example(i) for i in range(30, 40)]


def embed(texts):
    return np.array([[text.split().count(name) for name in NAMES] for text in texts], dtype=np.float32)


def embed_tokens(texts):
    tokens = np.eye(len(NAMES), dtype=np.float32)
    return [tokens[[NAMES.index(word) for word in text.split() if word in NAMES]] for text in texts]


EVERYTHING = Resources(SPEC, 1, embed, embed_tokens)
LEARN = ["epr", "se2", "se2_tri", "ceil", "iterr", "llm_r"]
OWN_MODEL = ["bert", "contriever"]
NO_EMBEDDINGS = Resources(SPEC, 1)


def run(selectors, queries=QUERIES, pool=POOL, **options):
    if isinstance(selectors, PlainSelectors):
        plain, selectors = selectors, selectors.selectors
        options = {"left_out": plain.left_out, "trade_offs": plain.trade_offs, **options}
    return evaluate(selectors, pool, queries, SPEC, **{"split": "toy", "seed": 5, **options})[0]


def chosen(name, pool=POOL, dev=QUERIES, k=3, **options):
    selector = baselines.get_baseline(name)([{"source": e.source} for e in pool], k=k, **vars(EVERYTHING))
    choice = choose(selector, pool, dev, **options)
    assert choice.value == getattr(selector, choice.parameter)
    return choice


def always(*positions):
    return lambda queries, k, exclude: np.array([positions[:k]] * len(queries))


def test_figures_by_hand():
    pool = [Example(str(i), "", target) for i, target in enumerate(["a ( b )", "c", "a ( d )", "c ( )", "zz"])]
    queries = [Example("0", "x", "a ( b )"), Example("1", "y", "a"), Example("2", "z", "broken ( (")]
    report = run({"rcr": always(1, 2, 3, 0)}, queries, pool, k=3)
    assert (report.k, report.n, report.split, report.seed) == (3, 2, "toy", 5)
    assert (report.pool_size, report.skipped_queries) == (5, 1)
    scores = report.selectors["rcr"]
    # a ( b ) has a, b, <root> → a, a → b, <root> → a → b; of them a ( d ) has a and <root> → a. a has both of its own.
    assert scores.coverage == pytest.approx(70)
    assert scores.full_coverage == 50
    assert scores.prompt_length == len("c") + len("a ( d )") + len("c ( )")
    assert report.programs == 2
    assert report.versions["numpy"] == np.__version__


@pytest.mark.parametrize("entries", [len(QUERIES) - 1, len(QUERIES) + 1])
def test_as_many_exclusions_as_queries(entries):
    with pytest.raises(InputError, match=f"exclude has {entries} entries for 10 queries"):
        run({"rcr": always(0, 1, 2)}, k=3, exclude=[[]] * entries)


def test_the_questions_of_a_database_are_resampled_together():
    """Nine questions of each of 40 databases, all covered or none."""
    pool = [Example(str(i), "", target) for i, target in enumerate(["a", "zz"])]
    queries = [
        Example(str(i), f"q {i}", f"x{i} ( {'a' if i // 9 % 2 else 'c'} )", home=str(i // 9)) for i in range(360)
    ]
    selectors = {"rcr": always(0), "other": always(1)}
    low, high = run(selectors, queries, pool, k=1).selectors["other"].intervals["coverage"]
    alone = run(selectors, [replace(each, home="") for each in queries], pool, k=1)
    own = alone.selectors["other"].intervals["coverage"]
    assert (high - low) / (own[1] - own[0]) == pytest.approx(3, rel=0.15)


def test_coverage_equals_a_slow_plain_loop():
    pool, plain = POOL[:7], plain_selectors(POOL[:7], NO_EMBEDDINGS, names=["random", "bm25", "oracle"])
    report, selectors = run(plain, pool=pool, k=2), plain.selectors
    for name, scores in report.selectors.items():
        found = []
        for query in QUERIES:
            needed = set(SPEC.structures(query.target))
            (picks,) = selectors[name].pick([query.source], 2, None, [query.target])
            shown = set().union(*(SPEC.structures(pool[i].target) for i in picks))
            found += [len(needed & shown) / len(needed)] if needed else []
        assert report.n == len(found)
        assert scores.coverage == pytest.approx(100 * np.mean(found))
        assert scores.full_coverage == pytest.approx(100 * np.mean([share == 1 for share in found]))


@pytest.mark.slow
def test_all_plain_selectors_end_to_end():
    names = [name for name in baselines.BASELINES if name not in (*LEARN, *OWN_MODEL)]
    plain = plain_selectors(POOL, EVERYTHING, dev=QUERIES[:4], names=names)
    assert list(plain.selectors) == names
    assert all(isinstance(selector, Baseline) for selector in plain.selectors.values())
    report = run(plain)
    assert report.left_out == {}
    assert report.trade_offs == plain.trade_offs
    assert [name for name, scores in report.selectors.items() if scores.kind != "plain"] == ["oracle", "cover_ls_gold"]
    assert report.oracle is report.selectors["oracle"]
    for name, scores in report.selectors.items():
        assert (scores.latency_ms > 0) == (scores.latency_batch_ms > 0) == (name != "no_examples")
    assert report.selectors["oracle"].coverage == max(scores.coverage for scores in report.selectors.values())


class Longest(DenseSelector):
    """A baseline from elsewhere, to be registered: by length and, on development queries, a trade-off."""

    name = "longest"
    trade_off = TradeOff("power", (1.0, 2.0))

    def __init__(self, examples, *, power=0.0, **options):
        self.power = power
        super().__init__(examples, **options)

    def _pick(self, queries, k, excluded):
        return top_k(np.array([[len(text) ** self.power for text in self._questions]] * len(queries)), k, excluded)


def test_a_new_baseline_is_a_file_and_a_line_of_the_registry(monkeypatch, tmp_path):
    monkeypatch.setitem(baselines.BASELINES, "longest", f"{__name__}:Longest")
    assert EvaluationSettings(selectors=["longest", "bm25"]).selectors == ["longest", "bm25"]
    plain = plain_selectors(POOL, EVERYTHING, dev=QUERIES, names=["bm25", "longest"])
    assert plain.trade_offs["longest"].parameter == "power"
    assert plain_selectors(POOL, NO_EMBEDDINGS, names=["longest"]).left_out == {"longest": "no embeddings were given"}
    run(plain).write(tmp_path)
    report = EvaluationReport.read(tmp_path)
    assert report.selectors["longest"].kind == "plain"
    assert report.best_plain() is not None
    assert "longest: power = 1 (best of 2 on dev)." in table(report)


def test_an_unregistered_baseline_is_refused():
    with pytest.raises(InputError, match=r"^EvaluationSettings: selectors must be 'random', .*'oracle'"):
        EvaluationSettings(selectors=["longest"])


def test_without_embeddings_those_that_need_them_are_left_out_with_a_reason():
    plain = plain_selectors(POOL, NO_EMBEDDINGS)
    report = run(plain)
    assert list(report.selectors) == [
        "random",
        "no_examples",
        "bm25",
        "bm25_schema",
        "oracle",
        "cover_ls_gold",
    ]
    assert report.left_out == {
        **dict.fromkeys(("dense", "mmr", "dpp", "knn_structures", "dail_sql"), "no embeddings were given"),
        "set_bsr": "no embeddings of tokens were given",
        **dict.fromkeys(LEARN, "no scoring language model was given"),
        **dict.fromkeys(OWN_MODEL, "no pretrained models can be opened"),
    }
    assert report.trade_offs == {}


def test_selectors_that_are_not_named_cost_nothing():
    def never(texts):
        raise AssertionError

    plain = plain_selectors(POOL, Resources(SPEC, 1, never, never), dev=QUERIES, names=["oracle", "bm25"])
    assert list(plain.selectors) == ["bm25", "oracle"]
    assert (plain.left_out, plain.trade_offs) == ({}, {})
    some = plain_selectors(POOL, Resources(SPEC, 1, embed), dev=QUERIES, names=["dense", "mmr", "set_bsr"])
    assert list(some.selectors) == ["dense", "mmr"]
    assert list(some.left_out) == ["set_bsr"]
    assert list(some.trade_offs) == ["mmr"]


@pytest.mark.slow
def test_each_selector_embeds_the_pool_once():
    calls = []

    def recording(texts):
        calls.append(len(texts))
        return embed(texts)

    run(plain_selectors(POOL, Resources(SPEC, 1, recording), dev=QUERIES[:4]))
    assert calls.count(24) == 5
    assert max(calls) == 24


@pytest.mark.slow
def test_exclusion_reaches_the_selectors_and_is_checked():
    exclude = [[i, i + 1] for i in range(10)]
    run(plain_selectors(POOL, EVERYTHING), exclude=exclude)
    with pytest.raises(InputError, match=r"selector rcr picked .* none of those excluded"):
        run({"rcr": always(*range(8))}, exclude=exclude)


def test_exclusion_follows_the_queries_that_count():
    queries = [Example("x", "x", "not ( a"), *QUERIES[:2]]
    seen = []

    def pick(asked, k, exclude):
        seen.append(([each.id for each in asked], [list(entry) for entry in exclude]))
        return np.array([[9, 10, 11, 12, 13, 14, 15, 16][:k]] * len(asked))

    run({"rcr": pick}, queries, exclude=[[9], [1], [2]])
    ids = [q.id for q in QUERIES[:2]]
    assert seen[0] == (ids, [[1], [2]])
    assert seen[1] == (ids[:1], [[1]])


class Fresh(list):
    """What one query may not pick."""


class Lazy(Sequence):
    """Made anew whenever it is read; says how many of them there ever were at once."""

    def __init__(self, count):
        self.count, self.most, self._made = count, 0, []

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        own = Fresh([int(at), int(at) + 1])
        self._made.append(weakref.ref(own))
        self.most = max(self.most, sum(each() is not None for each in self._made))
        return own


def test_what_is_barred_is_read_a_block_of_queries_at_a_time(monkeypatch):
    """With groups, most of the pool is barred for every query: all at once, that may fill the memory."""
    plain, lists = plain_selectors(POOL, NO_EMBEDDINGS, names=["bm25", "oracle"]), [[i, i + 1] for i in range(10)]
    whole, choice = run(plain, exclude=lists), chosen("mmr", exclude=lists)
    monkeypatch.setattr("rcr_trainer.data.arrays._BLOCK_ELEMENTS", 3 * len(POOL))
    monkeypatch.setattr("rcr_trainer.evaluation.harness.LATENCY_BATCH", 3)
    barred = Lazy(10)
    report = run(plain, exclude=barred)
    assert {name: own.coverage for name, own in report.selectors.items()} == {
        name: own.coverage for name, own in whole.selectors.items()
    }
    assert chosen("mmr", exclude=barred) == choice
    assert barred.most == 3


def test_more_picks_than_the_pool_has_are_refused():
    with pytest.raises(InputError, match=r"k is 7.* 6 examples"):
        run(plain_selectors(POOL[:6], NO_EMBEDDINGS), pool=POOL[:6], k=7)


@pytest.mark.parametrize("last", [24, -1, 1])
def test_a_selector_that_breaks_its_word_is_named(last):
    with pytest.raises(InputError, match=r"selector odd picked \[0, 1, .*, not 4 positions of 24, each once"):
        run({"odd": always(0, 1, 2, last)})
    with pytest.raises(InputError, match="not 4 positions of 24"):
        run({"odd": lambda q, k, e: np.tile(np.arange(k - 1), (len(q), 1))})
    with pytest.raises(InputError, match=r"selector odd gave an array of shape \(9, 4\), not \(10, 4\)"):
        run({"odd": lambda q, k, e: np.tile(np.arange(k), (len(q) - 1, 1))})


def test_no_gold_program_parses():
    with pytest.raises(InputError, match="none of the 2 queries"):
        run({"rcr": always(*range(8))}, [Example("0", "a", "( ("), Example("1", "b", "")])


def test_latency_is_that_of_k_picks_for_one_query():
    def pick(queries, k, exclude):
        time.sleep(0.004 * k if len(queries) == 1 else 0)
        return np.tile(np.arange(k), (len(queries), 1))

    scores = run({"rcr": pick}, k=2).selectors["rcr"]
    assert 8 <= scores.latency_ms < 30
    assert scores.latency_batch_ms < 2


def test_latency_counts_the_encoding_of_a_question_whose_vector_is_kept():
    kept = {query.source for query in QUERIES}

    def pick(queries, k, exclude):
        time.sleep(0 if kept.issuperset(each.question for each in queries) else 0.01)
        return np.tile(np.arange(k), (len(queries), 1))

    scores = run({"rcr": pick}).selectors["rcr"]
    assert scores.latency_ms >= 10
    assert scores.latency_batch_ms >= 1


@pytest.mark.parametrize(("name", "k"), [("mmr", 3), ("dpp", 2)])
def test_a_trade_off_is_chosen_by_coverage_on_dev(name, k):
    choice = chosen(name, k=k)
    assert (choice.n, choice.chosen_on) == (10, "dev")
    assert tuple(choice.coverage) == baselines.get_baseline(name).trade_off.grid
    assert choice.coverage[choice.value] == max(choice.coverage.values())
    plain = plain_selectors(POOL, EVERYTHING, dev=QUERIES, k=k, names=[name])
    assert plain.trade_offs == {name: choice}
    report = run(plain, k=k)
    assert report.selectors[name].coverage == pytest.approx(max(choice.coverage.values()))


def test_the_first_of_equals_is_chosen(monkeypatch):
    monkeypatch.setattr(baselines.get_baseline("mmr"), "trade_off", TradeOff("lambda_mult", (0.5, 0.5000001)))
    assert chosen("mmr").value == 0.5


def test_different_trade_offs_cover_differently(monkeypatch):
    monkeypatch.setattr(baselines.get_baseline("dpp"), "trade_off", TradeOff("lam", (0.01, 0.1, 1.0)))
    assert len(set(chosen("dpp", k=2).coverage.values())) > 1


@pytest.mark.parametrize(("name", "default"), [("mmr", 0.5), ("dpp", 0.1)])
def test_without_a_usable_dev_the_choice_is_made_on_the_pool(name, default):
    expected = chosen(name, dev=POOL, exclude=[[i] for i in range(24)])
    assert len({example.source for example in POOL}) == 24
    for dev in ([], [Example("0", "a", "( (")]):
        choice = chosen(name, dev=dev)
        assert choice.coverage == pytest.approx(expected.coverage)
        assert (choice.value, choice.n, choice.chosen_on) == (expected.value, 24, "pool")
    small = chosen(name, POOL[:4], [], k=4)
    assert (small.value, small.coverage, small.n, small.chosen_on) == (default, {}, 0, "nothing")


def test_on_the_pool_a_question_may_not_pick_its_copy():
    choice = chosen("mmr", [*POOL[:6], *POOL[:6]], [], k=1)
    assert max(choice.coverage.values()) < 100


def test_the_choice_respects_exclusion():
    choice = chosen("mmr", k=4, exclude=[range(20)] * 10)
    # Only four are left, so that every trade-off picks the same ones.
    assert len(set(choice.coverage.values())) == 1
    assert choice.value == 0.3


def test_the_same_selector_twice_takes_the_same_time(monkeypatch):
    """On a machine that gets faster while they are timed: one after the other, the second would seem much faster."""
    now = [0.0, 0]

    def pick(queries, k, exclude):
        now[1] += 1
        now[0] += 0.001 + 0.01 / now[1]
        return np.array([[0, 1, 2][:k]] * len(queries))

    monkeypatch.setattr("rcr_trainer.evaluation.harness.time.perf_counter", lambda: now[0])
    report = run({"rcr": pick, "same": pick}, k=3)
    ours, same = report.selectors["rcr"], report.selectors["same"]
    assert ours.latency_ms == pytest.approx(same.latency_ms, rel=0.1)
    assert ours.latency_batch_ms == pytest.approx(same.latency_batch_ms, rel=0.1)
