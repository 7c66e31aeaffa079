"""The configuration of an endpoint picker, from the configuration of `serve`."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from lmetric.config import ConfigError, Retries, ServerConfig
from lmetric.server.epp.addresses import check_address

# Settings that need the router between the client and the engine.
_NEEDS_DATA = {
    "split": "split a request",
    "prefix_fetch": "fetch prefixes",
    "rebalance": "move running requests",
}


class GatewayRetries(Retries):
    """No retries by the router: the gateway itself tries the next engine of the list."""

    failures: ClassVar[frozenset[str]] = frozenset()
    statuses: ClassVar[frozenset[int]] = frozenset()


def for_gateway(config: ServerConfig) -> ServerConfig:
    """Returns the configuration with the settings that a gateway requires.

    The gateway sends each request once, and may try further engines of the list. So the router does
    not retry by status, and does not continue streams. Raises ConfigError for settings that need
    more.
    """
    for pool in (config, *(config.pool_settings(model) for model in config.models)):
        routing = pool.routing
        for name, what in _NEEDS_DATA.items():
            if getattr(routing, name) is not None:
                raise ConfigError(
                    f"{name} is not possible in `epp`: a gateway cannot {what}; set {name}: none"
                )
        if pool.hedging.after_seconds is not None:
            raise ConfigError(
                "hedging.after_seconds is not possible in `epp`: a gateway sends one copy; remove it"
            )
        for name, slo in (pool.admission.classes if pool.admission is not None else {}).items():
            if slo.hedge_after_seconds is not None:
                raise ConfigError(
                    f"admission.classes.{name}.hedge_after_seconds is not possible in `epp`: a gateway sends "
                    "one copy; remove it"
                )
    if config.aliases:
        raise ConfigError(
            "aliases are not possible in `epp`: a gateway rewrites names of models; remove them"
        )
    if config.fallbacks:
        raise ConfigError(
            "fallbacks are not possible in `epp`: a gateway rewrites names of models; remove them"
        )
    if config.host.startswith("unix:"):
        raise ConfigError("host is a unix socket; `epp` needs an IP address to listen on")
    if config.worker_count > 1 and sys.platform != "linux":
        raise ConfigError(
            f"workers = {config.workers}: it is not possible in `epp` on this system: only Linux divides the "
            "connections of gateways between processes; set workers: 1"
        )
    tls = config.epp.tls
    if tls is not None and tls.client_ca_file is not None and tls.client_certificates == "optional":
        raise ConfigError(
            "epp.tls.client_certificates: optional is not possible: gRPC requires them or requests none; "
            "set required, or remove client_ca_file"
        )
    if tls is not None and tls.min_version != "1.2":
        raise ConfigError("epp.tls.min_version: gRPC accepts TLS 1.2 and 1.3; set '1.2'")
    for engine in (*config.engines, *(each for model in config.models for each in model.engines)):
        check_address(engine.url)
    pool_changes: dict[str, Any] = {"stream_failover": False, "handover": "sidecar"}
    retries = GatewayRetries(attempts=1)
    models = [model.model_copy(update=pool_changes) for model in config.models]
    return config.model_copy(update={"retries": retries, "models": models, **pool_changes})
