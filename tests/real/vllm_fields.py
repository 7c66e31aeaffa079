"""The fields of vLLM's request classes, and of the values inside that may hold a part of a prompt.

Run it with an interpreter that has vLLM. Prints one JSON object: `vllm` (version), `requests` (by
path) and `values` (by place); each class with its fields, and with its values of `type`.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any


def main() -> None:
    import vllm
    from openai.types.responses import (
        ResponseInputContentParam,
        ResponseInputItemParam,
        ResponseOutputItem,
        ResponseOutputMessage,
        ResponseReasoningItem,
    )
    from pydantic import BaseModel
    from typing_extensions import is_typeddict
    from vllm.entrypoints.anthropic import protocol as anthropic
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
    from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest
    from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.renderers.chat_utils import ChatCompletionContentPartParam, ChatCompletionMessageParam

    def hints(kind: Any) -> dict[str, Any]:
        if not is_typeddict(kind):
            return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
        try:
            return typing.get_type_hints(kind)
        except NameError:  # a type that is known to type checkers only
            return dict.fromkeys([*kind.__required_keys__, *kind.__optional_keys__], Any)

    def classes(kind: Any) -> Iterator[Any]:
        """Yields the classes of a union, without those inside them."""
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
            if is_typeddict(kind) or issubclass(kind, BaseModel):
                yield kind
        else:
            for inner in typing.get_args(kind):
                yield from classes(inner)

    def literals(kind: Any) -> Iterator[str]:
        if typing.get_origin(kind) is typing.Literal:
            yield from typing.get_args(kind)
        for inner in typing.get_args(kind):
            yield from literals(inner)

    def told(*kinds: Any) -> dict[str, dict[str, list[str]]]:
        found: dict[str, dict[str, list[str]]] = {}
        for kind in (each for union in kinds for each in classes(union)):
            fields = hints(kind)
            own = found.setdefault(kind.__name__, {"fields": [], "type": []})
            own["fields"] = sorted({*own["fields"], *fields})
            own["type"] = sorted({*own["type"], *literals(fields.get("type"))})
        return dict(sorted(found.items()))

    outputs = (ResponseOutputMessage.model_fields["content"], ResponseReasoningItem.model_fields["content"])
    requests = {
        "/v1/chat/completions": chat.ChatCompletionRequest,
        "/v1/chat/completions/batch": chat.BatchChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/inference/v1/generate": GenerateRequest,
        "/v1/messages": anthropic.AnthropicMessagesRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/embeddings": EmbeddingRequest,
        "/pooling": PoolingRequest,
        "/classify": ClassificationRequest,
        "/v1/score": ScoreRequest,
        "/v1/rerank": RerankRequest,
    }
    values = {
        "chat message": told(ChatCompletionMessageParam),
        "chat part": told(ChatCompletionContentPartParam),
        "chat tool": told(chat.ChatCompletionToolsParam),
        "messages message": told(anthropic.AnthropicMessage),
        "messages block": told(anthropic.AnthropicContentBlock),
        "messages tool": told(anthropic.AnthropicTool),
        "responses item": told(ResponseInputItemParam, ResponseOutputItem),
        "responses part": told(ResponseInputContentParam, *(output.annotation for output in outputs)),
    }
    json.dump(
        {
            "vllm": vllm.__version__,
            "requests": {path: told(kind) for path, kind in requests.items()},
            "values": values,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
