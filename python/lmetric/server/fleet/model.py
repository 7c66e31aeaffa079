"""A model: its core router and its engines."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from lmetric._core import DecisionLabels, NoInstanceError, Router
from lmetric.config import POLICY_KNOBS, Ejection, PoolSettings, Retries, TenantConfig
from lmetric.config.schema import IndicatorConfig
from lmetric.engines.adapter import MODELS
from lmetric.options import Handoff
from lmetric.roles import PlacedRole, Role
from lmetric.server.api.eligibility import (
    MERGEABLE_PATHS,
    NOT_PARSED,
    PARSED,
    Ineligible,
    failover_ineligibility,
    fetch_ineligibility,
    split_ineligibility,
)
from lmetric.server.api.errors import ApiError, Unusable, no_engine_error
from lmetric.server.api.request import ParsedRequest
from lmetric.server.fleet.activity import Activity
from lmetric.server.fleet.admission import HeldRequests
from lmetric.server.fleet.engine import Engine, unusable
from lmetric.server.fleet.hedging import Hedging
from lmetric.server.fleet.indicators import Indicators
from lmetric.server.fleet.kv_feed import KvFeed
from lmetric.server.fleet.kv_mode import ModelFacts, flag_fix, flags_for
from lmetric.server.fleet.names import ModelNames
from lmetric.server.fleet.notes import Remembered
from lmetric.server.fleet.outliers import Outliers
from lmetric.server.fleet.policies import Policies
from lmetric.server.fleet.programs import ProgramWatch
from lmetric.server.fleet.queues import Queues
from lmetric.server.fleet.recent import Recent
from lmetric.server.fleet.retry_budget import RetryBudget
from lmetric.server.fleet.tokenizers import Tokenizers
from lmetric.server.fleet.weights import Weights

if TYPE_CHECKING:
    from lmetric.server.fleet.changes import FleetChanges
    from lmetric.server.fleet.engine_addresses import EngineAddresses
    from lmetric.server.fleet.images import Images
    from lmetric.server.fleet.priority import Priorities
    from lmetric.server.fleet.rebalancer import Rebalancer
    from lmetric.server.fleet.trials import Trials
    from lmetric.tokens.images import Image

log = structlog.get_logger("lmetric.fleet")

DEFAULT_BLOCK_SIZE = 16  # until an engine reports its own
UNLEARNED_TOKENS_PER_SECOND = 8_000.0  # prefill rate until one was measured; the core has the same
# Larger bodies are not parsed for a plan or for failover: that would hold the event loop. Bodies
# with a text are parsed already, in a thread.
MAX_PARSED_BYTES = 1 << 20
# Larger bodies are not written again.
MAX_WRITTEN_BYTES = 8 << 20
LARGE_BODY_REASON = "its body is too large to be parsed"
MAX_INDEX_BLOCKS = 2**32 - 1  # of an instance, in the core's index
NOT_JOINABLE_SECONDS = 300.0  # a path's requests stay whole this long after a failed merge


# Constants of BytesPerToken. LEARNED_KEEP: share of its sums that stays at each new request. The
# bounds hold for texts of any language and tokenizer. TEMPLATE_TOKENS: most tokens that a chat
# template adds to a short text.
LEARNED_KEEP = 0.99
MIN_BYTES_PER_TOKEN = 0.5
MAX_BYTES_PER_TOKEN = 16.0
TEMPLATE_TOKENS = 512


@dataclass(slots=True)
class BytesPerToken:
    """Bytes of prompt text per token: an exponential average over the engines' usage reports."""

    bytes: float = 8_000.0
    tokens: float = 2_000.0
    implausible: int = 0  # token counts that were ignored

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Adds the reported token count of one request, unless it is implausible."""
        if prompt_bytes <= prompt_tokens * MAX_BYTES_PER_TOKEN and (
            prompt_bytes >= (prompt_tokens - TEMPLATE_TOKENS) * MIN_BYTES_PER_TOKEN
        ):
            self.bytes = self.bytes * LEARNED_KEEP + prompt_bytes
            self.tokens = self.tokens * LEARNED_KEEP + prompt_tokens
        else:
            self.implausible += 1

    def tokens_of(self, prompt_bytes: int) -> int:
        """Returns the estimated tokens of a text."""
        return int(prompt_bytes * self.tokens / self.bytes) + 1


class Model:
    """A model: its core router and its engines."""

    def __init__(
        self,
        index: int,
        name: str,
        adapters: list[str],
        settings: PoolSettings,
        retries: Retries | None = None,
        ejection: Ejection | None = None,
        tenants: Mapping[str, TenantConfig] | None = None,
    ) -> None:
        routing = settings.routing
        self.index = index
        self.name = name
        self.names = ModelNames(name, adapters)
        self.settings = settings
        self.created = int(time.time())
        self.set_label_key(secrets.token_bytes(16))
        self.block_size = settings.block_size or DEFAULT_BLOCK_SIZE
        self.block_size_from = "default" if settings.block_size is None else "the configuration"
        # In this order: indicators are declared before policies read them, policies are built
        # before the core router uses them, and all others belong to a router.
        self.indicators = Indicators(settings.indicators)
        self.policies = Policies(settings)
        self.policies_since = time.monotonic()  # when they were installed
        self.router = _router(name, settings, self.policies, block_size=self.block_size)
        self.trials: Trials | None = None  # made by the first policy on trial
        if (trials := self.trials_for(self.policies)) is not None:
            trials.configure(self.policies)
        self.held = HeldRequests(self.router, routing.programs, settings.admission, tenants=tenants or {})
        self.programs = ProgramWatch(name, self.router, routing.programs, held=self.held)
        self.kv = KvFeed(self.router)
        self.engines: dict[str, Engine] = {}
        self.encoders: dict[str, Engine] = {}  # those that only encode
        self.addresses: EngineAddresses | None = None  # set if gateways name engines by address
        self.queues = Queues(self.router, self.engines)
        self.weights = Weights(name, self.engines)
        # By decision, the announced versions of weights that gave parts of the answer, in order.
        self.request_weights: Remembered[list[str]] = Remembered()
        # Set if running requests may move, and if engines join and leave warm.
        self.mover: Rebalancer | None = None
        self.changes: FleetChanges | None = None
        if routing.rebalance is not None or routing.fleet_changes is not None:
            from lmetric.server.fleet.rebalancer import Rebalancer

            self.mover = Rebalancer(
                name, settings, routing.rebalance, router=self.router, engines=self.engines
            )
            if routing.fleet_changes is not None:
                from lmetric.server.fleet.changes import FleetChanges

                self.changes = FleetChanges(name, self.router, self.engines, mover=self.mover)
        self.ratio = BytesPerToken()
        self.tokenizers = Tokenizers(name, settings)
        self._images: Images | None = None  # made by the first request with an unknown image
        self.activity = Activity()
        self.outliers = Outliers(ejection or Ejection())
        self.retry_budget = RetryBudget(retries or Retries())
        self.hedging = Hedging(settings.hedging)
        # By decision, notes with the keys of its record: earlier names, and the credential.
        self.notes: Remembered[Mapping[str, str]] = Remembered()
        # Whether requests may be split between engines of role both, whether engines fetch prefixes
        # from each other, and whether several engines of role both may produce one answer.
        self.splits = routing.split is not None
        self.fetches_prefixes = routing.prefix_fetch is not None
        self.joins = self.splits or self.mover is not None
        self.fails_over = settings.stream_failover  # whether other engines continue broken streams
        self.gamma: float | None = None  # for engines that compute boosts, 1/s; None: not sent
        self.priority: Priorities | None = None  # set if the router sets priorities
        if settings.priority is not None:
            from lmetric.server.fleet.priority import Priorities

            self.priority = Priorities(self)
        self.cuts = self.joins or self.fetches_prefixes  # whether a plan may have several segments
        self.transfer_seconds_per_token: float = self.router.learned()["fetch_seconds_per_token"] or 0.0
        self.requests = 0  # placed so far
        self.ineligible: Counter[str] = Counter()  # by plan: requests that must not have it
        self.retried: Counter[str] = Counter()  # failed attempts that another engine followed, by kind
        self.failovers: Counter[str] = Counter()  # continued streams, by outcome
        self.not_resumable: Counter[str] = Counter()  # streams that could not continue, by reason
        self.kv_transfers: Counter[str] = Counter()  # by outcome
        self.fetch_outcomes: Counter[str] = Counter()
        self.encodings: Counter[str] = Counter()  # images, sounds and videos, by outcome
        # Called after each change of its engines' roles, before the core router may choose them.
        self.on_role: Callable[[], object] = lambda: None
        # Called with an engine that answered that it does not serve a model that it lists.
        self.look_again: Callable[[Engine], None] = lambda engine: None
        self.unserved_since: float | None = time.monotonic()  # None: the model has engines
        self.is_passing = False  # it has no engines, and had one only between two moves
        self.logged: dict[str, tuple[int, float]] = {}  # by message: decisions so far, and log time
        # By property, the names of the engines that have it (`_note`).
        self._with: dict[str, set[str]] = {
            name: set() for name in ("one role", "at once", "in turn", "parses")
        }
        self._review_due = False
        self._unusable: Recent[Unusable | None] = Recent()
        # The reason of the last failed merge, and the time until which it counts. By path, and
        # whether the reason is that engines parse its answers.
        self._not_joinable: dict[tuple[str, bool], tuple[str, float]] = {}
        self._pooled: ModelFacts | None = None

    def set_label_key(self, key: bytes) -> None:
        """Sets the key of the labels of decisions, 16 bytes.

        A label is valid only for its tenant, and cannot be guessed.
        """
        self.labels = DecisionLabels(f"{self.index}-" if self.index else "", key)

    def install(self, policies: Policies) -> None:
        """Replaces the policies. Raises LmetricError; then nothing has changed."""
        policies.install(self.router, self.policies)
        self.policies_since = time.monotonic()
        self.use(policies)
        names = {name: getattr(policies.settings, name) for name in POLICY_KNOBS}
        guard = {"guard": self.guard, "guard_reason": self.router.guard_reason}
        log.info("policies replaced", model=self.name or "any", **names, **guard)
        self.warn_of_policies()

    def use(self, policies: Policies) -> None:
        """Takes the settings of policies that are installed, or equal to the installed ones."""
        if self.trials is not None:
            policies.also_reads(self.trials.canary.built)
        self.policies = policies

    def trials_for(self, policies: Policies) -> Trials | None:
        """Returns what tries policies, with these policies; None: nothing was ever on trial."""
        on_trial = policies.shadow is not None or policies.canary is not None
        return self.try_policies() if on_trial else self.trials

    def try_policies(self) -> Trials:
        """Returns what tries policies. It is made once."""
        if self.trials is None:
            self.trials = load_trials()(self.name, self.router, lambda: self.policies, install=self.install)
        return self.trials

    def learn_images(self, images: Iterable[Image], call: ParsedRequest) -> None:
        """Starts to learn unknown images of a request."""
        if self._images is None:
            from lmetric.server.fleet.images import Images

            self._images = Images(
                self.name,
                self.engines,
                tokenizer=lambda: self.tokenizers.current,
                name_for=self.names.name_for,
            )
        self._images.learn(images, call)

    @property
    def images_waiting(self) -> int:
        """The number of images that are not learned yet."""
        return 0 if self._images is None else self._images.waiting

    def close(self) -> None:
        """Ends the background work of the model."""
        self.kv.close()
        if self._images is not None:
            self._images.close()

    def formula(self, arm: str, at: float) -> str | None:
        """Returns the score expression that decided at a time, seconds on the monotonic clock.

        ``arm``: `stable` or `canary`. None: the policy has changed since, or is no expression.
        """
        if arm == "canary":
            if self.trials is None:
                return None
            canary = self.trials.canary
            is_last = canary.run is not None and canary.run.started <= at
            return canary.built.formula if is_last and canary.built is not None else None
        return self.policies.first.formula if self.policies_since <= at else None

    def replace_indicators(self, declared: Mapping[str, IndicatorConfig]) -> dict[str, None]:
        """Replaces the declared indicators. Raises LmetricError; then nothing has changed.

        Returns the indicators that `drop_indicators` must drop for each engine.
        """
        new = Indicators(declared)
        gone = [name for name, each in self.indicators.declared.items() if declared.get(name) != each]
        self.indicators = new
        return dict.fromkeys(gone)

    def drop_indicators(self, engine: Engine, gone: dict[str, None]) -> None:
        """Drops an engine's values of replaced indicators."""
        engine.missing_metrics = []
        engine.pushed = {name: value for name, value in engine.pushed.items() if name not in gone}
        self.router.report_load(engine.name, extra=gone)

    @staticmethod
    def fallbacks(counts: Mapping[str, Any]) -> int:
        """Returns the number of decisions by fallbacks, from `Router.policy_fallbacks`."""
        return int(counts["errors"] + counts["overruns"] + counts["paused"])

    @property
    def guard(self) -> str:
        """The state of the hot-spot guard: on or off."""
        return "on" if self.router.stats(instances=False)["guard_on"] else "off"

    def warn_of_policies(self) -> None:
        """Logs problems of the policies on an idle fleet."""
        model = self.name or "any"
        for warning in self.router.policy_warnings():
            log.warning("policy scores no engine", model=model, reason=warning)

    def add(self, engine: Engine) -> list[str]:
        """Adds an engine. Returns the names of models that appeared with it."""
        self.router.add_instance(
            engine.name,
            cache_blocks=engine.config.cache_blocks or self.settings.cache_blocks,
            role=_placed(engine.role),
            group=engine.config.group_label,
        )
        self.router.update_instance(engine.name, healthy=False, draining=engine.held or engine.encodes)
        engine.service.in_service = False
        engine.model = self
        self.engines[engine.name] = engine
        if self.addresses is not None:
            self.addresses.add(engine)
        self.unserved_since, self.is_passing = None, False
        self.weights.due = True
        self._apply_role(engine)
        if engine.healthy:  # an engine that is down changes the service of no other engine
            self.review(engine)
        return self.names.update(engine.name, engine.capabilities.models)

    def prioritize(self, engine: Engine) -> None:
        """Decides by an engine's capabilities whether the router sets values of its requests."""
        engine.prioritized = None
        if self.priority is not None or engine.boosts:
            from lmetric.server.fleet.priority import prioritized

            engine.prioritized = partial(prioritized, engine)

    def hold(self, engine: Engine, *, one_of_many: bool) -> None:
        """Handles a change of an engine's `held`.

        ``one_of_many``: the review waits for further changes in this turn of the event loop.
        """
        self.router.update_instance(engine.name, draining=engine.held or engine.encodes)
        if not one_of_many:
            self.review(engine)
        elif not self.outliers.calm and not self._review_due:
            # If no engine is ejected or full, a change of `held` needs no review.
            self._review_due = True
            asyncio.get_running_loop().call_soon(self.review)
        if self.changes is not None and engine.held and engine.in_service and not engine.encodes:
            self.changes.leaves(engine)

    def sends_prefixes(self, name: str) -> bool:
        """Whether other engines still fetch the prefixes of an engine that leaves."""
        return self.changes is not None and self.changes.sends(name)

    def review(self, changed: Engine | None = None) -> None:
        """Decides anew which engines are in service, and updates the core router.

        ``changed``: only this engine has changed.
        """
        now = time.monotonic()
        self.retry_budget.follow(self.requests, now)
        if changed is None:
            self._review_due = False
            engines = self.outliers.review(self.engines.values(), now)
        else:
            engines = self.outliers.review_one(changed, self.engines.values(), now)
        for engine in engines:
            if self.changes is not None and engine.in_service and engine.cold and not engine.encodes:
                self.changes.joins(engine)  # before it can get a request
            engine.cold &= not engine.in_service
            self.router.update_instance(engine.name, healthy=engine.service.in_service)
        notices = self.outliers.notices
        while notices:
            notice = notices.pop(0)
            log.warning(notice.event, model=self.name, **notice.details)

    def blame(self, engine: Engine, client: str, reason: str, *, proven: bool) -> None:
        """Counts a request that failed at an engine.

        `proven`: another engine answered it.
        """
        if engine.model is self:
            now = time.monotonic()
            self.outliers.failed(engine, self.engines.values(), client, proven=proven, reason=reason, now=now)
            self.review()

    def saturated(self, engine: Engine, seconds: float) -> None:
        """Gives an engine no new requests for its Retry-After, while another engine is free."""
        if engine.model is self:
            self.outliers.saturated(engine, seconds, time.monotonic())
            self.review()

    def suspect(self, reasons: str) -> None:
        """Counts a request that failed in the same way on two engines."""
        self.outliers.suspect(reasons, time.monotonic())

    def probed(self, engine: Engine, error: str | None) -> None:
        """Handles the result of a probe of an ejected engine; ``error``: None if it succeeded."""
        if engine.model is self:
            self.outliers.probed(engine, error, time.monotonic())
            self.review()

    def remove(self, name: str) -> list[str]:
        """Removes an engine. Its running requests continue.

        Returns the names of models that no engine lists any more.
        """
        engine = self.engines.pop(name)
        if self.addresses is not None:
            self.addresses.remove(engine)
        if self.changes is not None:
            self.changes.forget(name)
        engine.model = None
        for names in self._with.values():
            names.discard(name)
        self.encoders.pop(name, None)
        self.kv.unwire(name)
        engine.upstream.close()
        self.router.remove_instance(name)
        self._see_cuts()
        self.weights.due = True
        if not self.engines:
            self.unserved_since = time.monotonic()
        return self.names.remove(name)

    def begin_empty(self, engines: Sequence[Engine]) -> None:
        """Forgets what engines have cached: their caches or their weights are new."""
        self.kv.begin_empty(engines)

    def set_role(self, engine: Engine) -> None:
        """Updates the core router after a possible change of an engine's role."""
        self._apply_role(engine)
        self.review(engine)

    def _apply_role(self, engine: Engine) -> None:
        role, handover = engine.role, engine.handover
        apart = role in ("prefill", "decode")
        self.router.update_instance(engine.name, role=_placed(role), draining=engine.held or engine.encodes)
        self._note(engine, "one role", apart)
        if engine.encodes:
            self.encoders[engine.name] = engine
        else:
            self.encoders.pop(engine.name, None)
        self._see_cuts()
        connector = None
        if handover:
            from lmetric.engines.connectors import CONNECTORS

            connector = CONNECTORS.get(handover.connector)
        fetches = (
            self.splits
            or self.fetches_prefixes
            or self.changes is not None
            or (self.mover is not None and self.mover.by != "recompute")
        )
        between_equals = fetches and connector is not None and not connector.at_once
        engine.connector = does = connector if apart or (between_equals and role == "both") else None
        self._note(engine, "at once", does is not None and does.at_once)
        self._note(engine, "in turn", does is not None and not does.at_once)
        self._note(engine, "parses", engine.parses)
        if self.splits or self.fetches_prefixes:
            self.router.update_instance(engine.name, handoff=self._cuts_of(engine))
        elif self.mover is not None:
            self.router.update_instance(engine.name, handoff="output")  # by recomputation
        if self.settings.binding == "auto":
            self.router.configure(binding="late" if self.binds_late else "early")
        engine.unfit = None
        rank, capabilities = engine.config.data_parallel_rank, engine.capabilities
        reported = capabilities.role
        if engine.identified and rank is not None and capabilities.data_parallel_rank != rank:
            engine.unfit = f"it did not confirm data_parallel_rank {rank}"
            if capabilities.no_events is not None:
                flags = flags_for(engine.adapter.flags, engine.kv_events)
                fix = capabilities.events_fix or flag_fix(flags, "kv_events")
                engine.unfit = f"{capabilities.no_events}; {fix}" if fix else capabilities.no_events
        elif reported not in (None, role) and "encode" in (role, reported):
            engine.unfit = f"role {role}, but it was started as {reported}"
        elif apart and engine.identified:
            if does is None:
                engine.unfit = (
                    f"role {role}, but {engine.capabilities.no_handover or 'it has no KV transfer'}"
                )
            elif does.needs_started_role and does.at_once and reported != role:
                engine.unfit = f"role {role}, but it was started as {reported or 'another role'}"
        self.on_role()

    def _note(self, engine: Engine, what: str, true: bool) -> None:
        (self._with[what].add if true else self._with[what].discard)(engine.name)

    def _cuts_of(self, engine: Engine) -> Handoff:
        """Returns the positions at which an engine can hand off a request, and continue one."""
        handover = engine.handover
        if engine.connector is None:
            return "output" if self.settings.split_recompute or not self.splits else "nowhere"
        if self.fetches_prefixes and engine.role != "both":
            return "output"  # its plans split only at the prompt's end
        # A split inside the prompt needs the prompt's tokens, equal to the engine's own.
        known = engine.tokens_differ is None
        return "anywhere" if known and handover is not None and handover.bidirectional else "output"

    def _see_cuts(self) -> None:
        """Updates `cuts` from the engines' roles and the configuration."""
        self.cuts = self.joins or self.fetches_prefixes or self.disaggregates

    @property
    def binds_late(self) -> bool:
        """Whether the decode engine is chosen after the prefill."""
        if self.settings.binding != "auto":
            return self.settings.binding == "late"
        return not self._with["at once"]

    @property
    def parses(self) -> bool:
        """Whether an engine parses the token ids of other engines."""
        return bool(self._with["parses"])

    @property
    def prefills_apart(self) -> bool:
        """Whether a prefill may have a body of its own."""
        return bool(self._with["in turn"])

    def prefill_seconds(self, engine: Engine, tokens: int) -> float:
        """Returns the expected seconds to prefill this many tokens, by the measured rate."""
        rate = self.router.prefill_rate(engine.name) if engine.model is self else None
        return tokens / (rate or UNLEARNED_TOKENS_PER_SECOND)

    @property
    def disaggregates(self) -> bool:
        """Whether some engines serve only prompts or only answers."""
        return bool(self._with["one role"])

    def queued_prefill_seconds(self, engine: Engine) -> float:
        """Returns the expected seconds until an engine has computed all prompts placed on it.

        Infinite if no prefill rate was measured.
        """
        rate = self.router.prefill_rate(engine.name) if engine.model is self else None
        if not rate:
            return math.inf
        return self.router.indicators_of(engine.name, ["bound_tokens"])["bound_tokens"] / rate

    @property
    def salts_messages(self) -> bool:
        """Whether all engines read `cache_salt` on /v1/messages."""
        return all(engine.adapter.salts_messages for engine in self.engines.values())

    def fetch_reason(self, path: str, call: ParsedRequest) -> str | None:
        """Returns the reason why a request must not get a prefix fetch; None: it may."""
        if _is_too_large(path, call):
            return LARGE_BODY_REASON
        if why := fetch_ineligibility(path, call.request, tokens=call.tokens is not None):
            return why
        if self.tokenizers.current is None:
            return "the model's tokenizer is not known"
        return self._why_not_joinable(path)

    def split_reason(self, path: str, call: ParsedRequest) -> str | None:
        """Returns the reason why a request must neither be split nor moved; None: it may."""
        if not call.stream and not self.splits:
            return "its answer is not streamed, so its tokens are not known before its end"
        if _is_too_large(path, call):
            return LARGE_BODY_REASON
        if why := split_ineligibility(path, call.request, tokens=call.tokens is not None):
            return why
        if self.tokenizers.current is None:
            return "its answer cannot be merged: the model's tokenizer is not known"
        return self._why_not_joinable(path)

    def failover_reason(self, path: str, call: ParsedRequest) -> Ineligible | None:
        """Returns the reason why no other engine can continue the request's stream; None: one can.

        Counts the reason.
        """
        if self.tokenizers.current is None and path in MERGEABLE_PATHS:
            why: Ineligible | None = Ineligible("tokenizer", "the model's tokenizer is not known")
        elif _is_too_large(path, call):
            why = Ineligible("large_body", LARGE_BODY_REASON)
        else:
            why = failover_ineligibility(path, call, parses=self.parses)
        if why is None and not self.parses and self._why_not_joinable(path, (True,)):
            why = NOT_PARSED
        if why is None and (joined := self._why_not_joinable(path, (False,))):
            why = Ineligible("not_mergeable", joined)
        if why is not None:
            self.not_resumable[why.name] += 1
        return why

    def count_ineligible(self, split_reason: str | None, fetch_reason: str | None) -> None:
        """Counts a request that must not have a plan. None: it may have the plan."""
        if split_reason is not None:
            self.ineligible["split_or_migration"] += 1
        if fetch_reason is not None:
            self.ineligible["prefix_fetch"] += 1

    def _why_not_joinable(self, path: str, kinds: tuple[bool, ...] = (False, True)) -> str | None:
        """Returns the reason why answers of a path cannot be merged; None: they can.

        ``kinds``: of answers: False: text; True: parsed by their engines.
        """
        for parsed in kinds:
            why, until = self._not_joinable.get((path, parsed), (None, 0.0))
            if why is not None:
                if time.monotonic() < until:
                    return why
                del self._not_joinable[path, parsed]  # the next request tries again
        return None

    def not_joinable(self, path: str, why: str) -> None:
        """Records that the text of answers of a path cannot be merged.

        Its requests stay whole for `NOT_JOINABLE_SECONDS`, or until an engine comes back with
        another version. Engines that parse still continue answers that are parsed.
        """
        parsed = PARSED in why
        if self._why_not_joinable(path, (parsed,)) is None:
            until = time.monotonic() + NOT_JOINABLE_SECONDS
            self._not_joinable[path, parsed] = (f"its answer cannot be merged: {why}", until)
            if parsed and self.parses and not self.joins:
                return  # nothing changes
            log.warning(
                "answers of a path cannot be merged; its requests are not split for a while",
                model=self.name,
                path=path,
                reason=why,
                seconds=NOT_JOINABLE_SECONDS,
            )

    def retry_joins(self) -> None:
        """Allows merges again, after an engine has changed."""
        self._not_joinable.clear()

    def wire(self, engine: Engine | None = None) -> None:
        """Applies an engine's block size and cache size, and sets up its KV events.

        If properties of the whole model have changed, all its engines are updated. Without an
        engine, only such a change has an effect.
        """
        if engine is not None:
            self._take_block_size(engine)
        pooled = ModelFacts(
            self.block_size, self.block_size_from, self.tokenizers.current is not None, self.tokenizers.note
        )
        wired = [engine] if engine is not None else []
        if pooled != self._pooled:
            self._pooled = pooled
            wired = [
                each
                for each in self.engines.values()
                if (each.identified and each.misfit is None) or each is engine
            ]
        for each in wired:
            held = each.capabilities.cache_tokens
            if held and not (each.config.cache_blocks or self.settings.cache_blocks):
                self.router.update_instance(each.name, cache_blocks=self._blocks_of(held))
            self.router.update_instance(each.name, max_loras=each.capabilities.max_loras)
            self.kv.wire(each, pooled)

    def _take_block_size(self, engine: Engine) -> None:
        """Applies an engine's block size to the index, unless another engine has set it."""
        capabilities = engine.capabilities
        if self.settings.block_size is not None or capabilities.block_size is None:
            return
        # Without events, blocks below the default size only cost memory and time.
        size = (
            capabilities.block_size
            if capabilities.event_sources
            else max(capabilities.block_size, DEFAULT_BLOCK_SIZE)
        )
        if size != self.block_size and self._first_with(self.block_size) is None:
            self.router.configure(block_size=size)
            self.block_size, self.block_size_from = size, engine.name
        source = self.engines.get(self.block_size_from)
        if source is None or source.capabilities.block_size != self.block_size:
            self.block_size_from = self._first_with(self.block_size) or self.block_size_from

    def _first_with(self, block_size: int) -> str | None:
        """Returns the first engine that reports a block size."""
        names = (e.name for e in self.engines.values() if e.capabilities.block_size == block_size)
        return next(names, None)

    def _blocks_of(self, tokens: int) -> int:
        """Returns the index blocks that match an engine's cache of this many tokens."""
        if self.tokenizers.current is not None:
            blocks = tokens // self.block_size
        else:
            text_bytes = int(tokens * self.ratio.bytes / self.ratio.tokens)
            blocks = text_bytes // self.settings.text_block_bytes
        return min(max(1, blocks), MAX_INDEX_BLOCKS)

    @property
    def unusable(self) -> Unusable | None:
        """The reasons why none of its engines gets new requests; None: one of them does."""
        return self._unusable.get(len(self.engines), lambda: unusable(self.engines.values()))

    def engines_at(self, address: str) -> Collection[Engine]:
        """Its engines at IP:PORT, or at all ports of an IP, if gateways name engines by address."""
        return () if self.addresses is None else self.addresses.at(address)

    def usable_text(self) -> str:
        """Returns how many of its engines get requests."""
        usable = sum(engine.service.in_service for engine in self.engines.values())
        return f"{usable} of {len(self.engines)} usable"

    def no_engine_error(self, error: NoInstanceError, name: str | None = None) -> ApiError:
        """Returns the error for a request that no engine can accept now.

        ``name``: the model's name in the request, which perhaps only some engines serve.
        """
        serving = self.names.engines_of(name)
        if serving is None:
            return no_engine_error(self.name, error, self.unusable)
        if not serving:
            message = f"{name}: no engine of {self.name} lists it in {MODELS}"
            return ApiError(503, message, code="no_engine", headers={"retry-after": "2"})
        return no_engine_error(name, error, unusable(self.engines[each] for each in serving))


