"""Settings of the endpoint picker."""

from __future__ import annotations

from typing import ClassVar

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
    # Further engines in the list for the gateway, which tries the next one if the first refuses.
    fallbacks: ClassVar[int] = 1
    tls: ListenerTls | None = Field(
        None,
        description="TLS for gateways; a restart reads the files again; null: plain HTTP/2",
        json_schema_extra={"when": "gateways connect with TLS"},
    )
