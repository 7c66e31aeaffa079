"""Kinds of values in configurations, and what is said of values that are none of the kind."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, SecretStr

from lmetric.options import Role as Role
from lmetric.options import split_names


def _http_url(url: str, whose: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{whose} URL looks like http://host:port")
    if parts.username or parts.query or parts.fragment:
        raise ValueError(f"{whose} URL has no user, query or fragment; a key is a setting of its own")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError("leave out the /v1: the router adds the paths")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{whose} URL looks like http://host:port ({error})") from None
    return url.rstrip("/")


def _nameserver(text: str) -> str:
    host, _, port = text.removeprefix("[").rpartition("]:" if text.startswith("[") else ":")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(text)
        return text
    try:
        ipaddress.ip_address(host)
        if not 1 <= int(port) <= 65_535:
            raise ValueError
    except ValueError:
        raise ValueError("a name server is an IP address, or IP:PORT") from None
    return text


def _origin(text: str) -> str:
    if text == "*":
        return text
    parts = urlsplit(text)
    if not parts.scheme or not parts.netloc or text != f"{parts.scheme}://{parts.netloc}" or "@" in text:
        raise ValueError('an origin looks like https://host or https://host:port, without a path, or is "*"')
    return text.lower()


def _split(name: str) -> str:
    if name in (names := split_names("experimental")):
        return name
    if name in split_names():
        raise ValueError(f"{name!r} is for studies only: use it in simulate or study")
    raise ValueError(f"{name!r} is not one of {', '.join(names)}")


def _port(value: object) -> int | str:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_535:
        return value
    if isinstance(value, str) and 1 <= len(value) <= 15 and value.replace("-", "").isalnum():
        return value
    raise ValueError("a port is a number from 1 to 65535, or the name of a container's port")


def _zmq_endpoint(endpoint: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    _, _, port = rest.rpartition(":")
    if not (scheme == "ipc" and rest) and not (scheme == "tcp" and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("a ZMQ endpoint looks like tcp://host:port or ipc:///path")
    return endpoint


def is_token(text: str) -> bool:
    """Whether a text can be sent as a bearer token: visible ASCII characters, at least one."""
    return re.fullmatch("[!-~]+", text) is not None


def _token(secret: SecretStr) -> SecretStr:
    if not is_token(secret.get_secret_value()):
        raise ValueError("a token has at least one character, all of them visible ASCII characters")
    return secret


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host: a loopback IP address, or localhost."""
    name = host.lower().removeprefix("[").removesuffix("]").rstrip(".")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _engine_rule(rule: str) -> str:
    with contextlib.suppress(ValueError):
        ipaddress.ip_network(rule, strict=False)
        return rule
    if "/" in rule or not re.fullmatch(r"[A-Za-z0-9._*?-]+", rule):
        raise ValueError("an IP address, a CIDR block such as 10.0.0.0/8, or a host name with * and ?")
    return rule


def _embedded(value: object) -> int | str:
    text = str(value).upper()
    parts = re.fullmatch(r"(\d+)(?:P(\d+)D)?", text)
    counts = [int(part) for part in parts.groups() if part] if parts and not isinstance(value, bool) else []
    if not counts or min(counts) < 1 or sum(counts) > 1024:
        raise ValueError("a number of engines from 1 to 1024, or such as 2P4D")
    return text if len(counts) == 2 else counts[0]


def _off(word: object) -> object:
    """YAML reads off as false."""
    return "off" if word is False else word


def _on(word: object) -> object:
    """YAML reads on as true."""
    return "on" if word is True else word


SplitName = Annotated[str, AfterValidator(_split)]
"""How requests are split that no roles split."""

Port = Annotated[int, Field(ge=1, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Positive = Annotated[int, Field(ge=1)]
EngineUrl = Annotated[str, AfterValidator(partial(_http_url, whose="an engine's"))]
RouterUrl = Annotated[str, AfterValidator(partial(_http_url, whose="a router's"))]
ZmqEndpoint = Annotated[str, AfterValidator(_zmq_endpoint)]
CorsOrigin = Annotated[str, AfterValidator(_origin)]
Nameserver = Annotated[str, AfterValidator(_nameserver)]
Token = Annotated[SecretStr, AfterValidator(_token)]
EngineRule = Annotated[str, AfterValidator(_engine_rule)]
PodPort = Annotated[int | str, PlainValidator(_port)]
Embedded = Annotated[int | str, PlainValidator(_embedded)]
OFF_IS_A_WORD = BeforeValidator(_off)
ON_IS_A_WORD = BeforeValidator(_on)


class Strict(BaseModel):
    """A section: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
