"""Addresses of engines that gateways can have."""

import ipaddress
from urllib.parse import urlsplit

from lmetric.config import ConfigError


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
