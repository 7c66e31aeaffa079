"""The sections and keys of the server's configuration, with their defaults and meaning."""

import os
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

from lmetric.config.budgets import BudgetConfig, distinct
from lmetric.config.epp import EppConfig
from lmetric.config.identity import JwtIssuer
from lmetric.config.kinds import (
    MOST_WORKERS,
    OFF_IS_A_WORD,
    AliasTargets,
    CollectorUrl,
    CorsOrigin,
    Embedded,
    EngineRule,
    EngineUrl,
    FallbackModels,
    FileMode,
    Host,
    IndicatorSource,
    Level,
    ModelName,
    Option,
    PodPort,
    Port,
    Positive,
    RedisUrl,
    Role,
    RouterUrl,
    Seconds,
    Strict,
    Token,
    Workers,
    ZmqEndpoint,
    embedded_engines,
    is_loopback,
    setting,
    unix_path,
)
from lmetric.config.network import EngineTls, Forwarded, ListenerTls
from lmetric.config.records import RecordsConfig
from lmetric.config.trials import CanaryConfig, ShadowConfig
from lmetric.defaults import DEFAULT_POLICY
from lmetric.options import (
    SELECTORS,
    Auto,
    Guard,
    Maturity,
    PrefixFetch,
    PriorityOption,
    ProgramAdmission,
    ProgramAuto,
    ProgramOption,
    RebalanceOption,
    Routing,
    SplitOption,
    WarmChanges,
)

# Engine sources in addition to those in `discovery`.
CONFIGURED = "configuration"
ADMIN = "admin"

# The two policies of a model, and the keys of their parameters.
POLICY_KNOBS = {"policy": "knobs", "decode_policy": "decode_knobs"}

# Sections and options that can be written as one value: the key that the value sets.
SHORTHANDS = {"admin": "enabled", **SELECTORS}


class KvEvents(Strict):
    """The source of KV events, for engines that report none or a wrong one."""

    endpoint: ZmqEndpoint | None = setting(
        None, when="an engine reports no address for its events, or a wrong one"
    )
    """ZMQ endpoint of the events; * is the engine's host; default: as the engine reports"""
    replay_endpoint: ZmqEndpoint | None = setting(
        None, when="an engine reports no address for replays, or a wrong one"
    )
    """ZMQ endpoint for replays of past events; default: as the engine reports"""
    topic: str | None = setting(None, when="an engine reports a wrong topic")
    """topic of the engine's events; default: as the engine reports"""
    bind: bool = setting(False, when="engines cannot accept connections from the router")
    """the router listens at endpoint and the engines connect to it, each with its own topic"""
    without_tokenizer: bool = setting(False, when="all clients send token IDs")
    """use KV events without a tokenizer, for clients that send token IDs; text prompts then count
    as not cached"""

    @model_validator(mode="after")
    def _bound_somewhere(self) -> Self:
        if self.bind and self.endpoint is None:
            raise ValueError("bind needs an endpoint to listen on, such as tcp://*:5557")
        return self


def _kv_events_form(value: object) -> str | None:
    if isinstance(value, dict | KvEvents):
        return "[mapping]"
    return "[word]" if value in ("auto", "off") or value is False else None


# The tags have brackets, so that error messages do not show them as keys.
KvEventsSetting = Annotated[
    Annotated[Literal["auto", "off"], OFF_IS_A_WORD, Tag("[word]")] | Annotated[KvEvents, Tag("[mapping]")],
    Discriminator(
        _kv_events_form,
        custom_error_type="kv_events",
        custom_error_message=f"expected auto, off, or a mapping of {', '.join(KvEvents.model_fields)}",
    ),
]


class EngineConfig(Strict):
    """One engine replica."""

    url: EngineUrl = setting(when="you add an engine")
    """URL of the engine, http://host:port, https://host:port or unix:///path/to/socket"""
    name: Annotated[str, Field(pattern="^[!-~]{1,200}$")] | None = setting(
        None, when="host:port is no good name in dashboards"
    )
    """name in metrics, headers and decision records; default: host:port, for a rank with -dpRANK"""
    data_parallel_rank: int | None = setting(
        None, ge=0, le=65_535, when="you want the router to pick the rank"
    )
    """data-parallel rank of a vLLM or SGLang engine: requests carry X-data-parallel-rank, and the
    router reads KV events and load of this rank only. Write one entry per rank. Default: the entry
    is the whole engine, and the engine picks the rank of each request"""
    cache_blocks: Positive | None = setting(None, when="this engine has another cache size than the others")
    """size of the prefix cache, blocks; default: cache_blocks of the model"""
    kv_events: KvEventsSetting | None = setting(None, when="this engine reports other events than the others")
    """source of KV events; default: kv_events of the model"""
    api_key: Token | None = setting(None, when="the engine requires a key")
    """bearer token for the engine; it replaces the client's credentials"""
    tls: EngineTls | None = setting(None, when="this engine has another certificate than the others")
    """TLS of an https URL, as a whole; default: engine_tls of the model"""
    role: Role | None = setting(None, when="the engine does not report its role")
    """both: whole requests; prefill: prompts only; decode: answers after a prefill engine; encode:
    images, sound and video for the others; default: as the engine reports, else both"""
    revision: str | None = setting(None, min_length=1, when="you update weights, and engines transfer KV")
    """revision of the model's weights. No KV cache passes between engines with different revisions.
    Default: as announced by a trainer, or as the engine reports (SGLang: its weight version; vLLM:
    only in development mode)"""
    group: str | None = setting(None, min_length=1, when="an expression compares groups of engines")
    """group name for expressions such as group_max(tokens). Default: for a data-parallel rank its
    url, so that the ranks of an engine form a group; else none"""

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, value: object) -> object:
        """Reads a plain URL, which stands for an entry with this URL."""
        return {"url": value} if isinstance(value, str) else value

    @property
    def group_label(self) -> str | None:
        """The engine's group, shared by the ranks of an engine; None: the engine alone."""
        return self.group or (None if self.data_parallel_rank is None else self.url)

    @property
    def label(self) -> str:
        """The engine's name, or host:port (the path of a unix socket) and the rank."""
        rank = "" if self.data_parallel_rank is None else f"-dp{self.data_parallel_rank}"
        return self.name or (unix_path(self.url) or urlsplit(self.url).netloc) + rank


class IndicatorConfig(Strict):
    """An additional indicator for expressions: one number per engine."""

    source: IndicatorSource = setting(when="you add an indicator")
    """source of the values. A metric name: a metric of the engines' /metrics, such as
    vllm:num_preemptions_total, summed over its labels. header: the field with the indicator's name
    in the endpoint-load-metrics header of answers. header:FIELD: another field of that header.
    push: POST /admin/engines/NAME/indicators"""
    default: float | None = setting(
        None, allow_inf_nan=False, when="an expression must have a value for every engine"
    )
    """value for engines that report none; null: NaN"""
    max_age_seconds: float | None = setting(
        None, gt=0, allow_inf_nan=False, when="old values mislead the policy"
    )
    """ignore values older than this; null: values do not expire"""

    @property
    def metric(self) -> str | None:
        """The name of the engine metric; None if the source is a header or push."""
        return None if self.source == "push" or self.source.split(":")[0] == "header" else self.source


