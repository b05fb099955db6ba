"""SFT end to end on small COVR splits: it learns, resumes to the bit, and says what is wrong with the data."""

import math

import numpy as np
import pytest
import torch
from rcr_trainer import sft
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import Example
from rcr_trainer.data.held_out import Barred
from rcr_trainer.errors import DataError
from rcr_trainer.settings import SFTSettings
from rcr_trainer.training import losses, runner
from rcr_trainer.training.runner import Runner
from rcr_trainer.training.supervision import Supervision
from small_grpo import items
from training import StopError, same_weights, stop_at
from training import train_sft as train

from langchain_rcr.errors import CheckpointError
from langchain_rcr.families import get_family
from langchain_rcr.families.pooled import TransformerEncoder
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)

SPEC = ProgramSpec()
SPLIT = covr_split("110", 0, 60, 0, dev=40)
SETTINGS = {"warmup": 0.0, "temperature": 0.5, "candidates": 4096, "on_policy": 0.5, "on_policy_from": 0.3}
FAST = SFTSettings(epochs=6, lr=1e-2, batch_size=32, patience=None, **SETTINGS)


def lexical(seed=0, dim=32):
    start = {"ngrams": 2, "context_init": -0.3, "scale": 20.0, "lam": 1.0}
    return TriEncoder.build("lexical", items(SPLIT.train), dim=dim, seed=seed, **start)


@pytest.mark.slow
def test_training_raises_dev_coverage():
    model = lexical()
    rows = []
    result = train(model, SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, FAST, log=lambda epoch, row: rows.append(row))
    assert (result.rounds, len(rows), rows) == (6, 7, result.history)
    assert [row["epoch"] for row in rows] == list(range(7))
    assert "loss" not in rows[0]
    untrained, best = rows[0]["dev_coverage"], max(row["dev_coverage"] for row in rows)
    assert best > untrained + 5
    assert rows[-1]["loss"] < rows[1]["loss"]
    assert result.best_score == best == rows[result.best_round]["dev_coverage"]
    # The model is that of the best epoch, and picks as the loop said it does.
    assert not model.training
    queries = model.encode_queries([e.source for e in SPLIT.dev])
    picks = greedy(queries, model.encode_pool(items(SPLIT.train)), model.state(), 4).positions
    anything = [np.empty(0, dtype=np.int64)] * len(SPLIT.dev)
    needs = Supervision(SPLIT.dev, SPLIT.train, SPEC, anything, reachable=True)
    assert needs.coverage(picks) == pytest.approx(best, abs=0.01)


def test_all_three_encoders_are_trained():
    model, before = lexical(), lexical()
    train(model, SPLIT.train, SPLIT.train, [], SPEC, FAST.model_copy(update={"epochs": 1}))
    for part in ("query", "context", "candidate"):
        assert not same_weights(getattr(model, part), getattr(before, part))


def test_without_dev_the_last_epoch_is_kept():
    result = train(lexical(), SPLIT.train, SPLIT.train, [], SPEC, FAST.model_copy(update={"epochs": 2}))
    assert (result.best_round, result.rounds) == (2, 2)
    assert math.isnan(result.best_score)
    assert all("dev_coverage" not in row for row in result.history)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights():
    models = []
    for seed in (0, 0, 1):
        models.append(lexical())
        train(models[-1], SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, FAST, seed=seed)
    assert same_weights(models[0], models[1])
    assert not same_weights(models[0], models[2])


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [1, 2, 4, 6])
def test_a_killed_run_resumed_ends_with_the_same_weights(tmp_path, monkeypatch, epoch):
    monkeypatch.setattr(runner, "SAVE_EVERY_S", 0)
    data = (SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, FAST)
    whole, killed = lexical(), lexical()
    expected = train(whole, *data)
    with pytest.raises(StopError):
        train(killed, *data, state_folder=tmp_path / "s", log=stop_at(epoch))
    resumed = lexical(seed=0 if epoch == 1 else 9)  # the state brings its own weights, once there is one
    rows = []
    result = train(resumed, *data, state_folder=tmp_path / "s", log=lambda at, figures: rows.append(at))
    assert same_weights(whole, resumed)
    assert repr(result) == repr(expected)
    assert rows == list(range(0 if epoch == 1 else epoch, 7))


