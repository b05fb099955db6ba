"""How the structure family predicts needs: phrases by hand, parts, left-out predictions, what a need is worth."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from fake_backbone import FakeBackbone
from rcr_trainer.data.coverage import structure_matrices
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.held_out import HeldOut
from rcr_trainer.evaluation.report import Question
from rcr_trainer.evaluation.stage import policy_picks
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.runs.tasks import Task
from rcr_trainer.settings import GRPOSettings
from training import train_grpo

from langchain_rcr.basics import rows as basics_rows
from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import SparseRows
from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import RememberingBackbone
from langchain_rcr.families.folds import CLUSTER, PROGRAM, Folds
from langchain_rcr.families.structure import cues
from langchain_rcr.families.structure import fit as fitting
from langchain_rcr.families.structure.kernel import RIDGE
from langchain_rcr.families.structure.needs import SURE
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)

SPEC, FAMILY = ProgramSpec(), get_family("structure")
SPLIT = covr_split("110", 0, 60, 0, dev=40)
ITEMS = [example.item for example in SPLIT.train]


def fitted(questions=ITEMS, backbone=None, **options):
    model = TriEncoder.build("structure", questions, backbone=backbone, spec=SPEC, **options)
    FAMILY.fit(model.query, questions, seed=0)
    return model


def sparse(rows):
    return basics_rows.sparse(np.array(rows, dtype=np.float32))


def test_landmarks_are_drawn_once_each_from_questions_that_may_have_no_words():
    wordless = [Item("?" * n, f"f(a{n % 3})") for n in range(1, 25)]
    query = fitted(wordless, landmarks=20).query
    assert len(query.vocabulary) == 0
    assert len({*map(tuple, query.learnt[: len(query.dual)].tolist())}) == len(query.dual) == 20


# ---------------------------------------------------------------- phrases


def test_one_phrase_and_one_structure_by_hand():
    # 1 − e^−w = 6 / (8 + ½) is where the update stands still.
    weights = cues.fit(sparse([[1]] * 8), np.float32([[1]] * 6 + [[0]] * 2), rounds=400)
    assert 1 - np.exp(-weights.item()) == pytest.approx(6 / 8.5, abs=1e-5)
    assert cues.likelihoods(sparse([[1], [0]]), weights).ravel().tolist() == pytest.approx([6 / 8.5, 0], abs=1e-5)


def test_fitting_phrases_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    have = (rng.random((20, 5)) < 0.4).astype(float)
    have[:, 4] = 1
    wanted = (rng.random((20, 3)) < 0.5).astype(float)
    count = [sum(row[f] for row in have) for f in range(5)]
    weights = [
        [0.3 * sum(have[n, f] * wanted[n, s] for n in range(20)) / (count[f] + 0.5) for s in range(3)] for f in range(5)
    ]
    for _ in range(4):
        likely = [[1 - np.exp(-sum(have[n, f] * weights[f][s] for f in range(5))) for s in range(3)] for n in range(20)]
        weights = [
            [
                weights[f][s] * sum(have[n, f] * wanted[n, s] / likely[n][s] for n in range(20)) / (count[f] + 0.5)
                for s in range(3)
            ]
            for f in range(5)
        ]
    found = cues.fit(sparse(have.tolist()), wanted.astype(np.float32), rounds=4)
    np.testing.assert_allclose(found, weights, rtol=1e-4)
    assert (found >= 0).all()


def test_what_a_phrase_says_no_other_takes_away():
    weights = cues.fit(sparse([[1, 0, 1]] * 9 + [[0, 1, 1]] * 9), np.float32([[1, 0]] * 9 + [[0, 1]] * 9))
    alone, together = cues.likelihoods(sparse([[1, 0, 1], [1, 1, 1]]), weights)
    assert alone[0] > 0.9
    assert (together >= np.array([alone[0], cues.likelihoods(sparse([[0, 1, 1]]), weights)[0, 1]]) - 1e-6).all()


def test_phrases_and_incidence_by_hand(monkeypatch):
    rows = [[0, 2, 4], [0, 2], [0, 4], [0, 2, 3], []]
    flat = np.array([number for row in rows for number in row])
    bags = SparseRows(np.cumsum([0, *map(len, rows)]), flat, np.ones(len(flat), np.float32), 5)
    assert cues.phrases(bags).tolist() == [0, -1, 1, -1, -1]  # those in three questions or more
    monkeypatch.setattr(cues, "MOST", 1)
    assert cues.phrases(bags).tolist() == [0, -1, -1, -1, -1]
    present = cues.incidence(bags, np.array([-1, -1, 0, -1, 1]), 2)
    assert np.asarray(present).tolist() == [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1]]


def test_phrases_speak_for_small_structures_where_they_are_sure():
    encoder = fitted().query
    features = encoder.featurize(ITEMS[:5])
    features = replace(features, raw=np.float32(np.random.default_rng(0).random((5, len(encoder.inventory)))))
    kernel = features.raw[:, encoder.inventory.owner]
    said = np.zeros((5, len(encoder.inventory)), np.float32)
    said[:, encoder.inventory.small] = features.local
    said = said[:, encoder.inventory.owner]
    counts = (said >= SURE) & (encoder.inventory.lengths <= 2)
    assert 0 < (counts & (said > kernel)).sum() < counts.size
    expected = np.where(counts, np.maximum(said, kernel), kernel)
    np.testing.assert_allclose(encoder.likelihoods(features).detach().numpy(), expected, atol=1e-6)


# ---------------------------------------------------------------- predictions without a fold


def test_left_out_predictions_are_those_of_a_fit_without_the_fold():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(12, 3))
    kernel = np.exp(-((points[:, None] - points[None]) ** 2).sum(-1))
    targets = (rng.random((12, 4)) < 0.5).astype(np.float32)
    folds = np.array([0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7, -1])
    mean = targets.mean(0)
    inverse = np.linalg.inv(kernel + RIDGE * np.eye(12))
    raw = fitting.without_folds(inverse, inverse @ (targets - mean), targets, folds)
    assert not raw[11].any()
    for fold in range(8):
        out, kept = folds == fold, folds != fold
        dual = np.linalg.solve(kernel[np.ix_(kept, kept)] + RIDGE * np.eye(kept.sum()), targets[kept] - mean)
        np.testing.assert_allclose(raw[out], kernel[np.ix_(out, kept)] @ dual + mean, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", [PROGRAM, CLUSTER])
def test_held_out_questions_are_seen_as_by_a_fit_without_their_fold(way):
    folds = Folds.of(ITEMS, SPEC)
    encoder = fitted().query
    features = FAMILY.held_out(encoder, ITEMS, folds, np.full(len(ITEMS), way))
    gold = np.asarray(encoder.inventory.rows([item.target for item in ITEMS]))
    numbers, views = folds.numbers(ITEMS), encoder.views(ITEMS)
    present = cues.incidence(views.bags, encoder.phrases, len(encoder.speaks) - 1)
    small, kernel = gold[:, encoder.inventory.small], encoder.landmarks.likeness(views)
    for fold in np.unique(numbers[:, way]):
        out, kept = (np.flatnonzero(of) for of in (numbers[:, way] == fold, numbers[:, way] != fold))
        inner = kernel[np.ix_(kept, kept)] + RIDGE * np.eye(len(kept))
        raw = kernel[np.ix_(out, kept)] @ np.linalg.solve(inner, gold[kept] - gold.mean(0)) + gold.mean(0)
        np.testing.assert_allclose(features.raw[out], raw, atol=2e-3)
        if way == PROGRAM:  # phrases are refitted without folds of programs alone
            weights = cues.fit(present.select(kept), small[kept])
            local = cues.likelihoods(present.select(out), weights)
            np.testing.assert_allclose(features.local[out], local, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("new", [1.0, 0.5, 0.0])
def test_what_training_left_out_can_be_told_from_a_checkpoint(tmp_path, monkeypatch, new):
    from langchain_rcr.families import backbone as backbones

    backbone = RememberingBackbone(FakeBackbone())
    twice = [*ITEMS, Item(ITEMS[3].source, ITEMS[3].target)]
    folds = Folds.of(twice, SPEC, new=new)
    model, ways = fitted(twice, backbone, landmarks=50), folds.ways(twice)
    before = FAMILY.held_out(model.query, twice, folds, ways)
    model.save_pretrained(tmp_path / "c")
    monkeypatch.setattr(backbones, "load_backbone", lambda *_, **__: backbone)
    query = TriEncoder.from_pretrained(tmp_path / "c").query
    again = FAMILY.held_out(query, twice, folds, ways)
    for name in ("likeness", "local", "raw"):
        np.testing.assert_allclose(getattr(again, name), getattr(before, name), atol=1e-4, err_msg=name)
    rows = np.array([7, 2, 60])
    some = FAMILY.held_out(query, [twice[row] for row in rows], folds, ways[rows])
    np.testing.assert_allclose(query.vectors(some), query.vectors(again)[rows], atol=1e-4)
    dev = [example.item for example in SPLIT.dev]
    assert FAMILY.held_out(query, dev, folds, folds.ways(dev)).raw is None
    plain = query.featurize(ITEMS)
    assert not np.allclose(query.raw(plain), again.raw[:60], atol=1e-2)


@pytest.mark.slow
def test_features_for_training_leave_the_own_program_out():
    folds = Folds.of(ITEMS, SPEC)
    encoder = fitted().query
    features = FAMILY.held_out(encoder, ITEMS, folds, folds.ways(ITEMS))
    held_out, known = (encoder.vectors(part) for part in (features, encoder.featurize(ITEMS)))
    gold = np.asarray(encoder.inventory.rows([item.target for item in ITEMS]))
    width = gold.shape[1]
    assert (known[:, :width] * gold).sum() > (held_out[:, :width] * gold).sum()


# ---------------------------------------------------------------- development questions of the pool


@pytest.fixture
def trained():
    """A policy, development questions that were taken out of training, and how they are held out."""
    held_out = HeldOut(SPLIT.train, SPLIT.train, SPEC)
    return fitted(), SPLIT.train[:20], held_out


@pytest.mark.slow
def test_reinforcement_sees_development_questions_of_the_pool_as_held_out(trained):
    model, dev, held_out = trained
    barred, pool, coverage = held_out.barred(dev), model.encode_pool(ITEMS), []
    wanted, has = structure_matrices(SPEC, [e.target for e in dev], [e.target for e in SPLIT.train])
    wanted, has = wanted.toarray(), has.toarray()
    reachable = np.stack([np.delete(has, row, axis=0).any(axis=0) for row in barred])
    for features in (held_out.features(model, dev), model.query.featurize([e.item for e in dev])):
        picks = greedy(model.query.vectors(features), pool, model.state(), 4, exclude=barred).positions
        needed = wanted * reachable
        shown = has[picks].max(axis=1)
        coverage.append(100 * ((needed * shown).sum(1) / needed.sum(1)).mean())
    assert coverage[0] < coverage[1]
    config = GRPOSettings(max_steps=1, batch_size=8, group_size=2, exclude_own_program=True)
    reward = make_reward("context_coverage", SPEC)
    history = train_grpo(model, SPLIT.train, SPLIT.train, dev, SPEC, config, reward).history
    assert history[0]["dev_coverage"] == pytest.approx(coverage[0])


@pytest.mark.slow
def test_development_questions_of_the_pool_are_asked_as_held_out(trained):
    model, dev, held_out = trained
    questions, barred = [Question(e.id, e.source, e.target, "", [], {}) for e in dev], held_out.barred(dev)
    task = Task(SPLIT.train, SPLIT.train, dev, dev, [], SPEC)
    plain, asked = (policy_picks(model, task, part, held_out)(questions, 4, barred) for part in ("test", "dev"))
    vectors = model.query.vectors(held_out.features(model, dev))
    picks = greedy(vectors, model.encode_pool(ITEMS), model.state(), 4, exclude=barred).positions
    assert asked.tolist() == picks.tolist() != plain.tolist()


@pytest.mark.slow
def test_without_a_fit_nothing_is_known_of_questions_until_grpo_has_learnt_it():
    pool, questions = SPLIT.train[:40], SPLIT.train[40:]
    model = TriEncoder.build("structure", [e.item for e in pool], spec=SPEC)
    FAMILY.begin(model.query, ITEMS, seed=0)
    held_out = HeldOut(SPLIT.train, SPLIT.train, SPEC, new=1.0)
    features = held_out.features(model, SPLIT.train)
    assert features.raw is None
    with torch.no_grad():
        assert torch.equal(model.query.likelihoods(features), torch.full((60, len(model.query.inventory.names)), 0.5))
    config = GRPOSettings(lr=1e-2, epochs=2, batch_size=5, group_size=8, keep="last", best_by="coverage")
    reward = make_reward("context_coverage", SPEC)
    history = train_grpo(model, pool, questions, questions, SPEC, config, reward).history
    assert history[-1]["dev_coverage"] > history[0]["dev_coverage"] + 1
    assert model.query.dual.any()


# ---------------------------------------------------------------- what a need is worth


def colours(*, asked_with_or):
    """Questions of a small grammar; `exists` is never asked together with `or`."""
    kinds, looks = ("cat", "dog", "mouse", "bird", "horse"), ("red", "black", "round", "small", "old")
    items = []
    for kind, look in product(kinds, looks):
        items.append(Item(f"is there a {kind} that is {look} ?", f"exists(filter({look}, find({kind})))"))
        items.append(Item(f"how many {look} {kind} are there ?", f"count(filter({look}, find({kind})))"))
        other = looks[(looks.index(look) + 2) % len(looks)]
        if asked_with_or:
            either = f"or(filter({look}, find({kind})), filter({other}, find({kind})))"
            items.append(Item(f"how many {kind} are {look} or {other} ?", f"count({either})"))
            items.append(Item(f"which {kind} is {look} or {other} ?", f"choose({either})"))
    return items


@pytest.mark.slow
def test_a_question_that_combines_what_training_never_did_needs_both():
    items = colours(asked_with_or=True)
    assert not any("exists" in item.target and "or(" in item.target for item in items)
    encoder = fitted(items).query
    with torch.no_grad():
        likely = encoder.likelihoods(encoder.featurize([Item("is there a dog that is red or round ?")]))[0]
    need = dict(zip(encoder.inventory.names, likely.tolist(), strict=True))
    assert {name: round(need[name], 2) for name in ("exists", "or", "dog", "red", "round") if need[name] < 0.7} == {}
    assert max(need[name] for name in ("mouse", "bird", "old")) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [3, 4])
def test_of_a_dozen_programs_what_a_question_combines_is_needed(numbers):
    """Of a dozen programs most have labels that no other has."""
    columns, words = ("age", "pay", "bonus"), ("mean", "total", "highest", "lowest")[:numbers]
    shapes = [
        *(f"{word} {{x}} => table.{word}(column)" for word in words),
        *(f"{word} {{x}} per team => groups(table).{word}(column)" for word in words),
        "people with {x} over 7 => table(gt(column, 7))",
        "sort people by {x}, highest first => sort(table, column)",
        "first 7 people => head(table)",
        "how many people per team => counts(column)",
        "how many different teams => distinct(column)",
        "people whose {x} is missing => table(missing(column))",
    ]
    pairs = [shape.format(x=x).split(" => ") for shape in shapes for x in columns for _ in range(8)]
    encoder = fitted([Item(*pair) for pair in pairs]).query
    with torch.no_grad():
        likely = encoder.likelihoods(encoder.featurize([Item("sort people with pay over 7 by age, highest first")]))[0]
    need = dict(zip(encoder.inventory.names, likely.tolist(), strict=True))
    assert min(need["sort"], need["gt"]) > 0.3 > max(need["head"], need["counts"], need["missing"])


@pytest.mark.slow
def test_a_chinese_question_needs_what_it_combines():
    shapes = (
        "有多少{t} => count({t})",
        "每个{c}的{t}数量 => groups({t}, {c})",
        "前{k}个{t} => limit({t})",
        "价值超过{k}的{t} => over({t})",
        "按{c}排序的{t} => sort({t}, {c})",
        "所有{t}的平均价值 => mean({t})",
    )
    pairs = [
        shape.format(t=table, c=column, k=k).split(" => ")
        for shape, table, column, k in product(shapes, ("客户", "订单", "产品"), ("国家", "状态", "颜色"), (2, 3, 5))
    ]
    encoder = fitted([Item(*pair) for pair in pairs]).query
    with torch.no_grad():
        likely = encoder.likelihoods(encoder.featurize([Item("按国家排序的前3个客户"), Item("有多少价值超过7的产品")]))
    first, second = (dict(zip(encoder.inventory.names, row, strict=True)) for row in likely.tolist())
    assert min(first["sort"], first["limit"]) > 0.3 > max(first["count"], first["mean"])
    assert min(second["count"], second["over"]) > 0.3 > max(second["sort"], second["limit"])


@pytest.mark.slow
def test_what_needs_are_worth_is_trained():
    encoder = fitted().query
    encoder(encoder.featurize(ITEMS[:5])).square().sum().backward()
    for name in ("worth", "cost", "power", "wording"):
        gradient = getattr(encoder, name).grad
        assert gradient is not None
        assert gradient.abs().sum() > 0, name


def test_value_by_hand():
    encoder = TriEncoder.build("structure", ITEMS, spec=SPEC, scale=2.0).query
    likely = torch.full((1, len(encoder.inventory.names)), 0.25)
    with torch.no_grad():
        encoder.power.fill_(np.log(0.5))
        encoder.cost.fill_(np.log(0.1))
        encoder.worth.fill_(np.log(3))
    # 2 · 3 · (√¼ − 0.1 · ¾) for each structure of a column
    expected = 6 * 0.425 * encoder.inventory.sizes
    np.testing.assert_allclose(encoder.valued(likely)[0].detach(), expected, rtol=1e-4)
    labels = [
        name for name, length in zip(encoder.inventory.names, encoder.inventory.lengths, strict=True) if length == 1
    ]
    with torch.no_grad():
        encoder.by_size[0] = np.log(5)
    gained = encoder.valued(likely)[0].detach().numpy() - expected
    assert gained.sum() == pytest.approx(4 * 6 * 0.425 * len(labels), rel=1e-4)


def test_what_a_fit_sets_by_size():
    sizes = {"labels ×": 8, "structures of 2 ×": 3, "structures of 3 ×": 1, "structures of 4 ×": 1}
    assert fitted(words=0.5).query.logged() == pytest.approx({"γ": 1, "ε": 0.01, "ω": 0.5, **sizes})


@pytest.mark.parametrize(("times", "second"), [(fitting.LABEL, "d"), (3, "b(b(c))")])
def test_a_label_is_not_crowded_out_by_larger_structures(times, second):
    """Of `a(b(c), b(b(c), d))`, with `a(b(c))` picked: d alone brings the last label, `b(b(c))` the most structures."""
    programs = ["a(b(c))", "b(b(c))", "d"]
    encoder = TriEncoder.build("structure", [Item("", text) for text in programs], spec=SPEC).query
    with torch.no_grad():
        encoder.by_size[:2] = torch.tensor([times, fitting.PAIR]).log()
        wanted = torch.from_numpy(encoder.inventory.has("a(b(c), b(b(c), d))")).float()[None]
        needs = encoder.valued(wanted)[0].numpy()
    has = encoder.inventory.rows(programs)[np.arange(3)]
    left = needs * (1 - has[0])
    assert programs[int((has @ left).argmax())] == second
