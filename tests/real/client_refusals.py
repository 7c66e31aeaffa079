"""Sends requests above a budget by clients of Anthropic and LangChain: `client_refusals.py URL`.

For each client, prints how a request above the rate ended, and a request that never fits.
"""

import sys
from collections.abc import Callable
from typing import Any

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

URL = sys.argv[1]
HEADERS = {"x-tenant": "t"}
SAY = [{"role": "user", "content": "hello"}]


def with_anthropic(max_tokens: int) -> Any:
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=2, default_headers=HEADERS)
    return client.messages.create(model="tiny", messages=SAY, max_tokens=max_tokens)  # type: ignore[arg-type]


def with_langchain_openai(max_tokens: int) -> Any:
    model = ChatOpenAI(
        base_url=f"{URL}/v1",
        api_key="none",
        model="tiny",
        max_retries=2,
        default_headers=HEADERS,
        max_tokens=max_tokens,
    )
    return model.invoke("hello")


def with_langchain_anthropic(max_tokens: int) -> Any:
    model = ChatAnthropic(
        base_url=URL,
        api_key="none",
        model="tiny",
        max_retries=2,
        default_headers=HEADERS,
        max_tokens=max_tokens,
    )
    return model.invoke("hello")


def outcome(ask: Callable[[int], Any], max_tokens: int) -> str:
    try:
        ask(max_tokens)
    except (anthropic.RateLimitError, openai.RateLimitError) as error:
        return f"rate limit, retry {error.response.headers.get('x-should-retry')}"
    return "answered"


for ask in (with_anthropic, with_langchain_openai, with_langchain_anthropic):
    print(ask.__name__, outcome(ask, 5), outcome(ask, 5), outcome(ask, 5000), sep="; ", flush=True)
