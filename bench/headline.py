"""Makes the charts and the table of the README from the stored results of Figures 21 to 24.

    python bench/headline.py            # writes README.md and docs/images/headline_*.svg
    python bench/headline.py --check    # fails if the README differs from the results

`python bench/reproduce/run.py --figure 21` simulates the results again. Their method is described
in docs/research/lmetric.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from result_files import path_of, read_figure
from verdicts import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "bench/reproduce/results"
README = ROOT / "README.md"
CHARTS = (ROOT / "docs/images/headline_ttft.svg", ROOT / "docs/images/headline_tpot.svg")
MARKED = re.compile(r"(<!-- headline -->\n).*?(\n<!-- /headline -->)", re.DOTALL)
# The policies, by the name of the stored results without its parameters, in the order of the table.
POLICIES = {
    "round_robin": "round robin",
    "vllm": "vLLM's balancer: 4 × waiting + running",
    "aibrix_prefix": "AIBrix: prefix match within a load limit",
    "llmd_scorers": "llm-d: queue, KV usage and prefix scorers",
    "dynamo": "Dynamo 1.6: prefill plus decode blocks",
    "dynamo_linear": "Dynamo's form, weight tuned per workload",
    "linear": "BAILIAN's form, weight tuned per workload",
    "lmetric": "LMETRIC: new prefill tokens × batch size",
    "total_delay": "the default: the sum of delays",
}
# The workloads, by the name of the stored results, and what the table calls them.
WORKLOADS = {
    "conversation": "Kimi chat",
    "azure": "Azure chat",
    "chat": "chat",
    "agent": "agents",
    "coder": "coding",
}
Means = dict[str, dict[str, tuple[float, float]]]


def limits(text: str) -> list[float]:
    """A quantity of Figure 25 (loads up to the maximum) by workload, mean over seeds."""
    rows = {row["stage"]: row[text] for row in read_figure(STUDY, "25")["rows"]}
    return [mean(rows[name]) for name in WORKLOADS]


def read() -> tuple[Means, int]:
    """Mean TTFT in seconds and mean TPOT in milliseconds by workload and policy; the number of
    seeds."""
    figure = read_figure(STUDY, "21")
    means: Means = {workload: {} for workload in WORKLOADS}
    for row in figure["runs"]:
        if row["stage"] in means:
            policy = row["policy"].partition("(")[0]
            means[row["stage"]][policy] = (mean(row["ttft_mean_s"]), mean(row["tpot_mean_ms"]))
    return means, figure["seeds"]


def table(means: Means, seeds: int) -> str:
    """The Markdown table: mean TTFT / mean TPOT, and one sentence on the best rival."""
    head = " | ".join(WORKLOADS.values())
    lines = [f"| mean TTFT, s / mean TPOT, ms | {head} |", f"| --- |{' ---: |' * len(WORKLOADS)}"]
    for policy, label in POLICIES.items():
        cells = [f"{ttft:#.3g} / {tpot:.0f}" for ttft, tpot in (means[name][policy] for name in WORKLOADS)]
        if policy == "total_delay":
            label, cells = f"**{label}**", [f"**{cell}**" for cell in cells]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    changes = {
        metric: [means[name]["lmetric"][place] / means[name]["vllm"][place] - 1 for name in WORKLOADS]
        for place, metric in enumerate(("TTFT", "TPOT"))
    }
    tuned = [
        [means[name][policy][place] / means[name]["lmetric"][place] - 1 for name in WORKLOADS]
        for policy in ("dynamo_linear", "linear")
        for place in (0, 1)
    ]
    ours = [
        [means[name]["total_delay"][place] / means[name]["lmetric"][place] - 1 for name in WORKLOADS]
        for place in (0, 1)
    ]
    own = [0.5 / (1 + value) for value in limits("vLLM's maximum load against LMETRIC's")]
    own_ttft = limits("LMETRIC against vLLM at half of vLLM's own maximum, mean TTFT")
    more = [value for value in limits("the tuned linear combination's") if value > 0]
    late = [value for value in limits("LMETRIC against tuned linear at 95%, mean TTFT") if value > 0]
    lines += [
        "",
        f"16 simulated engines at half of the load that LMETRIC sustains, {seeds} seeds. The default "
        f"differs from LMETRIC by {Span(ours[0]):+.0%} in mean TTFT and {Span(ours[1]):+.0%} in mean TPOT. "
        "It gains on recorded agents and near the limit ([tables](docs/explanation/default_policy.md)). "
        f"Compared with vLLM's balancer, LMETRIC's mean TTFT changes by {Span(changes['TTFT']):+.0%} and "
        f"mean TPOT by {Span(changes['TPOT']):+.0%}. This load is {Span(own):.0%} of the load that vLLM's "
        "balancer sustains: above its limit, its queue grows. At half of its own limit, mean TTFT changes by "
        f"{Span(own_ttft):+.0%}. Two rivals are sums with a weight tuned for each workload. "
        f"Dynamo's form differs from LMETRIC by {Span(tuned[0]):+.0%} in TTFT and {Span(tuned[1]):+.0%} in "
        f"TPOT, BAILIAN's by {Span(tuned[2]):+.0%} and {Span(tuned[3]):+.0%}. Near the limit a tuned sum can "
        f"be better: BAILIAN's sustains {Span(more):+.0%} on {len(more)} of the {len(WORKLOADS)} workloads. "
        f"At 95%, LMETRIC's TTFT is {Span(late):+.0%} on {len(late)}. LMETRIC has no weight to tune. The "
        "first two workloads are recorded traces, the others are synthetic.",
    ]
    return "\n".join(lines)


def chart(means: Means, metric: int) -> Figure:
    """The mean TTFT (0) or TPOT (1) of all policies on recorded chat and on agents."""
    from matplotlib.figure import Figure  # not above: --check draws nothing

    what, unit = (("time to first token", "s"), ("time per output token", "ms"))[metric]
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    shown = {"conversation": "recorded chat", "agent": "agents"}
    policies = list(reversed(POLICIES))
    for axes, (workload, title) in zip(figure.subplots(1, 2, sharey=True), shown.items(), strict=True):
        values = [means[workload][policy][metric] for policy in policies]
        labels = [POLICIES[policy].partition(":")[0] for policy in policies]
        colors = ["#d9480f" if policy == "total_delay" else "#868e96" for policy in policies]
        bars = axes.barh(labels, values, color=colors)
        axes.bar_label(
            bars, [f"{value:.2g} {unit}" for value in values], padding=3, color="#495057", fontsize=8
        )
        axes.set_title(f"Mean {what}, {title}", fontsize=9, color="#495057")
        axes.set_xlim(0, max(values) * 1.2)
        axes.set_xticks([])
        axes.tick_params(length=0, colors="#495057", labelsize=8)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 on a difference")
    options = parser.parse_args()
    means, seeds = read()
    old = README.read_text()
    new, found = MARKED.subn(lambda match: match[1] + table(means, seeds) + match[2], old)
    if found != 1:
        sys.exit(f"headline.py: {README.name}: expected one part <!-- headline -->, found {found}")
    if options.check:
        if new != old:
            sys.exit(
                f"headline.py: {README.name} differs from {path_of(STUDY, '21', 'runs').name}; "
                "run python bench/headline.py"
            )
        return
    from matplotlib import rcParams

    README.write_text(new)
    rcParams.update({"svg.hashsalt": "headline", "svg.fonttype": "none", "font.family": "sans-serif"})
    for metric, file in enumerate(CHARTS):
        chart(means, metric).savefig(file, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    main()
