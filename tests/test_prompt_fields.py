"""All fields of vLLM's request classes: each is a part of the prompt, or named here as none.

Bugs 37: parts of the prompts of coding agents were not counted. `tests/data/vllm_fields.json` has
the fields; `tests/real/record_prompts.py` writes it, and a nightly test compares it with vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.server.api.paths import RELAYED
from lmetric.server.api.request import parse

FIELDS = json.loads((Path(__file__).parent / "data" / "vllm_fields.json").read_text())

# Fields of requests that no template writes.
NOT_THE_PROMPT = {
    # The model, the answer, and its computation.
    *("model", "n", "best_of", "stop", "stop_token_ids", "stop_sequences", "stream", "stream_options"),
    *("stream_interval", "max_tokens", "max_completion_tokens", "max_output_tokens", "max_tool_calls"),
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "use_beam_search", "length_penalty"),
    *("early_stopping", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words"),
    *("repetition_detection", "logit_bias", "allowed_token_ids", "ignore_eos", "sampling_params", "echo"),
    *("structured_outputs", "guided_decoding_backend", "text", "thinking_token_budget", "watermarking"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "include", "include_reasoning"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("parallel_tool_calls", "reasoning_ended", "reasoning_parser_kwargs", "output_mode"),
    *("dimensions", "encoding_format", "embed_dtype", "endianness", "use_activation", "task", "top_n"),
    # Copies of the prompt in the answer.
    *("return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "return_token_offsets"),
    *("return_mm_kwargs", "mm_payload", "enable_response_messages", "routed_experts_prompt_start"),
    # Names and order of requests, storage.
    *("request_id", "session_id", "user", "metadata", "priority", "service_tier", "store", "background"),
    *("cache_salt", "prompt_cache_key", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"),
    # How the prompt is made of its parts. With a tokenizer, the router follows or refuses them.
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template"),
    *("truncate_prompt_tokens", "truncation_side", "truncation", "padding", "tool_choice"),
    *("max_tokens_per_query", "max_tokens_per_doc", "media_io_kwargs", "mm_processor_kwargs"),
    # Only the engine knows the earlier response.
    "previous_response_id",
    # No text: images, and numbers instead of a prompt. They turn off matching.
    *("features", "content_parts", "token_offsets", "prompt_embeds"),
}
# Completions have no template; one renderer of chats writes the format into the prompt.
NOT_THERE = {("/v1/completions", "response_format")}
# Fields of the values inside: by place.
NOT_WRITTEN = {
    # Harmony's own messages, for engines without a template.
    "chat message": {"author", "channel", "recipient", "content_type"},
    "chat part": {"type", "prompt_cache_breakpoint", "closed"},
    "chat tool": {"type"},  # counts, and `places` gives it its value
    "messages message": set(),
    # `signature` and `data`: for the provider's own models. `is_error` is dropped by vLLM.
    "messages block": {"type", "signature", "data", "is_error"},
    "messages tool": set(),
    # Names and states of items. vLLM refuses encrypted content.
    "responses item": {"type", "id", "status", "phase", "async", "caller", "created_by", "encrypted_content"},
    "responses part": {"type", "prompt_cache_breakpoint", "annotations", "logprobs"},
}
# A result repeats neither, since its call has them.
OF_THE_CALL = {"FunctionCallOutput", "ResponseFunctionToolCallOutputItem"}
# Further fields of a request, without which a field has no meaning.
PEERS = {
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "ScoreDataRequest": {"data_1": "q", "data_2": "d"},
    "ScoreQueriesDocumentsRequest": {"queries": "q", "documents": "d"},
    "ScoreQueriesItemsRequest": {"queries": "q", "items": "d"},
    "ScoreTextRequest": {"text_1": "q", "text_2": "d"},
}
NO_TEXT = {
    *("image", "image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "file"),
    *("audio_embeds", "video_url", "video_embeds", "prompt_embeds", "input_file"),
}


def prompt(path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the prompt that the router reads: text, tokens, further bytes and tokens."""
    call = parse(RELAYED[path], orjson.dumps(body))
    tokens = None if call.tokens is None else call.tokens.tolist()
    return call.text, tokens, call.more_bytes, call.more_tokens


