"""Simulates whole clusters: a model of the engines, with the router core of the server.

`simulate` runs a trace once. If you run a trace several times, prepare it once with `prepare`. All
runs, also in several threads, then share its block hashes::

    workload = prepare(trace, profile)
    runs = [simulate(workload, policy=p, instances=16, profile=profile) for p in ("lmetric",
    "vllm")]
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from lmetric import _core
from lmetric.option_values import kind_of, parse
from lmetric.options import OPTIONS, Routing, core_settings
from lmetric.policies import policy_name
from lmetric.profiles import Profile
from lmetric_lab.queueing import HostTier, Swap
from lmetric_lab.sim.churn import ChangeResult, fleet_change_constants, listed
from lmetric_lab.sim.columns import Timeline
from lmetric_lab.sim.fetches import constants
from lmetric_lab.sim.fleet import resolve_fleet, resolve_profile
from lmetric_lab.sim.pools import Roles, Transfer
from lmetric_lab.sim.programs import has_programs, ideal_arrival_seconds
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.scenario import Scenario, check_names
from lmetric_lab.sim.setting import option_of, setting_of
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.traces.turns import user_turns
from lmetric_lab.sim.workload import Workload, prepare

DECODE_POLICY = "least_requests"  # the default


def simulate(trace: str | Path | Trace | Workload, scenario: Scenario | None = None, **fields: Any) -> Run:
    """Simulate a trace on a fleet. Equal arguments give equal columns.

    Args:
        trace: the path of a trace file (read with `load_trace`), a `Trace`, or the result of
            `prepare`, which saves time if you run a trace more than once.
        scenario: all settings; None: the defaults.
        `fields`: fields of `Scenario` by name, which replace those of `scenario`.

    Raises:
        TypeError: a name that is no field of `Scenario`.
        LmetricError: an unknown policy, a setting out of range, or a request that fits no engine.
        ProfileError: an unknown or invalid profile.
        TraceError: the file is not a trace, or has an invalid line.
        FileNotFoundError: the trace file does not exist.
    """
    check_names(fields, "simulate")
    if scenario is None:
        scenario = Scenario(**fields)
    elif fields:
        scenario = scenario.replace(**fields)
    return simulate_routed(trace, scenario)


def simulate_routed(
    trace: str | Path | Trace | Workload, scenario: Scenario, routing: Routing | None = None
) -> Run:
    """`simulate` for many runs that differ in the constants of their engines alone.

    ``routing``: `routing_of` the scenario, so that its options are read once; None: reads them.
    """
    pools = None if scenario.roles is None else Roles.of(scenario.roles)
    fleet = resolve_fleet(scenario.profile, scenario.instances if pools is None else pools.instances)
    chosen, instances = fleet[0], len(fleet)
    if isinstance(trace, str | Path):
        trace = load_trace(trace)
    workload = trace if isinstance(trace, Workload) else prepare(trace, chosen)
    each = _engines(scenario, pools, fleet)
    pooled = pools is not None and bool(pools.decode)
    routing = routing or routing_of(scenario)
    shared = {
        what: core_settings(what, getattr(routing, what))
        for what in ("split", "priority", "rebalance", "programs")
    }
    events = listed(scenario.changes)
    moves = bool(events) and routing.fleet_changes is not None
    continued = pooled or routing.split is not None or routing.rebalance is not None or moves
    if scenario.decode_policy is not None and not continued:
        raise _core.BadValueError(
            "decode_policy: requests decode on their prefill instance; set roles, e.g. 16P64D"
        )
    transfer = Transfer.of(scenario.transfer)
    swap, tier = Swap.of(scenario.preempt), HostTier.of(scenario.host_tier)
    predictor = scenario.predictor
    started = time.perf_counter()
    columns = _core.simulate(
        workload.core,
        policy=scenario.policy,
        knobs=scenario.knobs,
        profiles=each,
        seed=scenario.seed,
        guard=routing.guard,
        step_times=each if predictor is None else [resolve_profile(predictor).constants()] * instances,
        swap=None if swap is None else swap.constants(chosen),
        priority=shared["priority"][0],
        priority_settings=shared["priority"][1],
        split=shared["split"][0],
        split_settings=shared["split"][1],
        rebalance=shared["rebalance"][0],
        rebalance_settings=shared["rebalance"][1],
        programs=shared["programs"][0],
        program_settings=shared["programs"][1],
        host_tier=None if tier is None else tier.constants(chosen),
        changes=[(each.at_seconds, each.instance, each.joins) for each in events],
        **_unchanged(scenario),
        **fleet_change_constants(routing.fleet_changes, chosen, transfer),
        roles=None if pools is None else pools.each(),
        **(_continued(routing, scenario.prefill) if continued else {}),
        **_transferred(routing.prefix_fetch, transfer, chosen, continued),
    )
    wall_seconds = time.perf_counter() - started
    if has_programs(workload.trace):
        columns["programs"] = workload.trace.program_of
        columns["min_computed_tokens"], columns["ideal_finished_seconds"] = workload.core.ideal(
            each, admission=scenario.admission, cached_answers=scenario.cached_answers
        )
        columns["ideal_arrival_seconds"] = ideal_arrival_seconds(
            workload.trace, columns["ideal_finished_seconds"]
        )
        columns["user_turns"] = user_turns(workload.trace)
    done = columns.pop("changes")
    block = chosen.block_tokens
    timeline = Timeline(
        scenario.timeline_seconds,
        **{name: columns.pop(f"timeline_{name}") for name in ("running", "queued", "prefill_tokens")},
    )
    token_slo, think_slo = scenario.token_slo_seconds, scenario.think_slo_seconds
    return Run(
        policy=policy_name(scenario.policy),
        decode_policy=policy_name(routing.decode_policy) if continued else None,
        roles=pools,
        local_order=scenario.local_order,
        split=kind_of(routing.split),
        rebalance=kind_of(routing.rebalance),
        token_slo_seconds=token_slo,
        think_slo_seconds=token_slo if think_slo is None else think_slo,
        seed=scenario.seed,
        input_tokens=workload.trace.input_tokens,
        output_tokens=np.maximum(workload.trace.output_tokens, 1),
        hit_blocks=-(-columns["hit_tokens"] // block),
        prompt_blocks=-(-workload.trace.input_tokens // block),
        timeline=timeline,
        wall_seconds=wall_seconds,
        changes=tuple(ChangeResult(each, *of) for each, of in zip(events, done, strict=True)),
        **columns,
    )


def _engines(scenario: Scenario, pools: Roles | None, fleet: list[Profile]) -> list[dict[str, Any]]:
    """The constants of each engine."""
    given = scenario.decode_profile
    if given is not None and (pools is None or not pools.decode):
        raise _core.BadValueError("decode_profile: there are no decode instances; set roles, e.g. 16P64D")
    decodes = None if given is None else resolve_profile(given)
    roles = ["both"] * len(fleet) if pools is None else pools.each()
    return [
        (one if decodes is None or role != "decode" else decodes).constants()
        for one, role in zip(fleet, roles, strict=True)
    ]


def routing_of(scenario: Scenario) -> Routing:
    """Policies and options, with the defaults of the policy."""
    name = policy_name(scenario.policy)
    pooled = scenario.roles is not None and bool(Roles.of(scenario.roles).decode)
    return Routing(
        policy=scenario.policy,
        knobs=scenario.knobs,
        decode_policy=DECODE_POLICY if scenario.decode_policy is None else scenario.decode_policy,
        decode_knobs=scenario.decode_knobs,
        binding=scenario.binding,
        **{what: parse(what, getattr(scenario, what), policy=name) for what in OPTIONS},
    ).resolved(name, pools=pooled)


def _unchanged(scenario: Scenario) -> dict[str, Any]:
    """Keyword arguments of `_core.simulate` for the settings that it has in the same form."""
    return {name: getattr(scenario, name) for name in _UNCHANGED}


_UNCHANGED = tuple(
    name
    for name, field in Scenario.model_fields.items()
    if (setting := setting_of(field)) and not setting.convert and option_of(field) is None
)


def _continued(routing: Routing, prefill: str) -> dict[str, Any]:
    """Keyword arguments of `_core.simulate` for plans with several segments."""
    return {
        "decode_policy": routing.decode_policy,
        "decode_knobs": routing.decode_knobs,
        "binding": routing.binding,
        "unlimited_prefill": prefill == "unlimited",
    }


def _transferred(fetch: Any, transfer: Transfer | None, profile: Profile, continued: bool) -> dict[str, Any]:
    """Keyword arguments of `_core.simulate` for KV transfers of prefix fetches and segments."""
    if fetch is None:
        return _moved(transfer, profile) if continued else {}
    return _moved(transfer, profile) | constants(fetch, profile, transfer)


def _moved(transfer: Transfer | None, profile: Profile) -> dict[str, Any]:
    if transfer is None:
        return {}
    return {
        "transfer_seconds_per_token": transfer.seconds_per_token(profile),
        "transfer_fixed_seconds": transfer.fixed_seconds,
        "transfer_overlap": transfer.overlap,
        "transfer_chunk_tokens": int(transfer.chunk_tokens),
        "transfer_unshared": transfer.unshared,
    }
