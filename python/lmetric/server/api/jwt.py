"""JSON Web Tokens (JWT, RFC 7519): who sent a request, by a token that an issuer has signed.

A token is checked once. The result is used until the token expires or its key leaves the issuer's
key set. All cheap checks come before the signature, and a client address with forged tokens is
refused for some seconds, so that hostile clients do not use up the event loop.
"""

from __future__ import annotations

import math
import re
import time
from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import orjson
from jwt.api_jws import PyJWS
from jwt.exceptions import PyJWTError
from prometheus_client.core import CounterMetricFamily, Metric

from lmetric.config import ConfigError, JwtIssuer
from lmetric.server.api.caller import Caller, UnknownKeyError
from lmetric.server.api.errors import ApiError
from lmetric.server.api.issued import KEY_ID_DIGITS
from lmetric.server.api.jwks import ALGORITHMS, KeySetError, VerifyingKey
from lmetric.server.api.key_source import PAUSE_SECONDS, KeySource
from lmetric.server.api.keys import digest

MAX_BYTES = 8192  # of a token
MAX_CACHED = 16_384  # tokens whose results are kept
MAX_TENANT = 128  # characters
# Invalid signatures of a client address in this time, after which its other tokens are refused.
MAX_FORGED, FORGED_SECONDS = 10, 10.0
MAX_ADDRESSES = 4096  # with invalid signatures
SHOWN = 80  # most characters of a value in an error
_SHAPE = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
# Other kinds of signed objects, such as logout tokens, are not for access (RFC 8725, 3.11).
_TYPES = ("jwt", "at+jwt", "application/jwt", "application/at+jwt")
_JWS = PyJWS(algorithms=ALGORITHMS)


class Payer(Protocol):
    """The counts of a client address."""

    is_gateway: bool


class Client(Protocol):
    """The connection that sent a token."""

    @property
    def payer(self) -> Payer | None:
        """Its client address; None: it has disconnected."""

    @property
    def sender(self) -> str:
        """Its IP address; empty: of a unix socket."""


class _Checked(NamedTuple):
    """The result of a check. ``until``: Unix time at which the token has expired."""

    caller: Caller
    until: float
    key: VerifyingKey


class _Read(NamedTuple):
    """A token whose signature is not checked yet."""

    text: str
    payload: bytes
    algorithm: str
    key_id: str | None
    issuer: JwtIssuer
    caller: Caller
    until: float


