"""`Prompt`: its texts byte for byte, the same in training and serving, and kept with a checkpoint."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseLLM, FakeListChatModel, FakeListLLM
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult, Generation, LLMResult
from pydantic import Field
from rcr_trainer.llm.client import Client
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.server import Scored
from rcr_trainer.llm.settings import LLMSettings
from toys import lexical

from langchain_rcr import (
    CheckpointError,
    InputError,
    Item,
    SequentialCompositionalRetriever,
    TriEncoder,
    semantic_parsing_chain,
)
from langchain_rcr.chains.few_shot import chat_few_shot_prompt, few_shot_prompt
from langchain_rcr.policy.manifest import MANIFEST, seal
from langchain_rcr.policy.prompt import APPENDIX_D, Conversation, Prompt

PICKS = [Item("how many {x}", "count(x)"), Item("b\nc", '{"d": {}}')]
TEXT = 'Source: how many {x}\nTarget: count(x)\nSource: b\nc\nTarget: {"d": {}}\nSource: which {one}?\nTarget:'
ROWS = [{"source": item.source, "target": item.target} for item in PICKS]
VARIED = {
    "appendix_d": Prompt(),
    "system": Prompt(system="Parse {{these}}.", prefix="First:"),
    "no system": Prompt(system=""),
    "sql": Prompt(name="sql", db_schema="CREATE TABLE {t} (a);", suffix="Dialect: {dialect}"),
    "comments": Prompt(question="-- {source}", answer="{target}\n"),
    "chat": Prompt(name="chat", system="Schema: {schema}", suffix="Dialect: {dialect}"),
}
FIELDS = {"schema": "T({a})", "dialect": "{sqlite}"}


def test_the_papers_prompt_byte_for_byte() -> None:
    assert APPENDIX_D.text(PICKS[:1], "q") == "Source: how many {x}\nTarget: count(x)\nSource: q\nTarget:"
    assert APPENDIX_D.request(PICKS, "which {one}?") == TEXT
    assert (APPENDIX_D.stop, APPENDIX_D.continuation("x")) == (("\nSource:",), " x\n")


@pytest.mark.parametrize(
    ("model", "answered", "scored"),
    [
        (FakeListLLM(responses=["a"]), "6567ab23942bf5f0", "f2ca9ae296c5f067"),
        (FakeListChatModel(responses=["a"]), "650a6b0d0693645b", "5ad4a0fd4d0fe52b"),
    ],
)
def test_answers_of_earlier_versions_are_found_in_the_cache(model: Any, answered: str, scored: str) -> None:
    text = APPENDIX_D.request([PICKS[0], Item("b\nc", "d")], "which one?")
    backend = Client(model, LLMSettings(), identity={"model": "m"})
    assert backend.key(text).hex().startswith(answered)
    assert backend.key(Scored(str(text), APPENDIX_D.continuation("x"))).hex().startswith(scored)


def test_another_system_message_or_turn_is_another_answer() -> None:
    backend = Client(FakeListChatModel(responses=["a"]), LLMSettings(), identity={"model": "m"})
    asked = ["a", Conversation("", ("a",)), Conversation("s", ("a",)), Conversation("", ("a", "b", "c"))]
    assert len({backend.key(each) for each in asked}) == 4
    assert backend.key(Conversation(backend.instruction, ("a",))) == backend.key("a")


class Completion(BaseLLM):
    """Keeps the prompts that it was asked."""

    responses: list[str]
    asked: list[str] = Field(default_factory=list)
    stops: list[Any] = Field(default_factory=list)

    def _generate(self, prompts: list[str], stop: Any = None, *_: Any, **__: Any) -> LLMResult:
        self.asked += prompts
        self.stops.append(stop)
        return LLMResult(generations=[[Generation(text=self.responses[0])] for _ in prompts])

    @property
    def _llm_type(self) -> str:
        return "completion"


class Chat(FakeListChatModel):
    """Keeps the messages that it was asked."""

    asked: list[list[tuple[str, str]]] = Field(default_factory=list)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.asked.append([(message.type, str(message.content)) for message in messages])
        return super()._generate(messages)


@pytest.mark.parametrize("model", [Completion, Chat])
@pytest.mark.parametrize("prompt", VARIED.values(), ids=list(VARIED))
def test_training_and_the_chain_ask_the_same(prompt: Prompt, model: Any, tmp_path: Path) -> None:
    if prompt.form == "chat" and model is Completion:
        pytest.skip("a prompt of messages is for chat models")
    encoder = lexical(ROWS, 16)
    encoder.prompt = prompt
    SequentialCompositionalRetriever.from_encoder(encoder, ROWS).save(tmp_path / "saved")
    served = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved", k=2)
    assert served.store.encoder.prompt == prompt

    training, serving = model(responses=["count(x)"]), model(responses=["count(x)"])
    picks = [Item(row["source"], row["target"]) for row in served.select_examples({"source": "which {one}?"})]
    with LanguageModel(training, LLMSettings(), prompt=prompt) as llm:
        llm.generate([prompt.request(picks, "which {one}?", FIELDS)])
    chain = semantic_parsing_chain(serving, served, "functional", retries=0)
    assert chain.invoke({"source": "which {one}?", **FIELDS}).program == "count(x)"
    assert serving.asked == training.asked
    if model is Completion:
        assert serving.stops == training.stops == [list(prompt.stop)]


@pytest.mark.parametrize("prompt", [VARIED[name] for name in ("appendix_d", "sql", "comments")])
def test_langchains_prompts_write_the_same_text(prompt: Prompt) -> None:
    retriever = SequentialCompositionalRetriever.from_encoder(lexical(ROWS, 16), ROWS)
    picks = [Item(row["source"], row["target"]) for row in retriever.select_examples({"source": "b"})]
    made = few_shot_prompt(retriever, prompt=prompt)
    assert set(made.input_variables) == {"source", *prompt.variables}
    given = {name: FIELDS[name] for name in prompt.variables}
    assert made.format(source="b", **given) == prompt.text(picks, "b", given)


def test_without_a_prompt_of_its_own_a_checkpoint_is_asked_as_ever() -> None:
    retriever = SequentialCompositionalRetriever.from_encoder(lexical(ROWS, 16), ROWS, k=1)
    assert retriever.store.encoder.prompt is None
    shown = retriever.select_examples({"source": "b"})[0]
    assert few_shot_prompt(retriever).format(source="b") == APPENDIX_D.text([Item(**shown)], "b")
    messages = chat_few_shot_prompt(retriever).format_messages(source="b")
    assert [message.content for message in messages] == [shown["source"], shown["target"], "b"]
    with pytest.raises(InputError, match="'chat' consists of chat messages: use chat_few_shot_prompt"):
        few_shot_prompt(retriever, prompt=Prompt(name="chat"))


def test_answers_are_read_by_the_prompts_labels() -> None:
    prompt = Prompt(name="sql", db_schema="T(a)")
    chain = semantic_parsing_chain(
        Chat(responses=["SQL: SELECT a FROM t\nQuestion: and more?"]),
        SequentialCompositionalRetriever.from_encoder(lexical(ROWS, 16), ROWS),
        "functional",
        prompt=prompt,
    )
    chain.parse = lambda text: text == "SELECT a FROM t"
    assert chain.invoke("b").program == "SELECT a FROM t"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"question": "Source:"}, "prompt.question = 'Source:': must have {source} once, and no other name"),
        ({"answer": "{target} {schema}"}, "must have {target} once"),
        ({"prefix": "{source}"}, "the question is prompt.question's alone"),
        ({"suffix": "{a.b}"}, "{a.b} is not a plain name in braces"),
        ({"system": "{a:>999999999}"}, "is not a plain name in braces"),
        ({"prefix": "{"}, "prompt.prefix = '{': Single '{'"),
        ({"name": "chat", "prefix": "x"}, "prompt.prefix = 'x' contradicts prompt.form = 'chat'"),
        ({"name": "paper"}, "Prompt: name must be 'appendix_d', 'chat', 'sql' or 'sql_chat', not 'paper'"),
        ({"schema_budget": -1}, "Prompt: schema_budget must be greater than or equal to 1, not -1"),
        (
            {"system": ["a"], "form": "chats"},
            "form must be 'text' or 'chat', not 'chats' (did you mean 'chat'?); sys",
        ),
        ({"prefx": "x"}, "Prompt: unknown 'prefx'; did you mean 'prefix'? known: answer, "),
    ],
)
def test_templates_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        Prompt(**fields)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_field_that_the_question_lacks_is_named() -> None:
    said = r"prompt.prefix shows \{schema\}, .* are 'db_id': bring it, or set prompt.db_schema"
    with pytest.raises(InputError, match=said):
        Prompt(name="sql").text([], "q", {"db_id": "geo"})


def test_a_template_that_cannot_be_in_a_strangers_checkpoint_is_refused(tmp_path: Path) -> None:
    encoder = lexical(ROWS, 16)
    encoder.prompt = Prompt(system="hello")
    encoder.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "tri_encoder.json"
    file.write_text(file.read_text(encoding="utf-8").replace("hello", "{a.b}"), encoding="utf-8")
    (file.parent / MANIFEST).unlink()
    seal(file.parent)
    with pytest.raises(CheckpointError, match=r"is damaged: .*\{a.b\} is not a plain name"):
        TriEncoder.from_pretrained(tmp_path / "saved")


def test_max_tokens_counts_examples_as_the_prompt_shows_them() -> None:
    encoder = lexical(ROWS, 16)
    encoder.prompt = Prompt(question="A much longer label than the paper's: {source}")
    made = [
        SequentialCompositionalRetriever.from_encoder(encoder, ROWS, max_tokens=limit, tokenizer=len)
        for limit in (sum(len(encoder.prompt.shown(item)) + 1 for item in PICKS) - less for less in (0, 1))
    ]
    assert [len(retriever.invoke("b")) for retriever in made] == [2, 1]


def test_type_checkers_know_that_its_fields_have_defaults() -> None:
    """Of `Field` they see the default only where it is named, unless mypy has pydantic's plugin, as here."""
    tree = ast.walk(ast.parse(inspect.getsource(Prompt)))
    calls = [node for node in tree if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Field"]
    assert len(calls) == len(Prompt.model_fields)
    assert all("default" in {keyword.arg for keyword in call.keywords} for call in calls)
