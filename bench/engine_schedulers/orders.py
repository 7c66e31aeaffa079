"""The orders of vLLM engines, real and simulated, on the same requests.

Engines start anew for each order, because vLLM chooses its scheduler at the start. A router places
requests in turn, so that the orders differ in nothing else. The last four differ in the scheduler
and in whether requests are split, and are placed by LMETRIC.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "real"))
sys.path.insert(0, str(Path(__file__).parents[1] / "trust"))

from live import Live, TokenPrompts

from lmetric._core import StepTable
from lmetric.profiles import Profile
from lmetric_lab.demo import running_router
from lmetric_lab.ports import free_ports
from lmetric_lab.replay import Client, Player, Record
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace
from vllm_process import BIDIRECTIONAL, VllmEngine

ROOT = Path(__file__).parents[2]
WITH_PACKAGE = {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'integrations' / 'vllm'}"}
# Prompt tokens of a step whose time is the SLO: an eighth of vLLM's own budget.
SLO_PROMPT_TOKENS = 256
BUDGET_TOKENS = 2048
# NIXL on CPU lets engines wait for each other's pages.
PAIR = ("--set", "health.timeout=30")


@dataclass(frozen=True)
class Order:
    """An order on both sides."""

    simulated: str  # the simulator's local order
    scheduler: str | None = None  # class of lmetric-vllm
    flags: dict[str, Any] = field(default_factory=dict)  # of the engine
    policy: str = "round_robin"  # the router's
    router: tuple[str, ...] = ()  # more words of its command
    also: dict[str, Any] = field(default_factory=dict)  # of the simulation
    prompt_tokens: int | None = None  # of each step beside decodes, at most; None: `BUDGET_TOKENS`


def _pair(order: str, scheduler: str | None = None, *, split: bool) -> Order:
    """Engines that exchange KV. Requests are split at any token (Libra), or stay whole."""
    return Order(
        order,
        scheduler,
        {"kv_transfer_config": BIDIRECTIONAL},
        policy="lmetric",
        router=(*PAIR, *(("--split", "libra", "--experimental") if split else ())),
        also={"split": "libra"} if split else {},
    )


ORDERS = {
    "fcfs": Order("fcfs"),
    "budget_128": Order("fcfs", prompt_tokens=128),
    "budget": Order("fcfs", prompt_tokens=SLO_PROMPT_TOKENS),
    "budget_512": Order("fcfs", prompt_tokens=512),
    "priority": Order(
        "priority",
        flags={"scheduling_policy": "priority"},
        router=("--priority", "uniboost"),
        also={"priority": "uniboost"},
    ),
    "slo": Order("slo", "SloScheduler"),
    "uniboost": Order("uniboost", "UniBoostScheduler"),
    "whole": _pair("fcfs", split=False),
    "whole_slo": _pair("slo", "SloScheduler", split=False),
    "libra": _pair("fcfs", split=True),
    "libra_slo": _pair("slo", "SloScheduler", split=True),
}


def unshared(
    name: str,
    seed: int,
    gaps: NDArray[np.float64],
    prompts: NDArray[np.int64],
    answers: NDArray[np.int64],
    block: int,
) -> Trace:
    """Requests with these seconds between arrivals and lengths in tokens, each of shape (n,).

    No two prompts have a block in common.
    """
    offsets = np.concatenate(([0], np.cumsum(-(-prompts // block)))).astype(np.int64)
    return Trace(
        name=name,
        arrival_seconds=np.cumsum(gaps),
        input_tokens=prompts,
        output_tokens=answers,
        hash_offsets=offsets,
        hash_ids=np.arange(offsets[-1], dtype=np.uint64) + np.uint64(seed << 32),
        block_tokens=block,
    )


@dataclass(frozen=True)
class Mix:
    """Chats, and long prompts that interrupt them. Ranges are tokens, both ends included."""

    requests: int = 240
    long_share: float = 0.15
    chat_prompt: tuple[int, int] = (40, 200)
    chat_answer: tuple[int, int] = (20, 160)
    long_prompt: tuple[int, int] = (1500, 5000)
    long_answer: tuple[int, int] = (8, 160)

    def trace(self, seed: int, rate: float, block: int) -> Trace:
        """The requests, `rate` per second."""
        rng = np.random.default_rng(seed)
        long = rng.random(self.requests) < self.long_share

        def tokens(chat: tuple[int, int], other: tuple[int, int]) -> NDArray[np.int64]:
            drawn = [rng.integers(*each, self.requests, endpoint=True) for each in (chat, other)]
            return np.where(long, drawn[1], drawn[0]).astype(np.int64)

        prompts = tokens(self.chat_prompt, self.long_prompt)
        gaps = rng.exponential(1 / rate, self.requests)
        answers = tokens(self.chat_answer, self.long_answer)
        return unshared(f"mix-{seed}", seed, gaps, prompts, answers, block)

    def burst(self, block: int) -> Trace:
        """Requests that arrive at once."""
        return self.trace(seed=0, rate=1e6, block=block)

    def is_long(self, trace: Trace) -> NDArray[np.bool_]:
        """Whether a request has a long prompt, shape (n,)."""
        return trace.input_tokens > self.chat_prompt[1]


@dataclass
class Row:
    """Figures of a run. Times are seconds."""

    order: str
    side: str  # live or simulated
    seed: int
    requests: int
    failed: int
    e2e_mean: float
    e2e_p99: float
    chat_e2e_mean: float
    long_e2e_mean: float
    ttft_mean: float
    gap_p50: float  # between two tokens
    gap_p99: float
    output_tokens_per_second: float

    @staticmethod
    def of(order: str, side: str, seed: int, run: Live | Run, is_long: Any, **others: Any) -> Row:
        """From what clients measured, or from a simulation."""
        e2e = run.e2e_seconds
        return Row(
            order,
            side,
            seed,
            len(e2e),
            e2e_mean=float(np.nanmean(e2e)),
            e2e_p99=float(np.nanpercentile(e2e, 99)),
            chat_e2e_mean=float(np.nanmean(e2e[~is_long])),
            long_e2e_mean=float(np.nanmean(e2e[is_long])),
            ttft_mean=float(np.nanmean(run.ttft_seconds)),
            **others,
        )


class Timed:
    """A client that keeps the time of each token."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def body(self, prompt: Any, output_tokens: int, **fields: Any) -> bytes:
        """The body of a request."""
        return self._client.body(prompt, output_tokens, **fields)

    async def send(self, body: bytes, record: Record, start: float) -> None:
        """Sends a request and fills in its record."""
        record.token_times = []
        await self._client.send(body, record, start)


