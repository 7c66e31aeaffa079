"""JSON Web Tokens: refusals and their reasons, kept results, and the keys of issuers over time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import orjson
import pytest

from issuer_world import AUDIENCE, ISSUER, Issuer, Key, bearer, rsa_key
from lmetric.config import Auth, ConfigError, JwtIssuer
from lmetric.extras import install
from lmetric.server.api import jwt as module
from lmetric.server.api import key_source
from lmetric.server.api.caller import UnknownKeyError
from lmetric.server.api.errors import ApiError
from lmetric.server.api.identity import Identity
from lmetric.server.api.issued import IssuedKeys
from lmetric.server.api.jwks import MAX_KEYS, KeySetError, parse
from lmetric.server.api.jwt import MAX_BYTES, MAX_FORGED, Tokens
from lmetric.server.api.key_source import ADDRESS_SECONDS, PAUSE_SECONDS
from test_server_process import engine, router
from waiting import until


class Clock:
    """A clock that only tests move. Seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Sender:
    """A connection of a client address."""

    def __init__(self, sender: str = "192.0.2.1", is_gateway: bool = False) -> None:
        self.sender = sender
        self.payer: Any = self
        self.is_gateway = is_gateway


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    it = Issuer()
    it.published += [Key("rsa", "RS256"), Key("ed", "EdDSA")]
    it.write(tmp_path / "keys.json")
    return it


def tokens_of(
    issuer: Issuer, *others: Issuer, clock: Callable[[], float] = time.time, **settings: Any
) -> Tokens:
    entries = [JwtIssuer(**each.settings(**settings)) for each in (issuer, *others)]
    tokens = Tokens(entries, clock=clock)
    tokens.load_files()
    return tokens


def refusal(tokens: Tokens, token: str, client: Sender | None = None) -> ApiError:
    assert tokens.known(token) is None
    with pytest.raises(ApiError) as refused:
        tokens.check(token, client)
    assert token not in refused.value.message
    assert tokens.known(token) is None, "only valid tokens are kept"
    return refused.value


def part(value: object) -> str:
    data = value if isinstance(value, bytes) else orjson.dumps(value)
    return urlsafe_b64encode(data).decode().rstrip("=")


def raw(header: object, claims: object, signature: bytes = b"x" * 64) -> str:
    return f"{part(header)}.{part(claims)}.{part(signature)}"


@pytest.mark.parametrize("number", [0, 1, 2], ids=["ES256", "RS256", "EdDSA"])
def test_a_valid_token_names_tenant_and_key_id(issuer: Issuer, number: int) -> None:
    tokens = tokens_of(issuer)
    token = issuer.token(key=issuer.published[number])
    assert tokens.is_token(token)
    caller = tokens.check(token, None)
    expected = hashlib.sha256(f"{ISSUER}\0user-1".encode()).hexdigest()[:12]
    assert (caller.tenant, caller.key_id) == ("red", expected)
    assert (caller.slo_class, caller.models) == (None, None)
    assert caller.credential == f"JWT of {ISSUER}, subject {expected}, tenant by claim team"
    assert tokens.known(token) is caller


def test_claims_name_class_and_models(issuer: Issuer) -> None:
    tokens = tokens_of(issuer, class_claim="https://x/tier", models_claim="scope")
    token = issuer.token(**{"https://x/tier": "gold", "scope": ["a", "b"]})
    caller = tokens.check(token, None)
    assert (caller.slo_class, caller.models) == ("gold", frozenset("ab"))
    assert tokens.check(issuer.token(scope="a  b"), None).models == frozenset("ab")
    assert tokens.check(issuer.token(scope=[]), None).models == frozenset()
    assert tokens.check(issuer.token(scope="a"), None).slo_class == "", "not the header's"


