"""`top --why` and /debug/decisions explain refused requests by their x-request-id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.server.observe import refusals
from lmetric.top import read_decision
from lmetric.top_screen import why
from server_world import FakeEngine, World, world

KEYS = "key-a: a\nkey-b: b\n"
TENANTS = {"a": {"budgets": [{"counts": "requests", "limit": 1, "per": "hour", "name": "one an hour"}]}}


async def ask(w: World, key: str, **body: Any) -> tuple[int, str]:
    """Returns the status of a request, and its ID."""
    status, headers, _ = await w.post(
        {"model": "tiny", "prompt": "x", "max_tokens": 3} | body, headers={"authorization": f"Bearer {key}"}
    )
    return status, headers["x-request-id"]


async def test_a_refused_request_is_explained_to_its_tenant_and_to_administrators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "KEPT", 2)
    (tmp_path / "keys.yaml").write_text(KEYS)
    auth = {"keys_file": tmp_path / "keys.yaml"}
    async with world([FakeEngine()], auth=auth, tenants=TENANTS, admin={"token": "secret"}) as w:
        assert (await ask(w, "key-a"))[0] == 200
        status, refused = await ask(w, "key-a")
        assert status == 429
        for token in ("secret", "key-a"):
            record = await read_decision(w.url, refused, token)
            assert (record["outcome"], record["status"], record["code"]) == (
                "refused",
                429,
                "rate_limit_exceeded",
            )
            assert record["because"].startswith(
                "the router refused it with status 429: tiny: budget 'one an hour'"
            )
            assert str(why(record).renderables[1]).startswith("The router refused it")  # type: ignore[attr-defined]
        path = f"/debug/decisions/{refused}"
        assert (await w.get(path, {"authorization": "Bearer key-b"}))[0] == 404
        unknown = orjson.loads((await w.get("/debug/decisions/none", {"authorization": "Bearer key-a"}))[1])
        assert "expected the value of the header x-lmetric-decision" in unknown["error"]["message"]
        status, unnamed = await ask(w, "no-key")
        assert status == 401
        assert (await read_decision(w.url, unnamed, "secret"))["status"] == 401
        # Clients choose the IDs of their requests, and need no key for a refusal.
        for key, request_id in (("key-b", refused), *(("no-key", each) for each in (refused, "1", "2", "3"))):
            headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
            assert (await w.post({"model": "none", "prompt": "x"}, headers=headers))[0] in (401, 404)
        assert (await read_decision(w.url, refused, "key-a"))["status"] == 429
        assert (await read_decision(w.url, refused, "key-b"))["status"] == 404
        assert (await read_decision(w.url, "3", "secret"))["status"] == 401
        assert (await w.get("/debug/decisions/1", {"authorization": "Bearer secret"}))[0] == 404
        assert (await w.get(f"/debug/decisions/{unnamed}", {"authorization": "Bearer key-a"}))[0] == 404


async def test_an_administrator_gets_the_last_refusal_of_an_id(tmp_path: Path) -> None:
    """Clients choose the IDs of their requests, so several may choose the same."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    auth = {"keys_file": tmp_path / "keys.yaml"}
    async with world([FakeEngine()], auth=auth, tenants=TENANTS, admin={"token": "secret"}) as w:
        for key, model in (("key-a", "x"), ("key-b", "y"), ("no-key", "z"), ("key-a", "w"), ("key-b", "v")):
            headers = {"authorization": f"Bearer {key}", "x-request-id": "job-1"}
            status, _, answer = await w.post({"model": model, "prompt": "x"}, headers=headers)
            record = await read_decision(w.url, "job-1", "secret")
            assert record["status"] == status
            assert answer["error"]["message"] in record["because"]


async def test_without_keys_only_administrators_see_refusals() -> None:
    async with world([FakeEngine()], admin={"token": "secret"}) as w:
        status, headers, _ = await w.post({"model": "none", "prompt": "x"})
        assert status == 404
        path = f"/debug/decisions/{headers['x-request-id']}"
        assert (await w.get(path))[0] == 404
        assert (await w.get(path, {"authorization": "Bearer secret"}))[0] == 200


async def test_the_oldest_refusals_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "KEPT", 2)
    async with world([FakeEngine()]) as w:
        ids = [(await w.post({"model": "none", "prompt": "x"}))[1]["x-request-id"] for _ in range(3)]
        assert [(await w.get(f"/debug/decisions/{each}"))[0] for each in ids] == [404, 200, 200]