async def played(
    order: str, trace: Trace, mix: Mix, seed: int, engines: Sequence[VllmEngine], profile: Path
) -> Row:
    """Plays the requests through a router."""
    words = ["--policy", ORDERS[order].policy, "--programs", "none", "--set", "guard=false"]
    words += ["--profile", str(profile), *ORDERS[order].router]
    words += [word for engine in engines for word in ("--engine", engine.url)]
    async with running_router(free_ports(1)[0], words) as url, Client(url) as client:
        player = Player(trace, Timed(client), TokenPrompts(seed).prompt)
        await player.run()
    live = Live.of(player.records, 1.0)
    for failure in live.failures[:3]:
        print("failed:", failure, flush=True)
    gaps = np.concatenate([np.diff(record.token_times or []) for record in player.records])
    return Row.of(
        order,
        "live",
        seed,
        live,
        mix.is_long(trace),
        failed=len(live.failures),
        gap_p50=float(np.percentile(gaps, 50)),
        gap_p99=float(np.percentile(gaps, 99)),
        output_tokens_per_second=float(live.output_tokens.sum() / player.seconds),
    )


def simulated(
    order: str, trace: Trace, mix: Mix, seed: int, engines: int, profile: Profile, slo_seconds: float
) -> Row:
    """Plays the requests in the simulator."""
    tokens = budget(order, profile.max_sequences)
    profile = profile.model_copy(update={"max_batch_tokens": tokens})
    run = simulate(
        trace,
        policy=ORDERS[order].policy,
        instances=engines,
        profile=profile,
        admission="vllm",
        local_order=ORDERS[order].simulated,
        order_slo_seconds=slo_seconds,
        seed=seed,
        **ORDERS[order].also,
    )
    figures = run.summary()
    return Row.of(
        order,
        "simulated",
        seed,
        run,
        mix.is_long(trace),
        failed=figures.failed,
        gap_p50=figures.tbt_p50_seconds,
        gap_p99=figures.tbt_p99_seconds,
        output_tokens_per_second=figures.tokens_per_second,
    )


def budget(order: str, sequences: int) -> int:
    """Most tokens of a step, with decodes of all sequences."""
    prompt_tokens = ORDERS[order].prompt_tokens
    return BUDGET_TOKENS if prompt_tokens is None else prompt_tokens + sequences


