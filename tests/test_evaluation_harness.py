"""evaluate(), choose_mmr and plain_selectors, end to end on a handful of examples."""

from __future__ import annotations

import time

import numpy as np
import pytest
from rcr_trainer.baselines import Baseline, TokenVectors
from rcr_trainer.data import Example
from rcr_trainer.evaluation import choose_mmr, evaluate, plain_selectors
from rcr_trainer.evaluation.plain import choose_dpp
from rcr_trainer.programs import ProgramSpec

from langchain_rcr.errors import InputError

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
    ids = np.concatenate([[NAMES.index(word) for word in text.split() if word in NAMES] for text in texts])
    lengths = np.array([sum(word in NAMES for word in text.split()) for text in texts])
    return TokenVectors(lengths, ids, np.eye(len(NAMES), dtype=np.float32)[ids])


def run(selectors, queries=QUERIES, pool=POOL, **options):
    return evaluate(selectors, pool, queries, SPEC, **{"split": "toy", "seed": 5, **options})


def always(*positions):
    return lambda queries, k, exclude, references: np.array([positions[:k]] * len(queries))


def test_figures_by_hand():
    pool = [Example(str(i), "", target) for i, target in enumerate(["a ( b )", "c", "a ( d )", "c ( )", "zz"])]
    queries = [Example("0", "x", "a ( b )"), Example("1", "y", "a"), Example("2", "z", "broken ( (")]
    report = run({"rcr": always(1, 2, 3, 0)}, queries, pool, k=3, steps=4)
    assert (report.k, report.n, report.split, report.seed) == (3, 2, "toy", 5)
    assert (report.steps, report.pool_size, report.skipped_queries) == (4, 5, 1)
    scores = report.selectors["rcr"]
    # a ( b ) has a, b, <root> → a, a → b, <root> → a → b; of them a ( d ) has a and <root> → a. a has both of its own.
    assert scores.coverage_by_step == pytest.approx([0, 70, 70, 100])
    assert scores.full_coverage_by_step == [0, 50, 50, 100]
    assert scores.coverage == pytest.approx(70)
    assert scores.full_coverage == 50
    assert scores.duplicate_rate == scores.duplicate_rate_by_step[2]
    assert report.versions["numpy"] == np.__version__


def test_only_what_the_pool_has_counts_by_hand():
    pool = [Example(str(i), "", target) for i, target in enumerate(["a ( b )", "c", "a ( d )", "c ( )", "zz"])]
    targets = ["a ( e )", "a ( d )", "q", "q ( r )", "broken ( ("]
    queries = [Example(str(i), f"x{i}", target) for i, target in enumerate(targets)]
    report = run({"rcr": always(1, 0, 2, 3)}, queries, pool, k=3, steps=4, gold="pool")
    assert (report.gold, report.n, report.skipped_queries, report.none_in_pool) == ("pool", 2, 1, 2)
    # Of a ( e ) the pool has a and <root> → a, both in a ( b ); of a ( d ) all five, two of them in a ( b ).
    assert report.selectors["rcr"].coverage_by_step == pytest.approx([0, 70, 100, 100])
    assert report.selectors["rcr"].full_coverage_by_step == [0, 50, 100, 100]
    everything = run({"rcr": always(1, 0, 2, 3)}, queries, pool, k=3, steps=4)
    assert (everything.gold, everything.n, everything.skipped_queries, everything.none_in_pool) == ("all", 4, 1, 0)
    # a ( e ) has e, a → e and <root> → a → e as well; q and q ( r ) have nothing that the pool has.
    assert everything.selectors["rcr"].coverage_by_step == pytest.approx([0, 20, 35, 35])
    with pytest.raises(InputError, match=r"none of the 2 queries .* parses and shares a structure with the pool"):
        run({"rcr": always(1, 0, 2, 3)}, queries[2:4], pool, k=3, gold="pool")


@pytest.mark.parametrize("gold", ["all", "pool"])
def test_coverage_equals_a_slow_plain_loop(gold):
    pool, selectors = POOL[:7], plain_selectors(POOL[:7], SPEC, None, 3, names=["random", "bm25", "oracle"])
    report = run(selectors, pool=pool, k=2, steps=2, gold=gold)
    inside = set().union(*(SPEC.structures(example.target) for example in pool))
    for name, scores in report.selectors.items():
        found = []
        for query in QUERIES:
            needed = set(SPEC.structures(query.target))
            needed = needed & inside if gold == "pool" else needed
            (picks,) = selectors[name].pick([query.source], 2, None, [query.target])
            shown = set().union(*(SPEC.structures(pool[i].target) for i in picks))
            found += [len(needed & shown) / len(needed)] if needed else []
        assert report.n == len(found)
        assert scores.coverage == pytest.approx(100 * np.mean(found))
        assert scores.full_coverage == pytest.approx(100 * np.mean([share == 1 for share in found]))


