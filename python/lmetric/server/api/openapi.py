"""The OpenAPI document of the router's HTTP API.

`document` builds it from declarations: the relayed paths of `lmetric.server.api.request`, the
models of the configuration, the router's own pages, and the tables in this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic.json_schema import models_json_schema

from lmetric._core import __version__
from lmetric.config import CanaryStart, EngineConfig, PolicyChange, Role
from lmetric.descriptions import DescribedSchema
from lmetric.engines.handover import CHAT, COMPLETIONS
from lmetric.server.api import paths
from lmetric.server.api.error_codes import ERRORS
from lmetric.server.api.errors import ERROR_TYPES
from lmetric.server.api.own_pages import (
    ADMIN,
    JSON,
    KEY,
    OBJECT,
    OPEN,
    REPLICA,
    OwnPage,
    answer,
    in_path,
    schema,
)

# Summaries of the relayed paths.
SUMMARIES: Mapping[str, str] = {
    CHAT: "Generate an answer to a chat",
    COMPLETIONS: "Generate a completion of a prompt",
    "/v1/responses": "Generate a response",
    "/v1/messages": "Generate an answer to a chat (Anthropic's API)",
    "/v1/messages/count_tokens": "Count the tokens of a chat (Anthropic's API)",
    "/v1/embeddings": "Compute embeddings",
    "/v1/rerank": "Rank documents by a query",
    "/v2/rerank": "Rank documents by a query",
    "/rerank": "Rank documents by a query",
    "/v1/score": "Compute similarity scores of texts",
    "/score": "Compute similarity scores of texts",
    "/pooling": "Compute the output of a pooling model",
    "/classify": "Classify texts",
    "/tokenize": "Convert a text to token IDs",
    "/detokenize": "Convert token IDs to a text",
    f"{CHAT}/batch": "Generate answers to several chats",
    f"{CHAT}/render": "Convert a chat to an engine's request",
    f"{COMPLETIONS}/render": "Convert a completion request to an engine's request",
    f"{CHAT}/derender": "Convert an engine's output to a chat answer",
    f"{COMPLETIONS}/derender": "Convert an engine's output to a completion",
    "/v1/messages/render": "Convert a chat (Anthropic's API) to an engine's request",
    "/v1/responses/render": "Convert a responses request to an engine's request",
    "/inference/v1/generate": "Generate tokens from token IDs",
    "/v1/audio/transcriptions": "Convert speech to text",
    "/v1/audio/translations": "Convert speech to English text",
}

REQUEST_HEADERS: Mapping[str, str] = {
    "x-session-id": "Session of the request: key of the policy `session_affinity`. Fields of a body work, "
    "too: `session_id` (first), `vllm_xargs.session_id` and `user` (last). The engine receives it unchanged. "
    "A `session_id` in the body becomes this header if the request has none.",
    "x-session-final": "`true` or `1`: the last request of its agent program, which then frees its place in "
    "the cache (docs/how-to/agents.md). The engine receives it unchanged.",
    "x-request-id": "ID of the request in logs, decision record and answer: visible ASCII characters, cut to "
    "256 bytes. Default: an ID that the router makes.",
    "x-tenant": "Tenant of the request, if the router runs without API keys and issuers of tokens, and the "
    "configuration names the tenant. Engines do not receive it.",
    "x-slo-class": "Class of the request, with its own deadline of the first token, if the model has "
    "classes (docs/how-to/overload.md). Default: the class of the tenant. An empty value counts as absent. "
    "Without effect if a token's claim names the class. The engine receives it unchanged.",
    "x-vllm-priority": "Priority of the request in the engine's queue, as the field `priority`: lower first. "
    "Dropped with API keys, and with `priority: uniboost` or `vtc`.",
}

RESPONSE_HEADERS: Mapping[str, str] = {
    "x-lmetric-instance": "Engine that answers. Absent with `errors.show_engines: false`.",
    "x-lmetric-decision": "ID of the decision record: `GET /debug/decisions/ID` explains the decision.",
    "x-lmetric-prefill": "Engine that computed the prompt, if another one answers. Absent with "
    "`errors.show_engines: false`.",
    "x-lmetric-weights": "Version of the weights with which the answer began, if a trainer has announced "
    "one (`POST /admin/weights`).",
    "x-request-id": "ID of the request.",
    "x-ratelimit-limit-requests": "Limit of the tenant's budget of requests with the least left, if there is "
    "one; `-tokens`: of tokens.",
    "x-ratelimit-remaining-requests": "The rest of this limit, after this request; also `-tokens`.",
    "x-ratelimit-reset-requests": "Time until the whole limit is free, such as `6m0s`; also `-tokens`.",
    "retry-after": "Seconds until a retry is worth it, with 429 and 503, and if the engine of a stored "
    "response fails. An engine's own error may have a date.",
}


def _errors(*statuses: int, form: str = "Error") -> JSON:
    return {str(status): {"$ref": f"#/components/responses/{form}"} for status in statuses}


def _security(*schemes: str | None) -> list[JSON]:
    return [{scheme: []} if scheme else {} for scheme in schemes]


def _operation(
    tag: str,
    summary: str,
    answer: JSON,
    errors: tuple[int, ...],
    access: tuple[str | None, ...],
    *,
    body: JSON | None = None,
    parameters: tuple[JSON, ...] = (),
) -> JSON:
    """``body``: schemas of the request's body, by content type.

    Errors of operations with the tag "engines" may be the engine's own.
    """
    form = "RelayedError" if tag == "engines" else "Error"
    shown: JSON = {"tags": [tag], "summary": summary}
    if parameters:
        shown["parameters"] = list(parameters)
    if body is not None:
        shown["requestBody"] = {
            "required": True,
            "content": {media: {"schema": each} for media, each in body.items()},
        }
    return {
        **shown,
        "responses": {"200": answer, **_errors(*errors, form=form)},
        "security": _security(*access),
    }


def _relayed(path: str) -> JSON:
    """The operation of a path that the router relays to an engine."""
    streams = path in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", *paths.AUDIO)
    form = path in paths.AUDIO
    # One engine request for each prompt.
    shape: JSON = {"type": ["array", "object"]} if path == f"{COMPLETIONS}/render" else OBJECT
    passed: JSON = {
        "description": "The engine's answer, unchanged",
        "headers": {
            name: {"$ref": f"#/components/headers/{name}"}
            for name in RESPONSE_HEADERS
            if name != "retry-after"
        },
        "content": {"application/json": {"schema": shape}},
    }
    if streams:
        passed["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    operation = _operation(
        "engines",
        SUMMARIES[path],
        passed,
        errors=(400, 401, 403, 404, 408, 413, 415, 429, 500, 501, 502, 503, 504),
        access=(KEY, OPEN),
        body={"multipart/form-data": schema("AudioRequest")}
        if form
        else {"application/json": schema("EngineRequest")},
        parameters=tuple({"$ref": f"#/components/parameters/{name}"} for name in REQUEST_HEADERS),
    )
    operation["responses"]["default"] = {"description": "The engine's own error, unchanged"}
    return operation


def _stored() -> JSON:
    """The operations on a stored response, which go to the engine that holds it."""

    def operation(summary: str) -> JSON:
        return _operation(
            "engines",
            summary,
            answer("The engine's answer, unchanged", OBJECT),
            errors=(400, 401, 404, 502, 503, 504),
            access=(KEY, OPEN),
            parameters=(in_path("id", "ID of a response that the same tenant made"),),
        )

    return {
        "/v1/responses/{id}": {
            "get": operation("Show a stored response"),
            "delete": operation("Delete a stored response"),
        },
        "/v1/responses/{id}/cancel": {"post": operation("Cancel a response in the background")},
    }


def _own(page: OwnPage) -> JSON:
    """The operations of one of the router's own pages."""
    return {
        method.lower(): _with_status(
            each.status,
            _operation(
                page.tag,
                each.summary,
                each.answer,
                errors=each.errors,
                access=page.credentials,
                body=None if each.body is None else {each.media: each.body},
                parameters=each.parameters,
            ),
        )
        for method, each in page.operations.items()
    }


