"""The sections of the server's configuration and their keys, each with its default and what it means."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    SecretStr,
    Tag,
    model_validator,
)

from lmetric.config.kinds import (
    OFF_IS_A_WORD,
    CorsOrigin,
    Embedded,
    EngineRule,
    EngineUrl,
    IndicatorSource,
    Nameserver,
    Option,
    PodPort,
    Port,
    Positive,
    Role,
    RouterUrl,
    Seconds,
    Strict,
    Token,
    ZmqEndpoint,
    is_loopback,
)
from lmetric.options import (
    SELECTORS,
    Auto,
    Guard,
    Maturity,
    PrefixFetch,
    PriorityOption,
    RebalanceOption,
    Routing,
    SplitOption,
)

# Sources of engines beside those in `discovery`.
CONFIGURED = "configuration"
ADMIN = "admin"

# The two policies of a model, and where their knobs are.
POLICY_KNOBS = {"policy": "knobs", "decode_policy": "decode_knobs"}

# Sections and options that may be given as one value: the key that the value sets.
SHORTHANDS = {"admin": "enabled", **SELECTORS}


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
    Annotated[Literal["auto", "off"], OFF_IS_A_WORD, Tag("[word]")] | Annotated[KvEvents, Tag("[mapping]")],
    Discriminator(lambda value: "[mapping]" if isinstance(value, dict | KvEvents) else "[word]"),
]


class EngineConfig(Strict):
    """One engine replica."""

    url: EngineUrl = Field(description="where it listens, http://host:port")
    name: Annotated[str, Field(pattern="^[!-~]{1,200}$")] | None = Field(
        None,
        description="its name in metrics, headers and receipts; default host:port, and -dpRANK of a rank",
    )
    data_parallel_rank: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="the entry is this data-parallel rank of a vLLM or SGLang engine: requests carry "
        "X-data-parallel-rank, and its KV events and load are those of the rank; give each rank an entry; "
        "default: the entry is the whole engine, which picks the rank of each request",
    )
    cache_blocks: Positive | None = Field(
        None, description="blocks its prefix cache holds; default: the model's cache_blocks"
    )
    kv_events: KvEventsSetting | None = Field(
        None, description="its KV events; default: the model's kv_events"
    )
    api_key: SecretStr | None = Field(
        None, description="sent to it as a bearer token; a client's own Authorization is then not sent"
    )
    role: Role | None = Field(
        None,
        description="both: whole requests; prefill: their prompts, and engines of role decode the rest; "
        "default: what the engine tells, else both",
    )
    group: str | None = Field(
        None,
        min_length=1,
        description="engines with the same group are one group in expressions, such as group_max(tokens); "
        "default: of a data-parallel rank its url, so all ranks of an engine are a group; else none",
    )

    @property
    def group_label(self) -> str | None:
        """The engine's group, which the ranks of an engine share; None: a group of its own."""
        return self.group or (None if self.data_parallel_rank is None else self.url)

    @property
    def label(self) -> str:
        """The engine's name, or host:port and the rank."""
        rank = "" if self.data_parallel_rank is None else f"-dp{self.data_parallel_rank}"
        return self.name or urlsplit(self.url).netloc + rank


class IndicatorConfig(Strict):
    """An indicator that expressions can read beside the built-in ones: one number for each engine."""

    source: IndicatorSource = Field(
        description="where its values come from: a metric on the engines' /metrics page, such as "
        "vllm:num_preemptions_total, summed over its labels; header: the field with the indicator's name in "
        "the header endpoint-load-metrics of engines' answers (header:FIELD: another field); push: "
        "POST /admin/engines/NAME/indicators",
    )
    unit: str = Field("", max_length=64, description="unit, for people")
    default: float | None = Field(
        None, allow_inf_nan=False, description="value of an engine without one; null: none (NaN)"
    )
    max_age_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="older values are ignored; null: values do not age"
    )

    @property
    def metric(self) -> str | None:
        """The metric with its values; None: they come from elsewhere."""
        return None if self.source == "push" or self.source.split(":")[0] == "header" else self.source


