"""Ready few-shot prompts in the format of the paper's appendix D."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.prompts.string import DEFAULT_FORMATTER_MAPPING

from langchain_rcr.errors import InputError
from langchain_rcr.items import EXAMPLE_TEMPLATE
from langchain_rcr.retriever import SequentialCompositionalRetriever


class FewShotPrompt(FewShotPromptTemplate):
    """LangChain's `FewShotPromptTemplate`, safe with braces in examples.

    LangChain's own pastes the examples into one template and formats that, so that `{"a": 1}` in an example is taken
    for a variable. This one formats prefix and suffix alone; the text of an example is never read as a template.
    """

    def format(self, **kwargs: Any) -> str:
        """The prompt as a string; `kwargs` are its variables."""
        variables = self._merge_partial_and_user_variables(**kwargs)
        return self._compose(self._get_examples(**variables), variables)

    async def aformat(self, **kwargs: Any) -> str:
        """`format`, awaiting the selector."""
        variables = self._merge_partial_and_user_variables(**kwargs)
        return self._compose(await self._aget_examples(**variables), variables)

    def _compose(self, examples: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        fill = DEFAULT_FORMATTER_MAPPING[self.template_format]
        keys = self.example_prompt.input_variables
        pieces = [self.example_prompt.format(**{key: example[key] for key in keys}) for example in examples]
        if self.prefix:
            pieces.insert(0, fill(self.prefix, **variables))
        if self.suffix:
            pieces.append(fill(self.suffix, **variables))
        return self.example_separator.join(pieces)


def few_shot_prompt(
    selector: BaseExampleSelector,
    *,
    source_key: str | None = None,
    target_key: str | None = None,
    query_key: str | None = None,
    prefix: str = "",
) -> FewShotPrompt:
    """A prompt of selected examples and the question, as in the paper's appendix D.

    "Source: …" and "Target: …" of each example on a line each, then "Source: " with the question, then "Target:".

    Args:
        selector: any LangChain example selector.
        source_key: the key of an example's question; None for the retriever's own, "source" for other selectors.
        target_key: the key of its program; None likewise.
        query_key: the prompt variable with the question; None for the source key.
        prefix: a template before the examples, on lines of its own (literal braces doubled).

    Returns:
        A prompt with one variable: `few_shot_prompt(retriever).invoke({"source": question})`.

    Raises:
        InputError: the selector is none, or a key can't be the name of a template variable.
    """
    if not isinstance(selector, BaseExampleSelector):
        msg = f"selector must be a LangChain example selector, not {type(selector).__name__}"
        raise InputError(msg)
    pool = selector.store.pool if isinstance(selector, SequentialCompositionalRetriever) else None
    source_key = source_key or (pool.source_key if pool is not None else "source")
    target_key = target_key or (pool.target_key if pool is not None else "target")
    query_key = query_key or source_key
    for key in (source_key, target_key, query_key):
        if not key.isidentifier():
            msg = f"{key!r} can't be the name of a template variable: letters, digits and underscores only"
            raise InputError(msg)
    example = EXAMPLE_TEMPLATE.format(source=f"{{{source_key}}}", target=f"{{{target_key}}}")
    suffix = EXAMPLE_TEMPLATE.format(source=f"{{{query_key}}}", target="").rstrip()
    return FewShotPrompt(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template(example),
        prefix=prefix,
        suffix=suffix,
        example_separator="\n",
        input_variables=[query_key],
    )
