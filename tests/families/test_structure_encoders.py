"""The structure family: columns by hand, features, checkpoints, what it predicts after the fit."""

import json
import re

import numpy as np
import pytest
import torch
from fake_backbone import FakeBackbone
from langchain_core.embeddings import Embeddings
from rcr_trainer import sft
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import Example
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.settings import GRPOSettings, SFTSettings
from rcr_trainer.training import runner
from training import train_grpo
from training import train_sft as train

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import RememberingBackbone
from langchain_rcr.families.folds import Folds
from langchain_rcr.families.structure.inventory import Inventory
from langchain_rcr.families.structure.kernel import TokenBags
from langchain_rcr.families.structure.shown import WORDS
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)

SPEC, FAMILY = ProgramSpec(), get_family("structure")
SPLIT = covr_split("110", 0, 60, 0, dev=40)


def items(examples):
    return [Item(example.source, example.target) for example in examples]


def structure(backbone=None, **options):
    return TriEncoder.build("structure", items(SPLIT.train), backbone=backbone, spec=SPEC, **options)


def fitted(backbone=None, **options):
    model = structure(backbone, **options)
    result = train(model, SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, SFTSettings(epochs=0))
    return model, result


def test_structures_that_always_go_together_share_a_column():
    inventory = Inventory.fit(ProgramSpec(max_size=2), ["f(a)", "f(b)"], 100)
    assert inventory.columns == [("<root> -> f", "f"), ("a", "f -> a"), ("b", "f -> b")]
    assert inventory.sizes.tolist() == [2, 2, 2]
    rows = inventory.rows(["f(b)", "not ( a program", "g(a)"])
    assert np.asarray(rows).tolist() == [[1, 0, 1], [0, 0, 0], [0, 0.5, 0]]


@pytest.mark.slow
def test_a_fit_to_tokens_is_not_loaded_over_embeddings_that_give_none(tmp_path):
    class Whole(Embeddings):
        """The same vectors, but none of tokens."""

        def embed_documents(self, texts):
            return FakeBackbone().embed(texts).tolist()

        def embed_query(self, text):
            return self.embed_documents([text])[0]

    fitted(FakeBackbone())[0].save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="transformer's tokens, which LangChain embeddings don't give"):
        TriEncoder.from_pretrained(tmp_path / "model", embeddings=Whole())


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_structures_are_divided_by_their_norm_by_hand(alpha):
    pool = [Item("q " * 99 * len(text), text) for text in ("a", "a(b)", "a(b(c))", "a(b(c(d)))")]  # no matter how long
    settings = {"spec": ProgramSpec(max_size=1), "words": 1.0}
    plain, penalised = (TriEncoder.build("structure", pool, length_penalty=by, **settings) for by in (0.0, alpha))
    assert get_family("structure").settings().length_penalty == 1
    has, times = plain.candidate.encode(pool), (5 / np.sqrt([1, 2, 3, 4])) ** alpha
    assert has[:, :4].sum(1).tolist() == [1, 2, 3, 4]
    assert has[:, -WORDS:].sum(1).tolist() == [1, 1, 1, 1]
    expected = np.concatenate([has[:, :-WORDS] * times[:, None], has[:, -WORDS:]], axis=1)
    np.testing.assert_allclose(penalised.candidate.encode(pool), expected, rtol=1e-6)
    new = penalised.candidate.encode([Item("q", "a(z)"), Item("", "( (")])  # a new label has three spare columns
    assert np.unique(new[0, :-WORDS]).tolist() == pytest.approx([0, (5 / 2) ** alpha])
    np.testing.assert_array_equal(penalised.context.encode(pool), plain.context.encode(pool))  # it covers as much
    np.testing.assert_array_equal(penalised.encode_pool(pool).candidate, penalised.candidate.encode(pool))
    features = penalised.candidate.featurize(pool)
    np.testing.assert_array_equal(
        penalised.candidate(features.select(np.arange(4)[::-1])).detach(),
        penalised.candidate(features).detach().flip(0),
    )
    penalised.candidate(features).sum().backward()
    assert sorted(penalised.candidate.weight.grad.tolist()) == pytest.approx(np.cumsum(times[::-1]).tolist())


