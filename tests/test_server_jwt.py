"""A server whose clients send JSON Web Tokens, with a real issuer over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import yaml
from rich.console import Console

from epp_world import TRUSTED, PickerWorld, answered, exchange, picking, request_body, request_head
from issuer_world import ISSUER, Issuer, Key, bearer
from lmetric.config import ConfigError
from lmetric.server.api import key_source
from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.observe import requests as metrics_of_requests
from lmetric.top_screen import why
from server_world import FakeEngine, World, chunk, world
from test_server_client import client
from test_server_passthrough import Responses
from test_server_process import engine, router
from test_server_reload import logged
from waiting import until

PROMPT = {"model": "tiny", "prompt": "x"}


def auth(*issuers: Issuer, **changes: Any) -> dict[str, Any]:
    return {"jwt": [each.settings(**changes) for each in issuers]}


async def post(w: World, token: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    return await w.post(PROMPT, headers=bearer(token) | headers)


async def message(w: World, token: str) -> tuple[int, str]:
    status, _, body = await post(w, token)
    return status, body["error"]["message"] if status != 200 else ""


@pytest.fixture
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token with an unknown key waits for the next read of the keys."""
    monkeypatch.setattr(key_source, "PAUSE_SECONDS", 0.5)


async def test_a_token_is_the_credential_of_its_tenant() -> None:
    async with Issuer().serving() as issuer, world(auth=auth(issuer)) as w:
        assert (await w.post(PROMPT))[0] == 401
        token = issuer.token()
        for _ in range(3):
            assert (await post(w, token))[0] == 200
        assert "authorization" not in w.engines[0].requests[-1].headers, "engines do not get it"
        assert (await w.get("/v1/models", bearer(token)))[0] == 200
        assert (await w.get("/v1/models"))[0] == 401
        assert w.server.front.metrics.requests.requests["tiny", "red", 200] == 3
        (row,) = [row for row in w.server.front.usage.table.rows() if row.tenant]
        assert (row.tenant, len(row.key)) == ("red", 12)
        tokens = w.server.front.admission.identity.tokens
        assert tokens is not None
        assert tokens.counts == {"valid": 1}, "it is checked once"


@pytest.mark.usefixtures("short_pause")
async def test_refusals_name_the_reason_and_not_the_token() -> None:
    async with Issuer().serving() as issuer, world(auth=auth(issuer)) as w:
        assert await message(w, issuer.token(aud="x")) == (
            401,
            "the JWT is not valid: its audience (aud) is 'x'; expected 'lmetric': request a token for it",
        )
        assert await message(w, "sk-1234567890abcdef") == (
            401,
            "the bearer token is no JWT, and there are no API keys",
        )
        assert "its signature is not valid" in (await message(w, issuer.token(key=Key("k0"))))[1]
        assert "it has the key ID 'k9'" in (await message(w, issuer.token(key=Key("k9"))))[1]
        status, fields, body = await post(w, issuer.token(exp=1))
        assert (status, body["error"]["code"]) == (401, "invalid_token")
        assert fields["www-authenticate"] == 'Bearer error="invalid_token"'
        assert (await w.get("/v1/models", bearer(issuer.token(exp=1))))[0] == 401
        assert not w.engines[0].requests