class SloClass(Strict):
    """A class of requests with its own deadline."""

    ttft_seconds: Seconds | None = setting(None, when="a class has its own deadline")
    """deadline of the first token, seconds; null: `ttft_seconds` of `admission`"""
    hedge_after_seconds: Seconds | None = setting(None, when="only some requests are worth a second attempt")
    """as `hedging.after_seconds`, for streams of the class; null: as that setting"""
    level: Level | None = setting(None, when="some work must not delay other work")
    """priority level of the class in the queue, -10 to 10; the highest goes first. If the tenant
    has a level, too, the lower one holds; null: the tenant's level, else 0"""


class LoadAdmission(Strict):
    """When an engine has room for a further request, and how many requests wait in the router."""

    ttft_seconds: Seconds | None = setting(None, when="late answers are worth nothing to your clients")
    """deadline of the first token, from the arrival, seconds. A request that would miss it gets a
    429 at once; null: requests wait without a deadline"""
    room_seconds: float | None = setting(
        None, ge=0, le=86_400, when="engines idle between requests, or their queues are long", tuning=True
    )
    """an engine has room while a further request would wait at most this long for its prefill,
    seconds; null: a twentieth of `ttft_seconds`, or 0.1"""
    tpot_seconds: Seconds | None = setting(None, when="streams become too slow under load")
    """longest predicted time between two output tokens with which an engine still has room,
    seconds; needs a profile or a learned step time; null: no limit"""
    max_waiting: Positive = setting(4096, when="the queue should be longer or shorter")
    """maximum number of waiting requests of a model"""
    max_waiting_per_tenant: Positive = setting(1024, when="one tenant fills the queue")
    """maximum number of waiting requests of a tenant, per model"""


class AdmissionConfig(LoadAdmission):
    """Admission by load: requests wait in the router while no engine has room for them."""

    classes: dict[Annotated[str, Field(pattern="^[!-~]{1,64}$")], SloClass] = setting(
        default_factory=dict, when="requests have different deadlines"
    )
    """classes of requests by name. A request names its class in the header x-slo-class; default:
    `slo_class` of its tenant"""
    aging_seconds: Seconds = setting(30.0, when="low levels wait too long, or rise too soon")
    """a level rises by one each time its oldest request has waited this long, up to the highest
    level that waits, seconds; used if a class or tenant has a `level`"""


class HedgingConfig(Strict):
    """Hedged requests: a second engine gets a stream whose first token is late."""

    after_seconds: Seconds | None = setting(None, when="single slow engines delay first tokens")
    """time without a token after which a second engine gets the request, seconds. The first engine
    with a token answers, and the other request is canceled. Set it above your usual time to first
    token; null: no hedges"""
    # Hedges per request of a model, on average. More would load engines that are slow because
    # they are busy.
    budget_ratio: ClassVar[float] = 0.05


