"""Put a trained selector into a few-shot prompt, then teach it a new kind of question.

Run `make demo` first (or any `rcr-train run`), then:

    python examples/quickstart.py
    python examples/quickstart.py "either there is round animal or none of cat are black" --run runs/demo
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate

from langchain_rcr import RCRError, SequentialCompositionalRetriever

QUESTION = "either there is round animal or the color of mouse that is looking at cat is equal to round"

# A kind of question missing from the demo's pool.
NEW_EXAMPLE = {
    "source": "name the animal that is looking at the most cat",
    "target": "argmax ( find ( animal ) , looking at , find ( cat ) )",
}
NEW_QUESTION = "name the animal that is looking at the most dog"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compose a few-shot prompt with a trained selector.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--run", default="runs/demo", help="a run folder or a checkpoint folder (default: %(default)s)")
    arguments = parser.parse_args()

    if not Path(arguments.run).is_dir():
        sys.exit(f"quickstart: there is no run in {arguments.run}: `make demo` makes one, --run names another")
    try:
        retriever = SequentialCompositionalRetriever.from_pretrained(arguments.run, k=4)
        compose(retriever, arguments.question)
    except RCRError as error:
        sys.exit(f"quickstart: {error}")


def compose(retriever: SequentialCompositionalRetriever, question: str) -> None:
    # The selector goes wherever a LangChain example selector goes. If examples contain braces (JSON, Lispress), use
    # langchain_rcr.few_shot_prompt(retriever), which makes the same prompt without treating them as variables.
    prompt = FewShotPromptTemplate(
        example_selector=retriever,
        example_prompt=PromptTemplate.from_template("Source: {source}\nTarget: {target}"),
        suffix="Source: {source}\nTarget:",
        input_variables=["source"],
        example_separator="\n",
    )
    print("The prompt for one question:\n")
    print(prompt.format(source=question))

    new_id = retriever.add_example(NEW_EXAMPLE)
    print(f"\nOne example added. The picks for “{NEW_QUESTION}” now:\n")
    for document in retriever.invoke(NEW_QUESTION):
        mark = "  ← just added" if document.id == new_id else ""
        print(f"{document.metadata['step']}. {document.metadata['source']}{mark}")


if __name__ == "__main__":
    main()
