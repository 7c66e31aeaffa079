"""Checks of OpenAI's client: `openai_client.py URL`."""

from __future__ import annotations

import json

import openai
from checks import MODEL, URL, WEATHER, expect, run

CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
SAY = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}}
CHAT = {"model": MODEL, "messages": SAY, "max_tokens": 16, "temperature": 0}
LONGER = CHAT | {"max_tokens": 160}


def models():
    assert MODEL in [each.id for each in CLIENT.models.list()]


def plain():
    answer = CLIENT.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 16


def stream():
    chunks = [*CLIENT.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens == 16


def several_choices():
    answer = CLIENT.chat.completions.create(**CHAT | {"temperature": 1}, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]


def log_probabilities():
    answer = CLIENT.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content) == 16


def tools():
    chosen = {"type": "function", "function": {"name": "weather"}}
    answer = CLIENT.chat.completions.create(**LONGER, tools=[TOOL], tool_choice=chosen)
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}


def tools_stream():
    chosen = {"type": "function", "function": {"name": "weather"}}
    chunks = CLIENT.chat.completions.create(**LONGER, tools=[TOOL], tool_choice=chosen, stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"city": "Paris"}


def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    answer = CLIENT.chat.completions.create(**LONGER, response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"city": "Paris"}


def completion():
    answer = CLIENT.completions.create(model=MODEL, prompt="hello", max_tokens=8)
    assert answer.choices[0].text


def responses():
    answer = CLIENT.responses.create(model=MODEL, input="hello", max_output_tokens=16)
    assert answer.output_text


def responses_stream():
    events = CLIENT.responses.create(model=MODEL, input="hello", max_output_tokens=16, stream=True)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds


def responses_chain():
    first = CLIENT.responses.create(model=MODEL, input="hello", max_output_tokens=16)
    assert CLIENT.responses.retrieve(first.id).id == first.id
    again = {"previous_response_id": first.id, "max_output_tokens": 16}
    assert CLIENT.responses.create(model=MODEL, input="more", **again).previous_response_id == first.id


def error_unknown_model():
    expect(openai.NotFoundError, lambda: CLIENT.chat.completions.create(**CHAT | {"model": "nobody"}))


def error_bad_field():
    expect(openai.BadRequestError, lambda: CLIENT.chat.completions.create(**CHAT | {"temperature": -1}))


def error_unknown_response():
    expect(openai.NotFoundError, lambda: CLIENT.responses.retrieve("resp_nobody"))


def cancel():
    with CLIENT.chat.completions.create(**CHAT, stream=True) as chunks:
        next(iter(chunks))
    plain()


ANSWERS = (models, plain, stream, several_choices, log_probabilities, tools, tools_stream, json_schema)
RESPONSES = (completion, responses, responses_stream, responses_chain)
run((*ANSWERS, *RESPONSES, error_unknown_model, error_bad_field, error_unknown_response, cancel))