class PoolSettings(Strict):
    """Routing of requests for a model. The top level has the defaults for all models."""

    experimental: bool = setting(False, when="you try an experimental policy")
    """accept experimental policies (docs/reference/policies.md) and planners
    (docs/reference/engines.md)"""
    policy: str | dict[str, Any] = setting(
        DEFAULT_POLICY, when="`whatif` or a canary shows that another policy is better for your traffic"
    )
    """policy name, score expression, mapping with filter, score, prefer and then, or Python object.
    A Python object is file.py:name, package.module:name, or the name of an entry point
    (docs/tutorials/your_own_policy.md)"""
    knobs: dict[str, float] = setting(default_factory=dict, when="`whatif` shows a better parameter")
    """parameters of the policy, by name"""
    decode_policy: str | dict[str, Any] = setting(
        "least_requests", when="prefill and decode run on different engines"
    )
    """policy that picks the decode engine under prefill/decode disaggregation; as `policy`"""
    decode_knobs: dict[str, float] = setting(default_factory=dict, when="the decode policy has parameters")
    """parameters of the decode policy, by name"""
    indicators: dict[str, IndicatorConfig] = setting(
        default_factory=dict, when="an expression needs a value that the router lacks"
    )
    """additional indicators for expressions, by name"""
    policies: dict[str, str | dict[str, Any]] = setting(
        default_factory=dict, when="you switch policies over HTTP"
    )
    """named policies, each as `policy`; PUT /admin/policy accepts these names"""
    # The policy that decides if a Python policy fails or exceeds its time limit. It is built in,
    # so it cannot fail for the same reason.
    policy_fallback: ClassVar[str] = DEFAULT_POLICY
    policy_time_limit_seconds: float = setting(
        0.001, gt=0, le=60, when="a Python policy needs longer for good reasons", tuning=True
    )
    """time limit of a Python policy per decision, seconds"""
    shadow: ShadowConfig | None = setting(None, when="you compare a policy without risk")
    """second policy that scores requests and places none; null: none"""
    canary: CanaryConfig | None = setting(None, when="you try a policy on real traffic")
    """second policy that places a share of the requests; null: none"""
    # When the decode engine is chosen. early: with the prefill engine; late: after prefill; auto:
    # late if the KV transfer protocol allows it (vLLM: yes, SGLang: no).
    binding: ClassVar[Literal["auto", "early", "late"]] = "auto"
    # Whether requests run on engines of one role if all engines of the other role are missing:
    # slow answers are better than none.
    colocate: ClassVar[bool] = True
    handover: Literal["auto", "nixl", "bootstrap"] = setting(
        "auto", when="engines do not report their KV transfer protocol"
    )
    """KV transfer protocol between prefill and decode engines; auto: as the engines report; engines
    without a protocol get no requests"""
    # Time from the end of prefill to the KV transfer, after which the prompt is recomputed. None:
    # two thirds of the engine's lease, or 20 s if the engine reports none.
    handover_seconds: ClassVar[float | None] = None
    split: Annotated[SplitOption | Auto | None, Option("split")] = setting(
        "auto", when="long prompts overload single engines"
    )
    """how requests are split between two engines of role both: `none`; `libra` (experimental): at
    the token that balances both engines; `apart` (experimental): after the prompt, if that reduces
    the total delay. The client gets one answer. `auto`: apart if the policy is planner, else none
    """
    split_recompute: bool = setting(False, when="you test splits on engines without KV transfer", tuning=True)
    """also split between engines without KV transfer: the second engine recomputes the tokens that
    its prefix cache does not hold"""
    prefix_fetch: Annotated[PrefixFetch | Auto | None, Option("prefix_fetch")] = setting(
        "auto", when="engines can transfer KV and share long prefixes"
    )
    """fetch the cached prefix of a prompt from another engine if that is faster than computing it:
    `none` or `on`. The policy `lmetric_pull` includes fetches in its scores. `auto`: on if the
    policy is planner, else none"""
    # Time limit of a prefix fetch, after which the engine computes the tokens. None: the expected
    # time to compute them, at least 0.02 s.
    prefix_fetch_timeout_seconds: ClassVar[float | None] = None
    rebalance: Annotated[RebalanceOption | None, Option("rebalance")] = setting(
        None, when="long streams overload single engines"
    )
    """migration of running streams away from engines that would overload: `none`, or `star` (by
    predicted load). Or a mapping: `{kind: star, forecast: predictor.npz}`. Engines need KV transfer
    (NIXL): without it, no stream moves"""
    migration_by: Literal["fetch", "recompute"] = setting("fetch", when="engines cannot transfer KV")
    """how streams migrate. `fetch`: the target fetches the KV of prompt and answer so far, while
    the stream continues. `recompute`: the target computes them; not with `rebalance`. Streams leave
    a draining engine without a KV connector by `recompute` in any case"""
    migration_max_gap_seconds: Seconds = setting(
        1.0, when="clients accept longer pauses, or notice shorter ones", tuning=True
    )
    """maximum expected pause of a stream during migration, seconds"""
    # Concurrent migrations per model. Each one loads the links of two engines; few at a time are
    # enough, because each round of `rebalance` moves one stream.
    migration_max_concurrent: ClassVar[int] = 4
    stream_failover: bool = setting(True, when="clients handle broken streams themselves")
    """if an engine fails in the middle of a stream, continue the stream on another engine;
    `retries` limits the engines per request. The router requests and records the token ids of each
    stream that can continue (docs/reference/engines.md lists them). With `rebalance`, streams that
    can migrate continue in any case"""
    admission: AdmissionConfig | None = setting(None, when="traffic exceeds what the engines can serve")
    """admission by load (docs/how-to/overload.md). Under overload, requests wait in the router in
    fair order of tenants, or get a 429; null: every request goes to an engine at once"""
    hedging: HedgingConfig = setting(
        default_factory=HedgingConfig, when="single slow engines delay first tokens"
    )
    """a second attempt on another engine for streams whose first token is late"""
    priority: Annotated[PriorityOption | None, Option("priority")] = setting(
        None, when="short requests wait behind long ones, or tenants compete"
    )
    """priority number that requests carry to the engines' queues. `none`: the client's own number
    (ignored with API keys). `uniboost`: arrival time minus a boost, which is larger for prompts
    with less to compute. `vtc`: fair shares between tenants"""
    programs: Annotated[ProgramOption | None, Option("programs")] = setting(
        default_factory=ProgramAuto, when="you serve agents, or none at all"
    )
    """agent programs: chains of requests that share a growing context. `observe`: follow them and
    measure whether their contexts fit into the KV caches. `admit`: hold requests of programs that
    do not fit. `auto`: as `admit`, while recomputed contexts are most of the prefill work. `none`:
    do not follow them. Or a mapping: `{kind: admit, theta: 0.9}`"""
    fleet_changes: Annotated[WarmChanges | None, Option("fleet_changes")] = setting(
        None, when="engines join or leave often"
    )
    """how engines join and leave. `none`: with cold caches. `warm`: an engine that joins first
    fetches the prefixes that it will need, then gets requests; before an engine leaves, other
    engines fetch its prefixes, and its streams migrate. The engines need a KV connector"""
    engine_tls: EngineTls | None = setting(None, when="engines have https URLs and a private CA")
    """TLS of the model's engines with an https URL and without tls; default: check their
    certificates by the system's CAs"""
    block_size: Positive | None = setting(None, le=1 << 20, when="engines do not report their block size")
    """tokens per block for tokenized prompts; default: as the engines report, 16 before the first
    report"""
    # Bytes per block of text prompts, about 64 tokens. Smaller blocks take more memory.
    text_block_bytes: ClassVar[int] = 256
    cache_blocks: Positive | None = setting(None, when="engines do not report their cache size")
    """size of an engine's prefix cache, blocks; default: as the engine reports"""
    kv_events: KvEventsSetting = setting("auto", when="engines do not report where their events are")
    """KV events of the engines; auto: at the endpoints that engines report; off: estimate caches
    from the requests sent; or a mapping"""
    tokenizer: Annotated[str, OFF_IS_A_WORD] | None = setting(
        None, min_length=1, when="the router cannot find the tokenizer by itself"
    )
    """folder with the model's tokenizer.json and chat template, or Hub repository OWNER/NAME, to
    match prompts by tokens. off: match by text. null: the folder or repository that the engine
    reports as its model, if it exists on this machine or in its Hugging Face cache"""
    tokenizer_revision: str | None = setting(
        None, min_length=1, when="engines use another revision than main"
    )
    """branch, tag or commit of the tokenizer's Hub repository; default: main; as
    --tokenizer-revision of the engines"""
    tokenizer_download: Annotated[Literal["off", "configured", "any"], OFF_IS_A_WORD] = setting(
        "configured", when="the machine has no access to the Hub, or must have none"
    )
    """downloads from the Hugging Face Hub of tokenizers that are not in the local cache. off: none.
    configured: only the repository in `tokenizer`. any: also repositories that engines report.
    HF_HUB_OFFLINE=1 forbids all"""
    chat_template: str | None = setting(
        None, min_length=1, when="engines have another template than their model"
    )
    """chat template file, instead of the template in the folder; as --chat-template of the engines
    """
    # Memory for the tokens of recent prompts, bytes: 64 million tokens.
    token_cache_bytes: ClassVar[int] = 256 << 20
    index_bytes: int = setting(512 << 20, ge=1 << 20, when="the index evicts blocks that engines still have")
    """maximum memory of the KV index, bytes"""
    tiers: Annotated[Literal["auto", "all", "off"], OFF_IS_A_WORD] = setting(
        "auto", when="engines offload KV to other tiers"
    )
    """tiers below the GPU whose cached blocks count in scores, by the engines' KV events. auto: the
    CPU tier, and other tiers once an engine has reported a removal there; all: also tiers without
    removals, whose blocks may be gone; off: only the GPU"""
    # Seconds to load a token from a tier below the GPU, divided by the seconds to prefill it,
    # until the router has learned the ratio from an engine's loads.
    tier_load_ratio: ClassVar[float] = 0.02
    # Memory for decision records, bytes: enough to look up recent requests.
    record_bytes: ClassVar[int] = 16 << 20
    guard: Annotated[Guard | None, Option("guard")] = setting(None, when="single prefixes overload an engine")
    """hot-spot guard (docs/explanation/default_policy.md): on or off. auto: off, unless the policy
    turns it on"""
    profile: str | None = setting(None, when="predictions must be right from the start")
    """engine profile for time predictions: a shipped name or a file; default: learned from traffic
    """
    # Seed for breaking ties. Equal seeds let a replay repeat the decisions.
    seed: ClassVar[int] = 0

    @property
    def offers(self) -> Maturity:
        """The lowest maturity of policies and planners that it accepts."""
        return "experimental" if self.experimental else "stable"

    @property
    def _policy_name(self) -> str:
        return self.policy if isinstance(self.policy, str) else str(self.policy.get("name"))

    @property
    def routing(self) -> Routing:
        """The settings shared by router, simulator and studies, with the policy's defaults."""
        shared = ("policy", "knobs", "decode_policy", "decode_knobs", *SELECTORS)
        return Routing(
            **{name: getattr(self, name) for name in shared},
            binding="late" if self.binding == "auto" else self.binding,
        ).resolved(self._policy_name, server=True)


