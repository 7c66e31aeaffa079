"""The figures as Markdown, for the terminal and for docs/research/trust.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

LABELS = {"ttft_seconds": "TTFT", "tpot_seconds": "TPOT", "e2e_seconds": "end to end"}
SIDES = {
    "live": "live",
    "as_live": "simulated, knowing what the live router knows",
    "as_default": "simulated, knowing all",
}
RANKED = ("ttft_seconds", "tpot_seconds")


def clocks_table(clocks: dict[str, Any]) -> Iterator[str]:
    """Returns the same placements under two clocks."""
    yield "| | simulated | live | live / simulated | 95% of resamples | the engines' own |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, label in LABELS.items():
        for figure, row in clocks[name]["by_figure"].items():
            low, high = row["interval"]
            own = f"{clocks[name]['engines_ratio']:.4f}" if figure == "mean" else ""
            yield (
                f"| {label} {figure}, ms | {1e3 * row['simulated']:.1f} | {1e3 * row['live']:.1f} | "
                f"{row['ratio']:.4f} | {low:.4f} to {high:.4f} | {own} |"
            )
    hit = clocks["hit_ratio"]
    ratio = "" if hit["ratio"] is None else f"{hit['ratio']:.4f}"
    yield f"| prompt tokens hit | {hit['simulated']:.2%} | {hit['live']:.2%} | {ratio} | | |"
    yield ""
    late, excess = clocks["late_wall_seconds"], clocks["ttft_excess_ms"]
    yield (
        f"{clocks['requests']} requests, {clocks['requests_with_equal_hits']} with equal hits, "
        f"{len(clocks['failures'])} failed, {clocks['preemptions']} preemptions. Of the mean TTFT's "
        f"difference, {excess['sent_late']:.1f} ms are the client's (it sent late; p99 "
        f"{1e3 * late['p99']:.0f} ms), {excess['sockets_parsing_timers']:.1f} ms sockets, parsing, timers, "
        f"{excess['in_the_engines']:.1f} ms in the engines."
    )


def ranks_tables(ranks: dict[str, Any]) -> Iterator[str]:
    """Returns the order of policies, and the control."""
    for quantity in RANKED:
        yield f"| mean {LABELS[quantity]}, ms | {' | '.join(SIDES.values())} |"
        yield "| --- | --- | --- | --- |"
        for policy, row in sorted(ranks[quantity]["policies"].items(), key=lambda each: each[1]["live"]):
            repeats = ", ".join(f"{1e3 * each:.1f}" for each in row["live_repeats"])
            means = [f"{1e3 * row[side]:.1f}" for side in SIDES]
            yield f"| {policy} | {means[0]} ({repeats}) | {means[1]} | {means[2]} |"
        yield ""
    yield "| live against | by | tau | 95% of resamples | pairs in the same order | of the decided | close |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for quantity in RANKED:
        for side, each in ranks[quantity]["agreement"].items():
            low, high = each["interval"]
            yield (
                f"| {SIDES[side]} | {LABELS[quantity]} | {each['tau']:.2f} | {low:.2f} to {high:.2f} | "
                f"{each['same_order']} of {each['pairs']} | "
                f"{each['decided_same_order']} of {each['decided']} | "
                f"{'; '.join(each['close']) or 'none'} |"
            )
    yield ""
    control = ranks["control"]
    first = f"the first {control['requests']} requests, mean TTFT, ms"
    yield f"| {first} | {control['policy']} | the worst other |"
    yield "| --- | --- | --- |"
    for side, label in SIDES.items():
        each = control[side]
        yield (
            f"| {label} | {1e3 * each['mean']:,.0f} | {1e3 * each['worst_other_mean']:,.0f} "
            f"({each['worst_other']}) |"
        )


def render(result: dict[str, Any]) -> dict[str, str]:
    """Returns the tables by the name of the part that made them."""
    makers = {"clocks": clocks_table, "ranks": ranks_tables}
    return {name: "\n".join(make(result[name])) for name, make in makers.items() if name in result}


def write_into(page: Path, tables: dict[str, str], about: dict[str, Any]) -> None:
    """Puts the tables between their marks in `page`."""
    machine = about["machine"]
    stamp = f"{about['date'][:10]}, commit {about['commit']}, {machine['cpu']}, {machine['cores']} cores"
    stamp += f", load average {about['load_average'][0]:.1f} before"
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{page}: no place for the tables; expected one {begin} and one {end}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{table}\n\n({stamp})\n\n{end}{rest.partition(end)[2]}"
    page.write_text(text)
