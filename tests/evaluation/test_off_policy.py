"""Estimates from logged picks: by hand, against what serving draws and what is true, and the whole command."""

from itertools import product, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rcr_trainer import cli
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation import learn
from rcr_trainer.evaluation.off_policy import CLIP, described, gains, halves, predicted, walk, weights

from langchain_rcr import InputError, Item, OutcomeLog, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.basics.files import digest
from langchain_rcr.families import get_family
from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.policy import selection

ASKS = (("how many are there of the", "count"), ("is there a", "exists"), ("what is the color of the", "query"))
ROWS = [
    {"source": f"{asks} {color} {animal}", "target": f"{what}(filter({color}, find({animal})))"}
    for (asks, what), color, animal in product(
        ASKS, ("black", "white", "gray", "brown"), ("cat", "dog", "mouse", "zebra")
    )
]


def everything(queries: int, size: int) -> tuple[Any, Any]:
    return np.zeros(queries, dtype=np.int64), np.zeros(size, dtype=np.int64)


def test_a_walk_by_hand() -> None:
    query = np.array([[1.0, 0.0]], dtype=np.float32)
    pool = PoolVectors(np.array([[1, 0], [0, 1], [0, 0]], dtype=np.float32), np.array([[0, 1]] * 3, dtype=np.float32))
    picks = np.array([[1, 0]])
    _, log_probs = walk(query, AdditiveState(2.0), pool, np.array([0.5]), everything(1, 3), picks=picks)
    # Logits 1, 0, 0 at first; then the state is (1, 2), and 0 and 2 are left.
    first = 1 / (np.exp(2) + 2)
    second = np.exp(2) / (np.exp(2) + 1)
    np.testing.assert_allclose(np.exp(log_probs), [[first, second]], rtol=1e-6)
    features = described(query, AdditiveState(2.0), pool, picks)
    np.testing.assert_allclose(features, [[0, 0, 1, 1]])
    # Of another group nothing can be drawn.
    groups = np.array([1]), np.array([1, 0, 1])
    _, log_probs = walk(query, AdditiveState(2.0), pool, np.array([0.5]), groups, picks=picks)
    assert log_probs[0, 0] == -np.inf


def test_only_the_best_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rcr_trainer.evaluation.off_policy.EXPLORED", 2)
    query = np.array([[1.0]], dtype=np.float32)
    pool = PoolVectors(*(np.array([[1], [2], [1], [0]], dtype=np.float32),) * 2)
    for picks, chance in (([0], 1 / (1 + np.e)), ([1], np.e / (1 + np.e)), ([2], 0.0), ([3], 0.0)):
        _, log_probs = walk(query, AdditiveState(0.0), pool, np.ones(1), everything(1, 4), picks=np.array([picks]))
        np.testing.assert_allclose(np.exp(log_probs), [[chance]], rtol=1e-6)


def test_weights_gains_and_halves() -> None:
    new, logged = np.log([[0.5, 0.5], [0.9, 0.9], [1e-9, 0.5]]), np.log([[0.25, 0.5], [0.01, 0.9], [0.5, 0.5]])
    with np.errstate(divide="ignore"):
        new[2, 0] = -np.inf
    np.testing.assert_allclose(weights(new, logged), [2, CLIP, 0])
    assert weights(np.zeros((1, 2)), np.full((1, 2), -500.0)).tolist() == [CLIP]  # a ratio beyond all numbers
    found = gains(np.array([2.0, 0.0]), np.array([1.0, 1.0]), np.array([0.5, 0.5]), np.array([0.75, 0.25]))
    np.testing.assert_allclose(found, [0.75 + 2 * 0.5 - 1, 0.25 - 1])
    asked = np.array([3, 1, 3, 2, 1])
    first = halves(asked, 0)
    assert first.any()
    assert not first.all()
    assert first[0] == first[2]
    assert first[1] == first[4]


def test_a_linear_outcome_is_predicted() -> None:
    features = np.random.default_rng(0).normal(size=(500, 3))
    outcomes = 2 + features @ [1.0, 0.0, -1.0]
    (found,) = predicted(features, outcomes, features[:5])
    np.testing.assert_allclose(found, outcomes[:5], atol=0.02)
    (constant,) = predicted(np.ones((4, 2)), np.array([0.0, 1, 1, 0]), np.ones((1, 2)))
    np.testing.assert_allclose(constant, [0.5])


