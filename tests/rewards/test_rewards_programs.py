"""Rewards that read programs, by hand; the check before training; exceptions that name their example."""

import math
from unicodedata import normalize

import numpy as np
import pytest
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards.ours import context_coverage, correctness, make_reward, mixture, structure_coverage
from rcr_trainer.rewards.reward import Reward, RewardError, check_reward, score

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
GOLD = [Example("1", "biggest state?", "answer(largest(state(all)))"), Example("2", "how many?", "count(river(all))")]


def call(reward, predictions, references, contexts=None):
    contexts = contexts if contexts is not None else [[] for _ in references]
    return reward(predictions, references, queries=["?"] * len(references), contexts=contexts)


def programs(*targets):
    return [Example(str(n), "q", target) for n, target in enumerate(targets)]


# ---------------------------------------------------------------- structure coverage


def test_structure_coverage_is_the_jaccard_of_the_structures():
    small = ProgramSpec(max_size=2)
    answer, gold = small.structures("f(g(x))"), small.structures("f(h(x))")
    assert (len(answer), len(gold), len(answer & gold)) == (6, 6, 3)  # f, x and the root's edge; not g, h or theirs
    assert call(structure_coverage(small), ["f(g(x))"], ["f(h(x))"]) == [3 / 9]
    assert call(structure_coverage(SPEC), ["f(g(x))"], ["f(g(x))"]) == [1.0]
    assert call(structure_coverage(SPEC), ["a(b)"], ["f(g(x))"]) == [0.0]


def test_too_long_an_answer_is_penalised():
    short, long = call(structure_coverage(SPEC), ["f(g(x))", "f(g(x), h(y, z))"], ["f(g(x))"] * 2)
    assert (short, long < 1) == (1.0, True)


@pytest.mark.parametrize("kind", [structure_coverage, correctness])
@pytest.mark.parametrize("nothing", [None, "", "  ", "f((", "no program at all ("])
def test_what_is_no_program_earns_nothing(kind, nothing):
    assert call(kind(SPEC), [nothing], ["f(g(x))"]) == [0.0]


def test_values_do_not_count_for_structures():
    assert call(structure_coverage(SPEC), ["f('a', 1)"], ["f('b', 2)"]) == [1.0]


def test_a_gold_program_that_does_not_parse_cannot_be_scored():
    for kind in (structure_coverage, context_coverage):
        assert call(kind(SPEC), ["f(x)"], ["f(("], [programs("f(x)")]) == [None]


# ---------------------------------------------------------------- correctness


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("f( g(x) )", "f(g(x))", 1.0),
        ("f(g(x))\n", "f(g(x))", 1.0),
        ("f(g(y))", "f(g(x))", 0.0),
        ("f('a')", "f('b')", 0.0),  # values count
        ("f('a  b')", "f('a b')", 0.0),  # and the white space in them
        ("f(a,b)", "f(b,a)", 0.0),
        ("not  ( parsed", "not ( parsed", 1.0),
        ("not ( Parsed", "not ( parsed", 0.0),
        ("f(x)", "f(", 0.0),
        ("", "", None),
        ("f(x)", "  ", None),
    ],
)
def test_exact_match(answer, gold, expected):
    assert call(correctness(SPEC), [answer], [gold]) == [expected]


def test_exact_match_of_sql_knows_that_keywords_have_no_case():
    reward = correctness(ProgramSpec(language="sql"))
    gold = "SELECT name FROM city WHERE state = 'texas'"
    answers = ["select name\nfrom city where state = 'texas'", "SELECT name FROM city WHERE state = 'Texas'"]
    assert call(reward, answers, [gold] * 2) == [1.0, 0.0]


def test_exact_match_of_python_knows_that_indentation_counts():
    gold = "if a:\n    b()\nc()"
    assert call(correctness(ProgramSpec("python")), [gold, "if a:\n    b()\n    c()"], [gold] * 2) == [1.0, 0.0]


# ---------------------------------------------------------------- context coverage


def test_context_coverage_is_the_recall_of_the_union():
    small = ProgramSpec(max_size=1)
    reward = context_coverage(small)
    gold = "f(g(x), h(y))"
    size = len(small.structures(gold))
    scores = call(reward, [None] * 3, [gold] * 3, [[], programs("f(x)", "f(g(x))"), programs("f(g(x))", "h(y, z)")])
    assert scores == pytest.approx([0, 3 / size, 1.0])
    assert not reward.needs_llm


def test_context_coverage_does_not_fall_for_what_else_the_picks_have():
    # as a Jaccard of the picks would, which is highest for copies of one program
    one, more = call(
        context_coverage(SPEC), [None] * 2, ["f(g(x))"] * 2, [programs("f(x)"), programs("f(x)", "a(b(c(d)))")]
    )
    assert one == more > 0


# ---------------------------------------------------------------- mixtures