NOW = 1_800_000_000
# Changes of claims, and the text of the refusal.
REFUSED_CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"exp": NOW - 31}, "it expired 31 s ago, at 2027-01-15 07:59:29 UTC; request a new one"),
    ({"exp": None}, "it has no expiry (exp); the issuer must add it"),
    ({"exp": "soon"}, "its time exp is 'soon'; expected seconds since 1970"),
    ({"exp": True}, "its time exp is True; expected seconds since 1970"),
    ({"exp": 1e300}, "its time exp is 1e+300; expected seconds since 1970"),
    ({"exp": [1]}, "its time exp is a list; expected seconds since 1970"),
    ({"nbf": NOW + 90}, "it is valid only in 90 s, from 2027-01-15 08:01:30 UTC (nbf); check the clocks"),
    ({"iat": NOW + 90}, "it is valid only in 90 s, from 2027-01-15 08:01:30 UTC (iat); check the clocks"),
    ({"nbf": {}}, "its time nbf is an object; expected seconds since 1970"),
    ({"aud": "other"}, "its audience (aud) is 'other'; expected 'lmetric': request a token for it"),
    ({"aud": ["x", "y"]}, "its audience (aud) is ['x', 'y']; expected 'lmetric': request a token for it"),
    ({"aud": None}, "its audience (aud) is missing; expected 'lmetric': request a token for it"),
    ({"aud": [AUDIENCE, 1]}, "its audience (aud) is a list; expected 'lmetric': request a token for it"),
    ({"aud": {AUDIENCE: 1}}, "its audience (aud) is an object; expected 'lmetric': request a token for it"),
    ({"iss": "https://evil"}, f"its issuer (iss) is 'https://evil'; expected '{ISSUER}'"),
    ({"iss": f"{ISSUER}/"}, f"its issuer (iss) is '{ISSUER}/'; expected '{ISSUER}'"),
    ({"iss": None}, f"its issuer (iss) is missing; expected '{ISSUER}'"),
    ({"iss": [ISSUER]}, f"its issuer (iss) is ['{ISSUER}']; expected '{ISSUER}'"),
    ({"team": None}, "its claim 'team' names no tenant; expected a text of 1 to 128 characters"),
    ({"team": ""}, "its claim 'team' names no tenant; expected a text of 1 to 128 characters"),
    ({"team": ["red"]}, "its claim 'team' names no tenant; expected a text of 1 to 128 characters"),
    ({"team": 7}, "its claim 'team' names no tenant; expected a text of 1 to 128 characters"),
    ({"team": "r" * 129}, "its claim 'team' names no tenant; expected a text of 1 to 128 characters"),
    ({"team": "red\n"}, "its claim 'team' names no tenant; expected a text of 1 to 128 characters"),
    ({"sub": 7}, "its subject (sub) is no text"),
    ({"tier": ["gold"]}, "its claim 'tier' is no text; expected the name of a class"),
    ({"scope": None}, "its claim 'scope' is missing or no list of texts; expected names of models"),
    ({"scope": [1]}, "its claim 'scope' is missing or no list of texts; expected names of models"),
    ({"scope": {"a": 1}}, "its claim 'scope' is missing or no list of texts; expected names of models"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED_CLAIMS, ids=lambda value: str(value)[:40])
def test_invalid_claims_are_refused_with_the_reason(
    issuer: Issuer, changes: dict[str, Any], text: str
) -> None:
    tokens = tokens_of(issuer, clock=Clock(NOW), class_claim="tier", models_claim="scope")
    valid = {"iat": NOW, "exp": NOW + 600, "scope": "a"}
    assert tokens.check(_signed(issuer, valid), None).tenant == "red"
    error = refusal(tokens, _signed(issuer, valid | changes))
    assert (error.status, error.code) == (401, "invalid_token")
    assert error.message == f"the JWT is not valid: {text}"
    assert error.headers["www-authenticate"] == 'Bearer error="invalid_token"'


def _signed(issuer: Issuer, changes: dict[str, Any]) -> str:
    """A token with claims that `jwt.encode` would refuse to write."""
    payload = orjson.dumps(issuer.claims(**changes))
    return jwt.PyJWS().encode(payload, issuer.key.private, "ES256", {"kid": issuer.key.key_id})


def test_times_may_differ_by_the_clock_skew(issuer: Issuer) -> None:
    tokens = tokens_of(issuer, clock=Clock(NOW), clock_skew_seconds=5)
    assert tokens.check(_signed(issuer, {"iat": NOW + 5, "nbf": NOW + 5, "exp": NOW - 4}), None)
    assert "expired 5 s ago" in refusal(tokens, _signed(issuer, {"iat": NOW, "exp": NOW - 5})).message


