"""Models and their engines: one router per model, the engines' health, and who serves what."""

import asyncio
import difflib
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson
import structlog
from pydantic import SecretStr

from lmetric._core import NoInstanceError, Router, decision_tag
from lmetric.config import ADMIN, CONFIGURED, EngineConfig, ModelConfig, PoolSettings, Role, ServerConfig
from lmetric.engines.adapter import Adapter, Capabilities, Handover, Load
from lmetric.engines.handover import CONNECTORS, Connector
from lmetric.engines.identify import UNKNOWN, identify
from lmetric.policies import Policy
from lmetric.profiles import load_profile
from lmetric.server import priority
from lmetric.server.allowed import AllowedEngines
from lmetric.server.kv_feed import KvFeed
from lmetric.server.modes import UNASKED, Pooled
from lmetric.server.mover import Mover
from lmetric.server.openai import ApiError, Call, nobody_takes
from lmetric.server.refill import Refill
from lmetric.server.uncut import uncut_reason, unpulled_reason
from lmetric.server.upstream import Upstream, UpstreamError
from lmetric.tokens import NotVerifiable, PromptTokenizer, TokenizerError, find_folder, verify

DEFAULT_BLOCK_SIZE = 16  # until an engine tells
UNLEARNED_TOKENS_PER_SECOND = 8_000.0  # as the router assumes, until an instance was seen to prefill
# Over the core's own. vLLM holds what a request had that pulled for another lease behind its end: full of
# that, an engine would serve nobody.
PULL_SETTINGS = {"most_kv_usage": 0.8}
NOT_JOINABLE_SECONDS = 300.0  # that requests of a path stay whole after an answer that could not be merged
ASK_AGAIN_SECONDS = 30.0  # where a page of an engine did not answer

NAMED_ENGINES = 5  # in one message, with the reason of each

log = structlog.get_logger("lmetric.fleet")

# A near name is looked for if the unknown one is at most this long, among at most so many.
HINT_NAME_LENGTH = 200
HINT_NAMES = 500

# That a model is answered for with 503 when no engine serves it: longer than engines take to load one.
UNSERVED_SECONDS = 3600.0


