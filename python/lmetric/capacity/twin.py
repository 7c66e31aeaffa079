"""The capacity twin: a fitted simulator that stays calibrated on the last minutes of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmetric.capacity.advice import Advice, advise
from lmetric.capacity.demand import coarse, part, settled_seconds
from lmetric.capacity.goals import Question
from lmetric.record_files import Records
from lmetric.whatif.check import FitCheck, Limits, check_fit
from lmetric.whatif.fit import EngineFit, fit_engine
from lmetric.whatif.recording import Recording, WhatIfError, recording_of


@dataclass
class Twin:
    """Answers a question again and again, as records arrive.

    The fit of an earlier round stays while its errors on the newest records are within ``limits``.
    Otherwise the twin fits again. ``window_seconds``: how far back records count.
    """

    question: Question
    limits: Limits
    window_seconds: float = 900.0
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    cache_blocks: int | None = None
    check_seeds: int = 2
    fit: EngineFit | None = None
    check: FitCheck | None = None
    fits: int = 0  # how often it has fitted
    _previous: int | None = None

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
        recent = [each for each in records.requests if begin <= float(each["at"]) <= now]
        if not recent:
            raise WhatIfError(
                f"no request arrived in the last {self.window_seconds:.0f} s; send requests, or set a longer "
                "window"
            )
        recording = recording_of(replace(records, requests=recent))
        start = min(float(each["at"]) for each in recent)
        usable = [each["name"] for each in records.fleets[-1]["engines"] if each["usable"]]
        return self.advise_recording(
            recording, now - start, running=running, usable=usable, model=recent[0]["model"], at=now
        )

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
        made = coarse(part(recording, now_seconds - self.window_seconds, now_seconds))
        shift = float(recording.trace.arrival_seconds[0])
        if (first := now_seconds - self.window_seconds) > shift:
            arrivals = recording.trace.arrival_seconds
            shift = float(arrivals[arrivals >= first][0])
        ended = settled_seconds(made, now_seconds - shift)
        fit, check = self._calibrated(part(made, 0.0, ended))
        advice = advise(
            made, fit, check, self.question, model=model, at=at, now_seconds=now_seconds - shift,
            running=running, usable=usable, previous=self._previous, alternatives=alternatives,
            interval=interval,
        )  # fmt: skip
        self._previous = advice.wanted[0].replicas
        return replace(advice, notes=recording.notes + advice.notes)

    def _calibrated(self, recording: Recording) -> tuple[EngineFit, FitCheck]:
        """The last fit if it is still good on the recording, else a new one.

        Raises:
            WhatIfError: the new fit is poor.
        """
        if self.fit is not None and self.fit.profile.block_tokens == recording.block_tokens:
            check = check_fit(recording, self.fit, seeds=self.check_seeds, limits=self.limits)
            if check.good:
                self.check = check
                return self.fit, check
        fit = fit_engine(
            recording,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            cache_blocks=self.cache_blocks,
        )
        self.fits += 1
        check = check_fit(recording, fit, seeds=self.check_seeds, limits=self.limits)
        if not check.good:
            self.fit = None
            raise WhatIfError(check.reason())
        self.fit, self.check = fit, check
        return fit, check
