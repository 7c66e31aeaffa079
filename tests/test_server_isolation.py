"""Tenant isolation: caches reveal nothing about other tenants' prompts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

import lmetric as lm
from lmetric.config import ConfigError, load_config
from lmetric.engines.sglang import Sglang
from lmetric.engines.vllm import Vllm
from server_world import FakeEngine, World, world
from test_server_kv import IDS, connected, emulated
from test_server_process import router

ALICE = {"authorization": "Bearer sk-alice"}
BOB = {"authorization": "Bearer sk-bob"}
COMPLETIONS = "/v1/completions"
SECRET = "of all routers"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Writes a file of API keys of two tenants."""
    file = tmp_path / "keys.yaml"
    file.write_text("sk-alice: alice\nsk-bob: bob\n")
    return file


@asynccontextmanager
async def tenants(
    keys: Path, fakes: int | list[FakeEngine] = 1, /, *isolated: str, **config: Any
) -> AsyncIterator[World]:
    """Starts a router with two tenants, some of them isolated."""
    settings = {"tenants": {name: {"isolate": True} for name in isolated}, **config}
    auth = {"keys_file": str(keys), **settings.pop("auth", {})}
    async with world(fakes, auth=auth, **settings) as it:
        yield it


async def sent(it: World, headers: dict[str, str], body: Any, path: str = COMPLETIONS) -> dict[str, Any]:
    """Returns the body that an engine gets for a request, without the ID of a stored response."""
    status, _, answer = await it.post(body, path, headers)
    assert status == 200, answer
    request = next(engine.requests.pop() for engine in it.engines if engine.requests)
    assert request.body.count(b'"cache_salt"') <= 1
    got = request.json
    if path == "/v1/responses":
        assert got.pop("request_id").startswith("resp_")
    return got


# Requests at engines.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"model": "tiny", "prompt": "hello"}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"model": "tiny", "input": "hi"}),
        ("/v1/embeddings", {"model": "tiny", "input": "hi"}),
    ],
)
async def test_an_isolated_tenants_prompts_are_salted_at_the_engine(
    keys: Path, path: str, body: dict[str, Any]
) -> None:
    """Reliability H1: the only salt was the client's own."""
    async with tenants(keys, 1, "alice") as it:
        got = await sent(it, ALICE, body, path)
        salt = got.pop("cache_salt")
        assert len(salt) == 32
        assert got == body
        assert (await sent(it, ALICE, body, path))["cache_salt"] == salt
        assert await sent(it, BOB, body, path) == body
        own = await sent(it, BOB, {**body, "cache_salt": "own"}, path)
        assert own["cache_salt"] == "own", "a tenant that is not isolated salts as it likes"
        # No tenant gets another tenant's salt by sending it, nor its own plain salt.
        salts = {salt}
        for given in (salt, "own", "x" * 1000, ""):
            salts.add((await sent(it, ALICE, {**body, "cache_salt": given}, path))["cache_salt"])
        assert len(salts) == 5


async def test_a_salt_cannot_be_smuggled_past_the_routers(keys: Path) -> None:
    """Reliability H1: the router replaces the field, even if it is escaped or repeated."""
    async with tenants(keys, 1, "alice") as it:
        for field in (b'"cache\\u005fsalt":"x"', b'"cache_salt":"y","cache_salt":"x"'):
            got = await sent(it, ALICE, b'{"model":"tiny","prompt":"a",' + field + b"}")
            assert len(got["cache_salt"]) == 32
            assert got["cache_salt"] != "x"
        # A field added to an empty object needs no comma.
        assert (await sent(it, ALICE, b"{}", "/v1/responses")).keys() == {"cache_salt"}


async def test_paths_on_which_engines_take_no_salt_are_refused(keys: Path) -> None:
    """Reliability H1: the router refuses requests whose salt the engine would ignore."""
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    async with tenants(keys, 1, "alice", paths=["/generate"]) as it:
        for path in ("/v1/messages", "/generate"):  # this engine is of an unknown kind
            status, _, got = await it.post(body, path, ALICE)
            assert (status, got["error"]["code"]) == (403, "not_isolated")
            assert await sent(it, BOB, body, path) == body
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            assert await sent(it, ALICE, body, path) == body