class Engine:
    """One engine of a pool: its connections, its health, what it is and can do.

    ``source`` names who told of it, ``model`` is the model it was told to serve (None: it is asked). It gets
    no requests while it is ``draining`` (an administrator said so), ``leaving`` (its source names it no
    more), or not ``ready`` (its source says so).
    """

    def __init__(
        self, config: EngineConfig, server: ServerConfig, source: str = CONFIGURED, model: str | None = None
    ) -> None:
        self.config = config
        self.source = source
        self.model = model
        self.name = config.label
        self.host = urlsplit(config.url).hostname or ""
        allowed = AllowedEngines(server.admin.allowed_engines) if source == ADMIN else None
        self.upstream = Upstream(config, server, allowed)
        self.health = server.health
        self.pool: Pool | None = None
        # What it told when it was last asked; it is asked again when it comes back.
        self.identified = False
        self.ask_again_at = math.inf
        self.adapter: Adapter = UNKNOWN
        self.capabilities = Capabilities("unknown")
        self.mode = UNASKED
        self.refill: Refill | None = None
        self.role_set: Role | None = None  # by an administrator
        self.connector: Connector | None = None  # where it serves halves of requests
        self.unfit: str | None = None  # why it cannot do what its role asks for
        # Of which prompt it makes other tokens than the tokenizer that it was last held against.
        self.tokens_differ: str | None = None
        self.compared: PromptTokenizer | None = None
        self.lost_blocks = False  # taken for gone, so its blocks were forgotten
        self.load_reports: Counter[str] = Counter()  # by where they came from
        self.load_error: str | None = None
        self.healthy = False
        self.draining = False
        self.switches = 0  # of its role, on their way: it gets no requests meanwhile
        self.leaving = False
        self.ready = True
        self.failures = 0
        self.successes = 0
        self.last_error: str | None = None

    @property
    def role(self) -> Role:
        """What it is asked to do: as an administrator or the configuration says, else as it tells."""
        return self.role_set or self.config.role or self.capabilities.role or "both"

    @property
    def handover(self) -> Handover | None:
        """How it hands KV caches over: as it tells, else as the configuration says."""
        told, asked = self.capabilities.handover, self.pool.settings.handover if self.pool else "auto"
        if asked == "auto" or (told is not None and told.connector == asked):
            return told
        return Handover(asked)

    @property
    def held(self) -> bool:
        """Whether it gets no new requests, however healthy."""
        return self.draining or self.switches > 0 or self.leaving or not self.ready

    @property
    def unusable(self) -> str | None:
        """Why it gets no new requests; None: it gets them."""
        if self.draining:
            return "draining"
        if self.leaving:
            return f"no longer listed by {self.source}"
        if not self.ready:
            return f"not ready, according to {self.source}"
        return None if self.healthy else self.last_error or "not checked yet"

    @property
    def running(self) -> int:
        """Requests of ours on their way to it and back."""
        return self.upstream.in_use

    def set_key(self, key: SecretStr | None) -> None:
        """Has it sent another API key from the next request on."""
        self.config = self.config.model_copy(update={"api_key": key})
        self.upstream.set_key(key)

    def hold(self) -> None:
        """Tells the router whether it is held; to be called when that changed."""
        if self.pool is not None:
            self.pool.router.drain(self.name, self.held)

    def succeeded(self) -> None:
        """A good check or answer."""
        self.failures = 0
        if not self.healthy:
            self.successes += 1
            if self.successes >= self.health.up_after:
                self._turn(True, None)

    def failed(self, kind: str, reason: str) -> None:
        """A failed check or request. A refusal takes the engine out at once, others when they repeat; a lack
        of the router's own resources says nothing of the engine."""
        if kind == "resources":
            return
        self.successes = 0
        self.failures += 1
        self.last_error = reason
        if self.healthy and (kind == "refused" or self.failures >= self.health.down_after):
            self._turn(False, reason)
        if kind == "refused" and not self.lost_blocks:
            self._forget()

    def report(self, load: Load, source: str) -> None:
        """Takes in what it says of its load; ``source`` is where."""
        if load and self.pool is not None:
            self.load_reports[source] += 1
            self.pool.router.engine_report(
                self.name, waiting=load.waiting, running=load.running, kv_usage=load.kv_usage
            )

    def ask_anew(self) -> None:
        """To be called where it may be another process: with other blocks, another version, other tokens."""
        self.identified = False
        self.compared = None

    def _forget(self) -> None:
        """Nobody listens there: the process is gone, and with it its cache and what others asked of it."""
        if self.pool is not None:
            self.pool.router.blocks_cleared(self.name)
            self.pool.router.engine_report(self.name, waiting=0, running=0)
            self.lost_blocks = True

    def _turn(self, healthy: bool, reason: str | None) -> None:
        self.healthy = healthy
        self.successes = 0
        if not healthy:
            self.ask_anew()
        if self.pool is not None:
            self.pool.router.set_health(self.name, healthy)
            if healthy:
                log.info("engine up", model=self.pool.name, engine=self.name)
            else:
                log.warning("engine down", model=self.pool.name, engine=self.name, reason=reason)


# Of BytesPerToken: what one more request leaves of the earlier ones; between which bounds texts of any
# language and tokenizer lie; and what a chat template may add to a short text.
LEARNED_KEEP = 0.99
MIN_BYTES_PER_TOKEN = 0.5
MAX_BYTES_PER_TOKEN = 16.0
TEMPLATE_TOKENS = 512


