"""Folds of programs and clusters, and training questions held out by them."""

import time
import tracemalloc

import numpy as np
import pytest
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import Example
from rcr_trainer.data.held_out import Barred, HeldOut, share_held_out, taken_from

from langchain_rcr.basics.items import Item
from langchain_rcr.families.folds import ALONE, CLUSTER, FOLDS, LARGEST, PROGRAM, Folds
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
QUESTIONS = [example.item for example in covr_split("110", 0, 120, 0, dev=0).train]


def distinct(items):
    return {SPEC.key(item.target) for item in items}


def test_questions_of_one_program_are_in_one_fold_either_way():
    twice = [*QUESTIONS, *(Item(f"again {item.source}", item.target) for item in QUESTIONS)]
    folds = Folds.of(twice, SPEC)
    numbers = folds.numbers(twice)[:, [PROGRAM, CLUSTER]]
    np.testing.assert_array_equal(numbers[: len(QUESTIONS)], numbers[len(QUESTIONS) :])
    assert numbers.min() >= 0
    assert set(numbers[:, PROGRAM].tolist()) == set(range(FOLDS))


def test_folds_by_program_are_of_even_size():
    of_program = {SPEC.key(item.target): tuple(row) for item, row in zip(QUESTIONS, numbers_of(QUESTIONS), strict=True)}
    sizes = np.bincount([row[PROGRAM] for row in of_program.values()])
    assert sizes.max() - sizes.min() <= 1
    assert len(of_program) == len(distinct(QUESTIONS)) > 50


def numbers_of(items, **options):
    return Folds.of(items, SPEC, **options).numbers(items)


@pytest.mark.parametrize("new", [1.0, 0.4, 0.0])
def test_neither_the_order_of_the_questions_nor_repeats_matter(new):
    numbers = numbers_of(QUESTIONS, new=new)
    order = np.random.default_rng(0).permutation(len(QUESTIONS))
    shuffled = [QUESTIONS[row] for row in order]
    again = Folds.of([*shuffled, *shuffled[:9]], SPEC, new=new)
    np.testing.assert_array_equal(again.numbers(QUESTIONS), numbers)
    ways = again.ways(QUESTIONS)
    np.testing.assert_array_equal(again.ways(shuffled), ways[order])
    assert not np.array_equal(numbers_of(QUESTIONS, new=new, seed=1)[:, PROGRAM], numbers[:, PROGRAM])


def test_no_cluster_has_more_than_a_fifth_of_the_programs_and_similar_ones_share_one():
    programs = [f"f{group}(g{group}(h{group}(x{member})))" for group in range(6) for member in range(4)]
    items = [Item(program, program) for program in programs]
    clusters = numbers_of(items)[:, CLUSTER]
    assert [len(set(clusters[start : start + 4])) for start in range(0, 24, 4)] == [1] * 6
    assert np.bincount(clusters).max() <= LARGEST * len(programs)
    for part in (QUESTIONS, QUESTIONS[:30]):
        of_program = {SPEC.key(item.target): row[CLUSTER] for item, row in zip(part, numbers_of(part), strict=True)}
        sizes = np.bincount(list(of_program.values()))
        assert sizes.max() <= LARGEST * len(of_program)
        assert len(sizes) < len(of_program)


def test_single_questions_are_held_out_where_their_own_program_may_be_found():
    items = [Item(f"question {number}", "f(a)") for number in range(20)]
    folds = Folds.of(items, SPEC, new=0.0)
    numbers = folds.numbers(items)
    assert np.bincount(numbers[:, ALONE]).tolist() == [4] * 5
    assert set(folds.ways(items).tolist()) == {ALONE}
    assert folds.numbers([Item("another question", "f(a)")])[:, ALONE].tolist() == [-1]


def test_as_many_questions_are_held_out_with_their_programs_as_asked():
    items = [Item(f"question {number}", f"f{number % 50}(a)") for number in range(600)]
    shares = [(Folds.of(items, SPEC, new=new).ways(items) != ALONE).mean() for new in (0.0, 0.3, 0.7, 1.0)]
    np.testing.assert_allclose(shares, [0, 0.3, 0.7, 1], atol=0.05)
    assert shares[0] == 0
    assert shares[-1] == 1


def test_half_of_the_questions_are_held_out_by_cluster():
    folds = Folds.of(QUESTIONS, SPEC)
    ways = folds.ways(QUESTIONS)
    assert 0.3 < (ways == CLUSTER).mean() < 0.7
    assert ways[:7].tolist() == folds.ways(QUESTIONS[:7]).tolist()
    strangers = [Item(f"{item.source} else", f"stranger({item.target})") for item in QUESTIONS]
    assert set(folds.ways(strangers).tolist()) == {PROGRAM}


