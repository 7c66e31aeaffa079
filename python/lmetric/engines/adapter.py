"""Capabilities and load of an engine, and the interface of adapters.

Engines report their properties: `identify` in `lmetric.engines.identify` reads their endpoints and
returns an `Adapter` and `Capabilities`. To add a kind of engine, write an `Adapter` in a file and
add it to `lmetric.engines.identify`. Facts about protocols have the version of their source or
test.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self, TypeVar

import orjson

from lmetric.engines.errors import error_text
from lmetric.roles import Role

# GET of a path with its query: status and body. Raises what its maker raises where nobody answers.
Ask = Callable[[str], Awaitable[tuple[int, bytes]]]

T = TypeVar("T")

# Bounds of reported values. A value beyond its bound counts as not reported: no engine has it, and
# larger numbers fit neither into JSON of 64 bits nor into the index.
MOST_NAME_CHARACTERS = 256  # of a model's name, which becomes a label of metrics
MOST_MODELS = 4096  # names of one engine
MOST_TEXT_CHARACTERS = 4096  # of any other text; a path has at most as many
MOST_BLOCK_TOKENS = 1 << 20
MOST_BLOCKS = 1 << 40
MOST_TOKENS = 1 << 30  # of a model's context
MOST_COUNT = 1 << 30  # of anything else
MOST_RANKS = 1024  # data-parallel ranks
MOST_LOAD = 1e9  # requests, or any other figure of `Load`
# Larger pages are read in a thread. Metrics are read in pieces of this size, and a line that is
# longer is left out. A piece takes less than a millisecond.
LARGE_PAGE = 64 << 10
MAX_BODY_BYTES = 16 << 20  # that are read of an answer


async def read_page(page: bytes, read: Callable[[bytes], T]) -> T:
    """Returns `read(page)`; for a large page, computed in a thread."""
    return await asyncio.to_thread(read, page) if len(page) > LARGE_PAGE else read(page)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that an engine serves."""

    name: str  # name in requests
    root: str | None = None  # source: a folder on the engine's machine, or a name at a hub
    parent: str | None = None  # set: an adapter (LoRA) of that model
    max_model_len: int | None = None  # tokens of prompt and answer together
    # Unix time, s. Engines report the time of the request, so it is no difference.
    created: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class EventSource:
    """The KV event source of one data-parallel rank, as the engine reports it."""

    rank: int
    endpoint: str
    topic: str = ""
    replay_endpoint: str | None = None
    connects: bool = (
        False  # the engine does not listen: it connects to an address that the router has to bind
    )


class Load(NamedTuple):
    """The load that an engine reports at one moment; None: not reported."""

    waiting: float | None = None  # requests
    running: float | None = None  # requests
    kv_usage: float | None = None  # share of the KV cache in use, 0 to 1
    names: tuple[str, ...] = ()  # names of the metrics

    def __bool__(self) -> bool:
        return (self.waiting, self.running, self.kv_usage) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Priority:
    """An engine's use of the request field `priority`."""

    order: Literal["lower_first", "higher_first"]
    # Whether it orders its queue by priority; None: not reported.
    honoured: bool | None
    # The place of the priority: vLLM has a header, which overrides the body's field; SGLang has
    # only the field.
    header: bool = False

    def field(self, urgency: int) -> int | None:
        """The value of the engine's field for an urgency of the router (higher is served earlier).

        None: send no value, because the engine ignores or refuses it.
        """
        if self.honoured is False:
            return None
        return urgency if self.order == "higher_first" else -urgency