async def test_vllm_reads_the_salt_of_messages(keys: Path) -> None:
    """Security: vLLM 0.32 reads `cache_salt` on /v1/messages, SGLang does not.

    All engines of the model must read it. `vllm_fields.json` has the fields of vLLM's request class
    (nightly compares it).
    """
    path = "/v1/messages"
    recorded = orjson.loads((Path(__file__).parent / "data" / "vllm_fields.json").read_bytes())
    assert "cache_salt" in recorded["requests"][path]["AnthropicMessagesRequest"]["fields"]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    async with tenants(keys, 2, "alice") as it:
        model = it.server.fleet.models[0]
        model.engines["e0"].adapter = Vllm()
        status, _, got = await it.post(body, path, ALICE)
        assert (status, got["error"]["code"]) == (403, "not_isolated")
        model.engines["e1"].adapter = Vllm()
        salt = (await sent(it, ALICE, body, path))["cache_salt"]
        assert salt == (await sent(it, ALICE, {**body, "cache_salt": None}, path))["cache_salt"]
        assert salt != (await sent(it, ALICE, {**body, "cache_salt": "own"}, path))["cache_salt"]
        assert await sent(it, BOB, body, path) == body
    assert not Sglang.salts_messages


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "a"}
NAMED_ITEM = {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}


async def test_a_tenants_name_in_a_header_is_utf_8_or_latin_1() -> None:
    """A client whose name is not found has no salt, no budget and all models, without an error."""
    async with world(tenants={"Süd": {"isolate": True, "models": ["none"]}, "Süden": {"isolate": True}}) as w:

        async def answer(first: str, tenant: bytes, body: bytes = b"") -> bytes:
            head = b"%b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-tenant: " % first.encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
            writer.write(head + tenant + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            got = await reader.read()
            writer.close()
            return got

        salts = set()
        for encoding in ("utf-8", "latin-1"):
            got = await answer("POST /v1/completions", "Süden".encode(encoding), b'{"prompt": "a"}')
            assert got.startswith(b"HTTP/1.1 200 ")
            salts.add(w.engines[0].requests[-1].json["cache_salt"])
            assert b'"tiny"' not in await answer("GET /v1/models", "Süd".encode(encoding))
        assert len(salts) == 1
        assert b'"tiny"' in await answer("GET /v1/models", "Süden".encode())
        assert (await answer("POST /v1/completions", b"S\xff", b'{"prompt": "a"}')).startswith(
            b"HTTP/1.1 200 "
        )
        assert "cache_salt" not in w.engines[0].requests[-1].json


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0]",
        ),
        (
            "/v1/chat/completions/batch",
            {"messages": [[{"content": ["x", IMAGE]}]]},
            "messages[0][0].content[1]",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ("/v1/responses", {"input": [NAMED_ITEM]}, "input[0].output[0]"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
            "messages[0].content[0].content[0]",
        ),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ("/score", {"queries": "q", "documents": {"content": [IMAGE]}}, "documents.content[0]"),
        ("/inference/v1/generate", {"token_ids": [1], "content_parts": [IMAGE]}, "content_parts[0]"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"mm_hashes": {}}}, "features"),
        ("/v1/chat/completions/render", {"messages": [{"content": [IMAGE]}]}, "messages[0].content[0]"),
    ],
)
async def test_isolated_tenants_do_not_name_media(
    keys: Path, path: str, fields: dict[str, Any], place: str
) -> None:
    """Security: vLLM takes the client's name of an image for its content, without the salt."""
    async with tenants(keys, 1, "alice") as it:
        it.server.fleet.models[0].engines["e0"].adapter = Vllm()  # it reads the salt of messages
        body = {"model": "tiny", **fields}
        place += "" if place == "features" else ".uuid"
        plain = orjson.dumps(body)
        spelled = plain.replace(b'"uuid"', b'"\\u0075uid"').replace(b'"features"', b'"feature\\u0073"')
        assert spelled != plain
        for sent_body in (plain, spelled, plain.decode().encode("utf-16")):
            status, _, got = await it.post(sent_body, path, ALICE)
            assert (status, got["error"]["code"]) == (403, "not_isolated")
            assert f"{place} would name media" in got["error"]["message"]
        assert not it.engines[0].requests
        assert await sent(it, BOB, body, path) == body, "tenants without isolation share the names"


async def test_isolated_tenants_use_the_word_uuid_elsewhere(keys: Path) -> None:
    parameters = {"type": "object", "properties": {"uuid": {"type": "string"}}}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"uuid": "a"}}
    async with tenants(keys, 1, "alice") as it:
        it.server.fleet.models[0].engines["e0"].adapter = Vllm()
        for path, fields in (
            (COMPLETIONS, {"prompt": "uuid", "metadata": {"uuid": "a"}}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{**IMAGE, "uuid": None}]}]}),
            ("/v1/messages", {"messages": [{"role": "assistant", "content": [call]}]}),
            ("/v1/chat/completions", {"tools": [{"function": {"parameters": parameters}}], "messages": []}),
            ("/inference/v1/generate", {"token_ids": [1], "features": None}),
        ):
            body = {"model": "tiny", **fields}
            got = await sent(it, ALICE, body, path)
            assert got.pop("cache_salt")
            assert got == body


