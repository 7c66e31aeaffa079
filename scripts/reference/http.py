"""docs/reference/http.md and openapi.json, from the OpenAPI document of the server."""

from __future__ import annotations

import json
from typing import Any

from lmetric.server.api.openapi import ERROR_TYPES, ERRORS, REQUEST_HEADERS, RESPONSE_HEADERS, document

HEAD = """\
# HTTP API

`scripts/make_reference http` generates this page and the [OpenAPI document](openapi.json) from the declarations in
`python/lmetric/server/api/openapi.py` and `own_pages.py`.

The router serves OpenAI's API. Bodies and answers of the paths under [Engines](#engines) are the engine's own. Routing reads the fields `model`,
`max_tokens`, `stream`, `session_id`, `cache_salt`, `priority`, and [all parts of the prompt](engines.md#relayed-paths); all other fields pass. The
engine judges values: the router refuses only `model`, fields for engines, and bodies that are not JSON or have an absurd shape. `paths` in
the configuration adds paths; each must accept a JSON object by POST.

```sh
lmetric-router serve --embedded 2 --port 8000
```

```sh
curl -i http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -H 'x-session-id: chat-7' \\
  -d '{"prompt": "Once upon a time", "max_tokens": 8}'
```

[Access](../how-to/access.md) describes keys and tokens. [Engines](engines.md#http-between-clients-and-engines) describes HTTP itself.
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
    page += "\nThe router passes other header fields to the engine, except fields of the connection.\n"
    page += "\n## Response headers\n\n" + table(
        "header | meaning", [(f"`{name}`", about) for name, about in RESPONSE_HEADERS.items()]
    )
    for tag in made["tags"]:
        page += tag_section(tag, made["paths"])
    page += "\n## Errors\n\nThe router's own errors have the format of OpenAI's API:\n\n```json\n"
    page += '{"error": {"message": "model \'x\' is unknown; served here: emulated", "type": "not_found_error", "param": "model", "code": "model_not_found"}}\n```\n\n'
    page += "An engine's own error reaches the client unchanged. In a stream that has begun, an error is an event, and the connection closes.\n\n"
    page += table("type | statuses", [(f"`{name}`", statuses) for name, statuses in ERROR_TYPES.items()])
    page += "\n" + table(
        "code | status | meaning", [(f"`{code}`", status, about) for code, (status, about) in ERRORS.items()]
    )
    page += "\nErrors of other kinds, such as an invalid body (400), have the code `null`.\n"
    return {
        "docs/reference/http.md": page,
        "docs/reference/openapi.json": json.dumps(made, indent=2) + "\n",
    }
