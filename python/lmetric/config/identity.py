"""Settings of identity: issuers of JSON Web Tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from lmetric.config.kinds import Strict, is_loopback, setting


def _key_set(place: str) -> str:
    if "://" not in place:
        if not place:
            raise ValueError("expected a file or an https address")
        return place
    expected = "expected a file, or an address such as https://host/keys, without user and fragment"
    try:
        parts = urlsplit(place)
        is_valid = (
            bool(parts.hostname) and "@" not in parts.netloc and not parts.fragment and (parts.port or 1) > 0
        )
    except ValueError:  # its text may quote a password
        raise ValueError(expected) from None
    if parts.scheme not in ("http", "https") or not is_valid or not place.isascii() or " " in place:
        raise ValueError(expected)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError(
            "expected https: with http, anyone between router and issuer can replace the keys; http is for "
            "loopback addresses only"
        )
    return place


ClaimName = Annotated[str, Field(min_length=1, max_length=256)]


class JwtIssuer(Strict):
    """An issuer of JSON Web Tokens (JWT), and the claims that the router reads."""

    issuer: str = setting(min_length=1, max_length=1024, when="clients have tokens of this issuer")
    """expected claim `iss`, exactly as the issuer writes it"""
    audience: str = setting(min_length=1, max_length=1024, when="clients have tokens of this issuer")
    """name of this service that the claim `aud` must have"""
    jwks: Annotated[str, AfterValidator(_key_set)] = setting(when="clients have tokens of this issuer")
    """the issuer's public keys (JWKS): a file, or an https address, usually the `jwks_uri` of its
    discovery document. The router reads them again if they change"""
    clock_skew_seconds: float = setting(
        30.0, ge=0, le=600, when="the issuer's clock and the router's differ by more"
    )
    """difference of clocks that the claims `exp`, `nbf` and `iat` may have, seconds"""
    tenant_claim: ClaimName = setting(when="another claim names the team or customer")
    """claim with the tenant's name. Metrics have a series for each tenant"""
    class_claim: ClaimName | None = setting(None, when="clients must not choose their class")
    """claim with the class of requests (`admission.classes`); the header x-slo-class then has no
    effect. null: the header or the tenant's `slo_class`"""
    models_claim: ClaimName | None = setting(None, when="the issuer decides which models a client uses")
    """claim with the only models, adapters and aliases that the token may use, as a list or divided
    by spaces. A token without the claim is refused; null: the tenant's `models`"""

    @property
    def key_file(self) -> Path | None:
        """The file of the keys; None: they are at an address."""
        return None if "://" in self.jwks else Path(self.jwks)
