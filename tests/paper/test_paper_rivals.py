"""The selectors that learn from a scoring language model, against slow plain loops; then trained with a small one."""

from __future__ import annotations

import itertools
import math
import zlib

import numpy as np
import pytest
import torch
from places import MODEL
from rank_bm25 import BM25Okapi
from rcr_trainer.baselines import LearnedSettings, get_baseline
from rcr_trainer.baselines.base import Resources
from rcr_trainer.data.okapi import tokenize
from rcr_trainer.paper.ceil import MARGIN, draw_sets, log_volumes, margin_loss
from rcr_trainer.paper.learned import training_rows
from rcr_trainer.paper.se2 import appended, beam, sequences
from rcr_trainer.training.runner import linear

from langchain_rcr import Item, TriEncoder
from langchain_rcr.errors import InputError
from langchain_rcr.policy.prompt import APPENDIX_D

LEARNED = ["epr", "se2", "se2_tri", "ceil", "iterr", "llm_r"]
WORDS = ["river", "state", "city", "largest", "longest", "border", "capital", "population"]
EXAMPLES = [
    {
        "source": f"what {WORDS[i % 8]} {WORDS[(3 * i + 1) % 8]} {i} ?",
        "target": f"{WORDS[i % 8]} ( {WORDS[i % 5]} {i} )",
    }
    for i in range(20)
]
ITEMS = [Item(**example) for example in EXAMPLES]
QUERIES = ["what river ?", "capital of the largest state", "zzz"]
OPTIONS = LearnedSettings(queries=12, candidates=6, extreme=2, sets=4, epochs=3, batch_size=5, lr=0.01)


class Scores:
    """Remembers what it is asked; what it says follows from the text alone."""

    def __init__(self):
        self.asked = []

    def log_likelihoods(self, prompts, continuations):
        self.asked += zip(prompts, continuations, strict=True)
        return [self.of(prompt, continuation) for prompt, continuation in zip(prompts, continuations, strict=True)]

    def of(self, prompt, continuation):
        return -zlib.crc32((prompt + continuation).encode()) / 2**30


class Wanted(Scores):
    """Of a model that is helped by one word."""

    def of(self, prompt, continuation):
        return -3.0 + prompt.count("longest")


def policy(items):
    return TriEncoder.build("lexical", items, dim=16, seed=1)


def make(name, scores=None, examples=EXAMPLES, **options):
    learning = OPTIONS.model_copy(update=options)
    resources = Resources(seed=3, score=scores or Scores(), policy=policy, learning=learning)
    return get_baseline(name)(examples, k=3, **vars(resources))


def nearest(row):
    """Other examples by BM25 between programs, as rank_bm25 scores them."""
    programs = [tokenize(item.target) for item in ITEMS]
    scores = BM25Okapi(programs).get_scores(programs[row]).round(6)
    return sorted((each for each in range(len(ITEMS)) if each != row), key=lambda each: (-scores[each], each))


def likelihood(row, shown):
    return Scores().of(APPENDIX_D.text([ITEMS[each] for each in shown], ITEMS[row].source), f" {ITEMS[row].target}\n")


