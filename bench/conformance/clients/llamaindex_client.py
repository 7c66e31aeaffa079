"""Checks of LlamaIndex: `llamaindex_client.py URL`."""

import asyncio
import json
from typing import Literal

import openai
from checks import MODEL, URL, WEATHER, expect, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

SAY = [ChatMessage(role="user", content="hello")]


def model(**more):
    given = {"api_base": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_tokens": 16, "max_retries": 0}
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096}
    return OpenAILike(**kind | given | more)


def weather(city: Literal["Paris"]) -> str:
    """Weather of a city."""
    return city


def plain():
    assert model().chat(SAY).message.content


def completion():
    assert model(is_chat_model=False).complete("hello").text


def stream():
    assert "".join(part.delta or "" for part in model().stream_chat(SAY))


def tools():
    tool = FunctionTool.from_defaults(weather)
    client = model(max_tokens=160, strict=True)
    answer = client.chat_with_tools([tool], "hello", tool_required=True)
    (call,) = client.get_tool_calls_from_response(answer)
    assert call.tool_kwargs == {"city": "Paris"}


def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    assert json.loads(model(max_tokens=160).chat(SAY, response_format=form).message.content) == {
        "city": "Paris"
    }


def error_unknown_model():
    expect(openai.NotFoundError, lambda: model(model="nobody").chat(SAY))


def error_bad_field():
    expect(openai.BadRequestError, lambda: model(additional_kwargs={"top_p": 7}).chat(SAY))


def cancel():
    async def cancelled():
        task = asyncio.create_task(model(max_tokens=64).achat(SAY))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(cancelled())
    plain()


run((plain, completion, stream, tools, json_schema, error_unknown_model, error_bad_field, cancel))