def test_algorithms_are_those_of_the_keys(issuer: Issuer) -> None:
    tokens = tokens_of(issuer)
    claims = issuer.claims()
    # `none`, in several spellings, with and without a signature.
    for name in ("none", "None", "NONE", "HS256", "RS512", "ES512", "PS256", "", None, 7, ["ES256"]):
        error = refusal(tokens, raw({"alg": name, "kid": "k0"}, claims))
        assert "its algorithm is" in error.message
        assert error.message.endswith("expected 'RS256', 'ES256' or 'EdDSA'")
    assert not tokens.is_token(f"{part({'alg': 'none'})}.{part(claims)}."), "three parts, none empty"
    # HMAC with the public key as the secret.
    public = orjson.dumps(issuer.published[1].public)
    head = f"{part({'alg': 'HS256', 'kid': 'rsa'})}.{part(claims)}"
    forged = f"{head}.{part(hmac.digest(public, head.encode(), 'sha256'))}"
    assert "its algorithm is 'HS256'" in refusal(tokens, forged).message
    # The algorithm of another key of the set.
    swapped = jwt.PyJWS().encode(orjson.dumps(claims), issuer.key.private, "ES256", {"kid": "rsa"})
    with pytest.raises(UnknownKeyError):
        asyncio.run(_check(tokens, swapped))


async def _check(tokens: Tokens, token: str) -> Any:
    return tokens.check(token, None)


def test_keys_in_the_header_have_no_effect(issuer: Issuer) -> None:
    tokens = tokens_of(issuer)
    attacker = Key("k0")
    for more in (
        {"jwk": attacker.public},
        {"jku": "https://evil/keys"},
        {"x5u": "https://evil"},
        {"x5c": ["x"]},
    ):
        forged = issuer.token(more, key=attacker)
        assert "its signature is not valid" in refusal(tokens, forged).message
        assert tokens.check(issuer.token(more), None).tenant == "red"


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"crit": ["exp"]}, "critical fields (crit)"),
        ({"crit": []}, "critical fields (crit)"),
        ({"b64": True}, "critical fields (crit)"),
        ({"typ": "logout+jwt"}, "its type (typ) is 'logout+jwt'"),
        ({"typ": 7}, "its type (typ) is 7"),
        ({"kid": 7}, "its key ID (kid) is no text"),
    ],
)
def test_unknown_headers_are_refused(issuer: Issuer, header: dict[str, Any], text: str) -> None:
    token = raw({"alg": "ES256", "kid": "k0", **header}, issuer.claims())
    assert text in refusal(tokens_of(issuer), token).message


def test_forged_and_changed_tokens_are_refused(issuer: Issuer) -> None:
    tokens = tokens_of(issuer)
    header, claims, signature = issuer.token().split(".")
    other = issuer.token(team="blue").split(".")
    for forged in (
        f"{header}.{other[1]}.{signature}",
        f"{header}.{claims}.{other[2]}",
        f"{header}.{claims}.{signature[:-4]}",
        f"{header}.{claims}.{part(b'') or 'AA'}",
        issuer.token(key=Key("k0")),
        issuer.token(key=Key("rsa", "RS256", rsa_key(number=1))),
        issuer.token(key=Key("ed", "EdDSA")),
    ):
        error = refusal(tokens, forged)
        assert (error.status, error.message) == (
            401,
            "the JWT is not valid: its signature is not valid for the issuer's key; request a new one",
        )


def test_garbage_is_no_token_or_is_refused(issuer: Issuer) -> None:
    tokens = tokens_of(issuer)
    good = issuer.token().split(".")
    for text in (
        "",
        ".",
        "..",
        "a.b.c",
        "sk-1",
        "a.b",
        f"{good[0]}.{good[1]}",
        f"{issuer.token()}.x",
        "é.é.é",
    ):
        assert not tokens.is_token(text), text
    assert not tokens.is_token(raw({"typ": "JWT"}, {})), "no alg"
    assert not tokens.is_token(raw([["alg"]], {}))
    for claims in (b"no json", b"[]", b"\xff", b"[" * 900 + b"]" * 900, b'{"exp": NaN}', b"{", b"1"):
        token = raw({"alg": "ES256", "kid": "k0"}, claims)
        assert tokens.is_token(token)
        assert refusal(tokens, token).message.endswith("its header or its claims are no JSON object")
    deep = b'{"iss": ' + b"[" * 1000 + b"]" * 1000 + b"}"
    assert "its issuer (iss) is a list" in refusal(tokens, raw({"alg": "ES256"}, deep)).message