async def test_api_keys_and_tokens_work_together(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-key-of-blue-0001: blue\n")
    async with Issuer().serving() as issuer, world(auth={**auth(issuer), "keys_file": keys}) as w:
        token, expired = issuer.token(), issuer.token(exp=1)
        requests = w.server.front.metrics.requests.requests
        assert (await post(w, token))[0] == 200
        assert (await post(w, "sk-key-of-blue-0001"))[0] == 200
        assert (await post(w, expired, **{"x-api-key": "sk-key-of-blue-0001"}))[0] == 200
        assert (requests["tiny", "red", 200], requests["tiny", "blue", 200]) == (1, 2)
        # A key precedes a token, whether the token is remembered or not.
        for both in (token, issuer.token(team="green"), token):
            assert (await post(w, both, **{"x-api-key": "sk-key-of-blue-0001"}))[0] == 200
        assert (requests["tiny", "red", 200], requests["tiny", "blue", 200]) == (1, 5)
        assert (await message(w, "sk-other-0000000001")) == (401, "unknown API key")
        assert "it expired" in (await message(w, expired))[1]
        assert (await w.post(PROMPT))[2]["error"]["message"].startswith("no API key or JWT; send it as")


async def test_claims_limit_models_and_set_the_class() -> None:
    cards = [{"id": name, "root": f"/{name}"} for name in ("small", "large", "other")]
    admission = {"classes": {"gold": {"ttft_seconds": 60}, "bronze": {"ttft_seconds": 50}}}
    async with (
        Issuer().serving() as issuer,
        world(
            [FakeEngine(cards=[card]) for card in cards],
            auth=auth(issuer, class_claim="tier", models_claim="models"),
            aliases={"gpt": "large"},
            tenants={"blue": {"models": ["small", "large"], "slo_class": "bronze"}},
            admission=admission,
        ) as w,
    ):
        names = ("small", "large", "other", "gpt")

        async def usable(**claims: Any) -> set[str]:
            headers = bearer(issuer.token(**claims))
            seen = {card["id"] for card in orjson.loads((await w.get("/v1/models", headers))[1])["data"]}
            for name in names:
                status, _, body = await w.post({**PROMPT, "model": name}, headers=headers)
                assert status == (200 if name in seen else 404)
                assert status == 200 or "or this token may not use it" in body["error"]["message"]
                assert (await w.get(f"/v1/models/{name}", headers))[0] == status
            return seen

        assert await usable(models=["small", "other"]) == {"small", "other"}
        assert await usable(models="gpt") == {"gpt", "large"}, "an alias with its models"
        assert await usable(models=["other", "large"], team="blue") == {"large"}, "both lists hold"
        assert await usable(models=[]) == set()
        classes = w.server.front.metrics.requests.classes
        classes.clear()
        for claims, slo_class in (
            ({"tier": "gold"}, "gold"),
            ({}, ""),
            ({"tier": "unknown"}, ""),
            ({"team": "blue"}, "bronze"),
        ):
            token = issuer.token(models="small", **claims)
            headers = bearer(token) | {"x-slo-class": "gold"}
            assert (await w.post({**PROMPT, "model": "small"}, headers=headers))[0] == 200
            assert ("small", slo_class) in classes, "the header has no effect"
            classes.clear()


async def test_the_decision_record_names_the_credential(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-key-of-blue-0001: blue\n")
    settings = {**auth(issuer := Issuer()), "keys_file": keys}
    async with issuer.serving():
        settings |= auth(issuer)
        async with world(auth=settings) as w:
            shown = []
            for credential in (issuer.token(), "sk-key-of-blue-0001"):
                _, fields, _ = await post(w, credential)
                path = f"/debug/decisions/{fields['x-lmetric-decision']}"
                status, body = await w.get(path, bearer(credential))
                assert status == 200
                record = orjson.loads(body)
                shown.append(record["credential"])
                console = Console(width=200)
                with console.capture() as explained:
                    console.print(why(record))
                assert f"Sent with {record['credential']}" in explained.get()
                assert (await w.get(path, bearer(issuer.token(team="other"))))[0] == 404
            assert shown[0].startswith(f"JWT of {ISSUER}, subject ")
            assert shown[0].endswith(", tenant by claim team")
            assert "user-1" not in shown[0]
            assert shown[1].startswith("API key ")


async def test_ever_new_tenants_make_no_further_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_of_requests, "MOST_SERIES", 3)
    async with Issuer().serving() as issuer, world(auth=auth(issuer)) as w:
        for number in range(5):
            assert (await post(w, issuer.token(team=f"t{number}")))[0] == 200
        await w.settled()
        requests = w.server.front.metrics.requests.requests
        assert requests["tiny", OTHER_TENANTS, 200] == 2
        assert len(requests) == 4
        assert not w.server.front.running.tenants


async def test_a_live_viewer_leaves_when_its_token_expires() -> None:
    async with Issuer().serving() as issuer, world(auth=auth(issuer)) as w:
        headers = bearer(issuer.token()) | {"accept": "text/event-stream"}
        async with w.client.get(f"{w.url}/debug/live", headers=headers) as viewer:
            assert viewer.status == 200
            assert b'"access":"tenant"' in await viewer.content.readuntil(b"\n\n")
            tokens = w.server.front.admission.identity.tokens
            assert tokens is not None
            tokens._clock = lambda: time.time() + 3600
            with contextlib.suppress(aiohttp.ClientError):
                await viewer.content.read()
        assert not w.server.front.live.viewers.total()  # type: ignore[union-attr]


@pytest.mark.usefixtures("short_pause")
@pytest.mark.parametrize("size", [10, 200_000, 3_000_000], ids=["small", "in pieces", "large"])
async def test_a_request_with_a_new_key_waits_for_the_keys(size: int) -> None:
    async with Issuer().serving() as issuer, world(auth=auth(issuer)) as w:
        assert (await post(w, issuer.token()))[0] == 200
        _allow_read(w)
        issuer.rotate()
        issuer.gate = asyncio.Event()
        body = {**PROMPT, "prompt": "x" * size}
        request = asyncio.create_task(w.post(body, headers=bearer(issuer.token())))
        other = asyncio.create_task(w.post(body, headers=bearer(issuer.token(key=Key("unknown")))))
        page = asyncio.create_task(w.get("/v1/models", bearer(issuer.token(sub="page"))))
        gone = asyncio.create_task(post(w, issuer.token(sub="gone")))
        await until(lambda: issuer.reads == 2)
        gone.cancel()
        assert (await post(w, issuer.token(key=issuer.published[0])))[0] == 200, "known keys do not wait"
        assert not request.done()
        issuer.gate.set()
        assert (await request)[0] == 200
        assert (await page)[0] == 200
        assert (await other)[0] == 401
        assert [len(each.json["prompt"]) for each in w.engines[0].requests] == [1, 1, size]


@pytest.mark.usefixtures("short_pause")
async def test_a_client_that_leaves_before_its_key_is_known_asks_for_no_response() -> None:
    async with Issuer().serving() as issuer, world([Responses()], auth=auth(issuer)) as w:
        body = {"model": "tiny", "input": "x"}
        status, _, made = await w.post(body, "/v1/responses", bearer(issuer.token()))
        assert status == 200
        count = len(w.engines[0].requests)
        _allow_read(w)
        issuer.rotate()
        issuer.gate = asyncio.Event()
        path = f"/v1/responses/{made['id']}"
        gone = asyncio.create_task(w.get(path, bearer(issuer.token())))
        await until(lambda: issuer.reads == 2)
        gone.cancel()
        await until(lambda: not w.server.front.clients.connections)
        issuer.gate.set()
        requests = w.server.front.metrics.requests.requests
        await until(lambda: sum(requests.values()) == 2)
        assert [status for _, _, status in requests] == [200, 499]
        assert len(w.engines[0].requests) == count


def _allow_read(w: World | PickerWorld) -> None:
    """Ends the pause after the last read of the keys."""
    tokens = w.server.front.admission.identity.tokens
    assert tokens is not None
    for source in tokens.sources.values():
        source._began -= key_source.PAUSE_SECONDS


def _unfinished(token: str, body: bytes, *, chunked: bool) -> bytes:
    """A request whose last byte is missing."""
    length = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n{length}\r\n\r\n"
    framed = chunk(body) + b"0\r\n\r\n" if chunked else body
    return head.encode() + framed[:-1]


# Bytes that a connection holds before its key is known: some reads, and the buffer of aiohttp.
MOST_UNKNOWN = 1 << 20


@pytest.mark.usefixtures("short_pause")
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
async def test_a_body_is_read_once_its_key_is_known(chunked: bool) -> None:
    """Security: anyone could have bodies received, with a key ID that does not exist."""
    body = orjson.dumps({**PROMPT, "prompt": "x" * 8_000_000})
    async with (
        Issuer().serving() as issuer,
        world(auth=auth(issuer)) as w,
        client(w) as bad,
        client(w) as good,
    ):
        clients = w.server.front.clients
        assert (await post(w, issuer.token()))[0] == 200
        _allow_read(w)
        issuer.rotate()
        issuer.gate = asyncio.Event()
        for sender, key in ((bad, Key("unknown")), (good, issuer.key)):
            await sender.send(_unfinished(issuer.token(key=key), body, chunked=chunked))
        await until(lambda: issuer.reads == 2)
        await asyncio.sleep(0.2)
        assert 0 < clients.body_bytes <= 2 * MOST_UNKNOWN
        issuer.gate.set()
        status, _, answer = await bad.answer()
        assert status == 401
        assert b"key ID 'unknown'" in answer
        await until(lambda: clients.body_bytes > len(body) - 1000, seen=lambda: clients.body_bytes)
        last = b"\n" if chunked else body[-1:]
        await good.send(last)
        assert (await good.answer())[0] == 200
        assert w.engines[0].requests[-1].body == body
        # The connection goes on.
        small = orjson.dumps(PROMPT)
        await good.send(_unfinished(issuer.token(), small, chunked=chunked), last)
        assert (await good.answer())[0] == 200
        await until(lambda: not clients.body_bytes)


@pytest.mark.usefixtures("short_pause")
async def test_a_client_that_leaves_while_its_key_is_read_leaves_nothing() -> None:
    async with Issuer().serving() as issuer, world(auth=auth(issuer)) as w:
        assert (await post(w, issuer.token()))[0] == 200
        _allow_read(w)
        issuer.rotate()
        issuer.gate = asyncio.Event()
        for key in (Key("unknown"), issuer.key):
            async with client(w) as c:
                await c.send(_unfinished(issuer.token(key=key), b"x" * 1000, chunked=False))
                await until(lambda: w.server.front.clients.body_bytes > 0)
        await until(lambda: issuer.reads == 2)
        issuer.gate.set()
        await until(lambda: not w.server.front.clients.body_bytes)
        assert len(w.engines[0].requests) == 1


@pytest.mark.usefixtures("short_pause")
async def test_a_picker_reads_no_body_before_its_key_is_known() -> None:
    async with Issuer().serving() as issuer, picking(auth=auth(issuer)) as w:
        async with exchange(w.target) as stream:
            await stream.ask(head=request_head(authorization=f"Bearer {issuer.token()}"))
            await answered(stream)
        _allow_read(w)
        issuer.gate = asyncio.Event()
        async with exchange(w.target) as stream:
            token = issuer.token(key=Key("unknown"))
            head = request_head(authorization=f"Bearer {token}")
            await stream.send(head, request_body(b"x" * 1000, False))
            await until(lambda: issuer.reads == 2)
            await asyncio.sleep(0.1)
            assert not w.server.front.clients.body_bytes
            issuer.gate.set()
            status, _, error = await stream.refused()
            assert (status, error["code"]) == (401, "invalid_token")


@pytest.mark.usefixtures("short_pause")
async def test_an_issuer_that_is_down_is_a_problem_and_known_keys_stay_valid() -> None:
    issuer = Issuer()
    async with issuer.serving():
        pass
    async with world(auth=auth(issuer), admin={"token": "root-token"}) as w:
        status, fields, body = await post(w, issuer.token())
        assert (status, body["error"]["code"], fields["retry-after"]) == (503, "issuer_unreachable", "5")
        ready = orjson.loads((await w.get("/ready", bearer("root-token")))[1])
        assert any("an issuer's keys cannot be read" in str(each) for each in ready["warnings"])
        metrics = (await w.get("/metrics"))[1].decode()
        assert f'lmetric_jwks_reads_total{{issuer="{ISSUER}",outcome="failed"}}' in metrics
        assert 'lmetric_jwt_checks_total{outcome="no_keys"} 1.0' in metrics


async def test_a_client_with_forged_tokens_gets_429_and_others_do_not() -> None:
    proxies = {"trusted_proxies": ["127.0.0.1"]}
    async with Issuer().serving() as issuer, world(auth=auth(issuer), forwarded=proxies) as w:
        attacker, known = Key("k0"), issuer.token(sub="known")
        mine = {"x-forwarded-for": "192.0.2.1"}
        assert (await post(w, known, **mine))[0] == 200
        seen = [(await post(w, issuer.token(key=attacker, sub=str(i)), **mine))[0] for i in range(15)]
        assert seen == [401] * 10 + [429] * 5
        assert (await post(w, known, **mine))[0] == 200
        assert (await post(w, issuer.token(), **{"x-forwarded-for": "192.0.2.2"}))[0] == 200
        counts = w.server.front.admission.identity.tokens.counts  # type: ignore[union-attr]
        assert (counts["valid"], counts["limited"]) == (2, 5)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/debug/engines"),
        ("GET", "/debug/decisions/1-0123456789abcdef"),
        ("GET", "/debug/live"),
        ("GET", "/metrics"),
        ("POST", "/admin/guard"),
        ("POST", "/finish_session?session_id=a"),
    ],
)
async def test_forged_tokens_are_limited_on_the_routers_own_pages(method: str, path: str) -> None:
    """Each signature that is checked takes time of the event loop."""
    config = {"admin": {"token": "root-token", "protect_metrics": True}}
    proxies = {"trusted_proxies": ["127.0.0.1"]}
    async with Issuer().serving() as issuer, world(auth=auth(issuer), forwarded=proxies, **config) as w:
        attacker = Key("k0")

        async def status(token: str, address: str = "192.0.2.1") -> int:
            headers = bearer(token) | {"x-forwarded-for": address}
            async with w.client.request(method, w.url + path, headers=headers) as answer:
                return answer.status

        seen = [await status(issuer.token(key=attacker, sub=str(i))) for i in range(12)]
        assert seen == [401] * 10 + [429] * 2
        assert await status(issuer.token(key=attacker), "192.0.2.2") == 401, "another client"
        # The page at / shows less without a valid token, and counts as all others.
        headers = bearer(issuer.token(key=attacker, sub="more")) | {"x-forwarded-for": "192.0.2.1"}
        assert (await w.get("/", headers))[0] == 200
        counts = w.server.front.admission.identity.tokens.counts  # type: ignore[union-attr]
        assert (counts["refused"], counts["limited"]) == (11, 3)


