"""Models and their engines: one core router per model."""

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import structlog

from lmetric._core import BadValueError, LmetricError
from lmetric.config import CONFIGURED, EngineConfig, EngineTls, ModelConfig, ServerConfig
from lmetric.engines.adapter import (
    MODELS,
    MOST_NAME_CHARACTERS,
    Capabilities,
    ModelCard,
    NoModels,
    read_models,
)
from lmetric.engines.identify import UNKNOWN, identify
from lmetric.server.api.errors import Unusable
from lmetric.server.fleet.catalog import Catalog, Served
from lmetric.server.fleet.engine import Engine, unusable
from lmetric.server.fleet.indicators import METRICS_PAGE, Indicators
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.names import NameSearch, fits
from lmetric.server.fleet.parsing import parses
from lmetric.server.fleet.policies import Policies
from lmetric.server.fleet.problem import Problem
from lmetric.server.fleet.recent import Recent
from lmetric.server.tls.used import EngineContexts
from lmetric.server.upstream.connection import UpstreamError

ASK_AGAIN_SECONDS = 30.0  # pause before a repeated identification, if a page did not answer

log = structlog.get_logger("lmetric.fleet")

# Names of a message that lists an engine's models.
NAMED_MODELS = 5

# A move to another model is shown as long: whoever is called when latencies rise still sees it,
# and an upgrade to another model does not stay a problem.
MOVED_SECONDS = 3600.0
# A model without engines, or a name whose last engine was removed, is forgotten after this time
# (until then: 503). Loading a model takes less.
UNSERVED_SECONDS = 3600.0
# Models without engines that are kept. An engine that changes its model's name again and again
# would otherwise fill the memory.
MOST_UNSERVED = 32


class Moved(NamedTuple):
    """The move of an engine that began to serve another model. ``at``: Unix time in seconds.

    ``before``: the model before the first of its moves in `MOVED_SECONDS`.
    """

    before: str
    serves: str
    at: float

    @property
    def is_recent(self) -> bool:
        """Whether the move was in the last `MOVED_SECONDS`."""
        return time.time() - self.at < MOVED_SECONDS