def test_oversized_tokens_are_refused_before_they_are_parsed(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(issuer)
    token = issuer.token(groups=["g" * 10] * 600)
    assert len(token) > MAX_BYTES
    monkeypatch.setattr(module, "_json", None)  # a call would fail
    assert tokens.is_token(token)
    assert refusal(tokens, token).message == (
        f"the JWT is not valid: it has {len(token)} bytes; expected at most 8192: request fewer claims"
    )


def test_a_result_is_kept_until_the_token_expires(issuer: Issuer) -> None:
    clock = Clock(NOW)
    tokens = tokens_of(issuer, clock=clock)
    token = _signed(issuer, {"iat": NOW, "exp": NOW + 600})
    caller = tokens.check(token, None)
    clock.now = NOW + 629.9
    assert tokens.known(token) is caller
    clock.now = NOW + 630
    assert tokens.known(token) is None
    assert "it expired 30 s ago" in refusal(tokens, token).message
    assert token not in str(vars(tokens)), "a digest is kept, not the token"


def test_few_results_are_kept(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 3)
    tokens = tokens_of(issuer)
    made = [issuer.token(sub=str(number)) for number in range(5)]
    for token in made:
        tokens.check(token, None)
    assert [tokens.known(token) is not None for token in made] == [False, False, True, True, True]


def test_two_issuers_have_keys_of_their_own(issuer: Issuer, tmp_path: Path) -> None:
    other = Issuer("https://other")
    other.write(tmp_path / "other.json")
    tokens = tokens_of(issuer, other)
    assert tokens.check(issuer.token(team="a"), None).issuer == ISSUER
    assert tokens.check(other.token(team="b"), None).issuer == "https://other"
    forged = other.token(iss=ISSUER)
    assert "its signature is not valid" in refusal(tokens, forged).message
    first, second = (tokens.check(each.token(), None).key_id for each in (issuer, other))
    assert first != second, "subjects of two issuers are not the same"


def test_a_client_with_forged_tokens_is_refused_without_checks(issuer: Issuer) -> None:
    monotonic = Clock()
    tokens = Tokens([JwtIssuer(**issuer.settings())], monotonic=monotonic)
    tokens.load_files()
    good, attacker = issuer.token(), Key("k0")
    tokens.check(good, Sender())
    for number in range(MAX_FORGED):
        assert refusal(tokens, issuer.token(key=attacker, sub=str(number)), Sender()).status == 401
    error = refusal(tokens, issuer.token(key=attacker), Sender())
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "too_many_invalid_tokens", "10")
    assert refusal(tokens, issuer.token(sub="new"), Sender()).status == 429
    assert tokens.known(good), "known tokens of the address stay valid"
    assert tokens.check(issuer.token(sub="new"), Sender("192.0.2.2")), "other addresses are not limited"
    assert tokens.check(issuer.token(sub="x"), Sender(is_gateway=True)), "several clients share a gateway"
    monotonic.now = 10
    assert tokens.check(issuer.token(sub="later"), Sender())


def test_a_token_without_a_key_id_has_the_only_key_of_its_algorithm(tmp_path: Path) -> None:
    issuer = Issuer()
    issuer.key = Key(None)
    issuer.published = [issuer.key, Key("rsa", "RS256")]
    issuer.write(tmp_path / "keys.json")
    assert tokens_of(issuer).check(issuer.token(), None).tenant == "red"
    issuer.published.append(Key("second"))
    issuer.write(tmp_path / "keys.json")
    with pytest.raises(UnknownKeyError):
        asyncio.run(_check(tokens_of(issuer), issuer.token()))


# -- key sets