@pytest.mark.slow
def test_epr_is_trained_as_a_plain_loop_trains_it():
    scores = Scores()
    selector = make("epr", scores)
    selector.pick(QUERIES, 2)
    rows = training_rows(20, 12)
    ranked = [sorted(nearest(row)[:6], key=lambda each: -likelihood(row, [each])) for row in rows]
    assert len(scores.asked) == 12 * 6 == type(selector).texts(OPTIONS, 12, 3)

    model = policy(ITEMS)
    parameters = [each for part in (model.query, model.candidate) for each in part.parameters()]
    optimizer, planned = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01), 9
    questions = model.query.featurize([Item(ITEMS[row].source) for row in rows])
    for epoch in range(3):
        rng = np.random.default_rng([3, epoch])
        order = rng.permutation(np.array([(q, 0) for q in range(12)]))[:, 0]
        best = rng.integers(2, size=(12, 1))[:, 0]
        for start in range(0, 12, 5):
            batch = order[start : start + 5]
            positives = [ranked[q][best[q]] for q in batch]
            negatives = [
                ranked[q][-1 - drawn] for q, drawn in zip(batch, rng.integers(2, size=len(batch)), strict=True)
            ]
            total = 0.0
            for q, positive in zip(batch, positives, strict=True):
                rivals = sorted({*positives, *negatives} - {int(rows[q])})
                logits = model.candidate(model.candidate.featurize([ITEMS[each] for each in rivals])) @ model.query(
                    questions.select(np.array([q]))
                ).squeeze(0)
                total = total - logits.log_softmax(0)[rivals.index(positive)]
            optimizer.zero_grad()
            (total / len(batch)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            step = epoch * 3 + start // 5
            optimizer.param_groups[0]["lr"] = 0.01 * linear(step, planned, 0.1)
            optimizer.step()
    for part in ("query", "candidate"):
        trained = getattr(selector.model, part).state_dict()
        for name, tensor in getattr(model, part).state_dict().items():
            torch.testing.assert_close(trained[name], tensor, atol=1e-5, rtol=1e-4)
    expected = model.query.encode([Item(query) for query in QUERIES]) @ model.candidate.encode(ITEMS).T
    assert selector.pick(QUERIES, 4).tolist() == np.argsort(-expected, axis=1)[:, :4].tolist()


def test_se2_ranks_step_by_step_beside_what_was_chosen_before():
    def score(rows, sets):
        return np.array([likelihood(row, shown) for row, shown in zip(rows, sets, strict=True)])

    rows = np.array([4, 9])
    ranked, chosen = sequences(score, rows, 20, 5, 3, np.random.default_rng(0))
    assert ranked.shape == (2, 3, 5)
    for row, steps, picks in zip(rows, ranked, chosen, strict=True):
        for step, order in enumerate(steps):
            before = picks[:step].tolist()
            assert len({*order.tolist(), *before, int(row)}) == 5 + step + 1
            assert order.tolist() == sorted(order.tolist(), key=lambda each: -likelihood(row, [*before, each]))
            assert picks[step] in order
    many = sequences(score, np.full(600, 4), 20, 7, 1, np.random.default_rng(0))
    assert set(many[0].ravel().tolist()) == set(range(20)) - {4}
    first = np.mean(many[1][:, 0] == many[0][:, 0, 0])
    assert abs(first - 1 / sum(math.exp(-rank) for rank in range(7))) < 0.06


@pytest.mark.parametrize("name", LEARNED)
def test_the_language_model_is_asked_with_the_first_pick_last(name):
    scores = Scores()
    make(name, scores)._scores([4], [[1, 2, 3]])
    shown = [ITEMS[each] for each in (3, 2, 1)]
    assert scores.asked == [(APPENDIX_D.text(shown, ITEMS[4].source), f" {ITEMS[4].target}\n")]


def test_a_wide_beam_finds_the_largest_sum_and_a_narrow_one_is_greedy():
    rng = np.random.default_rng(1)
    start, effect = 0.1 * rng.normal(size=(2, 6)), 3 * rng.normal(size=(6, 6))

    def logits(rows, picks):
        return np.stack([start[row] + effect[list(own)].sum(0) for row, own in zip(rows, picks, strict=True)])

    def total(query, sequence):
        steps = enumerate(sequence)
        return sum(logits([query], np.array([sequence[:step]], dtype=int))[0, pick] for step, pick in steps)

    excluded = [np.array([], dtype=int), np.array([2])]
    wide = beam(logits, excluded, 3, width=120, horizon=3)
    for query, barred in enumerate(excluded):
        every = itertools.permutations(set(range(6)) - set(barred), 3)
        best = max(every, key=lambda sequence: total(query, sequence))
        assert wide[query].tolist() == list(best)
    assert not (wide == beam(logits, excluded, 3, width=1, horizon=3)).all()
    narrow = beam(logits, excluded, 5, width=1, horizon=3)
    for query, barred in enumerate(excluded):
        picked = []
        for _ in range(5):
            values = logits([query], np.array([picked], dtype=int))[0]
            picked.append(max(set(range(6)) - set(barred) - set(picked), key=lambda each: values[each]))
        assert narrow[query].tolist() == picked
    assert (beam(logits, excluded, 5, width=120, horizon=3)[:, :3] == wide).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["se2", "se2_tri"])
def test_se2_picks_by_the_state_of_its_kind(name):
    scores = Scores()
    selector = make(name, scores, beam_width=1)
    picks = selector.pick(QUERIES, 3)
    assert len(scores.asked) == 12 * 6 * 3 == type(selector).texts(OPTIONS, 12, 3)
    model = selector.model
    pool = model.candidate.encode(ITEMS)
    for query, own in zip(QUERIES, picks.tolist(), strict=True):
        for step, pick in enumerate(own):
            shown = [ITEMS[each] for each in own[:step]]
            if name == "se2":
                texts = [line for item in shown for line in (item.source, item.target)]
                state = model.query.encode([Item("\n".join([*texts, query]))])
            else:
                state = model.query.encode([Item(query)])
                if shown:
                    state = state + model.config.lam * model.context.encode(shown).sum(axis=0)
            logits = (pool @ state[0]).round(5)
            logits[own[:step]] = -np.inf
            assert pick == logits.argmax()
    # What is trained tells the two apart, and both from what was not trained.
    start = policy(ITEMS)
    moved = {
        part: not np.array_equal(getattr(start, part).encode(ITEMS), getattr(model, part).encode(ITEMS))
        for part in ("query", "context", "candidate")
    }
    assert moved == {"query": True, "context": name == "se2_tri", "candidate": True}