def test_a_mixture_adds_up():
    reward = make_reward({"structure_coverage": 2.0, "context_coverage": 0.5}, SPEC)
    contexts = [programs("f(g(x))"), []]
    assert call(reward, ["f(g(x))", "f(g(x))"], ["f(g(x))"] * 2, contexts) == [2.5, 2.0]
    assert (reward.name, reward.maximum, reward.needs_llm) == ("2 structure_coverage + 0.5 context_coverage", 2.5, True)
    assert call(reward, ["f(x)"], ["f(("]) == [None]
    assert check_reward(reward, GOLD).all()
    assert not make_reward({"context_coverage": 1.0}, SPEC).needs_llm


@pytest.mark.parametrize("parts", [{}, {structure_coverage(SPEC): 0.0}, {structure_coverage(SPEC): -1.0}])
def test_mixtures_without_sense(parts):
    with pytest.raises(ConfigError, match="weights above 0"):
        mixture(parts)


# ---------------------------------------------------------------- the check before training


@pytest.mark.parametrize(
    ("kind", "language", "program"),
    [
        (structure_coverage, "functional", "größe('Huế', x)"),
        (correctness, "functional", "größe('Huế', x)"),
        (correctness, "sql", "SELECT größe FROM city WHERE name = 'Huế'"),
        (correctness, "sql", "é ("),
    ],
)
def test_an_accent_by_itself_makes_no_other_program(kind, language, program):
    texts = [normalize(form, program) for form in ("NFC", "NFD")]
    assert call(kind(ProgramSpec(language)), texts, texts[::-1]) == [1.0, 1.0]


@pytest.mark.parametrize("name", ["structure_coverage", "correctness", "context_coverage"])
def test_our_rewards_pass_their_check(name):
    reward = make_reward(name, SPEC)
    assert isinstance(reward, Reward)
    assert (reward.name, reward.maximum) == (name, 1.0)
    assert check_reward(reward, GOLD).tolist() == [True, True]


def test_what_cannot_be_scored_is_told():
    examples = [*GOLD, Example("3", "?", "f((")]
    assert check_reward(structure_coverage(SPEC), examples).tolist() == [True, True, False]
    with pytest.raises(ConfigError, match=r"'structure_coverage' can score none of the 1 gold programs"):
        check_reward(structure_coverage(SPEC), examples[2:])


def constant(value):
    def reward(predictions, references, *, queries, contexts):
        return [value] * len(references)

    return make_reward(reward, SPEC)


def test_a_reward_that_is_never_the_maximum():
    with pytest.raises(ConfigError, match=r"gives 0.5 to its gold program on example 1 \('biggest state\?'\)") as error:
        check_reward(constant(0.5), GOLD)
    assert "must give 1 (2 of 2 examples); a reward on another scale has the attributes maximum" in str(error.value)


def test_a_reward_in_float32_is_off_by_rounding():
    """Such as a cosine; "gives 1 to its gold program, where it must give 1" helps nobody."""

    def reward(predictions, references, *, queries, contexts):
        return np.equal(predictions, references) * np.float32(0.9999998) + np.float32(1e-7)

    assert check_reward(make_reward(reward, SPEC), GOLD).all()


def test_a_reward_that_nothing_earns():
    with pytest.raises(ConfigError, match=r"gives 1 to no program on example 1 .* must give 0"):
        check_reward(constant(1.0), GOLD)


def test_a_reward_that_the_empty_text_earns():
    def polite(predictions, references, *, queries, contexts):
        return [0.0 if prediction is None else 1.0 for prediction in predictions]

    with pytest.raises(ConfigError, match="gives 1 to an empty program"):
        check_reward(make_reward(polite, SPEC), GOLD)


def test_a_reward_is_asked_about_each_question_once_and_about_a_few_before_the_rest():
    """It may be a judge, which costs money at each call."""
    examples = [Example(str(n), f"question {n}", "f(x)") for n in range(100)]
    asked = []

    def judge(predictions, references, *, queries, contexts):
        asked.extend(predictions)
        return [
            None if query == "question 70" else gold * bool(prediction)
            for query, prediction in zip(queries, predictions, strict=True)
        ]

    gold = 1.0
    assert np.flatnonzero(~check_reward(make_reward(judge, SPEC), examples)).tolist() == [70]
    assert (asked.count("f(x)"), asked.count(None), asked.count("")) == (100, 8, 8)
    asked.clear()
    gold = 10.0
    with pytest.raises(ConfigError, match=r"gives 10 to its gold program on example 0 .*must give 1 \(8 of 8 examples"):
        check_reward(make_reward(judge, SPEC), examples)
    assert len(asked) == 8


