"""The capacity twin: a fitted simulator that stays calibrated on the last minutes of records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from lmetric.record_schema import Records
from lmetric_lab.capacity.advice import Advice, advise
from lmetric_lab.capacity.budget import ErrorBudget
from lmetric_lab.capacity.demand import check_covers, coarse, part, settled_seconds
from lmetric_lab.capacity.goals import Question
from lmetric_lab.whatif.check import FitCheck, Limits, check_fit
from lmetric_lab.whatif.fit import EngineFit, fit_engine
from lmetric_lab.whatif.recording import Recording, WhatIfError, recording_of

REFIT_SECONDS = 300.0  # between two fits while the last one is trusted
TRUST_SECONDS = 1800.0  # after a fit was last good on records of its time


@dataclass
class Twin:
    """Answers a question again and again, as records arrive.

    The fit of an earlier round stays while its errors on the newest records are within ``limits``.
    Otherwise the twin fits again, and trusts the earlier fit for a while if the new one is no
    better. ``window_seconds``: how far back records count. ``budget`` steers the headroom.
    """

    question: Question
    limits: Limits
    window_seconds: float = 1800.0
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    cache_blocks: int | None = None
    kv_bytes_per_token: int | None = None
    check_seeds: int = 2
    code: Collection[str] | None = ()  # recorded policies that may run Python code; None: all
    fit: EngineFit | None = None
    check: FitCheck | None = None
    fits: int = 0  # how often it has fitted
    budget: ErrorBudget = field(init=False)
    _previous: int | None = None
    _good_at: float = -inf
    _fitted_at: float = -inf

    def __post_init__(self) -> None:
        self.budget = ErrorBudget(self.question.goal, self.question.headroom)

    def advise(self, records: Records, now: float, *, running: int | None = None) -> Advice:
        """The advice from the records of one model (`Records.of`).

        Args:
            records: lines of at least the last ``window_seconds``.
            now: the present, Unix time.
            running: requests that have arrived and have no record yet; None: estimated.

        Raises:
            WhatIfError: the records cannot answer, or the fit is poor.
        """
        begin = now - self.window_seconds
        recent = records.between(begin, now)
        if not recent.requests:
            raise WhatIfError(
                f"no request arrived in the last {self.window_seconds:.0f} s; send requests, or set a longer "
                "window"
            )
        recording = recording_of(recent, code=self.code)
        usable = [each["name"] for each in records.fleets[-1]["engines"] if each["usable"]]
        return self.advise_recording(
            recording, now - recording.started_at, running=running, usable=usable,
            model=recent.requests[0]["model"], at=now,
        )  # fmt: skip

    def advise_recording(
        self,
        recording: Recording,
        now_seconds: float,
        *,
        running: int | None = None,
        usable: Sequence[str] | None = None,
        model: str = "",
        at: float = 0.0,
        alternatives: bool = True,
        interval: bool = True,
    ) -> Advice:
        """The advice from a recording. ``now_seconds``: on its clock. Raises WhatIfError."""
        if self.cache_blocks is not None:  # in the engines' blocks, which `coarse` makes larger
            recording = replace(recording, cache_blocks=self.cache_blocks)
        made = coarse(part(recording, now_seconds - self.window_seconds, now_seconds))
        shift = float(recording.trace.arrival_seconds[0])
        if (first := now_seconds - self.window_seconds) > shift:
            arrivals = recording.trace.arrival_seconds
            shift = float(arrivals[arrivals >= first][0])
        check_covers(made, now_seconds - shift)
        ended = settled_seconds(made, now_seconds - shift)
        moment = at or now_seconds
        engines = len(recording.engines if usable is None else usable)
        spare = self._previous is not None and engines > self._previous
        self.budget.count(made, now_seconds - shift, moment, spare=spare)
        fit, check, note = self._calibrated(made, ended, moment)
        advice = advise(
            made, fit, check, self.question, model=model, at=at, now_seconds=now_seconds - shift,
            running=running, usable=usable, previous=self._previous,
            headroom=self.budget.headroom, alternatives=alternatives, interval=interval,
        )  # fmt: skip
        self._previous = advice.wanted[0].replicas
        notes = recording.notes + advice.notes
        return replace(advice, notes=notes if note is None else (*notes, note))

    def _calibrated(
        self, recording: Recording, ended: float, at: float
    ) -> tuple[EngineFit, FitCheck, str | None]:
        """The fit to use, its errors on requests that arrived before ``ended``, and a note.

        The last fit stays while it is good on the recording. If a new fit is no better, the last
        one is trusted for `TRUST_SECONDS`: an overload alone makes records hard to simulate, and
        then advice matters most.

        Raises:
            WhatIfError: the fit is poor, and no earlier one is trusted.
        """
        check = None
        if self.fit is not None and self.fit.profile.block_tokens == recording.block_tokens:
            check = check_fit(
                recording, self.fit, seeds=self.check_seeds, limits=self.limits, until_seconds=ended
            )
            if check.good:
                self._good_at = at
                return self.fit, check, None
        trusted = self.fit is not None and at - self._good_at <= TRUST_SECONDS
        if check is None or at - self._fitted_at >= REFIT_SECONDS or not trusted:
            self._fitted_at = at
            self.fits += 1
            fit = fit_engine(
                recording,
                max_batch_tokens=self.max_batch_tokens,
                max_sequences=self.max_sequences,
                kv_bytes_per_token=self.kv_bytes_per_token,
            )
            new = check_fit(recording, fit, seeds=self.check_seeds, limits=self.limits, until_seconds=ended)
            if new.good:
                self.fit, self._good_at = fit, at
                return fit, new, None
            if check is None or not trusted:
                self.fit = None
                raise WhatIfError(new.reason())
        assert self.fit is not None
        bad = ", ".join(f"{each.name} {each.error:+.0%}" for each in check.figures if not each.good)
        return (
            self.fit,
            check,
            f"the fit of {at - self._good_at:.0f} s ago is used: on the newest records its errors are {bad}",
        )