KEY = Key("k")
BAD_SETS: list[tuple[object, str]] = [
    (b"{", "it is not valid JSON"),
    ([], 'expected a key set, such as {"keys": [...]}'),
    ({"keys": {}}, 'expected a key set, such as {"keys": [...]}'),
    ({"keys": []}, "it has no key for signatures with RS256, ES256, EdDSA"),
    ({"keys": ["x"]}, "key 1 is not an object"),
    ({"keys": [KEY.public] * (MAX_KEYS + 1)}, "it has 101 keys; expected at most 100"),
    ({"keys": [KEY.public, KEY.public]}, "two ES256 keys with the key ID 'k'; expected different key IDs"),
    ({"keys": [{**KEY.public, "kid": 1}]}, "key 1: kid is not a text"),
    ({"keys": [{**KEY.public, "d": "x"}]}, "key 1: it is a private key (d); publish only its public part"),
    ({"keys": [{**KEY.public, "x": 1}]}, "key 1: expected the texts x and y"),
    ({"keys": [{**KEY.public, "x": "AAAA"}]}, "key 1: it is not a valid EC key"),
    ({"keys": [{**KEY.public, "y": KEY.public["x"]}]}, "key 1: it is not a valid EC key"),
    ({"keys": [Key("r", "RS256", rsa_key(1024)).public]}, "key 1: its RSA key has 1024 bits"),
    ({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "s", "alg": "HS256"}]}, "it has no key for signatures"),
    (b" " * (256 * 1024) + b"{}", "it has more than 262144 bytes"),
]


@pytest.mark.parametrize(("content", "text"), BAD_SETS, ids=lambda value: str(value)[:30])
def test_broken_key_sets_are_refused(content: object, text: str, tmp_path: Path) -> None:
    data = content if isinstance(content, bytes) else orjson.dumps(content)
    with pytest.raises(KeySetError) as refused:
        parse(data)
    assert text in str(refused.value)
    file = tmp_path / "keys.json"
    file.write_bytes(data)
    settings = {"issuer": ISSUER, "audience": "a", "jwks": str(file), "tenant_claim": "t"}
    with pytest.raises(ConfigError) as invalid:
        Identity.load(Auth.model_validate({"jwt": [settings]}), IssuedKeys(stored=False))
    assert str(invalid.value).startswith(f"auth.jwt: {file}: the key set cannot be used: ")


def test_keys_for_other_uses_are_left_out() -> None:
    encryption = {**KEY.public, "kid": "e", "use": "enc"}
    others = [
        *(encryption, {**KEY.public, "kid": "o", "key_ops": ["sign"]}, {"kty": "oct", "k": "x"}),
        *({"kty": "EC", "crv": "P-384", "x": "x", "y": "y"}, {"kty": "RSA", "alg": "PS256"}, {"kty": ["x"]}),
    ]
    keys = parse(orjson.dumps({"keys": [*others, KEY.public]}))
    assert len(keys) == 1
    assert keys.find("k", "ES256") is not None


# -- sources of keys


@contextlib.asynccontextmanager
async def following(issuer: Issuer, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Tokens]:
    """Checks tokens of an issuer, whose keys are followed."""
    tokens = Tokens([JwtIssuer(**issuer.settings())], monotonic=clock)
    tokens.start()
    try:
        yield tokens
    finally:
        await tokens.stop()


async def resolved(tokens: Tokens, token: str) -> Any:
    """The caller of a token, whose check may wait for the issuer's keys."""
    try:
        return tokens.check(token, None)
    except UnknownKeyError as unknown:
        async with asyncio.timeout(30):
            await unknown.read
        return unknown.finish()


async def test_the_first_requests_wait_for_the_keys() -> None:
    async with Issuer().serving() as issuer, following(issuer) as tokens:
        assert (await resolved(tokens, issuer.token())).tenant == "red"
        assert issuer.reads == 1


async def test_a_new_key_is_read_at_once_and_the_old_key_stays_valid() -> None:
    async with Issuer().serving() as issuer, following(issuer, clock := Clock()) as tokens:
        old = issuer.token()
        await resolved(tokens, old)
        clock.now = 60
        issuer.rotate()
        new = [issuer.token(sub=str(number)) for number in range(50)]
        callers = await asyncio.gather(*(resolved(tokens, token) for token in new))
        assert {caller.tenant for caller in callers} == {"red"}
        assert issuer.reads == 2, "one read for all of them"
        assert tokens.known(old)
        clock.now = 120
        issuer.rotate(keep=False)
        await resolved(tokens, issuer.token())
        assert tokens.known(old) is None, "its key has left the key set"
        clock.now = 180
        with pytest.raises(ApiError, match="it has the key ID 'k0', which the issuer's keys for ES256 lack"):
            await resolved(tokens, old)


