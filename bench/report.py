"""Renders the newest raw files of `bench/results` into `docs/explanation/performance.md`
and `docs/research/performance.md`.

    python bench/report.py [--check]

A table is between `<!-- NAME -->` and `<!-- /NAME -->`; the text around it is written by hand. The
project sets the budgets. The figure in the raw file meets or misses each budget, without favorable
rounding.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml

import growth_tables as growth
from common import ROOT
from shown import select

PAGES = [ROOT / "docs" / folder / "performance.md" for folder in ("explanation", "research")]
Figures = dict[str, Any]


def newest(what: str) -> tuple[str, Figures]:
    """Name and content of the newest raw file of a kind."""
    found = sorted((ROOT / "bench" / "results").glob(f"*-{what}.json"))
    if not found:
        sys.exit(f"report.py: no bench/results/*-{what}.json: run bench/run_all.sh")
    return found[-1].name, json.loads(found[-1].read_text())


GROWTH = (
    "sizes",
    "feed",
    "threads",
    "workers",
    "worker-rss",
    "lost-engines",
    "replicas-fleet",
    "replicas-clusters",
)
NOT_MEASURED = "Not measured yet."


def measured() -> dict[str, tuple[str, Figures]]:
    """The newest raw files of the section "Growth" that there are."""
    return {what: newest(what) for what in GROWTH if [*(ROOT / "bench" / "results").glob(f"*-{what}.json")]}


def growing(files: dict[str, tuple[str, Figures]]) -> dict[str, str]:
    """The tables of the section "Growth"."""
    found = {what: result for what, (_, result) in files.items()}
    parts = {what: table(*getattr(growth, what)(found[what])) for what in ("sizes", "feed") if what in found}
    if "replicas-fleet" in found:
        parts["routers"] = table(*growth.routers(found["replicas-fleet"]))
    if "replicas-clusters" in found:
        parts["clusters"] = table(*growth.clusters(found["replicas-clusters"]))
    goals = [row for what, rows in growth.GOALS.items() if what in found for row in rows(found[what])]
    if goals:
        parts["goals"] = table(["what", "goal", "measured"], goals)
    return {name: parts.get(name, NOT_MEASURED) for name in ("sizes", "feed", "goals", "routers", "clusters")}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def machine(results: dict[str, tuple[str, Figures]]) -> str:
    """The machine, its load, and a table of raw files with commits and versions."""
    lines = []
    for what, (name, result) in results.items():
        loads = [load[0] for load in result["load_average"]]
        lines.append(
            [
                f"[{what}](../../bench/results/{name})",
                result["date"],
                result["commit"],
                f"{min(loads):.1f}-{max(loads):.1f}",
                ", ".join(f"{k} {v}" for k, v in result["versions"].items()),
            ]
        )
    worst = max(load[0] for _, result in results.values() for load in result["load_average"])
    busy = (
        "\n\n**Other work ran on the machine meanwhile** (load average up to "
        f"{worst:.1f}): times are upper bounds, p99 above all; ratios are of calls and runs taken in turn."
    )
    about = next(iter(results.values()))[1]["machine"]
    where = f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}"
    return f"{where}, Python {about['python']}.{busy if worst > 2.5 else ''}\n\n" + table(
        ["raw file", "when (UTC)", "commit", "load average", "versions"], lines
    )


def budgets(results: dict[str, tuple[str, Figures]]) -> Iterator[list[str]]:
    """Yields a table row per budget: name, limit, measured figure, met or MISSED."""

    def line(what: str, figure: float, budget: float, unit: str, at_least: bool = False) -> list[str]:
        met = figure >= budget if at_least else figure <= budget
        sign = "at least" if at_least else "at most"
        return [
            what,
            f"{sign} {budget:g} {unit}",
            f"{figure:.{2 if figure < 10 else 1}f} {unit}",
            "met" if met else "**MISSED**",
        ]

    core, plans, memory, decision, http, simulator, tokens = (
        results[what][1] for what in ("core", "plans", "memory", "decision", "http", "simulator", "tokens")
    )
    later = tokens["ours"]["100000 later"]["ms"][0]
    yield line("chat of 100k tokens, 99k seen before, body to decision, p50", later, 3, "ms of one core")
    for row in simulator["rows"]:
        if row["budget_seconds"]:
            yield line(
                f"simulated hour, {row['name']}", row["cpu"][0], row["budget_seconds"], "s of one core"
            )
    resident = max(row["peak_mib"][0] for row in simulator["rows"] if row["name"].startswith("16 engines"))
    yield line("the same on 16 engines, peak memory with the interpreter", resident, 150, "MiB")
    latency = core["index_latency"]
    for blocks, budget in ((64, 0.5), (512, 1.6), (2048, 4.0)):
        figure = latency[f"chain + match {blocks} blocks"]["p50_us"]
        yield line(f"match + chaining, {blocks} blocks, Rust, p50", figure, budget, "us")
    rows = {(row["stage"], row["case"]): row for row in decision["rows"]}
    for blocks in (64, 512, 2048):
        ratio = rows["match", f"{blocks} blocks"]["ratio_p50"]
        yield line(
            f"match, {blocks} blocks, from Python, times Dynamo's binding", ratio, 10, "x", at_least=True
        )
    for (stage, case), row in rows.items():
        if stage.startswith("hash"):
            yield line(f"{stage}, {case}, from Python, p50", row["ours"]["p50_us"], 0.2, "us")
        elif stage == "decide 8k, warm" and case.startswith("16 prompts"):
            yield line(f"{stage}, {case}, p50", row["ours"]["p50_us"], 5, "us")
            yield line(f"{stage}, {case}, times Dynamo's", row["ratio_p50"], 60, "x", at_least=True)
        elif stage in ("decide 8k, index beyond the caches", "decide 8k, caches flushed"):
            yield line(f"{stage}, {case}, p50", row["ours"]["p50_us"], 10, "us")
        elif "beside" in stage and "events" in stage:
            rate = row["events_per_second"] / 1e3
            yield line(f"{stage} ({rate:.0f}k/s applied), {case}, p99", row["ours"]["p99_us"], 15, "us")
    for what, score in core["score_1024"].items():
        yield line(f"{what}, 1,024 instances, Rust, p50", score["p50_us"], 0.6, "us")
    for name, cut in plans["cuts"].items():
        if budget := 100 if "split libra" in name else 50 if "planner" in name else None:
            yield line(f"{name}, Rust, p99", cut["p99_us"], budget, "us")
    for name, call in plans["priorities"].items():
        if name.startswith("a request"):
            yield line(f"{name}, p99", call["p99_us"], 1, "us")
    for each in plans["rounds"]:
        if "router" in each["what"] and each["instances"] == 256:
            yield line(f"{each['what']}, 256 x {each['requests']}, p99", each["p99_us"] / 1e3, 3, "ms")
    alone, mapped = (memory["index_memory"][feed][-1] for feed in ("approximate", "exact"))
    yield line("index memory a pair, at its bound", alone["index_bytes"] / alone["pairs"], 50, "bytes")
    both = mapped["a_pair"] + mapped["a_name"]
    yield line("the same and an entry of the map from engines' hashes", both, 75, "bytes")
    ours, floor = http["summary"].get("lmetric"), http["summary"]["aio-raw"]
    if ours is None:
        yield ["proxy", "", "not measured", "**MISSED**"]
        return
    yield line("router CPU a request, 1 KB, 32 connections", ours["c32_1k"]["cpu_us"][0], 45, "us")
    yield line("router CPU a request, 32 KB, 32 connections", ours["c32_32k"]["cpu_us"][0], 75, "us")
    chunk, bare = ours["s200"]["cpu_us"][0], floor["s200"]["cpu_us"][0]
    yield line(f"router CPU a streamed chunk ({chunk:.1f} us), times a bare relay's", chunk / bare, 1.15, "x")
    yield line("latency added at 500 requests/s, 1 KB, p50", ours["o500_1k"]["added_p50_us"][0], 200, "us")


def missed(results: dict[str, tuple[str, Figures]]) -> str:
    """Returns the number of budgets and a table of the missed ones."""
    every = list(budgets(results))
    rows = [line[:3] for line in every if line[3] != "met"]
    told = f"{len(every) - len(rows)} of {len(every)} budgets are met. These are missed:"
    return f"{told}\n\n{table(['what', 'budget', 'measured'], rows)}"


def decision(result: Figures) -> str:
    """A table of decision stages, ours and Dynamo's, p50 / p99 in us."""

    def pair(figures: dict[str, float] | None) -> str:
        return f"{figures['p50_us']:.2f} / {figures['p99_us']:.2f}" if figures else "-"

    rows = [
        [
            row["stage"],
            row["case"],
            pair(row["ours"]),
            pair(row["dynamo"]),
            f"{row['ratio_p50']:.0f}x" if row["dynamo"] else "-",
            row["our_call"],
        ]
        for row in result["rows"]
    ]
    return table(["stage", "case", "ours, us", "Dynamo, us", "ratio", "our call"], rows)