async def test_reloads_add_and_remove_issuers(tmp_path: Path) -> None:
    first, second, third = Issuer(), Issuer("https://second"), Issuer("https://third")
    async with first.serving(), second.serving():
        third.write(tmp_path / "third.json")
        async with world(auth=auth(first)) as w:
            config = w.server.config
            one, two, three = first.token(), second.token(), third.token()
            assert [(await post(w, token))[0] for token in (one, two, three)] == [200, 401, 401]
            reads = first.reads

            async def reload(settings: dict[str, Any]) -> None:
                auth_section = type(config.auth).model_validate(settings)
                await w.server.apply(w.server.prepare(config.model_copy(update={"auth": auth_section})))

            await reload(auth(first, second, third))
            assert w.server.front.admission.identity.tokens.counts["valid"] == 1  # type: ignore[union-attr]
            assert [(await post(w, token))[0] for token in (one, two, three)] == [200, 200, 200]
            assert second.reads == 1
            await reload(auth(second, third))
            assert [(await post(w, token))[0] for token in (one, two, three)] == [401, 200, 200]
            # Keys that cannot be read refuse the reload, and nothing changes.
            second.status = 500
            (tmp_path / "third.json").write_text("{")
            first.status = 404
            for broken, text in ((auth(second, first), "status 404"), (auth(third), "not valid JSON")):
                with pytest.raises(ConfigError, match=text):
                    await reload(broken)
            assert [(await post(w, token))[0] for token in (one, two, three)] == [401, 200, 200]
            await reload({})
            assert (await w.post(PROMPT))[0] == 200
            assert first.reads >= reads


