"""The canary: a share of the traffic under a second policy, compared with the other traffic.

A canary is in one of the states of `State`. Commands and the automatic rollback change it by the
table `TRANSITIONS`; every other change is an error. `Canary` alone writes the state, on the event
loop. A request keeps the arm with which it was routed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from enum import StrEnum
from typing import Any

import structlog
from msgspec import Struct

from lmetric._core import LmetricError, Router
from lmetric.canary import Comparison, Outcome
from lmetric.config import CanaryConfig
from lmetric.server.fleet.canary_run import CanaryRequest, End, Run, Update
from lmetric.server.fleet.policies import Built, Policies, build

log = structlog.get_logger("lmetric.canary")

CHECK_SECONDS = 5.0  # time between two looks of the automatic rollback
CAUSES = ("command", "ttft", "errors")  # of a rollback


class State(StrEnum):
    """The state of a canary."""

    OFF = "off"
    RUNNING = "running"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


class Event(StrEnum):
    """An event that changes the state."""

    START = "start"
    PROMOTE = "promote"
    ROLL_BACK = "rollback"
    CONFIGURE = "configure"


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.OFF, Event.START): State.RUNNING,
    (State.PROMOTED, Event.START): State.RUNNING,
    (State.ROLLED_BACK, Event.START): State.RUNNING,
    (State.RUNNING, Event.PROMOTE): State.PROMOTED,
    (State.RUNNING, Event.ROLL_BACK): State.ROLLED_BACK,
    (State.PROMOTED, Event.ROLL_BACK): State.ROLLED_BACK,
    **{(state, Event.CONFIGURE): State.OFF for state in State},
}
"""The state after each event. `configure`: a reload has other settings of the canary or policy."""

_WHY_NOT = {
    (State.OFF, Event.PROMOTE): "no canary runs; start one first",
    (State.OFF, Event.ROLL_BACK): "no canary runs, so there is nothing to roll back",
    (State.RUNNING, Event.START): "a canary runs already; promote it or roll it back first",
    (State.PROMOTED, Event.PROMOTE): "the canary is promoted already",
    (State.ROLLED_BACK, Event.PROMOTE): "the canary was rolled back; start it again first",
    (State.ROLLED_BACK, Event.ROLL_BACK): "the canary was rolled back already",
}


class CanaryError(LmetricError):
    """A command that is not possible in the present state."""


class Copy(Struct):
    """The canary of one worker, for a worker that starts later."""

    configured: CanaryConfig | None
    state: State
    reason: str
    config: CanaryConfig  # with the salt
    comparison: Comparison
    started: float
    counts_from: float
    keys: dict[str, int]
    rollbacks: dict[str, int]
    promotions: int
    decides: bool  # whether its policy, once promoted, still decides all requests
    end: End | None


class Canary:
    """The canary of one model: the only writer of its state.

    ``policies``: returns the policies of the model. ``install``: replaces them; it raises
    LmetricError, and then nothing has changed.
    """

    def __init__(
        self,
        model: str,
        router: Router,
        policies: Callable[[], Policies],
        install: Callable[[Policies], None],
    ) -> None:
        self.command_lock = asyncio.Lock()  # held by the command that is carried out
        self._model = model
        self._router = router
        self._policies = policies
        self._install = install
        self.state = State.OFF
        self.run: Run | None = None  # the last one; None: none was started
        self.built: Built | None = None  # policy of the last one
        self.reason = ""  # why it was rolled back
        # By cause. Each counter starts at 0: Prometheus does not see the increase of a new series.
        self.rollbacks: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        self.promotions = 0
        self._configured: CanaryConfig | None = None
        # With several workers: what the others do not know yet. None: there are no others.
        self._unsent: Update | None = None
        self._shares = False
        # Called if the automatic rollback has ended the canary.
        self.on_alarm: Callable[[], object] = lambda: None
        self._before: Policies | None = None  # of the promotion
        self._promoted: Policies | None = None
        self._look_at = 0.0

    @property
    def running(self) -> bool:
        """Whether it places requests."""
        return self.state is State.RUNNING

    def check(self, event: Event) -> State:
        """Returns the state after an event. Raises CanaryError if the event is not possible now."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise CanaryError(f"{self._model or 'the model'}: {_WHY_NOT[self.state, event]}")
        return after

    def start(self, config: CanaryConfig, now: float | None = None, built: Built | None = None) -> None:
        """Begins to route a share of the requests under another policy.

        ``built``: the policy, if it is built already. Raises CanaryError, or another LmetricError
        for a policy that is not valid.
        """
        after, policies = self.check(Event.START), self._policies()
        built = built or build(policies.settings, config.policy, config.knobs)
        self._router.set_canary(built.policy, knobs=built.knobs)
        self.built = built
        policies.also_reads(built)
        self.run = Run(config, time.monotonic() if now is None else now, policies)
        self._look_at, self.reason = self.run.counts_from, ""
        self._unsent = self._nothing()
        self._before = self._promoted = None
        self.state = after
        log.info(
            "canary started",
            model=self._model,
            policy=config.policy,
            knobs=config.knobs,
            share=config.share,
            salt=self.run.salt,
        )

    def check_results(self) -> None:
        """Raises CanaryError if a running canary has no result yet."""
        run = self.run
        if self.running and run is not None and (why := run.too_few()) is not None:
            raise CanaryError(f"{self._model or 'the model'}: {why}")

    def promote(self) -> None:
        """Makes the canary's policy the policy of all requests. Raises LmetricError."""
        after, run = self.check(Event.PROMOTE), self.run
        assert run is not None  # it runs
        assert self.built is not None
        before = self._policies()
        promoted = run.make_stable(self.built, before)
        self._install(promoted)
        self._router.set_canary(None)
        self._before, self._promoted = before, promoted
        self.promotions += 1
        self.state = after
        run.finish(before.settings.policy)
        log.warning(
            "canary promoted; a restart or reload brings the configured policy back",
            model=self._model,
            policy=run.config.policy,
            knobs=run.config.knobs,
            to_keep_it="set policy and knobs in the configuration, and remove canary",
        )

    def roll_back(self, cause: str = "command", reason: str = "by command") -> None:
        """Routes all requests under the policy from before the canary. Raises LmetricError.

        ``cause``: for the metric. After a promotion, the earlier policy comes back.
        """
        after, run = self.check(Event.ROLL_BACK), self.run
        assert run is not None  # it was started
        if self.state is State.PROMOTED:
            assert self._before is not None
            if self._policies() is not self._promoted:
                raise CanaryError(
                    f"{self._model or 'the model'}: the policy has changed since the promotion; set it "
                    "with PUT /admin/policy"
                )
            self._install(self._before)
        else:
            self._router.set_canary(None)
        self.state, self.reason = after, reason
        run.finish(self._policies().settings.policy)
        self.rollbacks[cause] += 1
        (log.info if cause == "command" else log.error)(
            "canary rolled back", model=self._model, policy=run.config.policy, reason=reason
        )

    def configure(
        self,
        config: CanaryConfig | None,
        built: Built | None = None,
        *,
        policy_changed: bool = False,
    ) -> None:
        """Applies the configuration, at the start and after a reload. ``built``: its policy.

        Unchanged settings leave the canary as it is. If the router's policy has changed, a running
        canary of the configuration starts again, and a canary that a command started ends. If only
        the code of a policy has changed, both start again. Raises LmetricError.
        """
        was_running, run = self.running, self.run
        changed = config != self._configured or policy_changed
        recoded = was_running and run is not None and run.code != run.code_of(self._policies())
        if not changed and not recoded:
            return
        starts = config if config != self._configured or was_running else None
        if self.state is not State.OFF:
            if not changed:
                log.warning("canary starts again: the code of a policy has changed", model=self._model)
            elif self.state is not State.ROLLED_BACK:  # such a canary has ended before
                # A promoted policy belongs into the configuration: nothing is wrong.
                report = log.warning if was_running else log.info
                report("canary ended by the configuration", model=self._model, state=str(self.state))
            self._router.set_canary(None)
            self.state = self.check(Event.CONFIGURE)
            if was_running and run is not None:
                run.finish(self._policies().settings.policy)
                if not changed and run.config != config:  # a command started it: it keeps its code
                    starts, built = run.config.model_copy(update={"salt": run.salt}), self.built
        self._configured = config
        if starts is not None:
            self.start(starts, built=built)

    def ended(self, request: CanaryRequest, began: float, outcome: Outcome) -> None:
        """Adds the result of a request. ``began``: its arrival, monotonic seconds."""
        run = self.run
        if request.run is run and self.running and began >= run.counts_from:
            run.comparison.add(request.canary, request.bucket, outcome)
            if self._unsent is not None:
                self._unsent.results.append((request.canary, request.bucket, outcome))

    def look(self, now: float) -> None:
        """Rolls back a canary that is surely worse. Called about twice a second."""
        run = self.run
        if not self.running or run is None or now < self._look_at:
            return
        self._look_at = now + CHECK_SECONDS
        if (alarm := run.alarm()) is not None:
            self.roll_back(*alarm)
            if self._unsent is not None:
                self._unsent.alarm = alarm
            self.on_alarm()

    # -- several workers

    def share(self) -> None:
        """Keeps the results of this worker for the others from now on."""
        self._shares = True
        self._unsent = self._nothing()

    def _nothing(self) -> Update | None:
        return self.run.nothing() if self._shares and self.run is not None else None

    def unsent(self) -> Update | None:
        """Takes what the other workers do not know yet; None: nothing."""
        update, run = self._unsent, self.run
        if update is None or run is None:
            return None
        update.keys, run.own_keys = dict(run.own_keys), Counter()
        if not update.results and not update.keys and update.alarm is None:
            return None
        self._unsent = self._nothing()
        return update

    def receive_results(self, update: Update) -> None:
        """Adds the results of another worker's requests. Raises LmetricError."""
        run = self.run
        if run is None or not self.running or (run.salt, run.code) != (update.salt, update.code):
            return  # of another canary, or of a worker that has other code
        run.keys.update(update.keys)
        for result in update.results:
            run.comparison.add(*result)
        if update.alarm is not None:
            self.roll_back(*update.alarm)

    def copy(self) -> Copy | None:
        """Returns the canary for a worker that starts later; None: none was started."""
        run = self.run
        if run is None:
            return None
        return Copy(
            configured=self._configured,
            state=self.state,
            reason=self.reason,
            config=run.config.model_copy(update={"salt": run.salt}),
            comparison=deepcopy(run.comparison),
            started=run.started,
            counts_from=run.counts_from,
            keys=dict(run.keys),
            rollbacks=dict(self.rollbacks),
            promotions=self.promotions,
            decides=self._promoted is not None and self._policies() is self._promoted,
            end=run.end,
        )

    def give_way(self, copy: Copy) -> None:
        """Ends the canary, if another worker has one of the same configuration."""
        if copy.configured == self._configured:
            self._router.set_canary(None)
            self.state = State.OFF

    def become(self, copy: Copy) -> None:
        """Goes on as another worker's canary, after `give_way`. Raises LmetricError."""
        if copy.configured != self._configured:
            return
        if copy.state is State.RUNNING or (copy.state is State.PROMOTED and copy.decides):
            self.start(copy.config, copy.started)
        if copy.state is State.PROMOTED and copy.decides:
            self.promote()
        run = self.run
        if run is None or run.salt != copy.config.salt:
            run = self.run = Run(copy.config, copy.started, self._policies())
        run.comparison, run.counts_from, run.keys = copy.comparison, copy.counts_from, Counter(copy.keys)
        run.end = copy.end
        if copy.state is State.PROMOTED and not copy.decides:
            self._before = self._policies()
        self.state, self.reason = copy.state, copy.reason
        self.rollbacks.update({cause: n - self.rollbacks[cause] for cause, n in copy.rollbacks.items()})
        self.promotions = copy.promotions
        self._look_at = run.counts_from
        self._unsent = self._nothing()

    def shown(self, now: float | None = None) -> dict[str, Any]:
        """Returns its state for people."""
        now = time.monotonic() if now is None else now
        settings = self._policies().settings
        return {
            "model": self._model,
            "state": str(self.state),
            "reason": self.reason or None,
            "stable_policy": settings.policy,
            "stable_knobs": settings.knobs,
            "canary": None if self.run is None else self.run.shown(now),
        }