@pytest.mark.slow
def test_a_run_killed_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SAVE_EVERY_S", 0)
    config = FAST.model_copy(update={"patience": 2, "epochs": 20, "gradient_accumulation": 2})
    data = (SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, config)
    whole = lexical()
    expected = train(whole, *data)
    assert 3 < expected.rounds < 20  # stopped by patience
    for epoch in range(2, expected.rounds + 1):
        with pytest.raises(StopError):
            train(lexical(), *data, state_folder=tmp_path / "s", log=stop_at(epoch))
    resumed = lexical()
    assert repr(train(resumed, *data, state_folder=tmp_path / "s")) == repr(expected)
    assert same_weights(whole, resumed)


@pytest.mark.slow
def test_a_killed_transformer_run_resumed_ends_with_the_same_weights(tmp_path, monkeypatch, bert):
    monkeypatch.setattr(runner, "SAVE_EVERY_S", 0)
    config = SFTSettings(loss="infonce", epochs=3, lr=1e-3, batch_size=16, bm25_top=10, patience=None, on_policy=0)
    data = (SPLIT.train, SPLIT.train[:8], SPLIT.dev[:5], SPEC, config)
    whole, killed, resumed = (TriEncoder.build("transformer", [], base=bert) for _ in range(3))
    train(whole, *data)  # with dropout
    with pytest.raises(StopError):
        train(killed, *data, state_folder=tmp_path / "s", log=stop_at(2))
    torch.manual_seed(123)
    train(resumed, *data, state_folder=tmp_path / "s")
    assert same_weights(whole, resumed)


def test_a_finished_state_is_not_trained_again(tmp_path):
    first, again = lexical(), lexical()
    data = (SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, FAST.model_copy(update={"epochs": 2}))
    expected = train(first, *data, state_folder=tmp_path / "s")
    result = train(again, *data, state_folder=tmp_path / "s", log=lambda epoch, figures: pytest.fail("trained"))
    assert same_weights(first, again)
    assert repr(result) == repr(expected)


def test_a_state_of_another_model_is_refused(tmp_path, bert):
    data = (SPLIT.train, SPLIT.train[:8], [], SPEC, FAST.model_copy(update={"epochs": 1}))
    train(lexical(), *data, state_folder=tmp_path / "s")
    for other in (lexical(dim=8), TriEncoder.build("transformer", [], base=bert)):
        with pytest.raises(CheckpointError, match=r"can't be resumed from: .*; delete it to start afresh"):
            train(other, *data, state_folder=tmp_path / "s")


@pytest.mark.parametrize("file", ["state.json", "state.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff"])
def test_a_damaged_state_is_refused_in_one_line(tmp_path, file, content):
    data = (SPLIT.train, SPLIT.train[:8], [], SPEC, FAST.model_copy(update={"epochs": 1}))
    train(lexical(), *data, state_folder=tmp_path / "s")
    (tmp_path / "s" / file).write_bytes(content)
    if (file, content) == ("state.json", b"{}"):
        (tmp_path / "s" / file).write_bytes(b'{"unheard_of": 1}')
    with pytest.raises(CheckpointError, match="can't be resumed from") as error:
        train(lexical(), *data, state_folder=tmp_path / "s")
    assert "\n" not in str(error.value)


def _norms(monkeypatch):
    """Of the gradients of all steps from now on."""
    norms, step = [], Runner.step

    def spy(self):
        norms.append(step(self))
        return norms[-1]

    monkeypatch.setattr(Runner, "step", spy)
    return norms


def test_gradient_accumulation_is_a_larger_batch(monkeypatch):
    norms = _norms(monkeypatch)  # AdamW doesn't tell a gradient from its double
    models, reported = [], []
    for batch_size, accumulation in ((20, 1), (10, 2), (5, 4)):
        models.append(lexical())
        before = len(norms)
        changes = {"epochs": 1, "k": 1, "batch_size": batch_size, "gradient_accumulation": accumulation}
        result = train(models[-1], SPLIT.train, SPLIT.train, [], SPEC, FAST.model_copy(update=changes))
        assert result.steps == len(norms) - before == 3
        reported.append(result.history[-1]["loss"])
    assert reported == pytest.approx([reported[0]] * 3, rel=1e-4)
    for number, model in enumerate(models):
        assert norms[3 * number : 3 * number + 3] == pytest.approx(norms[:3], rel=1e-3)
        for name, tensor in models[0].state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