def test_the_estimate_is_of_what_the_other_policy_earns() -> None:
    rng = np.random.default_rng(1)
    size, dim, count = 12, 4, 40_000
    pool = PoolVectors(*rng.normal(size=(2, size, dim)).astype(np.float32))
    worth, queries = pool.candidate[:, 0] > 0, np.repeat(rng.normal(size=(1, dim)), count, axis=0).astype(np.float32)
    tau, groups, nothing = np.full(count, 1.5), everything(count, size), np.zeros((count, 2), dtype=np.int64)

    def drawn(lam: float) -> Any:
        return walk(queries, AdditiveState(lam), pool, tau, groups, nothing, rng)

    picks, log_probs = drawn(0.3)
    outcomes = (rng.random(count) < worth[picks].mean(axis=1)).astype(float)
    others, _ = drawn(-0.6)
    truth = worth[others].mean() - worth[picks].mean()
    _, new = walk(queries, AdditiveState(-0.6), pool, tau, groups, picks=picks)
    weight = weights(new, log_probs)
    assert weight.mean() == pytest.approx(1, abs=0.03)
    for expected in (np.zeros(count), np.full(count, 0.5), worth[picks].mean(axis=1)):
        same = worth[others].mean(axis=1) if expected.std() else expected
        gain = gains(weight, outcomes, expected, same)
        assert gain.mean() == pytest.approx(truth, abs=4 * gain.std() / count**0.5)
    assert abs(truth) > 0.01


def fitted(homes: str = "") -> TriEncoder:
    items = [Item(row["source"], row["target"], home=home) for row, home in zip_longest(ROWS, homes, fillvalue="")]
    model = TriEncoder.build("structure", items, state="saturating")
    get_family("structure").fit(model.query, items, seed=0)
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "checkpoint"
    SequentialCompositionalRetriever.from_encoder(fitted(), ROWS, k=2, explore=60).save(folder)
    return folder


def simulated(served: Path, log: OutcomeLog, earns: Any, count: int, **fields: Any) -> float:
    """Logged questions of a served retriever, and outcomes drawn by the picks' programs; the mean that is expected."""
    retriever = SequentialCompositionalRetriever.from_pretrained(served, log=log, **fields)
    seeded, rng = np.random.default_rng, np.random.default_rng(0)
    endings = rng.choice(["please", "now", "today", "dear"], count)
    rows = rng.integers(0, len(ROWS), count)
    questions = [f"{ROWS[at]['source']} {end}" for at, end in zip(rows, endings, strict=True)]
    with pytest.MonkeyPatch.context() as patch:  # else one log of nothing but chance in forty shows a clear gain
        patch.setattr(np.random, "default_rng", lambda seed=1: seeded(seed))
        drawn = retriever.batch(questions)
    chances = [earns([pick.metadata["target"] for pick in picks]) for picks in drawn]
    for question, picks, chance in zip(questions, drawn, chances, strict=True):
        retriever.record(question, picks, rng.random() < chance)
    return float(np.mean(chances))


def test_what_serving_draws_has_the_logged_probability(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for least in (128, 6):  # more than the pool has, and fewer
        monkeypatch.setattr(selection, "EXPLORED", least)
        monkeypatch.setattr("rcr_trainer.evaluation.off_policy.EXPLORED", least)
        log = OutcomeLog(tmp_path / f"{least}.jsonl", text=True)
        simulated(served, log, lambda programs: 0.5, 300)
        policy = learn.Policy(SequentialCompositionalRetriever.from_pretrained(served))
        logged = learn.read(log, policy, {})
        assert len(logged.asked) >= 290  # rounding may tell equal logits apart
        log_probs = policy.follow({}, logged)
        assert np.median(np.abs(log_probs - logged.log_probs)) < 1e-3


def test_a_pool_of_several_databases_is_known_as_it_is_served(tmp_path: Path) -> None:
    rows = [{**row, "db_id": name} for row, name in zip(ROWS, "xy" * 24, strict=True)]
    encoder = fitted("xy" * 24)
    encoder.prefer = "db_id"
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, rows, k=2, explore=20)
    retriever.save(tmp_path / "several")
    log = OutcomeLog(tmp_path / "outcomes.jsonl", text=True)
    simulated(tmp_path / "several", log, lambda programs: 0.5, 300)
    retriever.model_copy(update={"log": log}).record(
        ROWS[0]["source"], retriever.invoke(ROWS[0]["source"], within="x"), 1.0
    )
    logged = learn.read(log, learn.Policy(SequentialCompositionalRetriever.from_pretrained(tmp_path / "several")), {})
    assert 290 <= len(logged.asked) <= 300  # where a database is preferred, which one isn't logged


