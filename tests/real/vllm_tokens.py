"""The tokens that vLLM's own code makes of requests. Run it with an interpreter that has vLLM.

    VLLM_ENVIRONMENT/bin/python tests/real/vllm_tokens.py FOLDER < REQUESTS > ANSWERS

Requests: a JSON list of [path, body]. Answers: a JSON list of token ids, or a text if vLLM refuses.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


def main() -> None:
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
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

    def chat(body: dict[str, Any]) -> list[int]:
        request = ChatCompletionRequest.model_validate(body)
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False})
        content_format = resolve_chat_template_content_format(
            None, params.chat_template_kwargs.get("tools"), "auto", tokenizer, model_config=model_config
        )
        conversation, _, _ = parse_chat_messages(request.messages, model_config, content_format)
        kwargs = merge_kwargs(params.get_apply_chat_template_kwargs(), {"tokenize": False})
        text = safe_apply_chat_template(model_config, tokenizer, conversation, **kwargs)
        how = request.build_tok_params(model_config)
        return list(tokenizer.encode(text, **how.get_encode_kwargs()))

    def completion(body: dict[str, Any]) -> list[int]:
        how = CompletionRequest.model_validate(body).build_tok_params(model_config)
        return list(tokenizer.encode(body["prompt"], **how.get_encode_kwargs()))

    answers: list[list[int] | str] = []
    for path, body in json.load(sys.stdin):
        try:
            answers.append(chat(body) if path.endswith("/chat/completions") else completion(body))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
