"""The structure family: columns by hand, features, checkpoints, what it predicts after the fit."""

import json
import time

import numpy as np
import pytest
import torch
from fake_backbone import FakeBackbone
from langchain_core.embeddings import Embeddings
from langchain_rcr.families.structure.clusters import AverageLinkage
from rcr_trainer.coverage import recall_by_step, structure_matrices
from rcr_trainer.data import Example, covr_split
from rcr_trainer.evaluation.stage import policy_picks
from rcr_trainer.folds import own_positions
from rcr_trainer.rewards import make_reward
from rcr_trainer.settings import GRPOSettings, SFTSettings
from rcr_trainer.training import state
from training import train_grpo
from training import train_sft as train

from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import RememberingBackbone
from langchain_rcr.families.structure import fit as fitting
from langchain_rcr.families.structure.inventory import Inventory, dense
from langchain_rcr.families.structure.kernel import lexical_evidence
from langchain_rcr.families.structure.tokens import TokenBags
from langchain_rcr.items import Item
from langchain_rcr.policy import TriEncoder
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.selection import greedy

torch.set_num_threads(1)

SPEC, FAMILY = ProgramSpec(), get_family("structure")
SPLIT = covr_split("110", 0, 60, 0, dev=40)


@pytest.fixture(autouse=True)
def quick_nets(monkeypatch):
    """Nets trained for a tenth of the time: most of what is tested doesn't depend on how good they are."""
    monkeypatch.setattr(fitting, "_STEPS", fitting._STEPS // 10)


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
    assert dense(inventory.rows(["f(b)", "not ( a program", "g(a)"]), 3).tolist() == [[1, 0, 1], [0, 0, 0], [0, 0.5, 0]]


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


def test_parts_and_words_by_hand():
    inventory = Inventory(SPEC, [["f -> a <-> b"], ["f -> a"], ["a <-> b"], ["a"], ["highPoint_2 -> b"]])
    pairs = {tuple(pair) for pair in inventory.parts.T.tolist()}
    assert pairs == {(0, 1), (0, 2), (1, 3), (2, 3)}
    words, labels = inventory.words
    assert words == ["a", "b", "f", "high point"]
    assert {tuple(pair) for pair in labels.T.tolist() if pair[0] == 4} == {(4, 3), (4, 1)}
    assert inventory.lengths.tolist() == [3, 2, 2, 1, 2]


def test_the_most_telling_columns_are_kept():
    programs = ["f(a)", "f(b)", "f(c)"]
    inventory = Inventory.fit(ProgramSpec(max_size=2), programs, 1)
    assert inventory.columns == [("<root> -> f", "f")]
    again = Inventory.from_json(json.loads(json.dumps(inventory.to_json())))
    assert (again.digest, again.columns) == (inventory.digest, inventory.columns)


def test_words_in_common_are_compared_by_their_stems():
    found = lexical_evidence(["which states are bordering texas ?"], ["border info", "state", "of", "river"])
    assert found.tolist() == [[0.5, 1.0, 0.0, 0.0]]


def test_token_bags_are_the_weighted_kernel_of_all_pairs():
    rng = np.random.default_rng(0)
    texts = [rng.normal(size=(length, 5)).astype(np.float32) for length in (3, 1, 4)]
    bags = TokenBags(texts)
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


def test_left_out_predictions_are_those_of_a_fit_without_the_group():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(12, 3))
    kernel = np.exp(-((points[:, None] - points[None]) ** 2).sum(-1))
    targets = (rng.random((12, 4)) < 0.5).astype(np.float32)
    groups = np.array([0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 7])
    mean = targets.mean(0)
    inverse = np.linalg.inv(kernel + fitting.RIDGE * np.eye(12))
    raw, frequency = fitting._without_group(inverse, inverse @ (targets - mean), targets, groups)
    for group in range(8):
        out, kept = groups == group, groups != group
        dual = np.linalg.solve(kernel[np.ix_(kept, kept)] + fitting.RIDGE * np.eye(kept.sum()), targets[kept] - mean)
        np.testing.assert_allclose(raw[out], kernel[np.ix_(out, kept)] @ dual + mean, atol=1e-4)
        np.testing.assert_allclose(frequency[out], np.tile(targets[kept].mean(0), (out.sum(), 1)), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [None, FakeBackbone()])
def test_the_fit_beats_an_unfitted_policy_and_knows_its_training_questions(backbone):
    model, result = fitted(backbone)
    assert (result.steps, result.best_round) == (0, 0)
    queries = model.encode_queries([example.source for example in SPLIT.train])
    gold = model.encode_pool(items(SPLIT.train)).candidate * model.query.inventory.sizes
    assert np.corrcoef(queries.ravel(), gold.ravel())[0, 1] > 0.8
    random = greedy(np.zeros_like(queries[:1]), model.encode_pool(items(SPLIT.train)), model.state(), 4)
    assert random.positions.tolist() == [[0, 1, 2, 3]]
    assert result.best_score > 45


