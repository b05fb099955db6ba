"""The plain and learned selectors of a whole run: what each needs, and what it costs."""

from contextlib import closing

import pytest
from demo_run import exact, report
from openai_server import OpenAIServer
from places import MODEL
from rcr_trainer import baselines, cli
from rcr_trainer.evaluation import plain
from rcr_trainer.llm.cache import AnswerCache
from rcr_trainer.runs.layers import load_config
from rcr_trainer.runs.tasks import divide, load_split
from tiny_bert import tiny_bert

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("demo")]

PARSER = MODEL


def test_selectors_without_embeddings_cost_nothing(here):
    flags = {"evaluation.selectors": "bm25,dense,mmr,dpp,set_bsr"}

    def count(**more):
        config = load_config(here / "demo.yaml", flags | more)
        return plain.count_selectors(config, divide(config, load_split(config.data, config.seed)))

    assert count() == 2
    assert count(**{"evaluation.embeddings": "some-model"}) == 6
    assert count(**{"evaluation.embeddings": "langchain:module:make"}) == 5


def test_the_paragraph_at_the_end(capsys, here):
    flags = ["--data.test_size=40", "--evaluation.selectors=random,bm25,oracle"]
    assert cli.main(["run", "demo.yaml", *flags]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    (paragraph,) = (" ".join(part.split()) for part in out.split("\n\n") if part.startswith("The oracle"))
    found = report()
    assert paragraph == found.advice
    assert f"covers {found.selectors['oracle'].coverage:.1f} % of what they need in 4 picks" in paragraph
    assert f"needs for {found.selectors['rcr'].full_coverage:.1f} % of 40 questions" in paragraph
    assert "95 % interval" in paragraph
    assert out.rstrip().endswith("run folder: runs/demo")

    assert cli.main(["evaluate", "runs/demo", "--split=dev"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "8 questions with 8 different programs are too few to tell whether rcr is worth deploying" in out
    assert "settings were chosen on these development queries" in out


def test_selectors_may_compare_the_input_embeddings_of_a_model(here):
    folder = tiny_bert(here / "bert", words="what is the number of animal dog cat", positions=64)
    flags = ["--evaluation.selectors=dense,set_bsr", f"--evaluation.embeddings=static:{folder}"]
    assert cli.main(["run", "demo.yaml", *flags]) == 0
    assert list(report().selectors) == ["rcr", "dense", "set_bsr"]


def test_every_selector_in_a_whole_run(here):
    words = "what is the number of that are and color to a animal dog cat"
    folder = tiny_bert(here / "bert", words=words, positions=64)
    names = ",".join(baselines.BASELINES)
    flags = [f"--evaluation.selectors={names}", f"--evaluation.embeddings={folder}", "--evaluation.answers=false"]
    flags += [f"--evaluation.bert={folder}", f"--evaluation.contriever={folder}"]
    flags += ["--llm.kind=local", f"--llm.model={PARSER}", "--baselines.queries=5", "--baselines.epochs=1"]
    flags += ["--baselines.candidates=6", "--baselines.sets=3"]
    assert cli.main(["run", "demo.yaml", *flags]) == 0
    found = report()
    assert list(found.selectors) == ["rcr", *names.split(",")]
    assert {name: choice.chosen_on for name, choice in found.trade_offs.items()} == dict.fromkeys(
        ("mmr", "dpp", "knn_structures", "dail_sql"), "dev"
    )
    assert found.left_out == {}
    # The same model, the same questions.
    assert found.selectors["bert"].coverage == found.selectors["contriever"].coverage


def test_set_bsr_compares_the_token_vectors_of_the_retriever_s_own_model(here):
    base = f"static:{tiny_bert(here / 'bert', words='what is the number of that are and color to a dog cat')}"
    flags = ["--model.family=structure", f"--model.base={base}", "--evaluation.selectors=dense,set_bsr"]
    assert cli.main(["run", "demo.yaml", *flags]) == 0
    assert list(report().selectors) == ["rcr", "dense", "set_bsr"]


def test_a_model_that_a_selector_brings_and_that_is_not_there_is_named(capsys):
    assert cli.main(["run", "demo.yaml", "--evaluation.selectors=[contriever,bm25]"]) == 0
    assert list(report().selectors) == ["rcr", "bm25"]
    assert report().left_out["contriever"].startswith("model 'facebook/contriever' can't be loaded")
    assert "facebook/contriever" in capsys.readouterr().out


# ---------------------------------------------------------------- selectors that learn from it

LEARNED = ["--evaluation.selectors=[bm25,epr,se2_tri]", "--baselines.queries=10", "--baselines.candidates=4"]
LEARNED += ["--baselines.epochs=1", "--evaluation.answers=false"]


@pytest.mark.parametrize("llm", [[], ["--llm.kind=chat", "--llm.model=m"]])
def test_selectors_that_learn_say_in_one_line_that_no_language_model_scores(capsys, here, llm):
    assert cli.main(["run", "demo.yaml", *LEARNED, *llm]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("rcr-train: error: evaluation.selectors: epr, se2_tri learn from a scoring language model: ")
    assert not (here / "runs").exists()


def test_selectors_learn_from_a_local_model_and_pay_once(capsys, here):
    llm = ["--llm.kind=local", f"--llm.model={PARSER}", "--llm.device=cpu"]
    assert cli.main(["run", "demo.yaml", "--dry-run", *LEARNED, *llm]) == 0
    assert "baselines: at most 200 texts scored, to learn from" in capsys.readouterr().out
    kept = []
    for _ in range(2):
        assert cli.main(["run", "demo.yaml", "--overwrite", *LEARNED, *llm]) == 0
        assert list(report().selectors) == ["rcr", "bm25", "epr", "se2_tri"]
        with closing(AnswerCache(here / "runs/answers.sqlite")) as cache:
            kept.append(len(cache))
    # EPR's candidates, and those of four steps of se², a few of which are the same.
    assert 180 < kept[0] == kept[1] <= 10 * 4 + 10 * 4 * 4


def test_a_budget_that_ends_learning_leaves_selectors_out_and_a_larger_one_brings_them_in(here):
    llm = ["--llm.kind=local", f"--llm.model={PARSER}", "--llm.device=cpu"]
    assert cli.main(["run", "demo.yaml", *LEARNED, *llm, "--llm.budget_calls=100"]) == 0
    assert list(report().selectors) == ["rcr", "bm25", "epr"]
    assert report().left_out["se2_tri"].startswith("the budget of 100 calls could be exceeded by the next call")
    assert report().unpaid
    assert cli.main(["run", "demo.yaml", "--resume", *LEARNED, *llm, "--llm.budget_calls=200"]) == 0
    assert list(report().selectors) == ["rcr", "bm25", "epr", "se2_tri"]
    assert not report().unpaid


def test_a_server_that_scores_no_text_says_so_first_and_costs_the_comparison_only_who_would_learn_from_it(capsys):
    with OpenAIServer() as server:
        llm = ["--llm.kind=completion", "--llm.model=m", f"--llm.base_url={server.base_url}"]
        assert cli.main(["run", "demo.yaml", *LEARNED[:-1], *llm, "--evaluation.answers=true"]) == 0
        asked = [bool({"echo", "grammar"} & request.body.keys()) for request in server.requests]
    # Before training, by both ways; at the comparison, once for both selectors; then the answers.
    assert asked[:4] == [True] * 4
    assert not any(asked[4:])
    assert list(report().selectors) == ["rcr", "bm25"]
    assert None not in exact().values()
    assert list(report().left_out) == ["epr", "se2_tri"]
    assert "'m' can't score: its server heeds neither echo" in report().left_out["epr"]
    said = capsys.readouterr().err
    assert said.index("epr, se2_tri will be left out of the comparison: 'm' can't score") < said.index("sft …")
