"""Models and their engines: one router per model, the engines' health, and who serves what."""

import difflib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import orjson
import structlog

from lmetric._core import Router
from lmetric.config import CONFIGURED, EngineConfig, ModelConfig, PoolSettings, ServerConfig
from lmetric.policies import Policy
from lmetric.profiles import load_profile
from lmetric.server.openai import ApiError
from lmetric.server.upstream import Upstream, UpstreamError

log = structlog.get_logger("lmetric.fleet")

# That a model is answered for with 503 when no engine serves it: longer than engines take to load one.
UNSERVED_SECONDS = 3600.0


class Engine:
    """One engine of a pool: its connections and its health.

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
        self.upstream = Upstream(config, server)
        self.health = server.health
        self.pool: Pool | None = None
        self.healthy = False
        self.draining = False
        self.leaving = False
        self.ready = True
        self.failures = 0
        self.successes = 0
        self.last_error: str | None = None

    @property
    def held(self) -> bool:
        """Whether it gets no new requests, however healthy."""
        return self.draining or self.leaving or not self.ready

    @property
    def running(self) -> int:
        """Requests of ours on their way to it and back."""
        return self.upstream.in_use

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
        """A failed check or request. A refusal takes the engine out at once, others when they repeat."""
        self.successes = 0
        self.failures += 1
        self.last_error = reason
        if self.healthy and (kind == "refused" or self.failures >= self.health.down_after):
            self._turn(False, reason, gone=kind == "refused")

    def _turn(self, healthy: bool, reason: str | None, *, gone: bool = False) -> None:
        self.healthy = healthy
        self.successes = 0
        if self.pool is not None:
            self.pool.router.set_health(self.name, healthy)
            if gone:
                # Nobody listens there: the process is gone, and its cache with it.
                self.pool.router.blocks_cleared(self.name)
            if healthy:
                log.info("engine up", model=self.pool.name, engine=self.name)
            else:
                log.warning("engine down", model=self.pool.name, engine=self.name, reason=reason)


@dataclass(slots=True)
class BytesPerToken:
    """Bytes of prompt text a token, learned from the engines' usage reports with a fading memory."""

    bytes: float = 8_000.0
    tokens: float = 2_000.0
    KEEP = 0.99

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Takes in one request's true count."""
        self.bytes = self.bytes * self.KEEP + prompt_bytes
        self.tokens = self.tokens * self.KEEP + prompt_tokens

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
        self.engines: dict[str, Engine] = {}
        self.created = int(time.time())
        self.unserved_since: float | None = time.monotonic()  # None: it has engines
        policy = Policy.from_config(settings.policy, knobs=settings.knobs)
        self.router = Router(
            policy,
            knobs=settings.knobs if isinstance(policy, str) else None,
            block_size=settings.block_size,
            text_block_bytes=settings.text_block_bytes,
            domain=[name],
            index_bytes=settings.index_bytes,
            receipt_bytes=settings.receipt_bytes,
            guard=settings.guard,
            guard_window_seconds=settings.guard_window_seconds,
            guard_period_seconds=settings.guard_period_seconds,
            step_time=_step_time(settings.profile),
            seed=settings.seed,
        )

    def add(self, engine: Engine) -> None:
        """Takes in an engine."""
        self.router.add_instance(
            engine.name,
            cache_blocks=engine.config.cache_blocks or self.settings.cache_blocks,
            role=engine.config.role,
        )
        self.router.set_health(engine.name, engine.healthy)
        engine.pool = self
        engine.hold()
        self.engines[engine.name] = engine
        self.unserved_since = None

    def remove(self, name: str) -> None:
        """Forgets an engine; its running requests end as they end."""
        engine = self.engines.pop(name)
        engine.pool = None
        engine.upstream.close()
        self.router.remove_instance(name)
        if not self.engines:
            self.unserved_since = time.monotonic()

    def decision_label(self, decision_id: int) -> str:
        """A decision's id over all pools: bare in the first, else `POOL-ID`."""
        return str(decision_id) if self.index == 0 else f"{self.index}-{decision_id}"


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
        if not self.pools or self.unplaced or config.discovery:
            # A policy that cannot be built should be told now, not when the first engine answers.
            Pool(0, "", [], config.pool_settings())

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
                503, "no engine has told its model yet", code="no_engine", headers={"retry-after": "2"}
            )
        if model is None:
            if len(self.pools) == 1:
                return self.pools[0], None
            raise ApiError(400, f"model is missing; served here: {self._list()}", param="model")
        near = difflib.get_close_matches(model, self.names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"served here: {self._list()}"
        raise ApiError(404, f"model {model!r} is unknown; {hint}", param="model", code="model_not_found")

    def _list(self) -> str:
        names = sorted(self.names)
        return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")

    async def discover(self, engine: Engine) -> None:
        """Asks an engine for its models and places it. Raises UpstreamError; ValueError: a strange answer."""
        status, body = await engine.upstream.get("/v1/models", self.config.health.timeout)
        if status != 200:
            raise UpstreamError("status", f"GET /v1/models: status {status}")
        try:
            cards = orjson.loads(body)["data"]
            base = next(card["id"] for card in cards if not card.get("parent"))
            adapters = [card["id"] for card in cards if card.get("parent")]
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, StopIteration):
            raise ValueError(f"GET /v1/models: not a list of models: {body[:120]!r}") from None
        if engine not in self.unplaced:
            return  # removed while it was asked
        pool = self.pool(base)
        for adapter in adapters:
            if adapter not in self.names:
                self.names[adapter] = (pool, adapter)
                pool.adapters.append(adapter)
        self.unplaced.remove(engine)
        pool.add(engine)
        log.info("engine found", engine=engine.name, model=base)

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
