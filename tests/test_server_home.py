"""The page at /, /debug, lists of decisions and engines, hints for wrong paths, request ids."""

from __future__ import annotations

import asyncio
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

from server_world import World, decision_id, reset, world
from waiting import PATIENCE_SECONDS

ADMIN = {"authorization": "Bearer root-token"}
ALICE = {"authorization": "Bearer sk-alice"}
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def closed(tmp_path: Path) -> dict[str, Any]:
    """API keys, an admin token, and protected metrics."""
    file = tmp_path / "keys.yaml"
    file.write_text("sk-alice: alice\n")
    admin = {"enabled": True, "token": "root-token", "protect_metrics": True}
    return {"auth": {"keys_file": str(file)}, "admin": admin}


async def page(it: World, path: str = "/", headers: dict[str, str] | None = None) -> Any:
    status, body = await it.get(path, headers)
    assert status == 200, body
    return orjson.loads(body)


class Elements(HTMLParser):
    """The elements of a page, and its addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("href", "src", "action")]


async def test_the_page_for_browsers_and_for_programs() -> None:
    """UX 3: / answered 404."""
    async with world(2, policy="lmetric") as it:
        got = await page(it)
        assert (got["name"], got["ready"], got["usable"]) == ("lmetric-router", True, 2)
        assert [each["engine"] for each in got["fleet"]] == ["e0", "e1"]
        assert "/v1/chat/completions" in got["api_paths"]
        assert f"http://127.0.0.1:{it.server.port}/v1/completions" in got["curl"]
        for path in got["pages"]:
            assert (await it.get(path))[0] == 200, path
        async with it.client.get(it.url + "/", headers=HTML) as answer:
            text = await answer.text()
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        found = Elements(text)
        assert "script" not in found.tags
        assert set(found.addresses) == set(got["pages"])  # no address of another host
        assert "approximate" in text
        async with it.client.head(it.url + "/") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        assert (await it.post({}, "/"))[0] == 405


async def test_the_page_shows_only_what_a_credential_may_read(closed: dict[str, Any]) -> None:
    async with world(2, **closed) as it:
        for accept in ({}, HTML):
            text = (await it.get("/", accept))[1].decode()
            for hidden in ("e0", "tiny", "/debug", "/metrics", "/v1/models<", "0.1.0", "127.0.0.1"):
                assert hidden not in text, hidden
        got = await page(it, headers=ALICE)
        assert '"tiny"' in got["curl"]
        assert "$API_KEY" in got["curl"]
        assert set(got["pages"]) == {"/health", "/ready", "/ui", "/v1/models", "/openapi.json"}
        assert {"fleet", "models", "version"}.isdisjoint(got)
        assert all("names" not in each for each in got["warnings"])
        got = await page(it, headers=ADMIN)
        assert len(got["fleet"]) == 2
        assert {"/debug", "/metrics"} <= got["pages"].keys()
        # A web page in a browser on the same machine cannot read it.
    async with world(1) as it:
        assert "fleet" not in await page(it, headers={"origin": "https://page.example"})


async def test_texts_of_engines_are_escaped() -> None:
    name = "<script>alert(1)</script>"
    engines = [{"url": "http://127.0.0.1:9", "name": name}]
    async with world(0, engines=engines) as it:
        text = (await it.get("/", HTML))[1].decode()
        assert "script" not in Elements(text).tags
        assert "&lt;script&gt;alert(1)" in text


async def test_debug_has_an_index() -> None:
    async with world(1) as it:
        for path in (await page(it, "/debug"))["pages"]:
            assert (await it.get(path))[0] == 200, path
        text = (await it.get("/debug", HTML))[1].decode()
        assert "/debug/indicators" in Elements(text).addresses


async def test_recent_decisions_are_listed(closed: dict[str, Any]) -> None:
    async with world(2) as it:
        assert await page(it, "/debug/decisions") == []
        it.engines[0].behave = reset  # a retry is part of the same decision
        labels = [(await it.post(headers={"x-request-id": f"r{n}"}))[1] for n in range(5)]
        got = await page(it, "/debug/decisions")
        assert [decision_id({"x-lmetric-decision": each["id"]}) for each in got] == [5, 4, 3, 2, 1]
        assert [each["request_id"] for each in got] == ["r4", "r3", "r2", "r1", "r0"]
        assert got[0]["id"] == labels[-1]["x-lmetric-decision"]
        assert (got[0]["model"], got[0]["outcome"]) == ("tiny", "finished")
        assert len(await page(it, "/debug/decisions?limit=2")) == 2
        long = ("limit=0000001009999", "limit=" + "0" * 5000 + "1", "limit=1&limit=2")
        for query in ("limit=0", "limit=201", "limit=x", "limit=", "limit=%C2%B2", "last=1", *long):
            assert (await it.get(f"/debug/decisions?{query}"))[0] == 400, query
    async with world(1, **closed) as it:
        await it.post(headers=ALICE)
        assert [(await it.get("/debug/decisions", who))[0] for who in ({}, ALICE, ADMIN)] == [401, 403, 200]
        # An administrator can open a listed decision of any tenant.
        [listed] = await page(it, "/debug/decisions", ADMIN)
        assert (await page(it, f"/debug/decisions/{listed['id']}", ADMIN))["instance"] == "e0"
        assert (await it.get(f"/debug/decisions/{listed['id']}", ALICE))[0] == 404


async def test_engines_are_listed_by_name() -> None:
    """UX, smaller papercuts: / listed engines as embedded-2, 3, 1, 0."""
    names = ["gpu-10", "gpu-2", "gpu-1", "7", "b"]
    engines = [{"url": f"http://127.0.0.1:{port}", "name": name} for port, name in enumerate(names, 1)]
    async with world(0, engines=engines) as it:
        got = await page(it, "/")
        assert [each["engine"] for each in got["fleet"]] == ["7", "b", "gpu-1", "gpu-2", "gpu-10"]


async def test_decision_records_leave_out_empty_fields() -> None:
    """UX 25: 24 of the 47 fields were null."""
    async with world(1) as it:
        path = f"/debug/decisions/{(await it.post())[1]['x-lmetric-decision']}"
        short, full = await page(it, path), await page(it, path + "?full=1")
        assert None not in short.values()
        assert short == {name: value for name, value in full.items() if value is not None}
        assert full["decode_instance"] is None
        assert (await it.get(path + "?full=yes"))[0] == 400


async def test_engines_of_administration_are_listed(closed: dict[str, Any]) -> None:
    """UX, section 3: GET /admin/engines answered 405."""
    async with world(2, **closed) as it:
        assert [each["name"] for each in await page(it, "/admin/engines", ADMIN)] == ["e0", "e1"]
        assert (await it.get("/admin/engines", ALICE))[0] == 403


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("POST", "/chat/completions", "; did you mean /v1/chat/completions?"),
        ("POST", "/v1/completions/", "; did you mean /v1/completions?"),
        ("POST", "/v1/v1/completions", "; leave out the second /v1"),
        ("POST", "/my/own", "; to relay it to the engines, add it to paths in the configuration"),
        ("POST", "/" + "x" * 5000, "; to relay it to the engines, add it to paths in the configuration"),
        ("GET", "/debug/engine", "; did you mean /debug/engines?"),
        ("GET", "/my/own", ""),
        ("GET", "/admin/policies", "; did you mean /admin/policy?"),
        ("POST", "/admin/weights/", "; did you mean /admin/weights?"),
    ],
)
async def test_unknown_paths_have_a_hint(method: str, path: str, hint: str) -> None:
    headers = {"authorization": "Bearer a"}
    async with (
        world(1, admin={"enabled": True, "token": "a"}) as it,
        it.client.request(method, it.url + path, headers=headers) as answer,
    ):
        error = (await answer.json())["error"]
        assert (answer.status, error["message"]) == (404, f"unknown path {path}{hint}")


async def raw(it: World, request_id: bytes, path: bytes = b"/v1/completions") -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
    body = b'{"model":"tiny","prompt":"x"}'
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: %b\r\n" % (path, request_id)
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    got = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    found = re.search(rb"x-request-id: ([^\r]*)", got, re.IGNORECASE)
    assert found is not None, got
    return found[1].decode("latin-1")


async def test_request_ids_are_limited() -> None:
    """UX, section 3: an id with a tab came back as it was."""
    async with world(1) as it:
        assert await raw(it, b"trace-1/2:3") == "trace-1/2:3"
        assert await raw(it, b"a" * 300) == "a" * 256
        for unusual in (b"a\tb", b"a b", "é".encode(), b"a\xffb"):
            answered = await raw(it, unusual)
            assert re.fullmatch("[!-~]+", answered), unusual
            assert answered != unusual.decode("latin-1")
            sent = it.engines[0].requests[-1].headers["x-request-id"]
            assert sent == answered
            assert re.fullmatch("[!-~]+", await raw(it, unusual, b"/nowhere")), unusual
        assert await raw(it, b"a" * 300, b"/nowhere") == "a" * 256


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
async def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    """Chromium loads the page, applies its style, and reports no violation of the page's policy."""
    async with world(2) as it:
        shot = tmp_path / "home.png"
        process = await asyncio.create_subprocess_exec(
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--user-data-dir={tmp_path}/profile", f"--screenshot={shot}", "--window-size=1000,900"),
            it.url + "/",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), 60)
        assert shot.stat().st_size > 10_000, said
        assert b"Content Security Policy" not in said, said
