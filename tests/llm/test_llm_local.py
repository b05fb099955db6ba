"""A causal language model of transformers on this machine, with a word-level tokenizer of our own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from openai_server import OpenAIServer, echo_of
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import BudgetExceeded, TooLongError
from rcr_trainer.llm.model import open_llm
from rcr_trainer.llm.settings import LLMSettings
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from langchain_rcr.policy.prompt import APPENDIX_D

pytestmark = pytest.mark.slow

WORDS = ["<pad>", "<eos>", "<unk>", "\n", "Source:", "Target:", *"abcdefgh", "(", ")"]
PROMPTS = [
    f"Source: {' '.join(words)}\nTarget:" for words in ("a", "bc", "abcdefgh", "dd", "h", "gfed", "cab", "(", "(a)")
]


def local_lm(**options: Any) -> Any:
    """A `LocalLM`; its module loads transformers, which collecting the tests shouldn't."""
    from rcr_trainer.llm.local import LocalLM

    return LocalLM(**options)


def make(folder: Path, seed: int = 0, kind: str = "Llama", **options: Any) -> str:
    """A tiny Llama, or another kind of transformers, with random weights."""
    import transformers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[^\s]+"), behavior="removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=48,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.5,
        **options,
    )
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("lm"))


@cache
def loaded(folder: str) -> tuple[Any, Any]:
    """Tokenizer and network of the module's folder, whose weights stay."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


def plain(model: Any, prompt: str) -> tuple[str, str, int]:
    """Greedy decoding by hand: a prompt at a time, a whole forward pass for each token."""
    tokenizer, network = loaded(model.model)
    ids = tokenizer(prompt)["input_ids"]
    new: list[int] = []
    while len(new) < model.max_new_tokens:
        with torch.no_grad():
            new.append(int(network(torch.tensor([ids + new])).logits[0, -1].argmax()))
        text = tokenizer.decode(new, skip_special_tokens=True)
        if new[-1] == 1 or "\n" in text.lstrip():
            return text.lstrip().split("\n")[0].strip(), "stop", len(new)
    return text.strip(), "length", len(new)


def by_hand(folder: str, prompts: list[str], programs: list[str]) -> list[float]:
    """Log-likelihoods one token at a time, a whole forward pass for each."""
    tokenizer, network = loaded(folder)
    found = []
    for prompt, program in zip(prompts, programs, strict=True):
        ids, total = tokenizer(prompt)["input_ids"], 0.0
        for token in tokenizer(f" {program}\n")["input_ids"]:
            with torch.no_grad():
                total += float(network(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])
            ids.append(token)
        found.append(total)
    return found


LONG = f"Source: {'a b ' * 6}\nTarget: c ( d )\n"  # 20 tokens
SHARING = [f"{LONG}Source: {word}\nTarget:" for word in ("e", "f g", "h", "a b c d")]
"""Prompts that begin with the same example, so that its keys and values are computed once."""


@pytest.mark.parametrize("batch_size", [1, 4])
def test_likelihoods_are_those_of_one_token_at_a_time(folder: str, batch_size: int) -> None:
    prompts = [*PROMPTS, *SHARING, SHARING[0]]
    programs = [*(f"{word} ( {word} )" for word in "abcdefgh"), "h", "a", "b", "c ( d )", "e", "f"]
    settings = LLMSettings(kind="local", model=folder, max_tokens=12, batch_size=batch_size, device="cpu")
    with open_llm(settings, None) as llm:
        found = llm.log_likelihoods(prompts, [APPENDIX_D.continuation(program) for program in programs])
        assert found == pytest.approx(by_hand(folder, prompts, programs), abs=1e-4)
        assert llm.log_likelihoods([f"Source: {'a ' * 50}\nTarget:"], [" a\n"]) == [float("-inf")]  # doesn't fit
        assert (
            llm.log_likelihoods(prompts[:2], [APPENDIX_D.continuation(program) for program in programs[:2]])
            == found[:2]
        )


def test_of_prompts_that_are_too_long_transformers_says_nothing(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils import logging

    model = local_lm(model=folder, device="cpu")
    model._tokenizer.model_max_length = 48
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    long = f"Source: {'a ' * 50}\nTarget:"
    assert model.count_tokens(long) == 53
    assert model.generate([long]).generations[0][0].generation_info["finish_reason"] == "too_long"
    assert model.log_likelihoods([long], [" a\n"]) == [float("-inf")]
    assert not caplog.records


def test_a_token_across_the_border_belongs_to_the_continuation(folder: str) -> None:
    model = local_lm(model=folder, device="cpu")
    whole, split = model.log_likelihoods(["Source: Tar", "Source:"], ["get: a", " Target: a"])
    assert whole == pytest.approx(split, abs=1e-5)


@pytest.mark.parametrize("kind", ["local", "completion"])
def test_a_server_and_this_machine_agree_and_pay_once(folder: str, tmp_path: Path, kind: str, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    prompts, programs = [*PROMPTS, *SHARING], [*"abcdefgh", "h", "a", "b", "c ( d )", "e"]
    expected = by_hand(folder, prompts, programs)
    with OpenAIServer(echo=echo_of(folder)) as server:
        settings = {"kind": kind, "model": folder, "budget_calls": 13}
        settings |= {"device": "cpu"} if kind == "local" else {"base_url": server.base_url}
        for paid in (13, 0):
            with open_llm(LLMSettings(**settings), tmp_path / "a.sqlite", account="run") as llm:
                found = llm.log_likelihoods(prompts, [APPENDIX_D.continuation(program) for program in programs])
                assert found == pytest.approx(expected, abs=1e-4)
                assert llm.stats.paid == llm.stats.used.calls == paid
                with pytest.raises(BudgetExceeded, match=r"of 13 calls .*spent: 13 calls"):
                    llm.log_likelihoods(["Source: d d d\nTarget:"], [APPENDIX_D.continuation("d")])
        assert len(server.paid) == (0 if kind == "local" else 13)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_batches_give_what_single_prompts_give(folder: str, batch_size: int) -> None:
    model = local_lm(model=folder, max_new_tokens=12, batch_size=batch_size, device="cpu")
    expected = [plain(model, prompt) for prompt in PROMPTS]
    # Otherwise this would test less than it says.
    assert {end for _, end, _ in expected} == {"stop", "length"}
    found = [row[0] for row in model.generate(PROMPTS, stop=["\n"]).generations]
    assert [
        (one.text, one.generation_info["finish_reason"], one.generation_info["completion_tokens"]) for one in found
    ] == expected
    assert [one.generation_info["prompt_tokens"] for one in found] == list(map(model.count_tokens, PROMPTS))


def test_other_stop_sequences(folder: str) -> None:
    model = local_lm(model=folder, max_new_tokens=12, device="cpu")
    whole = [row[0].text for row in model.generate(PROMPTS).generations]
    last = {text.split()[-1] for text in whole if len(text.split()) > 2}
    stop = sorted(last)[0]
    cut = [row[0].text for row in model.generate(PROMPTS, stop=[stop]).generations]
    assert cut == [text.split(stop)[0].strip() for text in whole]
    assert cut != whole


def test_an_empty_list_of_stop_sequences_is_none_at_all(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LLMSettings(kind="local", model=folder, max_tokens=4, stop=[], device="cpu")
    with open_llm(settings, None) as llm:
        stops: list[Any] = []
        monkeypatch.setattr("rcr_trainer.llm.local.cut", lambda text, stop: (stops.append(stop) or text, False))
        llm.generate(PROMPTS[:2])
    assert stops == [[], []]


def test_a_prompt_that_does_not_fit_is_no_program(folder: str) -> None:
    # 3 + 34 tokens and 12 more are one too many for 48 positions.
    long = f"Source: {'a ' * 34}\nTarget:"
    with open_llm(LLMSettings(kind="local", model=folder, max_tokens=12, device="cpu"), None) as llm:
        assert [answer.reason == "too_long" for answer in llm.generate([long, PROMPTS[0]])] == [True, False]
        fitting = llm.generate([f"Source: {'a ' * 33}\nTarget:"])[0]
        assert fitting.reason != "too_long"
        assert fitting.prompt_tokens == 36


def test_where_most_prompts_do_not_fit_each_selector_is_told_so(folder: str) -> None:
    with open_llm(LLMSettings(kind="local", model=folder, max_tokens=12, device="cpu"), None) as llm:
        for word in ("a", "b"):
            long = [f"Source: {word * n} {'a ' * 34}\nTarget:" for n in range(1, 52)]
            with pytest.raises(TooLongError, match=r"longer than .* reads: fewer or shorter examples.*has \d\d tokens"):
                llm.generate(long)


def test_through_settings_it_is_asked_in_batches_and_counted_exactly(folder: str, tmp_path: Path) -> None:
    settings = {"kind": "local", "model": folder, "max_tokens": 12, "batch_size": 4, "stop": ["\n"], "device": "cpu"}
    with open_llm(LLMSettings(**settings), tmp_path / "a.sqlite") as llm:
        answers = llm.generate([*PROMPTS, *PROMPTS])
        assert (llm.stats.nominal, llm.stats.paid, llm.stats.counted) == (18, 9, 0)
        estimate = llm.estimate_calls(1, "Source: a b")
        assert (estimate.use.prompt_tokens, estimate.exact) == (3, True)
    model = local_lm(model=folder, max_new_tokens=12, device="cpu")
    for answer, prompt in zip(answers, PROMPTS * 2, strict=True):
        text, end, _ = plain(model, prompt)
        assert (answer.text, answer.reason) == (
            (text, "truncated") if end == "length" else (text, "") if text else (None, "empty")
        )
        assert answer.program is None or end == "stop"
    with open_llm(LLMSettings(**settings), tmp_path / "a.sqlite") as llm:
        llm.generate(PROMPTS)
        assert llm.stats.paid == 0


def test_other_weights_in_the_same_folder_are_another_model(tmp_path: Path) -> None:
    def paid() -> int:
        settings = LLMSettings(kind="local", model=str(tmp_path / "lm"), max_tokens=4, device="cpu")
        with open_llm(settings, tmp_path / "a.sqlite") as llm:
            llm.generate(PROMPTS[:1])
        return llm.stats.paid

    make(tmp_path / "lm")
    assert [paid(), paid()] == [1, 0]
    (tmp_path / "lm" / "README.md").write_text("a card")
    assert paid() == 0
    make(tmp_path / "lm", seed=1)
    assert paid() == 1


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "missing")):
        with pytest.raises(ConfigError, match="can't be loaded"):
            open_llm(LLMSettings(kind="local", model=name), None)


def test_loading_leaves_the_users_progress_bars_as_they_were(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    local_lm(model=folder, device="cpu").generate(PROMPTS[:1])
    assert logging.is_progress_bar_enabled()
    output = capsys.readouterr()
    assert output.out == output.err == ""


def test_a_stop_sequence_inside_thoughts_is_ignored(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = local_lm(model=folder, max_new_tokens=12, device="cpu")
    whole = [row[0].text for row in model.generate(PROMPTS).generations]
    stop = sorted(text.split()[1] for text in whole if len(text.split()) > 3)[:1]
    assert [row[0].text for row in model.generate(PROMPTS, stop=stop).generations] != whole
    from transformers import PreTrainedTokenizerFast

    decode = PreTrainedTokenizerFast.decode
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "decode", lambda *args, **options: f"<think>{decode(*args, **options)}"
    )
    thoughts = [row[0].text for row in model.generate(PROMPTS, stop=stop).generations]
    assert thoughts == [f"<think>{text}" for text in whole]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Bloom", {}),
        ("GPT2", {}),
        ("Phi3", {}),
        ("Mistral", {"num_key_value_heads": 1, "sliding_window": 5}),  # which keeps the last tokens alone
        ("Gemma2", {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 5}),
        ("Mamba", {}),  # states, no keys and values
    ],
)
def test_models_of_other_kinds(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    folder = make(tmp_path / "lm", kind=kind, **options)
    model = local_lm(model=folder, max_new_tokens=12, device="cpu")
    for model.batch_size in (1, 16):
        found = [row[0] for row in model.generate(PROMPTS, stop=["\n"]).generations]
        assert [
            (one.text, one.generation_info["finish_reason"], one.generation_info["completion_tokens"]) for one in found
        ] == [plain(model, prompt) for prompt in PROMPTS]
    assert model.log_likelihoods(PROMPTS[:3], [" a\n"] * 3) == pytest.approx(
        by_hand(folder, PROMPTS[:3], ["a"] * 3), abs=1e-4
    )