class Forged:
    """Counts invalid signatures by client address, in windows of `FORGED_SECONDS`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[str, tuple[float, int]] = {}  # begin of the window, count

    def check(self, address: str) -> None:
        """Raises ApiError (429) for an address with too many."""
        began, count = self._counts.get(address, (-math.inf, 0))
        left = began + FORGED_SECONDS - self._clock()
        if count >= MAX_FORGED and left > 0:
            raise ApiError(
                429,
                f"this client address sent {count} JWTs with invalid signatures in {FORGED_SECONDS:g} s; "
                "retry later with a valid token",
                code="too_many_invalid_tokens",
                headers={"retry-after": str(math.ceil(left))},
            )

    def count(self, address: str) -> None:
        """Counts an invalid signature."""
        began, count = self._counts.pop(address, (-math.inf, 0))
        now = self._clock()
        if now - began >= FORGED_SECONDS:
            began, count = now, 0
        self._counts[address] = began, count + 1
        if len(self._counts) > MAX_ADDRESSES:
            del self._counts[next(iter(self._counts))]


class Tokens:
    """Checks tokens of all issuers. ``clock``: returns Unix time. ``monotonic``: seconds."""

    def __init__(
        self,
        issuers: Sequence[JwtIssuer],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._issuers = {each.issuer: each for each in issuers}
        self.sources = {each.issuer: KeySource(each.jwks, monotonic) for each in issuers}
        self._clock = clock
        self._cache: dict[bytes, _Checked] = {}  # by digest of the token
        self._forged = Forged(monotonic)
        self.counts: Counter[str] = Counter()  # checks by outcome

    # -- the keys

    def load_files(self) -> None:
        """Reads the key sets that are in files. Raises ConfigError."""
        for source in self.sources.values():
            with _as_config_error(source):
                source.load_file()

    async def take_over(self, before: Tokens | None) -> None:
        """Takes the sources that stay, with their keys, and reads the new ones.

        Raises ConfigError if a new address cannot be read.
        """
        known: dict[str, KeySource] = {}
        if before is not None:
            known = {each.place: each for each in before.sources.values()}
            self.counts, self._forged = before.counts, before._forged
        for name, source in self.sources.items():
            with _as_config_error(source):
                if (kept := known.get(source.place)) is not None:
                    await kept.reload()
                    self.sources[name] = kept
                else:
                    await source.begin()

    def start(self) -> None:
        """Follows the keys."""
        for source in self.sources.values():
            source.start()

    async def stop(self, after: Tokens | None = None) -> None:
        """Stops following keys, except those that ``after`` has, too."""
        kept = [] if after is None else [id(each) for each in after.sources.values()]
        for source in self.sources.values():
            if id(source) not in kept:
                await source.stop()

    # -- the tokens

    def known(self, token: str) -> Caller | None:
        """Returns the caller of a token that was checked before; None: check it."""
        if len(token) > MAX_BYTES:
            return None
        checked = self._cache.get(key := digest(token))
        if checked is None:
            return None
        if checked.key.is_current and self._clock() < checked.until:
            return checked.caller
        del self._cache[key]
        return None

    def is_token(self, text: str) -> bool:
        """Returns whether a credential is a JWT: three parts, and `alg` in the first one."""
        if len(text) > MAX_BYTES:
            return text.count(".") == 2
        return _SHAPE.fullmatch(text) is not None and "alg" in (_json(text.partition(".")[0]) or ())

    def check(self, token: str, client: Client | None) -> Caller:
        """Returns the caller of a token. Raises ApiError (401, 429, 503), UnknownKeyError."""
        try:
            return self._check(self._read(token), client)
        except ApiError as error:
            if not isinstance(error, UnknownKeyError):
                self.counts["limited" if error.status == 429 else "refused"] += 1
            raise

    def _read(self, token: str) -> _Read:
        """Reads a token and checks all but its signature. Raises ApiError (401)."""
        if len(token) > MAX_BYTES:
            raise invalid(f"it has {len(token)} bytes; expected at most {MAX_BYTES}: request fewer claims")
        first, payload, _ = token.split(".")
        header, claims = _json(first), _json(payload)
        if header is None or claims is None:
            raise invalid("its header or its claims are no JSON object")
        algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
        if algorithm not in ALGORITHMS:
            raise invalid(f"its algorithm is {_shown(algorithm)}; expected {_one_of(ALGORITHMS)}")
        if "crit" in header or "b64" in header:
            raise invalid("its header has critical fields (crit), which the router does not know")
        if not isinstance(kind, str) or kind.lower() not in _TYPES:
            raise invalid(f"its type (typ) is {_shown(kind)}; expected JWT or at+jwt: send an access token")
        if not isinstance(key_id, str | None):
            raise invalid("its key ID (kid) is no text")
        issuer = self._issuer(claims.get("iss"))
        until = self._times(claims, issuer.clock_skew_seconds)
        audience = claims.get("aud")
        if issuer.audience not in ([audience] if isinstance(audience, str) else _texts(audience) or ()):
            raise invalid(
                f"its audience (aud) is {_shown(audience)}; expected {issuer.audience!r}: request a "
                "token for it"
            )
        caller = _caller(claims, issuer)
        return _Read(token, _decoded(payload), algorithm, key_id, issuer, caller, until)

    def _issuer(self, name: object) -> JwtIssuer:
        found = self._issuers.get(name) if isinstance(name, str) else None
        if found is None:
            raise invalid(f"its issuer (iss) is {_shown(name)}; expected {_one_of(self._issuers)}")
        return found

    def _times(self, claims: Mapping[str, Any], skew: float) -> float:
        """Returns the Unix time at which a token has expired. Raises ApiError (401)."""
        now = self._clock()
        expires = _time(claims, "exp")
        if expires is None:
            raise invalid("it has no expiry (exp); the issuer must add it")
        if now >= expires + skew:
            raise invalid(f"it expired {now - expires:.0f} s ago, at {_utc(expires)}; request a new one")
        for name in ("nbf", "iat"):
            begins = _time(claims, name)
            if begins is not None and begins > now + skew:
                raise invalid(
                    f"it is valid only in {begins - now:.0f} s, from {_utc(begins)} ({name}); check "
                    "the clocks"
                )
        return expires + skew

    def _check(self, read: _Read, client: Client | None, *, waited: bool = False) -> Caller:
        """Checks the signature of a token. ``waited``: its keys have been read again."""
        source = self.sources[read.issuer.issuer]
        key = None if source.keys is None else source.keys.find(read.key_id, read.algorithm)
        if key is None:
            named = "no key ID (kid)" if read.key_id is None else f"the key ID {_shown(read.key_id)}"
            if not waited:
                end = source.wait_for((read.key_id, read.algorithm))
                if end is not None:
                    raise UnknownKeyError(end, partial(self._finish, read, client))
            if not waited or source.problem is not None:
                self.counts["no_keys"] += 1
                raise ApiError(
                    503,
                    f"the JWT has {named}, and the keys of its issuer cannot be read now; retry",
                    code="issuer_unreachable",
                    headers={"retry-after": f"{PAUSE_SECONDS:.0f}"},
                )
            raise invalid(
                f"it has {named}, which the issuer's keys for {read.algorithm} lack; request a new one"
            )
        address = None
        # Several clients share the address of a gateway.
        if client is not None and (payer := client.payer) is not None and not payer.is_gateway:
            address = client.sender
            self._forged.check(address)
        try:
            verified = _JWS.decode_complete(read.text, key.public, algorithms=[read.algorithm])
        except PyJWTError:
            verified = None
        if verified is None or verified["payload"] != read.payload:
            if address is not None:
                self._forged.count(address)
            raise invalid("its signature is not valid for the issuer's key; request a new one")
        self.counts["valid"] += 1
        if len(self._cache) >= MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        self._cache[digest(read.text)] = _Checked(read.caller, read.until, key)
        return read.caller

    def _finish(self, read: _Read, client: Client | None) -> Caller:
        try:
            return self._check(read, client, waited=True)
        except ApiError as error:
            if error.status != 503:
                self.counts["limited" if error.status == 429 else "refused"] += 1
            raise

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of tokens and key sets."""
        checks = CounterMetricFamily(
            "lmetric_jwt_checks",
            "JSON Web Tokens that were not checked before, by outcome: valid, refused (401), limited (429), "
            "or no_keys (503)",
            labels=("outcome",),
        )
        for outcome in ("valid", "refused", "limited", "no_keys"):
            checks.add_metric((outcome,), self.counts[outcome])
        yield checks
        reads = CounterMetricFamily(
            "lmetric_jwks_reads",
            "Reads of an issuer's keys by outcome: good or failed",
            labels=("issuer", "outcome"),
        )
        for name, source in self.sources.items():
            reads.add_metric((name, "good"), source.reads[True])
            reads.add_metric((name, "failed"), source.reads[False])
        yield reads