async def test_unknown_keys_cause_few_reads() -> None:
    async with Issuer().serving() as issuer, following(issuer, clock := Clock()) as tokens:
        await resolved(tokens, issuer.token())
        waits = []
        for number in range(256):
            with pytest.raises(UnknownKeyError) as unknown:
                tokens.check(issuer.token(key=Key(f"u{number}", private=issuer.key.private)), None)
            waits.append(unknown.value)
        too_many = refusal(tokens, issuer.token(key=Key("more", private=issuer.key.private)))
        assert (too_many.status, too_many.code) == (503, "issuer_unreachable")
        assert issuer.reads == 1, "the next read is due after the pause"
        issuer.rotate()
        clock.now = PAUSE_SECONDS
        source = tokens.sources[ISSUER]
        await source.step()
        assert all(unknown.read.done() for unknown in waits)
        with pytest.raises(ApiError) as refused:
            waits[0].finish()
        assert refused.value.status == 401
        assert issuer.reads == 2
        assert (await resolved(tokens, issuer.token())).tenant == "red"


async def test_a_key_published_during_a_read_is_found_by_the_next_one() -> None:
    """A read that began before the request may have seen the key set before the new key."""
    async with Issuer().serving() as issuer, following(issuer, clock := Clock()) as tokens:
        await resolved(tokens, issuer.token())
        source = tokens.sources[ISSUER]
        issuer.gate = asyncio.Event()
        clock.now = ADDRESS_SECONDS
        reading = asyncio.create_task(source.step())
        await until(lambda: issuer.reads == 2)
        clock.now += 1
        issuer.rotate()
        with pytest.raises(UnknownKeyError) as unknown:
            tokens.check(issuer.token(), None)
        issuer.gate.set()
        await reading
        assert not unknown.value.read.done()
        clock.now += PAUSE_SECONDS
        await source.step()
        assert unknown.value.finish().tenant == "red"


async def test_an_issuer_that_is_down_for_an_hour() -> None:
    issuer, clock = Issuer(), Clock()
    async with issuer.serving():
        tokens = Tokens([JwtIssuer(**issuer.settings())], monotonic=clock)
        source = tokens.sources[ISSUER]
        await source.step()
        await resolved(tokens, known := issuer.token())
    port = int(issuer.url.split(":")[2].partition("/")[0])
    down_since = clock.now
    while clock.now < 3600:
        clock.now = source.next_read_at
        await source.step()
        assert "no connection" in (source.problem or "")
        assert source.problem_since == pytest.approx(down_since, abs=2 * ADDRESS_SECONDS)
        assert tokens.known(known)
        assert tokens.check(issuer.token(sub=str(clock.now)), None), "the last good keys stay in use"
    assert 60 < source.reads[False] < 140, "about two tries a minute"
    issuer.rotate()
    with pytest.raises(UnknownKeyError) as unknown:
        tokens.check(issuer.token(), None)
    await source.step()
    with pytest.raises(ApiError) as refused:
        unknown.value.finish()
    assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "5"), "not a 401"
    async with issuer.serving(port):
        with pytest.raises(UnknownKeyError) as unknown:
            tokens.check(issuer.token(), None)
        clock.now += PAUSE_SECONDS
        await source.step()
        assert unknown.value.finish().tenant == "red"
        assert (source.problem, source.problem_since) == (None, None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": 500}, "the issuer answered with status 500; expected 200 (redirects are not followed)"),
        ({"status": 302}, "the issuer answered with status 302; expected 200 (redirects are not followed)"),
        ({"answer": b"<html>"}, "it is not valid JSON"),
        ({"answer": b" " * 300_000}, "it has more than 262144 bytes"),
        ({"answer": b'{"keys": []}'}, "it has no key for signatures"),
    ],
    ids=str,
)
async def test_a_broken_key_set_leaves_the_last_good_one(change: dict[str, Any], problem: str) -> None:
    async with Issuer().serving() as issuer:
        tokens = Tokens([JwtIssuer(**issuer.settings())])
        source = tokens.sources[ISSUER]
        await source.step()
        vars(issuer).update(change)
        await source.step()
        assert problem in (source.problem or "")
        assert tokens.check(issuer.token(), None)
        samples = {
            (sample.name, sample.labels.get("outcome")): sample.value
            for family in tokens.metrics()
            for sample in family.samples
        }
        assert samples["lmetric_jwks_reads_total", "good"] == 1
        assert samples["lmetric_jwks_reads_total", "failed"] == 1
        assert samples["lmetric_jwt_checks_total", "valid"] == 1


