"""Supervision: gains and Algorithm 1 against sets, what a query may not get, hard negatives against rank_bm25."""

import numpy as np
import pytest
from rank_bm25 import BM25Okapi
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import Example
from rcr_trainer.data.held_out import Barred
from rcr_trainer.data.okapi import tokenize
from rcr_trainer.training.supervision import Supervision, hard_negatives

from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()


def build(queries, pool, spec, *, with_program, **options):
    return Supervision(queries, pool, spec, Barred(queries, pool, spec, with_program), **options)


def example(name, program, question=None):
    return Example(name, question or f"question {name}", program)


@pytest.fixture(scope="module")
def examples():
    return covr_split("110", 0, 40, 10)


@pytest.fixture(scope="module")
def supervision(examples):
    return build(examples.test, examples.train, SPEC, with_program=True)


def structures(examples):
    return [SPEC.structures(e.target) for e in examples]


@pytest.mark.parametrize("candidates", [None, [3, 0, 17, 39], list(range(40)), [5], []])
def test_gains_equal_those_of_sets(examples, supervision, candidates):
    rng = np.random.default_rng(0)
    queries = np.array([4, 0, 4, 9])
    picked = np.stack([rng.permutation(40)[:3] for _ in queries])
    columns = None if candidates is None else np.array(candidates, dtype=np.int64)
    gains = supervision.gains(queries, picked, columns)
    needs, pool = structures(examples.test), structures(examples.train)
    scored = range(40) if candidates is None else candidates
    assert gains.shape == (4, 4, len(scored))
    assert gains.dtype == np.float32
    for row, query in enumerate(queries):
        left = set(needs[query])
        for step in range(4):
            assert gains[row, step].tolist() == [len(pool[c] & left) for c in scored]
            if step < 3:
                left -= pool[picked[row, step]]
    assert supervision.gains(queries, picked[:, :0]).shape == (4, 1, 40)


def test_algorithm_1_by_hand():
    pool = [example("a", "f(g(x))"), example("b", "f(h(y))"), example("c", "f(g(x), h(y))"), example("d", "q(r)")]
    supervision = build([example("t", "f(g(x), h(y))")], pool, SPEC, with_program=True)
    assert supervision.forbidden[0].tolist() == [2]
    positions, gains = supervision.sequences(3)
    # a: f, g, x, f→g, g→x, f→g→x and the three chains from the root. b adds h, y, f→h, h→y, f→h→y and two chains from
    # the root. The siblings g, h stay uncovered.
    wanted = SPEC.structures("f(g(x), h(y))")
    first, second = SPEC.structures("f(g(x))") & wanted, SPEC.structures("f(h(y))") & wanted
    assert positions.tolist() == [[0, 1, 3]]
    assert gains.tolist() == [[len(first), len(second - first), 0]]
    assert (len(first), len(second - first)) == (9, 7)
    whole = build([example("t", "f(g(x), h(y))")], pool, SPEC, with_program=False)
    assert whole.sequences(1)[0].tolist() == [[2]]


def test_sequences_equal_algorithm_1_on_sets(examples, supervision):
    positions, gains = supervision.sequences(4)
    needs, pool = structures(examples.test), structures(examples.train)
    for row, (picks, gained) in enumerate(zip(positions.tolist(), gains.tolist(), strict=True)):
        left, picked = set(needs[row]), []
        for pick, gain in zip(picks, gained, strict=True):
            allowed = [c for c in range(40) if c not in {*picked, *supervision.forbidden[row].tolist()}]
            best = max(len(pool[c] & left) for c in allowed)
            assert gain == best == len(pool[pick] & left)
            assert pick in allowed
            if best:  # a tie goes to the lowest position
                assert pick == next(c for c in allowed if len(pool[c] & left) == best)
            left -= pool[pick]
            picked.append(pick)


def test_coverage_equals_that_of_sets(examples, supervision):
    rng = np.random.default_rng(1)
    positions = np.stack([rng.permutation(40)[:4] for _ in examples.test])
    needs, pool = structures(examples.test), structures(examples.train)
    expected = [
        len(need & frozenset().union(*(pool[p] for p in picks))) / len(need)
        for need, picks in zip(needs, positions.tolist(), strict=True)
    ]
    assert supervision.coverage(positions) == pytest.approx(100 * np.mean(expected))


def test_a_query_without_a_program_needs_nothing():
    pool = [example("a", "f(x)"), example("b", "g(x)")]
    queries = [example("t", "no ( program"), example("u", "f(x)")]
    supervision = build(queries, pool, SPEC, with_program=False)
    assert supervision.sequences(2)[1].tolist()[0] == [0, 0]


