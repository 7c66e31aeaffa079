"""Tenants with a list of models: other names are unknown to them, wherever they look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import ServerConfig
from lmetric.server.api.paths import AUDIO, RELAYED
from lmetric.server.app import Reloads
from server_world import FakeEngine, World, strict, world

SMALL = {"id": "small", "root": "/small", "max_model_len": 1000}
LARGE = {"id": "large", "root": "/large", "max_model_len": 5000}
ALIASES = {"gpt": "large", "mini": "small"}
TENANTS = {"a": {"models": ["small", "mini"]}, "b": {"models": ["small", "large", "gpt"]}, "c": {}}
A, B, C = ({"x-tenant": name} for name in "abc")


def fakes(*cards: dict[str, Any]) -> list[FakeEngine]:
    return [FakeEngine(cards=[card], behave=strict) for card in cards]


async def seen(w: World, headers: dict[str, str]) -> list[str]:
    return [card["id"] for card in orjson.loads((await w.get("/v1/models", headers))[1])["data"]]


async def test_a_tenant_sees_and_uses_only_names_of_its_list() -> None:
    async with world(fakes(SMALL, LARGE), aliases=ALIASES, tenants=TENANTS) as w:
        names = {"small", "large", "gpt", "mini"}
        allowed = {"a": {"small", "mini"}, "b": {"small", "large", "gpt"}, "c": names}
        for headers in (A, B, C):
            own = allowed[headers["x-tenant"]]
            assert set(await seen(w, headers)) == own
            for name in names:
                status, _, _ = await w.post({"model": name, "prompt": "x"}, headers=headers)
                assert (status, name) == (200 if name in own else 404, name)
                assert (await w.get(f"/v1/models/{name}", headers))[0] == status
        assert set(await seen(w, {})) == names
        assert {request.json["model"] for request in w.engines[1].requests} == {"large"}


async def test_hidden_and_unknown_names_get_the_same_error_without_other_names() -> None:
    async with world(fakes(SMALL, LARGE), aliases=ALIASES, tenants=TENANTS) as w:
        reads = len(w.engines[0].page_reads)
        for name in ("large", "gpt", "nothing"):
            status, _, body = await w.post({"model": name, "prompt": "x"}, headers=A)
            assert (status, body["error"]["code"]) == (404, "model_not_found")
            assert body["error"]["message"] == (
                f"model {name!r} is unknown, or this tenant may not use it; served here: mini, small"
            )
            _, card = await w.get(f"/v1/models/{name}", A)
            assert orjson.loads(card) == body
        assert len(w.engines[0].page_reads) == reads, "no engine is asked for a name that cannot be used"
        status, _, body = await w.post({"prompt": "x"}, headers=A)
        assert (status, body["error"]["message"]) == (400, "model is missing; served here: mini, small")
        status, _, body = await w.post({"model": "smal", "prompt": "x"}, headers=A)
        assert body["error"]["message"].endswith("did you mean 'small'?")


async def test_the_page_at_the_root_hides_the_names_too() -> None:
    tenants = {"a": {"models": ["large"]}}
    async with world(fakes(SMALL, LARGE), tenants=tenants, admin={"token": "secret"}) as w:
        page = orjson.loads((await w.get("/", A))[1])
        assert '"model": "large"' in page["curl"]
        assert "small" not in str(page)


async def test_a_request_without_a_model_is_refused_if_the_only_one_is_hidden() -> None:
    async with world([FakeEngine(cards=[LARGE])], tenants={"a": {"models": ["small"]}}) as w:
        assert (await w.post({"prompt": "x"}))[0] == 200
        status, _, body = await w.post({"prompt": "x"}, headers=A)
        assert (status, body["error"]["message"]) == (400, "model is missing; served here: no model")


@pytest.mark.parametrize("path", sorted({*RELAYED} - {*AUDIO}))
async def test_every_path_checks_the_name(path: str) -> None:
    async with world(fakes(SMALL, LARGE), aliases=ALIASES, tenants=TENANTS) as w:
        large = "x" * 600_000
        for padding in ("", large):
            body = {"model": "gpt", "prompt": "x", "input": "x", "messages": [], "text": padding}
            status, _, said = await w.post(body, path=path, headers=A)
            assert (status, said["error"]["code"]) == (404, "model_not_found")
        assert not any(engine.requests for engine in w.engines)


@pytest.mark.parametrize("path", AUDIO)
async def test_uploads_check_the_name(path: str) -> None:
    def form(model: bytes) -> bytes:
        return (
            b'--cut\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
            b'--cut\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--cut--\r\n' % model
        )

    head = {"content-type": "multipart/form-data; boundary=cut", **A}
    async with world(fakes(SMALL, LARGE), aliases=ALIASES, tenants=TENANTS) as w:
        w.engines[0].behave = None
        status, _, said = await w.post(form(b"gpt"), path=path, headers=head)
        assert (status, said["error"]["code"]) == (404, "model_not_found")
        await w.post(form(b"mini"), path=path, headers=head)
        assert [request.body for request in w.engines[0].requests] == [form(b"small")]


async def test_the_list_is_that_of_the_api_keys_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("key-a: a\nkey-z: z\n")
    auth = {"keys_file": str(keys)}
    async with world(fakes(SMALL, LARGE), aliases=ALIASES, tenants=TENANTS, auth=auth) as w:
        a = {"authorization": "Bearer key-a", "x-tenant": "c"}
        z = {"authorization": "Bearer key-z"}  # a tenant without settings
        assert await seen(w, a) == ["small", "mini"]
        assert await seen(w, z) == ["small", "large", "gpt", "mini"]
        assert (await w.post({"model": "gpt", "prompt": "x"}, headers=a))[0] == 404
        assert (await w.post({"model": "gpt", "prompt": "x"}, headers=z))[0] == 200
        assert (await w.get("/v1/models"))[0] == 401


async def test_a_reload_replaces_the_lists_also_for_stored_responses() -> None:
    async with world(fakes(SMALL, LARGE), tenants=TENANTS, aliases=ALIASES) as w:
        values = w.server.fleet.config.model_dump(exclude_unset=True)
        body = {"model": "small", "input": "x"}
        assert (await w.post(body, path="/v1/responses", headers=A))[0] == 200
        stored = w.engines[0].requests[0].json["request_id"]
        w.engines[0].extra_pages[f"/v1/responses/{stored}"] = (200, b'{"id": "it"}')
        assert (await w.get(f"/v1/responses/{stored}", A))[0] == 200
        tenants = {"a": {"models": ["large"]}}
        config = ServerConfig.model_validate({**values, "tenants": tenants})
        await Reloads(w.server, lambda: config).reload()
        assert await seen(w, A) == ["large"]
        assert (await w.post(body, path="/v1/responses", headers=A))[0] == 404
        status, said = await w.get(f"/v1/responses/{stored}", A)
        assert (status, orjson.loads(said)["error"]["code"]) == (404, "response_not_found")


async def test_a_list_with_a_name_that_no_engine_serves_is_a_problem() -> None:
    tenants = {"a": {"models": ["small", "gone", "older"]}, "b": {"models": ["small"]}}
    async with world(fakes(SMALL), tenants=tenants) as w:
        problems = orjson.loads((await w.get("/ready"))[1])["warnings"]
        (found,) = [each for each in problems if each["what"] == "tenant"]
        assert found["reason"] == "a: no engine serves gone, older"
        assert found["fix"] == "start an engine with that model, or correct models of the tenant"


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (["gpt"], "tenants.a.models: it has the alias 'gpt', but not its models 'x', 'y'; add them, or"),
        (["gpt", "y"], "it has the alias 'gpt', but not its models 'x'; add them, or remove the alias"),
        ([], "at least 1 item"),
        ([""], "at least 1 character"),
    ],
)
def test_what_cannot_be_a_list(models: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConfig(aliases={"gpt": {"x": 1, "y": 1}}, tenants={"a": {"models": models}})
