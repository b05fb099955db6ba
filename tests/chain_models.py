"""Language models for tests of the chain, the pool that they are shown, and questions to it."""

from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from pydantic import Field

TABLES = ("river", "city", "state", "lake", "mountain")
ROWS = [
    {"source": f"{asks} {table}", "target": f"SELECT {what} FROM {table}", "n": f"{asks[0]}{table[0]}"}
    for asks, what in (("how many", "COUNT(*)"), ("name a", "name"))
    for table in TABLES
]
QUESTIONS = [f"how many {table} are there" for table in TABLES]
GOOD = "SELECT COUNT(*) FROM river"
BAD = "SELECT FROM ((river"


class Chat(BaseChatModel):
    """Answers the n-th attempt at a question with the n-th of its answers; keeps what it was asked."""

    answers: dict[str, list[Any]]
    asked: list[list[BaseMessage]] = Field(default_factory=list)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, *_: Any, **__: Any) -> ChatResult:
        self.asked.append(messages)
        texts = [str(message.content) for message in messages]
        question = next(text for text in texts if text in self.answers)
        answer = self.answers[question][sum(text.startswith("That is not a program") for text in texts)]
        if isinstance(answer, Exception):
            raise answer
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])

    @property
    def _llm_type(self) -> str:
        return "chat"


class Completion(BaseLLM):
    """Answers the prompts of its n-th call with the n-th function; keeps the calls."""

    answers: list[Any]
    calls: list[list[str]] = Field(default_factory=list)
    stops: list[Any] = Field(default_factory=list)

    def _generate(self, prompts: list[str], stop: Any = None, *_: Any, **__: Any) -> LLMResult:
        answer = self.answers[len(self.calls)]
        self.calls.append(prompts)
        self.stops.append(stop)
        return LLMResult(generations=[[Generation(text=answer(prompt))] for prompt in prompts])

    @property
    def _llm_type(self) -> str:
        return "completion"


def asked_in(prompt: str) -> str:
    return prompt.rpartition("Source: ")[2].removesuffix("\nTarget:")


def sql_for(prompt: str) -> str:
    return f" SELECT COUNT(*) FROM {asked_in(prompt).split()[2]}"


def fake(*answers: str) -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter(answers))
