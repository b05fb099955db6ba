"""Tables of what answers.py measured: cells with the lead of ours, means, what choosing among rows gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from common import table

if TYPE_CHECKING:
    import numpy as np

PLAIN = ("set_bsr", "dense", "bm25", "bm25_schema", "dail_sql", "mmr", "dpp", "knn_structures")
"""Selectors that need no training; ours is compared with the best of them."""
MEASURES: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "exact": ("exact match, %", lambda values: 100 * values),
    "execution": ("execution match, %", lambda values: 100 * values),
    "p": ("P(gold), %", lambda values: 100 * values),
    "log_p": ("log P(gold)", lambda values: values),
}


def values_of(cell: Mapping[str, Any], measure: str) -> np.ndarray | None:
    """(B,) what each question got by a measure, NaN if nothing; None if it wasn't measured."""
    import numpy as np

    source = cell.get("log_p" if measure == "p" else measure)
    if source is None:
        return None
    values = np.array([math.nan if value is None else value for value in source])
    values = np.exp(values) if measure == "p" else values
    return MEASURES[measure][1](values)


def markdown(results: Mapping[str, Any], ours: str) -> str:
    """For each data set and model, a row per selector, with how much more ours has and the interval of that."""
    import numpy as np
    from rcr_trainer.evaluation.metrics import interval_of
    from rcr_trainer.evaluation.table import gap_text

    blocks = []
    for name, models in results.items():
        for model, found in models.items():
            rows, programs = found["rows"], found["programs"]
            clusters = found.get("databases", programs)
            taken = [each for each in MEASURES if any(values_of(cell, each) is not None for cell in rows.values())]
            head = [column for measure in taken for column in (MEASURES[measure][0], f"{ours} more")]
            within = f", {len(set(clusters))} databases" if "databases" in found else ""
            title = f"**{name}, {model}** ({len(programs)} questions, {len(set(programs))} programs{within})"
            lines = []
            for row, cell in rows.items():
                cells = []
                for measure in taken:
                    values, own = values_of(cell, measure), values_of(rows.get(ours, {}), measure)
                    if values is None:
                        cells += ["", ""]
                        continue
                    cells.append(f"{np.nanmean(values):.1f}" if measure != "log_p" else f"{np.nanmean(values):.2f}")
                    if own is None or row == ours:
                        cells.append("")
                        continue
                    both = ~np.isnan(values) & ~np.isnan(own)
                    difference = (own - values)[both, None]
                    ends = interval_of(difference, [each for each, kept in zip(clusters, both, strict=True) if kept])
                    cells.append(gap_text(difference.mean(), tuple(ends[:, 0])))
                lines.append([row, *cells])
            blocks.append(f"{title}\n\n{table(['', *head], lines)}")
    return "\n\n".join([*blocks, summary(results, ours)])


def summary(results: Mapping[str, Any], ours: str) -> str:
    """For each model, the means over its data sets: ours, the best plain selector of each, and how much more ours has.

    The interval resamples each data set's programs separately, but not the choice of the best selector.
    """
    import numpy as np
    from rcr_trainer.evaluation.metrics import cluster_bootstrap
    from rcr_trainer.evaluation.table import gap_text

    lines = []
    for model in dict.fromkeys(model for models in results.values() for model in models):
        for measure in MEASURES:
            by_set, drawn = {}, []
            for number, (name, models) in enumerate(results.items()):
                found = models.get(model, {"rows": {}})
                taken = {row: values_of(cell, measure) for row, cell in found["rows"].items()}
                known = {row: values for row, values in taken.items() if values is not None}
                plain = max((row for row in PLAIN if row in known), key=lambda row: np.nanmean(known[row]), default="")
                if ours in known and plain:
                    by_set[name] = (np.nanmean(known[ours]), np.nanmean(known[plain]))
                    gap = known[ours] - known[plain]
                    clusters = np.array(found.get("databases", found["programs"]), dtype=object)[~np.isnan(gap)]
                    drawn.append(cluster_bootstrap(gap[~np.isnan(gap), None], clusters.tolist(), seed=number))
            if by_set:
                own, best = np.array([*by_set.values()]).T
                worst = min(by_set, key=lambda name: by_set[name][0] - by_set[name][1])
                low, high = np.quantile(np.mean(drawn, axis=0), [0.025, 0.975])
                more = gap_text((own - best).mean(), (float(low), float(high)))
                lines.append(
                    f"- {model}, {MEASURES[measure][0]}, mean of {len(by_set)} data sets: {ours} {own.mean():.1f}, the "
                    f"best plain selector of each {best.mean():.1f}: {more}; least {(own - best).min():+.1f} ({worst})"
                )
    return "\n".join(lines)


def halved(results: Mapping[str, Any], ours: str, times: int, seed: int = 0) -> str:
    """For each model, what choosing among rows of our settings gains, on questions that took no part in the choice.

    The programs of each data set are split at random, `times` times. On one half a measure chooses a row for each set,
    and one for all of them; on the other half these rows are compared with ours.
    """
    import numpy as np
    from rcr_trainer.evaluation.table import gap_text

    random, lines = np.random.default_rng(seed), []
    for model in dict.fromkeys(model for models in results.values() for model in models) if times else ():
        found = [models[model] for models in results.values() if model in models]
        rows = [row for row in found[0]["rows"] if row == ours or row.startswith(f"{ours}:")]
        taken = [
            m
            for m in MEASURES
            if all(values_of(each["rows"].get(r, {}), m) is not None for each in found for r in rows)
        ]
        values = {m: [np.array([values_of(each["rows"][row], m) for row in rows]) for each in found] for m in taken}
        for chooser in taken:
            gains: dict[tuple[str, str], list[float]] = {}
            for _ in range(times):
                here = []
                for each in found:
                    _, program = np.unique(each["programs"], return_inverse=True)
                    here.append(random.permutation(program.max() + 1)[program] % 2 == 0)
                known = [
                    np.nanmean(scores[:, half], axis=1) for scores, half in zip(values[chooser], here, strict=True)
                ]
                for kind, best in (("each", np.argmax(known, 1)), ("all", [np.mean(known, 0).argmax()] * len(found))):
                    for m in taken:
                        new = [np.nanmean(v[:, ~half], axis=1) for v, half in zip(values[m], here, strict=True)]
                        gain = np.mean([mean[at] - mean[rows.index(ours)] for mean, at in zip(new, best, strict=True)])
                        gains.setdefault((kind, m), []).append(float(gain))
            for (kind, m), drawn in gains.items():
                low, high = np.quantile(drawn, [0.025, 0.975])
                text = gap_text(float(np.mean(drawn)), (float(low), float(high)))
                which = "one for each data set" if kind == "each" else "one for all"
                lines.append(f"- {model}, {len(rows)} rows, {which} by {MEASURES[chooser][0]}: {MEASURES[m][0]} {text}")
    return "\n".join(lines)
