"""What `--dry-run` says of a language model is an upper bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from rcr_trainer.data.examples import Example
from rcr_trainer.evaluation.budget import longest_prompt
from rcr_trainer.llm.model import open_llm
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.runs.tasks import Task, open_language_model
from rcr_trainer.settings import Settings

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.prompt import APPENDIX_D, Prompt
from langchain_rcr.programs import ProgramSpec

pytestmark = pytest.mark.slow

# Long in characters and short in tokens, and the other way round; blanks and signs at the ends of lines.
POOL = [
    Example("0", "the the the the the the the the the the the the", "find ( find ( find ( find ( cat ) ) ) )"),
    Example("1", "χψω ωψχ ?", "∃ ( ∀ ( ω ) )"),
    Example("2", "0123456789 9876543210", "gt ( 31415926535 , 27182818284 )"),
    Example("3", "cat", "find ( cat )"),
    Example("4", "zqxj vkwz ??!!", "z(q(x(j))) ..."),
    Example("5", "there is cat that is cat that is cat", "exists ( find ( cat ) ) "),
]
QUERIES = [Example("6", "the cat the cat the cat", ""), Example("7", "zqxjvk", ""), Example("8", "ω χ ψ", "")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with a byte-level BPE tokenizer like GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    path = tmp_path_factory.mktemp("lm")
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    texts = ["the cat", "Source: there is cat that is", "Target: exists ( find ( cat ) )\nSource:"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<eos>"])
    )
    logging.disable_progress_bar()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(path)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words.get_vocab()),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            bos_token_id=None,
            eos_token_id=0,
        )
    ).save_pretrained(path)
    logging.enable_progress_bar()
    return str(path)


def test_the_tables_of_other_databases_examples_are_counted() -> None:
    schemas = [f"CREATE TABLE {name} ({name}_{'id' * size} INT);" for name, size in (("a", 9), ("b", 1), ("c", 5))]
    pool = [
        Example(str(at), f"how many {name}", f"SELECT 1 FROM {name}", {"schema": schema})
        for at, (name, schema) in enumerate(zip("abc", schemas, strict=True))
    ]
    queries = [replace(each, id=f"q{each.id}", source="which") for each in pool]
    for name in ("sql", "sql_chat"):
        settings = LLMSettings(kind="chat", model="m", base_url="http://127.0.0.1:1/v1")
        with open_llm(settings, None, prompt=Prompt(name=name)) as llm:
            most = llm.count_tokens(longest_prompt(llm, pool, queries, 2))
            counts = [
                llm.count_tokens(llm.prompt.request([*picks], each.source, each.fields))
                for picks in itertools.permutations(pool, 2)
                for each in queries
            ]
        assert max(counts) <= most <= max(counts) * 1.2


def config(**llm: object) -> Settings:
    return Settings.model_validate(
        {
            "grpo": {"enabled": True, "k": 2, "epochs": 2, "group_size": 3},
            "llm": {"price_prompt": 1e6, "price_completion": 0, **llm},
        }
    )


def cost(settings: Settings) -> tuple[str, list[str]]:
    """What is told of 10 calls, and all prompts that they could have."""
    task = Task(POOL, [], [], [], QUERIES, ProgramSpec())
    prompts = [
        APPENDIX_D.text([Item(e.source, e.target) for e in picks], query.source)
        for picks in itertools.permutations(POOL, 2)
        for query in QUERIES
    ]
    with open_language_model(settings, task, keep=False) as llm:
        return str(llm.estimate_calls(10, longest_prompt(llm, POOL, QUERIES, 2))), prompts


def test_no_prompt_has_more_tokens_by_the_models_own_tokenizer(folder: str) -> None:
    said, prompts = cost(config(kind="local", model=folder, max_tokens=5))
    from rcr_trainer.llm.local import LocalLM

    model = LocalLM(model=folder, device="cpu")
    counts = {prompt: model.count_tokens(prompt) for prompt in prompts}
    assert said == (
        f"at most 10 calls, {10 * max(counts.values()):,} prompt and 50 completion tokens, "
        f"${10 * max(counts.values()):,.2f}"
    )
    # Otherwise this would test less than it says: the longest by characters is another one.
    assert max(counts, key=counts.__getitem__) != max(prompts, key=len)
    assert counts[max(prompts, key=lambda prompt: len(prompt.encode()))] < max(counts.values())


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_server_counts_no_more_tokens_than_there_are_bytes(kind: str, folder: str) -> None:
    server = {"kind": kind, "model": "m", "base_url": "http://127.0.0.1:1/v1", "max_tokens": 5}
    said, prompts = cost(config(**server))
    with open_llm(LLMSettings(**server), None) as llm:
        most = max(map(llm.count_tokens, prompts))
    assert said.startswith(f"at most 10 calls, {10 * most:,} prompt and 50 completion tokens, $")
    assert said.endswith(" (a token for each byte of a prompt; real use is about a third)")
    from rcr_trainer.llm.local import LocalLM

    model = LocalLM(model=folder, device="cpu")
    assert most >= max(len(prompt.encode()) for prompt in prompts) >= max(map(model.count_tokens, prompts))