def slo_of(profile: Profile, mix: Mix) -> float:
    """Seconds of a step with all sequences and `SLO_PROMPT_TOKENS` of a long prompt."""
    decodes = profile.max_sequences
    seconds = StepTable(profile.constants()).seconds(
        decodes=decodes,
        context_tokens=decodes * mix.chat_prompt[1],
        prefill_tokens=SLO_PROMPT_TOKENS,
        prefill_pairs=SLO_PROMPT_TOKENS * mix.long_prompt[1] / 2,
    )
    assert seconds is not None  # a profile answers always
    return seconds


def rate_of(profile: Profile, burst: Trace, engines: int, load: float) -> float:
    """Requests per second that are `load` of what the engines serve, from a trace that arrives at
    once."""
    run = simulate(burst, policy="round_robin", instances=engines, profile=profile, admission="vllm")
    return load * len(burst) / float(run.finished_seconds.max())


@contextlib.contextmanager
def running(
    order: str,
    count: int,
    make: Callable[[dict[str, Any], dict[str, str]], VllmEngine],
    *,
    sequences: int,
    slo_ms: float,
    profile: Path,
) -> Iterator[list[VllmEngine]]:
    """Engines with an order, which are ready. ``make`` makes one from flags and environment."""
    chosen = ORDERS[order]
    flags = {
        "scheduling_policy": "fcfs",
        "max_num_seqs": sequences,
        "max_num_batched_tokens": budget(order, sequences),
        "kv_events_config": None,
    }
    flags |= chosen.flags
    environ = {}
    if chosen.scheduler is not None:
        environ = WITH_PACKAGE
        flags["scheduler_cls"] = f"lmetric_vllm.{chosen.scheduler}"
    if chosen.scheduler == "SloScheduler":
        settings = {"token_slo_ms": round(slo_ms, 1), "profile": str(profile)}
        flags["additional_config"] = {"lmetric": settings}
    engines = [make(flags, environ) for _ in range(count)]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


class Table:
    """A CSV file of rows, dataclasses of one kind; a run that is there is not played again."""

    def __init__(self, path: Path, kind: type[Any]) -> None:
        self._path = path
        self._names = [each.name for each in dataclasses.fields(kind)]
        if not path.exists():
            path.write_text(",".join(self._names) + "\n")

    def rows(self) -> list[dict[str, str]]:
        """The rows so far."""
        with self._path.open() as file:
            return list(csv.DictReader(file))

    def has(self, **values: object) -> bool:
        """Whether a row with these values is there."""
        wanted = {name: str(value) for name, value in values.items()}
        return any(wanted.items() <= row.items() for row in self.rows())

    def add(self, row: Any) -> None:
        """Writes and prints a row."""
        values = {n: f"{v:.4f}" if isinstance(v, float) else v for n, v in dataclasses.asdict(row).items()}
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._names).writerow(values)
        print(" ".join(f"{name}={value}" for name, value in values.items()), flush=True)


def shuffled(orders: Sequence[str], seed: int) -> list[str]:
    """The orders of a round, in another sequence for each seed."""
    return random.Random(seed).sample(list(orders), len(orders))


MEASURES = ("e2e_mean", "e2e_p99", "chat_e2e_mean", "long_e2e_mean", "ttft_mean", "gap_p99")


def compared(rows: list[dict[str, str]]) -> str:
    """A Markdown table per measure: means of both sides, the spread over seeds, and the sequence of
    the orders."""
    lines = []
    for measure in MEASURES:
        lines += ["", f"| {measure.replace('_', ' ')}, s | live | simulated | live / simulated |"]
        lines.append("| --- | ---: | ---: | ---: |")
        ranks: dict[str, dict[str, float]] = {"live": {}, "simulated": {}}
        for order in ORDERS:
            cells = []
            for side, means in ranks.items():
                found = [float(r[measure]) for r in rows if (r["order"], r["side"]) == (order, side)]
                if not found:
                    break
                means[order] = float(np.mean(found))
                cells.append(f"{np.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})")
            else:
                ratio = ranks["live"][order] / ranks["simulated"][order]
                lines.append(f"| `{order}` | {cells[0]} | {cells[1]} | {ratio:.2f} |")
        sequences = [" < ".join(sorted(means, key=means.__getitem__)) for means in ranks.values()]
        same = "the same" if sequences[0] == sequences[1] else f"**not the same**: {sequences[1]} simulated"
        lines += ["", f"Live: {sequences[0]}; {same}."]
    return "\n".join(lines)