def load_trials() -> type[Trials]:
    """Imports policies on trial, which only a shadow, a canary and `admin.enabled` need."""
    from lmetric.server.fleet.trials import Trials

    return Trials


def _placed(role: Role) -> PlacedRole:
    """Returns an engine's role for the core router, which places nothing on encoder engines."""
    return "both" if role == "encode" else role


def _router(name: str, settings: PoolSettings, policies: Policies, block_size: int) -> Router:
    """Returns the core router of a model. Raises LmetricError."""
    first, decode, routing = policies.first, policies.decode, settings.routing
    return Router(
        first.policy,
        knobs=first.knobs,
        block_size=block_size,
        text_block_bytes=settings.text_block_bytes,
        domain=[name],
        index_bytes=settings.index_bytes,
        record_bytes=settings.record_bytes,
        tiers=settings.tiers,
        tier_load_ratio=settings.tier_load_ratio,
        **routing.options,
        step_time=_step_time(settings.profile),
        seed=settings.seed,
        decode_policy=decode.policy,
        decode_knobs=decode.knobs,
        binding=routing.binding,
        colocate=settings.colocate,
        offers=settings.offers,
    )


def _step_time(profile: str | None) -> dict[str, float] | None:
    """Returns a profile's constants; None without a profile. Raises ProfileError."""
    if profile is None:
        return None
    from lmetric.profiles import load_profile

    return load_profile(profile).constants()


def _is_too_large(path: str, call: ParsedRequest) -> bool:
    """Returns whether a body must not be parsed or written on the event loop."""
    size = len(call.body)
    return path in MERGEABLE_PATHS and (
        size > MAX_WRITTEN_BYTES or (size > MAX_PARSED_BYTES and not call.parsed)
    )
