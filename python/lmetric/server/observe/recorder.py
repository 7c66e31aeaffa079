"""Records of requests on disk: which requests, and the parts of a line.

The event loop only samples a request and keeps references to it. The writer's thread hashes prompts
and reads decision records. docs/reference/records.md has the schema.
"""

from __future__ import annotations

import base64
import random
import secrets
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric._core import Decision, Request, Router, UnknownNameError, __version__, chained_hashes
from lmetric.config import RecordsConfig, read_secret
from lmetric.record_schema import SCHEMA_VERSION
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest, Intent
from lmetric.server.execution.observers import Observer
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model
from lmetric.server.observe.record_writer import Line, RecordWriter

FLEET_SECONDS = 10.0  # time between two looks at the fleet
LOAD = ("bs", "q_bs", "queued_prefill_tokens", "tokens", "prefill_tokens_per_second")
HASH_BYTES = 8
# Entries of a decision record that a line copies under the same name.
_COPIED = (
    *("policy", "shadow", "decode_instance", "held_seconds", "handoff_seconds", "fetched_tokens"),
    *("predicted_cached_tokens", "outcome", "level", "aged_levels"),
)


class Draft(Struct, gc=False):
    """The parts of a record that are known before the request ends.

    ``load``: indicators of the instance right after the decision, by name. ``prompt_bytes``: memory
    of the prompt, which the draft keeps alive.
    """

    request: Request
    stream: bool
    prompt_bytes: int
    router: Router | None = None  # None: the request was never routed
    decision: Decision | None = None
    load: dict[str, float] | None = None
    arm: str | None = None  # stable or canary; None: no canary ran
    hedged: bool = False  # the decision is that of a hedge, which answered
    tried: tuple[str, ...] = ()  # engines that its gateway tried; empty: as in the decision record


class Ended(Struct, gc=False):
    """A request that has ended, for the writer's thread. Times are in seconds."""

    draft: Draft
    at: float  # Unix time of the arrival
    model: str
    names: dict[str, str]  # before that of its model
    path: str
    tenant: str
    request_id: str
    status: int
    reason: str
    instance: str | None
    block_tokens: int
    block_bytes: int
    e2e_seconds: float
    ttft_seconds: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int


class Hasher:
    """Keyed hashes of prompts and names. Without the key, a guess of a text cannot be checked."""

    def __init__(self, key: bytes) -> None:
        self._key = blake2b(key, digest_size=32, person=b"lmetric-records").digest()
        self.id = self.name("key id")

    def name(self, text: str) -> str:
        """The hash of a name, 16 hex digits."""
        return blake2b(text.encode("utf-8", "surrogateescape"), key=self._key, digest_size=8).hexdigest()

    def number(self, text: str) -> float:
        """A number from 0 to 1 that depends on the text alone."""
        return int(self.name(text), 16) / 2.0**64

    def chain(self, data: bytes, block: int, *domain: str | None) -> bytes:
        """The chained hashes of all whole blocks of ``block`` bytes, `HASH_BYTES` each.

        Each hash covers the blocks before it and the ``domain``. The event loop can run meanwhile.
        """
        first = blake2b(repr(domain).encode(), key=self._key, digest_size=HASH_BYTES).digest()
        return chained_hashes(self._key, first, data, block)