def test_a_reward_may_have_a_minimum_of_its_own():
    class Strict:
        name, needs_llm, maximum, minimum = "strict", True, 1.0, -1.0

        def __call__(self, predictions, references, *, queries, contexts):
            return [1.0 if p == r else -1.0 for p, r in zip(predictions, references, strict=True)]

    assert check_reward(make_reward(Strict, SPEC), GOLD).all()
    Strict.maximum = -1.0
    with pytest.raises(ConfigError, match="must be above its minimum"):
        check_reward(make_reward(Strict, SPEC), GOLD)
    for Strict.maximum in ("1", None):
        with pytest.raises(ConfigError, match=f"reward 'strict': its maximum must be a number, not {Strict.maximum!r}"):
            make_reward({Strict: 1.0, "correctness": 1.0}, SPEC)


# ---------------------------------------------------------------- what goes wrong


def broken(on, error):
    def reward(predictions, references, *, queries, contexts):
        if on in queries:
            raise error
        return [1.0] * len(references)

    return make_reward(reward, SPEC)


def test_an_exception_names_its_example(caplog):
    examples = [Example(str(n), f"question {n}", "f(x)") for n in range(5)]
    with pytest.raises(RewardError) as caught:
        score(broken("question 3", KeyError("state")), ["f(x)"] * 5, examples, [[]] * 5)
    assert str(caught.value) == "reward 'reward' raised KeyError on example 3 ('question 3'): 'state'"
    assert isinstance(caught.value.__cause__, KeyError)
    assert "Traceback" in caplog.text


def test_an_exception_that_only_the_batch_raises_is_one_all_the_same():
    def reward(predictions, references, *, queries, contexts):
        if len(references) > 1:
            raise RuntimeError("too many")
        return [1.0]

    examples = [Example(str(n), f"question {n}", "f(x)") for n in range(3)]
    with pytest.raises(RewardError, match=r"raised RuntimeError on a batch of 3 \(first: 0\): too many"):
        score(make_reward(reward, SPEC), ["f(x)"] * 3, examples, [[]] * 3)


def test_errors_of_our_own_pass():
    with pytest.raises(InputError, match="ours"):
        score(broken("a", InputError("ours")), [None], [Example("1", "a", "f(x)")], [[]])


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", [1.0], 1j])
def test_what_is_no_score_stops(value):
    with pytest.raises(RewardError, match=r"on example 1 \('biggest state\?'\): neither a finite number nor None"):
        score(constant(value), [None, None], GOLD, [[], []])


def test_too_few_scores_stop():
    def reward(predictions, references, *, queries, contexts):
        return [1.0]

    with pytest.raises(RewardError, match="gave 1 scores for 2 answers"):
        score(make_reward(reward, SPEC), [None, None], GOLD, [[], []])
    mixed = make_reward({reward: 1.0, "correctness": 1.0}, SPEC)
    with pytest.raises(RewardError, match="scores for 2 answers"):
        score(mixed, [None, None], GOLD, [[], []])


def test_numbers_of_all_kinds_and_none():
    def reward(predictions, references, *, queries, contexts):
        return [True, np.float32(0.5), None, np.True_]

    got = score(make_reward(reward, SPEC), [None] * 4, [GOLD[0]] * 4, [[]] * 4)
    np.testing.assert_array_equal(got, [1.0, 0.5, math.nan, 1.0])


# ---------------------------------------------------------------- a reward of one's own


def test_by_module_and_name(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text(
        "class Long:\n"
        "    name, needs_llm, maximum = 'long', True, 1.0\n"
        "    def __call__(self, predictions, references, *, queries, contexts):\n"
        "        return [float(p == r) for p, r in zip(predictions, references)]\n"
        "def plain(predictions, references, *, queries, contexts):\n"
        "    return [float(len(c)) for c in contexts]\n"
        "plain.needs_llm = False\n"
        "number = 3\n"
        "class Broken:\n"
        "    def __init__(self):\n"
        "        raise OSError('no such\\nfile')\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    long, plain = (make_reward(f"rewards_of_mine:{name}", SPEC) for name in ("Long", "plain"))
    assert (long.name, long.needs_llm, call(long, ["a"], ["a"])) == ("long", True, [1.0])
    assert (plain.name, plain.needs_llm, call(plain, [None], ["a"], [GOLD])) == ("plain", False, [2.0])
    with pytest.raises(ConfigError, match="can't be called"):
        make_reward("rewards_of_mine:number", SPEC)
    with pytest.raises(ConfigError, match=r"reward 'rewards_of_mine:nothing' can't be loaded: AttributeError"):
        make_reward("rewards_of_mine:nothing", SPEC)
    with pytest.raises(ConfigError, match=r"reward 'rewards_of_mine:Broken' can't be loaded: OSError: no such file"):
        make_reward("rewards_of_mine:Broken", SPEC)
    with pytest.raises(ConfigError, match=r"can't be loaded: ModuleNotFoundError: No module named 'not_there'"):
        make_reward("not_there:reward", SPEC)


def test_an_unknown_name():
    with pytest.raises(
        ConfigError, match=r"reward: unknown 'corectness'; did you mean 'correctness'\? .*module:callable"
    ):
        make_reward("corectness", SPEC)
