"""Plays fleets in the simulator: how well a size, a policy or an engine type meets the SLO."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lmetric_lab.capacity.goals import EngineType
from lmetric_lab.sim.pools import Roles
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.setups import PolicyChoice
from lmetric_lab.sim.workload import Workload
from lmetric_lab.slo import Goal
from lmetric_lab.whatif.check import fleet_scenario, times_of
from lmetric_lab.whatif.fit import EngineFit
from lmetric_lab.whatif.recording import Recording

WARM_UP = 0.25  # share of the requests that fill the caches
COOL_DOWN = 0.1  # share of the last requests, which decode on an emptying fleet: not counted
RATE_STEP = 1.02  # rates are rounded up to such steps, so that plays are reused


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet to play. ``roles``: pools, which replace ``engines``."""

    engines: int
    policy: PolicyChoice
    type: EngineType
    roles: Roles | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome of a fleet: share of requests within all bounds, and the smallest distance of an
    objective to its target; both are means over the seeds."""

    within: float
    margin: float

    @property
    def enough(self) -> bool:
        """Whether every objective is met."""
        return self.margin >= 0


@dataclass
class Plays:
    """Runs of fleets under one workload, each made once.

    ``workload``: one request per second on average. ``slack``: factor on simulated times, for
    errors of the fit.
    """

    recording: Recording
    fit: EngineFit
    goal: Goal
    workload: Workload
    seeds: int = 1
    transfer: str | None = None  # KV transfers of pools; None: the simulator's default
    done: dict[tuple[object, ...], list[Run]] = field(default_factory=dict)

    def play(self, fleet: Fleet, rate: float, slack: float = 1.0) -> Played:
        """The outcome at ``rate`` requests per second. Raises LmetricError if it cannot run."""
        step = int(np.ceil(np.log(max(rate, 1e-6)) / np.log(RATE_STEP) - 1e-6))
        key = (fleet.engines, fleet.policy.label, fleet.type.name, str(fleet.roles), step)
        if key not in self.done:
            self.done[key] = self._runs(fleet, RATE_STEP**step)
        outcomes = [self._outcome(run, slack) for run in self.done[key]]
        return Played(
            float(np.mean([within for within, _ in outcomes])),
            float(np.mean([margin for _, margin in outcomes])),
        )

    def smallest(
        self, fleet: Fleet, rate: float, bounds: tuple[int, int], slack: float = 1.0
    ) -> tuple[int, bool]:
        """The fewest engines between ``bounds`` that meet the goal, and whether they do.

        The search gallops from ``fleet.engines``. It assumes that more engines are never worse.
        """
        low, high = bounds

        def enough(engines: int) -> bool:
            return self.play(Fleet(engines, fleet.policy, fleet.type), rate, slack).enough

        at, step = min(max(fleet.engines, low), high), 1
        if enough(at):
            while at > low and enough(lower := max(low, at - step)):
                at, step = lower, 2 * step
            fails, meets = max(low - 1, at - step), at
        else:
            fails = at
            while True:
                if fails >= high:
                    return high, False
                meets = min(high, fails + step)
                if enough(meets):
                    break
                fails, step = meets, 2 * step
        while meets - fails > 1:
            middle = (meets + fails) // 2
            meets, fails = (middle, fails) if enough(middle) else (meets, middle)
        return meets, True

    def _runs(self, fleet: Fleet, rate: float) -> list[Run]:
        profile = fleet.type.of(self.fit.profile)
        policy = fleet.policy.build()
        scenario = fleet_scenario(self.recording, self.fit).replace(
            policy=policy,
            knobs=dict(fleet.policy.knobs) if isinstance(policy, str) else None,
            profile=profile,
            token_stride=8,
        )
        if fleet.roles is None:
            scenario = scenario.replace(instances=fleet.engines)
        elif profile.kv_bytes_per_token is None or self.transfer is not None:
            transfer = "none" if profile.kv_bytes_per_token is None else self.transfer
            scenario = scenario.replace(roles=fleet.roles, transfer=transfer)
        else:
            scenario = scenario.replace(roles=fleet.roles)
        return [simulate(self.workload.faster(rate), scenario, seed=seed) for seed in range(self.seeds)]

    def _outcome(self, run: Run, slack: float) -> tuple[float, float]:
        kept = slice(round(WARM_UP * len(run)), round((1 - COOL_DOWN) * len(run)))
        times = times_of(run, self.fit.request_seconds, slack)
        times = {name: each[kept] for name, each in times.items()}
        return float(self.goal.kept(times).mean()), self.goal.margin(times)
