"""Issued API keys: /admin/keys, their table, and their file."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from structlog.testing import capture_logs

from lmetric._core import BadValueError
from lmetric.config import ConfigError
from lmetric.server.api import openapi
from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.api.issued import (
    KEPT_SECONDS,
    MOST_CHARACTERS,
    MOST_KEYS,
    MOST_SECONDS,
    ROOM_FOR_OTHERS,
    IssuedKey,
    IssuedKeys,
    KeyTable,
    decode,
    issue,
    revoke,
)
from lmetric.server.http.pages.table import PAGES
from lmetric.server.observe import requests as metrics_of_requests
from lmetric.server.observe.key_store import FILE
from server_world import World, world
from waiting import PATIENCE_SECONDS

ADMIN = {"authorization": "Bearer root-token"}
HOUR = 3600


def settings(folder: Path, keys: str = "{}", **more: Any) -> dict[str, Any]:
    """Settings of a router that issues keys. ``keys``: content of the keys file."""
    file = folder / "keys.yaml"
    file.write_text(keys)
    return {
        "auth": {"keys_file": str(file)},
        "admin": {"enabled": True, "token": "root-token"},
        "state_folder": str(folder / "state"),
        **more,
    }


@asynccontextmanager
async def router(folder: Path, keys: str = "{}", **more: Any) -> AsyncIterator[World]:
    async with world(1, **settings(folder, keys, **more)) as w:
        yield w


async def call(w: World, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Sends a request of an administrator."""
    data = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
    async with w.client.request(method, w.url + path, data=data, headers={**ADMIN, **headers}) as answer:
        return answer.status, orjson.loads(await answer.read())


async def issued(w: World, tenant: str = "acme", seconds: float = HOUR, **more: Any) -> dict[str, Any]:
    body = {"tenant": tenant, "expires_in_seconds": seconds, **more}
    status, made = await call(w, "POST", "/admin/keys", body)
    assert status == 201, made
    return dict(made)


async def use(w: World, key: str, header: str = "authorization") -> tuple[int, Any]:
    """Sends a client's request with a key. Returns the status, and the error if there is one."""
    value = f"Bearer {key}" if header == "authorization" else key
    status, _, answer = await w.post(headers={header: value})
    return status, answer.get("error")


def schema_of(path: str, method: str, status: str) -> dict[str, Any]:
    document = openapi.document(PAGES.values())
    answer = document["paths"][path][method]["responses"][status]
    return {**answer["content"]["application/json"]["schema"], "components": document["components"]}


async def test_ever_new_tenants_of_issued_keys_make_no_further_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_of_requests, "MOST_SERIES", 2)
    async with router(tmp_path, "{sk-of-the-file: bob, sk-of-another: eve}") as w:
        for number in range(4):
            assert (await use(w, (await issued(w, f"t{number}"))["key"]))[0] == 200
        for key in ("sk-of-the-file", "sk-of-another"):
            assert (await use(w, key))[0] == 200
        await w.settled()
        requests = w.server.front.metrics.requests.requests
        counts = {tenant: count for (_, tenant, _), count in requests.items()}
        assert counts == {"t0": 1, "t1": 1, OTHER_TENANTS: 2, "bob": 1, "eve": 1}


