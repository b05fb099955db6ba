"""`select`: greedy, beams, probabilities, early ends, constraints; against enumeration and by hand."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_reader import PlainReader, run

from langchain_rcr.errors import InputError
from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.policy.selection import Options, greedy, select
from langchain_rcr.pool.arguments import token_budget, token_counter

TAU = 0.7


def pool_of(seed: int, n: int = 7, dim: int = 4) -> PoolVectors:
    rng = np.random.default_rng(seed)
    return PoolVectors(*rng.normal(size=(2, n, dim)).astype(np.float32))


def queries_of(seed: int, batch: int = 3, dim: int = 4) -> np.ndarray:
    return np.random.default_rng([seed, 1]).normal(size=(batch, dim)).astype(np.float32)


def picked(vectors: PoolVectors, queries: np.ndarray, rows: list[Row] | None = None, lam: float = 0.5, **options):
    return run(select(queries, AdditiveState(lam), Options(**options), PlainReader(vectors, rows)))


def log_prob(pool: PoolVectors, query: np.ndarray, sequence: tuple[int, ...], lam: float = 0.5) -> float:
    """Σ log π of a sequence, by the definition."""
    total, state = 0.0, query.astype(np.float64)
    for step, pick in enumerate(sequence):
        logits = {
            n: float(pool.candidate[n] @ state) / TAU for n in range(len(pool.candidate)) if n not in sequence[:step]
        }
        total += logits[pick] - np.log(sum(np.exp(list(logits.values()))))
        state = state + lam * pool.context[pick]
    return total


@pytest.mark.parametrize("seed", range(5))
def test_one_beam_is_greedy_decoding(seed: int) -> None:
    pool, queries = pool_of(seed), queries_of(seed)
    ours, plain = picked(pool, queries, k=4), greedy(queries, pool, AdditiveState(0.5), 4)
    np.testing.assert_array_equal(ours.positions, plain.positions)
    np.testing.assert_allclose(ours.logits, plain.logits, rtol=1e-5, atol=1e-6)
    assert np.isnan(ours.probabilities).all()


def test_a_step_is_one_search_for_as_many_states_as_there_are_beams() -> None:
    reader = PlainReader(pool_of(0))
    run(select(queries_of(0, batch=9), AdditiveState(0.5), Options(k=4, beam_width=2), reader))
    assert reader.states == [9, 18, 18, 18]
    pool, query = by_hand(2.0, -1.0, -2.0)
    reader = PlainReader(pool)
    run(select(query, AdditiveState(0.5), Options(k=3, stop_early=True), reader))
    assert reader.states == [1, 1]  # none once every sequence has ended


def test_a_reader_that_waits_has_to_be_awaited() -> None:
    with pytest.raises(RuntimeError, match="waited for an event loop"):
        run(select(queries_of(1), AdditiveState(0.5), Options(k=3), PlainReader(pool_of(1), waits=True)))


async def test_awaited_it_is_the_same() -> None:
    pool, queries = pool_of(1), queries_of(1)
    options = Options(k=3, beam_width=2, tau=TAU)
    awaited = await select(queries, AdditiveState(0.5), options, PlainReader(pool, waits=True))
    np.testing.assert_array_equal(awaited.positions, picked(pool, queries, k=3, beam_width=2, tau=TAU).positions)


@pytest.mark.parametrize("seed", range(4))
def test_probabilities_are_those_of_the_policy_over_what_is_left(seed: int) -> None:
    pool, queries = pool_of(seed), queries_of(seed)
    found = picked(pool, queries, k=3, tau=TAU, probabilities=True)
    for query, sequence, chances in zip(queries, found.positions.tolist(), found.probabilities, strict=True):
        assert np.log(chances).sum() == pytest.approx(log_prob(pool, query, tuple(sequence)), abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_as_wide_as_all_sequences_finds_the_most_probable_set(seed: int) -> None:
    pool, queries = pool_of(seed, n=5), queries_of(seed, batch=2)
    found = picked(pool, queries, k=3, beam_width=60, tau=TAU)
    for query, sequence in zip(queries, found.positions.tolist(), strict=True):
        best = max(permutations(range(5), 3), key=lambda one: log_prob(pool, query, one))
        assert log_prob(pool, query, tuple(sequence)) == pytest.approx(log_prob(pool, query, best), abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4))
def test_the_first_beams_grow_the_first_picks(seed: int, width: int) -> None:
    pool, queries = pool_of(seed), queries_of(seed)
    found = picked(pool, queries, k=1, beam_width=width, tau=TAU)
    np.testing.assert_array_equal(found.positions, picked(pool, queries, k=1).positions)


def test_a_query_in_a_batch_gets_what_it_gets_alone() -> None:
    pool, queries = pool_of(3, n=9), queries_of(3, batch=5)
    together = picked(pool, queries, k=3, beam_width=3, tau=TAU)
    for at in range(5):
        alone = picked(pool, queries[at : at + 1], k=3, beam_width=3, tau=TAU)
        np.testing.assert_array_equal(together.positions[at], alone.positions[0])
        np.testing.assert_allclose(together.probabilities[at], alone.probabilities[0], atol=1e-6)


def by_hand(*logits: float) -> tuple[PoolVectors, np.ndarray]:
    """Candidates whose logits never change: E_z = 0."""
    candidate = np.array(logits, dtype=np.float32)[:, None]
    return PoolVectors(candidate, np.zeros_like(candidate)), np.ones((1, 1), dtype=np.float32)


def test_nothing_gained_ends_a_sequence() -> None:
    pool, query = by_hand(2.0, 0.5, 0.0, -1.0)
    found = picked(pool, query, k=4, stop_early=True)
    assert found.positions.tolist() == [[0, 1, -1, -1]]
    assert found.logits[0].tolist() == [2.0, 0.5, -np.inf, -np.inf]


def test_one_query_ends_and_the_others_go_on() -> None:
    pool = PoolVectors(np.array([[1, -1], [1, 1]], dtype=np.float32), np.zeros((2, 2), dtype=np.float32))
    queries = np.array([[0, 1], [1, 0]], dtype=np.float32)
    assert picked(pool, queries, k=2, stop_early=True).positions.tolist() == [[1, -1], [0, 1]]


def rows_of(*programs: int) -> list[Row]:
    return [Row(str(n), {"source": f"question {n}", "target": f"p{p}"}, p) for n, p in enumerate(programs)]


def test_programs_differ_while_others_are_left() -> None:
    pool, query = by_hand(5, 4, 3, 2, 1)
    rows = rows_of(7, 7, 7, 8, 8)
    found = picked(pool, query, rows, k=4, different_programs=True)
    assert found.positions.tolist() == [[0, 3, 1, 2]]


def test_a_constraint_looks_as_far_as_it_must() -> None:
    pool, query = by_hand(*range(100, 0, -1))
    found = picked(pool, query, rows_of(*[1] * 99, 2), k=2, different_programs=True)
    assert found.positions.tolist() == [[0, 99]]


def test_what_does_not_fit_is_passed_over_for_what_does() -> None:
    pool, query = by_hand(4, 3, 2, 1)
    rows = [Row(str(n), {"text": "x" * length}, n) for n, length in enumerate([5, 9, 3, 2])]
    budget = token_budget(11, len, lambda example: example["text"])  # a character is a token; a line break, too
    assert picked(pool, query, rows, k=4, fits=budget).positions.tolist() == [[0, 2, -1, -1]]
    assert picked(pool, query, rows, k=4, fits=token_budget(2, len, lambda e: e["text"])).positions.max() == -1


def test_what_may_be_picked_together_is_asked_no_more_often_than_needed() -> None:
    """Each answer may take a tokenizer. What is hidden is not asked about, either."""
    pool, query = by_hand(4, 3, 2, 1)
    asked = []
    table = MatrixTable(pool, rows_of(1, 2, 1, 3)).allowing(np.arange(4) < 3)
    options = Options(3, different_programs=True, fits=lambda rows: not asked.append([row.id for row in rows]))
    assert run(select(query, AdditiveState(0.5), options, table.opened())).positions.tolist() == [[0, 1, 2]]
    assert asked == [["0"], ["0", "1"], ["0", "1", "2"]]


def test_a_budget_holds_where_a_soft_constraint_gives_way() -> None:
    pool, query = by_hand(4, 3, 2)
    rows = [Row(str(n), {"text": "x" * length}, 1) for n, length in enumerate([3, 9, 3])]
    budget = token_budget(8, len, lambda example: example["text"])
    found = picked(pool, query, rows, k=3, different_programs=True, fits=budget)
    assert found.positions.tolist() == [[0, 2, -1]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3))
def test_constraints_hold_in_beams_as_far_as_they_can(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    programs = rng.integers(0, 4, size=8)
    found = picked(
        pool_of(seed, n=8),
        queries_of(seed),
        rows_of(*programs.tolist()),
        k=4,
        beam_width=width,
        tau=TAU,
        different_programs=True,
    )
    for row in found.positions:
        assert len(set(row.tolist())) == 4
        assert len(set(programs[row])) == min(4, len(set(programs)))


class WithTokens:
    def get_num_tokens(self, text: str) -> int:
        return 2 * len(text)


class WithEncode:
    def encode(self, text: str) -> list[int]:
        return [1] * len(text.split())


def test_tokens_are_counted_by_whatever_there_is() -> None:
    assert token_counter(WithTokens())("ab") == 4
    assert token_counter(WithEncode())("a b c") == 3
    assert token_counter(lambda text: 7)("a") == 7
    with pytest.raises(InputError, match="tokenizer must be a LangChain model, a tokenizer with encode, or a function"):
        token_counter(3)
    with pytest.raises(InputError, match=r"tokenizer must be a LangChain model, .* not str"):
        token_counter("gpt2")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_a_matrix_in_memory_gives_the_picks_of_a_plain_reader(seed, distinct, stop_early, asked, programs):
    """Half of the rows are hidden, as deleted ones are; what is compared with sees the other half alone."""
    pool, queries = pool_of(seed, n=14), queries_of(seed)
    there = np.random.default_rng(seed).permutation(14)[:7]
    there.sort()
    rows = [Row(str(n), {}, n % programs) for n in range(14)]
    reader = MatrixTable(pool, rows).allowing(np.isin(np.arange(14), there)).opened()
    plain = PlainReader(pool.take(there), [rows[n] for n in there])
    options = Options(
        5,
        tau=TAU,
        probabilities=asked,
        stop_early=stop_early,
        different_programs=True if distinct else (),
    )
    quick, slow = (run(select(queries, AdditiveState(-0.4), options, one)) for one in (reader, plain))
    np.testing.assert_array_equal(quick.positions, np.where(slow.positions < 0, -1, there[slow.positions]))
    np.testing.assert_allclose(quick.logits, slow.logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(quick.probabilities, slow.probabilities, rtol=1e-4, atol=1e-6)
    for mine, its in zip(quick.examples, slow.examples, strict=True):
        assert [row.id for row in mine] == [row.id for row in its]


@pytest.mark.parametrize("k", [4, 9])
def test_a_matrix_in_memory_gives_what_there_is(k):
    pool = pool_of(0, n=4)
    reader = MatrixTable(pool, [Row(str(n), {}, n) for n in range(4)]).opened()
    picks = run(select(queries_of(0), AdditiveState(0.5), Options(k), reader))
    assert picks.positions.shape == (3, k)
    assert [sorted(row)[-4:] for row in picks.positions.tolist()] == [[0, 1, 2, 3]] * 3
    assert [len(rows) for rows in picks.examples] == [4] * 3
    nothing = MatrixTable(pool).allowing(np.zeros(4, dtype=bool)).opened()
    assert run(select(queries_of(0), AdditiveState(0.5), Options(k), nothing)).examples == [[], [], []]
