"""Settings of the endpoint picker."""

from __future__ import annotations

from lmetric.config.kinds import Strict, setting
from lmetric.config.network import ListenerTls


class EppConfig(Strict):
    """The endpoint picker. Only `lmetric-router epp` reads these settings."""

    port: int = setting(9002, ge=0, le=65_535, when="the port is taken")
    """port for gateways (gRPC), at the address `host`; 0: any free port"""
    fallbacks: int = setting(1, ge=0, le=8, when="the gateway accepts one address only: set 0")
    """further engines in the list for the gateway, which it may try if the first one refuses"""
    tls: ListenerTls | None = setting(None, when="gateways connect with TLS")
    """TLS for gateways; a restart reads the files again; null: plain HTTP/2"""
