from __future__ import annotations

import argparse
import importlib
import sys

import numpy as np
import pytest
import torch
from places import MODEL
from rcr_trainer.data.covr import Sampler, covr_split

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.prompt import APPENDIX_D

FOLDER = MODEL
sys.path.insert(0, str(FOLDER))
episodes = importlib.import_module("episodes")
sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def train():
    """train.py, whose import loads transformers: not while tests are collected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module("train")


@pytest.fixture(scope="module")
def vocabulary():
    return episodes.build_vocabulary()


@pytest.fixture(scope="module")
def first(vocabulary):
    return len(vocabulary) - len(episodes.ROLES) * episodes.VARIANTS


@pytest.fixture(scope="module")
def pairs():
    return episodes.draw_pool("test", 2000, frozenset())


@pytest.fixture(scope="module")
def sampler(pairs, vocabulary, first):
    return episodes.EpisodeSampler([episodes.encode(*pair, vocabulary) for pair in pairs], first, covering=1.0)


def test_every_construct_has_five_names_and_no_name_two_constructs(vocabulary):
    names = [name for role in episodes.ROLES for name in episodes.NAMES[role]]
    assert len(names) == len(set(names)) == 17 * 5
    assert all(role == names[0] for role, names in episodes.NAMES.items())
    tokens = [episodes.name_tokens(number) for number in range(17)]
    assert list(vocabulary)[-85:] == [token for five in tokens for token in five]
    assert [five[own].split()[0] for five, own in zip(tokens, episodes.OWN, strict=True)] == list(episodes.ROLES)
    assert np.bincount(episodes.OWN).min() >= 3


def test_tokens_give_back_the_program_in_its_own_spacing(pairs, vocabulary):
    tokenizer = episodes.build_tokenizer(vocabulary)
    for _, program in pairs[:200]:
        ids = tokenizer.encode(program).ids
        assert vocabulary["<unk>"] not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == program


def test_an_episode_with_own_names_is_the_paper_s_prompt(pairs, vocabulary, first):
    chosen = pairs[:5]
    episode = episodes.assemble([episodes.encode(*pair, vocabulary) for pair in chosen], episodes.OWN, first)
    prompt = APPENDIX_D.text([Item(*pair) for pair in chosen[:4]], chosen[4][0])
    tokenizer = episodes.build_tokenizer(vocabulary)
    assert tokenizer.encode(f"{prompt} {chosen[4][1]}\n").ids == episode.ids.tolist()
    assert len(tokenizer.encode(prompt).ids) == episode.query


def test_weights_count_what_the_context_determines(vocabulary, first):
    example = episodes.encode("there is dog", "exists ( find ( dog ) )", vocabulary)
    # Source: there is dog \n Target: exists( find( dog ) ) \n
    episode = episodes.assemble([example, example], episodes.OWN, first, symbol_weight=4.0)
    assert episode.weights.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 4, 4, 1, 1, 1, 1]
    names = np.flatnonzero(episode.roles >= 0)
    assert names.tolist() == [6, 7, 18, 19]
    assert episode.shown[names].tolist() == [False, False, True, True]
    assert episode.query == 18


def test_a_construct_has_one_name_in_an_episode_and_any_of_five_over_all(sampler, first):
    rng = np.random.default_rng(0)
    drawn = np.zeros((17, 5))
    for _ in range(400):
        episode = sampler.draw(rng)
        names = episode.roles >= 0
        assert ((episode.ids[names] - first) // 5 == episode.roles[names]).all()
        for role in np.unique(episode.roles[names]):
            (variant,) = set(((episode.ids - first) % 5)[episode.roles == role].tolist())
            drawn[role, variant] += 1
    expected = drawn.sum(1, keepdims=True) / 5
    # 17 × 4 degrees of freedom: 120 is beyond the 99.99th percentile.
    assert ((drawn - expected) ** 2 / expected).sum() < 120


def share_shown(sampler, rng):
    """How many of 200 queries have each of their constructs shown."""
    drawn = [sampler.draw(rng) for _ in range(200)]
    return np.mean([episode.shown[episode.query :][episode.roles[episode.query :] >= 0].all() for episode in drawn])


def test_demonstrations_cover_the_query_where_they_are_to(sampler, monkeypatch):
    rng = np.random.default_rng(1)
    covering = share_shown(sampler, rng)
    monkeypatch.setattr(sampler, "covering", 0.0)
    assert covering > 0.8 > 0.5 > share_shown(sampler, rng)


def test_rare_constructs_are_asked_about_as_often_as_common_ones(sampler):
    rng = np.random.default_rng(2)
    counts = np.zeros(17)
    for _ in range(600):
        episode = sampler.draw(rng)
        counts[np.unique(episode.roles[episode.query :][episode.roles[episode.query :] >= 0])] += 1
    # By the grammar's own weights, `most` is in 1 query of 18.
    assert counts.min() > 600 / 17 * 0.7


def test_the_same_seed_gives_the_same_batches(sampler):
    one, other = (episodes.batches(sampler, np.random.default_rng([0, 3]), 2000, 40) for _ in range(2))
    assert [[e.ids.tolist() for e in batch] for batch in one] == [[e.ids.tolist() for e in batch] for batch in other]
    assert sum(len(batch) for batch in one) == 40
    assert all(len(batch) * max(len(e.ids) for e in batch) <= 2000 for batch in one)


@pytest.mark.slow
def test_no_test_utterance_is_trained_on():
    forbidden = episodes.forbidden_utterances([0])
    assert {example.source for example in covr_split("43").test} <= forbidden
    sampler = Sampler("pool")
    some = frozenset(sampler.draw().utterance for _ in range(300))
    assert some & {utterance for utterance, _ in episodes.draw_pool("pool", 300, frozenset())}
    assert not some & {utterance for utterance, _ in episodes.draw_pool("pool", 300, some)}


@pytest.fixture(scope="module")
def tiny(train, vocabulary):
    options = argparse.Namespace(width=24, inner=16, layers=2, heads=2, seed=0, factored=1)
    return train.build_model(vocabulary, options)


@pytest.mark.slow
def test_loss_equals_a_plain_reference(train, sampler, tiny, vocabulary, first):
    rng = np.random.default_rng(4)
    drawn = [sampler.draw(rng) for _ in range(3)]
    total, weights = 0.0, 0.0
    with torch.no_grad():
        got = train.loss_of(tiny, train.pad(drawn), first)
        for episode in drawn:
            logs = tiny(torch.from_numpy(episode.ids)[None]).logits[0].log_softmax(-1)
            for place in range(1, len(episode.ids)):
                role = episode.roles[place]
                if role >= 0 and not episode.shown[place]:
                    names = logs[place - 1, first + 5 * role : first + 5 * role + 5]
                    total += -names.mean().item() - np.log(5)
                    weights += 1
                else:
                    total += -episode.weights[place] * logs[place - 1, episode.ids[place]].item()
                    weights += episode.weights[place]
    assert got.item() == pytest.approx(total / weights, rel=1e-4)


@pytest.mark.slow
def test_plain_attention_is_causal_attention(train):
    query, key, value = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(0))
    got, _ = train.plain_attention(torch.nn.Module(), query, key, value, None)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(got, wanted.transpose(1, 2))
