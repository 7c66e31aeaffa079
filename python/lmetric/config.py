"""The server's configuration: one schema, from a YAML file, the environment and flags.

A flag wins over the environment, the environment over the file, the file over the default. Every error names
where the value came from, its key path, the value, and the nearest right key.
"""

import contextlib
import difflib
import ipaddress
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    SecretStr,
    Tag,
    ValidationError,
    model_validator,
)

from lmetric._core import LmetricError

ENV_PREFIX = "LMETRIC_"

# Sources of engines beside those in `discovery`.
CONFIGURED = "configuration"
ADMIN = "admin"


class ConfigError(LmetricError):
    """A configuration that cannot be used; the message says where, what, and what would have been right."""


def _engine_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an engine's URL looks like http://host:port")
    if parts.username or parts.query or parts.fragment:
        raise ValueError("an engine's URL has no user, query or fragment; give a key as api_key")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError("leave out the /v1: the router adds the paths")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"an engine's URL looks like http://host:port ({error})") from None
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


Role = Literal["both", "prefill", "decode"]
Port = Annotated[int, Field(ge=1, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Positive = Annotated[int, Field(ge=1)]
EngineUrl = Annotated[str, AfterValidator(_engine_url)]
ZmqEndpoint = Annotated[str, AfterValidator(_zmq_endpoint)]


class Strict(BaseModel):
    """A section: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class KvEvents(Strict):
    """Where KV events come from, where an engine does not tell, or tells wrongly."""

    endpoint: ZmqEndpoint | None = Field(
        None, description="where to hear them; * is the engine's host; default: the engine is asked"
    )
    replay_endpoint: ZmqEndpoint | None = Field(
        None, description="where past ones can be asked for; default: the engine is asked"
    )
    topic: str | None = Field(None, description="topic of the engine's events; default: the engine is asked")
    bind: bool = Field(
        False,
        description="the router listens at endpoint and the engines connect to it, each with its own topic",
    )
    without_tokenizer: bool = Field(
        False,
        description="use them even where no tokenizer is known: for clients that send token ids; text then "
        "counts as not cached",
    )

    @model_validator(mode="after")
    def _bound_somewhere(self) -> Self:
        if self.bind and self.endpoint is None:
            raise ValueError("bind needs an endpoint to listen at, such as tcp://*:5557")
        return self


# The tags stand in brackets, so that they are not taken for keys where an error is told.
KvEventsSetting = Annotated[
    Annotated[Literal["auto", "off"], BeforeValidator(_off), Tag("[word]")]
    | Annotated[KvEvents, Tag("[mapping]")],
    Discriminator(lambda value: "[mapping]" if isinstance(value, dict | KvEvents) else "[word]"),
]


class EngineConfig(Strict):
    """One engine replica."""

    url: EngineUrl = Field(description="where it listens, http://host:port")
    name: Annotated[str, Field(pattern="^[!-~]{1,200}$")] | None = Field(
        None, description="its name in metrics, headers and receipts; default host:port"
    )
    cache_blocks: Positive | None = Field(
        None, description="blocks its prefix cache holds; default: the model's cache_blocks"
    )
    kv_events: KvEventsSetting | None = Field(
        None, description="its KV events; default: the model's kv_events"
    )
    api_key: SecretStr | None = Field(None, description="sent to it as a bearer token")
    role: Role | None = Field(
        None,
        description="both: whole requests; prefill: their prompts, and engines of role decode the rest; "
        "default: what the engine tells, else both",
    )

    @property
    def label(self) -> str:
        """The engine's name, or host:port."""
        return self.name or urlsplit(self.url).netloc


class PoolSettings(Strict):
    """How requests for a model are routed; at the top level, the default for every model."""

    policy: str | dict[str, Any] = Field(
        "lmetric",
        description="a policy's name, a score expression, or a mapping with filter, score, prefer, then",
    )
    knobs: dict[str, float] = Field(default_factory=dict, description="the policy's knobs by name")
    decode_policy: str | dict[str, Any] = Field(
        "least_requests",
        description="where requests decode whose prompt another engine computed; as policy",
    )
    decode_knobs: dict[str, float] = Field(
        default_factory=dict, description="the decode policy's knobs by name"
    )
    binding: Literal["early", "late"] = Field(
        "early",
        description="when the decode engine is chosen: with the prefill engine, or when the prompt is "
        "computed; SGLang's need early",
    )
    colocate: bool = Field(
        True, description="where one of the two roles is missing, the other takes whole requests"
    )
    handover: Literal["auto", "nixl", "bootstrap"] = Field(
        "auto",
        description="how prefill engines hand KV caches to decode engines; auto: they are asked; engines "
        "that cannot do it get no requests",
    )
    handover_seconds: Seconds | None = Field(
        None,
        description="after the prompt was computed, its KV cache is fetched within this time or computed "
        "again; default: two thirds of the engine's lease, 20 where it does not tell",
    )
    block_size: Positive | None = Field(
        None,
        le=1 << 20,
        description="tokens a block, for prompts whose tokens are known; default: the engines', 16 until one "
        "tells",
    )
    text_block_bytes: Positive = Field(
        256, le=1 << 20, description="bytes a block, for prompts given as text"
    )
    cache_blocks: Positive | None = Field(
        None, description="blocks an engine's prefix cache holds; default: the engine is asked"
    )
    kv_events: KvEventsSetting = Field(
        "auto",
        description="auto: the engines are asked where their KV events are; off: what is cached is guessed "
        "from what was sent; or a mapping",
    )
    tokenizer: Annotated[str, BeforeValidator(_off)] | None = Field(
        None,
        min_length=1,
        description="folder of the model's tokenizer.json and chat template, so that prompts are matched by "
        "token; off: by text; null: the folder the engine names as its model, where it is on this machine",
    )
    chat_template: str | None = Field(
        None, min_length=1, description="file that replaces the folder's, as the engines' --chat-template"
    )
    token_cache_bytes: int = Field(
        256 << 20, ge=1 << 10, description="bound on remembered tokens of prompts, bytes"
    )
    index_bytes: int = Field(512 << 20, ge=1 << 20, description="bound on the KV index, bytes")
    receipt_bytes: int = Field(16 << 20, ge=1 << 10, description="bound on kept receipts, bytes")
    guard: bool | None = Field(None, description="hot-spot guard; default: on where the policy is lmetric")
    guard_window_seconds: Seconds = Field(60.0, description="window of the hot-spot guard")
    guard_period_seconds: Seconds = Field(1.0, description="how often the hot-spot guard looks")
    profile: str | None = Field(
        None,
        description="engine profile (shipped name or file) for predicted times; default: what is learned",
    )
    seed: int = Field(0, ge=0, description="seed of the tie-breaks")


class ModelConfig(PoolSettings):
    """A model and the engines that serve it."""

    name: str = Field(min_length=1, description="the name clients ask for")
    engines: list[EngineConfig] = Field(default_factory=list, description="its engines")
    adapters: list[str] = Field(
        default_factory=list, description="further names it answers to (LoRA adapters)"
    )


class DnsSource(Strict):
    """Engines behind a DNS name: one for each address, or for each SRV record."""

    name: str = Field(min_length=1, description="the name to look up, e.g. that of a headless service")
    type: Literal["A", "AAAA", "SRV"] = Field(
        "A", description="of the records; priority and weight of SRV count for nothing"
    )
    port: Port | None = Field(None, description="on which every engine listens; SRV records bring their own")
    interval: Seconds = Field(10.0, description="between two look-ups; less where the answer's TTL is less")
    grace: float = Field(
        300.0, ge=0, le=86_400, description="that the last answer holds while look-ups fail, seconds"
    )
    nameservers: list[Annotated[str, AfterValidator(_nameserver)]] = Field(
        default_factory=list, description="IP or IP:PORT; default: the system's"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "SRV") != (self.port is None):
            raise ValueError("records of type A and AAAA need a port, those of type SRV bring their own")
        return self


class KubernetesSource(Strict):
    """Engines in the pods that a label selector matches."""

    selector: str = Field(min_length=1, description="label selector, e.g. app=vllm")
    port: Annotated[int | str, PlainValidator(_port)] = Field(
        description="on which the engines listen: a number, or the name of a container's port"
    )
    namespace: str | None = Field(
        None, min_length=1, description="of the pods; default: the router's own, or the kubeconfig context's"
    )
    model_key: str | None = Field(
        None, description="annotation or label with the model of a pod; default: the engine is asked"
    )
    role_key: str | None = Field(
        None, description="annotation or label with the role of a pod: both, prefill or decode"
    )
    kubeconfig: Path | None = Field(
        None, description="credentials; default: the pod's service account, or else kubectl's configuration"
    )
    context: str | None = Field(None, description="of the kubeconfig; default: its current one")


class DiscoverySource(Strict):
    """Tells which engines there are: one of `file`, `dns` and `kubernetes`."""

    file: Path | None = Field(
        None, description="YAML or JSON list of engines, each as in `engines` and with `model`; watched"
    )
    dns: DnsSource | None = Field(None, description="engines behind a DNS name")
    kubernetes: KubernetesSource | None = Field(None, description="engines in pods")
    name: str | None = Field(
        None, min_length=1, description="in logs, metrics and /debug/engines; default: made from what it is"
    )
    model: str | None = Field(
        None, min_length=1, description="of engines that name none; default: the top level's"
    )
    api_key: SecretStr | None = Field(None, description="sent to engines that name none, as a bearer token")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(kind is not None for kind in (self.file, self.dns, self.kubernetes)) != 1:
            raise ValueError("a source is exactly one of file, dns and kubernetes")
        return self

    @property
    def label(self) -> str:
        """The source's name, or what it is."""
        if self.name is not None:
            return self.name
        if self.dns is not None:
            return f"dns:{self.dns.name}"
        if self.kubernetes is not None:
            return f"kubernetes:{self.kubernetes.namespace or ''}/{self.kubernetes.selector}"
        return f"file:{self.file}"


class Timeouts(Strict):
    """Limits by phase, seconds."""

    connect: Seconds = Field(3.0, description="until an engine accepts the connection")
    body: Seconds = Field(60.0, description="until a client's request body is whole")
    first_byte: Seconds = Field(300.0, description="until a stream's first token")
    answer: Seconds = Field(1800.0, description="until a plain answer, which comes after its last token")
    between_chunks: Seconds = Field(120.0, description="between two chunks of an answer")
    slow_client: Seconds = Field(300.0, description="that a client may leave an answer unread")
    keep_alive: Seconds = Field(75.0, description="that a client's idle connection stays open")
    engine_drain: float = Field(
        300.0, ge=0, le=86_400, description="for requests on an engine that its source names no more"
    )
    drain_grace: float = Field(0.0, ge=0, le=86_400, description="after SIGTERM, still taking new requests")
    drain: float = Field(30.0, ge=0, le=86_400, description="after that, for running requests to end")


class Retries(Strict):
    """When a request goes down the ranking. Only before its first byte went to the client."""

    attempts: Positive = Field(3, description="engines tried per request, the first included")
    failures: list[Literal["refused", "reset", "timeout", "status"]] = Field(
        ["refused", "reset", "timeout", "status"], description="failures after which the next engine is tried"
    )
    statuses: list[Annotated[int, Field(ge=400, le=599)]] = Field(
        [502, 503], description="statuses of an engine that count as a failure of kind status"
    )


class Health(Strict):
    """Active checks of the engines, and what a failed request means."""

    path: str = Field("/health", pattern="^/", description="asked by GET; any status below 500 is healthy")
    interval: Seconds = Field(2.0, description="between two checks of an engine, seconds")
    timeout: Seconds = Field(2.0, description="of one check, seconds")
    down_after: Positive = Field(
        3, description="failures in a row that take an engine out; a refusal does at once"
    )
    up_after: Positive = Field(1, description="good checks in a row that bring it back")


class Load(Strict):
    """What the engines report of their load."""

    interval: Seconds | None = Field(
        1.0, description="between two reads of an engine's /metrics; null: never"
    )
    from_answers: bool = Field(True, description="ask for the endpoint-load-metrics header on plain answers")


class Limits(Strict):
    """Bounds on what clients may ask for."""

    max_body_bytes: Positive = Field(32 << 20, description="of one request body")
    max_concurrent_requests: Positive = Field(8192, description="in flight at once; more get a 503")
    max_connections_per_engine: Positive = Field(2048, description="open at once; more go to the next engine")
    idle_seconds: Seconds = Field(
        4.0, description="that an unused engine connection is kept; below the engine's own limit"
    )


class Auth(Strict):
    """API keys."""

    keys_file: Path | None = Field(
        None, description="YAML mapping of key, or sha256:HEX of a key, to tenant; null: no keys"
    )


class Log(Strict):
    """Logs, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level shown"
    )
    json_lines: bool = Field(False, alias="json", description="one JSON object a line")
    access: bool = Field(False, description="a line per request")

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)


class ServerConfig(PoolSettings):
    """All settings of `lmetric-router serve`."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65_535, description="port to listen on; 0: any free one")
    model: str | None = Field(None, description="model of engines that name none; default: they are asked")
    engines: list[EngineConfig] = Field(default_factory=list, description="engines outside `models`")
    models: list[ModelConfig] = Field(default_factory=list, description="models with their engines")
    embedded: Annotated[int | str, PlainValidator(_embedded)] | None = Field(
        None,
        description="emulated engines started as child processes: a number, or 2P4D for 2 that prefill and 4 "
        "that decode",
    )
    discovery: list[DiscoverySource] = Field(
        default_factory=list, description="sources of further engines, which come and go"
    )
    paths: list[Annotated[str, Field(pattern="^/")]] = Field(
        default_factory=list, description="further POST paths passed through to the engines"
    )
    admin: bool = Field(False, description="allow /admin: add, drain and remove engines, switch the guard")
    timeouts: Timeouts = Field(default_factory=Timeouts, description="limits by phase")
    retries: Retries = Field(default_factory=Retries, description="when the next engine is tried")
    health: Health = Field(default_factory=Health, description="checks of the engines")
    load: Load = Field(default_factory=Load, description="load reports of the engines")
    limits: Limits = Field(default_factory=Limits, description="bounds on requests")
    auth: Auth = Field(default_factory=Auth, description="API keys")
    log: Log = Field(default_factory=Log, description="logs")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        labels: set[str] = set()
        for engine in [*self.engines, *(engine for model in self.models for engine in model.engines)]:
            if engine.label in labels:
                raise ValueError(f"two engines are named {engine.label!r}; give one another name")
            labels.add(engine.label)
        sources = [CONFIGURED, ADMIN, *(source.label for source in self.discovery)]
        for number, label in enumerate(sources):
            if label in sources[:number]:
                raise ValueError(f"two sources of engines are named {label!r}; give one another name")
        names: set[str] = set()
        for name in [n for model in self.models for n in (model.name, *model.adapters)]:
            if name in names:
                raise ValueError(f"two models are named {name!r}")
            names.add(name)
        return self

    def pool_settings(self, model: ModelConfig | None = None) -> PoolSettings:
        """Settings of a model's pool: its own where given, else the top level's."""
        values = {name: getattr(self, name) for name in PoolSettings.model_fields}
        if model is not None:
            own = model.model_fields_set & PoolSettings.model_fields.keys()
            values |= {name: getattr(model, name) for name in own}
            for policy, knobs in (("policy", "knobs"), ("decode_policy", "decode_knobs")):
                if policy in own and knobs not in own:
                    values[knobs] = {}
        return PoolSettings.model_construct(**values)


def load_config(
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServerConfig:
    """The configuration from a YAML file, the environment and flags.

    ``overrides`` maps dotted keys (``timeouts.connect``) to values given by flags; None means not given. In
    ``environ`` (default: the process's) ``LMETRIC_TIMEOUTS__CONNECT`` sets ``timeouts.connect``; a text that
    starts with ``[`` or ``{`` is read as YAML. Raises ConfigError.
    """
    merged: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    if file is not None:
        _merge(merged, _read_yaml(Path(file)), origin, str(file))
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split("__")
            _merge(merged, _nested(path, _value(name, value)), origin, name)
    for key, value in (overrides or {}).items():
        if value is not None:
            path = key.split(".")
            source = "command line"
            _merge(merged, _nested(path, _value(source, value)), origin, source)
    try:
        return ServerConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, origin, ServerConfig))) from None


