"""Guards against run folders from strangers.

A settings file given to `rcr-train run` is the caller's own: what it names is imported, opened and asked. Settings in a
run folder are only data: anything they name outside the folder needs the caller's consent (`--trust`) or a flag.
"""

from __future__ import annotations

from collections.abc import Iterator

from langchain_rcr.families import get_family
from rcr_trainer.baselines import get_baseline
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.redaction import redact
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.tasks import compared
from rcr_trainer.settings import Settings


def check_foreign(run: Run) -> None:
    """Raise a `ConfigError` if a comparison would use something named by the folder that the caller didn't allow."""
    found = [f"{what} ({path})" for path, what in _named(run.config) if path in run.foreign]
    if found:
        would = redact(f"{run.path / 'config.yaml'} would {', '.join(found)}")
        allowing = "--trust allows that in a run of your own or of someone you trust; a flag gives another value"
        raise ConfigError(f"{would}: {allowing}")


def _named(config: Settings) -> Iterator[tuple[str, str]]:
    """What a comparison would import, open or ask: the setting, and what it would do."""
    evaluation, base = config.evaluation, config.model.pretrained or ""
    if base.startswith("langchain:") and get_family(config.model.family).frozen:
        yield "model.base", f"import {base.removeprefix('langchain:')}"
    kinds = {name: get_baseline(name) for name in compared(config)}
    needs = {need for kind in kinds.values() for need in kind.needs}
    models = {f"evaluation.{name}": getattr(evaluation, name, "") for name in kinds if "encode" in kinds[name].needs}
    if needs & {"embed", "embed_tokens", "policy"}:  # what opens a model by name
        models |= {"evaluation.embeddings": evaluation.embeddings} if evaluation.embeddings else {"model.base": base}
    for path, model in models.items():
        if model and not model.startswith(("package:", "langchain:")):
            yield path, f"open the model {model}"
    llm, reward = config.llm, config.reward
    if "score" not in needs and not evaluation.asks(llm):
        return
    if llm.kind == "local":
        yield "llm.model", f"open the model {llm.model}"
    else:
        yield "llm.base_url", f"ask {llm.base_url or 'the server of OpenAI'}"
        if llm.api_key_env != LLMSettings().api_key_env:
            yield "llm.api_key_env", f"send it ${llm.api_key_env}"
    if llm.cache is not None:
        yield "llm.cache", f"write {llm.cache}"
    if reward.executor is not None:
        yield "reward.executor", f"import {reward.executor}"
    elif reward.database is not None:
        yield "reward.database", f"open {reward.database}"