def plans(result: Figures) -> str:
    """Tables of splits, priorities, replicas and rebalancing rounds, in us."""

    def label(name: str) -> str:
        return name.replace("told,", "export,").replace("heard of one of three,", "import from one of three,")

    def calls(what: str) -> str:
        rows = [
            [label(name), *(f"{call[key]:.2f}" for key in ("p50_us", "p99_us"))]
            for name, call in result[what].items()
        ]
        return table([what, "p50, us", "p99, us"], rows)

    rounds: dict[str, list[str]] = {}
    for each in result["rounds"]:
        rounds.setdefault(each["what"], []).append(f"{each['p50_us']:.0f} / {each['p99_us']:.0f}")
    sizes = dict.fromkeys(f"{each['instances']} x {each['requests']}" for each in result["rounds"])
    return "\n\n".join(
        [
            calls("cuts"),
            calls("priorities"),
            calls("replicas"),
            "Rounds of rebalancing, p50 / p99 in us, by instances and requests that decode on each:",
            table(["rule", *sizes], [[what, *cells] for what, cells in rounds.items()]),
        ]
    )


def http(result: Figures) -> str:
    """Tables of CPU and latency per router."""

    def cell(name: str, where: str, key: str) -> str:
        figure = result["summary"][name].get(where, {}).get(key)
        if figure is None or (name == "direct" and key == "cpu_us"):
            return "-"
        middle, low, high, count = figure
        digits = 0 if abs(middle) >= 100 else 1
        spread = f"[{low:.{digits}f}-{high:.{digits}f}]" if count > 1 else "(1)"
        return f"{middle:.{digits}f} {spread}"

    def part(columns: dict[str, tuple[str, str]]) -> str:
        names = [name for name in result["summary"] if any(cell(name, *c) != "-" for c in columns.values())]
        return table(["", *columns], [[n, *(cell(n, *c) for c in columns.values())] for n in names])

    closed = {"c32_1k": "32 conn., 1 KB", "c32_32k": "32 conn., 32 KB", "c256_1k": "256 conn., 1 KB"}
    opened = {"o500_1k": "1 KB", "o500_32k": "32 KB"}
    added = {f"{t} +{p}": (c, f"added_{p}_us") for c, t in opened.items() for p in ("p50", "p99")}
    direct = result["summary"]["direct"]
    base = ", ".join(
        f"{what} {direct[c]['p50_us'][0]:.0f} / {direct[c]['p99_us'][0]:.0f}"
        for c, what in {**opened, "s200": "streams, one way"}.items()
    )
    return "\n\n".join(
        [
            "Router CPU, us a request, closed loop:",
            part({text: (c, "cpu_us") for c, text in closed.items()}),
            "Open loop, Poisson arrivals, 500/s: latency added over direct and router CPU a request, us. "
            f"Direct itself, p50 / p99 us: {base}.",
            part({**added, **{f"CPU {text}": (c, "cpu_us") for c, text in opened.items()}}),
            "200 streams, a token each 5 ms: router CPU, us a chunk; one-way delay added a chunk, us:",
            part(
                {
                    "us/chunk": ("s200", "cpu_us"),
                    "+p50": ("s200", "added_p50_us"),
                    "+p99": ("s200", "added_p99_us"),
                }
            ),
        ]
    )


