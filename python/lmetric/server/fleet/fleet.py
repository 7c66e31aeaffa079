"""Models and their engines: one core router per model."""

import asyncio
import difflib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog

from lmetric._core import BadValueError, LmetricError
from lmetric.config import CONFIGURED, EngineConfig, ModelConfig, ServerConfig
from lmetric.engines.adapter import Capabilities
from lmetric.engines.identify import UNKNOWN, identify
from lmetric.server.api.errors import ApiError, Unusable, no_engine_error
from lmetric.server.fleet.engine import Engine, unusable
from lmetric.server.fleet.indicators import Indicators
from lmetric.server.fleet.policies import Policies
from lmetric.server.fleet.pool import Pool
from lmetric.server.fleet.recent import Recent
from lmetric.server.tls.contexts import EngineContexts
from lmetric.server.upstream.connection import UpstreamError

ASK_AGAIN_SECONDS = 30.0  # pause before a repeated identification, if a page did not answer

log = structlog.get_logger("lmetric.fleet")

# Limits for the search of a similar model name: characters of the unknown name, known names.
HINT_NAME_LENGTH = 200
HINT_NAMES = 500

# A model without engines is removed after this time (until then: 503). Loading a model takes less.
UNSERVED_SECONDS = 3600.0


@dataclass(slots=True)
class Fleet:
    """All pools, and the engines whose model is not known yet."""

    config: ServerConfig
    pools: list[Pool] = field(default_factory=list)
    names: dict[str, tuple[Pool, str | None]] = field(default_factory=dict)
    unplaced: list[Engine] = field(default_factory=list)
    pools_made: int = 0
    contexts: EngineContexts = field(default_factory=EngineContexts)
    # Priorities by the names of Kubernetes InferenceObjectives; higher ones are served first.
    objectives: dict[str, int] = field(default_factory=dict)
    _unusable: Recent[Unusable | None] = field(default_factory=Recent)
    # Results of `summary`, by its argument `names`.
    summaries: dict[bool, Recent[dict[str, Any]]] = field(
        default_factory=lambda: {False: Recent(), True: Recent()}
    )

    def build(self) -> None:
        """Builds pools and engines of the configuration.

        Raises LmetricError if a policy or a tokenizer is invalid.
        """
        config = self.config
        for model in config.models:
            pool = self.pool(model.name, model)
            for engine in model.engines:
                pool.add(Engine(engine, config, model=model.name, contexts=self.contexts))
        if config.model is not None:
            self.pool(config.model)
        for engine in config.engines:
            self.add(engine)
        pools = list(self.pools)
        if not self.pools or self.unplaced or config.discovery:
            # Invalid policies and tokenizers fail here, not when the first engine answers.
            pools.append(Pool(0, "", [], config.pool_settings()))
        for pool in pools:  # later pools have the settings of one of these
            pool.load_tokenizer()
            pool.warn_of_policies()

    def add(self, config: EngineConfig, source: str = CONFIGURED, model: str | None = None) -> Engine:
        """Adds an engine.

        If its model is not known, the router asks the engine. Raises LmetricError.
        """
        model = model or self.config.model
        engine = Engine(config, self.config, source, model, self.contexts)
        if model is None:
            self.unplaced.append(engine)
        else:
            self.pool(model).add(engine)
        return engine

    def remove(self, engine: Engine) -> None:
        """Removes an engine. Its running requests continue."""
        pool = self.pool_of(engine)
        if pool is not None:
            pool.remove(engine.name)
        elif engine in self.unplaced:
            self.unplaced.remove(engine)
            engine.upstream.close()

    def policies_of(self, config: ServerConfig) -> dict[str | None, Policies]:
        """Returns the policies of a configuration by model; key None: of models without a section.

        Whether experimental policies are accepted is fixed at the start. Raises LmetricError.
        """
        config = config.model_copy(update={"experimental": self.config.experimental})
        made: dict[str | None, Policies] = {}
        for model in (None, *config.models):
            settings = config.pool_settings(model)
            Indicators(settings.indicators)  # before the policies that read them
            made[None if model is None else model.name] = Policies(settings)
        return made

    def reload(self, config: ServerConfig, policies: Mapping[str | None, Policies]) -> None:
        """Applies a new configuration with its policies (`policies_of`). Raises LmetricError.

        Running requests keep the settings with which they began.
        """
        for pool in self.pools:
            new = policies.get(pool.name, policies[None])
            pool.replace_indicators(new.settings.indicators)
            before = pool.policies
            pool.install(new)
            pool.trials.configure(new, policy_changed=new.differs(before))
            pool.hedging.configure(new.settings.hedging)
            pool.held.configure(new.settings.admission, config.tenants)
            pool.retry_budget.configure(config.retries)
        self.config = config
        for engine in self.engines():
            engine.configure(config)
        self.contexts.keep(engine.upstream.tls for engine in self.engines())

    def replace_policies(self, changes: Mapping[str, Any], model: str | None) -> list[Pool]:
        """Replaces policies of one model, or of all (None).

        Returns the pools. Raises LmetricError.
        """
        pools = self.pools if model is None else [self.find(model)[0]]
        for pool in pools:
            if pool.trials.canary.running:
                raise BadValueError(f"{pool.name}: a canary runs; promote it or roll it back first")
        before = [pool.policies for pool in pools]
        made = [Policies(policies.settings.model_copy(update=dict(changes))) for policies in before]
        try:
            for pool, policies in zip(pools, made, strict=True):
                pool.install(policies)
        except LmetricError:
            for pool, policies in zip(pools, before, strict=True):
                if pool.policies is not policies:
                    pool.install(policies)
            raise
        if model is None:
            self.config = self.config.model_copy(update=dict(changes))
        return pools

    def pool_of(self, engine: Engine) -> Pool | None:
        """Returns the pool of an engine; None if its model is not known or it was removed."""
        return next((pool for pool in self.pools if pool.engines.get(engine.name) is engine), None)

    def pool(self, name: str, model: ModelConfig | None = None) -> Pool:
        """Returns the pool of a model, and creates it for a new model."""
        if name in self.names:
            return self.names[name][0]
        adapters = model.adapters if model else []
        config = self.config
        settings, ejection = config.pool_settings(model), config.health.ejection
        pool = Pool(self.pools_made, name, adapters, settings, config.retries, ejection, config.tenants)
        self.pools_made += 1
        self.pools.append(pool)
        self.names[name] = (pool, None)
        for adapter in adapters:
            self.names[adapter] = (pool, adapter)
        return pool

    def forget_unserved(self, now: float) -> None:
        """Removes models without engines for `UNSERVED_SECONDS`, except configured ones."""
        named = {self.config.model, *(model.name for model in self.config.models)}
        for pool in list(self.pools):
            since = pool.unserved_since
            if since is None or now - since < UNSERVED_SECONDS or pool.name in named:
                continue
            if not pool.router.in_flight():
                self.pools.remove(pool)
                pool.kv.close()
                self.names = {name: known for name, known in self.names.items() if known[0] is not pool}
                log.info("model removed", model=pool.name, unserved_seconds=round(now - since))

    def engines(self) -> Iterator[Engine]:
        """Yields all engines, with or without a known model."""
        for pool in self.pools:
            yield from pool.engines.values()
        yield from self.unplaced

    @property
    def size(self) -> int:
        """The number of engines."""
        return sum(len(pool.engines) for pool in self.pools) + len(self.unplaced)

    @property
    def unusable(self) -> Unusable | None:
        """The reasons why no engine gets new requests; None: one of them does."""
        return self._unusable.get(self.size, lambda: unusable(self.engines()))

    def find(self, model: str | None) -> tuple[Pool, str | None]:
        """Returns the pool of a model name, and the adapter if the name is an adapter's.

        Raises ApiError (400, 404, 503).
        """
        known = self.names.get(model) if model is not None else None
        if known is not None:
            return known
        if not self.pools:
            raise no_engine_error(None, None, self.unusable)
        if model is None:
            if len(self.pools) == 1:
                return self.pools[0], None
            raise ApiError(400, f"model is missing; served here: {self._list()}", param="model")
        # The time of difflib grows with both: clients choose the length, and adapters may be many.
        comparable = len(model) <= HINT_NAME_LENGTH and len(self.names) <= HINT_NAMES
        near = difflib.get_close_matches(model, self.names, n=1) if comparable else []
        hint = f"did you mean {near[0]!r}?" if near else f"served here: {self._list()}"
        shown = repr(model if len(model) <= HINT_NAME_LENGTH else model[:HINT_NAME_LENGTH] + "…")
        raise ApiError(404, f"model {shown} is unknown; {hint}", param="model", code="model_not_found")

    def _list(self) -> str:
        names = sorted(self.names)
        return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")

    async def identify(self, engine: Engine) -> None:
        """Identifies an engine, adds it to the pool of its model, and sets up its events and role.

        A page that does not answer counts as missing and is requested again later. Raises
        ValueError if the engine's model is not configured and not reported, UpstreamError if no
        connection is possible.
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
                engine.adapter, engine.capabilities = await identify(ask, engine.config.data_parallel_rank)
        except (ValueError, TimeoutError) as error:
            reason = str(error) or f"its pages did not answer within {3 * self.config.health.timeout:g} s"
            if engine.pool is None:
                raise ValueError(reason) from None
            unanswered.append(reason)
            engine.adapter, engine.capabilities = UNKNOWN, Capabilities("unknown", no_events=reason)
        capabilities = engine.capabilities
        if engine.pool is None:
            self._place(engine)
        pool = self.pool_of(engine)
        if pool is None:
            return  # removed meanwhile
        base = capabilities.base(pool.name)
        async with pool.asking:
            await pool.set_tokenizer(base.root if base is not None else None)
        await pool.compare_tokens(engine, self.config.health.timeout)
        await pool.kv.look_up(engine)
        if self.pool_of(engine) is not pool:
            return  # removed meanwhile
        if before.revision != capabilities.revision and before.engine != "unknown":
            pool.router.blocks_cleared(engine.name)  # of other weights
        engine.identified = True
        engine.ask_again_at = time.monotonic() + ASK_AGAIN_SECONDS if unanswered else math.inf
        pool.wire(engine)
        pool.set_role(engine)
        if capabilities == before:
            return
        pool.retry_joins()
        level = logging.INFO if engine.mode.name == "exact" else logging.WARNING
        log.log(
            engine.quiet or level,
            "engine identified",
            engine=engine.name,
            model=pool.name,
            kind=capabilities.engine,
            version=capabilities.version,
            block_size=capabilities.block_size,
            cache_blocks=capabilities.cache_blocks,
            load=", ".join(capabilities.load_names) or "none",
            mode=engine.mode.name,
            reason=engine.mode.reason,
            fix=engine.mode.fix,
            role=engine.role,
        )
        if engine.handover is not None and (fault := engine.handover.fault) is not None:
            log.warning(
                "KV transfers of the engine are at risk", engine=engine.name, model=pool.name, why=fault
            )
        if not engine.adapter.cache_salt and any(each.isolate for each in self.config.tenants.values()):
            log.warning(
                "the engine may ignore cache_salt: isolated tenants may share its prefix cache",
                engine=engine.name,
                model=pool.name,
                kind=capabilities.engine,
            )
        names = [model.name for model in capabilities.models]
        if names and pool.name not in names:
            log.warning(
                "the engine does not serve its model", engine=engine.name, model=pool.name, serves=names
            )

    def _place(self, engine: Engine) -> None:
        """Moves an engine into the pool of the model that it reported."""
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
        """Returns whether at least one engine can accept requests."""
        return any(engine.in_service and not engine.held for p in self.pools for engine in p.engines.values())

    def models(self) -> bytes:
        """Returns the JSON answer to GET /v1/models."""
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