def test_a_log_is_followed_in_parts(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl", text=True)
    simulated(served, log, lambda programs: 0.5, 300)
    policy = learn.Policy(SequentialCompositionalRetriever.from_pretrained(served))
    logged, sizes = learn.read(log, policy, {}), set()

    def counted(queries: Any, *given: Any, **more: Any) -> Any:
        sizes.add(len(queries))
        return walk(queries, *given, **more)

    monkeypatch.setattr(learn, "walk", counted)
    found = []
    for most in (1 << 24, 20_000):
        monkeypatch.setattr(learn, "_AT_ONCE", most)
        drawn = policy.drawn({"words": 0.4}, logged).picks
        found.append([policy.follow({"words": 0.4}, logged), policy.described(logged, logged.picks)])
        assert all(len({*row}) == 2 for row in drawn.tolist())
    assert min(sizes) < 50 < max(sizes) == len(logged.asked)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    estimates, reached = learn.Estimates(policy, logged), weights(found[0][0], logged.log_probs).mean()
    for least, known in ((reached - 0.01, True), (reached + 0.01, False)):
        monkeypatch.setattr(learn, "REACHED", least)
        assert (estimates.low({"words": 0.4}) is not None) is known


def test_chance_that_the_interval_takes_for_better_is_refused(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn.Policy, "changes", [{"label": 3.0}])
    lows, interval_of = list[float](), learn.interval_of

    def kept(*given: Any) -> Any:
        lows.append(interval_of(*given)[0, 0])
        return interval_of(*given)

    monkeypatch.setattr(learn, "interval_of", kept)
    policy = learn.Policy(SequentialCompositionalRetriever.from_pretrained(served))
    policy.texts, count, rng = [row["source"] for row in ROWS], 300, np.random.default_rng(17)
    asked, coins = rng.integers(0, len(ROWS), count), (rng.random(count) < 0.9).astype(float)
    nothing, explore = np.zeros((count, 2)), np.full(count, 60.0)
    asking = learn.Logged(asked, nothing.astype(np.int64), nothing, coins, explore, everything(count, len(ROWS))[0])
    logged = policy.drawn({}, asking, 1017)
    np.testing.assert_allclose(policy.follow({}, logged), logged.log_probs)
    assert learn.choose(policy, logged).low <= 0 < 0.01 < lows[0]


def test_the_surest_change_or_combination_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = {"a": 0.1, "b": 0.3, "c": 0.2, "d": -0.2, "e": None, "f": 0.05}

    class Told:
        overlap = 0.0  # what each further change loses

        def __init__(self, policy: Any, logged: learn.Logged, fitted: Any = None) -> None:
            self.count = len(logged.asked)

        def low(self, variant: Any) -> Any:
            known = [worth[name] for name in variant]
            return None if None in known else sum(known) - self.overlap * (len(known) - 1)

        def of(self, variant: Any, time: int = 0) -> Any:
            return np.full(self.count, -0.1), 1.0

    monkeypatch.setattr(learn, "Estimates", Told)
    nothing = np.zeros((80, 2))
    logged = learn.Logged(np.arange(80), nothing.astype(np.int64), *[nothing] * 2, *[np.zeros(80)] * 2)
    policy: Any = SimpleNamespace(seed=0, changes=[{name: 1} for name in worth])
    for overlap, names in ((0.0, "abc"), (0.15, "bc"), (1.0, "b")):
        Told.overlap = overlap
        assert learn.choose(policy, logged).variant == dict.fromkeys(names, 1)


def test_few_distinct_questions_are_counted_as_such(served: Path, tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl", text=True)
    simulated(served, log, lambda programs: 0.5, 30)
    with pytest.raises(DataError, match=r"30 questions, \d\d of them distinct, .* \(it takes 60 distinct ones\)"):
        learn.read(log, learn.Policy(SequentialCompositionalRetriever.from_pretrained(served)), {})


def test_a_gain_that_is_no_number_is_not_sure(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "read", lambda *_: None)
    monkeypatch.setattr(learn, "choose", lambda *_: learn.Change({}, *[np.nan] * 4, 100))
    with pytest.raises(DataError, match="no change is sure to earn more"):
        learn.learn(tmp_path / "log", served, tmp_path / "new", questions={})
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_other_files_is_refused_at_once(served: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"holds notes\.txt"):
        learn.learn(tmp_path / "log", served, tmp_path, questions={})


def test_a_file_of_questions_needs_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def learnt(*_: Any, questions: dict[str, str], **how: Any) -> learn.Change:
        found.update(questions)
        return learn.Change({}, *[0.0] * 4, 1)

    monkeypatch.setattr(learn, "learn", learnt)
    (tmp_path / "asked.jsonl").write_text('{"source": "how many cats"}\n{"source": "who", "target": null}\n')
    asked = ["--questions", str(tmp_path / "asked.jsonl")]
    assert cli.main(["learn", "log", "served", "--out", str(tmp_path / "new"), *asked]) == 0
    assert found == {digest(text): text for text in ("how many cats", "who")}


def test_changes_are_steps_from_the_numbers_that_are_served(served: Path) -> None:
    retriever = SequentialCompositionalRetriever.from_pretrained(served)
    retriever.store.encoder.vary({"words": 0.4, "length_penalty": 1.5})
    changes = learn.Policy(retriever).changes
    assert [next(iter(change)) for change in changes[:4]] == ["fade", "fade", "length_penalty", "length_penalty"]
    words = sorted(change["words"] for change in changes if "words" in change)
    np.testing.assert_allclose(words, [0.02, *(0.4 * 2.0 ** np.array([-1, -0.5, -0.25, 0.25])), 0.5, 0.4 * 2**0.5, 0.8])
    assert max(change["length_penalty"] for change in changes if "length_penalty" in change) <= 2
    assert not any("order" in change for change in changes)


def differing(programs: list[str]) -> float:
    """Answers are right where the picks begin differently: more fading makes them do so."""
    return 0.05 if len({program.split("(")[0] for program in programs}) == 1 else 0.95


@pytest.mark.slow
def test_the_command_writes_a_change_that_is_sure_to_earn_more(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl", text=True)
    earned = simulated(served, log, differing, 1000)
    out = tmp_path / "better"
    assert cli.main(["learn", str(log.path), str(served), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"written: {out}" in printed
    before, after = (SequentialCompositionalRetriever.from_pretrained(folder) for folder in (served, out))
    assert (after.k, after.explore) == (2, 60)
    assert after.store.fingerprint != before.store.fingerprint
    assert [row.id for row in after.store.index.rows()] == [row.id for row in before.store.index.rows()]
    # It does earn more where it is served.
    assert simulated(out, OutcomeLog(tmp_path / "other.jsonl"), differing, 1000) > earned + 0.02


@pytest.mark.slow
def test_the_command_refuses_what_the_log_doesnt_show(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(log: OutcomeLog, *more: str) -> str:
        assert cli.main(["learn", str(log.path), str(served), "--out", str(tmp_path / "new"), *more]) == 2
        assert not (tmp_path / "new").exists()
        return capsys.readouterr().err

    coin = OutcomeLog(tmp_path / "coin.jsonl")
    simulated(served, coin, lambda programs: 0.5, 1000)
    assert "whose text is not known (--questions)" in refused(coin)
    asked = tmp_path / "asked.csv"
    lines = [f"{row['source']} {end},x" for row in ROWS for end in ("please", "now", "today", "dear")]
    asked.write_text("\n".join(["source,target", *lines]))
    assert "no change is sure to earn more, so nothing is written" in refused(coin, "--questions", str(asked))
    other = OutcomeLog(tmp_path / "other.jsonl", text=True)
    simulated(served, other, lambda programs: 0.5, 10, explore=0.0)
    simulated(served, other, lambda programs: 0.5, 20, filter={"target": {"$in": [row["target"] for row in ROWS[:4]]}})
    simulated(served, other, lambda programs: 0.5, 5, k=1)
    other.record("what", [("a", 1, 0.5)], 1, policy="another", explore=1)
    policy = SequentialCompositionalRetriever.from_pretrained(served).store.fingerprint
    other.record("what", [("a", 1, 0.0)], 1, policy=policy, explore=1)  # nothing draws it
    other.record("what", [], 1, policy=policy, explore=1)
    message = refused(other)
    under = "picked under a filter, a constraint, a pref"
    for reason in ("1 of another policy", "12 picked without exploring", "5 another number of picks", under):
        assert reason in message
    assert "there is no such log" in refused(OutcomeLog(tmp_path / "none.jsonl"))
