"""Forecasts the arrivals of a fleet, and makes workloads with forecast rates.

The rate is a line over the last minutes, fitted to counts of arrivals. Later counts weigh more, and
bursts less (Huber weights): a burst is over before a new engine is ready. The slope is shrunk
toward zero if noise explains it. A bootstrap over blocks of residuals gives the interval.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.sim.traces import Trace
from lmetric_lab.whatif.recording import Recording, WhatIfError

Floats = NDArray[np.float64]

BIN_SECONDS = 15.0
MIN_BINS = 8
DECAY_SECONDS = 400.0  # a count this old weighs 1/e
BURST = 1.0  # counts of a minute this many standard deviations above the line weigh less
ROUNDS = 3  # of the robust fit
BLOCK_BINS = 4  # of the bootstrap
SAMPLES = 400
MOST_CHANGE = 2.0  # largest forecast change of the rate, as a factor
FLOOR_SHARE = 0.1  # smallest rate of the line and of the forecast, relative to the window's mean
SETTLED = 0.98  # quantile of the durations
COARSE_BLOCKS = 24  # blocks of a median prompt that a coarse trace keeps at least
MOST_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Forecast:
    """Arrivals per second.

    ``rates``: bootstrap samples of the largest rate between now and the horizon, shape (samples,),
    ascending.
    """

    now_per_second: float
    slope_per_second: float  # change of the rate per second
    horizon_seconds: float
    rates: Floats
    running: int  # arrivals that no record has yet, as told or estimated

    @property
    def expected(self) -> float:
        """The median of the largest rate until the horizon, per second."""
        return self.at(0.5)

    def at(self, quantile: float) -> float:
        """A quantile of the largest rate until the horizon, per second."""
        return float(np.quantile(self.rates, quantile))


def check_covers(recording: Recording, now_seconds: float) -> None:
    """Raises WhatIfError if a recording is too short for a forecast."""
    covered = max(0.0, now_seconds - float(recording.trace.arrival_seconds[0]))
    if covered < MIN_BINS * BIN_SECONDS:
        raise WhatIfError(
            f"the records cover {covered:.0f} s; a forecast needs at least {MIN_BINS * BIN_SECONDS:.0f} s: "
            "record more traffic, or set a longer window"
        )


def forecast(
    recording: Recording, now_seconds: float, horizon_seconds: float, *, running: int | None = None
) -> Forecast:
    """Forecasts the rate of arrivals until ``now_seconds + horizon_seconds``.

    Args:
        recording: the last minutes of requests. Failed ones count, too.
        now_seconds: the present, on the recording's clock.
        horizon_seconds: how far ahead to look.
        running: requests that arrived and have not ended, which no record has yet; None: estimated
            from the durations of the recorded requests.

    Raises:
        WhatIfError: the recording is too short.
    """
    check_covers(recording, now_seconds)
    bins = int((now_seconds - float(recording.trace.arrival_seconds[0])) // BIN_SECONDS)
    edges = now_seconds - BIN_SECONDS * np.arange(bins, -1, -1)
    counts = np.histogram(recording.all_arrivals(), edges)[0].astype(np.float64)
    middle = (edges[1:] + edges[:-1]) / 2 - now_seconds
    missing = _missing(recording, counts, -middle, running)
    counts += missing
    recent = np.exp(middle / DECAY_SECONDS)
    weights = recent
    for left in reversed(range(ROUNDS)):
        rate, slope, shrink = _line(middle, counts, weights)
        fitted = np.maximum((rate + slope * middle) * BIN_SECONDS, 1e-9)
        residuals = (counts - fitted) / np.sqrt(np.maximum(fitted, 0.5))
        if left:
            weights = recent * _burst_weights(residuals)
    # Residuals of a fit are too small; `dof` corrects that.
    dof = weights.sum() ** 2 / (weights**2).sum()
    residuals *= np.sqrt(dof / max(dof - 2, 1))
    samples = fitted + np.sqrt(fitted) * _resampled(residuals)
    lines = _solve(middle, np.maximum(samples, 0.0), recent)
    # Samples have bursts with their full weight, so they only give the spread around the line.
    lines = (lines - np.median(lines, axis=0)) / BIN_SECONDS
    rates, slopes = rate + lines[:, 0], slope + shrink * lines[:, 1]
    ahead = np.maximum(rates, rates + slopes * horizon_seconds)
    mean = float(counts.mean()) / BIN_SECONDS
    # A rate near zero would make the simulated time endless.
    ahead = np.clip(ahead, FLOOR_SHARE * mean, MOST_CHANGE * max(rate, mean))
    return Forecast(
        float(rate), float(slope), horizon_seconds, np.sort(ahead), round(float(missing.sum()))
    )  # fmt: skip


def _missing(recording: Recording, counts: Floats, ages: Floats, running: int | None) -> Floats:
    """Arrivals by bin that no record has yet, because they have not ended."""
    durations = np.sort(recording.all_durations())
    alive = 1 - np.searchsorted(durations, ages, side="right") / len(durations)
    # Of a request with this age, a record exists with probability 1 - alive.
    expected = np.minimum(alive, 0.95) / (1 - np.minimum(alive, 0.95)) * counts
    usual = float(counts.mean()) * alive  # for bins with few or no ended requests
    expected = np.where(alive > 0.5, usual, expected)
    total = float(expected.sum())
    if running is None or total <= 0:
        return expected
    return expected * (running / total)


def _line(middle: Floats, counts: Floats, weights: Floats) -> tuple[float, float, float]:
    """The rate now and its slope, per second, and the factor by which the slope is shrunk."""
    level, slope = _solve(middle, counts[None, :], weights)[0]
    fitted = level + slope * middle
    squares = float((weights * (counts - fitted) ** 2).sum() / weights.sum())
    squares = max(squares, float(counts.mean()))  # at least the noise of a Poisson process
    centered = middle - np.average(middle, weights=weights)
    # Variance of the slope under weighted least squares.
    variance = squares * float((weights**2 * centered**2).sum()) / float((weights * centered**2).sum()) ** 2
    shrink = slope**2 / (slope**2 + variance) if variance > 0 else 1.0
    mean = float(np.average(counts, weights=weights))
    level = mean - shrink * slope * float(np.average(middle, weights=weights))
    return max(level, 0.0) / BIN_SECONDS, shrink * slope / BIN_SECONDS, shrink


def _burst_weights(residuals: Floats) -> Floats:
    """Huber weights by bin: below 1 where the minute around it has more arrivals than expected."""
    before = BLOCK_BINS // 2
    padded = np.pad(residuals, (before, BLOCK_BINS - 1 - before), mode="edge")
    minute = np.convolve(padded, np.full(BLOCK_BINS, 1 / np.sqrt(BLOCK_BINS)), "valid")
    return np.asarray(BURST / np.maximum(minute, BURST))


def _solve(middle: Floats, counts: Floats, weights: Floats) -> Floats:
    """Weighted lines through counts of shape (samples, bins): level now and slope, (samples, 2)."""
    design = np.column_stack((np.ones_like(middle), middle))
    normal = design.T * weights
    return np.asarray(np.linalg.solve(normal @ design, normal @ counts.T).T)


def _resampled(residuals: Floats) -> Floats:
    """Residuals in blocks, drawn with replacement: shape (SAMPLES, bins)."""
    rng = np.random.default_rng(0)
    bins = len(residuals)
    count = -(-bins // BLOCK_BINS)
    starts = rng.integers(0, max(1, bins - BLOCK_BINS + 1), (SAMPLES, count))
    places = (starts[:, :, None] + np.arange(min(BLOCK_BINS, bins))).reshape(SAMPLES, -1)
    return np.asarray(residuals[places[:, :bins] % bins])


def settled_seconds(recording: Recording, now_seconds: float) -> float:
    """The time until which nearly all arrivals have ended, so that the records are complete.

    At least two thirds of the recording stay.
    """
    begin = float(recording.trace.arrival_seconds[0])
    usual = float(np.quantile(recording.e2e_seconds, SETTLED))
    return now_seconds - min(usual, (now_seconds - begin) / 3)


def steady(recording: Recording, now_seconds: float) -> Trace:
    """The recorded requests at one request per second in every minute. `Trace.faster` sets a rate.

    The trend and longer bursts are gone: they are part of the forecast.
    """
    arrivals = recording.trace.arrival_seconds
    begin, end = float(arrivals[0]), max(now_seconds, float(arrivals[-1]))
    minutes = max(1, round((end - begin) / (BLOCK_BINS * BIN_SECONDS)))
    edges = np.linspace(begin, end, minutes + 1)
    clock = np.searchsorted(arrivals, edges, side="right").astype(np.float64)
    clock[0] = 0.0
    warped = np.interp(arrivals, edges, clock)
    return replace(recording.trace.open_loop(), arrival_seconds=warped, sessions=None)


def coarse(recording: Recording) -> Recording:
    """The recording in larger blocks, if prompts are long: simulations then take a fraction of the
    time. A prompt keeps whole blocks alone, so hits are slightly fewer."""
    median = float(np.median(recording.trace.input_tokens))
    factor = 1
    while (
        recording.block_tokens * factor * 2 <= MOST_BLOCK_TOKENS
        and recording.block_tokens * factor * 2 * COARSE_BLOCKS <= median
    ):
        factor *= 2
    size, trace = recording.block_tokens * factor, recording.trace
    if factor == 1:
        return recording
    if trace.block_tokens < size:
        if size % trace.block_tokens:
            return recording
        trace = _every(trace, size // trace.block_tokens)
    elif trace.block_tokens % size:
        return recording
    blocks = recording.cache_blocks
    return replace(
        recording,
        trace=trace,
        block_tokens=size,
        cache_blocks=None if blocks is None else max(1, blocks // factor),
    )


def _every(trace: Trace, step: int) -> Trace:
    """The trace with one hash of every ``step``: a hash covers all blocks before it."""
    counts = np.diff(trace.hash_offsets) // step
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    places = np.repeat(trace.hash_offsets[:-1], counts) + inside * step + step - 1
    return replace(
        trace,
        hash_offsets=offsets,
        hash_ids=trace.hash_ids[places],
        block_tokens=trace.block_tokens * step,
    )


def part(recording: Recording, begin_seconds: float, end_seconds: float) -> Recording:
    """The requests that arrived in a time, with changes of the fleet on their clock.

    Raises WhatIfError if there are none."""
    arrivals = recording.trace.arrival_seconds
    kept = np.flatnonzero((arrivals >= begin_seconds) & (arrivals <= end_seconds))
    if not len(kept):
        raise WhatIfError("no request arrived in the last minutes; send requests")
    start = float(arrivals[kept[0]])
    taken = recording.trace.take(kept)
    columns = {
        name: getattr(recording, name)[kept]
        for name in (
            "instance", "held_seconds", "ttft_seconds", "tpot_seconds", "e2e_seconds", "cached_tokens",
        )
    }  # fmt: skip
    changes = []
    state: dict[int, bool] = {}
    for change in recording.changes:
        if change.at_seconds <= start:
            state[change.instance] = change.joins
        elif change.at_seconds <= end_seconds:
            changes.append(replace(change, at_seconds=change.at_seconds - start))
    # An engine that has left before is absent, which a later join alone says.
    gone = [
        number for number, there in state.items() if not there and all(c.instance != number for c in changes)
    ]
    shifted = replace(taken, arrival_seconds=taken.arrival_seconds - start)
    made = replace(
        recording,
        trace=shifted,
        changes=tuple(changes),
        started_at=recording.started_at + start,
        incomplete=recording.incomplete.part(begin_seconds, end_seconds, start),
        **columns,
    )
    return _without(made, gone)


def _without(recording: Recording, gone: list[int]) -> Recording:
    """The recording without engines that served no request and are gone."""
    gone = [number for number in gone if not (recording.instance == number).any()]
    if not gone:
        return recording
    kept = [number for number in range(len(recording.engines)) if number not in gone]
    place = np.full(len(recording.engines), -1, np.int64)
    place[kept] = np.arange(len(kept))
    return replace(
        recording,
        engines=tuple(recording.engines[number] for number in kept),
        instance=place[recording.instance],
        changes=tuple(
            replace(each, instance=int(place[each.instance]))
            for each in recording.changes
            if each.instance not in gone
        ),
    )