class Recorder(Observer):
    """Samples requests and hands them to the writer.

    ``secret``: the key of its hashes if the configuration has none; None: a random one. Raises
    ConfigError if the key of its hashes cannot be read.
    """

    def __init__(self, config: RecordsConfig, fleet: Fleet, secret: bytes | None = None) -> None:
        assert config.path is not None
        given = read_secret(None, config.hash_key_file)
        self._config, self._fleet = config, fleet
        random_key = secret or secrets.token_bytes(32)
        self.hasher = Hasher(random_key if given is None else given.encode())
        self._random = random.Random()
        self._fleet_at = 0.0
        self._fleets: dict[str, Line] = {}  # the last state of each model
        fleet.on_model_removed.append(lambda model: self._fleets.pop(model, None))
        self._opened = False  # a file has begun, with the states until then
        workers = fleet.config.worker_count
        self.writer = RecordWriter(config, config.path, self._head, line=self._line, workers=workers)

    def start(self) -> None:
        """Starts the writer."""
        self._look(time.monotonic())
        self.writer.start()

    def close(self) -> None:
        """Writes the waiting records and stops."""
        self.writer.close()

    # -- on the event loop

    def arrived(self, intent: Intent) -> None:
        """Samples a request that is about to be routed."""
        share = self._config.sample
        if share < 1.0:
            session = intent.asked.session
            if (self._random.random() if session is None else self.hasher.number(session)) >= share:
                return
        call = intent.call
        intent.client_request.draft = Draft(intent.asked, call.stream, len(call.body))

    def placed(self, request: ClientRequest, relay: Progress) -> None:
        """Adds the decision, and the load of its instance, to a sampled request."""
        draft = request.draft
        if draft is not None:
            model, decision = relay.model, relay.decision
            draft.router, draft.decision = model.router, decision
            if (trial := request.trial) is not None:
                draft.arm = "canary" if trial.canary else "stable"
            draft.load = load_of(model, decision.instance)

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Hands an ended request to the writer."""
        draft, model = request.draft, request.model
        if draft is None or model is None:
            return
        try:
            if request.ended_at >= self._fleet_at:
                self._look(request.ended_at)
            self._put(request, relay, draft)
        except Exception:
            self.writer.count_error()

    def _put(self, client_request: ClientRequest, relay: InFlightRequest | None, draft: Draft) -> None:
        model = client_request.model
        assert model is not None  # as `ended` made sure
        started, now = client_request.started, client_request.ended_at
        if isinstance(relay, Progress) and draft.decision is not None:
            decision = relay.decision
            if decision.id != draft.decision.id:  # its hedge answered
                draft.decision, draft.load, draft.hedged = decision, None, True
            draft.tried = relay.gateway_tried
        usage = relay.usage if relay is not None else None
        first = usage.first_token_at if usage is not None else None
        self.writer.put(
            Ended(
                draft,
                time.time() - (now - started),
                model.name,
                client_request.earlier_names,
                client_request.head.path,
                client_request.tenant,
                client_request.head.request_id if self._config.request_ids else "",
                client_request.status,
                # Without details, so that few reasons differ.
                relay.reason.partition(": ")[0] if relay is not None else "",
                relay.instance if relay is not None else None,
                model.block_size,
                model.settings.text_block_bytes,
                now - started,
                first - started if first else None,
                usage.prompt_tokens if usage is not None else None,
                usage.cached_tokens if usage is not None else None,
                usage.output_tokens if usage is not None else 0,
            ),
            draft.prompt_bytes,
        )

    def _look(self, now: float) -> None:
        """Records the state of the fleet if it has changed."""
        self._fleet_at = now + FLEET_SECONDS
        for model in self._fleet.models:
            state = _state(model)
            if (before := self._fleets.get(model.name)) is None or before != state | {"at": before["at"]}:
                self._fleets[model.name] = state
                if self._opened:
                    self.writer.put(state, 0)

    # -- on the writer's thread

    def _head(self) -> list[Line]:
        header: Line = {
            "type": "header",
            "schema": SCHEMA_VERSION,
            "router_version": __version__,
            "at": time.time(),
            "key_id": self.hasher.id,
            "sample": self._config.sample,
        }
        self._opened = True
        return [header, *list(self._fleets.values())]

    def _line(self, item: Ended | Line) -> Line:
        return self._request(item) if isinstance(item, Ended) else item

    def _request(self, ended: Ended) -> Line:
        draft = ended.draft
        request, decision = draft.request, draft.decision
        line: Line = {
            "type": "request",
            "at": round(ended.at, 6),
            "model": ended.model,
            **ended.names,
            "path": ended.path,
            "stream": draft.stream,
            "status": ended.status,
            "reason": ended.reason or None,
            "request_id": ended.request_id or None,
            "tenant": self._tenant(ended.tenant),
            "session": None if request.session is None else self.hasher.name(request.session),
            "adapter": request.lora_name,
            "prompt_tokens": ended.prompt_tokens or request.prompt_tokens or 0,
            "extra_tokens": request.extra_tokens or None,
            "max_tokens": request.max_tokens,
            "instance": ended.instance,
            "cached_tokens": ended.cached_tokens,
            "output_tokens": ended.output_tokens,
            "e2e_seconds": round(ended.e2e_seconds, 6),
        }
        line["hedged"], line["arm"] = draft.hedged or None, draft.arm
        line |= self._hashes(ended)
        first, further = ended.ttft_seconds, ended.output_tokens - 1
        if first is not None:
            line["ttft_seconds"] = round(first, 6)
            if further > 0:
                line["tpot_seconds"] = round((ended.e2e_seconds - first) / further, 7)
        if decision is not None and draft.router is not None:
            line["decision"] = decision.id
            record: Any = draft.router.explain(decision.id)
            if record is not None:
                if draft.tried:
                    record["tried"] = [*draft.tried]
                line |= _explained(record, line)
        if draft.load is not None:
            rate = draft.load.pop("prefill_tokens_per_second", None)
            line["load"] = draft.load
            if rate:
                line["predicted_ttft_seconds"] = round(draft.load["queued_prefill_tokens"] / rate, 6)
        return {name: value for name, value in line.items() if value is not None}

    def _tenant(self, tenant: str) -> str | None:
        if not tenant:
            return None
        return tenant if self._config.tenant_names else self.hasher.name(f"tenant {tenant}")

    def _hashes(self, ended: Ended) -> Line:
        request = ended.draft.request
        domain = (ended.model, request.lora_name, request.cache_salt)
        tokens = request.token_ids
        if tokens is not None:
            unit, block = "tokens", ended.block_tokens
            hashes = self.hasher.chain(tokens.tobytes(), block * tokens.itemsize, "tokens", *domain)
        elif (text := request.text) is not None:
            unit, block = "bytes", ended.block_bytes
            data = text.encode() if isinstance(text, str) else text
            hashes = self.hasher.chain(data, block, "text", *domain)
        else:
            return {}
        return {"hash_unit": unit, "hash_block": block, "hashes": base64.b64encode(hashes).decode()}

    # -- metrics

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of the records."""
        records = CounterMetricFamily(
            "lmetric_records",
            "Records of requests, by outcome: written, or lost because the queue was full, the disk "
            "refused them, or of an internal error",
            labels=("outcome",),
        )
        for outcome, count in list(self.writer.outcomes.items()):
            records.add_metric((outcome,), count)
        yield records
        yield CounterMetricFamily(
            "lmetric_records_written_bytes", "Bytes of records written to disk", self.writer.written_bytes
        )
        yield GaugeMetricFamily(
            "lmetric_records_waiting", "Records that wait for the writer", self.writer.waiting
        )


