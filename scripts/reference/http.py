"""docs/reference/http.md and openapi.json, from the OpenAPI document of the server."""

from __future__ import annotations

import json
from typing import Any

from lmetric.server.api.openapi import ERROR_TYPES, ERRORS, REQUEST_HEADERS, RESPONSE_HEADERS, document

HEAD = """\
# HTTP API

`scripts/make_reference http` generates this page and the [OpenAPI document](openapi.json) from the declarations in
`python/lmetric/server/api/openapi.py` and `own_pages.py`.

The router serves OpenAI's API. Bodies and answers of the paths under [Engines](#engines) are the engine's own. Routing reads `model`, the
parts of the prompt (such as `messages`, `system`, `tools` and `input`), `max_tokens`, `stream`, `session_id`, `cache_salt` and
`priority`. All fields pass. The router sets fields of a body only for a setting or path that needs them: `cache_salt` of isolated
tenants, `priority`, KV transfers, token IDs of streams that another engine can continue, and IDs of stored responses. `paths` in the
configuration adds paths; each must accept a JSON object by POST.

```sh
lmetric-router serve --embedded 2 --port 8080
```

```sh
curl -i http://127.0.0.1:8080/v1/completions -H 'content-type: application/json' -H 'x-session-id: chat-7' \\
  -d '{"prompt": "Once upon a time", "max_tokens": 8}'
```

[Access](../how-to/access.md) describes keys and tokens. [Engines](engines.md#http-between-clients-and-engines) describes HTTP itself.
"""
HEADERS_OF_REQUESTS = """
The router passes other header fields to the engine, except:

- fields of the connection, such as `connection`, `te` and `upgrade`
- `accept-encoding`: the router sends `identity`, because it reads answers
- `content-encoding`: the router sends bodies unpacked
- API keys that the router checks ([access](../how-to/access.md)), and the client's key if the engine has its own (`engines[].api_key`)
- fields that only routers send: `x-lmetric-*`, `x-data-parallel-rank`, `x-prefiller-host-port`, `endpoint-load-metrics-format`, and
  `x-forwarded-*` from clients that are no [trusted proxy](../how-to/networking.md#proxies-in-front)
"""
HEADERS_OF_ANSWERS = """
The router passes an engine's other header fields to the client, except fields of the connection, `endpoint-load-metrics`, and with
`cors.origins` the engine's own CORS fields.

A stream may begin before an engine answers: if a request is [held](../how-to/agents.md#held-streams), or if its engine sends comments for
half a second without a token. Then the router sends the head. Its own fields follow as comments, such as
`: x-lmetric-instance: gpu-3`, and the engine's fields are lost.
"""
ENGINE_ERRORS = """\
**An engine's own error** reaches the client unchanged: its status, its [header fields](#response-headers) and its body. If
several engines refused the request, the client gets the last error. One field may differ. With 429 and 503, `retry-after` is the longest
of all engines that refused, at most 60 s; without one, it is 1 to 3 s.

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
            return "keys of [`engines[]`](configuration.md#engines)"
        properties = document()["components"]["schemas"][name]["properties"]
        return ", ".join(f"`{each}`" for each in properties)
    return ", ".join(f"`{each}`" for each in body.get("properties", ()))


def tag_section(tag: dict[str, str], paths: dict[str, Any]) -> str:
    """Returns the table of the operations with a tag."""
    rows = []
    for path, operations in paths.items():
        for method, operation in operations.items():
            if operation["tags"] != [tag["name"]]:
                continue
            about = operation["summary"] + "."
            query = [each for each in operation.get("parameters", ()) if each.get("in") == "query"]
            about += "".join(f" Query: `{each['name']}`, {each['description'].lower()}." for each in query)
            if tag["name"] != "engines" and "requestBody" in operation:
                fields = schema(operation["requestBody"]["content"]["application/json"]["schema"])
                about += f" Body: {fields}." if fields else " Body: JSON object."
            statuses = ", ".join(each for each in operation["responses"] if each not in ("200", "default"))
            rows.append((f"`{method.upper()} {path}`", about, access(operation), statuses))
    return f"\n## {tag['name'].capitalize()}\n\n{tag['description']}.\n\n" + table(
        "request | | credential | errors", rows
    )


def files() -> dict[str, str]:
    """Returns the page and the document."""
    made = document()
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