@dataclass(frozen=True, slots=True)
class Handover:
    """An engine's KV transfers to other engines. None: not reported."""

    connector: str  # a name of `lmetric.engines.connectors.CONNECTORS`
    lease_seconds: float | None = None  # how long it keeps blocks for a fetch
    on_failure: str | None = None  # of a fetch: recompute or fail
    bootstrap_port: int | None = None  # port for decode engines (SGLang)
    # Data-parallel rank that computes the prompt, and the number of ranks; None: the prefill engine
    # chooses.
    bootstrap_rank: tuple[int, int] | None = None
    # Whether it can fetch the front of a prompt, compute the rest, and transfer the fetched part
    # again (vLLM's bidirectional_kv_xfer). Without it, such a request never ends.
    bidirectional: bool | None = None

    @property
    def fault(self) -> str | None:
        """A problem in the engine's settings that makes requests fail, or None."""
        if self.bidirectional and self.on_failure == "recompute":
            return (
                "its KV transfers are bidirectional with kv_load_failure_policy recompute; a request whose "
                "prefix fetch fails is never answered (vLLM 0.32); set the policy to fail"
            )
        return None


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A scheduler of lmetric-vllm that an engine runs."""

    name: str  # of its class
    version: str  # of lmetric-vllm
    settings: Mapping[str, str]  # those that were set

    @property
    def boosts(self) -> bool:
        """Whether it computes boosts itself, and takes a handicap and gamma per request."""
        return self.name == "UniBoostScheduler"

    def __str__(self) -> str:
        settings = "".join(f", {name} {value}" for name, value in self.settings.items())
        return f"{self.name} (lmetric-vllm {self.version}{settings})"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Kind and capabilities of an engine, as it reports them. None: not reported."""

    engine: str  # vllm, sglang, unknown
    version: str | None = None
    models: tuple[ModelCard, ...] = ()
    # The source of the main model, if the list of models has only its name (SGLang).
    model_path: str | None = None
    # Revision or version of its weights. KV never passes between engines with different revisions.
    revision: str | None = None
    block_size: int | None = None  # tokens of a KV block; the unit of its events and of its cache
    cache_blocks: int | None = None  # KV blocks, over all its data-parallel ranks
    max_loras: int | None = None  # LoRA adapters that it keeps loaded
    prefix_caching: bool | None = None
    ranks: tuple[int, ...] = ()  # its data-parallel ranks; empty: not reported
    # KV event sources by rank, and the reason if there are none.
    event_sources: tuple[EventSource, ...] = ()
    no_events: str | None = None
    events_fix: str | None = None  # the setting that adds sources; None: the flag of this kind of engine
    # Endpoints of its pushed load (SGLang's LoadStat), by rank, and their topic.
    load_feeds: tuple[str, ...] = ()
    load_topic: str = ""
    load_path: str | None = None  # path of its load report
    load_names: tuple[str, ...] = ()  # the names found there
    load_header: bool = False  # it answers `endpoint-load-metrics-format` on plain answers
    # Whether answers have usage.prompt_tokens_details.cached_tokens; None: unknown until a request.
    cached_tokens: bool | None = None
    priority: Priority | None = None
    scheduler: Scheduler | None = None  # None: the engine's own
    request_ids: bool | None = None  # whether it echoes X-Request-Id
    # Whether streams list their token ids on request (`return_token_ids`), and prompts may be token
    # ids. None: not known, so only a rebalancer requests them. Engines may refuse unknown fields.
    token_ids: bool | None = None
    # The request field that makes it report the cached prefix of a request in its events again.
    full_report: Mapping[str, Any] | None = None
    # Its KV transfers to other engines, and the reason if there are none.
    handover: Handover | None = None
    no_handover: str | None = None
    role: Role | None = None  # its role
    pause_pages: tuple[str, ...] = ()  # paths that report whether it is paused or asleep
    data_parallel_rank: int | None = None  # rank of these capabilities; None: all ranks together
    ignored: tuple[str, ...] = ()  # reported values beyond their bounds, which count as not reported

    def of_rank(self, rank: int) -> Capabilities:
        """The capabilities of one data-parallel rank, of pages read by `Adapter.of_rank`.

        Raises ValueError if the engine has no such rank.
        """
        if self.ranks and rank not in self.ranks:
            raise ValueError(
                f"data_parallel_rank: {rank}: the engine has the ranks {', '.join(map(str, self.ranks))}"
            )
        handover = self.handover
        if handover is not None and handover.bootstrap_port is not None:
            handover = replace(handover, bootstrap_rank=(rank, len(self.ranks)))
        return replace(
            self,
            event_sources=tuple(source for source in self.event_sources if source.rank == rank),
            load_feeds=self.load_feeds[rank : rank + 1],
            load_header=False,  # the load header does not name the rank
            handover=handover,
            data_parallel_rank=rank,
        )

    def rank_header(self, rank: int) -> str:
        """The value of `X-data-parallel-rank` for one of its ranks.

        vLLM counts from the first rank of the server. Behind a hybrid or external load balancer,
        labels and KV event sources count over all servers (0.32.0).
        """
        return str(rank - min(self.ranks, default=0))

    @property
    def cache_tokens(self) -> int | None:
        """Capacity of its KV cache, tokens."""
        if self.cache_blocks is None or self.block_size is None:
            return None
        return self.cache_blocks * self.block_size

    def base(self, name: str | None = None) -> ModelCard | None:
        """The model with this name, or else the first model other than an adapter."""
        named = next((model for model in self.models if model.name == name), None)
        return named or next((model for model in self.models if model.parent is None), None)

    def root(self, name: str | None = None) -> str | None:
        """The source of the model `base(name)`: a folder on its machine, or a name at a hub."""
        base = self.base(name)
        return self.model_path or (base.root if base is not None else None)


