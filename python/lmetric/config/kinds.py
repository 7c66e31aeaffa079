"""Types of configuration values, with their validation errors."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, SecretStr
from pydantic_core import CoreSchema, core_schema

from lmetric.engines.xargs_names import MOST_SLO_MS
from lmetric.roles import Role as Role

MOST_WORKERS = 8  # a restart runs twice as many for a while; their shared memory has room for 16


def _visible(text: str, what: str) -> None:
    """Raises ValueError for a text that must not be in the head of a request."""
    if not re.fullmatch("[!-~]*", text):
        raise ValueError(f"{what} has only visible ASCII characters, without spaces")


def _http_url(url: str, whose: str) -> str:
    _visible(url, f"{whose} URL")  # urlsplit drops line breaks
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its text may quote a password
        raise ValueError(f"{whose} URL looks like http://host:port, with a port up to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{whose} URL looks like http://host:port")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{whose} URL has no user, query or fragment; set API keys with api_key")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError("leave out the /v1: the router adds the paths")
    return url.rstrip("/")


UNIX = "unix:"  # prefix of a unix socket's address, before its absolute path


def unix_path(address: str) -> str | None:
    """Returns the path in `unix:/path` or `unix:///path`; None: another kind of address."""
    if not address.startswith(UNIX):
        return None
    path = address.removeprefix(UNIX)
    return path.removeprefix("//") if path.startswith("///") else path


def _check_unix(address: str) -> None:
    path = unix_path(address) or ""
    if not path.startswith("/") or path.startswith("//") or path.endswith("/") or "\0" in path:
        raise ValueError("a unix socket looks like unix:/run/lmetric/router.sock, with an absolute path")
    if len(path.encode()) > 107:
        raise ValueError("the path of a unix socket has at most 107 bytes")


def _host(host: str) -> str:
    if host.startswith(UNIX):
        _check_unix(host)
    return host


def _engine_url(url: str) -> str:
    if not url.startswith(UNIX):
        return _http_url(url, "an engine's")
    if "?" in url or "#" in url:
        raise ValueError("an engine's URL has no query or fragment")
    _check_unix(url)
    return f"{UNIX}//{unix_path(url)}"


def _proxy_rule(rule: str) -> str:
    if rule == "unix":
        return rule
    try:
        return str(ipaddress.ip_network(rule, strict=False))
    except ValueError:
        raise ValueError("expected an IP address, a CIDR block such as 10.0.0.0/8, or unix") from None


def _file_mode(mode: object) -> object:
    if not isinstance(mode, str) or not re.fullmatch("0?[0-7]{3}", mode):
        raise ValueError('expected three octal digits in quotes, such as "660"')
    return mode


def _origin(text: str) -> str:
    if text == "*":
        return text
    _visible(text, "an origin")
    parts = urlsplit(text)
    if not parts.scheme or not parts.netloc or text != f"{parts.scheme}://{parts.netloc}" or "@" in text:
        raise ValueError('an origin looks like https://host or https://host:port, without a path, or is "*"')
    return text.lower()


def _indicator_source(source: str) -> str:
    if source == "push" or re.fullmatch(r"header(:[!-+\--~]+)?", source):  # field: no comma
        return source
    # All engine metrics have a prefix, so a single word is a mistyped `push` or `header`.
    if re.fullmatch(r"(?!header:)[A-Za-z_:][A-Za-z0-9_:]*", source) and re.search("[_:]", source):
        return source
    raise ValueError(
        f"{source!r} is not valid; expected push, header, header:FIELD, or an engine metric such as "
        "vllm:num_preemptions_total (without labels)"
    )


def _port(value: object) -> int | str:
    if isinstance(value, str) and re.fullmatch("[0-9]+", value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_535:
        return value
    if isinstance(value, str) and re.fullmatch("[A-Za-z0-9-]{1,15}", value) and value.strip("-"):
        return value
    raise ValueError("a port is a number from 1 to 65535, or the name of a container port")


def _zmq_endpoint(endpoint: str) -> str:
    port = re.fullmatch("tcp://.+:([0-9]{1,5})", endpoint)
    if not re.fullmatch("ipc://.+", endpoint) and not (port and 0 < int(port[1]) < 65536):
        raise ValueError("a ZMQ endpoint looks like tcp://host:port or ipc:///path")
    return endpoint


# ${NAME}, $(NAME) and {{ NAME }} anywhere; $NAME and os.environ/NAME as the whole text.
_REFERENCE = re.compile(
    r".*(\$\{[^}]*\}|\$\(\w+\)|\{\{.*\}\}).*|\$[A-Za-z_]\w*|os\.environ/\w+", re.ASCII | re.DOTALL
)


def is_reference(text: str) -> bool:
    """Whether a secret looks like a reference to a variable that nobody has expanded."""
    return _REFERENCE.fullmatch(text) is not None


def token_problem(text: str) -> str | None:
    """Why a text is no bearer token; None: it is one, of visible ASCII characters."""
    if is_reference(text):
        return (
            "it looks like a reference to a variable, which is not expanded here; in the configuration file, "
            "write ${NAME} as the whole value, or give the secret itself in a variable LMETRIC__... or a file"
        )
    if re.fullmatch("[!-~]+", text) is None:
        return "a token has one or more characters, all visible ASCII"
    return None


def _token(secret: SecretStr) -> SecretStr:
    problem = token_problem(secret.get_secret_value())
    if problem is not None:
        raise ValueError(problem)
    return secret


def _redis_url(secret: SecretStr) -> SecretStr:
    expected = "a Redis URL looks like redis://:password@host:6379/0, or begins with rediss:// or unix://"
    try:
        parts = urlsplit(secret.get_secret_value())
        _ = parts.port
    except ValueError:  # its text quotes the URL
        raise ValueError(f"{expected}; write special characters of the password as %XX") from None
    if parts.scheme not in ("redis", "rediss", "unix") or not (parts.hostname or parts.scheme == "unix"):
        raise ValueError(expected)
    if parts.scheme != "unix" and not (parts.path.strip("/").isdigit() or parts.path in ("", "/")):
        raise ValueError(f"{expected}: the path is the number of a database")
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
        raise ValueError(
            "expected an IP address, a CIDR block such as 10.0.0.0/8, or a host name with * and ?"
        )
    return rule


def embedded_engines(value: int | str) -> tuple[list[int], list[str]]:
    """Returns the numbers of embedded engines, and the flags of their scheduler.

    One number is of engines of both roles, two are of prefill and decode engines.

    Raises:
        ValueError: another text.
    """
    number, _, scheduler = str(value).partition(",")
    parts = re.fullmatch(r"(\d+)(?:P(\d+)D)?", number.upper())
    counts = [int(part) for part in parts.groups() if part] if parts and not isinstance(value, bool) else []
    if not counts or min(counts) < 1 or sum(counts) > 1024:
        raise ValueError(
            "expected a number of engines from 1 to 1024, or prefill and decode engines such as 2P4D"
        )
    if not scheduler:
        return counts, []
    if scheduler == "uniboost":
        return counts, ["--order", scheduler]
    name, _, millis = scheduler.partition("=")
    if name == "slo" and re.fullmatch(r"\d{1,5}(\.\d{1,3})?", millis) and 0 < float(millis) <= MOST_SLO_MS:
        return counts, ["--order", name, "--order-slo", f"{float(millis) / 1e3:g}"]
    raise ValueError(
        f"expected uniboost, or slo=MS with up to {MOST_SLO_MS:,} milliseconds between tokens, after the "
        "engines, as in 2,slo=50"
    )


def _embedded(value: Any) -> int | str:
    counts, scheduler = embedded_engines(value)
    return counts[0] if len(counts) == 1 and not scheduler else str(value)


def _workers(value: object) -> int | str:
    text = str(value)
    if text == "auto":
        return text
    if isinstance(value, bool) or not re.fullmatch("[0-9]+", text) or not 1 <= int(text) <= MOST_WORKERS:
        raise ValueError(f"expected a number of processes from 1 to {MOST_WORKERS}, or auto")
    return int(text)


def _off(word: object) -> object:
    """Returns "off" for False: YAML reads `off` as false."""
    return "off" if word is False else word


def setting(default: Any = ..., *, when: str = "", tuning: bool = False, **more: Any) -> Any:
    """A key of a section. The text below it in the code is its description.

    Args:
        when: the reason to change it, as the end of a sentence with "if".
        tuning: whether the key is below `tuning`.
        more: arguments of `pydantic.Field`.
    """
    extra: Any = ({"when": when} if when else {}) | ({"tuning": True} if tuning else {})
    if "default_factory" not in more:
        more["default"] = default
    return Field(json_schema_extra=extra or None, **more)


class OptionError(ValueError):
    """An invalid routing option.

    Attributes:
        path: keys below the option's key.
        value: the invalid value.
        problem: the reason.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.path: tuple[str, ...] | None = getattr(error, "path", None)
        self.value: Any = getattr(error, "value", None)
        self.problem: str = getattr(error, "problem", str(error))