def test_accumulated_batches_count_by_their_states(monkeypatch):
    """The last batch of an epoch is smaller, and states that have nothing to gain don't count."""
    norms = _norms(monkeypatch)
    for batch_size, accumulation in ((100, 1), (28, 4)):
        changes = {"epochs": 1, "max_steps": 1, "batch_size": batch_size, "gradient_accumulation": accumulation}
        train(lexical(), SPLIT.train, SPLIT.train[:25], [], SPEC, FAST.model_copy(update=changes))  # 25, and 7+7+7+4
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_a_batch_encodes_each_text_once_and_no_pick_that_it_does_not_need(bert, monkeypatch):
    encoded, forward = [], TransformerEncoder.forward

    def spy(self, features):
        encoded.append((self, [tuple(ids) for ids in features.ids]))
        return forward(self, features)

    monkeypatch.setattr(TransformerEncoder, "forward", spy)
    model, pool = TriEncoder.build("transformer", [], base=bert), SPLIT.train
    # One batch, in which every question comes k times and a few picks precede most of them.
    config = SFTSettings(loss="infonce", epochs=1, batch_size=1000, on_policy=0.0, k=3, bm25_worst=0)
    train(model, pool, pool, [], SPEC, config)
    for part in (model.query, model.context, model.candidate):
        texts = [ids for encoder, ids in encoded if encoder is part]
        assert len(texts) == 1
        assert len(set(texts[0])) == len(texts[0])
    own = Barred(pool, pool, SPEC, with_program=True)
    sequences, gains = Supervision(pool, pool, SPEC, own).sequences(3)
    needed = {pick for row, gained in zip(sequences, gains, strict=True) for pick in row[: np.sum(gained > 0) - 1]}
    assert len(next(ids for encoder, ids in encoded if encoder is model.context)) == len(needed) < len(pool)


@pytest.mark.slow
def test_info_nce_trains_a_transformer(bert):
    model, before = (TriEncoder.build("transformer", [], base=bert, lam=0.1) for _ in range(2))
    config = SFTSettings(loss="infonce", epochs=1, max_steps=2, lr=1e-3, batch_size=8, bm25_top=10)
    result = train(model, SPLIT.train, SPLIT.train, [], SPEC, config)
    assert (result.steps, result.rounds) == (2, 1)
    assert math.isfinite(result.history[-1]["loss"])
    same = {name for name, p in model.named_parameters() if torch.equal(p, before.get_parameter(name))}
    assert same == {name for name, _ in model.named_parameters() if "pooler" in name}  # which takes no part


@pytest.mark.slow
def test_info_nce_raises_dev_coverage_too():
    config = FAST.model_copy(update={"loss": "infonce", "lr": 0.03})
    result = train(lexical(), SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, config)
    assert result.best_score > result.history[0]["dev_coverage"] + 5


def test_late_epochs_start_a_share_of_the_states_from_the_policy_s_own_picks(monkeypatch):
    shares = []
    real = sft.listwise_batches

    def spy(order, sequences, best, *others):
        shares.append((sequences != best).any(axis=1).mean())
        return real(order, sequences, best, *others)

    monkeypatch.setattr(sft, "listwise_batches", spy)
    config = FAST.model_copy(update={"epochs": 4, "on_policy": 0.2, "on_policy_from": 0.5})
    train(lexical(), SPLIT.train, SPLIT.train, [], SPEC, config)
    assert shares[:2] == [0, 0]
    assert all(0.1 < share < 0.35 for share in shares[2:])


@pytest.mark.parametrize("own_program", [False, True])
def test_no_query_is_trained_to_pick_itself(monkeypatch, own_program):
    calls = []
    real = losses.listwise

    def spy(logits, targets):
        calls.append((targets.gains, targets.allowed))
        return real(logits, targets)

    monkeypatch.setattr(losses, "listwise", spy)
    # Three examples with one program each twice over: each query finds its twin and, unless barred, nothing else.
    pool = [Example(str(n), f"question {n}", f"f{n % 3}(x)") for n in range(6)]
    config = SFTSettings(
        epochs=2, k=1, batch_size=6, on_policy=1, on_policy_from=0.5, patience=None,
        exclude_own_program=own_program,
    )  # fmt: skip
    model = TriEncoder.build("lexical", items(pool), dim=8)
    train(model, pool, pool, [], SPEC, config)
    assert calls
    for gains, allowed in calls:
        assert allowed.sum(1).tolist() == [4 if own_program else 5] * 6
        # What is barred is the query itself (or its program), which would have gained the most.
        assert gains[~allowed].tolist() == [gains.max().item()] * int((~allowed).sum())