MODELS = "/v1/models"


class NoModels(ValueError):
    """An engine lists no models, as Dynamo's frontend without a worker."""


async def read_models(status: int, body: bytes) -> tuple[tuple[ModelCard, ...], list[str]]:
    """The models in an answer to GET /v1/models, and what was ignored.

    Raises NoModels if the list is empty, ValueError if it is no such list.
    """
    if status != 200:
        raise ValueError(f"GET {MODELS}: status {status}")
    return await read_page(body, _models_of)


def _models_of(body: bytes) -> tuple[tuple[ModelCard, ...], list[str]]:
    models: list[ModelCard] = []
    ignored: list[str] = []
    try:
        cards = orjson.loads(body)["data"]
        if cards == []:
            raise NoModels(f"GET {MODELS}: it lists no model")
        for card in cards:
            name = card["id"]
            if not isinstance(name, str) or not name:
                continue
            if len(name) > MOST_NAME_CHARACTERS:
                ignored.append(f"model {name[:40]}…: more than {MOST_NAME_CHARACTERS} characters")
                continue
            if len(models) == MOST_MODELS:
                ignored.append(f"models beyond the first {MOST_MODELS}")
                break
            tokens = _count(card, "max_model_len", MOST_TOKENS, ignored)
            created = count_of(card, "created", MOST_BLOCKS)
            models.append(ModelCard(name, text_of(card, "root"), text_of(card, "parent"), tokens, created))
        if all(model.parent is not None for model in models):
            raise KeyError
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        why = f"; ignored: {ignored[0]}" if ignored else ""
        raise ValueError(f"GET {MODELS}: not a list of models: {body[:120]!r}{why}") from None
    return tuple(models), ignored


def _count(values: Mapping[str, Any], name: str, most: int, ignored: list[str]) -> int | None:
    """A whole number from 1 to ``most`` under that name, else None. A larger one is noted."""
    number = count_of(values, name, None)
    if number is None or number <= most:
        return number
    ignored.append(f"{name}: {str(values[name])[:40]} (at most {most})")
    return None


