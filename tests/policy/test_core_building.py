"""Building a TriEncoder: what is refused, and that a seed decides the rest."""

import pytest

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import InputError
from langchain_rcr.families import families, get_family
from langchain_rcr.families.encoder import LinearEncoder
from langchain_rcr.families.ngrams import NgramVocabulary
from langchain_rcr.policy.triencoder import TriEncoder

ITEMS = [
    Item(f"what is the {word} of {state}", f"answer({word}({state}))")
    for word in ("capital", "area", "river")
    for state in ("texas", "ohio")
]


def test_encoders_that_do_not_fit_together_are_an_input_error():
    vocabulary = NgramVocabulary.fit(ITEMS, 1)
    narrow, wide = (LinearEncoder(None, vocabulary, ngram_init=1.0, dim=dim) for dim in (4, 5))
    with pytest.raises(InputError, match="must agree on D: 4, 5, 4"):
        TriEncoder(narrow, wide, narrow, get_family("lexical").settings())


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("transformer", {}, "needs a model: set base"),
        ("embeddings", {}, "needs a model"),
        ("transformer", {"dim": 3}, "settings of the transformer family: unknown 'dim'; known: base, "),
        ("lexical", {"ngrams": 0}, "settings of the lexical family: ngrams"),
        ("lexical", {"state": "saturating"}, "'saturating' contradicts model.family = 'lexical'"),
        ("weather", {}, "unknown encoder family 'weather'"),
    ],
)
def test_what_can_not_be_built_is_an_input_error(family, options, message):
    with pytest.raises(InputError, match=message):
        TriEncoder.build(family, ITEMS, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family.name for family in families()])
def test_building_is_deterministic(family, bert):
    base = None if family == "lexical" else bert
    one, two = (TriEncoder.build(family, ITEMS, base=base, seed=3) for _ in range(2))
    assert one.fingerprint() == two.fingerprint()