@contextmanager
def _as_config_error(source: KeySource) -> Iterator[None]:
    """Turns errors of a key set into ConfigError."""
    try:
        yield
    except KeySetError as error:
        raise ConfigError(f"auth.jwt: {source.place}: the key set cannot be used: {error}") from None


def invalid(reason: str) -> ApiError:
    """Returns the error of a token that is not valid."""
    headers = {"www-authenticate": 'Bearer error="invalid_token"'}
    return ApiError(401, f"the JWT is not valid: {reason}", code="invalid_token", headers=headers)


def _caller(claims: Mapping[str, Any], issuer: JwtIssuer) -> Caller:
    """Returns who the claims name. Raises ApiError (401)."""
    tenant, subject = claims.get(issuer.tenant_claim), claims.get("sub")
    if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT or not tenant.isprintable():
        raise invalid(
            f"its claim {issuer.tenant_claim!r} names no tenant; expected a text of 1 to {MAX_TENANT} "
            "characters"
        )
    if not isinstance(subject, str | None):
        raise invalid("its subject (sub) is no text")
    read = [f"tenant by claim {issuer.tenant_claim}"]
    slo_class = models = None
    if issuer.class_claim is not None:
        slo_class = claims.get(issuer.class_claim, "")
        if not isinstance(slo_class, str):
            raise invalid(f"its claim {issuer.class_claim!r} is no text; expected the name of a class")
        read.append(f"class by claim {issuer.class_claim}")
    if issuer.models_claim is not None:
        given = claims.get(issuer.models_claim)
        models = _texts(given.split() if isinstance(given, str) else given)
        if models is None:
            raise invalid(
                f"its claim {issuer.models_claim!r} is missing or no list of texts; expected names of models"
            )
        read.append(f"models by claim {issuer.models_claim}")
    key_id = ""
    if subject:
        key_id = digest(f"{issuer.issuer}\0{subject}").hex()[:KEY_ID_DIGITS]
    allowed = None if models is None else frozenset(models)
    return Caller(tenant, key_id, issuer.issuer, ", ".join(read), slo_class, allowed)


def _decoded(part: str) -> bytes:
    return urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _json(part: str) -> dict[str, Any] | None:
    """Returns the JSON object in a part of a token; None: it is none."""
    try:
        value = orjson.loads(_decoded(part))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _texts(value: object) -> list[str] | None:
    """Returns a list of texts; None: it is none."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    return None


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    """Returns a time of the claims, Unix seconds; None: it is missing. Raises ApiError (401)."""
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise invalid(f"its time {name} is {_shown(value)}; expected seconds since 1970")
    return float(value)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _shown(value: object) -> str:
    """Returns an untrusted value for an error, in short."""
    if value is None:
        return "missing"
    if isinstance(value, list | dict) and not _texts(value):  # it may be nested too deep for `repr`
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _one_of(names: Iterable[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last
