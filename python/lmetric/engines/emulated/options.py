"""The options of an emulated engine."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from lmetric._core import BadValueError
from lmetric.defaults import DEFAULT_PROFILE, ORDER_SLO
from lmetric.profiles import Profile, check_profile, load_profile
from lmetric.queueing import Swap, checked_order

_COUNT = 2**30


# Options of an engine that hands a request over at any token, and takes it so.
BOTH_WAYS: dict[str, Any] = {
    "kv_connector": "nixl",
    "kv_bidirectional": True,
    "kv_load_failure_policy": "fail",
}


class EngineOptions(BaseModel):
    """Settings of one emulated engine; each is a flag of ``lmetric-router engine`` of the same
    name."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    model: str = Field(default="emulated", min_length=1, description="Name of the served model.")
    api: Literal["vllm", "sglang"] = Field(
        default="vllm",
        description="Whose pages, metrics and KV events: vllm; or sglang, a stand-in written from its "
        "protocol (0.5.23) and never held against a running one.",
    )

    profile: str = Field(
        default=DEFAULT_PROFILE, description="Shipped profile's name, or path of a YAML file."
    )
    block_tokens: int = Field(
        default=16, gt=0, le=2**20, description="Tokens of a KV block, whatever the profile simulates with."
    )
    ranks: int = Field(
        default=1,
        gt=0,
        le=64,
        description="Data-parallel ranks, each with a queue, a cache and KV events of its own.",
    )
    cache_blocks: int | None = Field(
        default=None, gt=0, le=_COUNT, description="KV blocks; default: as many tokens as the profile holds."
    )
    max_sequences: int | None = Field(default=None, gt=0, le=_COUNT, description="Overrides the profile's.")
    max_batch_tokens: int | None = Field(
        default=None, gt=0, le=_COUNT, description="Overrides the profile's."
    )
    max_model_len: int | None = Field(
        default=None, gt=1, description="Most tokens of a request; default: what the KV blocks hold."
    )
    default_max_tokens: int = Field(
        default=128,
        gt=0,
        description="Length of a chat answer that asks for none (completions: 16, as vLLM).",
    )
    max_queued_requests: int | None = Field(
        default=None,
        ge=0,
        description="Answer 503 while this many requests wait; default: no limit.",
    )
    admission: Literal["vllm", "reserve"] = Field(
        default="vllm",
        description="vllm: blocks are taken as tokens come, with preemption; reserve: all at once.",
    )
    order: str = Field(
        default="fcfs",
        description="Local order, also with settings of its own: uniboost(gamma=0.2); see "
        "docs/simulator.md. It knows how long an answer gets: max_tokens.",
    )
    preempt: str = Field(
        default="recompute",
        description="What becomes of the KV of requests that go back into the queue: recompute, or "
        "swap:GB/S[,host=GB].",
    )
    order_slo: float = Field(
        default=ORDER_SLO,
        gt=0,
        le=1e6,
        description="Seconds that a step with decodes may take under --order slo.",
    )
    clock_speed: float = Field(
        default=1.0, gt=0, le=1000, description="The engine's clock runs this much faster."
    )

    kv_events_endpoint: str | None = Field(
        default=None,
        description="ZMQ endpoint for KV events: bound if it has *, :: or ipc://, else connected.",
    )
    kv_events_replay_endpoint: str | None = Field(
        default=None, description="ZMQ endpoint (bound) where past KV events can be asked for."
    )
    kv_events_topic: str = Field(default="", description="Topic frame of the KV events.")
    clock_ahead_seconds: float = Field(
        default=0.0,
        description="What its Date and the times in its KV events are ahead of this machine's clock.",
    )
    kv_events_buffer_steps: int = Field(
        default=10_000, gt=0, description="Batches of KV events kept for replay."
    )

    load_publish_endpoint: str | None = Field(
        default=None, description="ZMQ endpoint (bound) at which load is pushed; sglang only."
    )

    kv_events: bool = Field(default=True, description="Publish KV events (where an endpoint is given).")
    cached_tokens: bool = Field(default=True, description="Report usage.prompt_tokens_details.cached_tokens.")
    stream_usage: bool = Field(default=True, description="Honour stream_options.include_usage.")
    token_ids: bool = Field(
        default=True, description="Honour return_token_ids, and take prompts as token ids."
    )
    load_header: bool = Field(
        default=True, description="Answer endpoint-load-metrics-format with the load header."
    )
    metrics: bool = Field(default=True, description="Serve /metrics.")
    metrics_every_seconds: float | None = Field(
        default=None, gt=0, description="/metrics stays as it is for this long; default: always fresh."
    )
    server_load: bool = Field(default=True, description="Count requests at /load; else it says 0.")
    tokenize: bool = Field(default=True, description="Serve /tokenize and /detokenize.")

    role: Literal["both", "prefill", "decode"] = Field(
        default="both",
        description="What it tells to be there for. vLLM's engines do all the same; SGLang's prefill and "
        "decode engines serve halves of requests only, which meet by bootstrap.",
    )
    kv_connector: Literal["none", "nixl"] = Field(
        default="none",
        description="nixl: hands KV caches to other engines and takes them, as vLLM's NixlConnector does.",
    )
    kv_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port on which other engines ask for KV caches (NIXL's side channel, SGLang's "
        "bootstrap); 0: any free one.",
    )
    kv_lease_seconds: float = Field(
        default=30.0, gt=0, description="A KV cache that no one fetches is held this long."
    )
    kv_bidirectional: bool = Field(
        default=False,
        description="Takes the front of a prompt from another engine and computes the rest, as vLLM's "
        "bidirectional_kv_xfer; else such a request waits for ever, as in vLLM.",
    )
    kv_decoder_ttl_seconds: float = Field(
        default=480.0,
        gt=0,
        description="As kv_lease_seconds, of a request that itself took its prompt from elsewhere; with "
        "kv_bidirectional.",
    )
    kv_load_failure_policy: Literal["fail", "recompute"] = Field(
        default="fail", description="What comes of a request whose KV cache cannot be fetched."
    )
    kv_wrong_params: Literal["die", "refuse"] = Field(
        default="die",
        description="kv_transfer_params that make no sense: the engine dies, as vLLM does, or answers 400.",
    )
    kv_transfer_gigabytes_per_second: float = Field(
        default=25.0, gt=0, description="Bandwidth at which a KV cache comes in."
    )
    kv_transfer_seconds: float = Field(
        default=0.002, ge=0, description="Time of a transfer whatever its size."
    )
    kv_patience_seconds: float = Field(
        default=120.0, gt=0, description="Either half of a request waits this long for the other (sglang)."
    )

    fail_after_tokens: int | None = Field(
        default=None, ge=0, description="Every answer breaks off after this many tokens (0: after the head)."
    )
    fail_with: Literal["reset", "event", "stall"] = Field(
        default="reset",
        description="How: the connection is cut; an error event and [DONE] come; nothing more comes.",
    )
    fail_status: int | None = Field(
        default=None, ge=400, le=599, description="Every completion request is answered with this status."
    )
    refuse: bool = Field(default=False, description="Cut every connection before it is answered.")

    exit_with_parent: bool = Field(
        default=False, description="Stop when standard input ends: the parent is gone."
    )

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
            raise ValueError("swap only with admission vllm: only there are blocks that could be copied")
        return preempt

    @field_validator("load_publish_endpoint")
    @classmethod
    def _pushed_by_sglang(cls, endpoint: str | None, info: ValidationInfo) -> str | None:
        if endpoint is not None and info.data.get("api") != "sglang":
            raise ValueError("only with api sglang: vLLM does not push its load")
        return endpoint

    @model_validator(mode="after")
    def _role_has_a_connector(self) -> Self:
        if self.api == "sglang" and self.kv_connector != "none":
            raise ValueError("kv_connector is vLLM's: an engine with api sglang needs a role only")
        if self.kv_bidirectional and self.kv_connector != "nixl":
            raise ValueError("kv_bidirectional: needs kv_connector nixl")
        if self.ranks > 1 and self.kv_connector != "none":
            raise ValueError("ranks: an engine with a kv_connector has one")
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
