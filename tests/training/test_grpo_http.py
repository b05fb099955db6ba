"""GRPO with a language model that is asked over HTTP, on this machine: rewards, programs of several lines, the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import pytest
from openai_server import OpenAIServer, echo_of
from places import MODEL
from pydantic import SecretStr
from rcr_trainer import pipeline
from rcr_trainer.runs.folder import Run
from rcr_trainer.settings import Settings
from reports import logged

from langchain_rcr import SequentialCompositionalRetriever, semantic_parsing_chain
from langchain_rcr.policy.prompt import APPENDIX_D

if TYPE_CHECKING:
    from rcr_trainer.llm.local import LocalLM

pytestmark = pytest.mark.slow

PARSER = MODEL
COVR = {"split": "110", "train_size": 14, "test_size": 2, "dev_size": 6}


def rows(folder: Path, data: dict[str, Any], llm: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """What a tiny GRPO run logs."""
    values = {
        "output": folder,
        "threads": 1,
        "data": data,
        "model": {"family": "lexical", "dim": 8},
        "sft": {"epochs": 1, "exclude_own_program": False},
        "grpo": {
            "enabled": True,
            "epochs": 1,
            "batch_size": 4,
            "group_size": 2,
            "lr": 0.01,
            "exclude_own_program": False,
        },
        "llm": {**llm, "cache": folder.with_suffix(".sqlite")},
        **sections,
    }
    run = pipeline.run(Settings.model_validate(values), until="grpo")
    return logged(run.path, "grpo")


def without(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith(names)} for row in rows]


# ---------------------------------------------------------------- a real language model


@pytest.fixture(scope="module")
def parser() -> LocalLM:
    if not (PARSER / "model.safetensors").exists():
        pytest.skip("the parser's weights are not in this checkout")
    from rcr_trainer.llm.local import LocalLM

    return LocalLM(model=str(PARSER), max_new_tokens=64, batch_size=1, device="cpu")


@pytest.fixture(scope="module")
def expected(parser: LocalLM, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    llm = {"kind": "local", "model": str(PARSER), "max_tokens": 64, "batch_size": 1, "device": "cpu"}
    found = rows(tmp_path_factory.mktemp("local") / "run", COVR, llm)
    # Otherwise this would test less than it says.
    assert 0 < found[1]["reward"] < 1
    return found


@pytest.fixture(scope="module")
def answer(parser: LocalLM) -> Callable[[str], tuple[str, str]]:
    """What the model says to a prompt, and why it stopped; found once, for one prompt at a time."""
    alone = Lock()

    @cache
    def answer(prompt: str) -> tuple[str, str]:
        with alone:
            generation = parser.generate([prompt], stop=list(APPENDIX_D.stop)).generations[0][0]
        return generation.text, (generation.generation_info or {})["finish_reason"]

    return answer


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_over_http_the_rewards_are_those_of_the_same_model_at_home(
    kind: str, answer: Callable[[str], tuple[str, str]], expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    with OpenAIServer(answer) as server:
        llm = {"kind": kind, "model": "covr-parser", "base_url": server.base_url, "max_tokens": 64}
        found = rows(tmp_path / "run", COVR, llm)
    assert without(found, "llm_", "time") == without(expected, "llm_", "time")
    # The two count calls and answers alike, too.
    same = ("llm_nominal", "llm_distinct", "llm_cached", "llm_paid", "llm_no_program")
    kept = [[{k: v for k, v in row.items() if k.startswith(same)} for row in each] for each in (found, expected)]
    assert kept[0] == kept[1]
    assert len(server.paid) == len(set(server.paid)) == found[-1]["llm_paid_calls"]


def test_likelihoods_over_http_are_those_of_the_same_model_at_home(parser: LocalLM, tmp_path: Path) -> None:
    reward = {"names": ["likelihood"]}
    home = rows(tmp_path / "home", COVR, {"kind": "local", "model": str(PARSER), "device": "cpu"}, reward=reward)
    with OpenAIServer(echo=echo_of(str(PARSER))) as server:
        llm = {"kind": "completion", "model": "covr-parser", "base_url": server.base_url}
        away = rows(tmp_path / "away", COVR, llm, reward=reward)
        assert len(server.paid) == len(set(server.paid)) == away[-1]["llm_paid_calls"]
    assert [row["reward"] for row in away[1:]] == pytest.approx([row["reward"] for row in home[1:]], abs=1e-4)
    assert 0 < home[1]["reward"] < 1


# ---------------------------------------------------------------- programs of several lines


@pytest.fixture
def queries(tmp_path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """SQL in files, three lines a program; and question → program."""
    programs = {f"names in {n} ?": f"SELECT name\nFROM city\nWHERE state = {n}" for n in range(24)}
    lines = [json.dumps({"source": source, "target": target}) for source, target in programs.items()]
    (tmp_path / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text(lines[0], encoding="utf-8")
    files = {"train": tmp_path / "train.jsonl", "test": tmp_path / "test.jsonl"}
    return {"task": "files", **files, "dev_size": 4}, programs


def question(prompt: str) -> str:
    return prompt.rpartition("Source: ")[2].removesuffix("\nTarget:")


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("completion", " {}\n\nSource: and more\nTarget: SELECT 1"),
        ("completion", " {}"),
        ("chat", "Here you are:\n```sql\n{}\n```\nThis selects names."),
        ("chat", "{}"),
    ],
)
def test_sql_of_several_lines_arrives_whole(
    kind: str, form: str, queries: tuple[dict[str, Any], dict[str, str]], tmp_path: Path
) -> None:
    data, programs = queries
    with OpenAIServer(lambda prompt: form.format(programs[question(prompt)])) as server:
        llm = {"kind": kind, "model": "m", "base_url": server.base_url}
        found = rows(tmp_path / "run", data, llm, program={"language": "sql:sqlite"}, reward={"names": ["correctness"]})
        stop = None if kind == "chat" else ["\nSource:"]
        assert all(request.body.get("stop") == stop for request in server.requests)
    assert [row["reward"] for row in found[1:]] == [1.0] * len(found[1:])
    assert found[-1]["dev_reward"] == 1.0


def test_training_evaluation_and_a_chain_from_the_checkpoint_ask_with_the_prompt_of_the_settings(
    queries: tuple[dict[str, Any], dict[str, str]], tmp_path: Path
) -> None:
    from langchain_openai import ChatOpenAI

    data, programs = queries
    for path in (data["train"], data["test"]):
        examples = [json.loads(line) | {"schema": "city(name, state)"} for line in path.read_text().splitlines()]
        path.write_text("\n".join(map(json.dumps, examples)), encoding="utf-8")
    prompt = {"name": "chat", "system": "Tables: {schema}", "question": "{source} (SQL)"}
    with OpenAIServer(lambda prompt: "SELECT 1") as server:
        server.answer = lambda prompt: programs[prompt.splitlines()[-1].removesuffix(" (SQL)")]
        llm = {"kind": "chat", "model": "m", "base_url": server.base_url}
        options: dict[str, Any] = {
            "prompt": prompt,
            "program": {"language": "sql"},
            "reward": {"names": ["correctness"]},
        }
        rows(tmp_path / "run", data, llm, **options, evaluation={"answers": True, "selectors": ["random"], "k": 2})
        grpo = len(server.requests)
        pipeline.run(Run.open(tmp_path / "run").config, resume=True)
        evaluated = len(server.requests)
        assert 0 < grpo < evaluated
        chain = semantic_parsing_chain(
            ChatOpenAI(model="m", base_url=server.base_url, api_key=SecretStr("x"), temperature=0),
            SequentialCompositionalRetriever.from_pretrained(tmp_path / "run"),
            "sql",
        )
        chain.invoke({"source": "names in 3 ?", "schema": "city(name, state)"})
    for request in server.requests:
        system, *turns = request.body["messages"]
        assert system == {"role": "system", "content": "Tables: city(name, state)"}
        assert {turn["role"] for turn in turns[1::2]} == {"assistant"}
        assert all(turn["content"].endswith(" ? (SQL)") for turn in turns[::2])
    assert len(server.requests) == evaluated + 1


# ---------------------------------------------------------------- the log


def test_the_log_counts_calls_tokens_money_and_answers_without_a_program(tmp_path: Path) -> None:
    faults: Iterator[str | None] = iter(["refusal", "429:0.01", "filter", "length", "empty", "500", "no_usage"])
    with OpenAIServer(lambda prompt: "exists ( find ( cat ) )") as server:
        server.fault_of = lambda request: next(faults, None)
        llm = {"kind": "chat", "model": "m", "base_url": server.base_url, "concurrency": 1, "backoff": 0.01}
        found = rows(tmp_path / "run", COVR, {**llm, "price_prompt": 2, "price_completion": 8})
    figures = found[-1]
    nominal = 8 * 2 + 2 * 6
    assert figures["llm_nominal_calls"] == nominal
    assert figures["llm_distinct_calls"] == len(set(server.paid)) == figures["llm_paid_calls"]
    assert figures["llm_distinct_share"] == round(figures["llm_distinct_calls"] / nominal, 4) < 1
    assert 0 <= figures["llm_cached"] <= nominal - figures["llm_distinct_calls"]
    # All faults hit the first evaluation.
    first = found[0]
    assert {name: n for name, n in first.items() if name.startswith(("llm_retries", "llm_no_program"))} == {
        "llm_retries_429": 1,
        "llm_retries_500": 1,
        "llm_no_program_refused": 2,
        "llm_no_program_truncated": 1,
        "llm_no_program_empty": 1,
    }
    reads, writes = figures["llm_prompt_tokens"], figures["llm_completion_tokens"]
    assert figures["llm_money"] == pytest.approx((2 * reads + 8 * writes) / 1e6)
    assert min(reads, writes) > 0
    assert (first["llm_nominal_calls"], first["llm_counted"]) == (6, 1)