def test_trade_offs_are_chosen_by_what_counts():
    pool, everything = POOL[:7], choose_mmr(embed, POOL[:7], QUERIES, SPEC, 3)
    inside = choose_mmr(embed, pool, QUERIES, SPEC, 3, gold="pool")
    assert all(inside.coverage[value] > everything.coverage[value] for value in inside.coverage)
    selectors = plain_selectors(pool, SPEC, embed, 0, dev=QUERIES, k=3, gold="pool", names=["mmr", "dpp"])
    assert selectors.mmr == inside
    report = run(selectors, pool=pool, k=3, gold="pool")
    assert report.selectors["mmr"].coverage == pytest.approx(max(inside.coverage.values()))
    assert report.selectors["dpp"].coverage == pytest.approx(max(selectors.dpp.coverage.values()))


def test_all_plain_selectors_end_to_end():
    selectors = plain_selectors(POOL, SPEC, embed, 1, embed_tokens=embed_tokens, dev=QUERIES[:4])
    plain = ["random", "fixed", "bm25", "bm25_coverage", "dense", "mmr", "dpp", "set_bsr"]
    assert list(selectors) == [*plain, "oracle"]
    assert [selector.name for selector in selectors.values()] == list(selectors)
    assert all(isinstance(selector, Baseline) for selector in selectors.values())
    report = run(selectors)
    assert report.left_out == {}
    assert report.mmr == selectors.mmr
    for scores in report.selectors.values():
        assert len(scores.coverage_by_step) == report.steps == 8
        assert (np.diff(scores.coverage_by_step) >= 0).all()
        assert scores.coverage == scores.coverage_by_step[3]
        assert scores.latency_ms > 0
        assert scores.latency_batch_ms > 0
    best = max(scores.coverage_by_step[0] for scores in report.selectors.values())
    assert report.selectors["oracle"].coverage_by_step[0] == best


def test_without_embeddings_those_that_need_them_are_left_out_with_a_reason():
    selectors = plain_selectors(POOL, SPEC, None, 1)
    report = run(selectors)
    assert list(report.selectors) == ["random", "fixed", "bm25", "bm25_coverage", "oracle"]
    assert report.left_out == {
        **dict.fromkeys(("dense", "mmr", "dpp"), "no embeddings were given"),
        "set_bsr": "no embeddings of tokens were given",
    }
    assert report.mmr is None
    assert selectors.dpp is None
    mixed = run({"rcr": always(*range(8)), **selectors}, left_out=selectors.left_out, mmr=selectors.mmr)
    assert mixed.left_out == report.left_out


def test_nothing_is_spent_on_selectors_that_nobody_asked_for():
    def never(texts):
        raise AssertionError

    selectors = plain_selectors(POOL, SPEC, never, 1, embed_tokens=never, dev=QUERIES, names=["oracle", "bm25"])
    assert list(selectors) == ["bm25", "oracle"]
    assert (selectors.left_out, selectors.mmr, selectors.dpp) == ({}, None, None)
    some = plain_selectors(POOL, SPEC, embed, 1, dev=QUERIES, names=["dense", "mmr", "set_bsr"], mmr_grid=(0.2,))
    assert list(some) == ["dense", "mmr"]
    assert list(some.left_out) == ["set_bsr"]
    assert (some.mmr.lambda_mult, some.dpp) == (0.2, None)


def test_the_pool_is_embedded_once_for_all():
    calls = []

    def recording(texts):
        calls.append(len(texts))
        return embed(texts)

    run(plain_selectors(POOL, SPEC, recording, 1, dev=QUERIES[:4]))
    assert calls.count(24) == 1
    assert max(calls) == 24


def test_exclusion_reaches_the_selectors_and_is_checked():
    exclude = [[i, i + 1] for i in range(10)]
    run(plain_selectors(POOL, SPEC, embed, 1), exclude=exclude)
    with pytest.raises(InputError, match="selector rcr picked an excluded position"):
        run({"rcr": always(*range(8))}, exclude=exclude)


def test_exclusion_follows_the_queries_that_count():
    queries = [Example("x", "x", "not ( a"), *QUERIES[:2]]
    seen = []

    def pick(asked, k, exclude, references):
        seen.append((list(asked), [list(entry) for entry in exclude], list(references)))
        return np.array([[9, 10, 11, 12, 13, 14, 15, 16][:k]] * len(asked))

    run({"rcr": pick}, queries, exclude=[[9], [1], [2]])
    sources, targets = [q.source for q in QUERIES[:2]], [q.target for q in QUERIES[:2]]
    assert seen[0] == (sources, [[1], [2]], targets)
    assert seen[1] == (sources[:1], [[1]], targets[:1])