async def test_a_long_name_is_written_only_for_a_refusal(keys: Path) -> None:
    """The time was that of the name for each value inside: minutes."""
    name = "x" * (8 << 20)
    body = {"model": "tiny", "prompt": "uuid", name: [{}] * 100_000}
    async with tenants(keys, 1, "alice") as it:
        start = time.monotonic()
        assert name in await sent(it, ALICE, body)
        assert time.monotonic() - start < 10


async def salt_of(keys: Path, tenant: str = "alice", **auth: str) -> str:
    """Returns the salt that a new router gives a tenant."""
    async with tenants(keys, 1, tenant, auth=auth) as it:
        headers = {"authorization": f"Bearer sk-{tenant}"}
        return str((await sent(it, headers, {"prompt": "a"}))["cache_salt"])


async def test_salts_are_the_same_on_all_routers_with_the_same_secret(keys: Path, tmp_path: Path) -> None:
    """Reliability H1: routers of a fleet share engines' caches. Others cannot derive a salt."""
    file = tmp_path / "secret"
    file.write_text("a-secret\n")
    salt = await salt_of(keys, salt_secret="a-secret")
    assert salt == await salt_of(keys, salt_secret="a-secret")
    assert salt == await salt_of(keys, salt_secret_file=str(file))
    others = {
        await salt_of(keys, salt_secret="b-secret"),
        await salt_of(keys, "bob", salt_secret="a-secret"),
        await salt_of(keys),
        await salt_of(keys),
    }
    assert len(others | {salt}) == 5


def test_routers_side_by_side_need_a_salt_secret() -> None:
    """Reliability H1: with a different salt on each router, they would share no cache."""
    values = {"replicas.urls": ["http://127.0.0.1:1"], "tenants.alice.isolate": True}
    with pytest.raises(ConfigError, match=r"auth\.salt_secret is needed for tenants\.alice\.isolate"):
        load_config(None, values, environ={})
    assert load_config(None, {**values, "auth.salt_secret": "x"}, environ={}).tenants["alice"].isolate