async def test_a_picker_checks_tokens_and_ignores_header_fields_with_tenants() -> None:
    async with (
        Issuer().serving() as issuer,
        picking(auth=auth(issuer), tenants={"blue": {}}, forwarded=TRUSTED) as w,
    ):
        requests = w.server.front.metrics.requests.requests
        for fields in ({}, {"x_tenant": "blue"}, {"x_gateway_inference_fairness_id": "blue"}):
            async with exchange(w.target) as stream:
                _, changed, _ = await stream.ask(
                    head=request_head(authorization=f"Bearer {issuer.token()}", **fields)
                )
                assert "authorization" not in changed
                await answered(stream)
            await w.settled()
        assert requests == {("tiny", "red", 200): 3}
        async with exchange(w.target) as stream:
            await stream.send(request_head(authorization=f"Bearer {issuer.token(aud='x')}"))
            status, _, error = await stream.refused()
            assert (status, error["code"]) == (401, "invalid_token")
        # A new key: the pick comes after the read.
        _allow_read(w)
        issuer.rotate()
        issuer.gate = asyncio.Event()
        async with exchange(w.target) as stream, exchange(w.target) as gone:
            head = request_head(authorization=f"Bearer {issuer.token()}")
            picked = asyncio.create_task(stream.ask(head=head))
            leaves = asyncio.create_task(
                gone.ask(head=request_head(authorization=f"Bearer {issuer.token()}"))
            )
            await until(lambda: issuer.reads == 2)
            leaves.cancel()
            gone.call.cancel()
            issuer.gate.set()
            assert (await picked)[0] == w.places[0]
            await answered(stream)
        await w.settled()
        assert requests["tiny", "red", 200] == 4


