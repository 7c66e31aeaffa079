"""Settings of connections: TLS on both sides, and the addresses that proxies report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from lmetric.config.kinds import ProxyRule, Strict, setting


def _version(value: object) -> object:
    """Returns "1.2" for 1.2: YAML reads a version as a number."""
    return str(value) if isinstance(value, float) else value


class ListenerTls(Strict):
    """TLS for clients. The router reads the files again if they change, and on a reload."""

    certificate_file: Path = setting(when="clients connect with https")
    """PEM file with the router's certificate, then the certificates of the CAs between it and the
    root"""
    key_file: Path = setting(when="clients connect with https")
    """PEM file with the certificate's private key, without a password"""
    client_ca_file: Path | None = setting(None, when="only clients with a certificate may connect")
    """PEM file with the CAs that sign clients' certificates; null: the router requests no
    certificates"""
    client_certificates: Literal["required", "optional"] = setting(
        "required", when="some clients, such as health checks, have no certificate"
    )
    """with client_ca_file: whether clients without a certificate may connect. Certificates of other
    CAs are always refused"""
    min_version: Annotated[Literal["1.2", "1.3"], BeforeValidator(_version)] = setting(
        "1.2", when="a policy requires TLS 1.3"
    )
    """lowest TLS version of clients"""


class EngineTls(Strict):
    """TLS to engines with an https URL. The router reads the files again if they change."""

    ca_file: Path | None = setting(None, when="a private CA signs the engines' certificates")
    """PEM file with the CAs that sign the engines' certificates; default: the system's"""
    certificate_file: Path | None = setting(None, when="engines require a client certificate")
    """PEM file with the router's client certificate, for engines that require one"""
    key_file: Path | None = setting(None, when="engines require a client certificate")
    """PEM file with the private key of certificate_file, without a password"""
    server_name: str | None = setting(
        None, min_length=1, max_length=253, when="the certificate has another name than the URL"
    )
    """name in the engine's certificate, also sent as SNI; default: the host of the engine's URL.
    Discovered engines have an address as host"""
    verify: bool = setting(True, when="you test on a machine of your own")
    """check the engine's certificate. false: anyone between router and engine can read and change
    requests; the router logs a warning"""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("set both certificate_file and key_file, or neither")
        if not self.verify and self.ca_file is not None:
            raise ValueError("verify: false ignores ca_file; remove one of them")
        return self


class Forwarded(Strict):
    """Proxies in front of the router, and the header fields in which they report their clients."""

    trusted_proxies: list[ProxyRule] = setting(default_factory=list, when="there is a proxy in front")
    """addresses and CIDR blocks of proxies, or `unix` for all clients of a unix socket. The router
    takes the client's address from the X-Forwarded-For field of these proxies. It drops the
    forwarding fields of all other clients"""
