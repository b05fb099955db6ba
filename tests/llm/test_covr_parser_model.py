from __future__ import annotations

import re

import pytest
from places import MODEL

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.prompt import APPENDIX_D

FOLDER = MODEL
pytestmark = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").exists(), reason="the parser's weights are not in this checkout"
)

SHOWN = [
    Item("there is white animal that is looking at cat",
         "exists ( with_relation ( filter ( white , find ( animal ) ) , looking at , find ( cat ) ) )"),
    Item("what is the number of round dog ?", "count ( filter ( round , find ( dog ) ) )"),
    Item("either there is mouse or the number of cat is greater than 2",
         "or ( exists ( find ( mouse ) ) , gt ( count ( find ( cat ) ) , 2 ) )"),
    Item("the color of dog is equal to brown", "eq ( query_attr [ color ] ( find ( dog ) ) , brown )"),
]  # fmt: skip
ASKED = {
    "there is black dog": "exists ( filter ( black , find ( dog ) ) )",
    "what is the number of mouse that is chasing cat ?": (
        "count ( with_relation ( find ( mouse ) , chasing , find ( cat ) ) )"
    ),
    "the number of cat is greater than 3": "gt ( count ( find ( cat ) ) , 3 )",
    "the shape of mouse is equal to square": "eq ( query_attr [ shape ] ( find ( mouse ) ) , square )",
    "either there is square dog or the color of cat is equal to white": (
        "or ( exists ( filter ( square , find ( dog ) ) ) , eq ( query_attr [ color ] ( find ( cat ) ) , white ) )"
    ),
}
OTHER_NAMES = {"exists": "present", "find": "lookup", "filter": "keep", "count": "tally", "or": "union", "gt": "above",
               "eq": "same", "query_attr": "read", "with_relation": "join"}  # fmt: skip


def renamed(program: str) -> str:
    return re.sub(r"(\w+) (?=[(\[])", lambda match: OTHER_NAMES[match[1]] + " ", program)


@pytest.fixture(scope="module")
def answer():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)

    def generate(prompts):
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        written = model.generate(**batch, max_new_tokens=60, do_sample=False)
        return tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    return generate


def test_the_folder_is_small_and_complete():
    assert (FOLDER / "model.safetensors").stat().st_size <= 8 * 2**20
    assert all((FOLDER / name).exists() for name in ("config.json", "tokenizer.json", "log.jsonl", "README.md"))


@pytest.mark.slow
def test_it_answers_with_a_program_and_stops(answer):
    programs = answer([APPENDIX_D.text(SHOWN, question) for question in ASKED])
    assert [program.strip() for program in programs] == list(ASKED.values())


@pytest.mark.slow
def test_it_uses_the_names_that_the_prompt_shows(answer):
    shown = [Item(item.source, renamed(item.target)) for item in SHOWN]
    programs = answer([APPENDIX_D.text(shown, question) for question in ASKED])
    named = [re.findall(r"\w+(?= [(\[])", program) for program in programs]
    assert named == [re.findall(r"\w+(?= [(\[])", renamed(program)) for program in ASKED.values()]