@pytest.mark.parametrize("programs", [[], ["f(a)"], ["f(a)", "g(b)"], ["no ( program", "f(a)", "g ( no"]])
def test_few_programs(programs):
    items = [Item(f"question {number}", program) for number, program in enumerate(programs)]
    assert numbers_of(items).shape == (len(items), 3)


# ---------------------------------------------------------------- what held-out questions may not get

POOL = [Example(str(number), f"question {number}", f"f{number // 2}(g(x), h(y))") for number in range(20)]


def test_fold_mates_are_barred():
    held_out = HeldOut(POOL, POOL, SPEC)
    items = [example.item for example in POOL]
    numbers, ways = held_out.folds.numbers(items), held_out.folds.ways(items)
    for row, barred in enumerate(held_out.barred(POOL)):
        mates = [other for other in range(20) if numbers[other, ways[row]] == numbers[row, ways[row]]]
        assert barred.tolist() == mates
        assert {row, row ^ 1} <= set(mates)  # its own program
        assert len(mates) <= 10
    stranger = Example("s", "another question", "k(k)")
    assert held_out.barred([stranger])[0].tolist() == []


def test_a_fold_of_over_half_the_pool_bars_the_own_program_alone():
    pool = [
        Example(str(number), f"question {number}", "f(a)" if number < 12 else f"g{number}(a)") for number in range(20)
    ]
    held_out = HeldOut(pool, pool, SPEC)
    barred = held_out.barred(pool)
    assert [row.tolist() for row in barred[:12]] == [list(range(12))] * 12
    numbers = held_out.folds.numbers([example.item for example in pool])
    assert (numbers[12:, PROGRAM] == numbers[0, PROGRAM]).any()  # mates, which stay open to the twelve
    assert all(set(range(12)).isdisjoint(row) for row in barred[12:])


def test_questions_that_may_find_their_own_program_are_barred_from_themselves_and_their_fold():
    held_out = HeldOut(POOL, POOL, SPEC, new=0.0)
    numbers = held_out.folds.numbers([example.item for example in POOL])[:, ALONE]
    for row, barred in enumerate(held_out.barred(POOL)):
        assert barred.tolist() == np.flatnonzero(numbers == numbers[row]).tolist()
        assert len(barred) == 4


def test_of_both_kinds_each_is_barred_from_its_own():
    held_out = HeldOut(POOL, POOL, SPEC, new=0.5)
    ways = held_out.folds.ways([example.item for example in POOL])
    assert {ALONE, PROGRAM, CLUSTER} == set(ways.tolist())
    for row, barred in enumerate(held_out.barred(POOL)):
        assert row in barred
        assert ways[row] == ALONE or row ^ 1 in barred


def plainly_barred(query, pool, with_program, in_fold):
    """What a query may not get, looked at one by one."""
    inside = [e.group == query.group for e in pool]
    mates = [n for n in range(len(pool)) if inside[n] and in_fold[n]]
    few = len(mates) <= sum(inside) / 2
    return [
        n
        for n, e in enumerate(pool)
        if not inside[n]
        or e.id == query.id
        or (e.source, e.target) == (query.source, query.target)
        or (with_program and SPEC.key(e.target) == SPEC.key(query.target))
        or (few and n in mates)
    ]


@pytest.mark.parametrize("groups", [1, 3, 40])
@pytest.mark.parametrize("new", [1.0, 0.5])
def test_what_is_barred_is_what_a_plain_reader_bars(groups, new):
    rng = np.random.default_rng(groups)
    drawn = [*QUESTIONS, *(Item(f"{n % 30}", f"f{rng.integers(9)}(a)") for n in range(60))]
    named = [str(group) if groups > 1 else None for group in rng.integers(groups, size=len(drawn))]
    pool = [Example(str(n), i.source, i.target, group=g) for n, (i, g) in enumerate(zip(drawn, named, strict=True))]
    queries = [*pool[::2], Example("s", "a stranger", "f1(a)", group="nowhere")]
    held_out = HeldOut(pool, pool, SPEC, new=new)
    numbers, theirs = (held_out.folds.numbers([e.item for e in every]) for every in (pool, queries))
    ways, barred = held_out.folds.ways([q.item for q in queries]), held_out.barred(queries)
    own = [Barred(queries, pool, SPEC, same) for same in (False, True)]
    for n, (query, way) in enumerate(zip(queries, ways, strict=True)):
        in_fold = (theirs[n, way] >= 0) & (numbers[:, way] == theirs[n, way])
        assert barred[n].tolist() == plainly_barred(query, pool, way != ALONE, in_fold)
        for same in (False, True):
            assert own[same][n].tolist() == plainly_barred(query, pool, same, np.zeros(len(pool), dtype=bool))
    assert [row.tolist() for row in barred[-3:]] == [row.tolist() for row in [*barred][-3:]]