class Pages:
    """An engine's endpoints. Each is requested at most once."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._got: dict[str, tuple[int, bytes]] = {}
        self.unread: dict[str, str] = {}  # pages that have no JSON object, with the reason
        self.ignored: list[str] = []  # values beyond their bounds

    async def answer(self, path: str) -> tuple[int, bytes]:
        """Status and body of a path."""
        if path not in self._got:
            self._got[path] = await self._ask(path)
        return self._got[path]

    async def text(self, path: str) -> bytes:
        """The body of a path; empty if it does not exist."""
        status, body = await self.answer(path)
        return body if status == 200 else b""

    async def object(self, path: str) -> dict[str, Any]:
        """The JSON object of a path; empty if there is none, and `unread` has the reason."""
        status, body = await self.answer(path)
        if status != 200:
            self.unread[path] = f"GET {path}: status {status}"
            return {}
        try:
            value = await read_page(body, orjson.loads)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            self.unread[path] = f"GET {path}: not a JSON object: {body[:80]!r}"
            return {}
        return value

    async def models(self) -> tuple[ModelCard, ...]:
        """The models of /v1/models; the first one is the main model. Raises ValueError."""
        models, ignored = await read_models(*await self.answer(MODELS))
        self.ignored += ignored
        return models

    def count(self, values: Mapping[str, Any], name: str, most: int = MOST_COUNT) -> int | None:
        """A whole number from 1 to ``most`` under that name, else None.

        A larger one is noted in `ignored`.
        """
        return _count(values, name, most, self.ignored)

    async def owner(self) -> str | None:
        """The owner of the models in /v1/models."""
        cards = (await self.object(MODELS)).get("data")
        first = cards[0] if isinstance(cards, list) and cards else None
        return text_of(first, "owned_by") if isinstance(first, dict) else None


class Adapter(ABC):
    """The properties of one kind of engine. `title` is its name in messages."""

    name: str
    title: str
    # Load gauges of all its versions: name without prefix, and the field of `Load`.
    gauges: Mapping[str, Literal["waiting", "running", "kv_usage"]]
    prefix: str  # prefix of its metric names
    cached_counter: str | None = None  # counter of cached prompt tokens, no prefix
    cache_salt = False  # whether its cache separates prompts by `cache_salt`
    salts_messages = False  # whether it reads `cache_salt` on /v1/messages, too
    # Label of its metrics that names the data-parallel rank; None: requests cannot name a rank.
    rank_label: str | None = None
    rank: int | None = None  # the data-parallel rank of this adapter's figures; None: all ranks
    # Flags for load, prefix_cache, cached_tokens, kv_events, priority and handover, for the doctor.
    flags: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    async def capabilities(self, pages: Pages) -> Capabilities:
        """The capabilities that the engine reports. Raises ValueError for invalid content."""

    async def version(self, pages: Pages) -> str | None:
        """The version that the engine reports; None if it reports none."""
        return None

    def with_flags(self, flags: Mapping[str, str]) -> Self:
        """The adapter for an engine that has other flags for some features."""
        adapter = copy(self)
        adapter.flags = {**self.flags, **flags}
        return adapter

    def of_rank(self, rank: int) -> Self:
        """The adapter for one data-parallel rank. Raises ValueError if requests cannot name a
        rank."""
        if self.rank_label is None:
            raise ValueError(
                f"data_parallel_rank: {rank}: requests to {self.title} cannot name a "
                "rank; remove data_parallel_rank"
            )
        adapter = copy(self)
        adapter.rank = rank
        return adapter

    def own(self, page: bytes) -> bytes:
        """A page of metrics without the samples of data-parallel ranks other than `rank`."""
        if self.rank is None or self.rank_label is None:
            return page
        label, own = _rank_pattern(self.rank_label), b"%d" % self.rank
        lines = page.splitlines(keepends=True)
        return b"".join(line for line in lines if (of := label.search(line)) is None or of[1] == own)

    def load(self, page: bytes) -> Load:
        """The load in the content of `Capabilities.load_path`."""
        return read_gauges(self.own(page), self.prefix, self.gauges)

    def load_of_header(self, header: str) -> dict[str, float]:
        """The load in an `endpoint-load-metrics` header (ORCA), by the fields of `Load`.

        The header may have its TEXT or its JSON form.
        """
        found: dict[str, float] = {}
        for name, value in header_values(header).items():
            meaning = self.gauges.get(name)
            if meaning is not None and (number := finite(value, 0.0, MOST_LOAD)) is not None:
                found[meaning] = number
        return found

    def paused(self, body: bytes) -> bool:
        """Whether the content of one of `Capabilities.pause_pages` reports a pause."""
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            return False
        return isinstance(value, dict) and True in value.values()

    def asleep(self, page: bytes) -> bool:
        """Whether an engine's metrics show that it sleeps, without a cache; False: not known."""
        return False

    def error(self, body: bytes) -> str:
        """The message of an error answer on one line; empty if it has none."""
        return error_text(body)


def header_values(header: str) -> dict[str, Any]:
    """The metrics in an `endpoint-load-metrics` header (ORCA), in its TEXT or its JSON form, with
    and without the prefix `named_metrics`."""
    form, _, rest = header.partition(" ")
    if form == "JSON":
        try:
            values: dict[str, Any] = orjson.loads(rest)
            values |= values.pop("named_metrics", {})
        except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
            return {}
        return values
    values = {}
    for item in (rest if form == "TEXT" else header).split(","):
        name, _, value = item.strip().partition("=")
        values[name.removeprefix("named_metrics.")] = value
    return values


