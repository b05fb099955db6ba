"""Why a language model gives no answers. Each message is one line that says what to do; none holds a key."""

from __future__ import annotations

from langchain_rcr.errors import RCRError


class LLMError(RCRError):
    """The model can't be asked, or gave no answer in all attempts. What was answered before is in the cache."""


class AccessError(LLMError):
    """No key, no money or no such model (401, 402, 403, 404, `insufficient_quota`): asking again can't help."""


class RequestError(LLMError):
    """The server refuses this request (400, 413, 422 and the like), such as a prompt too long for the model."""


class BudgetExceeded(LLMError):  # noqa: N818 — what happened is no error of anybody
    """The next call could exceed the budget. Nothing was asked for it; all that was paid for is in the cache."""
