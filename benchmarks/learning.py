"""Does the interval of `rcr-train learn` contain a change's true gain? Traffic on COVR with known outcomes.

The examples' small parser answers questions with drawn picks. A logistic model of its P(gold), given what the picks
show of the gold program, then gives the probability of a right answer, so that what each policy truly earns is known.
Many logs are drawn. On the second half of each, changes are judged as the command does; from some, the command's own
search learns a change:

    python benchmarks/learning.py --out learning.json

Does it find what truly earns more? A policy is served with a number far from the best, and what the command learns from
one log is served for the next:

    python benchmarks/learning.py --calibrated learning.json --served words=0.5 --climb 6 --out climb.json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import files_of, limit_threads, table

PARSER = Path(__file__).parent.parent / "examples" / "models" / "covr-parser"
K = 4


@dataclass
class Traffic:
    """A served policy, the questions it is asked and what its picks earn.

    Args:
        policy: `rcr_trainer.evaluation.learn.Policy`.
        split: of COVR.
        explore: the retriever's.
    """

    policy: Any
    split: Any
    explore: float

    def __post_init__(self) -> None:
        import numpy as np
        from rcr_trainer.data.coverage import structure_matrices

        from langchain_rcr.programs import ProgramSpec

        programs = [each.target for each in self.split.test], [each.target for each in self.split.train]
        self.sides = [structure_matrices(ProgramSpec("functional", max_size=size), *programs) for size in (1, 2)]
        self.policy.texts = [each.source for each in self.split.test]
        self.slopes = np.zeros(1 + 2 * len(self.sides))

    def serve(self, variant: Mapping[str, Any]) -> None:
        """Serve this variant of the policy from now on."""
        from rcr_trainer.evaluation.learn import Policy

        texts, retriever = self.policy.texts, self.policy.retriever
        retriever.store.encoder.vary(variant)
        self.policy = Policy(retriever, self.policy.seed)
        self.policy.texts = texts

    def logged(self, asked: Any, picks: Any, log_probs: Any, outcomes: Any) -> Any:
        """The log as `rcr_trainer.evaluation.learn.read` returns it."""
        import numpy as np
        from rcr_trainer.evaluation.learn import Logged

        group = np.zeros(len(asked), dtype=np.int64)
        return Logged(asked, picks, log_probs, outcomes, np.full(len(asked), self.explore), group)

    def drawn(self, asked: Any, seed: int, variant: Mapping[str, Any]) -> tuple[Any, Any]:
        """A variant's picks (B, K) and their log-probabilities."""
        import numpy as np
        from rcr_trainer.evaluation.off_policy import walk

        nothing = np.zeros((len(asked), K), dtype=np.int64)
        there = self.logged(asked, nothing, nothing, nothing)
        queries, state, pool = self.policy.under(variant)
        tau, random = there.explore * self.policy.model.config.tau, np.random.default_rng(seed)
        return walk(queries[asked], state, pool, tau, (there.group, self.policy.groups), nothing, random)

    def shown(self, asked: Any, picks: Any) -> Any:
        """What picks show of the gold programs, (B, F): by size, the share of structures, and whether all."""
        import numpy as np

        columns = [np.ones(len(asked))]
        for gold, pool in self.sides:
            union = sum(pool[own] for own in picks.T).sign()
            shown = gold[asked].multiply(union).sum(axis=1) / np.maximum(gold[asked].sum(axis=1), 1)
            columns += [shown, shown >= 1]
        return np.stack(columns, axis=1)

    def chance(self, asked: Any, picks: Any) -> Any:
        """The probability of a right answer, (B,)."""
        import numpy as np

        return 1 / (1 + np.exp(-self.shown(asked, picks) @ self.slopes))

    def calibrate(self, seed: int, rounds: int = 3) -> dict[str, float]:
        """Fit the chance to the parser's answers on picks drawn at several temperatures."""
        import numpy as np
        from rcr_trainer.llm.local import LocalLM
        from scipy.optimize import minimize

        from langchain_rcr.basics.progress import track
        from langchain_rcr.policy.prompt import APPENDIX_D

        model, explore = LocalLM(model=str(PARSER)), self.explore
        asked = np.arange(len(self.split.test))
        features, right = [], []
        for number in track(range(rounds), "asking the parser"):
            self.explore = explore * 2**number
            picks, _ = self.drawn(asked, seed + number, {})
            prompts = [
                str(APPENDIX_D.request([self.split.train[at].item for at in row[::-1]], each.source, each.fields))
                for row, each in zip(picks.tolist(), self.split.test, strict=True)
            ]
            programs = [APPENDIX_D.continuation(each.target) for each in self.split.test]
            right.append(np.exp(model.log_likelihoods(prompts, programs)))
            features.append(self.shown(asked, picks))
        self.explore = explore
        told, chance = np.concatenate(features), np.concatenate(right)

        def loss(slopes: Any) -> float:
            logits = told @ slopes
            return float((np.logaddexp(0, logits) - chance * logits).mean() + 1e-4 * (slopes @ slopes))

        self.slopes = minimize(loss, self.slopes).x
        fitted = 1 / (1 + np.exp(-told @ self.slopes))
        means = {f"answers at {explore * 2**n:g}": float(each.mean()) for n, each in enumerate(right)}
        return {"correlation": float(np.corrcoef(fitted, chance)[0, 1]), **means}

    def log(self, count: int, seed: int) -> Any:
        """A log of `count` questions."""
        import numpy as np

        random = np.random.default_rng([seed, 1])
        asked = random.integers(0, len(self.split.test), count)
        picks, log_probs = self.drawn(asked, seed, {})
        right = random.random(count) < self.chance(asked, picks)
        return self.logged(asked, picks, log_probs, right.astype(float))

    def truth(self, variant: Mapping[str, Any], rounds: int) -> Any:
        """What a variant earns on each of the questions, (Q,)."""
        import numpy as np

        questions = np.arange(len(self.split.test))
        asked = np.tile(questions, 10)
        found = []
        for number in range(rounds):
            picks, _ = self.drawn(asked, number, variant)
            found.append(self.chance(asked, picks).reshape(10, -1).mean(axis=0))
        return np.mean(found, axis=0)


