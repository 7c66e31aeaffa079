"""Fields of a client's request that the router must replace, drop or add to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from lmetric.engines.adapter import Priority
from lmetric.engines.handover import with_fields
from server_world import FakeEngine, Request, World, world

FORGED = b'{"model":"tiny","prompt":"x","\\u0070riority":999999}'
HEADER = {"x-vllm-priority": "999999"}


def only(fake: FakeEngine) -> Request:
    (request,) = fake.requests
    return request


async def test_an_engines_own_key_replaces_the_clients() -> None:
    """Reliability M5, Server 7.10 a: engines once got the client's authorization field, too."""
    raw: list[bytes] = []
    fake = FakeEngine()
    async with world([fake]) as it:
        engine = it.server.fleet.models[0].engines["e0"]
        for key, expected in (("engine-key", [b"Bearer engine-key"]), (None, [b"Bearer theirs"])):
            engine.set_key(SecretStr(key) if key else None)
            keep_heads(it, raw)
            await it.post(headers={"Authorization": "Bearer theirs", "x-own": "1"})
            lines = raw.pop().split(b"\r\n")
            fields = [line.partition(b": ") for line in lines]
            assert [value for name, _, value in fields if name.lower() == b"authorization"] == expected
            assert [value for name, _, value in fields if name.lower() == b"x-own"] == [b"1"]


def keep_heads(it: World, raw: list[bytes]) -> None:
    """Records the heads that engines receive, byte for byte."""
    upstream = it.server.fleet.models[0].engines["e0"].upstream
    connection = upstream.take()
    if connection is not None:
        connection.transport.abort()
    connect = upstream.connect

    async def noting() -> Any:
        connection = await connect()
        transport = connection.transport

        class Noting:
            def write(self, data: bytes) -> None:
                raw.append(data.partition(b"\r\n\r\n")[0])
                transport.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(transport, name)

        connection.transport = Noting()
        return connection

    upstream.connect = noting  # type: ignore[method-assign]


@pytest.mark.parametrize("order", ["uniboost", "vtc"])
async def test_a_priority_cannot_be_forged(order: str) -> None:
    """Reliability M4: engines read the last of equal fields, once a client's, escaped."""
    async with world(1, priority=order) as it:
        engine = it.server.fleet.models[0].engines["e0"]
        engine.capabilities = replace(engine.capabilities, priority=Priority("higher_first", None))
        await it.post(FORGED, headers=HEADER)
        request = only(it.engines[0])
        assert b"999999" not in request.body
        assert request.body.count(b"riority") == 1
        assert isinstance(request.json["priority"], int)
        assert "x-vllm-priority" not in request.headers


@pytest.mark.parametrize("keys", [False, True])
async def test_with_api_keys_clients_give_no_priorities(keys: bool, tmp_path: Path) -> None:
    """Reliability M4: with API keys, tenants cannot set priorities.

    Without keys and priorities of the router, a client's own priority passes.
    """
    config: dict[str, Any] = {}
    headers = dict(HEADER)
    if keys:
        (tmp_path / "keys.yaml").write_text("sk-a: one\n")
        config["auth"] = {"keys_file": str(tmp_path / "keys.yaml")}
        headers["authorization"] = "Bearer sk-a"
    async with world(1, **config) as it:
        assert (await it.post(FORGED, headers=headers))[0] == 200
        request = only(it.engines[0])
        if keys:
            assert request.json == {"model": "tiny", "prompt": "x"}
        else:
            assert request.body == FORGED
        assert request.headers.get("x-vllm-priority") == (None if keys else "999999")


@pytest.mark.parametrize("body", [b"{}", b" { } ", b"{\n\t}"])
async def test_an_empty_body_stays_json_with_a_priority(body: bytes) -> None:
    """Server 7.10 b: adding a field to an empty object once left a comma."""
    assert with_fields(b'{"a":1}', {"b": 2}) == b'{"b":2,"a":1}'
    async with world(1, priority="uniboost", paths=["/own"]) as it:
        engine = it.server.fleet.models[0].engines["e0"]
        engine.capabilities = replace(engine.capabilities, priority=Priority("higher_first", None))
        await it.post(body, path="/own")
        assert list(only(it.engines[0]).json) == ["priority"]