def _with_status(status: int, operation: JSON) -> JSON:
    """An operation whose answer has a status."""
    responses = operation["responses"]
    return {**operation, "responses": {str(status): responses.pop("200"), **responses}}


def _headers(declared: Mapping[str, str]) -> JSON:
    return {name: {"description": about, "schema": {"type": "string"}} for name, about in declared.items()}


def _components() -> JSON:
    settings = (EngineConfig, PolicyChange, CanaryStart)
    configured: list[tuple[Any, Any]] = [(each, "validation") for each in settings]
    _, models = models_json_schema(
        configured, ref_template="#/components/schemas/{model}", schema_generator=DescribedSchema
    )
    code = {"type": ["string", "null"], "enum": [*ERRORS, None]}
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string", "enum": list(ERROR_TYPES)},
            "param": {"type": ["string", "null"], "description": "Field of the request, if one is wrong"},
            "code": code,
        },
    }
    card = {
        "type": "object",
        "required": ["id", "object"],
        "properties": {"id": {"type": "string"}, "object": {"const": "model"}},
    }
    request = {
        "type": "object",
        "description": "A request of the engine's API. The router reads these fields and passes all others.",
        "properties": {
            "model": {"type": "string", "description": "Optional if the router serves one model"},
            "messages": {"type": "array", "items": OBJECT},
            "prompt": {
                "description": "Text, token IDs, or a list of either",
                "anyOf": [{"type": "string"}, {"type": "array"}],
            },
            "stream": {"type": "boolean", "default": False},
            "max_tokens": {"type": "integer", "minimum": 0},
            "max_completion_tokens": {"type": "integer", "minimum": 0},
            "cache_salt": {"type": "string", "description": "Separates prompts in the engines' caches"},
            "session_id": {"type": "string", "description": "As the header x-session-id"},
            "priority": {"type": "number", "description": "As the header x-vllm-priority"},
        },
    }
    audio = {
        "type": "object",
        "description": "A form of the engine's API. The router reads these fields and passes all others.",
        "properties": {
            "model": {"type": "string", "description": "Optional if the router serves one model"},
            "stream": {"type": "boolean", "default": False},
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        },
    }
    engine = {
        "type": "object",
        "required": ["name", "url", "mode"],
        "properties": {
            "name": {"type": "string"},
            "url": {"type": "string"},
            "model": {"type": ["string", "null"]},
            "role": {"enum": list(get_args(Role))},
            "healthy": {"type": "boolean"},
            "service": {"type": "object", "description": "State, ejection and recent outcomes"},
            "draining": {"type": "boolean"},
            "warming": {"type": "boolean"},
            "sends_prefixes": {"type": "boolean"},
            "mode": {"enum": ["exact", "approximate", "load_only"]},
            "mode_reason": {"type": "string"},
        },
    }
    count, text = {"type": "integer", "minimum": 0}, {"type": "string"}
    warning = {
        "type": "object",
        "required": ["what", "cause", "since", "fix", "engines"],
        "properties": {
            "what": {
                "enum": [
                    *("not usable", "approximate", "load_only", "decode_policy", "rebalance"),
                    *("alias", "certificate", "cpu", "discovery", "fallback", "jwks", "maybe other weights"),
                    *("other model", "queue", "records", "redis", "refusals", "replica", "state", "tenant"),
                ]
            },
            "cause": text,
            "since": {"type": ["number", "null"], "description": "Unix time in seconds, if it is known"},
            "fix": {"type": ["string", "null"]},
            "engines": count,
            "reason": {**text, "description": "The cause with names and addresses, for administrators"},
            "names": {"type": "array", "items": text, "description": "For administrators"},
        },
    }
    ready = {
        "type": "object",
        "required": ["ready", "engines", "usable", "modes", "warnings"],
        "properties": {
            "ready": {"type": "boolean"},
            "engines": count,
            "usable": count,
            "modes": {"type": "object", "additionalProperties": count},
            "warnings": {"type": "array", "items": warning},
            "models": {"type": "array", "items": OBJECT, "description": "For administrators"},
        },
    }
    bearer = {"type": "http", "scheme": "bearer"}
    error_headers = {
        name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", "retry-after")
    }
    relayed_error = answer(
        "The router's own error, in the format of OpenAI's API, or the engine's error, unchanged",
        {"anyOf": [schema("Error"), OBJECT]},
    )
    return {
        "schemas": {
            "Error": {"type": "object", "required": ["error"], "properties": {"error": error}},
            "EngineRequest": request,
            "AudioRequest": audio,
            "Engine": engine,
            "Model": card,
            "Ready": ready,
            "Models": {
                "type": "object",
                "required": ["object", "data"],
                "properties": {
                    "object": {"const": "list"},
                    "data": {"type": "array", "items": schema("Model")},
                },
            },
            **models["$defs"],
        },
        "responses": {
            "Error": {
                **answer("The router's own error, in the format of OpenAI's API", schema("Error")),
                "headers": error_headers,
            },
            "RelayedError": {**relayed_error, "headers": error_headers},
        },
        "parameters": {
            name: {"name": name, "in": "header", **declared}
            for name, declared in _headers(REQUEST_HEADERS).items()
        },
        "headers": _headers(RESPONSE_HEADERS),
        "securitySchemes": {
            KEY: {
                **bearer,
                "description": "API key of a tenant, also as the header x-api-key or api-key; or a JSON Web "
                "Token of an issuer in `auth.jwt`",
            },
            ADMIN: {**bearer, "description": "`admin.token`"},
            REPLICA: {**bearer, "description": "`replicas.token`"},
        },
    }


