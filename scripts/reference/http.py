"""docs/reference/http.md and openapi.json, from the OpenAPI document of the server."""

from __future__ import annotations

import json
from typing import Any

from lmetric.server.api.error_codes import ERRORS
from lmetric.server.api.errors import ERROR_TYPES
from lmetric.server.api.openapi import REQUEST_HEADERS, RESPONSE_HEADERS, document
from lmetric.server.http.pages.table import PAGES

HEAD = """\
# HTTP API

`scripts/make_reference http` generates this page and the [OpenAPI document](openapi.json), which `GET /openapi.json` also returns.

The router serves OpenAI's API. Answers of the paths under [Engines](#engines) are the engine's own. Routing reads `model`,
the prompt, `max_tokens`, `stream`, `session_id`, `cache_salt` and `priority`; all fields pass, and the engine judges their values. The
router refuses a wrong `model`, fields that only routers send, SGLang's `lora_path`, and bodies that are not JSON or have an absurd shape. It
sets fields only if a setting or path needs them: `cache_salt` of isolated tenants, `priority`, KV transfers, token IDs of streams that may
move, and IDs of stored responses. `paths` in the configuration adds paths with a JSON object by POST.

```sh
lmetric-router serve --embedded 2 --port 8080
```

```sh
curl -i http://127.0.0.1:8080/v1/completions -H 'content-type: application/json' -H 'x-session-id: chat-7' \\
  -d '{"prompt": "Once upon a time", "max_tokens": 8}'
```
"""
HEADERS_OF_REQUESTS = """
The router passes other header fields to the engine, except:

- fields of the connection, such as `connection`, `te` and `upgrade`
- `accept-encoding`, `content-encoding`: the router sends `identity` and unpacked bodies
- API keys that the router checks, and the client's key if the engine has its own (`engines[].api_key`)
- fields that only routers send: `x-lmetric-*`, `endpoint-load-metrics-format`, `x-data-parallel-rank`, and `x-forwarded-*` from clients that
  are no trusted proxy
- fields that steer llm-d's sidecar, also with the prefix `x-llm-d-`: `x-prefiller-host-port`, `x-encoder-hosts-ports`,
  `x-kv-cache-source-host-port`, `x-data-parallel-host-port`
"""
HEADERS_OF_ANSWERS = """
The router passes an engine's other header fields to the client, except fields of the connection, `endpoint-load-metrics`, and with
`cors.origins` the engine's own CORS fields.

A stream may begin before an engine answers: if a request is held, or if its engine sends comments for half a second without a token. Then
the router sends the head, its own fields follow as comments such as `: x-lmetric-instance: gpu-3`, and the engine's fields are lost.
"""
ENGINE_ERRORS = """\
**An engine's own error** reaches the client unchanged: status, [header fields](#response-headers) and body. If several engines refused
the request, the client gets the last error. With 429 and 503, `retry-after` is the longest of all engines that refused, at most 60 s;
without one, it is 1 to 3 s.

**In a stream that has begun**, an error is the last event, in the format of the path's API. The connection stays open. If the stream has
no chunks or a `content-encoding`, or if a plain answer breaks, the connection closes instead.

"""
ACCESS = {"apiKey": "API key", "adminToken": "admin token", "replicaToken": "replica token"}


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = head.count("|") + 1
    lines = [head, " | ".join(["---"] * columns), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def access(operation: dict[str, Any]) -> str:
    """Returns the credential of an operation. Without keys and tokens, access is open (locally)."""
    schemes = [ACCESS[name] for each in operation["security"] for name in each]
    return " or ".join(schemes) or "open"


def schema(body: dict[str, Any]) -> str:
    """Returns the fields of a body, or the name of its schema."""
    if "allOf" in body:
        parts = [schema(part) for part in body["allOf"]]
        return ", ".join(filter(None, parts))
    if "$ref" in body:
        name = body["$ref"].rpartition("/")[2]
        if name == "EngineConfig":
            return "keys of [`engines[]`](settings.md#engines)"
        properties = document(PAGES.values())["components"]["schemas"][name]["properties"]
        return ", ".join(f"`{each}`" for each in properties)
    return ", ".join(f"`{each}`" for each in body.get("properties", ()))


def tag_section(tag: dict[str, str], paths: dict[str, Any]) -> str:
    """Returns the list of the operations with a tag. Text that all share stands above it."""
    rows = []
    for path, operations in paths.items():
        for method, operation in operations.items():
            if operation["tags"] != [tag["name"]]:
                continue
            about = operation["summary"]
            query = [each for each in operation.get("parameters", ()) if each.get("in") == "query"]
            about += "".join(f". Query: `{each['name']}`, {each['description'].lower()}" for each in query)
            if tag["name"] != "engines" and "requestBody" in operation:
                (media, body), *_ = operation["requestBody"]["content"].items()
                other = "JSON object" if media == "application/json" else f"`{media}`"
                about += f". Body: {schema(body['schema']) or other}"
            statuses = ", ".join(
                sorted(each for each in operation["responses"] if each not in ("200", "default"))
            )
            rows.append((f"`{method.upper()} {path}`", about, access(operation), statuses))
    usual = [
        max(column, key=column.count) for column in (list(column) for column in zip(*rows, strict=True))
    ][2:]
    shown = []
    for request, about, *more in rows:
        special = [each for each, most in zip(more, usual, strict=True) if each != most]
        shown.append(f"- {request}: {about}" + (f" ({'; '.join(special)})\n" if special else "\n"))
    note = f"Credential: {usual[0]}. Error statuses: {usual[1] or 'none'}."
    note += " Other values are in parentheses." if any(row[2:] != tuple(usual) for row in rows) else ""
    return f"\n## {tag['name'].capitalize()}\n\n{tag['description']}. {note}\n\n" + "".join(shown)


def files() -> dict[str, str]:
    """Returns the page and the document."""
    made = document(PAGES.values())
    page = HEAD
    page += "\n## Request headers\n\n" + table(
        "header | meaning", [(f"`{name}`", about) for name, about in REQUEST_HEADERS.items()]
    )
    page += HEADERS_OF_REQUESTS
    page += "\n## Response headers\n\n" + table(
        "header | meaning", [(f"`{name}`", about) for name, about in RESPONSE_HEADERS.items()]
    )
    page += HEADERS_OF_ANSWERS
    for tag in made["tags"]:
        page += tag_section(tag, made["paths"])
    page += "\n## Errors\n\nThe router's own errors have the format of OpenAI's API:\n\n```json\n"
    page += '{"error": {"message": "model \'x\' is unknown; served here: emulated", "type": "not_found_error", "param": "model", "code": "model_not_found"}}\n```\n\n'
    page += ENGINE_ERRORS
    page += table("type | statuses", [(f"`{name}`", statuses) for name, statuses in ERROR_TYPES.items()])
    page += "\n" + table(
        "code | status | meaning", [(f"`{code}`", status, about) for code, (status, about) in ERRORS.items()]
    )
    page += "\nErrors of other kinds, such as an invalid body (400), have the code `null`.\n"
    return {
        "docs/reference/http.md": page,
        "docs/reference/openapi.json": json.dumps(made, indent=2) + "\n",
    }