class PolicyChange(Strict):
    """The body of PUT /admin/policy: new policies for one model or for all models."""

    policy: str | dict[str, Any] = setting(DEFAULT_POLICY)
    """as `policy` in the configuration"""
    knobs: dict[str, float] = setting(default_factory=dict)
    """parameters of the policy, by name"""
    decode_policy: str | dict[str, Any] = setting("least_requests")
    """as `policy`"""
    decode_knobs: dict[str, float] = setting(default_factory=dict)
    """parameters of the decode policy, by name"""


class ModelConfig(PoolSettings):
    """A model and the engines that serve it."""

    name: str = setting(min_length=1, when="you serve several models")
    """model name in requests"""
    engines: list[EngineConfig] = setting(default_factory=list, when="you serve several models")
    """engines of the model"""
    adapters: list[str] = setting(default_factory=list, when="engines do not list their adapters")
    """names of LoRA adapters that are known before an engine lists them. Requests go to engines
    that list the name, so adapters need no entry"""

    def __eq__(self, other: object) -> bool:
        """Whether values are equal, and both inherit the same settings from the top level."""
        return (
            isinstance(other, ModelConfig)
            and self.__dict__ == other.__dict__
            and self.inherited == other.inherited
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def inherited(self) -> set[str]:
        """The settings of the top level that the model has no own value for."""
        return PoolSettings.model_fields.keys() - self.model_fields_set


class DnsSource(Strict):
    """Engines behind a DNS name: one per address or SRV record."""

    name: str = setting(min_length=1, when="engines are behind a DNS name")
    """DNS name, e.g. of a headless service"""
    type: Literal["A", "AAAA", "SRV"] = setting("A", when="the name has IPv6 addresses or SRV records")
    """record type; priority and weight of SRV records are ignored"""
    port: Port | None = setting(None, when="the records include no port")
    """port of every engine; SRV records include their port"""
    # Time between look-ups, seconds; shorter if the TTL of the answer is shorter.
    interval: ClassVar[float] = 10.0
    # Time for which the last answer stays valid while look-ups fail, seconds: a restart of the name
    # servers must not remove the engines.
    grace: ClassVar[float] = 300.0
    # Name servers, IP or IP:PORT; none: as the system is configured.
    nameservers: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "SRV") != (self.port is None):
            raise ValueError("records of type A and AAAA need a port; only SRV records include one")
        return self


class KubernetesSource(Strict):
    """Engines in the pods that a label selector or an InferencePool matches."""

    selector: str | None = setting(None, min_length=1, when="the engines are pods with a label")
    """label selector, e.g. app=vllm"""
    port: PodPort | None = setting(None, when="the engines are pods with a label")
    """port of the engines: a number, or the name of a container port"""
    inference_pool: str | None = setting(None, min_length=1, when="your cluster has an InferencePool")
    """name of an InferencePool (inference.networking.k8s.io/v1), in place of selector and port; its
    InferenceObjectives set priorities in `epp`"""
    namespace: str | None = setting(None, min_length=1, when="engines run in another namespace")
    """namespace of the pods; default: the router's own, or the namespace of the kubeconfig context
    """
    model_key: str | None = setting(None, when="engines do not report the model that clients request")
    """annotation or label with the model of a pod; default: as the engine reports"""
    role_key: str | None = setting(None, when="engines do not report their role")
    """annotation or label with the role of a pod: both, prefill, decode or encode"""
    kubeconfig: Path | None = setting(None, when="the router runs outside the cluster")
    """kubeconfig file with credentials; default: the pod's service account, else kubectl's
    configuration"""

    @model_validator(mode="after")
    def _pods(self) -> Self:
        own = (self.selector is not None, self.port is not None)
        if any(own) if self.inference_pool is not None else not all(own):
            raise ValueError("set either inference_pool, or both selector and port")
        return self


class DiscoverySource(Strict):
    """A service discovery source: one of `file`, `dns` and `kubernetes`."""

    file: Path | None = setting(None, when="another program writes the list of engines")
    """YAML or JSON list of engines, each as in `engines` and with `model`; the router watches the
    file"""
    dns: DnsSource | None = setting(None, when="engines are behind a DNS name")
    """engines behind a DNS name"""
    kubernetes: KubernetesSource | None = setting(None, when="engines run in Kubernetes")
    """engines in pods"""
    model: str | None = setting(None, min_length=1, when="the engines report no model")
    """model of engines that report none; default: the top level's"""
    api_key: Token | None = setting(None, when="the engines require a key")
    """bearer token for engines without an api_key"""
    scheme: Literal["http", "https"] = setting("http", when="engines have TLS")
    """scheme of the engines' URLs with dns and kubernetes; https: as engine_tls says"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(kind is not None for kind in (self.file, self.dns, self.kubernetes)) != 1:
            raise ValueError("set exactly one of file, dns and kubernetes")
        if self.file is not None and self.scheme != "http":
            raise ValueError("the URLs in the file have a scheme; remove scheme")
        return self

    @property
    def label(self) -> str:
        """The source's name in logs, metrics and /debug/engines."""
        if self.dns is not None:
            return f"dns:{self.dns.name}"
        if self.kubernetes is not None:
            pods = self.kubernetes.inference_pool or self.kubernetes.selector
            return f"kubernetes:{self.kubernetes.namespace or ''}/{pods}"
        return f"file:{self.file}"


class Timeouts(Strict):
    """Time limits of the phases of a request, seconds."""

    connect: Seconds = setting(3.0, when="the network is slow")
    """time for an engine to accept a connection"""
    # Time for a client to send its request body, seconds: a slower client would hold its memory.
    body: ClassVar[float] = 60.0
    first_byte: Seconds = setting(300.0, when="prompts take longer, or clients give up earlier")
    """time to the first token of a stream; comments and events that only open it do not count"""
    answer: Seconds = setting(1800.0, when="answers without a stream take longer")
    """time to an answer that is not streamed, which arrives after its last token"""
    request: Seconds | None = setting(7200.0, when="requests take longer, or must end earlier")
    """maximum duration of a request, from arrival to the end of the answer. After it, the client
    gets a 504, or an error event if the stream has begun; null: no limit"""
    between_chunks: Seconds = setting(120.0, when="engines pause for longer without a fault")
    """maximum time between two tokens of a stream, or between two pieces of another answer; SSE
    comments and empty events do not count"""
    # Time after which a client that reads nothing loses its connection, seconds: its answer fills
    # memory meanwhile.
    slow_client: ClassVar[float] = 300.0
    keep_alive: Seconds = setting(75.0, when="a load balancer in front keeps connections for longer")
    """close idle client connections after this long"""
    engine_drain: float = setting(
        300.0, ge=0, le=86_400, when="streams last longer than a scale-down may take"
    )
    """time for running requests on an engine that its discovery source no longer lists"""
    drain_grace: float = setting(
        0.0, ge=0, le=86_400, when="load balancers take time to stop sending requests"
    )
    """after SIGTERM, keep accepting new requests for this long"""
    drain: float = setting(30.0, ge=0, le=86_400, when="streams last longer than a restart may take")
    """after drain_grace, time for running requests to finish"""