def simulator(result: Figures) -> str:
    """A table of simulated clusters, ours and Dynamo's replay."""

    def spread(figure: list[float]) -> str:
        return f"{figure[0]:.3f} [{figure[1]:.3f}-{figure[2]:.3f}]"

    same = {True: "yes", False: "no", None: "-"}
    rows = [
        [
            row["name"],
            spread(row["cpu"]),
            spread(row["wall"]),
            f"{row['peak_mib'][0]:.0f}",
            same[row["bit_equal"]],
        ]
        for row in result["rows"]
    ]
    return table(["run", "processor, s", "wall clock, s", "peak MiB", "repeats"], rows)


def tokens(result: Figures) -> str:
    """A table of chats to decisions, ours and transformers."""

    def spread(figure: list[float]) -> str:
        return f"{figure[0]:.2f} [{figure[1]:.2f}-{figure[2]:.2f}]"

    parts = ("parse", "render", "tokenise", "decide")
    rows = []
    for name, ours in result["ours"].items():
        theirs = result.get("transformers", {}).get(name)
        each = [f"{ours['parts_ms'][part]:.2f}" for part in parts]
        size, turn = name.split()
        row = [f"{int(size):,}", turn, f"{ours['tokens']:,}", str(ours["messages"]), *each]
        beside = [spread(theirs), f"{theirs[0] / ours['ms'][0]:.0f}x"] if theirs else ["-", "-"]
        rows.append([*row, spread(ours["ms"]), *beside])
    stages = ("parse", "render", "tokenize", "decide")
    head = ["size", "turn", "tokens", "messages", *stages, "ours, ms", "transformers, ms", "ratio"]
    return table(head, rows)


