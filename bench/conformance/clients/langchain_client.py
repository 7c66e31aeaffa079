"""Checks of LangChain over OpenAI's and Anthropic's API: `langchain_client.py URL`."""

from __future__ import annotations

import asyncio

import anthropic
import openai
from checks import MODEL, URL, WEATHER, expect, run
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

FORM = {"title": "weather", "description": "weather of a city", **WEATHER}


def over_openai(**more):
    given = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_tokens": 16, "max_retries": 0}
    return ChatOpenAI(**given | more)


def over_anthropic(**more):
    given = {"base_url": URL, "api_key": "none", "model": MODEL, "max_tokens": 16, "max_retries": 0}
    return ChatAnthropic(**given | more)


def checks_of(name, model, not_found, bad_request):
    def plain():
        answer = model().invoke("hello")
        assert answer.text
        assert answer.usage_metadata["output_tokens"] == 16

    def stream():
        assert "".join(chunk.text for chunk in model().stream("hello"))

    def tools():
        (call,) = (
            model(max_tokens=160)
            .bind_tools([FORM], tool_choice="weather", strict=True)
            .invoke("hello")
            .tool_calls
        )
        assert call["args"] == {"city": "Paris"}

    def json_schema():
        found = model(max_tokens=160).with_structured_output(FORM, method="json_schema").invoke("hello")
        assert found == {"city": "Paris"}

    def error_unknown_model():
        expect(not_found, lambda: model(model="nobody").invoke("hello"))

    def error_bad_field():
        expect(bad_request, lambda: model(temperature=-1).invoke("hello"))

    def cancel():
        async def cancelled():
            task = asyncio.create_task(model(max_tokens=64).ainvoke("hello"))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()

        asyncio.run(cancelled())
        plain()

    found = [plain, stream, tools, json_schema, error_unknown_model, error_bad_field, cancel]
    for check in found:
        check.__name__ = f"{name}.{check.__name__}"
    return found


run(
    [
        *checks_of("openai", over_openai, openai.NotFoundError, openai.BadRequestError),
        *checks_of("anthropic", over_anthropic, anthropic.NotFoundError, anthropic.BadRequestError),
    ]
)