@pytest.mark.parametrize(("alpha", "firsts"), [(0.0, [0, 0, 2]), (1.0, [0, 1, 2])])
def test_of_examples_that_show_all_that_is_needed_the_one_with_the_least_beside_is_picked(alpha, firsts):
    pool = [Item("q", "f(a, b, c)"), Item("q", "f(a, b)"), Item("q", "g(d)")]
    model = TriEncoder.build("structure", pool, length_penalty=alpha)
    vectors = model.encode_pool(pool)
    assert greedy(np.asarray(vectors.context), vectors, model.state(), 1).positions.ravel().tolist() == firsts


def test_an_example_s_own_question_word_for_word_is_picked_first():
    own, (model, _) = items(SPLIT.train), fitted()
    asked, twins = [item.source for item in own], [Item("what nobody asks", item.target) for item in own]
    for pool in (twins + own, own + twins):
        picks = greedy(model.encode_queries(asked), model.encode_pool(pool), model.state(), 1).positions.ravel()
        assert [pool[at].source for at in picks] == asked
        assert [SPEC.key(pool[at].target) for at in picks] == [SPEC.key(item.target) for item in own]


def test_the_most_telling_columns_are_kept():
    programs = ["f(a)", "f(b)", "f(c)"]
    inventory = Inventory.fit(ProgramSpec(max_size=2), programs, 1)
    assert inventory.columns == [("<root> -> f", "f")]
    again = Inventory.from_json(json.loads(json.dumps(inventory.to_json())))
    assert (again.digest, again.columns) == (inventory.digest, inventory.columns)


def test_token_bags_are_the_weighted_kernel_of_all_pairs():
    rng = np.random.default_rng(0)
    texts = [rng.normal(size=(length, 5)).astype(np.float32) for length in (3, 1, 4)]
    bags = TokenBags.fit(texts)
    tokens = [text - np.concatenate(texts).mean(0) for text in texts]
    tokens = [text / np.linalg.norm(text, axis=1, keepdims=True) for text in tokens]
    every = np.concatenate(tokens)
    weights = [-np.log(np.exp(12 * (text @ every.T - 1)).mean(1) + 1e-4) for text in tokens]
    kernel = np.array(
        [
            [u @ np.exp(4 * (one @ other.T - 1)) @ v for other, v in zip(tokens, weights, strict=True)]
            for one, u in zip(tokens, weights, strict=True)
        ]
    )
    scale = np.sqrt(np.diag(kernel))
    vectors = bags.vectors(texts)
    np.testing.assert_allclose(vectors @ vectors.T, kernel / scale / scale[:, None], atol=2e-3)
    assert not bags.vectors([texts[0][:0]]).any()


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [None, FakeBackbone()])
def test_the_fit_beats_an_unfitted_policy_and_knows_its_training_questions(backbone):
    model, result = fitted(backbone)
    assert (result.steps, result.best_round) == (0, 0)
    queries = model.encode_queries([example.source for example in SPLIT.train])
    sizes = model.query.inventory.sizes
    gold = np.asarray(model.encode_pool(items(SPLIT.train)).candidate)[:, : len(sizes)] * sizes
    assert np.corrcoef(queries[:, : len(sizes)].ravel(), gold.ravel())[0, 1] > 0.8
    random = greedy(np.zeros_like(queries[:1]), model.encode_pool(items(SPLIT.train)), model.state(), 4)
    assert random.positions.tolist() == [[0, 1, 2, 3]]
    assert result.best_score > 45


@pytest.mark.slow
def test_the_same_seed_fits_the_same():
    one, other = (fitted()[0].fingerprint() for _ in range(2))
    assert one == other != structure().fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["additive", "saturating"])
def test_gradient_descent_goes_on_from_the_fit(state):
    model = structure(state=state)
    config = SFTSettings(epochs=2, lr=1e-3, temperature=1.0, patience=None, on_policy_from=0.0)
    before = structure(state=state)
    result = train(model, SPLIT.train, SPLIT.train, SPLIT.dev, SPEC, config)
    assert result.steps > 0
    assert all(np.isfinite(row["dev_coverage"]) for row in result.history)
    assert len(model.query.dual) == len(SPLIT.train) != len(before.query.dual)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [None, FakeBackbone()])