def load_of(model: Model, instance: str) -> dict[str, float] | None:
    """Indicators of an instance now, by name; None: it was removed."""
    try:
        load = model.router.indicators_of(instance, LOAD)
    except UnknownNameError:
        return None
    if not load["prefill_tokens_per_second"] > 0:
        del load["prefill_tokens_per_second"]
    return load


def _state(model: Model) -> Line:
    settings = model.policies.settings
    policy = settings.policy
    if isinstance(policy, str):
        policy = settings.policies.get(policy, policy)
    return {
        "type": "fleet",
        "at": round(time.time(), 3),
        "model": model.name,
        "policy": policy,
        "knobs": dict(settings.knobs),
        **({} if settings.guard is None else {"guard": settings.guard.model_dump()}),
        **_on_trial(model),
        "block_tokens": model.block_size,
        "engines": [
            {
                "name": engine.name,
                "kind": engine.capabilities.engine,
                "role": engine.role,
                "mode": engine.mode.name,
                "usable": engine.unusable is None,
                "block_tokens": engine.capabilities.block_size,
                "cache_blocks": engine.capabilities.cache_blocks,
            }
            for engine in model.engines.values()
            if not engine.encodes
        ],
    }


def _on_trial(model: Model) -> Line:
    """The settings of policies on trial, if there are any."""
    found: Line = {}
    if (trials := model.trials) is None:
        return found
    if (shadow := trials.shadow.config) is not None:
        found["shadow"] = shadow.model_dump()
    canary = trials.canary
    if canary.running and canary.run is not None:
        found["canary"] = canary.run.config.model_dump(include={"policy", "knobs", "share"})
    return found


def _explained(record: dict[str, Any], line: Line) -> Line:
    """The parts of a line that come from a decision record."""
    found: Line = {name: record[name] for name in _COPIED}
    found["tried"] = record["tried"] if len(record["tried"]) > 1 else None
    found["retries"] = max(0, len(record["tried"]) - 1)
    found["migrations"] = len(record["migrations"])
    if line["cached_tokens"] is None:
        found["cached_tokens"] = record["cached_tokens"]
    best = record["best"]
    chosen = next((each for each in best if each["instance"] == record["instance"]), None)
    if chosen is not None:
        found["score"] = chosen["score"]
        found["terms"] = {name: value for name, value in chosen["terms"].items() if value is not None}
    if not found["retries"]:  # else the instance is not that of the decision
        found["margin"] = record["margin_to_runner_up"]
        found["runner_up"] = next((b["instance"] for b in best if b["instance"] != record["instance"]), None)
    return found
