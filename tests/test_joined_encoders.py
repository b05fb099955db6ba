"""The sum of structures and text: logits by hand, states, what is trained when, checkpoints, a tiny run."""

import numpy as np
import pytest
import torch
from fake_backbone import FakeBackbone
from rcr_trainer import cli, grpo, sft
from rcr_trainer.comparison import _embedder
from rcr_trainer.config import Config
from rcr_trainer.data import covr_split
from rcr_trainer.evaluation import EvaluationReport
from rcr_trainer.rewards import make_reward
from rcr_trainer.schema import GRPOConfig, SFTConfig
from rcr_trainer.training import needs, state
from tiny_bert import tiny_bert

from langchain_rcr import SequentialCompositionalRetriever, policy
from langchain_rcr.errors import InputError
from langchain_rcr.families.embeddings import RememberingBackbone
from langchain_rcr.families.joined import JoinedEncoder, structure_part, text_part
from langchain_rcr.items import Item
from langchain_rcr.policy import TriEncoder
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.selection import greedy

torch.set_num_threads(1)

SPEC = ProgramSpec()
SPLIT = covr_split("110", 0, 40, 0, dev=20)
PARTS = ("query", "context", "candidate")


BACKBONE = RememberingBackbone(FakeBackbone())


@pytest.fixture(autouse=True)
def a_short_fit(monkeypatch):
    monkeypatch.setattr(needs, "_STEPS", 40)


def items(examples):
    return [Item(example.source, example.target) for example in examples]


def build(family="both", **options):
    settings = {"ngrams": 2, "scale": 1.0, "state": "saturating", "spec": SPEC, "dim": 80, "backbone": BACKBONE}
    return TriEncoder.build(family, items(SPLIT.train), **(settings | options))


def trained(train="text", epochs=2, dev=SPLIT.dev, **options):
    model = build(**options)
    config = SFTConfig(epochs=epochs, lr=1e-2, temperature=1.0, patience=None, on_policy_from=0.0, train=train)
    return model, sft.train(model, SPLIT.train, SPLIT.train, dev, SPEC, config)


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


# ---------------------------------------------------------------- vectors


def test_structures_come_first_and_text_after_them():
    model = build(text_scale=3.0)
    structures = len(structure_part(model.query).inventory)
    assert (model.family, model.dim, model.query.structures) == ("both", structures + 16, structures)
    question, (example,) = SPLIT.dev[0].source, items(SPLIT.train[:1])
    query, pool = model.encode_queries([question]), model.encode_pool([example])
    for joined, encoder, item in (
        (query, model.query, Item(question)),
        (pool.candidate, model.candidate, example),
        (pool.context, model.context, example),
    ):
        parts = [structure_part(encoder).encode([item]), text_part(encoder).encode([item])]
        np.testing.assert_array_equal(joined, np.concatenate(parts, axis=1))


def test_the_logit_is_the_sum_by_hand():
    pool = [Item("red dog", "f(a)"), Item("blue cat", "f(b)"), Item("red cat", "f(a)")]
    options = {"ngrams": 1, "ngram_init": 0.0, "text_scale": 2.0, "context_init": -0.5, "spec": ProgramSpec(max_size=1)}
    model = TriEncoder.build("both", pool, backbone=BACKBONE, scale=1.0, state="saturating", **options)
    assert structure_part(model.query).inventory.columns == [("a",), ("b",), ("f",)]
    has = np.array([[1, 0, 1], [0, 1, 1], [1, 0, 1]])
    frozen = BACKBONE.embed(["red dog", "blue cat", "red cat"])
    vectors, query = model.encode_pool(pool), model.encode_queries(["red dog"])
    query[0, :3] = need = np.array([4.0, 2.0, 1.0])
    state = model.state().start(query)
    expected = has @ need + 2 * frozen @ frozen[0]
    np.testing.assert_allclose((state.vector() @ vectors.candidate.T)[0], expected, rtol=1e-5)
    # a and f are covered now; of the text, half of what was picked is taken away.
    expected = np.array([0, 2, 0]) + 2 * frozen @ (frozen[0] - frozen[2] / 2)
    state = state.update(vectors.context[2:])
    np.testing.assert_allclose((state.vector() @ vectors.candidate.T)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["saturating", "additive"])