class Retries(Strict):
    """Retries on another engine: before a segment's first token, or to continue a stream."""

    attempts: Positive = setting(3, when="requests should fail earlier, or try more engines")
    """maximum number of engines tried per request, including the first. If an engine accepted the
    request and then failed, at most one more engine gets it, as the request may be the cause"""
    # Failures that cause a retry: no client can cause the first four; another engine may serve the
    # request after a broken connection, a timeout, or one of `statuses`.
    failures: ClassVar[frozenset[str]] = frozenset(
        {"refused", "dns", "tls", "unreachable", "reset", "timeout", "status"}
    )
    # HTTP statuses of engines that count as failure `status`. 429 and 503 mean that the engine is
    # full, the others that it failed.
    statuses: ClassVar[frozenset[int]] = frozenset({429, 500, 502, 503, 504})
    # Retries per request of a model, over 10 s, beside `min_per_second`: enough for the loss of
    # one of five engines. More would multiply the load of engines that fail because they are
    # busy. Requests of a lost engine are retried in any case.
    budget_ratio: ClassVar[float] = 0.2
    # Retries per second of a model beside `budget_ratio`, so that models with few requests have
    # retries, too.
    min_per_second: ClassVar[float] = 10.0


class Ejection(Strict):
    """Outlier ejection: engines whose requests fail, while the same requests succeed on others."""

    enabled: bool = setting(True, when="something else takes bad engines out of service")
    """eject outliers; false: only health checks decide"""
    base_seconds: Seconds = setting(30.0, when="engines need longer to recover")
    """duration of an engine's first ejection, seconds. The n-th lasts n times as long; n falls by
    one for each such time in service"""
    # Duration of the longest ejection, seconds: a probe must succeed before an engine returns, so
    # a longer one only delays the return.
    max_seconds: ClassVar[float] = 300.0
    consecutive_failures: Positive = setting(5, when="good engines are ejected, or bad ones stay")
    """consecutive failed requests that eject an engine. A request that fails on two engines does
    not count. Without a second engine's answer as proof, one failure per client (tenant or address)
    counts in 10 s"""
    # Time over which success rates are compared, seconds.
    window_seconds: ClassVar[float] = 60.0
    # Requests that an engine, and all others together, need for that comparison: fewer show no
    # difference reliably.
    min_requests: ClassVar[int] = 20
    # Share of a model's engines ejected at a time; at least one. The others must take over the
    # load.
    max_share: ClassVar[float] = 0.1
    # Share of engines in service below which ejected engines get requests, too: the fault is
    # elsewhere, or the others would overload.
    panic_threshold: ClassVar[float] = 0.5
    # Time limit of the request with one token that an engine must answer before it returns,
    # seconds.
    probe_timeout: ClassVar[float] = 10.0


class Health(Strict):
    """Health checks of the engines."""

    path: str = setting("/health", pattern="^/[!-~]*$", when="engines have another health page")
    """path of the GET request; every status below 500 is healthy"""
    interval: Seconds = setting(2.0, when="failures must show earlier, or checks cost too much")
    """time between two checks of an engine, seconds"""
    timeout: Seconds = setting(2.0, when="busy engines answer checks late")
    """time limit of a check, seconds"""
    down_after: Positive = setting(3, when="checks fail for good engines")
    """consecutive failures (checks, connections) that make an engine unhealthy; a refused
    connection does at once"""
    # Consecutive successful checks that make an engine healthy again: the start of an engine takes
    # long enough.
    up_after: ClassVar[int] = 1
    # Time without a token on any stream of an engine after which the engine gets a small request,
    # seconds. If that stays unanswered for `ejection.probe_timeout`, the engine is out of service
    # and its requests move elsewhere. The time grows with the engine's usual pauses and running
    # prefills, so a constant start is enough.
    stall_seconds: ClassVar[float] = 30.0
    ejection: Ejection = setting(default_factory=Ejection, when="good engines are ejected, or bad ones stay")
    """outlier ejection"""


class Load(Strict):
    """Load reports of the engines."""

    interval: Seconds | None = setting(1.0, when="reading /metrics costs the engines too much")
    """time between two reads of an engine's /metrics, seconds; null: never"""
    # Whether the router requests the endpoint-load-metrics header on answers that are not streamed:
    # these values are newer than /metrics.
    from_answers: ClassVar[bool] = True


class Limits(Strict):
    """Limits on requests and connections."""

    max_body_bytes: Positive = setting(32 << 20, when="clients send larger images or prompts")
    """maximum size of a request body"""
    max_concurrent_requests: Positive = setting(8192, when="the fleet runs more requests at a time")
    """maximum number of requests in flight; others get a 503"""
    max_client_share: float = setting(0.5, gt=0, le=1, when="all clients come through one gateway: set 1")
    """maximum share of max_concurrent_requests, max_connections and max_body_bytes_total for one
    client address (except trusted proxies); of max_concurrent_requests also for one tenant. Others
    get a 503"""
    # Size of a request's head, bytes: clients and proxies in front send less.
    max_head_bytes: ClassVar[int] = 64 << 10
    max_body_bytes_total: Positive = setting(256 << 20, when="clients send many large bodies at a time")
    """maximum size of all requests that are being received, and of all request bodies that await an
    answer; others get a 503"""
    max_connections: Positive = setting(16384, when="more clients connect at a time")
    """maximum number of client connections; others get a 503; lower if the process may not open two
    files per connection"""
    # Connections per engine: more concurrent requests than an engine runs. Further requests go to
    # the next engine.
    max_connections_per_engine: ClassVar[int] = 2048
    # Stored responses (/v1/responses) whose engines the router remembers, some 20 MB. Beyond it,
    # the oldest are forgotten.
    max_stored_responses: ClassVar[int] = 100_000
    # The same limit per tenant: one tenant must not make the router forget the others' responses.
    max_stored_responses_per_tenant: ClassVar[int] = 20_000
    idle_seconds: Seconds = setting(4.0, when="engines close idle connections earlier")
    """close unused engine connections after this long; must be below the engine's own limit"""

    @property
    def max_connections_per_client(self) -> int:
        """Maximum number of connections of a client address."""
        return ceil(self.max_connections * self.max_client_share)

    @property
    def max_body_bytes_per_client(self) -> int:
        """Maximum size of the requests of a client address in upload, and of its waiting bodies."""
        return ceil(self.max_body_bytes_total * self.max_client_share)


class Errors(Strict):
    """Details in errors and headers for clients."""

    show_engines: bool = setting(True, when="clients must not see names of engines")
    """show engine names and failure reasons in errors, and engine names in the headers
    x-lmetric-instance and x-lmetric-prefill. An engine's default name is its host:port. false: hide
    them from clients, also on the live page and in decision records; logs and administrators' pages
    still show them"""


class Cors(Strict):
    """Cross-origin requests: which web pages may call the API from a browser."""

    origins: list[CorsOrigin] = setting(default_factory=list, when="web pages call the API")
    """allowed origins, such as https://chat.example.com, or "*" for every origin; empty: CORS is
    off, and engines' CORS headers pass unchanged"""