def test_a_checkpoint_comes_back(tmp_path, monkeypatch, backbone):
    from langchain_rcr.families import backbone as backbones

    model = fitted(None if backbone is None else RememberingBackbone(backbone))[0]
    model.save_pretrained(tmp_path / "c")
    monkeypatch.setattr(backbones, "load_backbone", lambda *_, **__: backbone)
    again = TriEncoder.from_pretrained(tmp_path / "c")
    questions = [example.source for example in SPLIT.dev]
    np.testing.assert_allclose(again.encode_queries(questions), model.encode_queries(questions), atol=1e-4)
    assert again.config.state == "saturating"
    assert again.query.inventory.spec == SPEC
    assert (tmp_path / "c" / "backbone.json").is_file() == (backbone is not None)


@pytest.mark.slow
@pytest.mark.parametrize("train_candidates", [False, True])
@pytest.mark.parametrize("held_out", [False, True])
def test_reinforcement_goes_on_from_the_fit(train_candidates, held_out):
    model = fitted()[0]
    queries = SPLIT.dev if held_out else SPLIT.train
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = GRPOSettings(
        max_steps=2, batch_size=8, group_size=4, lr=1e-3, evaluate_every=9, train_candidates=train_candidates
    )
    reward = make_reward("context_coverage", SPEC)
    result = train_grpo(model, SPLIT.train, queries, [], SPEC, config, reward)
    assert result.steps == 2
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "context.weight" in moved
    assert {"query.worth", "query.by_size", "query.cost", "query.wording"} <= moved
    assert ("query.dual" in moved) == held_out  # no question that E_x was fitted to moves its own prediction
    assert ("candidate.weight" in moved) == train_candidates
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "sft-dev", "grpo"])
def test_an_interrupted_stage_goes_on_as_if_it_had_not_stopped(tmp_path, monkeypatch, stage):
    dev = SPLIT.dev if stage == "sft-dev" else []
    monkeypatch.setattr(runner, "SAVE_EVERY_S", 0)
    fitted()[0].save_pretrained(tmp_path / "start")
    reward = make_reward("context_coverage", SPEC)

    def run(folder, stop_at=None):
        def log(step, figures):
            if step == stop_at:
                raise KeyboardInterrupt

        if stage != "grpo":
            model, config = structure(), SFTSettings(epochs=3, lr=1e-2, patience=None)
            train(model, SPLIT.train, SPLIT.train, dev, SPEC, config, state_folder=tmp_path / folder, log=log)
        else:
            model = TriEncoder.from_pretrained(tmp_path / "start", runtime="torch")
            config = GRPOSettings(max_steps=3, batch_size=8, group_size=4, lr=1e-2)
            folders = {"state_folder": tmp_path / folder, "log": log}
            train_grpo(model, SPLIT.train, SPLIT.train, [], SPEC, config, reward, **folders)
        return model.state_dict()

    undisturbed = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("disturbed", stop_at=3)
    assert (tmp_path / "disturbed" / "state.json").is_file()
    again = run("disturbed")
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(again[name], tensor, msg=name)


def test_a_foreign_inventory_is_refused(tmp_path):
    model = structure()
    model.save_pretrained(tmp_path / "c")
    file = tmp_path / "c" / "context_encoder" / "inventory.json"
    value = json.loads(file.read_text())
    for change in ({"columns": value["columns"][::-1]}, {"spec": {"language": "klingon"}}, {"spec": {"unheard": 1}}):
        file.write_text(json.dumps(value | change))
        with pytest.raises(CheckpointError, match=r"inventory\.json"):
            TriEncoder.from_pretrained(tmp_path / "c")


def test_new_candidates_with_structures_of_their_own_have_no_column_of_training():
    model = structure()
    pool = model.encode_pool([Item("q", "never_seen(before)"), Item("q", "no ( program"), items(SPLIT.train)[0]])
    columns = len(model.query.inventory)
    assert not np.asarray(pool.candidate)[:2, :columns].any()
    assert np.asarray(pool.candidate)[2].any()


def test_text_families_have_no_saturating_state():
    with pytest.raises(InputError, match=r"contradicts model\.family = 'lexical'"):
        TriEncoder.build("lexical", items(SPLIT.train), state="saturating")


