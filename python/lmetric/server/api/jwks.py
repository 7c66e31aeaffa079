"""Key sets of issuers of JSON Web Tokens (JWKS, RFC 7517): the public keys that check signatures.

Only this module and `jwt` import PyJWT, an optional package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from jwt.algorithms import has_crypto
from jwt.api_jwk import PyJWK
from jwt.exceptions import PyJWTError

if not has_crypto:
    raise ImportError("No module named 'cryptography'")

MAX_BYTES = 256 * 1024  # of a key set
MAX_KEYS = 100
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192  # smaller keys are weak, larger ones slow
# By the key's type and curve. A key has one algorithm, so a token cannot choose another one.
_ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
ALGORITHMS = tuple(_ALGORITHMS.values())
_PARAMETERS = {"RSA": ("n", "e"), "EC": ("x", "y"), "OKP": ("x",)}
_SECRET = ("d", "p", "q", "k")  # parameters of private and of symmetric keys

KeyName = tuple[str | None, str]  # key ID (`kid`) and algorithm


class KeySetError(ValueError):
    """A key set that cannot be read or used."""


class VerifyingKey:
    """A public key with its algorithm.

    ``is_current``: the newest key set has it. Results of checks with other keys are not used.
    """

    __slots__ = ("content", "is_current", "public")

    def __init__(self, content: Mapping[str, str], algorithm: str) -> None:
        self.content = content
        self.public = PyJWK(dict(content), algorithm)
        self.is_current = True


class KeySet:
    """The usable keys of an issuer, by key ID and algorithm. None as ID: the key has none."""

    def __init__(self, keys: Mapping[KeyName, VerifyingKey]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key_id: str | None, algorithm: str) -> VerifyingKey | None:
        """Returns the key of a token; None: it is not known.

        A token without a key ID has the only key of its algorithm.
        """
        if key_id is not None:
            return self._keys.get((key_id, algorithm))
        own = [key for (_, other), key in self._keys.items() if other == algorithm]
        return own[0] if len(own) == 1 else None

    def replaces(self, before: KeySet | None) -> KeySet:
        """Returns this set with the unchanged keys of the set before, whose other keys end."""
        if before is None:
            return self
        keys = dict(self._keys)
        for name, old in before._keys.items():
            new = keys.get(name)
            if new is not None and new.content == old.content:
                keys[name] = old
            else:
                old.is_current = False
        return KeySet(keys)


def parse(data: bytes) -> KeySet:
    """Reads a key set. Keys for other uses and algorithms are left out. Raises KeySetError."""
    if len(data) > MAX_BYTES:
        raise KeySetError(f"it has more than {MAX_BYTES} bytes")
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise KeySetError(f"it is not valid JSON: {error}") from None
    listed = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise KeySetError('expected a key set, such as {"keys": [...]}')
    if len(listed) > MAX_KEYS:
        raise KeySetError(f"it has {len(listed)} keys; expected at most {MAX_KEYS}")
    keys: dict[KeyName, VerifyingKey] = {}
    for place, each in enumerate(listed, 1):
        if not isinstance(each, dict):
            raise KeySetError(f"key {place} is not an object")
        algorithm = _algorithm(each)
        if algorithm is None:
            continue
        key_id = each.get("kid")
        if key_id is not None and not isinstance(key_id, str):
            raise KeySetError(f"key {place}: kid is not a text")
        if (key_id, algorithm) in keys:
            what = "without a key ID (kid)" if key_id is None else f"with the key ID {key_id!r}"
            raise KeySetError(f"two {algorithm} keys {what}; expected different key IDs")
        try:
            keys[key_id, algorithm] = _key(each, algorithm)
        except KeySetError as error:
            raise KeySetError(f"key {place}: {error}") from None
    if not keys:
        raise KeySetError(f"it has no key for signatures with {', '.join(ALGORITHMS)}")
    return KeySet(keys)


def _algorithm(key: Mapping[str, Any]) -> str | None:
    """Returns the algorithm of a key; None: it is for another use."""
    kind, curve = key.get("kty"), key.get("crv")
    if not isinstance(kind, str) or not isinstance(curve, str | None):
        return None
    algorithm = _ALGORITHMS.get((kind, None if kind == "RSA" else curve))
    if algorithm is None or key.get("alg", algorithm) != algorithm or key.get("use", "sig") != "sig":
        return None
    operations = key.get("key_ops", ["verify"])
    return algorithm if isinstance(operations, list) and "verify" in operations else None


def _key(key: Mapping[str, Any], algorithm: str) -> VerifyingKey:
    """Makes a key. Raises KeySetError."""
    if secret := [name for name in _SECRET if name in key]:
        raise KeySetError(
            f"it is a private key ({secret[0]}); publish only its public part, and replace the key"
        )
    kind = key["kty"]
    names = ["kty", *_PARAMETERS[kind], *(["crv"] if "crv" in key else [])]
    content = {name: key[name] for name in names if isinstance(key.get(name), str)}
    if len(content) < len(names):
        raise KeySetError(f"expected the texts {' and '.join(_PARAMETERS[kind])}")
    try:
        made = VerifyingKey(content, algorithm)
    except (PyJWTError, ValueError) as error:
        raise KeySetError(f"it is not a valid {kind} key: {error}") from None
    if kind == "RSA" and not MIN_RSA_BITS <= (bits := made.public.key.key_size) <= MAX_RSA_BITS:
        raise KeySetError(f"its RSA key has {bits} bits; expected {MIN_RSA_BITS} to {MAX_RSA_BITS}")
    return made
