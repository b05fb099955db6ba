"""What a user meets first: own examples after adding them, off-topic questions, sizes on disk.

    python benchmarks/first_use.py --data ../shared/data --out first_use.json

For each data set, a retriever is fitted to all but 100 of its training questions, and these are then added. Measured:
how many of the 100, asked word for word, are among their own picks (k = 4); with `min_relevance`, how many test
questions are kept, and how many everyday questions and test questions of other data sets are refused (for the least
refused set); bytes of the saved folder and of the pickle; seconds.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import files_of, limit_threads, sweep, table

SETS = "standard,csl_tmcd_1,covr-110,text2sql-scholar,covr-48,text2sql-atis"
ADDED, TESTED = 100, 200
MOST = 1500
"""Training questions, so that every set takes about a minute."""
EVERYDAY = """
what is the weather like in Paris today. will it rain tomorrow. how do I bake a chocolate cake. write a poem about the
sea. who won the football match last night. translate good morning into French. what is the meaning of life. how do I
reset my password. tell me a joke. what time is it in Tokyo. how many calories are in a banana. play some jazz music.
what are the symptoms of the flu. remind me to call my mother at six. how old is the president. explain quantum
computing in simple terms. set an alarm for seven in the morning. what is the capital gains tax rate. fix this Python
function. summarise the attached document. how tall is the Eiffel Tower. what is the best way to learn guitar. turn
off the lights in the kitchen. is my package going to arrive today. what is the exchange rate of the euro. who painted
the Mona Lisa. how do I remove a wine stain. what should I wear today. how far is the moon. show me the latest news.
cancel my subscription. what does this error message mean. how do vaccines work. name three famous composers. hello.
thank you very much. can you recommend a good film. what is the square root of two. who invented the telephone. why is
the sky blue
"""


def loaded(name: str, data: Path, drawn: Path) -> tuple[list[dict[str, str]], list[str], str]:
    """Training examples, test questions, and the language of the programs."""
    from rcr_trainer.paper.splits import split_settings
    from rcr_trainer.runs.layers import checked
    from rcr_trainer.runs.tasks import load_split

    settings = split_settings(name, data, drawn)
    own = {"name": "first-use", "output": str(drawn / "run")}
    config = checked({**own, **{section: settings[section] for section in ("data", "program") if section in settings}})
    split = load_split(config.data, 0)
    rows = [{"source": each.source, "target": each.target} for each in split.train]
    random.Random(0).shuffle(rows)
    return rows[:MOST], [each.source for each in split.test][:TESTED], config.program.language


def measured(name: str, every: dict[str, Any], least: float) -> dict[str, Any]:
    """The figures of one data set."""
    from langchain_rcr import SequentialCompositionalRetriever

    rows, test, language = every[name]
    start = time.perf_counter()
    # Without a fit in the background, whose end would change the figures at any moment.
    retriever = SequentialCompositionalRetriever.from_examples(rows[ADDED:], language=language, k=4, auto_refit=False)
    fitted = time.perf_counter()
    retriever.add_examples(rows[:ADDED])
    added = time.perf_counter()
    own = sum(row in retriever.select_examples({"source": row["source"]}) for row in rows[:ADDED])
    retriever.min_relevance = least

    def refused(questions: list[str]) -> float:
        return round(100 * sum(not found for found in retriever.batch(questions)) / len(questions), 1)

    everyday = [" ".join(each.split()) for each in EVERYDAY.split(".")]
    kinds = {other: other.split("-")[0].split("_")[0] for other in every}
    geography = ("standard", "csl")
    others = {
        other: refused(questions)
        for other, (_, questions, _) in every.items()
        if other != name and (kinds[other] != kinds[name] or kinds[name] == "text2sql")
        if not (kinds[other] in geography and kinds[name] in geography)
    }
    with tempfile.TemporaryDirectory() as folder:
        retriever.save(Path(folder) / "saved")
        saved = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        "fitted to": len(rows) - ADDED,
        "fit_s": round(fitted - start, 1),
        "add_s": round(added - fitted, 2),
        "own": own,
        "kept": 100 - refused(test),
        "everyday": refused(everyday),
        "others": others,
        "folder_mb": round(saved / 1e6, 2),
        "pickle_mb": round(len(pickle.dumps(retriever)) / 1e6, 2),
    }


TITLES = (
    *("data set", "fitted to", "shown themselves, of 100 added", "in domain kept, %", "everyday refused, %"),
    *("other sets refused, least, %", "folder, MB", "pickle, MB"),
)


def main() -> None:
    """Measure each data set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--sets", default=SETS, help=f"comma-separated (default {SETS})")
    parser.add_argument("--relevance", type=float, default=0.05, help="min_relevance (default 0.05)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    limit_threads(1)
    with tempfile.TemporaryDirectory() as folder, files_of(parser):
        every = {name: loaded(name, arguments.data, Path(folder)) for name in arguments.sets.split(",")}

    results = sweep(
        [(name, lambda name=name: measured(name, every, arguments.relevance)) for name in every], arguments.out
    )
    rows = []
    for name, found in results.items():
        figures = (found[key] for key in ("own", "kept", "everyday"))
        least = min(found["others"].values(), default="")
        rows.append([name, found["fitted to"], *figures, least, found["folder_mb"], found["pickle_mb"]])
    print(table(TITLES, ([str(cell) for cell in row] for row in rows)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
