"""The model of the agents."""

from collections.abc import AsyncIterator

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from openai_server import OpenAIServer


@pytest.fixture
async def model(server: OpenAIServer) -> AsyncIterator[BaseChatModel]:
    """A client of the module's `server`, closed with the test."""
    from langchain_openai import ChatOpenAI

    async with httpx.AsyncClient() as waiting:
        with httpx.Client() as client:
            clients = {"http_client": client, "http_async_client": waiting}
            yield ChatOpenAI(model="m", base_url=server.base_url, api_key="none", **clients)