def test_what_is_barred_is_found_when_it_is_asked_for():
    pool = [Example(str(n), f"question {n}", f"f{n % 9}(a)", group=str(n % 50)) for n in range(1500)]
    held_out = HeldOut(pool, pool, SPEC)
    tracemalloc.start()
    every = [Barred(pool, pool, SPEC), Barred(pool, pool, SPEC, with_program=True), held_out.barred(pool)]
    assert all(max(map(len, barred)) > 1400 for barred in every)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6e6  # 1,500² numbers are 18 MB


def example(number, program, source="question"):
    return Example(f"{source}-{number}", f"{source} {number}", program)


RECURRING = [example(number, f"f{max(number, 15)}(a)") for number in range(20)]
"""Of 20 questions 16 share one program, and 4 have one of their own."""


@pytest.mark.parametrize(
    ("dev", "share"),
    [
        (RECURRING[:8], 0.0),  # taken from training: as new as training questions are to each other
        ([], 0.0),
        ([example(n, "f15(a)" if n < 5 else f"g{n}(a)", "dev") for n in range(10)], (0.5 - 0.2) / 0.8),
        ([example(n, "f15(a)", "dev") for n in range(10)], 0.0),  # none is new: more can't be made to recur
        ([example(n, f"g{n}(a)", "dev") for n in range(10)], 1.0),
    ],
)
def test_training_questions_are_held_out_as_new_as_questions_to_come(dev, share):
    assert share_held_out(None, RECURRING, dev, RECURRING, SPEC) == pytest.approx(share)
    assert [share_held_out(own, RECURRING, dev, RECURRING, SPEC) for own in (True, False)] == [1.0, 0.0]


def test_where_no_program_recurs_all_are_held_out_with_theirs():
    assert share_held_out(None, RECURRING[15:], [], RECURRING[15:], SPEC) == 1.0


def test_questions_outside_the_pool_are_in_the_folds_of_their_programs():
    slice_of = [Example("q", "yet another question", POOL[4].target)]
    assert not taken_from(slice_of, POOL)
    assert taken_from(POOL[:3], POOL)
    held_out = HeldOut(POOL, slice_of, SPEC)
    assert {4, 5} <= set(held_out.barred(slice_of)[0].tolist())


# ---------------------------------------------------------------- clustering


@pytest.mark.slow
def test_four_thousand_programs_are_clustered_in_seconds():
    drawn = np.random.default_rng(0).integers(0, 300, (4000, 12)).tolist()
    items = [Item(f"question {row}", " ".join(f"w{label}" for label in labels)) for row, labels in enumerate(drawn)]
    began = time.perf_counter()
    numbers = Folds.of(items, ProgramSpec("tokens")).numbers(items)
    assert time.perf_counter() - began < 20
    assert np.bincount(numbers[:, CLUSTER]).max() <= LARGEST * len(items)


def test_without_a_combination_no_candidate_has_both_labels():
    programs = ["f(a, b)", "f(a, c)", "f(a, b, c)", *(f"g({n})" for n in range(17))]
    pool = [Example(str(at), f"question {at}", program) for at, program in enumerate(programs)]
    held_out = HeldOut(pool, pool, SPEC, new=1.0)
    (barred,) = held_out.without_combination([pool[2]])
    # f and a are in three of 20, as many as may be of the pairs; then all that have both are barred.
    assert {0, 1, 2} <= {*barred.tolist()}
    (first,) = held_out.without_combination([pool[0]])
    assert {0, 1, 2} <= {*first.tolist()}
    (alone,), (own,) = held_out.without_combination([pool[5]]), held_out.barred([pool[5]])
    both = [at for at, program in enumerate(programs) if program == "g(2)"]
    np.testing.assert_array_equal(alone, np.union1d(own, both))


def test_questions_held_out_alone_are_not_with_their_programs():
    pool = [Example(str(at), item.source, item.target) for at, item in enumerate(QUESTIONS)]
    assert not HeldOut(pool, pool, SPEC, new=0.0).with_program(pool).any()
    assert HeldOut(pool, pool, SPEC, new=1.0).with_program(pool).all()