@dataclass(slots=True)
class BytesPerToken:
    """Bytes of prompt text a token, learned from the engines' usage reports with a fading memory."""

    bytes: float = 8_000.0
    tokens: float = 2_000.0
    implausible: int = 0  # counts that were not learned from

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Takes in one request's true count, unless no engine can mean it."""
        if prompt_bytes <= prompt_tokens * MAX_BYTES_PER_TOKEN and (
            prompt_bytes >= (prompt_tokens - TEMPLATE_TOKENS) * MIN_BYTES_PER_TOKEN
        ):
            self.bytes = self.bytes * LEARNED_KEEP + prompt_bytes
            self.tokens = self.tokens * LEARNED_KEEP + prompt_tokens
        else:
            self.implausible += 1

    def tokens_of(self, prompt_bytes: int) -> int:
        """Estimated tokens of a text."""
        return int(prompt_bytes * self.tokens / self.bytes) + 1


class Pool:
    """A model: its router and its engines."""

    def __init__(self, index: int, name: str, adapters: list[str], settings: PoolSettings) -> None:
        self.index = index
        self.name = name
        self.adapters = list(adapters)
        self.settings = settings
        self.ratio = BytesPerToken()
        # How prompts become tokens; None: they are matched as text, and `tokenizer_note` says why.
        self.tokenizer: PromptTokenizer | None = None
        self.tokenizer_note: str | None = "no engine has told its model's folder yet"
        self.text_prompts: Counter[str] = Counter()  # by why they are no tokens
        self._root: str | None = None
        if settings.tokenizer == "off":
            self.tokenizer_note = "tokenizer: off"
        elif settings.tokenizer is not None:
            self._use(self._load(settings.tokenizer))
        self.engines: dict[str, Engine] = {}
        self.created = int(time.time())
        self._label_prefix = f"{index}-" if index else ""
        self._label_key = secrets.token_bytes(16)
        self.unserved_since: float | None = time.monotonic()  # None: it has engines
        self.block_size = settings.block_size or DEFAULT_BLOCK_SIZE
        self.block_size_from = "default" if settings.block_size is None else "the configuration"
        policy = Policy.from_config(settings.policy, knobs=settings.knobs)
        decode_policy = Policy.from_config(settings.decode_policy, knobs=settings.decode_knobs)
        self.unscored_logged = (0, -math.inf)  # choices without a score that are logged, and when
        self.router = Router(
            policy,
            knobs=settings.knobs if isinstance(policy, str) else None,
            block_size=self.block_size,
            text_block_bytes=settings.text_block_bytes,
            domain=[name],
            index_bytes=settings.index_bytes,
            receipt_bytes=settings.receipt_bytes,
            guard=settings.guard,
            guard_window_seconds=settings.guard_window_seconds,
            guard_period_seconds=settings.guard_period_seconds,
            guard_classes=settings.guard_classes,
            guard_min_requests=settings.guard_min_requests,
            guard_phase2_factor=settings.guard_phase2_factor,
            guard_release_factor=settings.guard_release_factor,
            step_time=_step_time(settings.profile),
            seed=settings.seed,
            decode_policy=decode_policy,
            decode_knobs=settings.decode_knobs if isinstance(decode_policy, str) else None,
            binding="late" if settings.binding == "auto" else settings.binding,
            colocate=settings.colocate,
        )
        priority.set_up(self.router, settings)
        # Whether requests may be cut between equals.
        self.splits = settings.cuts_between_equals
        if settings.split_force_at is not None:
            self.router.set_split("force", at=settings.split_force_at)
        elif self.splits:
            self.router.set_split(settings.split_by, **settings.split_settings)
        self.pulls = settings.pulls_prefixes  # whether engines fetch prefixes from each other
        self.pull_outcomes: Counter[str] = Counter()
        self.transfer_seconds_per_token = 0.0
        if self.pulls:
            self.router.set_pull(True, **(PULL_SETTINGS | settings.pull_settings))
            cost = self.router.pull_cost()
            assert cost is not None  # just set
            self.transfer_seconds_per_token = cost[0]  # as configured: none was seen yet
        self.mover: Mover | None = None  # where requests move while they run
        if settings.reschedule != "none":
            self.router.set_rescheduling(settings.reschedule, **settings.reschedule_settings)
            self.mover = Mover(self, settings)
        # Whether one answer may come from several engines of role both.
        self.joins = self.splits or self.mover is not None
        self.orders = settings.priority != "none"  # whether requests get a priority from the router
        # By path: why answers could not be merged lately, and until when that is believed.
        self._not_joinable: dict[str, tuple[str, float]] = {}
        self.kv = KvFeed(self.router)
        self.cuts = False  # whether a plan may have several segments
        self._see_cuts()
        self.handovers: Counter[str] = Counter()  # from prefill to decode engines, by what came of them
        self._pooled: Pooled | None = None
        self.asking = asyncio.Lock()  # for a tokenizer: the others wait until it is known

    def report_policy(self) -> None:
        """Logs whether the hot-spot guard is on, and what the policies cannot score on an idle fleet."""
        model = self.name or "any"
        on = bool(self.router.stats()["guard_on"])
        log.info(
            "hot-spot guard setting", model=model, guard="on" if on else "off", why=self.router.guard_reason
        )
        for warning in self.router.policy_warnings():
            log.warning("policy scores no engine", model=model, reason=warning)

    def add(self, engine: Engine) -> None:
        """Takes in an engine."""
        self.router.add_instance(
            engine.name,
            cache_blocks=engine.config.cache_blocks or self.settings.cache_blocks,
            role=engine.role,
        )
        self.router.set_health(engine.name, engine.healthy)
        engine.pool = self
        engine.hold()
        self.engines[engine.name] = engine
        self.unserved_since = None
        self.set_role(engine)

    def remove(self, name: str) -> None:
        """Forgets an engine; its running requests end as they end."""
        engine = self.engines.pop(name)
        engine.pool = None
        self.kv.unwire(name)
        engine.upstream.close()
        self.router.remove_instance(name)
        self._see_cuts()
        if not self.engines:
            self.unserved_since = time.monotonic()

    def set_role(self, engine: Engine) -> None:
        """Has the router heed an engine's role; to be called when it may have changed."""
        role, handover = engine.role, engine.handover
        self.router.set_role(engine.name, role)
        self._see_cuts()
        connector = CONNECTORS.get(handover.connector) if handover else None
        fetches = self.splits or self.pulls or (self.mover is not None and self.mover.by != "recompute")
        between_equals = fetches and connector is not None and not connector.at_once
        engine.connector = connector if role != "both" or between_equals else None
        if self.splits or self.pulls:
            self.router.set_cuts(engine.name, self._cuts_of(engine))
        elif self.mover is not None:
            self.router.set_cuts(engine.name, "output")  # by computing it again
        if self.settings.binding == "auto":
            connectors = [each.connector for each in self.engines.values()]
            self.router.set_binding("early" if any(each and each.at_once for each in connectors) else "late")
        engine.unfit = None
        if role != "both" and engine.identified:
            told, does = engine.capabilities.role, engine.connector
            if does is None:
                engine.unfit = (
                    f"role {role}, but {engine.capabilities.no_handover or 'it hands nothing over'}"
                )
            elif does.at_once and told != role:
                engine.unfit = f"role {role}, but it was started as {told or 'something else'}"
            elif does.at_once and self.settings.binding == "late":
                engine.unfit = (
                    "binding is late, but both legs have to be sent at once: set binding: early, or auto"
                )

    def _cuts_of(self, engine: Engine) -> str:
        """Where an engine can hand a request over, and take one."""
        handover = engine.handover
        if engine.connector is None:
            return "output" if self.settings.split_recompute or not self.splits else "nowhere"
        if self.pulls and engine.role != "both":
            return "output"  # its plans end at the prompt's end, and what was fetched is not handed on
        # Inside the prompt its tokens have to be known beforehand, and to be the engine's.
        known = engine.tokens_differ is None
        return "anywhere" if known and handover is not None and handover.bidirectional else "output"

    def _see_cuts(self) -> None:
        """Has the engines' roles, and what is configured, say whether a plan may have several segments."""
        roles = any(engine.role != "both" for engine in self.engines.values())
        self.cuts = self.joins or self.pulls or roles

    def prefill_seconds(self, engine: Engine, tokens: int) -> float:
        """Expected seconds for so many tokens of a prompt at an engine, by what it was seen to do."""
        rate = self.router.prefill_rate(engine.name) if engine.pool is self else None
        return tokens / (rate or UNLEARNED_TOKENS_PER_SECOND)

    def unpulled(self, path: str, call: Call) -> str | None:
        """Why nothing must be fetched for a request before it begins; None: it may be."""
        if why := unpulled_reason(path, call.request, tokens=call.tokens is not None):
            return why
        if self.tokenizer is None:
            return "the model's tokenizer is not known"
        return self._why_not_joinable(path)

    def uncut(self, path: str, call: Call) -> str | None:
        """Why a request must neither be cut between equals nor move; None: it may."""
        legs = self.mover is not None and self.mover.by == "legs"
        if not call.stream and not self.splits and not legs:
            return "its answer is not streamed: its tokens are not known before its end"
        if why := uncut_reason(path, call.request, tokens=call.tokens is not None):
            return why
        if self.tokenizer is None:
            return "its answer cannot be joined: the model's tokenizer is not known"
        return self._why_not_joinable(path)

    def _why_not_joinable(self, path: str) -> str | None:
        why, until = self._not_joinable.get(path, (None, 0.0))
        if why is not None and time.monotonic() >= until:
            del self._not_joinable[path]  # it is tried again
            return None
        return why

    def not_joinable(self, path: str, why: str) -> None:
        """Answers of this path cannot be merged: its requests stay whole for a while, or until an engine
        comes back as another version. Logged once a while."""
        if self._why_not_joinable(path) is None:
            until = time.monotonic() + NOT_JOINABLE_SECONDS
            self._not_joinable[path] = (f"its answer cannot be joined: {why}", until)
            log.warning(
                "requests stay whole for a while",
                model=self.name,
                path=path,
                reason=why,
                seconds=NOT_JOINABLE_SECONDS,
            )

    def retry_joins(self) -> None:
        """Tries to merge answers again: an engine is not what it was."""
        self._not_joinable.clear()

    @property
    def knows_tokens(self) -> bool:
        """Whether prompts given as text become token ids, as the engines' events have them."""
        return self.tokenizer is not None

    def wire(self, engine: Engine | None = None) -> None:
        """Uses what an engine told: sizes of blocks and cache, and how its cache can be known.

        Where what holds for all has changed by that, or (without an engine) by something else, all are wired.
        """
        if engine is not None:
            self._take_block_size(engine.capabilities)
        pooled = Pooled(self.block_size, self.block_size_from, self.knows_tokens)
        wired = [engine] if engine is not None else []
        if pooled != self._pooled:
            self._pooled = pooled
            wired = [each for each in self.engines.values() if each.identified or each is engine]
        for each in wired:
            held = each.capabilities.cache_tokens
            if held and not (each.config.cache_blocks or self.settings.cache_blocks):
                self.router.set_cache_blocks(each.name, self._blocks_of(held))
            self.kv.wire(each, pooled)

    def _take_block_size(self, told: Capabilities) -> None:
        """Takes an engine's block size for the index, unless that of another engine stands."""
        if self.settings.block_size is not None or told.block_size is None:
            return
        # Small blocks only cost where no events name them.
        size = told.block_size if told.event_sources else max(told.block_size, DEFAULT_BLOCK_SIZE)
        standing = [e.name for e in self.engines.values() if e.capabilities.block_size == self.block_size]
        if size != self.block_size and not standing:
            self.router.set_block_size(size)
            self.block_size = size
            standing = [e.name for e in self.engines.values() if e.capabilities is told]
        if standing and self.block_size_from not in standing:
            self.block_size_from = standing[0]

    def _blocks_of(self, tokens: int) -> int:
        """Blocks of the index that hold as much as an engine's cache of so many tokens."""
        if self.knows_tokens:
            return max(1, tokens // self.block_size)
        return max(1, int(tokens * self.ratio.bytes / self.ratio.tokens) // self.settings.text_block_bytes)

    def _load(self, folder: str | os.PathLike[str]) -> PromptTokenizer:
        settings = self.settings
        return PromptTokenizer.load(
            folder, chat_template=settings.chat_template, cache_bytes=settings.token_cache_bytes
        )

    def _use(self, tokenizer: PromptTokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokenizer_note = "; ".join(tokenizer.notes) or None
        log.info("tokenizer", model=self.name, folder=str(tokenizer.folder), note=self.tokenizer_note)

    def drop_tokenizer(self, reason: str) -> None:
        """From now on prompts are matched as text; said once in the log."""
        self.tokenizer = None
        self.tokenizer_note = reason
        log.warning("prompts are matched as text", model=self.name, reason=reason)

    async def set_tokenizer(self, root: str) -> None:
        """Takes the tokenizer of the model that an engine names as root, unless the configuration has one.

        Asked again with the same root, it does nothing. What cannot be used leaves prompts to be matched as
        text; ``tokenizer_note`` then says why.
        """
        if self.settings.tokenizer is not None or root == self._root:
            return
        self._root = root
        folder = find_folder(root)
        if folder is None and self.tokenizer is not None:
            return  # another engine has named one
        if folder is None:
            self.drop_tokenizer(f"the engine's model {root!r} is no folder of this machine; set tokenizer")
            return
        try:
            # Reading a large vocabulary takes a second.
            tokenizer = await asyncio.to_thread(self._load, folder)
        except TokenizerError as error:
            self.drop_tokenizer(str(error))
        else:
            self._use(tokenizer)

    async def compare_tokens(self, engine: Engine, seconds: float) -> None:
        """Holds the tokenizer against what an engine itself makes of some prompts, once for each engine.

        Raises UpstreamError where there is no connection to it.
        """
        tokenizer = self.tokenizer
        if tokenizer is None or engine.compared is tokenizer:
            return

        async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
            return await engine.upstream.post(path, orjson.dumps(body), seconds)

        try:
            differences = await verify(tokenizer, post, self.name)
        except (NotVerifiable, UpstreamError) as error:
            if isinstance(error, UpstreamError) and error.before_sending:
                raise
            log.info("tokens not compared", model=self.name, engine=engine.name, reason=str(error))
            return
        engine.compared = tokenizer
        engine.tokens_differ = str(differences[0]) if differences else None
        if differences:
            log.warning(
                "the engine makes other tokens of prompts",
                model=self.name,
                engine=engine.name,
                differences=[str(difference) for difference in differences],
            )

    @property
    def unusable(self) -> str | None:
        """Why none of its engines gets new requests; None: one does."""
        return unusable(self.engines.values())

    def nobody_takes(self, error: NoInstanceError) -> ApiError:
        """The error of a request that no engine can take now."""
        return nobody_takes(self.name, error, self.unusable)

    def decision_label(self, decision_id: int, tenant: str) -> str:
        """The label of a decision over all pools, `ID-TAG` or `POOL-ID-TAG`.

        The tag depends on the tenant and on a random key: nobody can guess a label, and a tenant's label
        is valid for that tenant alone.
        """
        return f"{self._label_prefix}{decision_id}-{decision_tag(self._label_key, decision_id, tenant)}"


def unusable(engines: Iterable[Engine]) -> str | None:
    """Why none of these engines gets new requests, engine by engine; None: one does."""
    reasons = []
    for engine in engines:
        reason = engine.unusable
        if reason is None:
            return None
        reasons.append(f"{engine.name}: {reason}")
    more = [f"and {len(reasons) - NAMED_ENGINES} more"] if len(reasons) > NAMED_ENGINES else []
    return "; ".join(reasons[:NAMED_ENGINES] + more) or "there are no engines"


def _step_time(profile: str | None) -> dict[str, float] | None:
    """A profile's constants. Raises ProfileError."""
    return None if profile is None else load_profile(profile).constants()


@dataclass(slots=True)
class Fleet:
    """All pools, and the engines whose model is not known yet."""

    config: ServerConfig
    pools: list[Pool] = field(default_factory=list)
    names: dict[str, tuple[Pool, str | None]] = field(default_factory=dict)
    unplaced: list[Engine] = field(default_factory=list)
    pools_made: int = 0

    def build(self) -> None:
        """Sets up what the configuration names. Raises LmetricError for an unknown policy or knob."""
        config = self.config
        for model in config.models:
            pool = self.pool(model.name, model)
            for engine in model.engines:
                pool.add(Engine(engine, config, model=model.name))
        if config.model is not None:
            self.pool(config.model)
        for engine in config.engines:
            self.add(engine)
        pools = list(self.pools)
        if not self.pools or self.unplaced or config.discovery:
            # A policy that cannot be built should be told now, not when the first engine answers.
            pools.append(Pool(0, "", [], config.pool_settings()))
        for pool in pools:  # those made later have the settings of one of them
            pool.report_policy()

    def add(self, config: EngineConfig, source: str = CONFIGURED, model: str | None = None) -> Engine:
        """Takes in an engine; one whose model is not known is asked for it. Raises LmetricError."""
        model = model or self.config.model
        engine = Engine(config, self.config, source, model)
        if model is None:
            self.unplaced.append(engine)
        else:
            self.pool(model).add(engine)
        return engine

    def remove(self, engine: Engine) -> None:
        """Forgets an engine; its running requests end as they end."""
        if engine.pool is not None:
            engine.pool.remove(engine.name)
        elif engine in self.unplaced:
            self.unplaced.remove(engine)
            engine.upstream.close()

    def pool(self, name: str, model: ModelConfig | None = None) -> Pool:
        """The pool of a model, made where it is new."""
        if name in self.names:
            return self.names[name][0]
        adapters = model.adapters if model else []
        pool = Pool(self.pools_made, name, adapters, self.config.pool_settings(model))
        self.pools_made += 1
        self.pools.append(pool)
        self.names[name] = (pool, None)
        for adapter in adapters:
            self.names[adapter] = (pool, adapter)
        return pool

    def forget_unserved(self, now: float) -> None:
        """Drops models that had no engine for long and that the configuration does not name."""
        named = {self.config.model, *(model.name for model in self.config.models)}
        for pool in list(self.pools):
            since = pool.unserved_since
            if since is None or now - since < UNSERVED_SECONDS or pool.name in named:
                continue
            if not pool.router.in_flight():
                self.pools.remove(pool)
                pool.kv.close()
                self.names = {name: known for name, known in self.names.items() if known[0] is not pool}
                log.info("model forgotten", model=pool.name, unserved_seconds=round(now - since))

    def engines(self) -> Iterator[Engine]:
        """All engines, placed or not."""
        for pool in self.pools:
            yield from pool.engines.values()
        yield from self.unplaced

    def find(self, model: str | None) -> tuple[Pool, str | None]:
        """The pool of a model, and the adapter where the name means one. Raises ApiError (400, 404, 503)."""
        known = self.names.get(model) if model is not None else None
        if known is not None:
            return known
        if not self.pools:
            raise ApiError(
                503,
                "no usable engine",
                engines=unusable(self.engines()),
                code="no_engine",
                headers={"retry-after": "2"},
            )
        if model is None:
            if len(self.pools) == 1:
                return self.pools[0], None
            raise ApiError(400, f"model is missing; served here: {self._list()}", param="model")
        # difflib takes time in proportion to both: a client chooses the one, and adapters may be many.
        comparable = len(model) <= HINT_NAME_LENGTH and len(self.names) <= HINT_NAMES
        near = difflib.get_close_matches(model, self.names, n=1) if comparable else []
        hint = f"did you mean {near[0]!r}?" if near else f"served here: {self._list()}"
        shown = repr(model if len(model) <= HINT_NAME_LENGTH else model[:HINT_NAME_LENGTH] + "…")
        raise ApiError(404, f"model {shown} is unknown; {hint}", param="model", code="model_not_found")

    def _list(self) -> str:
        names = sorted(self.names)
        return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")

    async def identify(self, engine: Engine) -> None:
        """Asks an engine what it is, places it where its model was not known, and wires it.

        A page that does not answer counts as missing, and is asked for again later. Raises ValueError where
        the engine's model was to be asked for and cannot be told, and UpstreamError where there is no
        connection to it.
        """

        unanswered = []

        async def ask(path: str) -> tuple[int, bytes]:
            try:
                return await engine.upstream.get(path, self.config.health.timeout)
            except UpstreamError as error:
                if error.before_sending:
                    raise
                unanswered.append(path)
                return 504, str(error).encode()

        before = engine.capabilities
        try:
            async with asyncio.timeout(3 * self.config.health.timeout):
                engine.adapter, engine.capabilities = await identify(ask)
        except (ValueError, TimeoutError) as error:
            reason = str(error) or f"its pages took longer than {3 * self.config.health.timeout:g} s"
            if engine.pool is None:
                raise ValueError(reason) from None
            unanswered.append(reason)
            engine.adapter, engine.capabilities = UNKNOWN, Capabilities("unknown", no_events=reason)
        told = engine.capabilities
        if engine.pool is None:
            self._place(engine)
        if engine.pool is None:
            return  # removed meanwhile
        pool = engine.pool
        base = told.base(pool.name)
        if base is not None and base.root is not None:
            async with pool.asking:
                await pool.set_tokenizer(base.root)
        await pool.compare_tokens(engine, self.config.health.timeout)
        if engine.pool is not pool:
            return  # removed meanwhile
        engine.identified = True
        engine.ask_again_at = time.monotonic() + ASK_AGAIN_SECONDS if unanswered else math.inf
        pool.wire(engine)
        pool.set_role(engine)
        if told == before:
            return
        pool.retry_joins()
        log.info(
            "engine identified",
            engine=engine.name,
            model=pool.name,
            kind=told.engine,
            version=told.version,
            block_size=told.block_size,
            cache_blocks=told.cache_blocks,
            load=", ".join(told.load_names) or "none",
            mode=engine.mode.name,
            reason=engine.mode.reason,
            role=engine.role,
        )
        if engine.handover is not None and (fault := engine.handover.fault) is not None:
            log.warning("engine hands over at a risk", engine=engine.name, model=pool.name, why=fault)
        if not engine.adapter.cache_salt and any(each.isolate for each in self.config.tenants.values()):
            log.warning(
                "the engine is not known to take cache_salt: isolated tenants may share its prefix cache",
                engine=engine.name,
                model=pool.name,
                kind=told.engine,
            )
        names = [model.name for model in told.models]
        if names and pool.name not in names:
            log.warning(
                "the engine does not serve its model", engine=engine.name, model=pool.name, serves=names
            )

    def _place(self, engine: Engine) -> None:
        """Puts an engine into the pool of the model that it told."""
        if engine not in self.unplaced:
            return  # removed meanwhile
        base = engine.capabilities.base()
        assert base is not None  # else it would not have been identified
        pool = self.pool(base.name)
        for model in engine.capabilities.models:
            if model.parent is not None and model.name not in self.names:
                self.names[model.name] = (pool, model.name)
                pool.adapters.append(model.name)
        self.unplaced.remove(engine)
        pool.add(engine)

    def ready(self) -> bool:
        """At least one engine can take requests."""
        return any(engine.healthy and not engine.held for p in self.pools for engine in p.engines.values())

    def models(self) -> bytes:
        """The answer to GET /v1/models."""
        data = [
            {
                "id": name,
                "object": "model",
                "created": pool.created,
                "owned_by": "lmetric-router",
                "root": pool.name,
                "parent": pool.name if adapter else None,
            }
            for name, (pool, adapter) in self.names.items()
        ]
        return orjson.dumps({"object": "list", "data": data})