class PoolSettings(Strict):
    """How requests for a model are routed; at the top level, the default for every model."""

    experimental: bool = Field(
        False,
        description="accept experimental policies (docs/policies.md) and planners (docs/splits.md)",
    )
    policy: str | dict[str, Any] = Field(
        "lmetric",
        description="a policy's name, a score expression, a mapping with filter, score, prefer, then, or a "
        "Python object: file.py:name, package.module:name, or an entry point's name (docs/extending.md)",
    )
    knobs: dict[str, float] = Field(default_factory=dict, description="the policy's knobs by name")
    decode_policy: str | dict[str, Any] = Field(
        "least_requests",
        description="where requests decode whose prompt another engine computed; as policy",
    )
    decode_knobs: dict[str, float] = Field(
        default_factory=dict, description="the decode policy's knobs by name"
    )
    indicators: dict[str, IndicatorConfig] = Field(
        default_factory=dict,
        description="further indicators by name, for expressions",
    )
    policies: dict[str, str | dict[str, Any]] = Field(
        default_factory=dict,
        description="policies by names of their own, as policy; PUT /admin/policy takes these names",
    )
    policy_fallback: str | dict[str, Any] = Field(
        "lmetric",
        description="what decides if a Python policy fails or exceeds its time limit; as policy",
    )
    policy_time_limit_seconds: float = Field(
        0.001, gt=0, le=60, description="seconds that a Python policy may take for a decision"
    )
    binding: Literal["auto", "early", "late"] = Field(
        "auto",
        description="when the decode engine is chosen: early, with the prefill engine, or late, when the "
        "prompt is computed; auto: late where the engines' protocol allows it (vLLM's does, SGLang's not)",
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
    split: Annotated[SplitOption | Auto | None, Option("split")] = Field(
        "auto",
        description="whether a request may be split and continue on another engine of role both: none; or, "
        "with experimental: libra, at the token that balances both engines; apart, after its prompt, if all "
        "requests together lose less time then; or a mapping: {kind: libra, probes: 8}, or to test engines "
        "{kind: force, fraction: 0.5}; the client sees one answer; auto: apart if the policy is planner, "
        "else none",
    )
    split_recompute: bool = Field(
        False,
        description="also split between engines without KV transfer: the second engine computes again what "
        "its prefix cache does not hold",
    )
    prefix_fetch: Annotated[PrefixFetch | Auto | None, Option("prefix_fetch")] = Field(
        "auto",
        description="whether an engine fetches, before a request begins, the part of the prompt's KV that "
        "another engine holds, if that takes less time than computing it: none, on, or a mapping: "
        "{min_tokens: 512}; the policy lmetric_pull considers it in its scores; auto: on if the policy is "
        "planner, else none",
    )
    prefix_fetch_timeout_seconds: Seconds | None = Field(
        None,
        description="if the holder has not answered a prefix fetch after this time, the engine computes the "
        "tokens; default: the time that computing them is expected to take, at least 0.02",
    )
    rebalance: Annotated[RebalanceOption | None, Option("rebalance")] = Field(
        None,
        description="whether streams move to another engine while they run, before one overloads: none; star "
        "(by predicted load); star_current (by present load); llumnix; or a mapping: {kind: star, threshold: "
        "0.2}",
    )
    migration_by: Literal["recompute", "pull", "legs"] = Field(
        "recompute",
        description="how streams move: recompute (the target computes prompt and answer so far, while the "
        "stream runs on); pull (the target fetches them from the engine that runs the stream, if both have "
        "a connector); legs (requests run in bounded silent segments and move between two of them; answers "
        "that are not streamed move, too, and clients get their tokens segment by segment)",
    )
    migration_leg_tokens: Positive | None = Field(
        None,
        description="tokens of a segment with migration_by legs; null: as many as come within "
        "migration_max_gap_seconds, and at most twice as many as in the segment before",
    )
    migration_max_gap_seconds: Seconds = Field(
        1.0, description="no move makes a client wait longer for its next token, as far as is expected"
    )
    migration_max_concurrent: Positive = Field(4, description="moves in progress at a time, of one model")
    priority: Annotated[PriorityOption | None, Option("priority")] = Field(
        None,
        description="what the engines' queues are ordered by, a number that each request is sent with: none "
        "(a client's own is passed on, unless there are API keys); uniboost, arrival less a boost that is "
        "larger the less of the prompt has to be computed; vtc, fair shares between tenants; or a mapping: "
        "{kind: uniboost, gamma: 0.05}",
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
    tokenizer: Annotated[str, OFF_IS_A_WORD] | None = Field(
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
    guard: Annotated[Guard, Option("guard")] = Field(
        default_factory=Guard,
        description="hot-spot guard (docs/guard.md): on, off, or a mapping: {window_seconds: 30}; auto: as "
        "the policy declares, and on for an expression that reads prefix hits",
    )
    profile: str | None = Field(
        None,
        description="engine profile (shipped name or file) for predicted times; default: what is learned",
    )
    seed: int = Field(0, ge=0, description="seed of the tie-breaks")

    @property
    def offers(self) -> Maturity:
        """The least mature policies and planners that it accepts."""
        return "experimental" if self.experimental else "stable"

    @property
    def _policy_name(self) -> str:
        return self.policy if isinstance(self.policy, str) else str(self.policy.get("name"))

    @property
    def routing(self) -> Routing:
        """The settings that router, simulator and studies share, with the policy's defaults."""
        shared = ("policy", "knobs", "decode_policy", "decode_knobs", *SELECTORS)
        return Routing(
            **{name: getattr(self, name) for name in shared},
            binding="late" if self.binding == "auto" else self.binding,
        ).resolved(self._policy_name, server=True)


class PolicyChange(Strict):
    """What PUT /admin/policy takes: policies that replace those of a model, or of all models."""

    policy: str | dict[str, Any] = Field("lmetric", description="as policy of the configuration")
    knobs: dict[str, float] = Field(default_factory=dict, description="the policy's knobs by name")
    decode_policy: str | dict[str, Any] = Field("least_requests", description="as policy")
    decode_knobs: dict[str, float] = Field(
        default_factory=dict, description="the decode policy's knobs by name"
    )


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
    nameservers: list[Nameserver] = Field(
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
    port: PodPort = Field(
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
    first_byte: Seconds = Field(300.0, description="until a stream's first token; comments do not count")
    answer: Seconds = Field(1800.0, description="until a plain answer, which comes after its last token")
    request: Seconds | None = Field(
        7200.0,
        description="longest duration of a request, from its arrival to the end of its answer; then its "
        "client gets a 504, or an error event if the stream has begun; null: no limit",
    )
    between_chunks: Seconds = Field(120.0, description="between two chunks of an answer")
    slow_client: Seconds = Field(300.0, description="that a client may leave an answer unread")
    keep_alive: Seconds = Field(75.0, description="that a client's idle connection stays open")
    engine_drain: float = Field(
        300.0, ge=0, le=86_400, description="for requests on an engine that its source names no more"
    )
    drain_grace: float = Field(0.0, ge=0, le=86_400, description="after SIGTERM, still taking new requests")
    drain: float = Field(30.0, ge=0, le=86_400, description="after that, for running requests to end")


class Retries(Strict):
    """When another engine is tried: before a token of the segment came, or where the request may move."""

    attempts: Positive = Field(3, description="engines tried per request, the first included")
    failures: list[Literal["refused", "dns", "tls", "unreachable", "reset", "timeout", "status"]] = Field(
        ["refused", "dns", "tls", "unreachable", "reset", "timeout", "status"],
        description="failures after which the next engine is tried: refused, dns, tls and unreachable (no "
        "connection), reset (it broke), timeout, status (one of `statuses`)",
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
    max_body_bytes_total: Positive = Field(
        256 << 20,
        description="of all request bodies that are being received or wait for an engine's answer; more get "
        "a 503",
    )
    max_body_bytes_per_client: Positive = Field(
        128 << 20, description="the same, of one client address; raise it if all clients share a gateway"
    )
    max_connections: Positive = Field(
        16_384,
        description="open connections of all clients; more get a 503. Fewer if the process may not open two "
        "files for each",
    )
    max_connections_per_client: Positive = Field(
        8192, description="open connections of one client address; raise it if all clients share a gateway"
    )
    max_connections_per_engine: Positive = Field(2048, description="open at once; more go to the next engine")
    idle_seconds: Seconds = Field(
        4.0, description="that an unused engine connection is kept; below the engine's own limit"
    )


class Errors(Strict):
    """What clients learn from errors and headers."""

    show_engines: bool = Field(
        True,
        description="name engines in errors, with the reason of each failure, and in the headers "
        "x-lmetric-instance and x-lmetric-prefill; an engine's default name is its host:port; false: hide "
        "all of these from clients; logs and the /debug pages keep them",
    )


class Cors(Strict):
    """Cross-origin requests: which web pages may call the API from a browser."""

    origins: list[CorsOrigin] = Field(
        default_factory=list,
        description='allowed origins, such as https://chat.example.com, or "*" for every origin; empty: '
        "CORS is off, and engines' CORS headers pass unchanged",
    )


class Auth(Strict):
    """API keys."""

    keys_file: Path | None = Field(
        None, description="YAML mapping of key, or sha256:HEX of a key, to tenant; null: no keys"
    )
    salt_secret: Token | None = Field(
        None,
        description="the cache salts of isolated tenants are derived from it; the same for all routers in "
        "front of the same engines; default: random at each start, so caches start empty",
    )
    salt_secret_file: Path | None = Field(None, description="file that holds salt_secret")

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        _only_one(self, "salt_secret", "salt_secret_file")
        return self


class Admin(Strict):
    """Administration and debugging pages; `admin: true` is short for `admin: {enabled: true}`."""

    enabled: bool = Field(False, description="allow /admin: add, drain and remove engines, switch the guard")
    token: Token | None = Field(
        None,
        description="bearer token of /admin and /debug; unless the router listens on loopback and has no API "
        "keys, enabled requires it, and /debug is closed without it",
    )
    token_file: Path | None = Field(None, description="file that holds token")
    protect_metrics: bool = Field(False, description="require the token for /metrics")
    allowed_engines: list[EngineRule] | None = Field(
        None,
        description="IP addresses, CIDR blocks and host name patterns that engines added over /admin may "
        "have; null: any address except link-local and cloud metadata addresses",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _only_one(self, "token", "token_file")
        if self.protect_metrics and not self.has_token:
            raise ValueError("protect_metrics needs a token: set token or token_file")
        return self

    @property
    def has_token(self) -> bool:
        """Whether a token is configured."""
        return self.token is not None or self.token_file is not None


def _only_one(section: Strict, *names: str) -> None:
    if sum(getattr(section, name) is not None for name in names) > 1:
        raise ValueError(f"set one of {' and '.join(names)}, not both")


def _section_of(value: object) -> object:
    """`admin: true` as the section that it stands for."""
    return value if isinstance(value, dict | Admin) else {SHORTHANDS["admin"]: value}


class TenantConfig(Strict):
    """What a tenant's requests are entitled to, where requests are ordered."""

    weight: float = Field(1.0, ge=1e-3, le=1e6, description="its share beside others, under priority vtc")
    handicap_seconds: float = Field(
        0.0,
        ge=-1e6,
        le=1e6,
        description="its requests count as so much later under priority uniboost, for bulk work; below 0: "
        "earlier",
    )
    isolate: bool = Field(
        False,
        description="keep its prompts apart from those of all other tenants in the KV index and, by "
        "cache_salt, in the engines' prefix caches",
    )


class ReplicasConfig(Strict):
    """Other routers before the same engines, which are told what this one has where, and tell it."""

    urls: list[RouterUrl] = Field(
        default_factory=list,
        description="of all of them, e.g. http://routers:8080: each address that the host's name has is one, "
        "and this router may be among them; empty: it works alone",
    )
    interval: Annotated[Seconds, Field(ge=0.01)] = Field(0.1, description="between two times of telling")
    silent_after: Seconds = Field(
        2.0, description="without a word from a router, until its requests count no longer"
    )
    token: Token | None = Field(
        None,
        description="bearer token that the routers send each other; required unless host and the hosts of "
        "urls are loopback addresses and there are no API keys",
    )
    token_file: Path | None = Field(None, description="file that holds token")

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        _only_one(self, "token", "token_file")
        return self


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
    embedded: Embedded | None = Field(
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
    admin: Annotated[Admin, BeforeValidator(_section_of)] = Field(
        default_factory=Admin, description="administration and debugging pages"
    )
    timeouts: Timeouts = Field(default_factory=Timeouts, description="limits by phase")
    retries: Retries = Field(default_factory=Retries, description="when the next engine is tried")
    health: Health = Field(default_factory=Health, description="checks of the engines")
    load: Load = Field(default_factory=Load, description="load reports of the engines")
    limits: Limits = Field(default_factory=Limits, description="bounds on requests")
    errors: Errors = Field(default_factory=Errors, description="what clients learn from errors and headers")
    cors: Cors = Field(default_factory=Cors, description="web pages that may call the API from a browser")
    auth: Auth = Field(default_factory=Auth, description="API keys")
    tenants: dict[str, TenantConfig] = Field(
        default_factory=dict,
        description="by name: an API key's tenant or, where there are no keys, that of the header x-tenant",
    )
    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig, description="routers side by side")
    log: Log = Field(default_factory=Log, description="logs")

    _deprecated: tuple[str, ...] = PrivateAttr(())

    @property
    def deprecated(self) -> tuple[str, ...]:
        """Warnings about keys that were given under their old names, each with the present spelling."""
        return self._deprecated

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
        self._check_credentials()
        self._check_indicators()
        names: set[str] = set()
        for name in [n for model in self.models for n in (model.name, *model.adapters)]:
            if name in names:
                raise ValueError(f"two models are named {name!r}")
            names.add(name)
        return self

    def _check_credentials(self) -> None:
        auth, admin, replicas = self.auth, self.admin, self.replicas
        loopback, keys = is_loopback(self.host), auth.keys_file is not None
        if admin.enabled and not admin.has_token and (keys or not loopback):
            where = "there are API keys" if keys else f"the router listens on {self.host!r}, not on loopback"
            raise ValueError(f"admin.enabled needs admin.token or admin.token_file because {where}")
        if not replicas.urls:
            return
        if replicas.token is None and replicas.token_file is None:
            if keys:
                raise ValueError("replicas.token is needed where there are API keys: clients are no routers")
            hosts = [self.host, *(urlsplit(url).hostname or "" for url in replicas.urls)]
            open_to = next((host for host in hosts if not is_loopback(host)), None)
            if open_to is not None:
                raise ValueError(
                    f"replicas.token is needed because {open_to!r} is not a loopback address: without it, "
                    "anyone who can reach the router can change its view of the engines' load"
                )
        isolated = [name for name, tenant in self.tenants.items() if tenant.isolate]
        if isolated and auth.salt_secret is None and auth.salt_secret_file is None:
            raise ValueError(
                f"auth.salt_secret is needed for tenants.{isolated[0]}.isolate: all routers in replicas.urls "
                "must derive the same cache salts"
            )

    def _check_indicators(self) -> None:
        """Refuses indicators whose source is switched off."""
        declared = [(name, each) for pool in (self, *self.models) for name, each in pool.indicators.items()]
        for name, each in declared:
            if each.source == "push":
                needed = None if self.admin.enabled else "admin.enabled: true"
            elif each.metric is None:
                needed = None if self.load.from_answers else "load.from_answers: true"
            else:
                needed = None if self.load.interval is not None else "load.interval, which is null"
            if needed is not None:
                raise ValueError(f"indicators.{name}: source {each.source} needs {needed}")

    @property
    def debug_is_open(self) -> bool:
        """Whether /debug, and /admin if it is enabled, need no credential."""
        return not self.admin.has_token and self.auth.keys_file is None and is_loopback(self.host)

    @property
    def splits(self) -> bool:
        """Whether requests of some model may be split between engines of role both."""
        return any(pool.routing.split is not None for pool in self._pools)

    @property
    def pulls(self) -> bool:
        """Whether engines of some model fetch prefixes from each other."""
        return any(pool.routing.prefix_fetch is not None for pool in self._pools)

    @property
    def orders(self) -> bool:
        """Whether requests of some model are given priorities."""
        return any(pool.priority is not None for pool in self._pools)

    @property
    def _pools(self) -> list[PoolSettings]:
        return [self, *(self.pool_settings(model) for model in self.models)]

    def pool_settings(self, model: ModelConfig | None = None) -> PoolSettings:
        """Settings of a model's pool: its own where given, else the top level's."""
        values = {name: getattr(self, name) for name in PoolSettings.model_fields}
        if model is not None:
            own = model.model_fields_set & PoolSettings.model_fields.keys()
            values |= {name: getattr(model, name) for name in own}
            for policy, knobs in POLICY_KNOBS.items():
                if policy in own and knobs not in own:
                    values[knobs] = {}
        return PoolSettings.model_construct(**values)
