"""Settings of the endpoint picker."""

from __future__ import annotations

from pydantic import Field

from lmetric.config.kinds import Strict
from lmetric.config.network import ListenerTls


class EppConfig(Strict):
    """The endpoint picker. Only `lmetric-router epp` reads these settings."""

    port: int = Field(
        9002,
        ge=0,
        le=65_535,
        description="port for gateways (gRPC), at the address `host`; 0: any free port",
        json_schema_extra={"when": "the port is taken"},
    )
    fallbacks: int = Field(
        1,
        ge=0,
        le=8,
        description="further engines in the list for the gateway, which it may try if the first one refuses",
        json_schema_extra={"when": "the gateway accepts one address only: set 0"},
    )
    tls: ListenerTls | None = Field(
        None,
        description="TLS for gateways; a restart reads the files again; null: plain HTTP/2",
        json_schema_extra={"when": "gateways connect with TLS"},
    )