async def test_what_isolation_cannot_do_is_logged_at_startup(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reliability H1: an unknown kind of engine, a random secret, and trusted tenant headers."""
    async with tenants(keys, 1, "alice"):
        pass
    said = capsys.readouterr().out
    assert "the engine may ignore cache_salt" in said
    assert "lose their prefix caches when the router restarts" in said
    assert "x-tenant" not in said
    async with world(1, tenants={"alice": {"isolate": True}}):
        pass
    assert "only if a trusted proxy sets the header x-tenant" in capsys.readouterr().out
    async with emulated() as engine, tenants(keys, [], engines=[{"url": engine.url}]):
        pass
    assert "cache_salt" not in capsys.readouterr().out


# Sessions.


@pytest.mark.parametrize("by", ["header", "user"])
async def test_session_keys_are_the_tenants_own(keys: Path, by: str) -> None:
    """Reliability table L: two tenants' sessions of one name met on one engine."""
    async with tenants(keys, 4, policy="session_affinity") as it:
        places = []
        for tenant in (ALICE, BOB, ALICE):
            for number in range(16):
                session = f"s{number}"
                body = {"model": "tiny", "prompt": "a", **({"user": session} if by == "user" else {})}
                given = tenant if by == "user" else {**tenant, "x-session-id": session}
                places.append((await it.post(body, headers=given))[1]["x-lmetric-instance"])
        assert places[:16] == places[32:], "a tenant's own sessions stay where they are"
        # Without affinity, 4 of 16 would be on the same engine.
        assert sum(a != b for a, b in zip(places[:16], places[16:32], strict=True)) >= 5


# The guessing attack.


def secret(number: int, tokens: int = 200) -> list[int]:
    """Returns a prompt as token ids."""
    dice = random.Random(number)
    return [dice.randrange(100, 1900) for _ in range(tokens)]


async def cached(it: World, headers: dict[str, str], prompt: Any) -> tuple[int, int]:
    """Returns the cached prompt tokens, by the decision record and by the engine's answer."""
    status, named, answer = await it.post(
        {"model": "tiny", "prompt": prompt, "max_tokens": 1}, COMPLETIONS, headers
    )
    assert status == 200, answer
    status, record = await it.get(f"/debug/decisions/{named['x-lmetric-decision']}", headers)
    assert status == 200
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return orjson.loads(record)["predicted_cached_tokens"], found


@pytest.mark.parametrize("api", ["vllm", "sglang"])
@pytest.mark.parametrize("mode", ["exact", "approximate"])
async def test_a_right_guess_looks_like_a_wrong_one(keys: Path, api: str, mode: str) -> None:
    """Reliability H1: bob sent guesses of alice's prompt, and his answers showed the right one."""
    config = {"policy": "lmetric", "kv_events": IDS if mode == "exact" else "off"}
    for isolated in (["alice"], ["alice", "bob"], []):
        async with emulated(api=api) as engine:
            engines = [{"url": engine.url, "name": "e0"}]
            async with tenants(keys, [], *isolated, engines=engines, **config) as it:
                if mode == "exact":
                    await connected(it)
                assert await cached(it, ALICE, secret(1)) == (0, 0)
                salt = it.server.front.arrivals.isolation.salt("alice", None) if isolated else None
                router, asked = it.server.fleet.models[0].router, lm.Request(secret(1), cache_salt=salt)
                await it.until(lambda router=router, asked=asked: router.cached_tokens(asked)[0] == 192)
                right, wrong = [await cached(it, BOB, secret(number)) for number in (1, 2)]
                assert wrong == (0, 0)
                assert right == ((0, 0) if isolated else (192, 192))
                # For alice herself the cache works, and the index knows it.
                if isolated:
                    assert await cached(it, ALICE, secret(1)) == (192, 192)


async def test_the_tokenizers_cache_is_the_tenants_own(keys: Path, tmp_path: Path) -> None:
    """Reliability H1: a long prompt in the tokenizer's cache was routed sooner, for any tenant."""
    from token_folders import CHATML, metaspace, write_folder

    folder = write_folder(tmp_path / "model", metaspace(), CHATML)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a secret of alice " * 50}]}
    for isolated, known in (("alice",), False), ((), True):
        async with tenants(keys, 1, *isolated, tokenizer=str(folder)) as it:
            tokenizer = it.server.fleet.models[0].tokenizers.current
            assert tokenizer is not None
            new = []
            for headers in (ALICE, ALICE, BOB):
                before = tokenizer.encoder.stats()["new_bytes"]
                assert (await it.post(body, "/v1/chat/completions", headers))[0] == 200
                new.append(tokenizer.encoder.stats()["new_bytes"] - before)
            assert new[0] > 900
            assert new[1] == 0
            assert new[2] == (0 if known else new[0])


async def first_token(http: aiohttp.ClientSession, url: str, key: str, prompt: str) -> float:
    """Returns the seconds until the first token of a stream."""
    body = {"prompt": prompt, "max_tokens": 1, "stream": True}
    began = time.monotonic()
    async with http.post(
        url + COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"}
    ) as response:
        assert response.status == 200
        await response.content.readuntil(b"\n\n")
        taken = time.monotonic() - began
        await response.read()
    return taken


@pytest.mark.nightly
@pytest.mark.parametrize("isolated", [True, False])
async def test_the_time_to_the_first_token_gives_no_guess_away(keys: Path, isolated: bool) -> None:
    """Reliability H1: 15 ms against 232 ms. A rank test of 100 right and 100 wrong guesses."""
    from scipy.stats import mannwhitneyu

    dice = random.Random(7)
    flags = ["--embedded", "2", "--policy", "lmetric", "--api-keys", str(keys)]
    flags += ["--set", f"tenants.alice.isolate={str(isolated).lower()}"]
    times: dict[bool, list[float]] = {True: [], False: []}
    async with router(*flags) as r, aiohttp.ClientSession() as http:
        await r.listening(120)
        for turn in range(100):
            words = [f"{dice.randrange(10_000)}" for _ in range(400)]
            own = f"The secret is {' '.join(words)}"
            await first_token(http, r.url, "sk-alice", own)
            words[0] = f"{turn}x"
            guesses = [(True, own), (False, f"The secret is {' '.join(words)}")]
            dice.shuffle(guesses)
            for right, guess in guesses:
                times[right].append(await first_token(http, r.url, "sk-bob", guess))
        r.process.terminate()
        assert await r.ended() == 0
    p = mannwhitneyu(times[True], times[False]).pvalue
    assert p > 0.001 if isolated else p < 1e-9, p


async def test_a_tenant_sees_no_names_of_others_in_a_policy(keys: Path) -> None:
    policy = {"score": 'where(tenant == "bob", bs, 2 * bs + 1)'}
    async with tenants(
        keys, [FakeEngine(), FakeEngine()], policy=policy, errors={"show_engines": True}
    ) as it:
        status, headers, answer = await it.post(headers=ALICE)
        assert status == 200, answer
        status, page = await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}", ALICE)
        assert status == 200
        assert b"because" in page
        assert b"bob" not in page
