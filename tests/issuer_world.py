"""An issuer of JSON Web Tokens: its keys, its tokens, and the server of its key set."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import jwt
import orjson
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://login.example.com", "lmetric"
_TO_JWK: dict[str, Any] = {
    "RS256": RSAAlgorithm.to_jwk,
    "ES256": ECAlgorithm.to_jwk,
    "EdDSA": OKPAlgorithm.to_jwk,
}


@cache
def rsa_key(bits: int = 2048, number: int = 0) -> Any:
    """A private key. Making one takes long, so tests share them. ``number``: one of several."""
    return generate_rsa(65_537, bits)


def private_key(algorithm: str) -> Any:
    if algorithm == "RS256":
        return rsa_key()
    return generate_private_key(SECP256R1()) if algorithm == "ES256" else Ed25519PrivateKey.generate()


class Key:
    """A key of an issuer. ``public``: its entry in the key set."""

    def __init__(self, key_id: str | None, algorithm: str = "ES256", private: Any = None) -> None:
        self.key_id, self.algorithm = key_id, algorithm
        self.private = private or private_key(algorithm)
        self.public = _TO_JWK[algorithm](self.private.public_key(), as_dict=True)
        self.public |= {"use": "sig", "alg": algorithm} | ({} if key_id is None else {"kid": key_id})


class Issuer:
    """An issuer. ``published``: the keys of its key set; ``status``: of the answers with it."""

    def __init__(self, name: str = ISSUER) -> None:
        self.name = name
        self.key = Key("k0")  # signs new tokens
        self.published = [self.key]
        self.status = 200
        self.answer: bytes | None = None  # instead of the key set
        self.gate: asyncio.Event | None = None  # answers wait for it
        self.reads = 0
        self.url = ""
        self._made = 0

    def rotate(self, *, keep: bool = True) -> None:
        """Signs with a new key from now on. ``keep``: the key set keeps the old ones."""
        self._made += 1
        self.key = Key(f"k{self._made}")
        self.published = [*(self.published if keep else []), self.key]

    def key_set(self) -> bytes:
        return orjson.dumps({"keys": [key.public for key in self.published]})

    def claims(self, **changes: Any) -> dict[str, Any]:
        """The claims of a valid token. A change to None leaves a claim out."""
        now = int(time.time())
        base = {"iss": self.name, "aud": AUDIENCE, "sub": "user-1", "team": "red"}
        claims: dict[str, Any] = base | {"iat": now, "exp": now + 600} | changes
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, header: dict[str, Any] | None = None, key: Key | None = None, **changes: Any) -> str:
        key = key or self.key
        ids = {} if key.key_id is None else {"kid": key.key_id}
        return jwt.encode(self.claims(**changes), key.private, key.algorithm, ids | (header or {}))

    def settings(self, **changes: Any) -> dict[str, Any]:
        """An entry of `auth.jwt`."""
        base = {"issuer": self.name, "audience": AUDIENCE, "jwks": self.url, "tenant_claim": "team"}
        return base | changes

    async def _answer(self, _: web.Request) -> web.Response:
        self.reads += 1
        body = self.key_set() if self.answer is None else self.answer
        status = self.status
        if self.gate is not None:
            await self.gate.wait()
        return web.Response(status=status, body=body, headers={"location": self.url})

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Issuer]:
        """Serves the key set over HTTP."""
        app = web.Application()
        app.router.add_get("/keys", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/keys"
        try:
            yield self
        finally:
            if self.gate is not None:
                self.gate.set()
            await runner.cleanup()

    def write(self, file: Path) -> None:
        """Replaces a file with the key set."""
        new = file.with_suffix(".new")
        new.write_bytes(self.key_set())
        new.replace(file)
        self.url = str(file)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}