def test_early_stopping():
    config = FAST.model_copy(update={"epochs": 50, "lr": 1e-9, "patience": 2})
    result = train(lexical(), SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, config)
    assert (result.rounds, result.best_round) == (2, 0)  # nothing moves: two evaluations without a better one


@pytest.mark.slow
def test_evaluating_seldom_still_evaluates_the_end():
    config = FAST.model_copy(update={"epochs": 5, "evaluate_every": 2})
    result = train(lexical(), SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, config)
    assert [row["epoch"] for row in result.history] == [0, 2, 4, 5]


@pytest.mark.slow
def test_a_larger_pool_than_candidates_is_sampled(monkeypatch):
    widths = []
    real = losses.listwise
    monkeypatch.setattr(
        losses, "listwise", lambda logits, targets: widths.append(logits.shape[1]) or real(logits, targets)
    )
    config = FAST.model_copy(update={"epochs": 2, "candidates": 30, "batch_size": 8, "on_policy_from": 0.5})
    train(lexical(), SPLIT.train, SPLIT.train, [], SPEC, config)
    assert 8 < min(widths) <= max(widths) <= 30


def test_k_of_one():
    result = train(lexical(), SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, FAST.model_copy(update={"k": 1, "epochs": 2}))
    assert result.steps == 4


# ---------------------------------------------------------------- data


def test_no_program_parses():
    pool = [Example(str(n), f"question {n}", f"no ( program {n}") for n in range(9)]
    with pytest.raises(DataError, match="none of the 9 training queries has a program that parses as 'functional'"):
        train(TriEncoder.build("lexical", items(pool), dim=4), pool, pool, [], SPEC, FAST)


def test_a_fit_alone_takes_no_time_for_each_question_and_candidate(monkeypatch):
    found = []
    monkeypatch.setattr("rcr_trainer.sft.Barred", lambda *each: found.append(each))
    monkeypatch.setattr(Supervision, "sequences", lambda *each: found.append(each))
    result = train(lexical(), SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, SFTSettings(epochs=0))
    assert (result.rounds, result.steps, found) == (0, 0, [])
    assert result.history[0]["dev_coverage"] > 0


def test_a_pool_smaller_than_k():
    pool = SPLIT.train[:4]
    with pytest.raises(
        DataError,
        match=r"the pool of 4 examples leaves a training query only 3 .* fewer than k = 4.*own_program: false",
    ):
        train(TriEncoder.build("lexical", items(pool), dim=4), pool, pool, [], SPEC, FAST)
    allowed = FAST.model_copy(update={"exclude_own_program": False})
    with pytest.raises(DataError, match=r"give more examples, or lower sft.k$"):
        train(TriEncoder.build("lexical", items(pool), dim=4), pool, pool, [], SPEC, allowed)


def test_one_program_for_all_questions_is_refused_before_the_fit(monkeypatch):
    pool = [Example(str(n), f"question {n}", f"answer(capital('{n}'))") for n in range(30)]
    monkeypatch.setattr(get_family("structure"), "fit", lambda *_, **__: pytest.fail("it was fitted"))
    advice = r"leaves a training query only 0 .* or set sft.exclude_own_program: false$"
    for dev in (pool[:6], []):
        with pytest.raises(DataError, match=advice):
            train(TriEncoder.build("structure", items(pool), base=None), pool, pool, dev, SPEC, SFTSettings())


def test_some_programs_do_not_parse():
    pool = [*SPLIT.train[:20], Example("x", "a question", "no ( program")]
    config = FAST.model_copy(update={"epochs": 1})
    result = train(TriEncoder.build("lexical", items(pool), dim=4), pool, pool, pool[-3:], SPEC, config)
    assert math.isfinite(result.history[-1]["loss"])
    assert math.isfinite(result.best_score)