def render(config: ServerConfig) -> str:
    """The whole configuration as YAML, defaults included, secrets masked."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Makes ConfigErrors, which name the file and the line, of what can go wrong with a YAML or JSON file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{file}{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: {error.msg}") from None


def read_yaml_mapping(file: Path) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises ConfigError, which names the file and the line."""
    with reading(file):
        content = yaml.load(file.read_text(encoding="utf-8"), UniqueKeys)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected keys and values, found {type(content).__name__}")
    return content


def _read_yaml(file: Path) -> dict[str, Any]:
    content = read_yaml_mapping(file)
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(f"{file}: key {key!r} is not a name")
    return content


def _value(name: str, value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not readable as YAML: {str(error).splitlines()[0]}") from None


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _merge(
    into: dict[str, Any],
    new: Mapping[str, Any],
    origin: dict[tuple[str, ...], str],
    source: str,
    path: tuple[str, ...] = (),
) -> None:
    for key, value in new.items():
        here = (*path, key)
        old = into.get(key)
        # Knobs and policies belong together: they replace, sections merge.
        if isinstance(value, Mapping) and isinstance(old, dict) and key not in ("policy", "decode_policy"):
            _merge(old, value, origin, source, here)
        elif isinstance(value, Mapping):
            into[key] = {}
            origin[here] = source
            _merge(into[key], value, origin, source, here)
        else:
            into[key] = value
            origin[here] = source


def explain(
    error: ValidationError, origin: Mapping[tuple[str, ...], str], root: type[BaseModel]
) -> Iterator[str]:
    """A line for each thing wrong with values meant for `root`: where it came from (`origin`, by key path),
    the key, the value, what would have been right."""
    seen = set()
    for problem in error.errors(include_url=False):
        # Tags of union members are no keys of the file.
        loc = [
            part for part in problem["loc"] if not (isinstance(part, str) and ("[" in part or part == "str"))
        ]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        names = tuple(str(part) for part in loc if isinstance(part, str))
        source = next((origin[names[:n]] for n in range(len(names), 0, -1) if names[:n] in origin), None)
        place = f"{source}: " if source else ""
        value = problem.get("input")
        if problem["type"] == "extra_forbidden":
            known = _known_keys(root, loc[:-1])
            near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(known))}"
            line = f"{place}{path} = {value!r}: unknown key{hint}"
        elif problem["type"] == "missing":
            line = f"{place}{path}: missing"
        elif not loc:
            line = problem["msg"].removeprefix("Value error, ")
        else:
            shown = "'**********'" if str(loc[-1]) == "api_key" else repr(value)
            line = f"{place}{path} = {shown}: {problem['msg'].removeprefix('Value error, ')}"
        if line not in seen:
            seen.add(line)
            yield line


def _known_keys(section: type[BaseModel], loc: list[Any]) -> list[str]:
    for part in loc:
        if isinstance(part, int):
            continue
        inner = _section(section.model_fields[part].annotation)
        if inner is None:
            return []
        section = inner
    return [field.alias or name for name, field in section.model_fields.items()]


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as ``list[EngineConfig] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner))), None)
