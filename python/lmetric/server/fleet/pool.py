"""A model: its router and its engines."""

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from lmetric._core import DecisionLabels, NoInstanceError, Router
from lmetric.config import POLICY_KNOBS, PoolSettings
from lmetric.config.schema import IndicatorConfig
from lmetric.engines.adapter import Capabilities
from lmetric.engines.handover import CONNECTORS
from lmetric.options import Handoff
from lmetric.profiles import load_profile
from lmetric.server.api.eligibility import split_ineligibility, unpulled_reason
from lmetric.server.api.errors import ApiError, no_engine_error
from lmetric.server.api.request import ParsedRequest
from lmetric.server.fleet import priority
from lmetric.server.fleet.engine import Engine, unusable
from lmetric.server.fleet.indicators import Indicators
from lmetric.server.fleet.kv_feed import KvFeed
from lmetric.server.fleet.kv_mode import PoolFacts
from lmetric.server.fleet.policies import Policies
from lmetric.server.fleet.rebalancer import Rebalancer
from lmetric.server.upstream.connection import UpstreamError
from lmetric.tokens import NotVerifiable, PromptTokenizer, TokenizerError, find_folder, verify

log = structlog.get_logger("lmetric.fleet")

DEFAULT_BLOCK_SIZE = 16  # until an engine tells
UNLEARNED_TOKENS_PER_SECOND = 8_000.0  # as the router assumes, until an instance was seen to prefill
NOT_JOINABLE_SECONDS = 300.0  # that requests of a path stay whole after an answer that could not be merged


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
        # A tenant's label is valid for that tenant alone, and nobody can guess one.
        self.labels = DecisionLabels(f"{index}-" if index else "", secrets.token_bytes(16))
        self.unserved_since: float | None = time.monotonic()  # None: it has engines
        self.block_size = settings.block_size or DEFAULT_BLOCK_SIZE
        self.block_size_from = "default" if settings.block_size is None else "the configuration"
        self.indicators = Indicators(settings.indicators)  # before the policies that read them
        self.policies = Policies(settings)
        first, decode = self.policies.first, self.policies.decode
        self.logged: dict[str, tuple[int, float]] = {}  # by message: how many decisions, and when
        routing = settings.routing
        self.router = Router(
            first.policy,
            knobs=first.knobs,
            block_size=self.block_size,
            text_block_bytes=settings.text_block_bytes,
            domain=[name],
            index_bytes=settings.index_bytes,
            receipt_bytes=settings.receipt_bytes,
            **routing.options,
            step_time=_step_time(settings.profile),
            seed=settings.seed,
            decode_policy=decode.policy,
            decode_knobs=decode.knobs,
            binding=routing.binding,
            colocate=settings.colocate,
            offers=settings.offers,
        )
        priority.follow_clock(self.router, settings)
        # Whether requests may be cut between equals.
        self.splits = routing.split is not None
        self.pulls = routing.prefix_fetch is not None  # whether engines fetch prefixes from each other
        self.pull_outcomes: Counter[str] = Counter()
        self.transfer_seconds_per_token: float = self.router.learned()["fetch_seconds_per_token"] or 0.0
        self.mover: Rebalancer | None = None  # where requests move while they run
        if (rule := routing.rebalance) is not None:
            self.mover = Rebalancer(name, settings, rule, self.router, self.engines, self.prefill_seconds)
        # Whether one answer may come from several engines of role both.
        self.joins = self.splits or self.mover is not None
        self.orders = settings.priority is not None  # whether requests get a priority from the router
        # By path: why answers could not be merged lately, and until when that is believed.
        self._not_joinable: dict[str, tuple[str, float]] = {}
        self.kv = KvFeed(self.router)
        self.cuts = False  # whether a plan may have several segments
        self._see_cuts()
        self.handovers: Counter[str] = Counter()  # from prefill to decode engines, by what came of them
        self._pooled: PoolFacts | None = None
        self.asking = asyncio.Lock()  # for a tokenizer: the others wait until it is known

    def replace_policies(self, policies: Policies) -> None:
        """Decides by these policies. Raises LmetricError; then nothing changed."""
        policies.install(self.router, self.policies)
        self.policies = policies
        names = {name: getattr(policies.settings, name) for name in POLICY_KNOBS}
        log.info("policies replaced", model=self.name or "any", **names)
        self.report_policy()

    def replace_indicators(self, declared: Mapping[str, IndicatorConfig]) -> None:
        """Takes the values of indicators from these sources. Raises LmetricError; then nothing changed."""
        new = Indicators(declared)
        gone = [name for name, each in self.indicators.declared.items() if declared.get(name) != each]
        self.indicators = new
        for name, engine in self.engines.items() if gone else ():
            engine.missing_metrics = []
            self.router.report_load(name, extra=dict.fromkeys(gone))

    @staticmethod
    def fallbacks(counts: Mapping[str, Any]) -> int:
        """Decisions that fallbacks made, of `Router.policy_fallbacks`."""
        return int(counts["errors"] + counts["overruns"] + counts["paused"])

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
            group=engine.config.group_label,
        )
        self.router.update_instance(engine.name, healthy=engine.healthy)
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
        self.router.update_instance(engine.name, role=role)
        self._see_cuts()
        connector = CONNECTORS.get(handover.connector) if handover else None
        fetches = self.splits or self.pulls or (self.mover is not None and self.mover.by != "recompute")
        between_equals = fetches and connector is not None and not connector.at_once
        engine.connector = connector if role != "both" or between_equals else None
        if self.splits or self.pulls:
            self.router.update_instance(engine.name, handoff=self._cuts_of(engine))
        elif self.mover is not None:
            self.router.update_instance(engine.name, handoff="output")  # by computing it again
        if self.settings.binding == "auto":
            connectors = [each.connector for each in self.engines.values()]
            self.router.configure(
                binding="early" if any(each and each.at_once for each in connectors) else "late"
            )
        engine.unfit = None
        rank, told_of = engine.config.data_parallel_rank, engine.capabilities
        if engine.identified and rank is not None and told_of.data_parallel_rank != rank:
            engine.unfit = told_of.no_events or f"it did not confirm data_parallel_rank {rank}"
        elif role != "both" and engine.identified:
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

    def _cuts_of(self, engine: Engine) -> Handoff:
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

    def unpulled(self, path: str, call: ParsedRequest) -> str | None:
        """Why nothing must be fetched for a request before it begins; None: it may be."""
        if why := unpulled_reason(path, call.request, tokens=call.tokens is not None):
            return why
        if self.tokenizer is None:
            return "the model's tokenizer is not known"
        return self._why_not_joinable(path)

    def uncut(self, path: str, call: ParsedRequest) -> str | None:
        """Why a request must neither be cut between equals nor move; None: it may."""
        legs = self.mover is not None and self.mover.by == "legs"
        if not call.stream and not self.splits and not legs:
            return "its answer is not streamed: its tokens are not known before its end"
        if why := split_ineligibility(path, call.request, tokens=call.tokens is not None):
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
        pooled = PoolFacts(self.block_size, self.block_size_from, self.knows_tokens)
        wired = [engine] if engine is not None else []
        if pooled != self._pooled:
            self._pooled = pooled
            wired = [each for each in self.engines.values() if each.identified or each is engine]
        for each in wired:
            held = each.capabilities.cache_tokens
            if held and not (each.config.cache_blocks or self.settings.cache_blocks):
                self.router.update_instance(each.name, cache_blocks=self._blocks_of(held))
            self.kv.wire(each, pooled)

    def _take_block_size(self, told: Capabilities) -> None:
        """Takes an engine's block size for the index, unless that of another engine stands."""
        if self.settings.block_size is not None or told.block_size is None:
            return
        # Small blocks only cost where no events name them.
        size = told.block_size if told.event_sources else max(told.block_size, DEFAULT_BLOCK_SIZE)
        standing = [e.name for e in self.engines.values() if e.capabilities.block_size == self.block_size]
        if size != self.block_size and not standing:
            self.router.configure(block_size=size)
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

    def no_engine_error(self, error: NoInstanceError) -> ApiError:
        """The error of a request that no engine can take now."""
        return no_engine_error(self.name, error, self.unusable)


def _step_time(profile: str | None) -> dict[str, float] | None:
    """A profile's constants. Raises ProfileError."""
    return None if profile is None else load_profile(profile).constants()
