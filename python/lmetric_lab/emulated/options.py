"""The options of an emulated engine."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from lmetric._core import BadValueError
from lmetric.profiles import Profile, check_profile, load_profile
from lmetric_lab.defaults import DEFAULT_PROFILE, ORDER_SLO
from lmetric_lab.queueing import HostTier, Swap, checked_order

_COUNT = 2**30


# Options of an engine that can send and receive the KV cache of a request at any token.
BOTH_WAYS: dict[str, Any] = {
    "kv_connector": "nixl",
    "kv_bidirectional": True,
    "kv_load_failure_policy": "fail",
}


def _option(default: Any, group: str, description: str, *, unset: str | None = None, **bounds: Any) -> Any:
    """A field with its group in the help.

    Args:
        unset: the meaning of the default None, in words.
        bounds: further arguments of `pydantic.Field`.
    """
    extra: Any = {"group": group, "unset": unset}
    return Field(default=default, description=description, json_schema_extra=extra, **bounds)


_BASIC, _MODEL, _EVENTS, _METRICS = "Basic", "Memory and queue", "KV events", "API and metrics"
_KV, _FAULTS = "Disaggregation", "Failures"


class EngineOptions(BaseModel):
    """Settings of one emulated engine; each is a flag of ``lmetric-router engine`` of the same
    name."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = _option("127.0.0.1", _BASIC, "Address to listen on.")
    port: int = _option(8000, _BASIC, "Port to listen on; 0: any free port.", ge=0, le=65535)
    model: str = _option("emulated", _BASIC, "Name of the served model.", min_length=1)
    api: Literal["vllm", "sglang"] = _option(
        "vllm",
        _BASIC,
        "Engine to emulate: endpoints, metrics and KV events. sglang follows the SGLang sources (0.5.23) and "
        "was never compared with a running SGLang.",
    )
    profile: str = _option(DEFAULT_PROFILE, _BASIC, "Step times: a shipped profile or a YAML file.")
    clock_speed: float = _option(
        1.0, _BASIC, "Speed of the engine's clock relative to real time.", gt=0, le=1000
    )
    ranks: int = _option(
        1, _BASIC, "Data-parallel ranks, each with its own queue, cache and KV events.", gt=0, le=64
    )

    block_tokens: int = _option(16, _MODEL, "Tokens per KV block.", gt=0, le=2**20)
    cache_blocks: int | None = _option(
        None, _MODEL, "KV cache size, blocks.", unset="the profile's tokens", gt=0, le=_COUNT
    )
    max_sequences: int | None = _option(
        None, _MODEL, "Sequence slots (max_num_seqs).", unset="as the profile", gt=0, le=_COUNT
    )
    max_batch_tokens: int | None = _option(
        None, _MODEL, "Maximum tokens per step.", unset="as the profile", gt=0, le=_COUNT
    )
    max_model_len: int | None = _option(
        None, _MODEL, "Maximum tokens of a request.", unset="size of the KV cache", gt=1
    )
    default_max_tokens: int = _option(
        128, _MODEL, "Length of chat answers without max_tokens. Completions: 16, as in vLLM.", gt=0
    )
    max_queued_requests: int | None = _option(
        None, _MODEL, "Answer 503 if this many requests wait.", unset="no limit", ge=0
    )
    admission: Literal["vllm", "reserve"] = _option(
        "vllm",
        _MODEL,
        "vllm: requests get blocks as they produce tokens, with preemption; reserve: all blocks at once.",
    )
    order: str = _option(
        "fcfs",
        _MODEL,
        "Order of the queue (docs/research/local_orders.md), also with settings: uniboost(gamma=0.2). It "
        "knows the length of an answer: max_tokens.",
    )
    order_slo: float = _option(
        ORDER_SLO, _MODEL, "Order slo: maximum seconds of a step with decodes.", gt=0, le=1e6
    )
    preempt: str = _option(
        "recompute",
        _MODEL,
        "How preempted requests get their KV back: recompute, or swap:GB/S[,host=GB].",
    )
    host_tier: str = _option(
        "none",
        _MODEL,
        "Host-memory tier with a copy of the KV blocks (medium CPU): none, or its capacity relative to the "
        "GPU's and GB/s: 2,50.",
    )

    kv_events: bool = _option(True, _EVENTS, "Publish KV events, if an endpoint is set.")
    kv_events_endpoint: str | None = _option(
        None,
        _EVENTS,
        "ZMQ endpoint of KV events. The engine binds addresses with *, :: or ipc://, and connects to others.",
    )
    kv_events_replay_endpoint: str | None = _option(
        None, _EVENTS, "ZMQ endpoint to bind for replays of past KV events."
    )
    kv_events_topic: str = _option("", _EVENTS, "Topic frame of the KV events.", unset="empty")
    kv_events_buffer_steps: int = _option(10_000, _EVENTS, "Batches of KV events kept for replays.", gt=0)
    clock_ahead_seconds: float = _option(
        0.0, _EVENTS, "Seconds that Date headers and KV events are ahead of this machine's clock."
    )

    metrics: bool = _option(True, _METRICS, "Serve /metrics.")
    metrics_every_seconds: float | None = _option(
        None, _METRICS, "Seconds between updates of /metrics.", unset="at each request", gt=0
    )
    server_load: bool = _option(True, _METRICS, "Count requests at /load; if off, /load reports 0.")
    load_header: bool = _option(
        True, _METRICS, "Send the load header if a request has endpoint-load-metrics-format."
    )
    load_publish_endpoint: str | None = _option(
        None, _METRICS, "ZMQ endpoint to bind for load reports; with --api sglang only."
    )
    cached_tokens: bool = _option(True, _METRICS, "Report usage.prompt_tokens_details.cached_tokens.")
    stream_usage: bool = _option(True, _METRICS, "Support stream_options.include_usage.")
    token_ids: bool = _option(True, _METRICS, "Support return_token_ids and prompts of token IDs.")
    tokenize: bool = _option(True, _METRICS, "Serve /tokenize and /detokenize.")

    role: Literal["both", "prefill", "decode"] = _option(
        "both",
        _KV,
        "Role that the engine reports. vLLM engines of all roles do the same. Prefill and decode engines of "
        "SGLang accept only their half of a request and meet at a bootstrap server.",
    )
    kv_connector: Literal["none", "nixl"] = _option(
        "none", _KV, "nixl: send and receive KV caches like vLLM's NixlConnector."
    )
    kv_port: int = _option(
        0,
        _KV,
        "Port for KV transfers (NIXL's side channel, SGLang's bootstrap); 0: any free port.",
        ge=0,
        le=65535,
    )
    revision: str | None = _option(
        None, _KV, "Revision of the model that it reports. KV never passes between revisions."
    )
    kv_lease_seconds: float = _option(30.0, _KV, "Time to keep a KV cache that no engine fetches.", gt=0)
    kv_bidirectional: bool = _option(
        False,
        _KV,
        "Fetch the start of a prompt from another engine and compute the rest (bidirectional_kv_xfer). If "
        "off, such a request waits forever, as in vLLM.",
    )
    kv_decoder_ttl_seconds: float = _option(
        480.0,
        _KV,
        "With --kv-bidirectional: --kv-lease-seconds of requests whose prompt came from another engine.",
        gt=0,
    )
    kv_load_failure_policy: Literal["fail", "recompute"] = _option(
        "fail", _KV, "Action if a KV cache cannot be fetched."
    )
    kv_wrong_params: Literal["die", "refuse"] = _option(
        "die", _KV, "Action on invalid kv_transfer_params. die: exit, as vLLM; refuse: answer 400."
    )
    kv_transfer_gigabytes_per_second: float = _option(25.0, _KV, "Bandwidth of KV transfers.", gt=0)
    kv_transfer_seconds: float = _option(0.002, _KV, "Fixed time of each KV transfer.", ge=0)
    kv_patience_seconds: float = _option(
        120.0, _KV, "With --api sglang: seconds that one half of a request waits for the other.", gt=0
    )

    fail_after_tokens: int | None = _option(
        None,
        _FAULTS,
        "Break off every answer after this many tokens; 0: after the headers.",
        unset="never",
        ge=0,
    )
    fail_with: Literal["reset", "event", "stall"] = _option(
        "reset",
        _FAULTS,
        "How answers break off. reset: close the connection; event: send an error event and [DONE]; stall: "
        "send nothing more.",
    )
    fail_status: int | None = _option(
        None,
        _FAULTS,
        "Answer every completion request with this HTTP status.",
        unset="none",
        ge=400,
        le=599,
    )
    refuse: bool = _option(False, _FAULTS, "Close every connection without an answer.")
    exit_with_parent: bool = _option(
        False, _BASIC, "Stop when standard input closes, i.e. when the parent process ends."
    )

    @classmethod
    def help_of(cls, name: str) -> tuple[str, str, str]:
        """The group of a field, its description, and its default in words."""
        field = cls.model_fields[name]
        extra: Any = field.json_schema_extra
        default = extra["unset"] or "none" if field.default in (None, "") else str(field.default)
        return extra["group"], field.description or "", default

    @field_validator("order")
    @classmethod
    def _known_order(cls, order: str) -> str:
        return checked_order(order)

    @field_validator("preempt")
    @classmethod
    def _known_swap(cls, preempt: str, info: ValidationInfo) -> str:
        try:
            swaps = Swap.of(preempt) is not None
        except BadValueError as error:
            raise ValueError(str(error)) from None
        if swaps and info.data.get("admission") != "vllm":
            raise ValueError("swap only with admission vllm")
        return preempt

    @field_validator("host_tier")
    @classmethod
    def _known_tier(cls, tier: str, info: ValidationInfo) -> str:
        try:
            given = HostTier.of(tier) is not None
        except BadValueError as error:
            raise ValueError(str(error)) from None
        if given and info.data.get("api") == "sglang":
            raise ValueError("only with api vllm")
        return tier

    @field_validator("load_publish_endpoint")
    @classmethod
    def _pushed_by_sglang(cls, endpoint: str | None, info: ValidationInfo) -> str | None:
        if endpoint is not None and info.data.get("api") != "sglang":
            raise ValueError("only with api sglang; vLLM does not publish its load")
        return endpoint

    @model_validator(mode="after")
    def _role_has_a_connector(self) -> Self:
        if self.api == "sglang" and self.kv_connector != "none":
            raise ValueError("kv_connector is a setting of vLLM; with api sglang, set only role")
        if self.kv_bidirectional and self.kv_connector != "nixl":
            raise ValueError("kv_bidirectional needs kv_connector nixl")
        if self.ranks > 1 and self.kv_connector != "none":
            raise ValueError("an engine with a kv_connector has one rank; set ranks to 1")
        if self.api == "vllm" and self.role != "both" and self.kv_connector == "none":
            raise ValueError(f"role {self.role} needs kv_connector nixl")
        return self

    def resolved_profile(self) -> Profile:
        """The profile with the overrides applied; raises `lmetric.profiles.ProfileError`."""
        profile = load_profile(self.profile).in_blocks_of(self.block_tokens)
        changed = {
            "cache_blocks": self.cache_blocks or profile.cache_blocks,
            "max_sequences": self.max_sequences or profile.max_sequences,
            "max_batch_tokens": self.max_batch_tokens or profile.max_batch_tokens,
        }
        return check_profile(profile.model_dump() | changed, f"{self.profile} with overrides")

    def flags(self) -> list[str]:
        """The command line flags of all options that differ from their defaults."""
        flags = []
        for name, field in type(self).model_fields.items():
            value, flag = getattr(self, name), name.replace("_", "-")
            if value == field.default:
                continue
            flags += (
                [f"--{flag}" if value else f"--no-{flag}"]
                if isinstance(value, bool)
                else [f"--{flag}", str(value)]
            )
        return flags