async def test_a_file_is_followed(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_source, "FILE_SECONDS", 0.1)
    file = Path(issuer.url)
    async with following(issuer) as tokens:
        tokens.load_files()
        source = tokens.sources[ISSUER]
        old = issuer.token()
        tokens.check(old, None)
        issuer.rotate(keep=False)
        issuer.write(file)
        assert (await resolved(tokens, issuer.token())).tenant == "red"
        assert tokens.known(old) is None
        move, move_back = partial(file.rename, away := file.with_suffix(".away")), partial(away.rename, file)
        breaks: list[tuple[Callable[[], object], str]] = [
            (partial(file.write_bytes, b"{"), "it is not valid JSON"),
            (move, "No such file or directory"),
        ]
        for break_file, problem in breaks:
            break_file()
            await until(lambda problem=problem: problem in (source.problem or ""))  # type: ignore[misc]
            assert tokens.check(issuer.token(sub=problem), None)
            failed = source.reads[False]  # an alert needs a count that grows
            await until(lambda failed=failed: source.reads[False] > failed)  # type: ignore[misc]
            good = source.reads[True]
            issuer.write(file)
            await until(lambda: source.problem is None)
            assert source.reads[True] == good + 1
        move()
        await until(lambda: source.problem is not None)
        move_back()
        await until(lambda: source.problem is None)
        assert source.reads[True] == good + 2, "an unchanged file that returns is a good read"


async def test_waiting_requests_get_an_error_when_the_server_stops() -> None:
    async with Issuer().serving() as issuer:
        issuer.gate = asyncio.Event()
        async with following(issuer) as tokens:
            with pytest.raises(UnknownKeyError) as unknown:
                tokens.check(issuer.token(), None)
        assert unknown.value.read.done()
        with pytest.raises(ApiError) as refused:
            unknown.value.finish()
        assert refused.value.status == 503


async def test_workers_have_keys_of_their_own(tmp_path: Path) -> None:
    async with Issuer().serving() as issuer, engine() as fake:
        config = tmp_path / "router.yaml"
        settings = {"workers": 2, "auth": {"jwt": [issuer.settings()]}, "engines": [{"url": fake.url}]}
        config.write_text(orjson.dumps(settings).decode())
        async with router("--config", str(config)) as r:
            await r.listening(60)
            url, body = f"{r.url}/v1/completions", {"model": "tiny", "prompt": "x"}
            for number in range(20):
                headers = bearer(issuer.token(sub=str(number)))
                async with (
                    aiohttp.ClientSession() as client,
                    client.post(url, json=body, headers=headers) as answer,
                ):
                    assert answer.status == 200
            assert issuer.reads == 2, "one of each worker"


# Hides packages, then checks a configuration as `serve` does.
CHECK = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Hidden())
import lmetric.cli
from lmetric.config import ConfigError, load_config
from lmetric.server import check_config
try:
    check_config(load_config(sys.argv[1], environ={}))
except ConfigError as error:
    print(error)
print([name for name in ("jwt", "cryptography") if name in sys.modules])
"""


@pytest.mark.parametrize("hidden", ["jwt", pytest.param("cryptography", marks=pytest.mark.nightly), None])
def test_the_package_is_needed_only_with_issuers(issuer: Issuer, tmp_path: Path, hidden: str | None) -> None:
    config = tmp_path / "router.yaml"
    settings: dict[str, Any] = {"engines": [{"url": "http://127.0.0.1:9"}]}
    if hidden is not None:
        settings["auth"] = {"jwt": [issuer.settings()]}
    config.write_text(orjson.dumps(settings).decode())
    command = [sys.executable, "-c", CHECK, str(config), *([hidden] if hidden else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    *errors, loaded = run.stdout.splitlines()
    if hidden is None:
        assert (errors, loaded) == ([], "[]")
    else:
        assert errors == [f"auth.jwt needs another package (No module named {hidden!r}): {install('jwt')}"]