async def test_a_key_is_shown_once_listed_and_revoked_at_once(tmp_path: Path) -> None:
    async with router(tmp_path, "sk-of-the-file: bob\n") as w:
        with capture_logs() as logs:
            made = await issued(w, name="batch jobs")
            key = made.pop("key")
            jsonschema.validate({**made, "key": key}, schema_of("/admin/keys", "post", "201"))
            assert key.startswith("lm-")
            assert len(key) == 3 + 43  # 256 bits in base64
            assert made["id"] == sha256(key.encode()).hexdigest()[:12]
            for header in ("authorization", "x-api-key", "api-key"):
                assert await use(w, key, header) == (200, None)
            status, listed = await call(w, "GET", "/admin/keys")
            jsonschema.validate(listed, schema_of("/admin/keys", "get", "200"))
            day = datetime.now(UTC).strftime("%Y-%m-%d")
            assert status == 200
            assert listed[0] == {
                "id": sha256(b"sk-of-the-file").hexdigest()[:12],
                "tenant": "bob",
                "name": "",
                "created": None,
                "expires": None,
                "state": "active",
                "source": "file",
                "last_used": None,
            }
            assert listed[1] in [{**made, "last_used": each} for each in (day, None)]
            (usage,) = (await call(w, "GET", "/admin/usage"))[1]
            assert (usage["tenant"], usage["key"], usage["requests"]) == ("acme", made["id"], 3)
            _, text = await w.get("/metrics")
            assert b'lmetric_api_keys{source="file"} 1.0' in text
            assert b'lmetric_api_keys{source="admin"} 1.0' in text

            status, ended = await call(w, "DELETE", f"/admin/keys/{made['id']}")
            jsonschema.validate(ended, schema_of("/admin/keys/{id}", "delete", "200"))
            assert (status, ended["state"]) == (200, "revoked")
            status, error = await use(w, key)
            assert (status, error["message"]) == (401, f"API key {made['id']} is revoked")
            assert (await call(w, "DELETE", f"/admin/keys/{made['id']}"))[0] == 200
            # One known key is enough, whatever else a client sends.
            assert (await w.post(headers={"authorization": f"Bearer {key}", "x-api-key": "sk-of-the-file"}))[
                0
            ] == 200
        lines = [line for line in logs if line["event"].startswith("API key ")]
        common = {
            "key_id": made["id"],
            "tenant": "acme",
            "name": "batch jobs",
            "expires": made["expires"],
            "by": "admin",
            "client": "127.0.0.1",
            "log_level": "info",
        }
        assert lines == [{"event": "API key issued", **common}, {"event": "API key revoked", **common}]
        assert key not in str(logs)
        file = tmp_path / "state" / FILE
        assert key not in file.read_text()
        assert sha256(key.encode()).hexdigest() in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_key_expires_and_the_answer_says_so(tmp_path: Path) -> None:
    async with router(tmp_path) as w:
        made = await issued(w, seconds=1)
        clock = w.server.issued._clock
        w.server.issued._clock = lambda: clock() + 2
        status, error = await use(w, made["key"])
        assert status == 401
        assert error["message"] == f"API key {made['id']} has expired ({made['expires']})"
        assert error["code"] == "invalid_api_key"
        assert [row["state"] for row in (await call(w, "GET", "/admin/keys"))[1]] == ["expired"]
        assert b'lmetric_api_keys{source="admin"} 0.0' in (await w.get("/metrics"))[1]
        # The clock was wrong: nothing was forgotten.
        w.server.issued._clock = clock
        assert (await use(w, made["key"]))[0] in (200, 401)
        at = datetime.now(UTC) + timedelta(hours=1, seconds=0.5)
        body = {"tenant": "acme", "expires_at": at.isoformat()}
        status, made = await call(w, "POST", "/admin/keys", body)
        assert status == 201
        expires = datetime.fromisoformat(made["expires"])
        assert timedelta(0) <= expires - at < timedelta(seconds=1)