def test_what_se2_reads_is_the_picks_and_then_the_question():
    assert appended("a b", []) == "a b"
    assert appended("a b", [Item("c", "d"), Item("e", "f")]) == "c\nd\ne\nf\na b"


@pytest.mark.parametrize("name", LEARNED)
def test_a_pool_that_just_suffices_is_learned_from_and_a_smaller_one_is_refused(name):
    assert sorted(make(name, examples=EXAMPLES[:5], candidates=2).pick(["what river ?"], 5)[0]) == list(range(5))
    with pytest.raises(InputError, match=f"the {name} selector can't be trained: the pool has 4 examples, too few to"):
        make(name, examples=EXAMPLES[:4]).pick(["what river ?"], 2)


def unit_rows(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def unit(rng, *shape):
    return unit_rows(rng.normal(size=shape))


def test_ceils_volumes_are_determinants_of_its_kernel():
    rng, lam = np.random.default_rng(0), 0.3
    query, sets = unit(rng, 2, 5), unit(rng, 2, 3, 4, 5)
    found = log_volumes(torch.from_numpy(query), torch.from_numpy(sets), lam)
    for b, m in itertools.product(range(2), range(3)):
        quality = np.exp((1 + sets[b, m] @ query[b]) / 2 / (2 * lam))
        similarity = (1 + sets[b, m] @ sets[b, m].T) / 2 + 1e-4 * np.eye(4)
        expected = math.log(np.linalg.det(quality[:, None] * similarity * quality))
        assert float(found[b, m]) == pytest.approx(expected, abs=1e-6)
    twice = torch.from_numpy(np.repeat(sets[:, :, :1], 4, axis=2)).requires_grad_()
    log_volumes(torch.from_numpy(query), twice, lam).sum().backward()
    assert torch.isfinite(twice.grad).all()


def test_ceils_loss_by_hand_and_by_a_loop():
    values, scores = [1.0, 3.0, 2.5, 0.0], [-1.0, -2.0, -0.5, -3.0]
    ranked = [each / 3.0 for each in (2.5, 1.0, 3.0, 0.0)]
    expected = 0.0
    for gap in (1, 2, 3):
        pairs = [(ranked[at], ranked[at + gap]) for at in range(4 - gap)]
        expected += sum(max(0.0, worse - better + MARGIN * gap) for better, worse in pairs) / len(pairs)
    assert float(margin_loss(torch.tensor([values]), torch.tensor([scores]))) == pytest.approx(expected)
    assert float(margin_loss(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, -1.0]]))) == 0
    assert float(margin_loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, -1.0]]))) == pytest.approx(1 + MARGIN)
    assert float(margin_loss(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, -1.0]]))) == pytest.approx(MARGIN)