def test_features_for_training_leave_the_own_program_out():
    model = structure()
    features = FAMILY.fit(model.query, items(SPLIT.train), own_program=False, seed=0)
    held_out, known = (model.query.vectors(part) for part in (features, model.query.featurize(items(SPLIT.train))))
    gold = dense(model.query.inventory.rows([example.target for example in SPLIT.train]), model.dim)
    assert (known * gold).sum() > (held_out * gold).sum()


@pytest.mark.slow
@pytest.mark.parametrize("own_program", [False, True])
def test_what_training_left_out_can_be_told_from_a_checkpoint(tmp_path, monkeypatch, own_program):
    from langchain_rcr.families import backbone as backbones

    backbone = RememberingBackbone(FakeBackbone())
    twice = [*SPLIT.train, Example("again", SPLIT.train[3].source, SPLIT.train[3].target)]
    monkeypatch.setattr(fitting, "MOST_LANDMARKS", 50)
    model = structure(backbone)
    fitted = FAMILY.fit(model.query, items(twice), own_program=own_program, seed=0)
    model.save_pretrained(tmp_path / "c")
    monkeypatch.setattr(backbones, "load_backbone", lambda *_: backbone)
    query = TriEncoder.from_pretrained(tmp_path / "c").query
    again = FAMILY.held_out(query, items(twice), own_program=own_program)
    for name in ("likeness", "evidence", "raw", "frequency"):
        np.testing.assert_allclose(getattr(again, name), getattr(fitted, name), atol=1e-4, err_msg=name)
    rows = np.array([7, 2, 60])
    some = FAMILY.held_out(query, items(twice[row] for row in rows), own_program=own_program)
    np.testing.assert_allclose(query.vectors(some), query.vectors(again)[rows], atol=1e-4)
    assert FAMILY.held_out(query, items(SPLIT.dev), own_program=own_program).raw is None
    plain = query.featurize(items(SPLIT.train))
    assert not np.allclose(query.raw(plain).detach().numpy(), again.raw[:60], atol=1e-2)


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
    monkeypatch.setattr(backbones, "load_backbone", lambda *_: backbone)
    again = TriEncoder.from_pretrained(tmp_path / "c")
    questions = [example.source for example in SPLIT.dev]
    np.testing.assert_allclose(again.encode_queries(questions), model.encode_queries(questions), atol=1e-4)
    assert again.config.state == "saturating"
    assert json.loads((tmp_path / "c" / "tri_encoder.json").read_text())["format_version"] == 3
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
    assert any(name.startswith("query.composition") for name in moved)
    assert ("query.dual" in moved) == held_out  # no question that E_x was fitted to moves its own prediction
    assert ("candidate.weight" in moved) == train_candidates
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


@pytest.mark.slow
def test_reinforcement_sees_development_questions_of_the_pool_as_held_out():
    model, dev = fitted()[0], SPLIT.train[:20]
    barred = own_positions(dev, SPLIT.train, SPEC, same_program=True)
    wanted, has = structure_matrices(SPEC, [e.target for e in dev], [e.target for e in SPLIT.train])
    pool, coverage = model.encode_pool(items(SPLIT.train)), []
    for features in (
        FAMILY.held_out(model.query, items(dev), own_program=False),
        model.query.featurize(items(dev)),
    ):
        picks = greedy(model.query.vectors(features), pool, model.state(), 4, exclude=barred).positions
        coverage.append(100 * recall_by_step(wanted, has, picks)[:, -1].mean())
    assert coverage[0] < coverage[1]
    config, reward = GRPOSettings(max_steps=1, batch_size=8, group_size=2), make_reward("context_coverage", SPEC)
    history = train_grpo(model, SPLIT.train, SPLIT.train, dev, SPEC, config, reward).history
    assert history[0]["dev_coverage"] == pytest.approx(coverage[0])


@pytest.mark.slow
def test_development_questions_of_the_pool_are_asked_as_held_out():
    model, dev = fitted()[0], SPLIT.train[:20]
    questions, barred = [e.source for e in dev], own_positions(dev, SPLIT.train, SPEC, same_program=True)
    plain, asked = (
        policy_picks(model, SPLIT.train, SPEC, mask_duplicates=False, fitted=some)(questions, 4, barred, None)
        for some in ((), dev)
    )
    pool = model.encode_pool(items(SPLIT.train))
    held_out = model.query.vectors(FAMILY.held_out(model.query, items(dev), own_program=False))
    assert asked.tolist() == greedy(held_out, pool, model.state(), 4, exclude=barred).positions.tolist()
    assert asked.tolist() != plain.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_an_interrupted_stage_goes_on_as_if_it_had_not_stopped(tmp_path, monkeypatch, stage):
    monkeypatch.setattr(state, "SAVE_EVERY_S", 0)
    fitted()[0].save_pretrained(tmp_path / "start")
    reward = make_reward("context_coverage", SPEC)

    def run(folder, stop_at=None):
        def log(step, figures):
            if step == stop_at:
                raise KeyboardInterrupt

        if stage == "sft":
            model, config = structure(), SFTSettings(epochs=3, lr=1e-2, patience=None)
            train(model, SPLIT.train, SPLIT.train, [], SPEC, config, state_folder=tmp_path / folder, log=log)
        else:
            model = TriEncoder.from_pretrained(tmp_path / "start")
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