BAD: list[tuple[Any, str, str]] = [
    ({"expires_in_seconds": 60}, "tenant", "tenant must be a string of 1 to 128"),
    ({"tenant": "", "expires_in_seconds": 60}, "tenant", "tenant must be"),
    ({"tenant": 7, "expires_in_seconds": 60}, "tenant", "tenant must be"),
    ({"tenant": "a" * (MOST_CHARACTERS + 1), "expires_in_seconds": 60}, "tenant", "tenant must be"),
    ({"tenant": "a\nb", "expires_in_seconds": 60}, "tenant", "printable"),
    ({"tenant": "a", "name": 1, "expires_in_seconds": 60}, "name", "name must be a string of 0 to 128"),
    ({"tenant": "a", "name": "x" * 129, "expires_in_seconds": 60}, "name", "name must be"),
    ({"tenant": "a"}, "expires_in_seconds", "set one of expires_in_seconds and expires_at"),
    (
        {"tenant": "a", "expires_in_seconds": 60, "expires_at": "2099-01-01T00:00:00Z"},
        "expires_in_seconds",
        "set one of",
    ),
    *(
        ({"tenant": "a", "expires_in_seconds": value}, "expires_in_seconds", "seconds from 1 to 315360000")
        for value in (-1, 0, 0.5, True, "60", [60], 1e300, MOST_SECONDS + 1)
    ),
    (b'{"tenant": "a", "expires_in_seconds": 1%b}' % (b"0" * 30), "expires_in_seconds", "from 1 to"),
    *(
        ({"tenant": "a", "expires_at": value}, "expires_at", "time of the next ten years with its time zone")
        for value in (
            *("", "soon", "2030-01-01", "2030-01-01T00:00:00", "2020-01-01T00:00:00Z"),
            *("9999-12-31T23:59:59Z", "0001-01-01T00:00:00+23:59", 1900000000, True, "9" * 10_000),
        )
    ),
    ({"tenant": "a", "expires_in_seconds": 60, "key": "mine"}, "key", "unknown field 'key'"),
    ([], "", "object"),
    (b"{", "", ""),
    (b"", "", ""),
    (b'{"tenant": "\\ud800", "expires_in_seconds": 60}', "", ""),
    (b"[" * 100_000, "", ""),
]


async def test_bad_fields_are_named_and_issue_nothing(tmp_path: Path) -> None:
    async with router(tmp_path) as w:
        for body, param, part in BAD:
            status, answer = await call(w, "POST", "/admin/keys", body)
            error = answer["error"]
            assert status == 400, (body, answer)
            assert part in error["message"], (body, answer)
            assert len(error["message"]) < 300
            if param:
                assert error["param"] == param, (body, answer)
        large = orjson.dumps({"tenant": "a", "name": "x" * 2_000_000, "expires_in_seconds": 60})
        assert (await call(w, "POST", "/admin/keys", large))[0] == 413
        assert (await call(w, "GET", "/admin/keys"))[1] == []
        for path in ("0" * 12, "x" * 5000, "%00", "..", "a/b", ""):
            status, answer = await call(w, "DELETE", f"/admin/keys/{path}")
            assert status == 404, (path, answer)
            assert len(answer["error"]["message"]) < 300 or len(path) > 300
        assert (await call(w, "PUT", "/admin/keys", {}))[0] == 405
        assert (await call(w, "GET", "/admin/keys/abc"))[0] == 405


async def test_only_administrators_issue_keys(tmp_path: Path) -> None:
    async with router(tmp_path, "sk-of-the-file: bob\n") as w:
        body = {"tenant": "a", "expires_in_seconds": 60}
        for method, path in (("POST", "/admin/keys"), ("GET", "/admin/keys"), ("DELETE", "/admin/keys/abc")):
            assert (await call(w, method, path, body, authorization="Bearer no"))[0] == 401
            status, answer = await call(w, method, path, body, authorization="Bearer sk-of-the-file")
            assert (status, answer["error"]["code"]) == (403, "not_admin")
            assert (await call(w, method, "/replicas/keys"))[0] == 404  # there are no other routers
        made = await issued(w)
        status, answer = await call(w, "GET", "/admin/keys", authorization=f"Bearer {made['key']}")
        assert (status, answer["error"]["code"]) == (403, "not_admin")
    off = {**settings(tmp_path), "admin": {"token": "root-token"}}
    async with world(1, **off) as w:
        assert (await call(w, "GET", "/admin/keys"))[0] == 403
        assert (await use(w, made["key"]))[0] == 200, "issued keys stay valid"