def test_greedy_search_is_that_of_a_plain_loop(name):
    model, _ = trained(epochs=0, state=name, text_scale=5.0, lam=0.7)
    pool, queries = items(SPLIT.train), [example.source for example in SPLIT.dev[:5]]
    picks = greedy(model.encode_queries(queries), model.encode_pool(pool), model.state(), 3)
    sides = {
        side: [getattr(getattr(model, part), side).encode(pool) for part in PARTS[1:]] for side in ("structure", "text")
    }
    for row, question in enumerate(queries):
        need, meaning = (getattr(model.query, side).encode([Item(question)])[0] for side in ("structure", "text"))
        picked = []
        for step in range(3):
            logits = []
            for candidate in range(len(pool)):
                left, said = need.copy(), meaning.copy()
                for pick in picked:
                    covered = 0.7 * sides["structure"][0][pick]
                    left = left * (1 - covered) if name == "saturating" else left + covered
                    said = said + 0.7 * sides["text"][0][pick]
                logits.append(left @ sides["structure"][1][candidate] + said @ sides["text"][1][candidate])
            best = max((n for n in range(len(pool)) if n not in picked), key=lambda n: logits[n])
            pick = int(picks.positions[row, step])
            assert logits[pick] == pytest.approx(logits[best], abs=1e-4)
            assert picks.logits[row, step] == pytest.approx(logits[pick], abs=1e-4)
            picked.append(pick)


@pytest.mark.parametrize(("dim", "text"), [(40, 10), (63, 15), (64, 16), (80, 16)])
def test_text_takes_a_quarter_of_the_coordinates_at_most(dim, text):
    model = build(dim=dim)
    assert text_part(model.query).dim == text
    assert model.dim == dim
    assert model.encode_pool(items(SPLIT.train[:2])).candidate.shape == (2, model.dim)


def test_too_few_coordinates_are_refused():
    with pytest.raises(InputError, match="dim"):
        build(dim=3)


def test_features_of_rows_are_the_rows_of_features():
    model = build()
    features = model.candidate.featurize(items(SPLIT.train))
    rows = np.array([5, 1, 1])
    assert (len(features), len(features.select(rows))) == (40, 3)
    np.testing.assert_allclose(
        model.candidate.vectors(features.select(rows)), model.candidate.vectors(features)[rows], atol=1e-6
    )
    assert model.candidate.reads() == model.context.reads() != model.query.reads()


# ---------------------------------------------------------------- training


def moved(model, before):
    return {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}


def test_without_epochs_the_structures_are_fitted_and_text_is_as_it_began():
    model, result = trained(epochs=0)
    assert (result.steps, result.best_epoch) == (0, 0)
    fresh = build()
    for part in PARTS:
        text = getattr(model, part).text.state_dict()
        assert all(torch.equal(text[name], tensor) for name, tensor in getattr(fresh, part).text.state_dict().items())
    assert model.query.structure.dual.abs().sum() > 0
    alone = build("structure", dim=80 - 16)
    sft.train(alone, SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, SFTConfig(epochs=0))
    questions = [example.source for example in SPLIT.dev]
    np.testing.assert_allclose(
        model.encode_queries(questions)[:, : alone.dim], alone.encode_queries(questions), rtol=1e-5, atol=1e-5
    )


def test_in_stages_gradients_move_the_text_alone():
    fitted, (model, result) = trained(epochs=0, dev=[])[0], trained(dev=[])
    assert result.steps > 0
    changed = moved(model, weights(fitted))
    assert {f"{part}.text.head.weight" for part in PARTS} <= changed
    assert all(".text." in name for name in changed)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_jointly_gradients_move_everything():
    fitted, (model, _) = trained(epochs=0, dev=[])[0], trained("all", dev=[])
    expected = {"query.structure.composition.nets.0.0.weight", "context.structure.weight", "candidate.structure.weight"}
    expected |= {f"{part}.text.head.weight" for part in PARTS}
    assert expected <= moved(model, weights(fitted))


@pytest.mark.parametrize(("train", "refitted"), [("text", True), ("all", False)])
def test_lent_questions_become_landmarks_where_no_gradient_moved_the_structures(train, refitted):
    model = build()
    config = SFTConfig(epochs=1, lr=1e-3, temperature=1.0, train=train)
    lent, queries = SPLIT.train[:10], SPLIT.train[10:]
    result = sft.train(model, SPLIT.train, queries, lent, SPEC, config)
    assert result.steps > 0
    assert len(model.query.structure.dual) == (40 if refitted else 30)


def test_a_killed_run_resumed_ends_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "SAVE_EVERY_S", 0)
    config = SFTConfig(epochs=3, lr=1e-3, temperature=1.0, train="text")
    data = (SPLIT.train, SPLIT.train[10:], SPLIT.train[:10], SPEC, config)

    def stop(epoch, figures):
        if epoch == 2:
            raise KeyboardInterrupt

    whole, killed, resumed = build(), build(), build()
    sft.train(whole, *data)
    with pytest.raises(KeyboardInterrupt):
        sft.train(killed, *data, state_folder=tmp_path / "s", log=stop)
    rows = []
    sft.train(resumed, *data, state_folder=tmp_path / "s", log=lambda epoch, figures: rows.append(epoch))
    assert rows == [2, 3]
    assert resumed.fingerprint() == whole.fingerprint()