def test_new_candidates_with_structures_of_their_own_are_fine():
    model = structure()
    pool = model.encode_pool([Item("q", "never_seen(before)"), Item("q", "no ( program"), items(SPLIT.train)[0]])
    assert not pool.candidate[:2].any()
    assert pool.candidate[2].any()


def test_text_families_have_no_saturating_state():
    with pytest.raises(InputError, match=r"contradicts model\.family = 'lexical'"):
        TriEncoder.build("lexical", items(SPLIT.train), state="saturating")


def test_a_pool_without_programs_is_refused():
    with pytest.raises(InputError, match="none of 1 programs parses"):
        TriEncoder.build("structure", [Item("a question", "no ( program")])


@pytest.mark.slow
def test_unparsable_training_programs_are_no_landmarks():
    broken = [Example("x", "what is this ?", "no ( program"), *SPLIT.train]
    model = TriEncoder.build("structure", items(broken), spec=SPEC)
    features = FAMILY.fit(model.query, items(broken), own_program=False, seed=0)
    assert (len(features), len(model.query.dual)) == (61, 60)
    assert np.isfinite(model.query.vectors(features)).all()


@pytest.mark.slow
def test_few_examples():
    for count in (5, 12):
        few = SPLIT.train[:count]
        model = TriEncoder.build("structure", items(few), spec=SPEC)
        train(model, few, few, SPLIT.dev, SPEC, SFTSettings(epochs=0, k=2))
        assert np.isfinite(model.encode_queries(["is there a dog ?", ""])).all()


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
def test_what_is_left_out_together_is_chosen_on_development_questions(monkeypatch):
    monkeypatch.setattr(fitting, "_FEWEST_GROUPS", 2)
    asked = []

    def fit(said, choices=fitting.CHOICES):
        left, model = list(said), structure()

        def judge():
            asked.append(model.query.composition.nets[0][0].weight.clone())
            return left.pop(0)

        fitting.fit(model.query, items(SPLIT.train), own_program=False, seed=0, choices=choices, judge=judge)
        assert not left
        return model.query

    assert fit([50.0, 50.2, 50.1]).levels == fitting.CHOICES[0]  # less than a quarter of a point
    query = fit([50.0, 50.3, 50.4])
    assert query.levels == fitting.CHOICES[1]
    assert torch.equal(query.composition.nets[0][0].weight, asked[4])
    assert not torch.equal(asked[4], asked[5])
    assert fit([50.0, 40.0, 50.3]).levels == fitting.CHOICES[2]
    again = fit([50.0], [fitting.CHOICES[1]])
    assert torch.equal(again.composition.nets[0][0].weight, asked[4])


def test_the_fit_tells_how_far_it_is(caplog, monkeypatch):
    monkeypatch.setattr(fitting, "_STEPS", 5)
    monkeypatch.setattr("rcr_trainer.sft._ENOUGH_DEV", 10)
    with caplog.at_level("INFO", logger="rcr_trainer.sft"):
        fitted()
    assert caplog.messages[0] == "fitting to 60 training questions …"
    assert sum(message.startswith("fitted: development coverage") for message in caplog.messages) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "landmarks"), [(0, 40), (1, 30)])
def test_dev_questions_from_training_become_landmarks_if_no_gradient_moved_the_policy(monkeypatch, epochs, landmarks):
    monkeypatch.setattr(fitting, "_STEPS", 40)
    model, pool = structure(), SPLIT.train[:40]
    train(model, pool, pool[10:], pool[:10], SPEC, SFTSettings(epochs=epochs, patience=None))
    assert len(model.query.dual) == landmarks


@pytest.mark.parametrize("size", [1, 2, 3, 40])
@pytest.mark.parametrize("ties", [False, True])
def test_average_linkage_makes_the_clusters_of_scipy(size, ties):
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    for seed in range(20):
        distances = np.random.default_rng([seed, size]).random((size, size))
        distances = (distances + distances.T) / 2
        if ties:
            distances = (5 * distances).round() / 5
        np.fill_diagonal(distances, 0)
        ours = AverageLinkage(distances)
        tree = linkage(squareform(distances), "average") if size > 1 else None
        np.testing.assert_allclose(np.sort(ours.heights), [] if tree is None else tree[:, 2], atol=1e-12)
        for height in (0.0, 0.3, 0.45, 0.5, 0.6, 1.0):
            theirs = np.zeros(size) if tree is None else fcluster(tree, height, "distance")
            assert (
                len(set(zip(ours.cut(height), theirs, strict=True))) == len(set(theirs)) == ours.cut(height).max() + 1
            )


@pytest.mark.slow
def test_four_thousand_programs_are_clustered_in_seconds():
    distances = np.random.default_rng(0).random((4000, 4000), dtype=np.float32)
    began = time.perf_counter()
    AverageLinkage(np.maximum(distances, distances.T)).cut(0.8)
    assert time.perf_counter() - began < 20