def test_a_pool_without_programs_is_refused():
    with pytest.raises(InputError, match="none of 1 programs parses"):
        TriEncoder.build("structure", [Item("a question", "no ( program")])


@pytest.mark.slow
def test_a_question_is_read_once():
    class Counting(FakeBackbone):
        seen = 0

        def embed(self, texts, *, queries=False):
            self.seen += len(texts)
            return super().embed(texts, queries=queries)

    backbone = Counting()
    model = fitted(backbone)[0]
    before = backbone.seen
    model.encode_queries(["which cat is round ?", "is there a dog ?"])
    assert backbone.seen == before + 2


@pytest.mark.slow
def test_the_fit_says_so_where_programs_share_nothing(caplog):
    rows = [
        Example(f"{word} {n}", f"{word} it {n}", f"{word}()") for word in ("open", "shut", "lock") for n in range(10)
    ]
    with caplog.at_level("INFO", logger="rcr_trainer.sft"):
        train(TriEncoder.build("structure", items(rows), spec=SPEC), rows, rows, [], SPEC, SFTSettings(epochs=0))
    said = "fitted: no other program has anything that one of 30 held-out training questions needs"
    assert caplog.messages[-1] == said


@pytest.mark.slow
def test_the_fit_tells_how_far_it_is(caplog, monkeypatch):
    monkeypatch.setattr(sft, "_PROBES", 30)
    with caplog.at_level("INFO", logger="rcr_trainer.sft"):
        fitted()
        train(structure(), SPLIT.train, SPLIT.train, [], SPEC, SFTSettings(epochs=0))
        train(structure(), SPLIT.train, SPLIT.train[10:], SPLIT.train[:10], SPEC, SFTSettings(epochs=0))
    first, alone, taken = (
        "fitting to 60 training questions …",
        r"fitted: \d+\.\d % of what 30 held-out training questions need is covered",
        r"fitted: \d+\.\d % of what 10 held-out training questions need is covered",
    )
    expected = [first, alone, first, alone, first, taken]
    assert all(re.fullmatch(text, line) for text, line in zip(expected, caplog.messages, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [0, 1])
def test_development_questions_taken_from_training_stay_questions_of_the_fit(monkeypatch, epochs):
    model, pool = structure(), SPLIT.train[:40]
    train(model, pool, pool[10:], pool[:10], SPEC, SFTSettings(epochs=epochs, patience=None))
    assert len(model.query.dual) == 40
    model = structure()
    train(model, pool, pool, SPLIT.dev, SPEC, SFTSettings(epochs=epochs, patience=None))
    assert len(model.query.dual) == 40


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_few_examples(count):
    few = SPLIT.train[:count]
    model = TriEncoder.build("structure", items(few), spec=SPEC)
    FAMILY.fit(model.query, items(few), seed=0)
    assert np.isfinite(model.encode_queries(["is there a dog ?", ""])).all()


def test_examples_of_one_program_have_nothing_to_be_held_out_from():
    same = [Item(f"question {number}", "f(a)") for number in range(6)]
    model = TriEncoder.build("structure", same, spec=SPEC)
    folds = Folds.of(same, SPEC)
    FAMILY.fit(model.query, same, seed=0)
    features = FAMILY.held_out(model.query, same, folds, folds.ways(same))
    assert np.isfinite(model.query.vectors(features)).all()


@pytest.mark.slow
def test_unparsable_training_programs_are_landmarks_by_their_tokens():
    broken = items([Example("x", "what is this ?", "no ( program"), *SPLIT.train])
    model, folds = TriEncoder.build("structure", broken, spec=SPEC), Folds.of(broken, SPEC)
    FAMILY.fit(model.query, broken, seed=0)
    features = FAMILY.held_out(model.query, broken, folds, folds.ways(broken))
    assert (len(features), len(model.query.dual)) == (61, 61)
    assert np.isfinite(model.query.vectors(features)).all()


def test_a_fit_over_a_text_encoder_is_not_loaded_without_one(tmp_path):
    model, _ = fitted(FakeBackbone())
    model.query.save(tmp_path)
    file = tmp_path / "encoder.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"backbone": False}))
    with pytest.raises(CheckpointError, match=f"vectors of {FakeBackbone().dim} numbers, its encoder gives 0"):
        type(model.query).load(tmp_path, FakeBackbone())