def test_held_out_features_leave_the_own_program_out():
    model, _ = trained(epochs=0)
    held_out = needs.held_out_features(model.query, SPLIT.train, own_program=False)
    usual = model.query.featurize(items(SPLIT.train))
    assert held_out.structure.raw is not None
    assert usual.structure.raw is None
    np.testing.assert_array_equal(held_out.text.vectors, usual.text.vectors)


@pytest.mark.parametrize("train_candidates", [False, True])
def test_reinforcement_moves_both_parts(train_candidates):
    model, _ = trained(epochs=0)
    before = weights(model)
    config = GRPOConfig(max_steps=2, batch_size=8, group_size=4, lr=1e-3, chunk=3, train_candidates=train_candidates)
    result = grpo.train(model, SPLIT.train, SPLIT.train, [], SPEC, config, make_reward("context_coverage", SPEC))
    assert result.steps == 2
    changed = moved(model, before)
    parts = PARTS if train_candidates else PARTS[:2]
    assert {name.split(".")[0] for name in changed} == set(parts)
    assert {f"{part}.text.head.weight" for part in parts} | {"context.structure.weight"} <= changed


# ---------------------------------------------------------------- around it


def test_a_checkpoint_holds_the_frozen_encoder_once(tmp_path, monkeypatch):
    model, _ = trained()
    model.save_pretrained(tmp_path / "c")
    monkeypatch.setattr(policy, "load_backbone", lambda *_: BACKBONE)
    again = TriEncoder.from_pretrained(tmp_path / "c")
    questions = [example.source for example in SPLIT.dev]
    np.testing.assert_allclose(again.encode_queries(questions), model.encode_queries(questions), atol=1e-5)
    np.testing.assert_array_equal(
        again.encode_pool(items(SPLIT.train)).context, model.encode_pool(items(SPLIT.train)).context
    )
    assert len([*(tmp_path / "c").rglob("backbone*")]) == 1
    assert (tmp_path / "c" / "query_encoder" / "structure" / "inventory.json").is_file()


def test_another_backbone_reaches_both_parts():
    model, other = build(), RememberingBackbone(FakeBackbone())
    model.backbone = other
    encoders = [getattr(model, part).text for part in PARTS] + [model.query.structure]
    assert {id(encoder.backbone) for encoder in encoders} == {id(other)} == {id(model.backbone)}


def test_the_comparison_embeds_the_pool_once():
    model = build()
    config = Config.model_validate({"model": {"family": "both"}})
    embed = _embedder(config, config.evaluation, model, SPLIT.train, None)
    memory = model.candidate.text.backbone
    assert model.context.text.backbone is memory is not BACKBONE
    assert model.query.text.backbone is model.query.structure.backbone is BACKBONE
    sources = [example.source for example in SPLIT.train]
    np.testing.assert_array_equal(embed(sources), BACKBONE.embed(sources))
    assert len(memory._known) == len(set(sources))


def test_a_run_from_settings_to_the_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = tiny_bert(tmp_path / "bert", words=" ".join({w for e in SPLIT.train for w in e.source.split()}))
    settings = {
        "data.train_size": 40, "data.test_size": 6, "data.dev_size": 10, "model.family": "both", "model.base": base,
        "sft.epochs": 1, "evaluation.selectors": "random,dense", "threads": 1, "tensorboard": "false",
        "grpo.enabled": "true", "grpo.max_steps": 1, "grpo.group_size": 2, "reward.names": "context_coverage",
    }  # fmt: skip
    (tmp_path / "x.yaml").write_text("name: x", encoding="utf-8")
    flags = [f"--{name}={value}" for name, value in settings.items()]
    assert cli.main(["run", "x.yaml", "--output=run", *flags]) == 0, capsys.readouterr().err
    assert {"rcr", "rcr_without_rl", "dense"} <= EvaluationReport.read(tmp_path / "run").selectors.keys()
    retriever = SequentialCompositionalRetriever.from_pretrained(tmp_path / "run" / "checkpoint", k=3)
    assert isinstance(retriever.store.encoder.query, JoinedEncoder)
    question = SPLIT.dev[0].source
    steps = retriever.explain(question).steps
    assert [step.pick.id for step in steps] == [document.id for document in retriever.invoke(question)]
    assert all(step.pick.logit == pytest.approx(step.pick.relevance + step.pick.context) for step in steps)