def main() -> None:
    """Renders the page, or checks it."""
    kinds = ("core", "plans", "memory", "decision", "http", "simulator", "tokens", "tokens-fast")
    results = {what: newest(what) for what in kinds}
    grown = measured()
    parts = {
        **growing(grown),
        "machine": machine(results | grown),
        "budgets": missed(results),
        "plans": plans(results["plans"][1]),
        "decision": decision(results["decision"][1]),
        "http": http(results["http"][1]),
        "simulator": simulator(results["simulator"][1]),
        "tokens": tokens(results["tokens"][1]),
        "tokens-fast": tokens(results["tokens-fast"][1]),
    }
    old = {page: page.read_text() for page in PAGES}
    new = dict(old)
    for name, text in parts.items():
        pattern = re.compile(rf"(<!-- {name}(?: (\{{.*?\}}))? -->\n).*?(<!-- /{name} -->)", re.DOTALL)

        def part(match: re.Match[str], name: str = name, text: str = text) -> str:
            shown = select(text, yaml.safe_load(match[2]), name) if match[2] else text
            return f"{match[1]}\n{shown}\n\n{match[3]}"

        found = [page for page in PAGES for _ in pattern.finditer(new[page])]
        if len(found) != 1:
            sys.exit(f"report.py: the pages need one pair of <!-- {name} --> marks, they have {len(found)}")
        new[found[0]] = pattern.sub(part, new[found[0]])
    for page in PAGES:
        if "--check" not in sys.argv:
            page.write_text(new[page])
        elif new[page] != old[page]:
            sys.exit(f"report.py: {page.relative_to(ROOT)} is stale: run report.py")


if __name__ == "__main__":
    main()