def test_what_no_candidate_left_has_is_not_counted_as_needed():
    pool = [example("1", "f(a)"), example("2", "f(b)"), example("3", "f(a)")]
    queries = [pool[0], example("q", "f(a)"), example("r", "h(h)")]
    every, left = (build(queries, pool, SPEC, with_program=True, reachable=reachable) for reachable in (False, True))
    # The first two may get "f(b)" alone: `f`, and that it is at the root, of these structures and those with `a`.
    assert every.needs.sum(axis=1).tolist() == [len(SPEC.structures("f(a)"))] * 2 + [len(SPEC.structures("h(h)"))]
    shared = len(SPEC.structures("f(a)") & SPEC.structures("f(b)"))
    assert left.needs.sum(axis=1).tolist() == [shared, shared, 0]
    assert left.coverage(np.array([[1], [1], [1]])) == 100
    assert build(queries[2:], pool, SPEC, with_program=True, reachable=True).coverage(np.array([[1]])) != 100
    assert build([], pool, SPEC, with_program=True, reachable=True).needs.shape[0] == 0


def test_no_query_gets_itself():
    pool = [
        example("1", "answer(capital('texas'))"),
        example("2", "answer(capital('ohio'))"),
        example("3", "answer(area('ohio'))"),
        Example("4", "QUESTION  1", "answer(capital('Texas'))"),  # the first once more, as `data check` compares pairs
    ]
    itself = Barred(pool, pool, SPEC, with_program=False)
    assert [row.tolist() for row in itself] == [[0, 3], [1], [2], [0, 3]]
    program = Barred(pool, pool, SPEC, with_program=True)  # up to the values, which are anonymised
    assert [row.tolist() for row in program] == [[0, 1, 3], [0, 1, 3], [2], [0, 1, 3]]
    held_out = Barred([example("x", "answer(area('x'))")], pool, SPEC, with_program=True)
    assert [row.tolist() for row in held_out] == [[2]]
    assert Barred([example("x", "f")], pool, SPEC, with_program=False)[0].tolist() == []
    supervision = build(pool, pool, SPEC, with_program=False)
    for row, picks in enumerate(supervision.sequences(2)[0].tolist()):
        assert not set(picks) & set(itself[row].tolist())


# ---------------------------------------------------------------- hard negatives


@pytest.fixture(scope="module")
def training(examples):
    return build(examples.train, examples.train, SPEC, with_program=True)


@pytest.fixture(scope="module")
def questions(examples):
    return [e.source for e in examples.train]


def nearest_of(questions, training, query, top):
    """The nearest by rank_bm25; equal ones by position, those that may not be picked last."""
    scores = BM25Okapi([tokenize(question) for question in questions]).get_scores(tokenize(questions[query]))
    scores[training.forbidden[query]] = -np.inf
    return np.argsort(-np.round(scores, 9), kind="stable")[:top]


def slow_worst(nearest, training, query, picks, worst):
    """Among the H nearest that may be picked, the B that add least; equal ones by nearness."""
    barred = {*training.forbidden[query].tolist(), *picks.tolist()}
    near = [c for c in nearest.tolist() if c not in barred]
    gains = training.gains(np.array([query]), picks[None])[0, -1]
    return [near[n] for n in sorted(range(len(near)), key=lambda n: (gains[near[n]], n))[:worst]]


@pytest.mark.slow
def test_draws_are_the_worst_of_the_nearest(questions, training):
    sequences = training.sequences(4)[0]
    draw = hard_negatives(training, sequences[:, :3], questions, questions, top=12, worst=3)
    queries, steps = np.arange(40), np.arange(40) % 4
    draws = np.stack([draw(queries, steps, np.random.default_rng(n)) for n in range(30)])
    for row, step in zip(queries, steps, strict=True):
        expected = slow_worst(nearest_of(questions, training, row, 12), training, row, sequences[row, :step], 3)
        assert set(draws[:, row].tolist()) == set(expected)


@pytest.mark.slow
def test_a_draw_is_neither_picked_nor_forbidden(questions, training):
    # The picks are among the nearest here, and add nothing any more: taken for negatives, they would be all of them.
    picked = np.stack([nearest_of(questions, training, query, 3) for query in range(40)])
    draw = hard_negatives(training, picked, questions, questions, top=39, worst=2)
    queries, steps = np.arange(40), np.full(40, 3)
    for seed in range(5):
        drawn = draw(queries, steps, np.random.default_rng(seed))
        for row, negative in enumerate(drawn.tolist()):
            assert negative not in picked[row].tolist()
            assert negative not in training.forbidden[row].tolist()


def test_more_negatives_asked_for_than_there_are():
    pool = [example(str(n), "f(x)" if n else "g(y)") for n in range(3)]
    training = build(pool, pool, SPEC, with_program=True)
    questions = [e.source for e in pool]
    picked = np.array([[1], [0], [1]])
    draw = hard_negatives(training, picked, questions, questions, top=50, worst=5)
    drawn = draw(np.arange(3), np.zeros(3, dtype=np.int64), RNG)
    assert drawn[0] in (1, 2)
    assert drawn[1:].tolist() == [0, 0]
    # All but itself is picked: some candidate, which the loss masks.
    drawn = draw(np.array([1]), np.array([1]), RNG)
    assert drawn[0] in (0, 1, 2)


RNG = np.random.default_rng(0)
