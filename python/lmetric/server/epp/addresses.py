"""Addresses of engines as gateways have them: IP:PORT."""

import ipaddress
from urllib.parse import urlsplit

from lmetric.config import ConfigError
from lmetric.server.fleet.engine import Engine

_PORTS = {"http": 80, "https": 443}


def address_of(engine: Engine) -> str:
    """Returns IP:PORT of an engine; the host's name if its URL has no IP address."""
    parts = urlsplit(engine.config.url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 80)}"


def check_address(url: str) -> None:
    """Raises ConfigError if the URL of an engine has no IP address."""
    host = urlsplit(url).hostname or ""
    try:
        ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigError(
            f"engine {url}: expected an IP address, because gateways know engines by IP:PORT; use the "
            "address, or discovery"
        ) from None