@dataclass(slots=True)
class Fleet:
    """All models, and the engines whose model is not known yet."""

    config: ServerConfig
    models: list[Model] = field(default_factory=list)
    names: dict[str, Served] = field(default_factory=dict)
    unplaced: dict[str, Engine] = field(default_factory=dict)  # by name
    models_made: int = 0
    contexts: EngineContexts = field(default_factory=EngineContexts)
    # Priorities by the names of Kubernetes InferenceObjectives; higher ones are served first.
    objectives: dict[str, int] = field(default_factory=dict)
    _unusable: Recent[Unusable | None] = field(default_factory=Recent)
    # Results of `summary`, by its argument `names`.
    summaries: dict[bool, Recent[dict[str, Any]]] = field(
        default_factory=lambda: {False: Recent(), True: Recent()}
    )
    # Called with each engine that must be checked at once, with the name of each model that was
    # removed, and with each new model.
    check: Callable[[Engine], Awaitable[None] | None] = lambda engine: None
    # Raises ConfigError if the URL of a new engine cannot be used; None: each can.
    check_url: Callable[[str], None] | None = None
    # Returns the problems of the router itself.
    own_problems: Callable[[], Iterable[Problem]] = lambda: ()
    # By engine: its last move to another model, until it serves the model before it again.
    moved: dict[str, Moved] = field(default_factory=dict)
    on_model_removed: list[Callable[[str], object]] = field(default_factory=list)
    on_model_made: list[Callable[[Model], object]] = field(default_factory=list)
    # Returns the number of a new model. Arguments: its name, and the number of models so far.
    number_model: Callable[[str, int], int] = lambda _, made: made
    replace_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by `replace_policies`
    search: NameSearch = field(init=False)
    catalog: Catalog = field(init=False)
    _reads: dict[Engine, asyncio.Task[None]] = field(default_factory=dict)  # of lists of models
    # Reads in flight, by URL, path, and the buckets that the page keeps.
    pages: dict[tuple[str, str, bool, tuple[str, ...]], asyncio.Task[tuple[int, bytes]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.search = NameSearch(self._read_all, lambda: self.size)
        self.catalog = Catalog(self.config, self.names, self.models, unusable=lambda: self.unusable)

    def build(self) -> None:
        """Builds models and engines of the configuration.

        Raises LmetricError if a policy or a tokenizer is invalid.
        """
        config = self.config
        for entry in config.models:
            model = self.model(entry.name, entry)
            for engine in entry.engines:
                model.add(Engine(engine, config, model=entry.name, contexts=self.contexts))
        if config.model is not None:
            self.model(config.model)
        for engine in config.engines:
            self.add(engine)
        models = list(self.models)
        if not self.models or self.unplaced or config.discovery:
            # Invalid policies and tokenizers fail here, not when the first engine answers.
            models.append(Model(0, "", [], settings=config.pool_settings()))
        for model in models:  # later models have the settings of one of these
            model.tokenizers.load()
            model.warn_of_policies()

    def add(self, config: EngineConfig, source: str = CONFIGURED, model: str | None = None) -> Engine:
        """Adds an engine.

        If its model is not known, the router asks the engine. Raises LmetricError.
        """
        model = model or self.config.model
        if model is not None and len(model) > MOST_NAME_CHARACTERS:
            raise BadValueError(f"model: {len(model)} characters; a name has at most {MOST_NAME_CHARACTERS}")
        engine = Engine(config, self.config, source, model=model, contexts=self.contexts)
        if model is None:
            self.unplaced[engine.name] = engine
        else:
            self._names_changed(self.model(model).add(engine))
        return engine

    def remove(self, engine: Engine) -> None:
        """Removes an engine. Its running requests continue."""
        self.moved.pop(engine.name, None)
        model = self.model_of(engine)
        if model is not None:
            self._names_changed(model.remove(engine.name))
        elif self.unplaced.get(engine.name) is engine:
            del self.unplaced[engine.name]
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

    def reload(self, config: ServerConfig, policies: Mapping[str | None, Policies]) -> Iterator[None]:
        """Applies a new configuration with its policies (`policies_of`).

        Running requests keep the settings with which they began. Returns the steps that configure
        the engines, one by one. Raises LmetricError; then nothing has changed.
        """
        self._make_contexts(config)
        chosen = [
            (model, policies.get(model.name, policies[None]).keep_installed(model.policies))
            for model in self.models
        ]
        before = {model.index: model.policies for model in self.models}
        with install_all([(model, new) for model, new in chosen if not model.policies.equals(new)]):
            for model, new in chosen:
                if (trials := model.trials_for(new)) is not None:
                    trials.check(new)
        gone = {}
        for model, new in chosen:
            model.use(new)
            gone[model] = model.replace_indicators(new.settings.indicators)
            model.outliers.settings = config.health.ejection
            if model.trials is not None:
                model.trials.configure(new, before[model.index])
            model.hedging.configure(new.settings.hedging)
            model.held.configure(new.settings.admission, config.tenants)
            model.retry_budget.configure(config.retries)
        self.config = config  # new engines begin with it
        self.catalog.configure(config)
        return self._configure(list(self.engines()), gone)

    def _make_contexts(self, config: ServerConfig) -> None:
        """Makes the TLS contexts that the engines need. Raises ConfigError."""
        made: dict[int, EngineTls | None] = {}
        for engine in self.engines():
            if engine.upstream.tls is not None:
                settings = engine.tls_settings(config)
                if id(settings) not in made:
                    made[id(settings)] = settings
                    self.contexts.get(settings)

    def _configure(self, engines: Iterable[Engine], gone: Mapping[Model, dict[str, None]]) -> Iterator[None]:
        for engine in engines:
            engine.configure(self.config)
            model = self.model_of(engine)
            if model is not None and gone.get(model):
                model.drop_indicators(engine, gone[model])
            yield
        self.contexts.keep(engine.upstream.tls for engine in self.engines())

    def model_of(self, engine: Engine) -> Model | None:
        """Returns the model of an engine; None if its model is not known or it was removed."""
        return next((model for model in self.models if model.engines.get(engine.name) is engine), None)

    def engine(self, name: str) -> Engine | None:
        """Returns an engine by its name."""
        found = (model.engines[name] for model in self.models if name in model.engines)
        return next(found, None) or self.unplaced.get(name)

    def model(self, name: str, entry: ModelConfig | None = None) -> Model:
        """Returns the model of a name, and creates a new one."""
        served = self.names.get(name)
        if served is not None and (served.model.name == name or served.adapter is not None):
            return served.model
        return self._create(name, entry, configured=entry is not None or name == self.config.model)

    def _create(self, name: str, entry: ModelConfig | None = None, *, configured: bool = False) -> Model:
        adapters = entry.adapters if entry else []
        config = self.config
        settings, ejection = config.pool_settings(entry), config.health.ejection
        index = self.number_model(name, self.models_made)
        model = Model(
            index,
            name,
            adapters,
            settings=settings,
            retries=config.retries,
            ejection=ejection,
            tenants=config.tenants,
        )
        model.names.configured = configured
        model.look_again = self.look_again
        for told in self.on_model_made:  # before it counts as made: the shared memory may be full
            told(model)
        self.models_made += 1
        self.models.append(model)
        self._names_changed(model.names.known)
        return model

    def forget_unserved(self, now: float) -> None:
        """Removes models without engines for `UNSERVED_SECONDS`, except configured ones.

        A model that an engine served only between two moves is removed at once. Names whose last
        engine was removed so long ago are removed, too.
        """
        named = {self.config.model, *(entry.name for entry in self.config.models)}
        unserved: list[tuple[float, Model]] = []
        for model in self.models:
            if old := model.names.forget(now - UNSERVED_SECONDS):
                self._names_changed(old)
            idle = not model.router.in_flight() and not model.router.waiting
            if model.unserved_since is not None and model.name not in named and idle:
                unserved.append((model.unserved_since, model))
        unserved.sort(key=lambda each: -each[0])
        for number, (since, model) in enumerate(unserved):
            if number >= MOST_UNSERVED or now - since >= UNSERVED_SECONDS or model.is_passing:
                self.models.remove(model)
                model.close()
                self._names_changed(model.names.known)
                for forget in self.on_model_removed:
                    forget(model.name)
                log.info("model removed", model=model.name, unserved_seconds=round(now - since))

    def _names_changed(self, names: Iterable[str]) -> None:
        """Finds the models of names that have appeared or vanished anywhere."""
        self.catalog.changed()
        for name in names:
            claims = [
                (claim, model) for model in self.models if (claim := model.names.claim(name)) is not None
            ]
            if claims:
                _, model = min(claims, key=lambda each: each[0])
                self.names[name] = Served(model, name if model.names.is_adapter(name) else None)
            else:
                self.names.pop(name, None)
        self.search.known(self._serves)

    def _serves(self, name: str) -> bool:
        """Whether an engine is in service for a name."""
        served = self.names.get(name)
        return served is not None and any(
            engine.in_service and not engine.encodes for engine in served.model.engines.values()
        )

    def engines(self) -> Iterator[Engine]:
        """Yields all engines, with or without a known model."""
        for model in self.models:
            yield from model.engines.values()
        yield from self.unplaced.values()

    def engines_by_name(self) -> list[Engine]:
        """Returns all engines in the order of their names, engine-10 behind engine-2."""

        def parts(engine: Engine) -> list[tuple[int, str]]:
            found = re.split(r"(\d+)", engine.name)
            return [(int(part), "") if part.isdecimal() else (0, part) for part in found]

        return sorted(self.engines(), key=parts)

    @property
    def size(self) -> int:
        """The number of engines."""
        return sum(len(model.engines) for model in self.models) + len(self.unplaced)

    @property
    def unusable(self) -> Unusable | None:
        """The reasons why no engine gets new requests; None: one of them does."""
        return self._unusable.get(self.size, lambda: unusable(self.engines()))

    async def page(self, engine: Engine, path: str, *, paused: bool = False) -> tuple[int, bytes]:
        """Reads a page once for all entries of its URL that ask meanwhile: each rank has one.

        ``paused``: no read counts that began before an entry saw that its engine is paused.
        """
        model = engine.model
        engine.upstream.buckets = buckets = () if model is None else model.indicators.buckets
        key = engine.config.url, path, paused, buckets
        if (reading := self.pages.get(key)) is None:
            get = engine.upstream.get(path, self.config.health.timeout)
            reading = self.pages[key] = asyncio.create_task(get)
            # Its failure counts as seen: all readers may have left.
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())
            reading.add_done_callback(lambda _: self.pages.pop(key))
        return await asyncio.shield(reading)

    async def identify(self, engine: Engine) -> None:
        """Identifies an engine, adds it to its model, and sets up its events and role.

        A page that does not answer counts as missing and is requested again later. Raises
        ValueError if the engine's model is not configured and not reported, UpstreamError if no
        connection is possible.
        """

        unanswered = []

        async def ask(path: str) -> tuple[int, bytes]:
            try:
                if path == METRICS_PAGE:
                    return await self.page(engine, path)
                return await engine.upstream.get(path, self.config.health.timeout)
            except UpstreamError as error:
                if error.before_sending:
                    raise
                unanswered.append(path)
                if path == METRICS_PAGE:
                    engine.load_unread(str(error))
                return 504, str(error).encode()

        before = engine.capabilities
        try:
            async with asyncio.timeout(3 * self.config.health.timeout):
                engine.adapter, engine.capabilities = await identify(ask, engine.config.data_parallel_rank)
        except (ValueError, TimeoutError) as error:
            reason = str(error) or f"its pages did not answer within {3 * self.config.health.timeout:g} s"
            if engine.model is None:
                raise ValueError(reason) from None
            if isinstance(error, NoModels):
                self._lists_nothing(engine, reason)
                engine.identified, engine.ask_again_at = True, math.inf
                return
            unanswered.append(reason)
            engine.adapter, engine.capabilities = (
                UNKNOWN,
                Capabilities("unknown", models=before.models, no_events=reason),
            )
        capabilities = engine.capabilities
        if capabilities.data_parallel_rank is not None:
            engine.upstream.set_rank(capabilities.rank_header(capabilities.data_parallel_rank))
        engine.models_at, engine.models_hash = time.monotonic(), None
        if engine.model is None:
            self._place(engine)
        else:
            self._take_models(engine, before.models)
        model = self.model_of(engine)
        if model is None:
            return  # removed meanwhile, or replaced
        model.prioritize(engine)
        if engine.misfit is not None:
            engine.identified, engine.ask_again_at = True, math.inf
            return
        await model.tokenizers.follow(capabilities.root(model.name))
        served = model.names.name_for(engine.name)
        await model.tokenizers.compare(engine, served, self.config.health.timeout)
        parses_others = await parses(engine, self.config.health.timeout)
        await model.kv.look_up(engine)
        if self.model_of(engine) is not model:
            return  # removed meanwhile
        if before.revision != capabilities.revision and before.engine != "unknown":
            model.router.blocks_cleared(engine.name)  # of other weights
        engine.parses, engine.identified = parses_others, True
        engine.ask_again_at = time.monotonic() + ASK_AGAIN_SECONDS if unanswered else math.inf
        model.wire(engine)
        model.set_role(engine)
        if capabilities == before:
            return
        model.retry_joins()
        level = logging.WARNING if engine.inexact else logging.INFO
        log.log(
            engine.quiet or level,
            "engine identified",
            engine=engine.name,
            model=model.name,
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
                "KV transfers of the engine are at risk", engine=engine.name, model=model.name, why=fault
            )
        if not engine.adapter.cache_salt and any(each.isolate for each in self.config.tenants.values()):
            log.warning(
                "the engine may ignore cache_salt: isolated tenants may share its prefix cache",
                engine=engine.name,
                model=model.name,
                kind=capabilities.engine,
            )
        if capabilities.ignored:
            log.warning(
                "reported values are out of bounds and ignored",
                engine=engine.name,
                model=model.name,
                values=capabilities.ignored[:NAMED_MODELS],
            )

    def _place(self, engine: Engine) -> None:
        """Moves an engine into the model that it reported."""
        if self.unplaced.get(engine.name) is not engine:
            return  # removed meanwhile
        models = engine.capabilities.models
        bases = [card.name for card in models if card.parent is None]
        model = next((model for name in bases for model in self.models if model.name == name), None)
        if model is None:
            sharing = (
                model for model in self.models if model.engines and fits(model.names, engine.name, models)
            )
            model = next(sharing, None)
        if model is None:
            served = self.names.get(bases[0])
            as_adapter = served is not None and served.adapter is not None
            model = served.model if served is not None and as_adapter else self._create(bases[0])
        del self.unplaced[engine.name]
        self._names_changed(model.add(engine))
        others = [name for name in bases if name in self.names and self.names[name].model is not model]
        if others:
            log.warning(
                "names of the engine belong to another model",
                engine=engine.name,
                model=model.name,
                names=others,
            )

    # -- lists of models ---------------------------------------------------------------------------

    def seek(self, name: str | None) -> asyncio.Future[None] | None:
        """Asks all engines for their models, because a name is unknown.

        Returns a future that ends when the name is known, or all have answered. None: it cannot be
        a model's name, or too many requests wait.
        """
        if name is None or not 0 < len(name) <= MOST_NAME_CHARACTERS or not self.models:
            return None
        return self.search.find(name, self.config.health.timeout)

    def read_models(self, engine: Engine) -> asyncio.Task[None]:
        """Begins to read an engine's list of models again, or returns the read in flight."""
        task = self._reads.get(engine)
        if task is None:
            task = self._reads[engine] = asyncio.create_task(self._read(engine), name="models")
        return task

    def _read_all(self) -> Iterator[asyncio.Task[None]]:
        """Begins to read the lists of all engines that answer."""
        for model in self.models:
            for engine in model.engines.values():
                if engine.identified and (engine.healthy or engine.misfit is not None):
                    yield self.read_models(engine)

    def look_again(self, engine: Engine) -> None:
        """Reads an engine's list of models at once, because a request showed that it has changed.

        If it was read in the last second, it is read at the next check.
        """
        if time.monotonic() - engine.models_at >= 1.0:
            self.read_models(engine)
        else:
            engine.models_due = True

    async def _read(self, engine: Engine) -> None:
        engine.models_at, engine.models_due = time.monotonic(), False
        try:
            status, body = await engine.upstream.get(MODELS, self.config.health.timeout)
            if hash(body) == engine.models_hash:
                return
            models, ignored = await read_models(status, body)
        except NoModels as error:
            engine.models_hash = None
            self._lists_nothing(engine, str(error))
            return
        except (UpstreamError, ValueError) as error:
            # The health check judges engines that do not answer.
            if engine.models_error != str(error):
                engine.models_error = str(error)
                log.warning(
                    "cannot read the engine's models; the known ones stay",
                    engine=engine.name,
                    reason=str(error),
                )
            return
        finally:
            del self._reads[engine]
        engine.models_hash, engine.models_error = hash(body), None
        before = engine.capabilities.models
        if models != before:
            engine.capabilities = replace(engine.capabilities, models=models, ignored=tuple(ignored))
            new = self._take_models(engine, before)
            if new is not None and (checked := self.check(new)) is not None:
                await checked

    def _lists_nothing(self, engine: Engine, reason: str) -> None:
        """Takes an engine out of service until its list of models has an entry."""
        model, before = self.model_of(engine), engine.capabilities.models
        if model is None or engine.misfit == reason:
            return
        engine.capabilities = replace(engine.capabilities, models=())
        self._take_models(engine, before)
        engine.misfit = reason
        model.kv.unwire(engine.name)
        engine.failed("no_model", reason)

    def _take_models(self, engine: Engine, before: Sequence[ModelCard]) -> Engine | None:
        """Handles an engine's new list of models. ``before``: the list so far.

        Returns the engine that replaces it if it serves another model than its model.
        """
        model, cards = self.model_of(engine), engine.capabilities.models
        if model is None or cards == before:
            return None  # removed meanwhile, or no change
        model.weights.due = True
        if before and cards:
            was, now = ({each.name for each in some} for some in (before, cards))
            gone, come = ([*sorted(names)[:NAMED_MODELS]] for names in (was - now, now - was))
            log.info(
                "models of the engine changed", engine=engine.name, model=model.name, gone=gone, new=come
            )
        old, new = ([each for each in some if each.parent is None] for some in (before, cards))
        if old != new:
            if engine.configured_model is None and not fits(model.names, engine.name, cards):
                moved = self._move(model, engine)
                self._review(model)
                return moved
            if old and engine.misfit is None:
                engine.restarted()  # served names and weights change only with the process
            was_misfit, engine.misfit = engine.misfit, _misfit(engine)
            if engine.misfit is not None:
                model.kv.unwire(engine.name)
            elif was_misfit is not None:
                engine.ask_anew()
        # A misfit serves no name of the model.
        self._names_changed(model.names.update(engine.name, cards if engine.misfit is None else ()))
        if old != new:
            self._review(model)
        return None

    def _review(self, model: Model) -> None:
        """Moves engines that belonged to a model only by a name of an engine that has changed."""
        for engine in list(model.engines.values()):
            if engine.configured_model is None and not fits(
                model.names, engine.name, engine.capabilities.models
            ):
                self._move(model, engine)

    def _move(self, model: Model, engine: Engine) -> Engine | None:
        """Replaces an engine that serves another model by a new one for the right model.

        Its requests in flight continue. The new one knows nothing of the old model. Returns it.
        """
        if engine.leaving or engine.switches:
            return None
        new = Engine(engine.config, self.config, engine.source, model=None, contexts=self.contexts)
        new.role_set, new.ready, new.draining = engine.role_set, engine.ready, engine.draining
        new.quiet = engine.quiet
        last, cards = self.moved.get(engine.name), engine.capabilities.models
        self.remove(engine)
        before = model.name
        if last is not None and last.is_recent:
            before, model.is_passing = last.before, not model.engines
        if any(card.name == before for card in cards):
            log.info("the engine serves its model again", engine=engine.name, model=before)
        else:
            self.moved[new.name] = moved = Moved(before, _listed(cards), time.time())
            log.warning(
                "the engine serves another model; it moves",
                engine=engine.name,
                model=model.name,
                serves=moved.serves,
            )
        self.unplaced[new.name] = new
        self.check(new)
        return new

    def stop(self) -> None:
        """Cancels the searches and reads in flight."""
        self.search.close()
        for task in self._reads.values():
            task.cancel()

    def ready(self) -> bool:
        """Returns whether at least one engine can accept requests."""
        return any(
            engine.in_service and not engine.held and not engine.encodes
            for model in self.models
            for engine in model.engines.values()
        )


def _misfit(engine: Engine) -> str | None:
    """Returns the reason why an engine does not serve its configured model; None: it does."""
    models = engine.capabilities.models
    if (
        engine.configured_model is None
        or not models
        or any(model.name == engine.configured_model for model in models)
    ):
        return None
    return f"it serves {_listed(models)}, not {engine.configured_model!r}"


def _listed(models: Sequence[ModelCard]) -> str:
    """Returns the names of models for a message."""
    names = [repr(model.name) for model in models if model.parent is None]
    more = f" and {len(names) - NAMED_MODELS} more" if len(names) > NAMED_MODELS else ""
    return ", ".join(names[:NAMED_MODELS]) + more


@contextlib.contextmanager
def install_all(changes: Sequence[tuple[Model, Policies]]) -> Iterator[None]:
    """Installs new policies in models. After an LmetricError, all models have their old ones."""
    done: list[tuple[Model, Policies]] = []
    try:
        for model, policies in changes:
            before = model.policies
            model.install(policies)
            done.append((model, before))
        yield
    except LmetricError:
        for model, before in done:
            model.install(before)
        raise
