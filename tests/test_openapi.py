"""The OpenAPI document: valid, complete, and what a running router answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import orjson

from lmetric.server.api import openapi, paths
from lmetric.server.api.error_codes import ERRORS
from lmetric.server.app import Reloads
from lmetric.server.http.pages.table import PAGES
from server_world import answer, world
from test_server_canary import with_results

ROOT = Path(__file__).parent.parent
SERVER = ROOT / "python" / "lmetric" / "server"
BODIES: dict[str, Any] = {
    "/v1/chat/completions/batch": {"model": "tiny", "messages": [[{"role": "user", "content": "a"}]]},
    "/inference/v1/generate": {"model": "tiny", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/admin/engines": {"url": "http://127.0.0.1:9", "name": "added"},
    "/admin/engines/{name}/role": {"role": "both"},
    "/workers": {"url": "http://127.0.0.1:10"},
    "/admin/guard": {"on": True},
    "/admin/weights": {"version": 7},
    "/admin/policy": {"policy": "lmetric"},
    "/admin/canary/start": {"policy": "vllm"},
    "/admin/canary/promote": {"model": "tiny"},
    "/admin/canary/rollback": {},
}
# Pages that need a query.
QUERIES = {
    "/add_worker": "?url=http://127.0.0.1:11",
    "/remove_worker": "?url=http://127.0.0.1:11",
    "/finish_session": "?session_id=a",
}
REMOVALS = (("delete", "/admin/engines/{name}"), ("delete", "/workers/{name}"))


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the document's components, for a validator of JSON schemas."""
    return {**schema, "components": document["components"]}


def test_the_document_is_valid_and_has_every_relayed_path() -> None:
    from openapi_spec_validator import validate  # not above: collecting processes would import it

    assert set(paths.RELAYED) <= set(openapi.SUMMARIES), "add a summary to SUMMARIES"
    document = openapi.document(PAGES.values())
    validate(document)
    assert set(paths.RELAYED) <= set(document["paths"])


def test_every_code_of_an_error_is_in_the_document() -> None:
    sources = "".join(path.read_text() for path in SERVER.rglob("*.py") if path.name != "error_codes.py")
    codes = set(re.findall(r'\bcode ?= ?"(\w+)"', sources))
    kinds = re.search(r"^STATUSES = \{\n(.*?)^\}", sources, re.MULTILINE | re.DOTALL)
    assert kinds is not None
    codes |= set(re.findall(r'"(\w+)"', kinds[1]))
    assert len(codes) > 25
    assert codes == set(ERRORS)


def test_every_kind_of_a_warning_is_in_the_document() -> None:
    sources = "".join(path.read_text() for path in SERVER.rglob("*.py"))
    kinds = set(re.findall(r'\bProblem\(\s*"([^"]+)"', sources))
    warning = openapi.document(PAGES.values())["components"]["schemas"]["Ready"]["properties"]["warnings"]
    assert len(kinds) > 10
    assert kinds <= set(warning["items"]["properties"]["what"]["enum"])


def test_relayed_paths_permit_the_errors_of_engines() -> None:
    document = openapi.document(PAGES.values())
    responses = document["components"]["responses"]
    for error in ({"detail": "Not Found"}, {"error": {"message": "m", "type": "Bad Request", "code": 400}}):
        forms = {
            name: jsonschema.Draft202012Validator(
                resolved(document, each["content"]["application/json"]["schema"])
            ).is_valid(error)
            for name, each in responses.items()
        }
        assert forms == {"Error": False, "RelayedError": True}
    rendered = document["paths"]["/v1/completions/render"]["post"]["responses"]["200"]
    jsonschema.validate([{}], rendered["content"]["application/json"]["schema"])
    for path, form in (("/v1/completions", "RelayedError"), ("/admin/guard", "Error")):
        given = document["paths"][path]["post"]["responses"]["400"]
        assert given == {"$ref": f"#/components/responses/{form}"}


def test_every_own_page_is_in_the_document() -> None:
    document = openapi.document(PAGES.values())["paths"]
    for path, page in PAGES.items():
        assert document[path].keys() == {method.lower() for method in page.operations}
        assert page.operations, path


async def test_every_own_page_answers_its_methods_and_refuses_others() -> None:
    async with world(1, admin=True) as w:
        for path, page in PAGES.items():
            if "{id}" in path or "{model}" in path or page.access == "replica":
                continue
            async with w.client.request("PATCH", w.url + path.replace("{name}", "e0")) as response:
                assert response.status == 405, path
                assert response.headers["allow"] == ", ".join(page.allowed)


async def test_a_running_router_answers_as_the_document_states() -> None:
    document = openapi.document(PAGES.values())
    async with world(1, admin=True, policy="lmetric") as w:
        w.engines[0].behave = answer
        w.server.front.reread = Reloads(w.server, lambda: w.server.config).reload
        record = (await w.post())[1]["x-lmetric-decision"]
        names = {"{model}": "tiny", "{id}": record, "{name}": "e0", "{file}": "page.js"}
        asked = 0
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if path.startswith("/v1/responses/{id}") or path in paths.AUDIO:
                    continue  # tests/test_server_passthrough.py, tests/test_server_audio.py
                if path.startswith("/replicas") or (method, path) in REMOVALS:
                    continue  # closed without replicas.urls; removes the engine
                if path.startswith("/admin/keys"):
                    continue  # tests/test_server_keys.py: they need auth.keys_file
                url = re.sub(r"\{\w+\}", lambda found: names[found[0]], path) + QUERIES.get(path, "")
                body = BODIES.get(path, {"model": "tiny", "prompt": "a", "messages": [{"role": "user"}]})
                body = {} if path.endswith("/indicators") else body
                data = orjson.dumps(body) if "requestBody" in operation else None
                if path == "/admin/canary/promote":
                    with_results(w)
                async with w.client.request(method, w.url + url, data=data) as response:
                    content = await response.read()
                    shown = f"{method} {url}: {response.status} {content[:200]!r}"
                    assert response.status == 200, shown
                    expected = operation["responses"]["200"]
                    media = expected.get("content", {})
                    if media:
                        assert response.content_type in media, shown
                    schema = media.get("application/json", {}).get("schema")
                    if schema is not None:
                        jsonschema.validate(orjson.loads(content), resolved(document, schema))
                    if operation["tags"] == ["engines"]:
                        given = set(response.headers) & {"x-lmetric-instance", "x-lmetric-decision"}
                        assert len(given) == 2, shown
                asked += 1
        assert asked > 30
        for url in ("/v1/nothing", "/admin/engines/nobody/drain"):
            status, _, error = await w.post({}, path=url)
            assert status == 404
            jsonschema.validate(error, resolved(document, document["components"]["schemas"]["Error"]))
        assert (await w.get("/replicas"))[0] == 404
        async with w.client.delete(w.url + "/admin/engines/e0?drain=0") as response:
            assert response.status == 200, await response.read()