def document(pages: Iterable[OwnPage]) -> JSON:
    """Returns the OpenAPI 3.1 document of all paths that the router serves and relays.

    ``pages``: the router's own.
    """
    relayed = {path: {"post": _relayed(path)} for path in paths.RELAYED}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lmetric-router",
            "version": __version__,
            "summary": "A request router for fleets of LLM engines",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "The router"}],
        "tags": [
            {"name": "engines", "description": "Relayed to an engine that the policy picks"},
            {
                "name": "models",
                "description": "Served models, with `root`, `created` and `max_model_len` as the engines "
                "report them. [Names](engines.md#names-of-models-and-adapters) follow the engines",
            },
            {"name": "health", "description": "Health and metrics"},
            {"name": "debug", "description": "State of the router and explanations of decisions"},
            {"name": "admin", "description": "Changes while the router runs; with `admin.enabled: true`"},
            {
                "name": "workers",
                "description": "Engines under the paths of vllm-router and sglang-router, for trainers; with "
                "`admin.enabled: true`",
            },
            {"name": "sessions", "description": "Ends of agent programs"},
            {"name": "replicas", "description": "Load and API keys between routers"},
        ],
        "paths": {**relayed, **_stored(), **{page.path: _own(page) for page in pages}},
        "components": _components(),
    }