def served(explore: float, size: int, questions: int, seed: int, variant: Mapping[str, Any]) -> Traffic:
    """A policy fitted to COVR's split 110, then varied."""
    from rcr_trainer.data.covr import covr_split
    from rcr_trainer.evaluation.learn import Policy

    from langchain_rcr import SequentialCompositionalRetriever

    split = covr_split("110", seed, size, questions)
    rows = [{"source": each.source, "target": each.target} for each in split.train]
    retriever = SequentialCompositionalRetriever.from_examples(rows, language="functional", k=K, explore=explore)
    retriever.store.encoder.vary(variant)
    return Traffic(Policy(retriever, seed), split, explore)


def judged(traffic: Traffic, variants: Mapping[str, Mapping[str, Any]], logged: Any) -> dict[str, list[float]]:
    """For each variant, its estimated gain and the ends of the interval on the second half of a log."""
    from rcr_trainer.evaluation.learn import Estimates
    from rcr_trainer.evaluation.metrics import interval_of
    from rcr_trainer.evaluation.off_policy import halves

    first = halves(logged.asked, traffic.policy.seed)
    estimates = Estimates(traffic.policy, logged.only(~first), logged.only(first))
    found = {}
    for name, variant in variants.items():
        gain = estimates.of(variant)[0]
        found[name] = [float(gain.mean()), *interval_of(gain[:, None], logged.asked[~first].tolist())[:, 0].tolist()]
    return found