@functools.cache
def _pattern(prefix: str, names: tuple[str, ...]) -> re.Pattern[bytes]:
    """Finds these gauges on a Prometheus page: name without prefix, labels, value.

    It never crosses the end of a line and never goes back (`*+`), so its time grows with the page.
    """
    labels = rb'(?:\{(?:[^"{}\n]++|"(?:[^"\\\n]++|\\.)*+")*+\})?+'
    name = "|".join(map(re.escape, names)).encode()
    number = rb"[0-9.eE+-]{1,64}"
    return re.compile(b"^%b(%b)(%b) ++(%b)" % (prefix.encode(), name, labels, number), re.MULTILINE)


@functools.cache
def _rank_pattern(label: str) -> re.Pattern[bytes]:
    """Finds the data-parallel rank in a sample's labels."""
    return re.compile(rb'[{,]%b="(\d{1,9})"' % label.encode())


_LABEL = re.compile(r'[{,] *+([a-zA-Z_]\w*+)="((?:[^"\\]++|\\.)*+)"')


def labels_of(raw: bytes) -> dict[str, str]:
    """The labels of a sample, which `samples` returns in their braces."""
    return dict(_LABEL.findall(raw.decode(errors="replace")))


def _pieces(page: bytes) -> Iterator[bytes]:
    """A page in pieces of at most `LARGE_PAGE` bytes, cut between lines.

    Without this, one search would hold the interpreter for the whole page, also in a thread.
    """
    at, end = 0, len(page)
    while end - at > LARGE_PAGE:
        cut = page.rfind(b"\n", at, at + LARGE_PAGE) + 1
        if cut:
            yield page[at:cut]
            at = cut
        else:  # a longer line
            at = page.find(b"\n", at + LARGE_PAGE) + 1 or end
    if at < end:
        yield page[at:]


def samples(
    page: bytes, prefix: str, names: Iterable[str], negative: bool = False
) -> Iterator[tuple[str, bytes, float]]:
    """Name without prefix, labels in their braces, and value of each such sample on a Prometheus
    page. Values below 0 are left out unless ``negative``."""
    pattern = _pattern(prefix, tuple(names))
    for piece in _pieces(page):
        for name, labels, value in pattern.findall(piece):
            number = finite(value) if negative else number_of(value)
            if number is not None:
                yield name.decode(), labels, number


def read_gauges(page: bytes, prefix: str, gauges: Mapping[str, str]) -> Load:
    """The load in a page of metrics. Counts are summed over ranks; of the KV usage the highest
    counts."""
    found: dict[str, float] = {}
    names: dict[str, None] = {}
    for name, _, number in samples(page, prefix, gauges):
        meaning = gauges[name]
        before = found.get(meaning, 0.0)
        found[meaning] = max(before, number) if meaning == "kv_usage" else before + number
        names[prefix + name] = None
    return bounded_load(found, tuple(names))


def bounded_load(values: Mapping[str, float | None], names: tuple[str, ...]) -> Load:
    """The load with these values by field; values above `MOST_LOAD` are unknown."""
    return Load(**{of: finite(value, 0.0, MOST_LOAD) for of, value in values.items()}, names=names)


def finite(value: Any, least: float = -math.inf, most: float = math.inf) -> float | None:
    """A finite number from ``least`` to ``most``, else None."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and least <= number <= most else None


def number_of(value: Any) -> float | None:
    """A finite number from 0, else None."""
    return finite(value, 0.0)


def count_of(values: Mapping[str, Any], name: str, most: int | None = MOST_COUNT) -> int | None:
    """A whole number from 1 to ``most`` under that name, else None."""
    number = number_of(values.get(name))
    if not number or number != int(number) or (most is not None and number > most):
        return None
    return int(number)


def text_of(values: Mapping[str, Any], name: str) -> str | None:
    """A text of at most `MOST_TEXT_CHARACTERS` under that name, else None."""
    value = values.get(name)
    return value if isinstance(value, str) and 0 < len(value) <= MOST_TEXT_CHARACTERS else None