class Auth(Strict):
    """Credentials of clients: API keys, and JSON Web Tokens of issuers."""

    keys_file: Path | None = setting(None, when="clients need keys")
    """YAML file that maps keys, or sha256:HEX of keys, to tenants; it may be {} if state_folder is
    set, for keys of /admin/keys. null: requests need no key"""
    jwt: list[JwtIssuer] = setting(
        default_factory=list, max_length=16, when="clients have tokens of an identity provider"
    )
    """issuers of JSON Web Tokens that clients send as bearer tokens, beside API keys"""
    salt_secret: Token | None = setting(None, when="tenants are isolated, and caches must survive a restart")
    """secret for the cache salts of isolated tenants; all routers of the same engines need the same
    secret. Default: random at each start, so caches start empty"""
    salt_secret_file: Path | None = setting(None, when="the secret is in a file")
    """file with salt_secret"""

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        _only_one(self, "salt_secret", "salt_secret_file")
        return self

    @property
    def identifies(self) -> bool:
        """Whether clients need a credential, which names their tenant."""
        return self.keys_file is not None or bool(self.jwt)


class Admin(Strict):
    """Administration and debugging pages; `admin: true` is short for `admin: {enabled: true}`."""

    enabled: bool = setting(False, when="you add or drain engines over HTTP")
    """allow /admin: add, drain and remove engines, switch the guard"""
    token: Token | None = setting(None, when="others can reach the router")
    """bearer token for /admin and /debug. Required by `enabled`, unless the router listens on
    loopback and has no API keys; in the same cases /debug is closed without a token"""
    token_file: Path | None = setting(None, when="the token is in a file")
    """file with token"""
    protect_metrics: bool = setting(False, when="metrics must not be public")
    """require the token for /metrics"""
    allowed_engines: list[EngineRule] | None = setting(None, when="administrators may add only some engines")
    """IP addresses, CIDR blocks and host name patterns allowed for engines that /admin adds; null:
    any address except link-local and cloud metadata addresses"""

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


class Ui(Strict):
    """The live page at /ui. docs/how-to/access.md says who sees what."""

    enabled: bool = setting(True, when="nobody should see the page")
    """serve /ui and its data at /debug/live"""
    # Pages and `top` commands that watch at once; more get a 503. Each one costs the router time.
    viewers: ClassVar[int] = 16


def _only_one(section: Strict, *names: str) -> None:
    if sum(getattr(section, name) is not None for name in names) > 1:
        raise ValueError(f"set one of {' and '.join(names)}, not both")


def _section_of(value: object) -> object:
    """Expands `admin: true` to the section that it abbreviates."""
    return value if isinstance(value, dict | Admin) else {SHORTHANDS["admin"]: value}


class TenantConfig(Strict):
    """Service of a tenant's requests: weight, order and isolation."""

    weight: float = setting(1.0, ge=1e-3, le=1e6, when="a tenant should get more service")
    """share of service relative to other tenants, with `admission` or `priority: vtc`"""
    handicap_seconds: float = setting(0.0, ge=-1e6, le=1e6, when="a tenant sends bulk work")
    """added to the arrival time under priority uniboost, for bulk work; below 0: earlier"""
    isolate: bool = setting(False, when="a tenant's prompts are confidential")
    """share no cached prefixes with other tenants, neither in the KV index nor (by cache_salt) in
    the engines' prefix caches"""
    max_concurrent: Positive | None = setting(None, when="a tenant takes too many places on engines")
    """maximum number of the tenant's requests on a model's engines; further requests wait"""
    budgets: Annotated[list[BudgetConfig], AfterValidator(distinct)] = setting(
        default_factory=list, when="a tenant sends too many requests or tokens"
    )
    """windows that limit the tenant's requests and tokens (docs/how-to/budgets.md)"""
    max_waiting: int | None = setting(None, ge=0, when="a tenant's requests should fail instead of wait")
    """maximum number of the tenant's waiting requests of a model; 0: a request that cannot run at
    once gets a 429; null: `max_waiting_per_tenant` of `admission`"""
    slo_class: str | None = setting(None, when="a tenant cannot set headers")
    """class of requests without the header x-slo-class (`admission.classes`)"""
    level: Level | None = setting(None, when="a tenant must go before or after others")
    """priority level in the queue of `admission`, -10 to 10; the highest goes first
    (docs/how-to/priorities.md); null: the level of the class, else 0"""
    models: list[ModelName] | None = setting(None, min_length=1, when="a tenant must not use some models")
    """the only models, adapters and aliases that the tenant sees and uses; others are unknown to it
    (404); null: all"""


class ReplicasConfig(Strict):
    """Other routers of the same engines: they exchange their in-flight load and budgets."""

    urls: list[RouterUrl] = setting(default_factory=list, when="several routers use the same engines")
    """URLs of all routers, e.g. http://routers:8080. Every address of the host name is a router,
    and this router may be among them. Empty: no other routers"""
    # At most a quarter of silent_after. The default is shorter than most prefills.
    interval: Annotated[Seconds, Field(ge=0.01, le=0.5)] = setting(
        0.1, when="many routers exchange too many messages, or emulated engines run fast"
    )
    """time between two messages, seconds"""
    # Time without a message, seconds, after which another router's load no longer counts.
    silent_after: ClassVar[float] = 2.0
    token: Token | None = setting(None, when="routers run on several machines")
    """bearer token between routers; required unless `host` and the hosts of `urls` are loopback
    addresses and there are no API keys"""
    token_file: Path | None = setting(None, when="the token is in a file")
    """file with token"""
    tls: EngineTls | None = setting(None, when="routers have https URLs and a private CA")
    """TLS of https URLs; default: check certificates by the system's CAs"""

    redis_url: RedisUrl | None = setting(
        None, when="routers that do not reach each other share budgets, and you run Redis"
    )
    """Redis or Valkey server through which routers share budgets, e.g.
    redis://:password@host:6379/0; rediss:// for TLS. Each database is a fleet of its own; null:
    none"""

    @property
    def is_set(self) -> bool:
        """Whether any key has another value than its default."""
        return self != ReplicasConfig()

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        _only_one(self, "token", "token_file")
        return self


class Log(Strict):
    """Logs, on stderr."""

    model_config = ConfigDict(serialize_by_alias=True)  # what is written can be read

    level: Literal["debug", "info", "warning", "error"] = setting("info", when="you look for a fault")
    """lowest level to log"""
    json_lines: bool = setting(False, alias="json", when="a program reads the logs")
    """log one JSON object per line"""
    access: bool = setting(False, when="you need one line per request")
    """log a line per request"""


class TracingConfig(Strict):
    """Traces of requests, for an OpenTelemetry collector."""

    endpoint: CollectorUrl = setting("http://127.0.0.1:4318", when="the collector runs elsewhere")
    """URL of the collector's OTLP/HTTP receiver, without /v1/traces"""
    sample_ratio: float = setting(1.0, ge=0, le=1, when="traces take too much space")
    """share of the requests without a traceparent that are traced. Other requests are traced if the
    flag in their traceparent says so"""
    token: Token | None = setting(None, when="the collector requires a token")
    """bearer token for the collector"""
    token_file: Path | None = setting(None, when="the token is in a file")
    """file with token"""
    # Time for the collector to take a batch of spans, seconds: the default of OpenTelemetry.
    timeout: ClassVar[float] = 10.0
    # Spans that wait for the collector: the router drops and counts further spans.
    queue_spans: ClassVar[int] = 8192

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        _only_one(self, "token", "token_file")
        return self