@pytest.mark.parametrize(
    ("fields", "trusted", "tenant"),
    [
        ({"x-tenant": "blue"}, False, ""),
        ({"x-llm-d-inference-fairness-id": "blue"}, False, ""),
        ({"x-gateway-inference-fairness-id": "blue"}, False, ""),
        ({"x-tenant": "blue"}, True, "blue"),
        ({"x-tenant": "blue", "x-gateway-inference-fairness-id": "red"}, True, "red"),
        ({"x-gateway-inference-fairness-id": "blue", "x-llm-d-inference-fairness-id": "red"}, True, "red"),
        ({"x-tenant": "unknown"}, True, ""),
    ],
    ids=str,
)
async def test_a_picker_takes_tenants_from_trusted_gateways_alone(
    fields: dict[str, str], trusted: bool, tenant: str
) -> None:
    tenants: dict[str, Any] = {"red": {}, "blue": {}}
    async with picking(tenants=tenants, **({"forwarded": TRUSTED} if trusted else {})) as w:
        async with exchange(w.target) as stream:
            head = request_head(**{name.replace("-", "_"): value for name, value in fields.items()})
            await stream.ask(head=head)
            await answered(stream)
        await w.settled()
        assert w.server.front.metrics.requests.requests == {("tiny", tenant, 200): 1}


