"""Every prompt once, in order, within the budget: with LangChain models that need no server."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import threading
import time
import warnings
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import LLM, BaseLLM
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.outputs import Generation, LLMResult
from pydantic import Field
from rcr_trainer.errors import DataError
from rcr_trainer.llm.cache import Answer, AnswerCache, Use
from rcr_trainer.llm.client import Calls
from rcr_trainer.llm.faults import BudgetExceeded, Fault, LLMError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.settings import LLMSettings

from langchain_rcr.policy.prompt import Conversation


class Echo(BaseLLM):
    """Answers a prompt by itself in capitals; asynchronous, and counts."""

    delay: float = 0.0
    label: str = "echo"
    asked: Counter[str] = Field(default_factory=Counter, exclude=True)
    running: int = Field(0, exclude=True)
    peak: int = Field(0, exclude=True)
    batches: list[int] = Field(default_factory=list, exclude=True)
    fail: dict[str, Exception] = Field(default_factory=dict, exclude=True)

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        raise NotImplementedError

    async def _agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        self.asked.update(prompts)
        self.batches.append(len(prompts))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.running -= 1
        for prompt in prompts:
            if prompt in self.fail:
                raise self.fail[prompt]
        info = {"prompt_tokens": 5, "completion_tokens": 1}
        return LLMResult(generations=[[Generation(text=prompt.upper(), generation_info=info)] for prompt in prompts])


class Slow(LLM):
    """Knows no async."""

    delay: float = 0.05

    @property
    def _llm_type(self) -> str:
        return "slow"

    def _call(self, prompt: str, *args: Any, **kwargs: Any) -> str:
        time.sleep(self.delay)
        return prompt.upper()


def wrap(model: Any, *, cache_path: Path | None = None, account: str = "", **settings: Any) -> LanguageModel:
    identity = {"named": "a model"}
    return LanguageModel(
        model, LLMSettings(**{"max_tokens": 10, **settings}), cache_path=cache_path, identity=identity, account=account
    )


def texts(answers: list[Answer]) -> list[str | None]:
    return [answer.text for answer in answers]


def test_answers_keep_the_order_and_identical_prompts_are_asked_once() -> None:
    echo = Echo()
    with wrap(echo) as llm:
        assert texts(llm.generate(["b", "a", "b", "c", "b"])) == ["B", "A", "B", "C", "B"]
        assert texts(llm.generate(["a", "d"])) == ["A", "D"]
        assert echo.asked == {"a": 1, "b": 1, "c": 1, "d": 1}
        assert (llm.stats.nominal, llm.stats.distinct, llm.stats.paid, llm.stats.cached) == (7, 4, 4, 1)
        assert llm.stats.figures()["distinct_share"] == round(4 / 7, 4)
        assert llm.stats.used == Use(4, 20, 4)
        assert llm.generate([]) == []


def test_answers_outlive_the_object(tmp_path: Path) -> None:
    with wrap(Echo(), cache_path=tmp_path / "a.sqlite") as llm:
        assert llm.generate(["a"]) == [Answer("A", "", 5, 1, program="A")]
    echo = Echo()
    with wrap(echo, cache_path=tmp_path / "a.sqlite") as llm:
        assert llm.generate(["a", "b"]) == [
            Answer("A", "", 5, 1, cached=True, program="A"),
            Answer("B", "", 5, 1, program="B"),
        ]
    assert echo.asked == {"b": 1}


def booked(path: Path) -> Use:
    """What the account `run` has spent, as the file of answers has it."""
    with closing(AnswerCache(path)) as kept:
        return kept.spent("run")


class Odd(Echo):
    """Answers with half a surrogate pair, and reports what no model can have read."""

    async def _agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        self.asked.update(prompts)
        info = {"prompt_tokens": 10**30, "completion_tokens": -1}
        return LLMResult(generations=[[Generation(text="f(\ud800)", generation_info=info)] for _ in prompts])


def test_any_models_odd_answers_are_kept_and_booked(tmp_path: Path) -> None:
    odd = Odd()
    for _ in range(2):
        with wrap(odd, cache_path=tmp_path / "a.sqlite", account="run", kind="local") as llm:
            assert texts(llm.generate(["a", "b"])) == ["f(\ufffd)"] * 2
            assert booked(tmp_path / "a.sqlite") == Use(2, 2, 12)  # the bytes of prompts and answers
    assert odd.asked == {"a": 1, "b": 1}


@pytest.mark.slow
def test_calls_run_at_the_same_time_up_to_the_cap() -> None:
    echo = Echo(delay=0.2)
    with wrap(echo, concurrency=7) as llm:
        llm.generate([f"p{n}" for n in range(15)])
        assert echo.peak == llm.stats.peak == 7


@pytest.mark.slow
def test_models_without_async_run_at_the_same_time_too() -> None:
    with wrap(Slow(delay=0.5), concurrency=40) as llm:
        begin = time.monotonic()
        assert texts(llm.generate([f"p{n}" for n in range(40)])) == [f"P{n}" for n in range(40)]
        assert time.monotonic() - begin < 40 * 0.5 / 2


def test_batches_go_to_the_model_together() -> None:
    echo = Echo()
    with wrap(echo, kind="local", batch_size=4) as llm:
        prompts = ["ccc", "a", "bb", "dddd", "a", "eeeee"]
        assert texts(llm.generate(prompts)) == [prompt.upper() for prompt in prompts]
        assert set(echo.asked.values()) == {1}
        assert (sorted(echo.batches), llm.stats.paid) == ([1, 4], 5)


def test_a_chat_model() -> None:
    with wrap(FakeListChatModel(responses=["f ( x )\nSource: more"]), stop=["\nSource:"]) as llm:
        answer = llm.generate(["Source: a\nTarget:"])[0]
        assert answer.text == "f ( x )"
        assert answer.prompt_tokens > 0
        assert llm.stats.counted == 1


def test_an_instruction_precedes_the_prompt() -> None:
    echo = Echo()
    with wrap(echo) as llm:
        llm.generate([Conversation("Parse.", ("a",))])
    assert list(echo.asked) == ["Parse.\n\na"]


def test_what_is_sent_along_parts_the_cache_and_so_does_the_identity(tmp_path: Path) -> None:
    def paid(identity: str = "echo", **settings: Any) -> int:
        file = tmp_path / "a.sqlite"
        with LanguageModel(Echo(), LLMSettings(**settings), cache_path=file, identity={"named": identity}) as llm:
            llm.generate(["a"])
            return llm.stats.paid

    assert paid() == 1
    assert paid(concurrency=3, timeout=5) == 0
    assert paid("another") == 1
    assert paid(stop=["x"]) == 1
    assert paid() == 0


def test_a_budget_of_calls_stops_before_the_next_and_keeps_what_is_paid(tmp_path: Path) -> None:
    prompts = [f"p{n}" for n in range(8)]
    echo = Echo(delay=0.01)
    with wrap(echo, cache_path=tmp_path / "a.sqlite", budget_calls=5, concurrency=3) as llm:
        with pytest.raises(BudgetExceeded, match=r"5 calls.*spent: 5 calls, 30 tokens"):
            llm.generate(prompts)
        asked = list(echo.asked)  # of calls at the same time any may come first
        assert len(asked) == 5
        assert texts(llm.generate(asked)) == [prompt.upper() for prompt in asked]
        assert llm.stats.used == Use(5, 25, 5)
    with wrap(echo, cache_path=tmp_path / "a.sqlite") as llm:
        assert texts(llm.generate(prompts)) == [prompt.upper() for prompt in prompts]
    assert set(echo.asked.values()) == {1}


def test_running_calls_are_waited_for_before_a_budget_of_tokens_stops() -> None:
    """A prompt of 5 bytes and 10 tokens of answer are set aside, 5 + 1 used.

    Two calls fit into 40 (30 set aside). After the first two 12 are spent; the third makes 18, the fourth 24, the
    fifth 30: then 30 + 15 is over 40.
    """
    echo = Echo(delay=0.01)
    with wrap(echo, budget_tokens=40, concurrency=8) as llm, pytest.raises(BudgetExceeded, match="40 tokens"):
        llm.generate([f"{n:05}" for n in range(9)])
    assert sum(echo.asked.values()) == 5
    assert echo.peak == 2
    assert llm.stats.used == Use(5, 25, 5)


def test_a_budget_of_money() -> None:
    # A call takes at most 5 · 1 + 10 · 4 = 45 dollars a million, and comes to 5 + 4 = 9.
    echo = Echo()
    with (
        wrap(echo, budget_money=54e-6, price_prompt=1, price_completion=4, concurrency=1) as llm,
        pytest.raises(BudgetExceeded, match=r"budget of \$0.0001 could"),
    ):
        llm.generate([f"{n:05}" for n in range(9)])
    assert sum(echo.asked.values()) == 2
    assert llm.stats.money == pytest.approx(18e-6)


def test_a_budget_holds_over_restarts_by_account(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_path": tmp_path / "a.sqlite", "account": "run", "budget_calls": 2}
    with wrap(Echo(), **options) as llm:
        llm.generate(["a", "b"])
    echo = Echo()
    with wrap(echo, **options) as llm:
        assert booked(tmp_path / "a.sqlite") == Use(2, 10, 2)
        assert texts(llm.generate(["a"])) == ["A"]
        with pytest.raises(BudgetExceeded):
            llm.generate(["c"])
    assert not echo.asked
    with wrap(echo, **{**options, "account": "another"}) as llm:
        llm.generate(["c"])


def test_an_estimate_before_the_prompts_are_known() -> None:
    echo = Echo()
    with wrap(echo, price_prompt=1e6, price_completion=2e6) as llm:
        estimate = llm.estimate_calls(100, "foür")
        assert (estimate.use, estimate.money, estimate.exact) == (Use(100, 500, 1000), 2500, False)
    assert not echo.asked
    with LanguageModel(Echo(), count_tokens=lambda text: 7) as llm:
        estimate = llm.estimate_calls(2, "a")
        assert (estimate.use.prompt_tokens, estimate.money, estimate.exact) == (14, None, True)


def test_one_hopeless_prompt_stops_the_rest_and_keeps_what_ran() -> None:
    echo = Echo(delay=0.02)
    echo.fail["p1"] = RuntimeError("a bug")
    with wrap(echo, concurrency=3) as llm:
        with pytest.raises(LLMError, match="RuntimeError: a bug") as caught:
            llm.generate([f"p{n}" for n in range(50)])
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert sum(echo.asked.values()) <= 6
        del echo.fail["p1"]
        assert texts(llm.generate(["p0", "p1", "p2"])) == ["P0", "P1", "P2"]
    assert {prompt for prompt, count in echo.asked.items() if count > 1} == {"p1"}


def test_a_bug_in_counting_stops_and_leaves_the_place_to_others() -> None:
    def count(text: str) -> int:
        if text == "BAD":
            raise RuntimeError("no such token")
        return len(text)

    class Silent(Echo):
        async def _agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
            return LLMResult(generations=[[Generation(text=prompt.upper())] for prompt in prompts])

    with LanguageModel(Silent(), LLMSettings(concurrency=1), count_tokens=count) as llm:
        with pytest.raises(LLMError, match="no such token"):
            llm.generate(["bad"])
        assert texts(llm.generate(["a"])) == ["A"]


def test_an_attempt_has_an_end() -> None:
    echo = Echo(delay=30)
    with wrap(echo, timeout=0.05, attempts=2, backoff=0.01) as llm, pytest.raises(LLMError, match="in 2 attempts"):
        llm.generate(["a"])
    assert echo.asked == {"a": 2}
    assert llm.stats.retries == {"timeout": 1}
    # Both may have been charged: the worst case is booked.
    assert llm.stats.used == Use(2, 2, 20)


def test_a_call_that_hangs_while_others_are_answered_leaves_as_many_at_a_time() -> None:
    class HangsOnce(Echo):
        async def _agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
            self.delay = 60 if prompts == ["a"] and not self.asked["a"] else 0
            return await super()._agenerate(prompts, *args, **kwargs)

    hanging = HangsOnce()
    with wrap(hanging, timeout=1, concurrency=4, backoff=0) as llm:
        llm.generate(["a", *map(str, range(20))])
        assert (hanging.asked["a"], llm._calls._most) == (2, 4)


def test_a_limit_of_a_minute_that_names_no_time_is_outlasted(monkeypatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def back_off(calls: Calls, reason: str, attempts: int) -> None:
        for attempt in range(1, attempts):
            await calls._back_off(Fault("again", reason, LLMError("too many")), attempt)

    with wrap(Echo()) as llm, monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        asyncio.run(back_off(llm._calls, "429", LLMSettings().attempts))
        assert 60 < sum(waits) < 120
        waits.clear()
        asyncio.run(back_off(llm._calls, "500", 4))
        for wait, doubled in zip(waits, (1, 2, 4), strict=True):
            assert 0.5 <= wait / (doubled * llm._calls._settings.backoff) <= 1


def claimed(cache: Path) -> bool:
    """Whether other processes are kept from asking for some answer."""
    import fcntl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, for forking with threads
        child = os.fork()
    if not child:
        with Path(f"{cache}.lock").open("ab") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os._exit(1)
            os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def test_after_ctrl_c_running_calls_end_and_are_kept(tmp_path: Path) -> None:
    echo = Echo(delay=1.0)
    with wrap(echo, cache_path=tmp_path / "a.sqlite", concurrency=2) as llm:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c", "d"])
        time.sleep(0.1)
        assert claimed(tmp_path / "a.sqlite")
    assert not claimed(tmp_path / "a.sqlite")
    assert echo.asked == {"a": 1, "b": 1}
    with wrap(echo, cache_path=tmp_path / "a.sqlite") as llm:
        assert texts(llm.generate(["a", "b"])) == ["A", "B"]
    assert echo.asked == {"a": 1, "b": 1}


def test_a_closed_model_says_so() -> None:
    llm = wrap(Echo())
    llm.close()
    llm.close()
    with pytest.raises(LLMError, match="closed"):
        llm.generate(["a"])


def test_an_answer_that_cannot_be_kept_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with wrap(Echo(), cache_path=tmp_path / "a.sqlite") as llm:
        llm._cache._database.execute("PRAGMA query_only = 1")
        with pytest.raises(DataError, match=r"a\.sqlite can't be used"):
            llm.generate(["a", "b"])
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]  # no traceback for the second


@pytest.mark.parametrize(("useful", "stops"), [(0, True), (24, True), (25, False)])
def test_a_model_of_whose_first_answers_over_half_are_no_programs_is_given_up(useful: int, stops: bool) -> None:
    class Prose(Echo):
        async def _agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
            self.asked.update(prompts)
            texts = ["f(x)" if int(prompt[1:]) < useful else "Sorry, (I can't" for prompt in prompts]
            return LLMResult(generations=[[Generation(text=text)] for text in texts])

    prose = Prose()
    with wrap(prose) as llm:
        if stops:
            with pytest.raises(LLMError) as raised:
                llm.generate([f"p{n}" for n in range(600)])
            message = str(raised.value)
            assert f"{50 - useful} of the first 50 answers of 'Prose' hold no program that parses as 'func" in message
            assert "The end of a prompt: 'p49'; its answer: \"Sorry, (I can't\"" in message
            assert len(message.splitlines()) == 1
            assert len(prose.asked) == 50
        else:
            assert len(llm.generate([f"p{n}" for n in range(60)])) == 60
            llm.generate([f"q{n}" for n in range(60)])
            assert len(prose.asked) == 120


def test_the_random_numbers_of_the_caller_are_left_alone() -> None:
    import random

    random.seed(7)
    expected = random.random()
    random.seed(7)
    echo = Echo(delay=30)
    with wrap(echo, timeout=0.01, attempts=2, backoff=0.01) as llm, pytest.raises(LLMError):
        llm.generate(["a"])
    assert random.random() == expected


def test_calls_are_halved_once_for_those_that_ran_out_of_time_together() -> None:
    async def halved(calls: Calls) -> None:
        together = [await calls._reserve(Use(1)) for _ in range(5)]
        for began in together:
            calls._halve(began)
        assert calls._most == 2
        for _ in together:
            await calls._book({}, Use(1), Use())
        first, second = await calls._reserve(Use(1)), await calls._reserve(Use(1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls._reserve(Use(1)), 0.01)
        calls._halve(first)
        calls._halve(second)
        assert calls._most == 1
        calls._halve(math.inf)  # one is the least
        assert calls._most == 1

    with wrap(Echo(), concurrency=5) as llm:
        asyncio.run(halved(llm._calls))