def auto_workers() -> int:
    """Returns the number of workers for the processors that this process may use."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, processors - 1))


class ServerConfig(PoolSettings):
    """All settings of `lmetric-router serve`."""

    host: Host = setting("127.0.0.1", when="other machines send requests: set ::, all addresses")
    """address to listen on, or unix:/path of a unix socket, which ignores port"""
    port: int = setting(8080, ge=0, le=65_535, when="the port is taken")
    """port to listen on; 0: any free port"""
    workers: Workers = setting(1, when="one process is busy: some 30 engines with streams of chats")
    """processes that share the port (with `epp`, both ports); auto: one less than the processors
    that the router may use, at most 8"""
    socket_mode: FileMode = setting("660", when="the clients of a unix socket run as another user")
    """file mode of a unix socket, octal"""
    tls: ListenerTls | None = setting(None, when="clients connect with https")
    """TLS for clients; null: plain HTTP"""
    forwarded: Forwarded = setting(default_factory=Forwarded, when="there is a proxy in front")
    """proxies in front, and the client addresses that they report"""
    model: str | None = setting(None, when="engines report no model")
    """model of engines without one in their entry; default: as the engines report"""
    engines: list[EngineConfig] = setting(default_factory=list, when="the list of engines is fixed")
    """engines outside `models`; a URL stands for {url: URL}"""
    models: list[ModelConfig] = setting(default_factory=list, when="you serve several models")
    """models with their engines"""
    aliases: dict[ModelName, AliasTargets] = setting(
        default_factory=dict, when="clients ask for names that no engine serves"
    )
    """further names of models, `ALIAS: MODEL`, or by weight `ALIAS: {MODEL: 9, OTHER: 1}`. A
    conversation keeps its model, by its session or by its first messages"""
    fallbacks: dict[ModelName, FallbackModels] = setting(
        default_factory=dict, when="clients should get another model's answer instead of an error"
    )
    """other models of a model or alias, in order, `NAME: [OTHER, ...]`. They serve requests before
    any token, if no engine serves the model, admission or its engines refuse the request, or the
    request is too long for it"""
    model_in_answers: Literal["served", "asked"] = setting(
        "served", when="clients compare the name in answers with that in their requests"
    )
    """the model's name in answers. `served`: of the model that answers; `asked`: of the request,
    also if an alias or a fallback changed it"""
    embedded: Embedded | None = setting(None, when="you try the router without engines")
    """emulated engines to start as child processes: a number, or e.g. 2P4D for 2 prefill and 4
    decode engines; with a scheduler (docs/how-to/engine_schedulers.md): `2,slo=50`, in ms, or
    `2,uniboost`"""
    discovery: list[DiscoverySource] = setting(
        default_factory=list, when="engines start and stop while the router runs"
    )
    """service discovery: sources of more engines"""
    paths: list[Annotated[str, Field(pattern="^/")]] = setting(
        default_factory=list, when="clients need further paths of the engines"
    )
    """additional POST paths to forward to the engines"""
    admin: Annotated[Admin, BeforeValidator(_section_of)] = setting(
        default_factory=Admin, when="you manage engines over HTTP"
    )
    """administration and debugging pages"""
    ui: Ui = setting(default_factory=Ui, when="nobody should see the page")
    """the live page at /ui"""
    timeouts: Timeouts = setting(default_factory=Timeouts, when="requests take longer, or must end earlier")
    """time limits of the phases of a request"""
    retries: Retries = setting(
        default_factory=Retries, when="requests should fail earlier, or try more engines"
    )
    """retries on another engine"""
    health: Health = setting(default_factory=Health, when="failures must show earlier")
    """health checks of the engines"""
    load: Load = setting(default_factory=Load, when="reading /metrics costs the engines too much")
    """load reports of the engines"""
    limits: Limits = setting(default_factory=Limits, when="clients send more or larger requests")
    """limits on requests and connections"""
    errors: Errors = setting(default_factory=Errors, when="clients must not see names of engines")
    """details in errors and headers for clients"""
    cors: Cors = setting(default_factory=Cors, when="web pages call the API")
    """web pages that may call the API from a browser"""
    auth: Auth = setting(default_factory=Auth, when="clients need keys")
    """API keys"""
    tenants: dict[str, TenantConfig] = setting(default_factory=dict, when="tenants share the fleet")
    """tenants by name: of the API key or, without keys, of x-tenant (UTF-8 or latin-1)"""
    state_folder: Path | None = setting(
        None, when="budgets of days or months, usage, or issued keys must survive a restart"
    )
    """folder for API keys of /admin/keys, and for the counts of budgets and /admin/usage, which
    then survive a restart; a crash loses at most a second of counts. Each router needs a folder of
    its own: it locks the folder, and a second router does not start. null: memory only"""
    replicas: ReplicasConfig = setting(
        default_factory=ReplicasConfig, when="several routers use the same engines"
    )
    """other routers of the same engines"""
    records: RecordsConfig = setting(
        default_factory=RecordsConfig, when="you want to analyze or replay your traffic"
    )
    """records of requests on disk"""
    epp: EppConfig = setting(default_factory=EppConfig, when="the router picks endpoints for a gateway")
    """endpoint picker: `lmetric-router epp`, behind a gateway"""
    log: Log = setting(default_factory=Log, when="you look for a fault")
    """logs"""
    tracing: TracingConfig | None = setting(None, when="you collect traces")
    """traces of requests, with the extra `otel`; null: none"""

    _ignored: tuple[str, ...] = PrivateAttr(())
    _origin: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Whether the settings are equal, from whatever sources."""
        return isinstance(other, ServerConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    @property
    def ignored_variables(self) -> tuple[str, ...]:
        """Environment variables that begin with LMETRIC and are no settings."""
        return self._ignored

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raises ValueError if settings contradict each other."""
        labels: set[str] = set()
        for engine in [*self.engines, *(engine for model in self.models for engine in model.engines)]:
            if engine.label in labels:
                raise ValueError(f"two engines are named {engine.label!r}; rename one")
            labels.add(engine.label)
        sources = [CONFIGURED, ADMIN, *(source.label for source in self.discovery)]
        for number, label in enumerate(sources):
            if label in sources[:number]:
                raise ValueError(f"two discovery sources are equal: {label}; remove one")
        self._check_credentials()
        self._check_indicators()
        self._check_classes()
        self._check_embedded()
        self._check_workers()
        names: set[str] = set()
        for name in [n for model in self.models for n in (model.name, *model.adapters)]:
            if name in names:
                raise ValueError(f"two models are named {name!r}; rename one")
            names.add(name)
        self._check_names(names if self.model is None else {*names, self.model})

    def _check_names(self, models: set[str]) -> None:
        """Refuses aliases and fallbacks that lead back or nowhere, or that a tenant may not use."""
        for alias, targets in self.aliases.items():
            if alias in models:
                raise ValueError(f"aliases.{alias}: a model has this name; rename the alias")
            if chain := next((target for target in targets if target in self.aliases), None):
                what = "itself" if chain == alias else f"the alias {chain!r}"
                raise ValueError(f"aliases.{alias}: it names {what}; expected names of models")
        for name, others in self.fallbacks.items():
            only = [*self.aliases.get(name, [name])]
            if chain := next((other for other in others if other in self.aliases), None):
                raise ValueError(f"fallbacks.{name}: it names the alias {chain!r}; expected names of models")
            if name in others or (len(only) == 1 and only[0] in others):
                raise ValueError(f"fallbacks.{name}: it leads back to {only[0]!r}; expected other models")
            if twice := next((other for other in others if others.count(other) > 1), None):
                raise ValueError(f"fallbacks.{name}: it names {twice!r} twice; remove one")
        for name, tenant in self.tenants.items():
            allowed = tenant.models or []
            for alias in (each for each in allowed if each in self.aliases):
                if missing := [target for target in self.aliases[alias] if target not in allowed]:
                    raise ValueError(
                        f"tenants.{name}.models: it has the alias {alias!r}, but not its models "
                        f"{', '.join(map(repr, missing))}; add them, or remove the alias"
                    )

    def _check_workers(self) -> None:
        """Refuses settings whose state one process must hold alone."""
        if self.worker_count == 1:
            return
        pools = [self.pool_settings(), *(self.pool_settings(model) for model in self.models)]
        alone = {
            "rebalance": any(pool.rebalance is not None for pool in pools),
            "fleet_changes": any(pool.fleet_changes is not None for pool in pools),
        }
        if used := [name for name, is_used in alone.items() if is_used]:
            raise ValueError(
                f"workers = {self.workers}: it is not valid with {', '.join(used[:4])}, which one process "
                "must count alone; expected 1, or none of these settings"
            )

    @property
    def worker_count(self) -> int:
        """Number of worker processes."""
        return self.workers if isinstance(self.workers, int) else auto_workers()

    def _check_credentials(self) -> None:
        auth, admin, replicas = self.auth, self.admin, self.replicas
        keys = auth.identifies
        issuers = [each.issuer for each in auth.jwt]
        if twice := next((name for name in issuers if issuers.count(name) > 1), None):
            raise ValueError(f"auth.jwt: two entries have the issuer {twice!r}; remove one")
        if admin.enabled and not admin.has_token and (keys or not self._is_local):
            where = f"the router listens on {self.host!r}, not on loopback"
            if self.forwarded.trusted_proxies:
                where = "there are trusted proxies"
            if keys:
                where = "clients have API keys or tokens"
            raise ValueError(f"admin.enabled needs admin.token or admin.token_file because {where}")
        if not replicas.urls:
            return
        if replicas.token is None and replicas.token_file is None:
            if keys:
                raise ValueError(
                    "replicas.token is needed because clients have API keys or tokens: they must not act as "
                    "routers"
                )
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
        """Refuses indicators whose source is disabled."""
        declared = [(name, each) for pool in (self, *self.models) for name, each in pool.indicators.items()]
        for name, each in declared:
            if each.source == "push":
                needed = None if self.admin.enabled else "admin.enabled: true"
            elif each.metric is not None and self.load.interval is None:
                needed = "load.interval, which is null"
            else:
                needed = None
            if needed is not None:
                raise ValueError(f"indicators.{name}: source {each.source} needs {needed}")

    def _check_embedded(self) -> None:
        """Refuses embedded engines whose scheduler ignores the priorities of requests."""
        if self.embedded is not None and embedded_engines(self.embedded)[1] and self.orders:
            raise ValueError(
                f"embedded: {self.embedded} orders the engines' queues, and so does priority; remove one"
            )

    def _check_classes(self) -> None:
        """Refuses classes of tenants and budgets that no model has, and levels without a queue."""
        pools = (self, *self.models)
        admissions = [pool.admission for pool in pools if pool.admission is not None]
        queues = [*admissions, *(pool for pool in pools if isinstance(pool.programs, ProgramAdmission))]
        known = sorted({name for admission in admissions for name in admission.classes})
        for name, tenant in self.tenants.items():
            if tenant.level is not None and not queues:
                raise ValueError(
                    f"tenants.{name}.level = {tenant.level}: levels order waiting requests, and none wait "
                    "without admission or programs; set admission, such as admission: {}, or remove the level"
                )
            named = [("slo_class", tenant.slo_class)]
            named += [(f"budgets ({each.label})", each.slo_class) for each in tenant.budgets]
            for key, slo_class in named:
                if slo_class is not None and slo_class not in known:
                    raise ValueError(
                        f"tenants.{name}.{key}: no model has the class {slo_class!r}; known: "
                        f"{', '.join(known) or 'none (set admission.classes)'}"
                    )

    @property
    def debug_is_open(self) -> bool:
        """Whether /debug, and /admin if it is enabled, need no credential."""
        return not self.admin.has_token and not self.auth.identifies and self._is_local

    @property
    def _is_local(self) -> bool:
        """Whether only clients on this machine reach the router: it has no proxy in front."""
        return is_loopback(self.host) and not self.forwarded.trusted_proxies

    @property
    def splits(self) -> bool:
        """Whether requests of some model may be split between engines of role both."""
        return any(pool.routing.split is not None for pool in self._pools)

    @property
    def fetches_prefixes(self) -> bool:
        """Whether engines of some model fetch prefixes from each other."""
        return any(pool.routing.prefix_fetch is not None for pool in self._pools)

    @property
    def rebalances(self) -> bool:
        """Whether running requests of some model move between engines by a rule."""
        return any(pool.rebalance is not None for pool in self._pools)

    @property
    def recomputes_moves(self) -> bool:
        """Whether a rule moves running requests of some model by recomputation."""
        return any(pool.rebalance is not None and pool.migration_by == "recompute" for pool in self._pools)

    @property
    def orders(self) -> bool:
        """Whether requests of some model get priorities from the router."""
        return any(pool.priority is not None for pool in self._pools)

    @property
    def _pools(self) -> list[PoolSettings]:
        return [self, *(self.pool_settings(model) for model in self.models)]

    def tls_of(self, engine: EngineConfig, model: str | None) -> EngineTls | None:
        """TLS settings of an engine of a model; None: the defaults."""
        own = next((each for each in self.models if each.name == model), None)
        return engine.tls or (own and own.engine_tls) or self.engine_tls

    def pool_settings(self, model: ModelConfig | None = None) -> PoolSettings:
        """Settings of a model's pool: the model's own, or else the top level's."""
        values = {name: getattr(self, name) for name in PoolSettings.model_fields}
        if model is not None:
            own = model.model_fields_set & PoolSettings.model_fields.keys()
            values |= {name: getattr(model, name) for name in own}
            for policy, knobs in POLICY_KNOBS.items():
                if policy in own and knobs not in own:
                    values[knobs] = {}
        return PoolSettings.model_construct(**values)