RATE, SECONDS = 500, 3.0  # requests per second, if the machine can


async def test_keys_rotate_under_load_without_one_refusal(tmp_path: Path) -> None:
    """Each request has a token of its own. The keys change twice, once with a reload."""
    async with Issuer().serving() as issuer, engine() as fake, aiohttp.ClientSession() as client:
        config = tmp_path / "router.yaml"
        values = {"auth": auth(issuer), "engines": [{"url": fake.url}], "load": {"interval": None}}
        config.write_text(yaml.safe_dump(values))
        async with router("--config", str(config)) as r:
            await r.listening()
            seen = Counter[int]()

            async def send(token: str) -> None:
                url = f"{r.url}/v1/completions"
                async with client.post(url, json=PROMPT, headers=bearer(token)) as response:
                    await response.read()
                    seen[response.status] += 1

            total = int(RATE * SECONDS)
            tokens = []
            for third in range(3):  # signing takes longer than serving
                key = Key(f"key-{third}")
                tokens += [(key, issuer.token(key=key, sub=str(i))) for i in range(total // 3)]
            loop = asyncio.get_running_loop()
            start, tasks = loop.time(), []
            for number, (key, token) in enumerate(tokens):
                if key not in issuer.published:
                    issuer.published = [*issuer.published, key]
                    if key.key_id == "key-2":
                        r.process.send_signal(signal.SIGHUP)
                tasks.append(asyncio.create_task(send(token)))
                await asyncio.sleep(max(0.0, start + number / RATE - loop.time()))
            await asyncio.gather(*tasks)
            print(f"{total / (loop.time() - start):.0f} requests/s")
            assert seen == {200: total}
            assert issuer.reads <= 6
            await logged(r, "configuration reloaded")