def climbed(traffic: Traffic, questions: int, logs: int, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """What the command learns from several logs, one after the other, and what the policy truly earns after each."""
    from rcr_trainer.evaluation.learn import choose

    yield {"true": float(traffic.truth({}, rounds).mean())}
    for number in range(logs):
        change = choose(traffic.policy, traffic.log(questions, seed + number))
        if change.low > 0:
            traffic.serve(change.variant)
        true = float(traffic.truth({}, rounds).mean())
        yield {"variant": dict(change.variant), "interval": [change.low, change.high], "true": true}


def markdown(results: Mapping[str, Any]) -> str:
    """A row per change, and what was learnt."""
    rows = []
    for name, true in results["true"].items():
        each = [log[name] for log in results["judged"]]
        held = sum(low <= true["gain"] <= high for _, low, high in each)
        width = sum(high - low for _, low, high in each) / len(each)
        wrong = sum(low > 0 for _, low, _ in each) if true["gain"] <= 0 else 0
        cells = [f"{true['gain']:+.4f}", f"{true['reached']:.3f}", f"{held} of {len(each)}", f"{width:.4f}", str(wrong)]
        rows.append([name, *cells])
    head = ["change", "earns more", "could be drawn", "interval holds it", "width", "wrongly taken for better"]
    gains = [one["true"] for one in results["learnt"] if one["variant"]]
    learnt = f"{len(gains)} of {len(results['learnt'])} logs led to a change"
    if gains:
        learnt += f", which earns {min(gains):+.4f} to {max(gains):+.4f} more"
    return f"{table(head, rows)}\n\n{learnt}."


def arguments() -> argparse.Namespace:
    """The command's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", type=int, default=300, help="examples (default 300)")
    parser.add_argument("--distinct", type=int, default=400, help="different questions (default 400)")
    parser.add_argument("--questions", type=int, default=10_000, help="logged questions (default 10000)")
    parser.add_argument("--logs", type=int, default=100, help="logs on which changes are judged (default 100)")
    parser.add_argument("--learn", type=int, default=10, help="logs from which a change is learnt (default 10)")
    parser.add_argument("--explore", type=float, default=5.0, help="(default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="ten draws of each question for what is true, each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibrated", type=Path, help="an earlier --out, whose model of right answers is used again")
    parser.add_argument("--served", default="", metavar="NAME=VALUE", help="a number of the policy that is served")
    parser.add_argument("--climb", type=int, default=0, help="logs from which changes are learnt one after the other")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    if options.calibrated:
        with files_of(parser):
            options.calibrated = json.loads(options.calibrated.read_text(encoding="utf-8"))
    return options


def main() -> int:
    """The command."""
    options = arguments()
    limit_threads(options.threads)
    logging.disable(logging.WARNING)
    import numpy as np
    from rcr_trainer.evaluation.learn import REACHED, Estimates, choose

    from langchain_rcr.basics.files import write_json

    name, _, value = options.served.partition("=")
    variant = {name: float(value)} if name else {}
    traffic = served(options.explore, options.train, options.distinct, options.seed, variant)
    results: dict[str, Any] = {}
    if options.calibrated:
        traffic.slopes = np.array(options.calibrated["slopes"])
    else:
        results["parser"] = traffic.calibrate(options.seed)
    results["slopes"] = traffic.slopes.tolist()
    if options.climb:
        results["climb"] = []
        for step in climbed(traffic, options.questions, options.climb, options.rounds, options.seed):
            results["climb"].append(step)
            write_json(options.out, results)
            print(step, flush=True)
        return 0
    before, logged = traffic.truth({}, options.rounds), traffic.log(options.questions, options.seed)
    results |= {"before": float(before.mean()), "true": {}, "judged": [], "learnt": []}
    variants: dict[str, Mapping[str, Any]] = {}
    estimates = Estimates(traffic.policy, logged)
    for variant in traffic.policy.changes:
        reached = estimates.of(variant)[1]
        if reached >= REACHED:
            name = ", ".join(f"{key} {value}" for key, value in variant.items())
            gain = float(np.mean(traffic.truth(variant, options.rounds) - before))
            variants[name], results["true"][name] = variant, {"gain": gain, "reached": reached}
    print(results, file=sys.stderr, flush=True)
    for number in range(1, options.logs + 1):
        logged = traffic.log(options.questions, options.seed + number)
        results["judged"].append(judged(traffic, variants, logged))
        if number <= options.learn:
            change = choose(traffic.policy, logged)
            better = dict(change.variant) if change.low > 0 else {}
            true = float(np.mean(traffic.truth(better, options.rounds) - before)) if better else 0.0
            results["learnt"].append({"variant": better, "true": true, "interval": [change.low, change.high]})
        write_json(options.out, results)
        print(f"log {number} done", file=sys.stderr, flush=True)
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