async def test_keys_need_a_keys_file_and_a_state_folder(tmp_path: Path) -> None:
    body = {"tenant": "a", "expires_in_seconds": 60}
    given = settings(tmp_path, "sk-of-the-file: bob\n")
    without_keys = {name: each for name, each in given.items() if name != "auth"}
    async with world(1, **without_keys) as w:
        for method, path in (("POST", "/admin/keys"), ("GET", "/admin/keys"), ("DELETE", "/admin/keys/abc")):
            status, answer = await call(w, method, path, body)
            assert (status, answer["error"]["code"]) == (409, "no_api_keys")
        assert (await w.post())[0] == 200, "the router stays open"
    without_folder = {name: each for name, each in given.items() if name != "state_folder"}
    async with world(1, **without_folder) as w:
        status, answer = await call(w, "POST", "/admin/keys", body)
        assert (status, answer["error"]["code"]) == (409, "no_state_folder")
        assert [row["source"] for row in (await call(w, "GET", "/admin/keys"))[1]] == ["file"]
    (tmp_path / "keys.yaml").write_text("\n")
    with pytest.raises(ConfigError, match=r"keys.yaml: the file is empty; write \{\} into it"):
        async with world(1, **given):
            pass
    with pytest.raises(ConfigError, match="there are no keys in it; add one, set state_folder to make keys"):
        async with world(1, **without_folder):
            pass


async def test_keys_of_the_file_change_only_there_and_a_reload_keeps_issued_keys(tmp_path: Path) -> None:
    async with router(tmp_path, "sk-of-the-file: bob\n") as w:
        made = await issued(w)
        of_file = sha256(b"sk-of-the-file").hexdigest()[:12]
        status, answer = await call(w, "DELETE", f"/admin/keys/{of_file}")
        assert (status, answer["error"]["code"]) == (409, "key_of_file")
        assert answer["error"]["message"] == (
            f"key {of_file} is in auth.keys_file: remove it there, and reload"
        )
        (tmp_path / "keys.yaml").write_text("sk-new: carol\nsk-newer: dave\n")
        report = await w.server.apply(w.server.prepare(w.server.config))
        assert (report["keys_added"], report["keys_removed"]) == (2, 1)
        asked = [await use(w, key) for key in (made["key"], "sk-new", "sk-of-the-file")]
        assert [status for status, _ in asked] == [200, 200, 401]
        assert asked[2][1]["message"] == "unknown API key"
        late = await issued(w)
        assert (await use(w, late["key"]))[0] == 200, "also after the reload"


async def test_a_restart_keeps_keys_and_revocations_without_a_proper_end(tmp_path: Path) -> None:
    async with router(tmp_path) as w:
        kept, ended = await issued(w), await issued(w, "other", name="é")
        assert (await call(w, "DELETE", f"/admin/keys/{ended['id']}"))[0] == 200
        before = (await call(w, "GET", "/admin/keys"))[1]
        content = (tmp_path / "state" / FILE).read_bytes()  # as a crash would leave it
    assert (tmp_path / "state" / FILE).read_bytes() == content
    async with router(tmp_path) as w:
        assert (await call(w, "GET", "/admin/keys"))[1] == before
        assert [(await use(w, each["key"]))[0] for each in (kept, ended)] == [200, 401]


RECORD = IssuedKey("ab" * 32, "t", "", 1, 2)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"x", b"[]", b"{}", b'{"keys": {}}', b"[" * 100_000, b'{"a": ' + b"[" * 100_000, b"\xff"),
        *(
            KeyTable([msgspec.structs.replace(RECORD, **{name: value})]).encode()
            for name, value in (
                *(("sha256", "AB" * 32), ("sha256", "ab" * 31), ("sha256", "ab" * 32 + "\n")),
                *(("tenant", ""), ("tenant", 3), ("tenant", "a" * 129), ("name", None)),
                *(("created", -1), ("expires", 1 << 60), ("expires", 1.5), ("revoked", "no")),
            )
        ),
    ],
)
async def test_a_broken_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadValueError, match="saved API keys: "):
        decode(content)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE).write_bytes(content)
    async with router(tmp_path, "sk-of-the-file: bob\n") as w:
        assert (await use(w, "sk-of-the-file"))[0] == 200
        assert (await issued(w))["tenant"] == "acme"
    assert (tmp_path / "state" / "keys.broken").read_bytes() == content


