"""Rewards by running programs: results compared, and whose fault it is where one can't be run."""

from fractions import Fraction

import pytest
from cities import city_database, rewards
from places import DATA
from rcr_trainer.data.examples import Example
from rcr_trainer.data.text2sql import text2sql_split
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards.ours import execution, make_reward
from rcr_trainer.rewards.reward import RewardError, check_reward, score

from langchain_rcr.databases.results import Result
from langchain_rcr.errors import InputError, ProgramError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec(language="sql:sqlite")


@pytest.fixture
def database(tmp_path):
    return city_database(tmp_path)


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    return make_reward("execution", SPEC, database=str(city_database(tmp_path_factory.mktemp("cities"))))


# ---------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("SELECT name FROM city", "select name from city", 1.0),
        ("SELECT name FROM city ORDER BY name DESC", "SELECT name FROM city", 1.0),  # gold doesn't order
        ("SELECT name FROM city ORDER BY name DESC", "SELECT name FROM city ORDER BY name", 0.0),
        ("SELECT name FROM city", "SELECT name FROM (SELECT name FROM city ORDER BY people)", 1.0),
        ("SELECT people FROM city", "SELECT DISTINCT people FROM city", 0.0),  # a multiset, no set
        ("SELECT people + 0.0 FROM city", "SELECT people FROM city", 1.0),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", 1.0),
        ("SELECT people, name FROM city", "SELECT name, people FROM city", 1.0),  # only the columns' order differs
        ("SELECT name FROM town", "SELECT name FROM city", 0.0),
        ("SELECT name FROM", "SELECT name FROM city", 0.0),
        ("", "SELECT name FROM city", 0.0),
        (None, "SELECT name FROM city", 0.0),
        ("-- nothing", "SELECT name FROM city", 0.0),
        ("SELECT name FROM city WHERE people > 9", "SELECT name FROM city WHERE people > 8", 1.0),  # both empty
        ("SELECT name FROM city", "SELECT name FROM town", None),  # gold can't be run
        ("SELECT name FROM city;", "SELECT name FROM city", 1.0),
        ("SELECT NULL", "SELECT area FROM city WHERE name = 'paris'", 1.0),
    ],
)
def test_execution_by_hand(reward, answer, gold, expected):
    assert rewards(reward, (answer, gold)) == [expected]


def test_questions_without_fields_name_none_of_many_databases(tmp_path):
    with pytest.raises(InputError, match="needs the field 'tenant'"):
        rewards(make_reward("execution", SPEC, database=f"{tmp_path}/{{tenant}}.sqlite"), ("SELECT 1", "SELECT 1"))


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class NoNumber(Fraction):
    def __float__(self):
        raise OverflowError("too large")


@pytest.mark.parametrize("value", [nested(900), nested(100_000), {"a": nested(2_000)}, Fraction(10**400), NoNumber(1)])
def test_what_can_t_be_compared_is_a_wrong_answer_and_stops_nothing(value):
    example = Example("7", "q", "gold")
    assert Result.of([(value,)]) is None
    reward = execution({"odd": [(value,)], "gold": [(1,)]}.__getitem__, ProgramSpec())
    assert list(score(reward, ["odd", "gold"], [example] * 2, [[]] * 2)) == [0.0, 1.0]
    assert rewards(reward, ("gold", "odd")) == [None]


# ---------------------------------------------------------------- an executor of one's own


def test_an_executor_runs_each_program_once():
    calls = []

    def run(program):
        calls.append(program)
        if program == "bad":
            raise ProgramError("bad")
        return [program.upper()]

    reward = execution(run, ProgramSpec())
    assert rewards(reward, ("a", "A"), ("b", "a"), ("bad", "a"), ("a", "bad"), ("A", "a")) == [1.0, 0.0, 0.0, None, 1.0]
    assert sorted(calls) == ["A", "a", "b", "bad"]


def test_an_executors_bug_is_no_score():
    def run(program):
        raise RuntimeError("connection lost")

    with pytest.raises(RewardError, match=r"RuntimeError on example 7 .*: connection lost"):
        score(make_reward("execution", SPEC, execute=run), ["a"], [Example("7", "q", "a")], [[]])


def test_an_executor_that_gives_an_iterator_of_rows_scores_nothing():
    reward = make_reward("execution", SPEC, execute=lambda program: iter([program]))
    with pytest.raises(ConfigError, match=r"can score none of the 1 gold programs: .*the executor the right one"):
        check_reward(reward, [Example("7", "q", "a")])


def test_an_executor_by_name(tmp_path, monkeypatch):
    (tmp_path / "runs_programs.py").write_text("def run(program):\n    return len(program)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    reward = make_reward("execution", ProgramSpec(), execute="runs_programs:run")
    assert rewards(reward, ("ab", "cd"), ("a", "cd")) == [1.0, 0.0]


def test_either_a_database_or_an_executor(database):
    for options in ({}, {"database": str(database), "execute": len}):
        with pytest.raises(ConfigError, match="needs either"):
            make_reward("execution", SPEC, **options)


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "geography_sql").is_dir(), reason="the Geography database is not there (RCR_DATA)")
def test_geographys_own_queries_run():
    split = text2sql_split(DATA / "geography_sql" / "geography.json")
    reward = make_reward("execution", SPEC, database=str(DATA / "geography_sql" / "geography.sqlite"))
    assert check_reward(reward, split.train).mean() > 0.95
