"""Tables of the section "Growth" of docs/research/performance.md, which `report.py` renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmetric.defaults import DEFAULT_POLICY

Figures = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
# Instances: microseconds of a decision with a prompt of 8k tokens, p50.
PIECE = 16  # blocks for which an event holds the caches (`PIECE` in rust/core/src/feed/place.rs)
HOLDING = ("store_us", "remove_us")
DECISION_GOALS = {256: 4.0, 1_024: 6.0, 4_096: 10.0, 16_384: 25.0}


def judged(figure: float, goal: float, digits: int, *, at_least: bool = False) -> list[str]:
    """Returns the cells of a goal and of what was measured; a missed goal is bold."""
    met = figure >= goal if at_least else figure <= goal
    shown = f"{figure:,.{digits}f}"
    return [f"{'at least' if at_least else 'at most'} {goal:,g}", shown if met else f"**{shown}**"]


def sizes(result: Figures) -> Table:
    """Decisions and the index, by number of instances."""
    of = {(row["instances"], row["policy"], row["prompts"]): row for row in result["decisions"]}
    few, many = sorted({row["prompts"] for row in result["decisions"]})
    rows = []
    for index in result["index"]:
        instances = index["instances"]
        goal = DECISION_GOALS.get(instances)
        cells = []
        for policy in ("lmetric", DEFAULT_POLICY):
            for prompts in (few, many):
                row = of[instances, policy, prompts]
                p50 = f"{row['p50_us']:.1f}"
                bold = goal is not None and prompts == few and row["p50_us"] > goal
                cells.append(f"{f'**{p50}**' if bold else p50} / {row['p99_us']:.1f}")
        tail = [f"{index['match_us']:.1f}", f"{index['bytes_per_pair']:.1f}"]
        rows.append([f"{instances:,}", f"{goal:g}" if goal else "-", *cells, *tail])
    heads = [f"{policy}, {prompts}" for policy in ("lmetric", DEFAULT_POLICY) for prompts in (few, many)]
    return ["instances", "goal", *heads, "match", "bytes a block"], rows


def feed(result: Figures) -> Table:
    """The feed of events, and decisions beside it."""
    rows = []
    for row in result["rows"]:
        rate = row.get("stored_blocks_per_cpu_second", row.get("stored_blocks_per_thread_cpu_second"))
        if "calls" in row:
            rows.append([row["case"], "-", f"{row['p50_us']:.1f} / {row['p99_us']:.1f}"])
        else:
            rows.append([row["case"], f"{rate / 1e6:.2f}", "-"])
    return ["case", "million blocks/s of a core", "decision, us"], rows


def pieces(result: Figures) -> list[list[str]]:
    """The goal of events: how long a piece of one holds the caches."""
    most = max(row[name] / row["blocks_of_a_call"] for row in result["index"] for name in HOLDING)
    what = f"piece of an event, {PIECE} shared blocks, most of all sizes, us (`bench/core.py sizes`)"
    return [[what, *judged(most * PIECE, 2, 1)]]


def beside(result: Figures) -> list[list[str]]:
    """The goal of decisions beside all other work."""
    quiet, busy = (row["p99_us"] for row in result["rows"][-2:])
    what = "p99 of a decision beside events, scrapes and searches, times the quiet p99"
    return [[what, *judged(busy / quiet, 1.5, 2)]]


def workers(result: Figures) -> list[list[str]]:
    """The goals of two workers."""
    rows = []
    for row in result["summary"]:
        if row["workers"] == "one worker":
            continue
        where = f"two workers, {row['place']}, {row['cell']}s"
        rows.append(
            [f"{where} per CPU-second, times one worker's", *judged(row["ratio"][0], 0.92, 2, at_least=True)]
        )
        if row["place"] != "core 1":
            others = (
                f"{where} by the clock, times one worker's (others took {row['other_cores'][0]:.1f} cores)"
            )
            rows.append([others, "-", f"{row['speed'][0]:.2f}"])
    most = max(row["lock_wait_share"][0] for row in result["summary"])
    return [*rows, ["lock waits, % of CPU time, most of all", *judged(most * 100, 2, 2)]]


def threads(result: Figures) -> list[list[str]]:
    """The goal of `route_many` on two threads."""
    what = "`route_many` on two threads: CPU per decision, times one thread's, prompts are"
    cells = [(kind, result[kind]["two_over_one"]["cpu_us"]) for kind in ("owned", "arrays")]
    return [
        [f"{what} {kind} [{each['low']:.2f}, {each['high']:.2f}]", *judged(each["median"], 1.15, 2)]
        for kind, each in cells
    ]


def memory(result: Figures) -> list[list[str]]:
    """The memory of a worker."""
    before, after = max(result["before_mib"]), max(result["after_mib"])
    millions = result["indexed_blocks"] / 1e6
    each = (after - before) * 2**20 / result["indexed_blocks"]
    what = f"RSS of a worker, {result['engines']} engines, {millions:.1f} million blocks, MiB"
    return [[f"{what} ({before:.0f} before; {each:.0f} bytes a block)", "-", f"{after:,.0f}"]]


def lost(result: Figures) -> list[list[str]]:
    """The goals of streams while engines are lost."""
    setting, turn, delays = result["setting"], result["turn"], result["delays"]
    missing = result["lost"] + result["of_another_text"]
    run = f"{setting['streams']:,} streams, {result['engines_lost']} engines lost"
    rows = [
        [f"{run}: lost of {result['streams']:,} answers", *judged(missing, 0, 0)],
        [
            f"engines are lost: CPU time of a turn of the loop, p99, ms (greatest {turn['most_ms']:.1f})",
            *judged(turn["p99_ms"], 10, 1),
        ],
    ]
    for name in ("relay", "router"):
        added = (delays[name][key] - delays["direct"][key] for key in ("p50_us", "p99_us"))
        p50, p99 = (f"{each / 1e3:.2f}" for each in added)
        what = {"relay": "a bare relay", "router": "the router"}[name]
        rows.append([f"engines are lost: latency added by {what}, p50 / p99, ms", "-", f"{p50} / {p99}"])
    return rows


def exact(result: Figures) -> list[list[str]]:
    """The goal of simulated workers."""
    return [
        [
            f"simulated mean end to end, {row['workload']}: two workers, times one's",
            *judged(row["of_one"], 1.01, 3),
        ]
        for row in result["rows"]
        if (row["what"], row["count"]) == ("workers", 2)
    ]


GOALS: dict[str, Callable[[Figures], list[list[str]]]] = {
    "sizes": pieces,
    "feed": beside,
    "threads": threads,
    "workers": workers,
    "worker-rss": memory,
    "lost-engines": lost,
    "replicas-clusters": exact,
}


def clusters(result: Figures) -> Table:
    """The mean end to end in the simulator, times that of one worker, by workload."""
    found = {(row["what"], row["count"], row["workload"]): row for row in result["rows"]}
    names = list(dict.fromkeys(row["workload"] for row in result["rows"]))
    counts = dict.fromkeys((row["what"], row["count"]) for row in result["rows"] if row["count"] > 1)
    rows = [
        [f"{count} {what}", *(f"{found[what, count, name]['of_one']:.3f}" for name in names)]
        for what, count in counts
    ]
    return ["", *names], rows


def routers(fleet: Figures) -> Table:
    """Costs of routers, by their number."""
    head = ["", "changes, MB/s", "% of a core", "whole loads, MB/s", "% of a core"]
    counts = dict.fromkeys(row["routers"] for row in fleet["rows"])
    costs = {(row["routers"], row["messages"]): row for row in fleet["rows"]}

    def cost(count: int, messages: str) -> list[str]:
        row = costs[count, messages]
        share = row["make_percent_of_a_core"] + row["receive_percent_of_a_core"]
        return [f"{row['mb_per_second']:.2f}", f"{share:.1f}"]

    return head, [[f"{each} routers", *cost(each, "changes"), *cost(each, "whole load")] for each in counts]