def counts(path: str, kind: str, field: str) -> bool:
    """Whether a field of a request is a part of the prompt, or is named as none."""
    if field in NOT_THE_PROMPT or (path, field) in NOT_THERE:
        return True
    peers = PEERS.get(kind, PEERS.get(path, {}))
    if field == "chat_template_kwargs" and "messages" in FIELDS["requests"][path][kind]["fields"]:
        peers = {"messages": [{"role": "user", "content": "a"}]}
    one, other = ([7, 8], [7, 9, 9]) if field == "token_ids" else ("marker", "another")
    counted = prompt(path, {**peers, field: one})
    if counted == prompt(path, {**peers, field: other}):
        return False
    return one != "marker" or counted[2] != 0 or b"marker" in counted[0]


def test_fields_of_requests_count_or_are_named() -> None:
    fields = [
        (path, kind, field)
        for path, classes in FIELDS["requests"].items()
        for kind, found in classes.items()
        for field in found["fields"]
    ]
    assert len(fields) > 500
    assert [each for each in fields if not counts(*each)] == []


def places(place: str, kind: str, found: dict[str, Any], field: str, value: str) -> Iterable[tuple[str, Any]]:
    """Returns paths and bodies in which a field has a value, for each type of its class."""
    for name in found["type"] or [None]:
        each: dict[str, Any] = {} if name is None else {"type": name}
        each |= {field: value}
        # A value of this class begins otherwise.
        if field == "type":
            continue
        if place == "chat message":
            yield "/v1/chat/completions", {"messages": [{"role": "assistant"} | each]}
        elif place == "chat part":
            yield "/v1/chat/completions", {"messages": [{"role": "user", "content": [each]}]}
        elif place == "chat tool":
            yield "/v1/chat/completions", {"messages": [], "tools": [each]}
        elif place == "messages message":
            yield "/v1/messages", {"messages": [{"role": "user"} | each]}
        elif place == "messages block":
            yield "/v1/messages", {"messages": [{"role": "user", "content": [each]}]}
        elif place == "messages tool":
            yield "/v1/messages", {"messages": [], "tools": [each]}
        elif place == "responses item":
            role = {"role": "assistant"} if "role" in found["fields"] else {}
            yield "/v1/responses", {"input": [role | each]}
        else:
            assert place == "responses part", place
            yield "/v1/responses", {"input": [{"role": "user", "content": [each]}]}


def counts_inside(place: str, kind: str, field: str) -> bool:
    """Whether a field of a value is a part of the prompt, or is named as none."""
    if field in NOT_WRITTEN[place] or (kind in OF_THE_CALL and field in ("name", "namespace")):
        return True
    found = FIELDS["values"][place][kind]
    counted = [
        (first, second)
        for (path, one), (_, other) in zip(
            places(place, kind, found, field, "marker"),
            places(place, kind, found, field, "another"),
            strict=True,
        )
        if (first := prompt(path, one)[0]) != (second := prompt(path, other)[0])
    ]
    if NO_TEXT.intersection([*found["type"], *found["fields"]]):
        return bool(counted)
    return any(b"marker" in first for first, _ in counted)


def test_fields_of_values_count_or_are_named() -> None:
    fields = [
        (place, kind, field)
        for place, classes in FIELDS["values"].items()
        for kind, found in classes.items()
        for field in found["fields"]
    ]
    assert len(fields) > 400
    assert [each for each in fields if not counts_inside(*each)] == []


def test_names_of_other_fields_are_fields_of_vllm() -> None:
    fields = {
        field
        for classes in FIELDS["requests"].values()
        for found in classes.values()
        for field in found["fields"]
    }
    assert fields >= NOT_THE_PROMPT, NOT_THE_PROMPT - fields
    for place, names in NOT_WRITTEN.items():
        fields = {field for found in FIELDS["values"][place].values() for field in found["fields"]}
        assert fields >= names, (place, names - fields)


@pytest.mark.parametrize("kind", sorted(NO_TEXT))
def test_images_sound_and_files_count_by_digest(kind: str) -> None:
    data = "A" * 50_000
    part = {"type": kind, kind: {"url": f"data:;base64,{data}"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    text, *_ = prompt("/v1/chat/completions", body)
    assert len(text) < 100
