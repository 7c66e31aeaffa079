"""Checks of Anthropic's client: `anthropic_client.py URL`."""

from __future__ import annotations

import json

import anthropic
from checks import MODEL, URL, WEATHER, expect, run

CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
SAY = [{"role": "user", "content": "hello"}]
ASK = {"model": MODEL, "messages": SAY, "max_tokens": 16}
LONGER = ASK | {"max_tokens": 160}
TOOLS = {
    "tools": [{"name": "weather", "strict": True, "input_schema": WEATHER}],
    "tool_choice": {"type": "tool", "name": "weather"},
}


def plain():
    answer = CLIENT.messages.create(**ASK)
    assert answer.content[0].text
    assert answer.usage.output_tokens == 16


def stream():
    with CLIENT.messages.stream(**ASK) as events:
        assert "".join(events.text_stream)
        assert events.get_final_message().usage.output_tokens == 16


def tools():
    (call,) = (
        block for block in CLIENT.messages.create(**LONGER, **TOOLS).content if block.type == "tool_use"
    )
    assert call.input == {"city": "Paris"}


def tools_stream():
    with CLIENT.messages.stream(**LONGER, **TOOLS) as events:
        content = events.get_final_message().content
    assert [block.input for block in content if block.type == "tool_use"] == [{"city": "Paris"}]


def json_schema():
    form = {"format": {"type": "json_schema", "schema": WEATHER}}
    assert json.loads(CLIENT.messages.create(**LONGER, output_config=form).content[0].text) == {
        "city": "Paris"
    }


def count_tokens():
    assert CLIENT.messages.count_tokens(model=MODEL, messages=SAY).input_tokens > 0


def error_unknown_model():
    expect(anthropic.NotFoundError, lambda: CLIENT.messages.create(**ASK | {"model": "nobody"}))


def error_bad_field():
    expect(anthropic.BadRequestError, lambda: CLIENT.messages.create(**ASK, extra_body={"temperature": -1}))


def cancel():
    with CLIENT.messages.stream(**ASK) as events:
        next(iter(events))
    plain()


run(
    (
        plain,
        stream,
        tools,
        tools_stream,
        json_schema,
        count_tokens,
        error_unknown_model,
        error_bad_field,
        cancel,
    )
)