def test_ceil_scores_sets_of_near_examples_and_picks_by_greedy_volume():
    scores = Scores()
    selector = make("ceil", scores)
    picks = selector.pick(QUERIES, 3)
    # EPR's texts with one example each, then the sets.
    assert len(scores.asked) == 12 * 6 + 12 * 4 == type(selector).texts(OPTIONS, 12, 3)
    assert [prompt.count("Source: ") for prompt, _ in scores.asked] == [2] * 72 + [4] * 48
    start = make("epr")
    start.pick(QUERIES, 1)
    candidates = [each.model.candidate.encode(ITEMS) for each in (start, selector)]
    assert np.array_equal(*candidates)  # EPR's, which the sets leave as they are
    assert not np.array_equal(start.model.query.encode(ITEMS), selector.model.query.encode(ITEMS))
    near = np.array([[3, 5, 8, 13, 1, 2]])
    sets = draw_sets(near, 40, 3, np.random.default_rng(0))[0].tolist()
    assert {each for own in sets for each in own} == set(near[0].tolist())
    assert all(len(set(own)) == 3 for own in sets)
    # Those of the nearest examples by EPR, without the question itself.
    similar, prompts = unit_rows(candidates[0]), [prompt for prompt, _ in scores.asked[72:]]
    for at, row in enumerate(training_rows(20, 12)):
        query = unit_rows(start.model.query.encode([Item(ITEMS[row].source)]))[0]
        order = [each for each in np.argsort(-(similar @ query).round(6), kind="stable") if each != row][:6]
        shown = [line for prompt in prompts[4 * at : 4 * at + 4] for line in prompt.split("\n")[:-2]]
        sources = {line for line in shown if line.startswith("Source: ")}
        assert sources <= {f"Source: {ITEMS[each].source}" for each in order}

    model, lam = selector.model, selector.lam
    pool = model.candidate.encode(ITEMS).astype(float)
    pool /= np.linalg.norm(pool, axis=1, keepdims=True)
    for query, own in zip(
        model.query.encode([Item(query) for query in QUERIES]).astype(float), picks.tolist(), strict=True
    ):
        relevance = (1 + pool @ (query / (np.linalg.norm(query) or 1))) / 2
        picked = []
        for _ in range(3):

            def volume(each, picked=picked, relevance=relevance):
                rows = pool[[*picked, each]]
                return np.linalg.slogdet((1 + rows @ rows.T) / 2)[1] + relevance[[*picked, each]].sum() / lam

            picked.append(max(set(range(20)) - set(picked), key=volume))
        assert own == picked


@pytest.mark.slow
def test_iterr_picks_by_a_recurrent_state_and_learns_what_is_rewarded():
    selector = make("iterr", Wanted(), epochs=30, lr=0.05, candidates=12, sets=8)
    before = make("iterr", Wanted(), epochs=1, lr=1e-9)
    shown = [
        np.mean([Wanted().of(APPENDIX_D.text([ITEMS[pick] for pick in own], ""), "") for own in each.pick(QUERIES, 3)])
        for each in (before, selector)
    ]
    assert shown[1] > shown[0] + 0.5
    # A cell that is nearly the identity at first.
    state, pool = before.model.query.encode([Item(QUERIES[0])]), before.model.candidate.encode(ITEMS)
    first = before.pick(QUERIES, 2)[0]
    assert first[0] == (pool @ state[0]).round(5).argmax()


@pytest.mark.slow
def test_llm_rs_picks_follow_a_reward_model_that_has_learnt_what_helps():
    selector = make("llm_r", Wanted(), epochs=30, lr=0.05, candidates=12)
    rows = training_rows(20, 12)
    near, scores = selector._scored(rows)
    rewards = selector._rewards(rows, near, scores)
    best = rewards.argmax(axis=1)
    assert np.mean(scores[np.arange(12), best] == scores.max(axis=1)) > 0.9
    before = make("llm_r", Wanted(), epochs=1, lr=1e-9)
    shown = [
        np.mean([ITEMS[pick].text.count("longest") for own in each.pick(QUERIES, 3) for pick in own])
        for each in (before, selector)
    ]
    assert shown[1] > shown[0]
    assert type(selector).texts(OPTIONS, 12, 3) == 12 * 6


@pytest.fixture(scope="module")
def parser():
    """A language model of 0.9 million parameters that parses COVR; behind a cache, as in a run."""
    from rcr_trainer.llm.model import open_llm
    from rcr_trainer.llm.settings import LLMSettings

    folder = MODEL
    with open_llm(LLMSettings(kind="local", model=str(folder), device="cpu"), None) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_trained_with_a_small_language_model_it_helps_that_more_than_untrained(name, parser):
    from rcr_trainer.data.covr import covr_split

    pool = covr_split("110", 0, 60, 0).train
    examples = [{"source": example.source, "target": example.target} for example in pool]

    def helped(**options):
        """How probable the programs of the training questions are behind what is picked for them."""
        learning = LearnedSettings(**{"queries": 24, "candidates": 8, "sets": 5, "epochs": 10, "lr": 0.01} | options)
        build = lambda items: TriEncoder.build("lexical", items, dim=64)  # noqa: E731
        resources = Resources(seed=0, score=parser, policy=build, learning=learning)
        selector, rows = get_baseline(name)(examples, k=2, **vars(resources)), training_rows(60, 24).tolist()
        picks = selector.pick([pool[row].source for row in rows], 2, [[row] for row in rows])
        prompts = [
            APPENDIX_D.text([pool[pick].item for pick in own[::-1]], pool[row].source)
            for row, own in zip(rows, picks, strict=True)
        ]
        return np.mean(parser.log_likelihoods(prompts, [f" {pool[row].target}\n" for row in rows]))

    assert helped() > helped(epochs=1, lr=1e-9)
