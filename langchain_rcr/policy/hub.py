"""A checkpoint on the Hugging Face hub: its model card, and how it is fetched.

Only `hub:ORG/NAME` is looked for on the network; a missing folder isn't. Only the files of a checkpoint are fetched,
and none of them holds code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_rcr.errors import CheckpointError, refusing
from langchain_rcr.families.base import DEFAULT_BASE, ModelSettings, get_family
from langchain_rcr.policy.manifest import FILES
from langchain_rcr.programs import ProgramSpec, about

PREFIX = "hub:"
WHERE_FROM = "which isn't on PyPI yet: pip install a clone, or the wheel that `make dist` builds there"
"""How to get this distribution."""

_TAGS = ("langchain", "few-shot", "in-context-learning", "example-selector", "semantic-parsing")
_CARD = """---
{metadata}
---

# {title}

Picks the few-shot examples of a prompt one after the other, each given those already picked \
([langchain-rcr](https://github.com/langchain-rcr/langchain-rcr)).

- family of encoders: `{config.family}`, over {base}
- programs: `{spec.language}`, local structures of up to {spec.max_size} nodes
- state: `{config.state}`, λ = {config.lam:g}, p = {config.fade}; order of the picks in a prompt: `{config.order}`
{trained_on}- needs: `{needs}`, {where_from}

## Use

```python
from langchain_rcr import SequentialCompositionalRetriever

selector = SequentialCompositionalRetriever.from_pretrained("hub:ORG/NAME", k={k}{trust})  # or a folder
selector.select_examples({{"source": "your question"}})
```

The examples in `pool.jsonl`, where there is one, are picked from; pass `examples=` for your own.
"""


def fetched(where: str | os.PathLike[str]) -> Path:
    """The local folder of a checkpoint, downloaded to the hub's cache if need be, or a `CheckpointError`.

    A path, or `hub:ORG/NAME[@REVISION]` (a branch, tag or commit); with HF_HUB_OFFLINE only the cache is searched.
    """
    if not isinstance(where, str) or not where.startswith(PREFIX):
        try:
            Path(where, "checkpoint").exists()
        except OSError as error:  # too long, or a folder that can't be read
            raise CheckpointError(f"{str(where)[:200]} can't be opened: {error.strerror}") from None
        return Path(where)
    from huggingface_hub import snapshot_download

    name, _, revision = where.removeprefix(PREFIX).partition("@")
    with refusing(f"{where} can't be fetched from the hub", CheckpointError):
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(FILES)))


def requirement(base: str | None, spec: ProgramSpec) -> str:
    """What pip must install to serve a checkpoint."""
    extras = ",".join(filter(None, ("offline" if base == DEFAULT_BASE else "", about(spec.language).extra)))
    return f"langchain-rcr[{extras}]" if extras else "langchain-rcr"


def model_card(
    config: ModelSettings,
    spec: ProgramSpec,
    *,
    name: str = "",
    datasets: Sequence[str] = (),
    k: int | None = None,
    metrics: Mapping[str, float] | None = None,
    measured_on: str = "",
) -> str:
    """The README.md of a checkpoint: metadata for the hub, what it is, how to load it, how well it does.

    `metrics` are in % and for k picks (default: the policy's own k); `measured_on` says what they were measured on.
    """
    base, k = config.pretrained, k or config.k
    about: dict[str, Any] = {"library_name": "langchain-rcr", "tags": list(_TAGS), "model_name": name or "rcr"}
    about |= {"family": config.family, "program_language": spec.language}
    about |= {"datasets": list(datasets)} if datasets else {}
    about |= {"base_model": base} if base is not None and _is_hub_name(base) else {}
    # The checkpoint names the model but doesn't contain it.
    trust = ", trust=True" if "base_model" in about and get_family(config.family).frozen else ""
    card = _CARD.format(
        metadata="\n".join(f"{key}: {json.dumps(value)}" for key, value in about.items()),  # JSON is valid YAML
        title=name or "A step-by-step retriever of few-shot examples",
        config=config,
        spec=spec,
        base=_named(base),
        trained_on=f"- trained on: {', '.join(datasets)}\n" if datasets else "",
        needs=requirement(base, spec),
        where_from=WHERE_FROM,
        k=k,
        trust=trust,
    )
    if metrics:
        card += f"\n## Results\n\nOn {measured_on}, {k} picks a question:\n\n| metric | % |\n|---|---:|\n"
        card += "".join(f"| {metric.replace('_', ' ')} | {value:.1f} |\n" for metric, value in metrics.items())
    return card


def _is_hub_name(base: str) -> bool:
    """Whether a base is a model on the hub, not a folder, whose path means nothing to others."""
    return re.fullmatch(r"\w[\w.\-]*(/[\w.\-]+)?", base) is not None and not Path(base).exists()


def _named(base: str | None) -> str:
    if base is None:
        return "no pretrained model"
    known = _is_hub_name(base) or base.startswith(("package:", "langchain:"))
    return f"`{base}`" if known else "a local pretrained model"