async def test_a_file_that_cannot_be_written_issues_nothing_and_revokes_until_the_restart(
    tmp_path: Path,
) -> None:
    async with router(tmp_path) as w:
        made = await issued(w)
        (tmp_path / "state" / "keys.new").mkdir()  # where the next content would be
        status, answer = await call(w, "POST", "/admin/keys", {"tenant": "a", "expires_in_seconds": 60})
        assert status == 500
        assert "Is a directory; no key was issued; correct it" in answer["error"]["message"]
        assert len((await call(w, "GET", "/admin/keys"))[1]) == 1
        status, answer = await call(w, "DELETE", f"/admin/keys/{made['id']}")
        assert status == 500
        assert "the key is revoked until the next restart" in answer["error"]["message"]
        assert (await use(w, made["key"]))[0] == 401
        (tmp_path / "state" / "keys.new").rmdir()
        assert (await call(w, "DELETE", f"/admin/keys/{made['id']}"))[0] == 200
    async with router(tmp_path) as w:
        assert (await use(w, made["key"]))[0] == 401


async def test_the_live_page_of_a_revoked_key_ends(tmp_path: Path) -> None:
    async with router(tmp_path) as w:
        made = await issued(w)
        headers = {"authorization": f"Bearer {made['key']}", "accept": "text/event-stream"}
        async with w.client.get(f"{w.url}/debug/live", headers=headers) as stream:
            assert stream.status == 200
            assert await stream.content.readany()
            assert (await call(w, "DELETE", f"/admin/keys/{made['id']}"))[0] == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await asyncio.wait_for(stream.content.read(), PATIENCE_SECONDS)


# The table of keys.

NOW = 1_000_000
RECORDS = [IssuedKey(f"{number:064x}", "t", "", NOW, NOW + 100) for number in range(4)]
CHANGES = st.lists(
    st.builds(
        lambda key, at: msgspec.structs.replace(key, revoked=at),
        st.sampled_from(RECORDS),
        st.sampled_from([0, NOW + 1, NOW + 2]),
    )
)


@examples(deadline=None)
@given(CHANGES, st.randoms(use_true_random=False), st.integers(1, 5))
def test_tables_agree_in_any_order_and_a_revoked_key_stays_revoked(
    changes: list[IssuedKey], random: Any, most: int
) -> None:
    first, second = IssuedKeys(stored=True), IssuedKeys(stored=True)
    first.merge(changes)
    shuffled = [*changes, *changes]
    random.shuffle(shuffled)
    for change in shuffled:
        second.merge([change])
    after = 0
    while True:  # as other routers copy it
        found, after = second.since(after, most)
        if not found:
            break
        assert len(found) <= most
        assert first.merge(found) == [], "both have all changes"
    assert after == second.version
    assert {key.sha256: key for key in first.all()} == {key.sha256: key for key in second.all()}
    ended = {key.sha256 for key in changes if key.revoked}
    assert {key.sha256 for key in second.all() if key.revoked} == ended
    copy = IssuedKeys(stored=True)
    copy.merge(decode(KeyTable(second.all()).encode()).keys)
    assert copy.all() == second.all()


def test_records_are_dropped_only_for_room_and_only_long_after_their_expiry() -> None:
    now = float(NOW)
    keys = IssuedKeys(stored=True, clock=lambda: now)
    many = [IssuedKey(f"{number:064x}", "t", "", NOW, NOW + 100) for number in range(MOST_KEYS)]
    keys.merge(many)
    keys.merge([revoke(many[0], NOW)])
    assert not keys.has_room()
    assert keys.count() == MOST_KEYS - 1
    now = NOW + 100 + KEPT_SECONDS
    assert keys.count() == 0
    assert not keys.has_room()
    now += 1
    assert keys.has_room()
    assert len(keys) == 0
    now = NOW
    others = [IssuedKey(f"{number + 10**6:064x}", "t", "", NOW, NOW + 100) for number in range(12_000)]
    keys.merge(others)
    assert (len(keys), keys.refused) == (MOST_KEYS + ROOM_FOR_OTHERS, 1_000)
    # A revocation needs no room.
    assert len(keys.merge([revoke(others[0], NOW)])) == 1


def test_keys_differ_and_the_record_has_no_key() -> None:
    made = [issue("t", "", int(time.time()) + 60) for _ in range(1000)]
    assert len({key for key, _ in made}) == len({record.id for _, record in made}) == 1000
    for key, record in made[:10]:
        assert key[3:] not in repr(record)
