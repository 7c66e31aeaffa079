"""The tokens that vLLM's own code makes of requests. Run it with an interpreter that has vLLM.

    VLLM_ENVIRONMENT/bin/python tests/real/vllm_tokens.py FOLDER < REQUESTS > ANSWERS

Requests: a JSON list of [path, body]. Answers: a JSON list of token ids, or a text if vLLM refuses.
"""

from __future__ import annotations

import functools
import json
import sys
from types import SimpleNamespace
from typing import Any, get_args


def main() -> None:
    from transformers import AutoTokenizer
    from vllm.entrypoints.anthropic.protocol import AnthropicEffort, AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import (
        resolve_chat_template,
        resolve_chat_template_content_format,
        safe_apply_chat_template,
    )
    from vllm.renderers.params import merge_kwargs

    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model_config: Any = SimpleNamespace(
        model=folder,
        tokenizer=folder,
        trust_remote_code=False,
        enable_prompt_embeds=False,
        revision=None,
        code_revision=None,
        tokenizer_revision=None,
        multimodal_config=None,
        allowed_local_media_path="",
        allowed_media_domains=None,
        max_model_len=1 << 20,
        hf_config=SimpleNamespace(model_type="qwen2"),
    )

    def rendered(request: Any, messages: list[Any], tools: Any) -> str:
        params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False})
        content_format = resolve_chat_template_content_format(
            None, params.chat_template_kwargs.get("tools"), "auto", tokenizer, model_config=model_config
        )
        conversation, _, _ = parse_chat_messages(messages, model_config, content_format)
        kwargs = merge_kwargs(params.get_apply_chat_template_kwargs(), {"tokenize": False})
        return str(safe_apply_chat_template(model_config, tokenizer, conversation, **kwargs))

    def tokens(request: Any, messages: list[Any], tools: Any) -> list[int]:
        how = request.build_tok_params(model_config)
        return list(tokenizer.encode(rendered(request, messages, tools), **how.get_encode_kwargs()))

    def of_chat(request: Any) -> list[int]:
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        return tokens(request, request.messages, tools)

    def chat(body: dict[str, Any]) -> list[int]:
        return of_chat(ChatCompletionRequest.model_validate(body))

    @functools.cache
    def merges() -> bool:
        """As `AnthropicServingMessages._should_merge_inline_system`, without an engine."""
        templates = (
            resolve_chat_template(tokenizer, None, tools, model_config=model_config) for tools in (None, [])
        )
        return any(AnthropicServingMessages._detect_merge_inline_system(each) for each in templates)

    @functools.cache
    def disabled_effort() -> str:
        """As `AnthropicServingMessages._probe_disabled_thinking_effort`, without an engine."""

        def probe(effort: str) -> list[int] | None:
            try:
                messages = [{"role": "user", "content": "Hi"}]
                return of_chat(ChatCompletionRequest(messages=messages, reasoning_effort=effort))
            except Exception:
                return None

        none = probe("none")
        return "low" if none is None or none in map(probe, get_args(AnthropicEffort)) else "none"

    def messages(body: dict[str, Any]) -> list[int]:
        request = AnthropicMessagesRequest.model_validate(body)
        inline = any(message.role == "system" for message in request.messages)
        disabled = request.thinking is not None and request.thinking.type == "disabled"
        return of_chat(
            AnthropicServingMessages.to_chat_completion_request(
                request,
                merge_inline_system=inline and merges(),
                disabled_thinking_effort=disabled_effort() if disabled else "none",
            )
        )

    def responses(body: dict[str, Any]) -> list[int]:
        request = ResponsesRequest.model_validate(body)
        if request.previous_response_id is not None:
            raise ValueError("only an engine has the response")
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        given = construct_input_messages(
            request_instructions=request.instructions, request_input=request.input
        )
        return tokens(request, given, tools)

    def completion(body: dict[str, Any]) -> list[int]:
        how = CompletionRequest.model_validate(body).build_tok_params(model_config)
        return list(tokenizer.encode(body["prompt"], **how.get_encode_kwargs()))

    paths = {
        "/v1/chat/completions": chat,
        "/v1/completions": completion,
        "/v1/messages": messages,
        "/v1/responses": responses,
    }
    answers: list[list[int] | str] = []
    for path, body in json.load(sys.stdin):
        try:
            answers.append(paths[path](body))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
