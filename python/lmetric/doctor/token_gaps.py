"""Check of the times between tokens that the engine has measured: token_gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lmetric.doctor.subject import Subject
from lmetric.engines.adapter import Adapter, labels_of, number_of, samples
from lmetric.engines.http import Unanswered
from lmetric.profiles import load_profile
from lmetric.profiles.budget import CONTEXT_TOKENS, budgets

METRICS = "/metrics"
GAPS = "inter_token_latency_seconds"
LATE_SHARE = 0.01
"""Share of the gaps that may be longer than the goal: the goal is for the 99th percentile."""
MIN_GAPS = 100

Bucket = tuple[float, float]
"""Upper bound of gaps, seconds, and the number of gaps up to it."""


async def read_metrics(subject: Subject) -> bytes:
    """The engine's metrics before the doctor's own requests; empty if it serves none."""
    if subject.target.token_seconds is None:
        return b""
    try:
        status, page = await subject.client.page(METRICS)
    except Unanswered:
        return b""
    return page if status == 200 else b""


def check_token_gaps(subject: Subject, page: bytes) -> None:
    """Compares the engine's times between tokens with the goal, if there is one.

    ``page``: its metrics. A failure carries the token budgets that its profile allows.
    """
    goal, adapter = subject.target.token_seconds, subject.adapter
    if goal is None or adapter is None:
        return
    found = _buckets(adapter, page)
    total = found[-1][1] if found else 0
    if total < MIN_GAPS:
        why = (
            f"{METRICS} has no {adapter.prefix}{GAPS}"
            if not found
            else f"{total:.0f} gaps since its start; the 99th percentile needs {MIN_GAPS}"
        )
        subject.not_offered("token_gaps", why, "repeat the check after traffic of users" if found else None)
        return
    within, at_most = _within(found, goal)
    needed, between = total * (1 - LATE_SHARE), _percentile(found)
    told = f"P99 of {total:,.0f} gaps since its start: {between}, goal {goal * 1e3:g} ms"
    if within >= needed:
        subject.passed("token_gaps", told)
    elif at_most < needed:
        told += f"; at least {1 - at_most / total:.1%} of the gaps are longer"
        subject.failed("token_gaps", told, _remedy(subject))
    else:
        subject.not_offered(
            "token_gaps",
            f"{told}: the buckets of its histogram do not tell whether it holds",
            "set --token-slo-ms to one of these bounds",
        )


def _buckets(adapter: Adapter, page: bytes) -> Sequence[Bucket]:
    """The buckets of the gaps over all models and ranks, by bound. Empty without a last one."""
    counts: defaultdict[float, float] = defaultdict(float)
    for _, labels, count in samples(adapter.own(page), adapter.prefix, [f"{GAPS}_bucket"]):
        told = labels_of(labels).get("le")
        bound = float("inf") if told == "+Inf" else number_of(told)
        if bound is not None:
            counts[bound] += count
    return sorted(counts.items()) if float("inf") in counts else []


def _within(found: Sequence[Bucket], goal: float) -> tuple[float, float]:
    """Least and largest number of gaps that are within the goal."""
    least = max((count for bound, count in found if bound <= goal), default=0.0)
    return least, next(count for bound, count in found if bound >= goal)


def _percentile(found: Sequence[Bucket]) -> str:
    """The bounds of the 99th percentile."""
    needed = found[-1][1] * (1 - LATE_SHARE)
    at = next(i for i, (_, count) in enumerate(found) if count >= needed)
    bounds = [f"{bound * 1e3:g}" for bound, _ in found]
    if at == 0:
        return f"up to {bounds[0]} ms"
    if found[at][0] == float("inf"):
        return f"over {bounds[at - 1]} ms"
    return f"{bounds[at - 1]} to {bounds[at]} ms"


def _remedy(subject: Subject) -> str:
    """The budgets that hold the goal, with their price."""
    target, goal = subject.target, subject.target.token_seconds
    assert goal is not None
    if subject.adapter is None or subject.adapter.name != "vllm":
        return "set a smaller budget of tokens per step; recommendations are for vLLM"
    if target.settings.profile is None:
        return (
            f"lmetric-router calibrate {subject.client.url} --max-sequences N --out profile.yaml (N: its "
            "--max-num-seqs), then repeat the check with --profile profile.yaml: it recommends "
            "--max-num-batched-tokens with its price"
        )
    profile = load_profile(target.settings.profile)
    found = list(budgets(profile, goal))
    rows = [budget for budget in found if budget.batch_tokens is not None]
    if all(row.batch_tokens == profile.max_batch_tokens for row in found):
        return (
            f"by {target.settings.profile}, all steps hold the goal with {profile.max_batch_tokens} tokens: "
            "look for preemptions, a busy host, or an old profile"
        )
    if all(row.batch_tokens == profile.max_batch_tokens for row in rows):  # also if there is none
        return (
            f"no --max-num-batched-tokens holds it beside {found[-1].decodes} decodes: lower "
            "--max-num-seqs, or use SloScheduler (docs/how-to/engine_schedulers.md)"
        )
    told = [
        f"{row.batch_tokens} beside {row.decodes} decodes (prompt tokens/s "
        f"{row.prompt_tokens_per_second / row.full_prompt_tokens_per_second - 1:+.0%})"
        for row in rows
    ]
    return (
        f"--max-num-batched-tokens {', or '.join(told)}, by {target.settings.profile}: decodes of "
        f"{CONTEXT_TOKENS} tokens, prices against {profile.max_batch_tokens}. vLLM does not report its "
        "present value"
    )
