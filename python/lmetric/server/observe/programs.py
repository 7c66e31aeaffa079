"""Metrics of agent programs and of the working sets in the engines' caches."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.programs import working_set_ratio

# By metric: its meaning, and its name in `Router.programs`. Workers count them together.
PROGRAM_COUNTERS = {
    "lmetric_programs_started": ("Agent programs found by their first request", "new_programs"),
    "lmetric_program_forks": ("Agent programs that continue the context of another", "forks"),
    "lmetric_program_turns": ("Further requests of agent programs", "continuations"),
    "lmetric_programs_untracked": (
        "Requests of new programs that found the table full of programs with a running or held request",
        "untracked",
    ),
    "lmetric_programs_forgotten": ("Agent programs that did not return", "forgotten"),
    "lmetric_programs_paused": ("Agent programs that lost their place in a cache between requests", "paused"),
    "lmetric_program_holds": (
        "Requests held until their program fits into a cache; with `observe`, those that `admit` would hold",
        "held",
    ),
    "lmetric_program_refusals": ("Requests of new programs refused with 429", "refused"),
    "lmetric_program_hold_seconds": ("Seconds for which admitted requests were held", "held_seconds"),
}


def program_metrics(fleet: Fleet) -> Iterator[Metric]:
    """Yields the metrics of all models whose programs are followed."""
    followed = [
        (model.name, told) for model in fleet.models if (told := model.programs.snapshot()) is not None
    ]
    states = GaugeMetricFamily("lmetric_programs", "Live agent programs, by state", labels=("model", "state"))
    for model_name, told in followed:
        for state, count in told["states"].items():
            states.add_metric((model_name, state), count)
    yield states
    holds = GaugeMetricFamily(
        "lmetric_programs_holding",
        "1 while requests are held whose program does not fit into a cache, else 0",
        labels=("model",),
    )
    for model_name, told in followed:
        holds.add_metric((model_name,), told["holds"])
    yield holds
    for name, (text, key) in PROGRAM_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("model",))
        for model_name, told in followed:
            counter.add_metric((model_name,), told[key])
        yield counter
    ratio = GaugeMetricFamily(
        "lmetric_working_set_ratio",
        "Tokens that agent programs and recent requests need in the instance's cache, over its capacity",
        labels=("model", "instance"),
    )
    for model_name, told in followed:
        for instance, each in told["instances"].items():
            if (over := working_set_ratio(each)) is not None:
                ratio.add_metric((model_name, instance), over)
    yield ratio