class Option:
    """Annotates a key whose value `option_values.parse` reads, with the settings of servers."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _checked(self, value: Any) -> Any:
        from lmetric._core import LmetricError
        from lmetric.option_values import parse

        try:
            return parse(self._what, value, server=True)
        except LmetricError as error:
            raise OptionError(error) from None

    def _written(self, value: Any) -> Any:
        from lmetric.option_values import as_settings

        return as_settings(self._what, value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Makes pydantic call `parse`, and write options as in files."""
        written = core_schema.plain_serializer_function_ser_schema(self._written)
        return core_schema.no_info_plain_validator_function(self._checked, serialization=written)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        """The schema of a word, or a mapping of server settings."""
        from lmetric.option_values import json_schema

        return json_schema(self._what)


IndicatorSource = Annotated[str, AfterValidator(_indicator_source)]
"""The source of an indicator's values."""

Port = Annotated[int, Field(ge=1, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Level = Annotated[int, Field(ge=-10, le=10)]
Positive = Annotated[int, Field(ge=1)]
EngineUrl = Annotated[str, AfterValidator(_engine_url)]
Host = Annotated[str, AfterValidator(_host)]
FileMode = Annotated[str, BeforeValidator(_file_mode)]
ProxyRule = Annotated[str, AfterValidator(_proxy_rule)]
RouterUrl = Annotated[str, AfterValidator(partial(_http_url, whose="a router's"))]
CollectorUrl = Annotated[str, AfterValidator(partial(_http_url, whose="a collector's"))]
ZmqEndpoint = Annotated[str, AfterValidator(_zmq_endpoint)]
CorsOrigin = Annotated[str, AfterValidator(_origin)]
Token = Annotated[SecretStr, AfterValidator(_token)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]
EngineRule = Annotated[str, AfterValidator(_engine_rule)]
PodPort = Annotated[int | str, PlainValidator(_port)]
Embedded = Annotated[int | str, PlainValidator(_embedded)]
Workers = Annotated[int | str, PlainValidator(_workers)]
# Longer names are looked up nowhere.
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
# Weights by model. A name alone stands for the only model.
AliasTargets = Annotated[
    dict[ModelName, Annotated[float, Field(gt=0, le=1e6)]],
    Field(min_length=1, max_length=16),
    BeforeValidator(lambda value: {value: 1.0} if isinstance(value, str) else value),
]
# A name alone stands for the only model.
FallbackModels = Annotated[
    list[ModelName],
    Field(min_length=1, max_length=16),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
OFF_IS_A_WORD = BeforeValidator(_off)


class Strict(BaseModel):
    """A section. Unknown keys are errors; values are immutable."""

    # The validator of the whole configuration has those of its sections. To build one of each at
    # the import takes 70 ms. A worker process gets a checked configuration, and builds none.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)
