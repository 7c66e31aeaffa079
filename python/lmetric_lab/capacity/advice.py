"""Advice on the size of a fleet: the wanted engines with an interval, and what else was played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lmetric._core import LmetricError
from lmetric_lab.capacity.demand import Forecast, forecast, part, settled_seconds, steady
from lmetric_lab.capacity.goals import EngineType, Question
from lmetric_lab.capacity.plays import Fleet, Played, Plays
from lmetric_lab.capacity.removal import Removal, removals
from lmetric_lab.sim.pools import Roles
from lmetric_lab.sim.setups import PolicyChoice
from lmetric_lab.sim.workload import prepare
from lmetric_lab.whatif.check import FitCheck
from lmetric_lab.whatif.fit import EngineFit
from lmetric_lab.whatif.recording import MIN_REQUESTS, Recording, WhatIfError

INTERVAL = (0.1, 0.95)  # quantiles of the demand at the ends of the interval
SHOWN_REMOVALS = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """Engines of a role and a type: the number, and an interval that covers the forecast's and the
    fit's errors."""

    role: str
    type: str
    replicas: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet that was played under the forecast demand.

    ``within``: predicted share of requests within all bounds. ``margin``: smallest distance of an
    objective to its target. ``cost_per_hour``: None without a price.
    """

    change: str  # size, policy, type or roles
    engines: int
    policy: str
    type: str
    roles: str | None
    within: float
    margin: float
    enough: bool
    cost_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cheapest fleet of all that were played and meet the SLO: a recommendation.

    ``engines``: its engines by role and type. ``running_cost_per_hour``: of the smallest fleet of
    the running type that meets the SLO with the recorded policy; None: no such fleet.
    """

    engines: tuple[Wanted, ...]
    policy: str
    cost_per_hour: float
    running_cost_per_hour: float | None

    def text(self) -> str:
        """The recommendation in words."""
        fleet = " and ".join(
            f"{each.replicas} {'' if each.role == 'both' else each.role + ' '}engines of type {each.type}"
            for each in self.engines
        )
        said = f"Cheapest fleet that meets the SLO: {fleet} under {self.policy}"
        said += f", {self.cost_per_hour:,.2f} per hour"
        saved = (self.running_cost_per_hour or 0.0) - self.cost_per_hour
        return (
            f"{said}, {saved:,.2f} less than with the running type and policy." if saved > 0 else f"{said}."
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer of the twin at one moment. Rates are in requests per second."""

    at: float  # Unix time of the newest data
    model: str
    engines: int  # usable now
    requests: int  # failed ones included
    seconds: float  # of records
    within_now: float  # share of the recorded requests within all bounds
    rate_now: float
    rate_wanted: float  # expected until the horizon, with the headroom
    rate_low: float
    rate_high: float
    headroom: float  # share of the expected demand
    horizon_seconds: float
    wanted: tuple[Wanted, ...]  # first the running type; then 0 of each other role and type
    cheapest: Cheapest | None  # None: no prices, or no played fleet meets the SLO
    reached: bool  # whether the wanted fleet meets the SLO; false: the limit of engines is too low
    candidates: tuple[Candidate, ...]
    removals: tuple[Removal, ...]  # the first to remove first
    fit_errors: dict[str, float]  # relative; of the hit rate: the difference
    notes: tuple[str, ...] = field(default=())

    def text(self) -> str:
        """The advice in words."""
        one = self.wanted[0]
        change = one.replicas - self.engines
        do = "keep" if not change else f"add {change} to get" if change > 0 else f"remove {-change} to get"
        said = f"{do} {one.replicas} engines of type {one.type} (interval {one.low} to {one.high})."
        if not self.reached:
            said += " Even this number does not meet the SLO: raise the maximum."
        if change < 0 and self.removals:
            worth = self.removals[0]
            said += (
                f" Remove {worth.engine} first: {worth.only_here_tokens:,} tokens of recent prompts were in "
                "its cache alone, the fewest of all engines."
            )
        if self.cheapest is not None:
            said += f" {self.cheapest.text()}"
        return said[0].upper() + said[1:]


def advise(
    recording: Recording,
    fit: EngineFit,
    check: FitCheck,
    question: Question,
    *,
    model: str = "",
    at: float = 0.0,
    now_seconds: float | None = None,
    running: int | None = None,
    usable: Sequence[str] | None = None,
    previous: int | None = None,
    headroom: float | None = None,
    alternatives: bool = True,
    interval: bool = True,
) -> Advice:
    """Forecasts the demand, plays fleets, and returns the smallest that meets the SLO.

    Args:
        recording: the last minutes of requests.
        fit: the fitted engines, and ``check``: how well they explain the recording.
        model: name of the model, and ``at``: Unix time of ``now_seconds``, for the result.
        now_seconds: the present on the recording's clock; None: its last event.
        running: requests that have arrived and have no record yet; None: estimated.
        usable: names of the engines that take requests now; None: all of the recording.
        previous: number of the last advice. A smaller one has an engine to spare, so that the
            number does not swing.
        headroom: share of the demand; None: of the question.
        alternatives: whether to play other policies, types and roles, too.
        interval: whether to find the ends of the interval; otherwise they are the number itself.

    Raises:
        WhatIfError: too few requests.
        LmetricError: a policy, a profile or pools that cannot run.
    """
    arrivals = recording.trace.arrival_seconds
    now = float((arrivals + recording.e2e_seconds).max()) if now_seconds is None else now_seconds
    demand = forecast(recording, now, question.horizon_seconds, running=running)
    settled = settled_seconds(recording, now)
    base = part(recording, float(arrivals[0]), settled)
    if len(base) < MIN_REQUESTS:
        raise WhatIfError(
            f"{len(base)} requests have ended; at least {MIN_REQUESTS} are needed: set a longer window"
        )
    names = tuple(recording.engines if usable is None else usable)
    plays = Plays(
        recording,
        fit,
        question.goal,
        prepare(steady(base, settled), fit.profile),
        question.seeds,
        question.transfer,
    )
    share = question.headroom if headroom is None else headroom
    low, rate, high = rates = (
        (1 + share) * demand.at(INTERVAL[0]),
        (1 + share) * demand.expected,
        (1 + share) * demand.at(INTERVAL[1]),
    )
    slack = 1.0 + max((abs(each.error) for each in check.figures if each.unit), default=0.0)
    own = question.types[0]
    bounds = (question.min_engines, question.max_engines)
    start = previous or max(1, round(len(names) * rate / max(demand.now_per_second, 1e-9)))
    fleet = Fleet(start, recording.policy, own)
    fewest, reached = plays.smallest(fleet, rate, bounds)
    number = fewest
    if previous is not None and number < previous <= question.max_engines:
        number = min(previous, fewest + 1)
    fleet = replace(fleet, engines=number)
    wanted = _wanted(plays, fleet, bounds, rates, slack) if interval else _fixed(fleet)
    known = [Fleet(1, recording.policy, each) for each in question.types[1:]]
    known += [Fleet(0, recording.policy, own, pools) for pools in question.roles]
    others = {(each.role, each.type) for other in known for each in _fixed(other)} - {("both", own.name)}
    candidates: list[Candidate] = []
    notes: list[str] = []
    cheapest = None
    if alternatives:
        played, notes = _candidates(plays, question, fleet, fewest, rate)
        candidates = [each for _, each in played]
        cheapest = _cheapest(plays, played, fleet, fewest, bounds, rates, slack)
    return Advice(
        at=at,
        model=model,
        engines=len(names),
        requests=len(recording.all_arrivals()),
        seconds=now - float(arrivals[0]),
        within_now=float(question.goal.kept(recording.all_times()).mean()),
        rate_now=demand.now_per_second,
        rate_wanted=rate,
        rate_low=low,
        rate_high=high,
        headroom=share,
        horizon_seconds=question.horizon_seconds,
        wanted=wanted + tuple(Wanted(role, name, 0, 0, 0) for role, name in sorted(others)),
        cheapest=cheapest,
        reached=reached,
        candidates=tuple(candidates),
        removals=tuple(_removals(recording, fit, names)),
        fit_errors={each.name: each.error for each in check.figures},
        notes=tuple(notes) + _demand_notes(demand),
    )


def _removals(recording: Recording, fit: EngineFit, names: tuple[str, ...]) -> list[Removal]:
    found = removals(recording, fit.profile.prefill_seconds_per_token, names)
    served = {each.engine for each in found}
    unused = [Removal(name, 0, 0, 0.0, 0) for name in names if name not in served]
    return (unused + found)[:SHOWN_REMOVALS]


def _demand_notes(demand: Forecast) -> tuple[str, ...]:
    if demand.expected > 1.9 * demand.now_per_second > 0:
        return ("the demand rises so fast that its forecast is capped at twice the recent rate",)
    return ()


def _fixed(fleet: Fleet) -> tuple[Wanted, ...]:
    """The engines of a fleet by role, without an interval."""
    pools = fleet.roles or Roles(0, 0, fleet.engines)
    counts = {"prefill": pools.prefill, "decode": pools.decode, "both": pools.both}
    return tuple(
        Wanted(role, fleet.type.name, count, count, count) for role, count in counts.items() if count
    )


def _wanted(
    plays: Plays,
    fleet: Fleet,
    bounds: tuple[int, int],
    rates: tuple[float, float, float],
    slack: float,
) -> tuple[Wanted, ...]:
    """The engines of a fleet of whole engines with their interval: low and high demand, and times
    shorter and longer by the error of the fit."""
    low, rate, high = rates
    number = fleet.engines
    near = [replace(fleet, engines=max(1, round(number * end / max(rate, 1e-9)))) for end in (low, high)]
    least, _ = plays.smallest(near[0], low, bounds, 1 / slack)
    most, _ = plays.smallest(near[1], high, bounds, slack)
    return (Wanted("both", fleet.type.name, number, min(least, number), max(most, number)),)


def _cheapest(
    plays: Plays,
    played: list[tuple[Fleet, Candidate]],
    running: Fleet,
    fewest: int,
    bounds: tuple[int, int],
    rates: tuple[float, float, float],
    slack: float,
) -> Cheapest | None:
    """The cheapest of the played fleets that meets the SLO. Equal costs: the running fleet, which
    comes first. Pools have no interval: their sizes are given."""
    smallest = replace(running, engines=fewest)
    good = [
        (each.cost_per_hour, fleet, each)
        for fleet, each in played
        if each.enough and each.cost_per_hour is not None and (each.change != "size" or fleet == smallest)
    ]
    if not good:
        return None
    cost, fleet, best = min(good, key=lambda each: each[0])
    own = next((price for price, other, _ in good if other == smallest), None)
    if fleet == smallest:
        fleet, cost = running, cost / fewest * running.engines
    engines = _wanted(plays, fleet, bounds, rates, slack) if fleet.roles is None else _fixed(fleet)
    return Cheapest(engines, best.policy, cost, own)


def _candidates(
    plays: Plays, question: Question, running: Fleet, fewest: int, rate: float
) -> tuple[list[tuple[Fleet, Candidate]], list[str]]:
    """All fleets that were played at ``rate`` with their rows, and notes of what could not run.

    ``running``: the wanted fleet; ``fewest``: its smallest size that meets the SLO at ``rate``.
    """
    own, policy, number, notes = running.type, running.policy, running.engines, []
    bounds = (question.min_engines, question.max_engines)
    made: list[tuple[Fleet, Candidate]] = []

    def add(change: str, fleet: Fleet, played: Played) -> None:
        price = fleet.type.price_per_hour
        count = fleet.engines if fleet.roles is None else fleet.roles.instances
        row = Candidate(
            change, count, fleet.policy.label, fleet.type.name,
            None if fleet.roles is None else str(fleet.roles),
            played.within, played.margin, played.enough,
            None if price is None else count * price,
        )  # fmt: skip
        made.append((fleet, row))

    for count in sorted({max(bounds[0], number - 1), fewest, number, min(bounds[1], number + 1)}):
        fleet = Fleet(count, policy, own)
        add("size", fleet, plays.play(fleet, rate))
    others: list[tuple[str, PolicyChoice, EngineType]] = [
        ("policy", each, own) for each in question.policies if each.label != policy.label
    ]
    others += [("type", policy, each) for each in question.types[1:]]
    for change, choice, kind in others:
        try:
            count, _ = plays.smallest(Fleet(number, choice, kind), rate, bounds)
            fleet = Fleet(count, choice, kind)
            add(change, fleet, plays.play(fleet, rate))
        except LmetricError as error:
            notes.append(f"{change} {choice.label if change == 'policy' else kind.name}: not played: {error}")
    for pools in question.roles:
        fleet = Fleet(pools.instances, policy, own, pools)
        try:
            add("roles", fleet, plays.play(fleet, rate))
        except LmetricError as error:
            notes.append(f"roles {pools}: not played: {error}")
    if question.roles and plays.fit.profile.kv_bytes_per_token is None:
        notes.append(
            "pools of prefill and decode engines are played with free KV transfers, an upper bound: set the "
            "bytes of a token's KV for their time"
        )
    return made, notes