def test_steps_are_capped_by_what_can_be_picked():
    assert run(plain_selectors(POOL[:6], SPEC, None, 0), pool=POOL[:6]).steps == 6
    report = run(plain_selectors(POOL[:6], SPEC, None, 0), pool=POOL[:6], exclude=[[0], *[[]] * 9])
    assert report.steps == 5
    assert run({"rcr": always(*range(12))}, k=10).steps == 10
    with pytest.raises(InputError, match=r"k is 7.* 6 examples"):
        run(plain_selectors(POOL[:6], SPEC, None, 0), pool=POOL[:6], k=7)


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda q, k, e, r: np.zeros((len(q), k - 1), dtype=int), r"shape \(10, 7\), not positions of shape \(10, 8\)"),
        (lambda q, k, e, r: np.tile(np.arange(k) * 1.0, (len(q), 1)), "float64"),
        (always(0, 1, 2, 3, 4, 5, 6, 24), "outside the pool of 24"),
        (always(0, 1, 2, 3, 4, 5, 6, -1), "outside the pool of 24"),
        (always(0, 1, 2, 3, 4, 5, 6, 1), "same position twice"),
    ],
)
def test_a_selector_that_breaks_its_word_is_named(pick, message):
    with pytest.raises(InputError, match=f"selector odd .*{message}"):
        run({"odd": pick})


def test_no_gold_program_parses():
    with pytest.raises(InputError, match="none of the 2 queries"):
        run({"rcr": always(*range(8))}, [Example("0", "a", "( ("), Example("1", "b", "")])


def test_latency_is_that_of_k_picks_for_one_query():
    def pick(queries, k, exclude, references):
        time.sleep(0.004 * k if len(queries) == 1 else 0)
        return np.tile(np.arange(k), (len(queries), 1))

    scores = run({"rcr": pick}, k=2).selectors["rcr"]
    assert 8 <= scores.latency_ms < 30
    assert scores.latency_batch_ms < 2


def test_mmr_is_chosen_by_coverage_on_dev():
    choice = choose_mmr(embed, POOL, QUERIES, SPEC, 3, grid=(0.0, 0.5, 1.0))
    assert choice.n == 10
    assert list(choice.coverage) == [0.0, 0.5, 1.0]
    assert choice.coverage[choice.lambda_mult] == max(choice.coverage.values())
    assert choose_mmr(embed, POOL, QUERIES, SPEC, 3, grid=(0.5, 0.5000001)).lambda_mult == 0.5
    selectors = plain_selectors(POOL, SPEC, embed, 0, dev=QUERIES, k=3)
    report = run({"mmr": selectors["mmr"]}, k=3)
    assert report.selectors["mmr"].coverage == pytest.approx(max(selectors.mmr.coverage.values()))


def test_mmr_without_a_usable_dev_is_chosen_on_the_pool():
    expected = choose_mmr(embed, POOL, POOL, SPEC, 3, exclude=[[i] for i in range(24)])
    assert len({example.source for example in POOL}) == 24
    for dev in ([], [Example("0", "a", "( (")]):
        choice = choose_mmr(embed, POOL, dev, SPEC, 3)
        assert choice.coverage == pytest.approx(expected.coverage)
        assert (choice.lambda_mult, choice.n, choice.chosen_on) == (expected.lambda_mult, 24, "pool")


def test_on_the_pool_a_question_may_not_pick_its_copy():
    pool = [*POOL[:6], *POOL[:6]]
    choice = choose_mmr(embed, pool, [], SPEC, 1, grid=(1.0,))
    assert choice.coverage[1.0] < 100


def test_mmr_with_too_small_a_pool_keeps_the_default():
    choice = choose_mmr(embed, POOL[:4], [], SPEC, 4)
    assert (choice.lambda_mult, choice.coverage, choice.n, choice.chosen_on) == (0.5, {}, 0, "nothing")


def test_dpp_is_chosen_as_mmr_is():
    choice = choose_dpp(embed, POOL, QUERIES, SPEC, 2, grid=(0.01, 0.1, 1.0))
    assert (choice.n, choice.chosen_on, list(choice.coverage)) == (10, "dev", [0.01, 0.1, 1.0])
    assert len(set(choice.coverage.values())) > 1
    assert choice.coverage[choice.lambda_mult] == max(choice.coverage.values())
    selectors = plain_selectors(POOL, SPEC, embed, 0, dev=QUERIES, k=2)
    assert selectors["dpp"].lam == selectors.dpp.lambda_mult
    report = run({"dpp": selectors["dpp"]}, k=2)
    assert report.selectors["dpp"].coverage == pytest.approx(max(selectors.dpp.coverage.values()))
    on_pool = choose_dpp(embed, POOL, [], SPEC, 3)
    expected = choose_dpp(embed, POOL, POOL, SPEC, 3, exclude=[[i] for i in range(24)])
    assert (on_pool.coverage, on_pool.chosen_on) == (expected.coverage, "pool")
    assert choose_dpp(embed, POOL[:4], [], SPEC, 4).lambda_mult == 0.1


def test_mmr_choice_respects_exclusion():
    exclude = [range(20)] * 10
    choice = choose_mmr(embed, POOL, QUERIES, SPEC, 4, grid=(0.3, 0.9), exclude=exclude)
    # Only four are left, so that every trade-off picks the same ones.
    assert choice.coverage[0.3] == pytest.approx(choice.coverage[0.9])
    assert choice.lambda_mult == 0.3
