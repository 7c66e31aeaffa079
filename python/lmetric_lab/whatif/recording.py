"""Turns records into a trace, with the placement and the times of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric._core import LmetricError
from lmetric.policies import is_code
from lmetric.record_schema import Records, failed, hashes_of, invalid
from lmetric_lab.sim.churn import FleetChange
from lmetric_lab.sim.setups import PolicyChoice
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.traces.turns import previous_by_prefix
from lmetric_lab.slo import Metric

MIN_REQUESTS = 100
MAX_INCOMPLETE = 0.1  # share of the requests that may have no complete answer
DEFAULT_BLOCK_TOKENS = 16
DEFAULT_CACHE_TOKENS = 400_000  # of an engine that reports no cache size

Floats = NDArray[np.float64]


class WhatIfError(LmetricError):
    """Records that cannot answer the question. The message has the reason and what to do."""


def _none() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, slots=True)
class IncompleteRequests:
    """Requests without a complete answer, in order of arrival: demand and misses, but
    not simulated.

    The arrays have the shape (requests,). Times are infinite if the request failed, NaN if
    unknown.
    """

    arrival_seconds: Floats = field(default_factory=_none)  # on the trace's clock; may be negative
    duration_seconds: Floats = field(default_factory=_none)
    ttft_seconds: Floats = field(default_factory=_none)
    tpot_seconds: Floats = field(default_factory=_none)
    e2e_seconds: Floats = field(default_factory=_none)

    def part(self, begin_seconds: float, end_seconds: float, start_seconds: float) -> IncompleteRequests:
        """The requests that arrived in a time, with ``start_seconds`` as the clock's zero."""
        kept = (self.arrival_seconds >= begin_seconds) & (self.arrival_seconds <= end_seconds)
        return IncompleteRequests(
            self.arrival_seconds[kept] - start_seconds,
            self.duration_seconds[kept],
            self.ttft_seconds[kept],
            self.tpot_seconds[kept],
            self.e2e_seconds[kept],
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """Complete requests of one model, in order of arrival.

    The arrays have the shape (n,), with n the number of requests in ``trace``. Unknown values are
    NaN. ``trace`` has recorded arrivals; a request also waits for its previous turn.
    """

    trace: Trace
    instance: NDArray[np.int64]  # index in `engines`
    held_seconds: Floats
    ttft_seconds: Floats
    tpot_seconds: Floats
    e2e_seconds: Floats
    cached_tokens: Floats
    engines: tuple[str, ...]  # engines that were in the fleet at any time
    policy: PolicyChoice  # policy that ran
    guard: Mapping[str, Any] | None  # settings of the hot-spot guard; None: the policy decides
    block_tokens: int  # of the engines
    cache_blocks: int | None  # of each engine; None: not reported
    exact: bool  # whether the index followed the engines' KV events
    sessions: bool  # whether clients named sessions
    notes: tuple[str, ...]
    changes: tuple[FleetChange, ...] = ()  # engines that came and went, on the trace's clock
    started_at: float = 0.0  # Unix time of the clock's zero: the first complete request's arrival
    incomplete: IncompleteRequests = field(default_factory=IncompleteRequests)

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def hit_ratio(self) -> float | None:
        """Cached prompt tokens over all, of requests whose engine reported them; None: of none."""
        known = ~np.isnan(self.cached_tokens)
        tokens = float(self.trace.input_tokens[known].sum())
        return float(self.cached_tokens[known].sum()) / tokens if tokens else None

    @property
    def most_engines(self) -> int:
        """The largest number of engines at once."""
        first: dict[int, FleetChange] = {}
        for change in self.changes:
            first.setdefault(change.instance, change)
        there = set(range(len(self.engines))) - {number for number, each in first.items() if each.joins}
        most = len(there)
        for _, changes in groupby(self.changes, key=lambda change: change.at_seconds):
            for change in changes:
                (there.add if change.joins else there.discard)(change.instance)
            most = max(most, len(there))
        return most

    def times(self) -> dict[Metric, Floats]:
        """The times of the requests, seconds, each of shape (n,)."""
        return {"ttft": self.ttft_seconds, "tpot": self.tpot_seconds, "e2e": self.e2e_seconds}

    def all_arrivals(self) -> Floats:
        """Arrivals of the complete requests, then of `incomplete`, on the trace's clock."""
        return np.concatenate((self.trace.arrival_seconds, self.incomplete.arrival_seconds))

    def all_durations(self) -> Floats:
        """Times from arrival to end of the requests of `all_arrivals`, seconds."""
        return np.concatenate((self.e2e_seconds, self.incomplete.duration_seconds))

    def all_times(self) -> dict[Metric, Floats]:
        """The times of the requests of `all_arrivals`, seconds; infinite if they failed."""
        out = self.incomplete
        lost = {"ttft": out.ttft_seconds, "tpot": out.tpot_seconds, "e2e": out.e2e_seconds}
        return {name: np.concatenate((each, lost[name])) for name, each in self.times().items()}

    def closed_loop(self) -> Trace:
        """The trace with think times: a turn follows the end of the previous turn.

        Without named sessions, the trace with recorded arrivals.
        """
        trace, previous = self.trace, self.trace.previous
        if not self.sessions or previous is None:
            return trace
        ends = trace.arrival_seconds + self.e2e_seconds
        think = np.where(previous >= 0, trace.arrival_seconds - ends[np.maximum(previous, 0)], 0.0)
        arrival = trace.arrival_seconds.copy()
        for index, before in enumerate(previous.tolist()):
            if before >= 0:
                arrival[index] = arrival[before]
        thinking = replace(trace, think_seconds=np.maximum(think, 0.0))
        return thinking.take(np.arange(len(trace)), arrival)


def recording_of(records: Records, *, code: Collection[str] | None = ()) -> Recording:
    """The recording of the complete requests of one model (`Records.of`).

    ``code``: recorded policies that may run Python code; None: all of them.

    Raises:
        WhatIfError: a sample, too few or too many incomplete requests, no state of the fleet,
            pools for prefill and decode, or a policy that ``code`` does not allow.
    """
    if records.sample < 1.0:
        raise WhatIfError(
            f"the records are a sample of {records.sample:g} of the requests, so the load of the engines is "
            "unknown; record all requests (records.sample: 1)"
        )
    if not records.fleets:
        raise WhatIfError("the records have no state of the fleet; pass all files of the folder")
    all_of_them = records.requests
    requests = [each for each in all_of_them if _complete(each)]
    if len(requests) < MIN_REQUESTS:
        raise WhatIfError(
            f"{len(requests)} of {len(all_of_them)} requests have a complete answer; at least {MIN_REQUESTS} "
            "are needed: record more traffic"
        )
    lost = len(all_of_them) - len(requests)
    if lost > MAX_INCOMPLETE * len(all_of_them):
        raise WhatIfError(
            f"{lost} of {len(all_of_them)} requests have no complete answer, more than {MAX_INCOMPLETE:.0%}; "
            "the simulator has no failures: choose files of a time with fewer errors"
        )
    requests.sort(key=lambda each: float(each["at"]))
    notes = [f"{lost} requests without a complete answer are left out of simulations"] if lost else []
    if (keys := len({header["key_id"] for header in records.headers})) > 1:
        notes.append(
            f"the files have {keys} hash keys, so equal prompts and sessions under different keys are not "
            "recognized, and hit rates are too low; set records.hash_key_file and record again"
        )
    fleet = _fleet(records)
    names = list(dict.fromkeys([each["name"] for each in fleet["engines"] if each["usable"]]))
    names += [name for name in dict.fromkeys(each["instance"] for each in requests) if name not in names]
    block = _common([each.get("block_tokens") for each in fleet["engines"]]) or DEFAULT_BLOCK_TOKENS
    cache = _common([each.get("cache_blocks") for each in fleet["engines"]])
    if cache is None:
        notes.append(f"the engines report no cache size: {DEFAULT_CACHE_TOKENS:,} tokens are assumed")
    trace, sessions = _trace(requests, block, notes)
    started_at = float(requests[0]["at"])
    changes = changes_of(records.fleets, names, started_at)
    if changes:
        notes.append(f"{len(changes)} times an engine came or went; the simulation of the fit does the same")
    if any(each.get("migrations") for each in requests):
        notes.append("some requests moved while they ran; the simulation has no migrations")
    return Recording(
        trace=trace,
        instance=np.array([names.index(each["instance"]) for each in requests], np.int64),
        held_seconds=np.nan_to_num(_column(requests, "held_seconds")),
        ttft_seconds=_column(requests, "ttft_seconds"),
        tpot_seconds=_column(requests, "tpot_seconds"),
        e2e_seconds=_column(requests, "e2e_seconds"),
        cached_tokens=_column(requests, "cached_tokens"),
        engines=tuple(names),
        policy=_policy(fleet, requests, notes, code),
        guard=fleet.get("guard"),
        block_tokens=block,
        cache_blocks=cache,
        exact=all(each["mode"] == "exact" for each in fleet["engines"]),
        sessions=sessions,
        notes=tuple(notes),
        changes=changes,
        started_at=started_at,
        incomplete=_incomplete(all_of_them, started_at),
    )


def _incomplete(requests: Sequence[Mapping[str, Any]], started_at: float) -> IncompleteRequests:
    """The requests without a complete answer that engines should have served."""
    found = [each for each in requests if not _complete(each) and not invalid(each)]
    found.sort(key=lambda each: float(each["at"]))
    lost = np.array([failed(each) for each in found], np.bool_)
    times = [
        np.where(lost, np.inf, _column(found, name))
        for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds")
    ]
    return IncompleteRequests(_column(found, "at") - started_at, _column(found, "e2e_seconds"), *times)


def _complete(request: Mapping[str, Any]) -> bool:
    return bool(
        request["status"] == 200
        and request.get("output_tokens")
        and request["prompt_tokens"]
        and request.get("instance")
        and not request.get("reason")
    )


def _column(requests: Sequence[Mapping[str, Any]], name: str) -> Floats:
    return np.array([each.get(name, np.nan) for each in requests], np.float64)


def _common(values: Sequence[Any]) -> int | None:
    """The most frequent known value."""
    known = Counter(value for value in values if value)
    return int(known.most_common(1)[0][0]) if known else None


def _fleet(records: Records) -> Mapping[str, Any]:
    """The last state of the fleet. Raises WhatIfError for pools."""
    last = records.fleets[-1]
    if any(each["role"] != "both" for each in last["engines"]):
        raise WhatIfError("the fleet has prefill or decode engines; whatif compares fleets of whole engines")
    return last


def changes_of(
    fleets: Sequence[Mapping[str, Any]], names: Sequence[str], start: float
) -> tuple[FleetChange, ...]:
    """The engines that came and went between states of the fleet, with the numbers of ``names``.

    ``start``: Unix time of the clock's zero. Earlier changes count as done then. States without a
    usable engine are ignored.
    """
    usable = [
        (float(fleet["at"]) - start, {each["name"] for each in fleet["engines"] if each["usable"]})
        for fleet in fleets
    ]
    usable = [(at, there) for at, there in usable if there & set(names)]
    before = [number for number, (at, _) in enumerate(usable) if at <= 0]
    usable = usable[before[-1] if before else 0 :]
    if not usable:
        return ()
    # Engines that no state names served requests all the same, so they stay.
    known = set().union(*(there for _, there in usable))
    found: list[FleetChange] = []
    present = usable[0][1]
    for number, name in enumerate(names):
        if name in known and name not in present:
            first = next(at for at, there in usable if name in there)
            found.append(FleetChange(max(first, 0.0), "join", number))
    joined = {names[change.instance] for change in found}
    for at, there in usable[1:]:
        for number, name in enumerate(names):
            if name in present and name not in there:
                found.append(FleetChange(max(at, 0.0), "leave", number))
            elif name in there and name not in present and name not in joined:
                found.append(FleetChange(max(at, 0.0), "join", number))
        joined -= there
        present = there
    return tuple(sorted(found, key=lambda change: (change.at_seconds, not change.joins)))


def _policy(
    fleet: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
    notes: list[str],
    code: Collection[str] | None,
) -> PolicyChoice:
    """The policy of the fleet. Raises WhatIfError for code that ``code`` does not allow."""
    names = Counter(each.get("policy") for each in requests)
    if len(names) > 1:
        notes.append(f"{len(names)} policies ran; the fit simulates the last one")
    policy = fleet["policy"]
    if code is not None and is_code(policy) and policy not in code:
        raise WhatIfError(
            f"the recorded policy {policy!r} is Python code, which records do not run by themselves. If you "
            "trust it, run whatif, report or advise with --allow-code"
        )
    label = policy if isinstance(policy, str) else str(policy.get("name") or policy.get("score"))
    return PolicyChoice(policy, fleet["knobs"], "").labelled(None if isinstance(policy, str) else label)


def _trace(requests: Sequence[Mapping[str, Any]], engine_block: int, notes: list[str]) -> tuple[Trace, bool]:
    """The trace, and whether clients named sessions."""
    units = Counter(each["hash_unit"] for each in requests if "hash_unit" in each)
    unit = units.most_common(1)[0][0] if units else "tokens"
    if len(units) > 1:
        notes.append(f"prompts hashed in other units than {unit} share no prefix")
    hashed = [each for each in requests if each.get("hash_unit") == unit]
    block = _common([each.get("hash_block") for each in hashed]) or engine_block
    input_tokens = np.array([each["prompt_tokens"] for each in requests], np.int64)
    if unit == "bytes":
        blocks = sum(len(hashes_of(each)) for each in hashed)
        tokens = sum(each["prompt_tokens"] for each in hashed)
        block = max(engine_block, round(tokens / max(1, blocks) / engine_block) * engine_block)
        notes.append(f"prompts are hashed as text: a block counts as {block} tokens")
    lists = [
        hashes_of(each)[: each["prompt_tokens"] // block]
        if each.get("hash_unit") == unit
        else np.empty(0, np.uint64)
        for each in requests
    ]
    arrival = np.array([each["at"] for each in requests], np.float64)
    arrival = np.maximum.accumulate(arrival - arrival[0])
    trace = Trace(
        name="records",
        arrival_seconds=arrival,
        input_tokens=input_tokens,
        output_tokens=np.array([each["output_tokens"] for each in requests], np.int64),
        hash_offsets=np.concatenate(([0], np.cumsum([len(each) for each in lists]))).astype(np.int64),
        hash_ids=np.concatenate(lists) if lists else np.empty(0, np.uint64),
        block_tokens=block,
    )
    keys = [each.get("session") for each in requests]
    named = any(key is not None for key in keys)
    previous = _previous_by_session(keys) if named else previous_by_prefix(trace)
    # A request cannot wait for an answer that ended after it came.
    ends = arrival + _column(requests, "e2e_seconds")
    early = (previous >= 0) & (ends[np.maximum(previous, 0)] > arrival)
    previous = np.where(early, -1, previous)
    return replace(trace, previous=previous, sessions=_sessions(keys, previous)), named


def _sessions(keys: Sequence[str | None], previous: NDArray[np.int64]) -> NDArray[np.int64]:
    """The session of each request, -1: none. Without any key, each chain of `previous` is one."""
    numbers: dict[str, int] = {}
    if any(key is not None for key in keys):
        return np.array(
            [-1 if key is None else numbers.setdefault(key, len(numbers)) for key in keys], np.int64
        )
    sessions = np.empty(len(keys), np.int64)
    begun = 0
    for index, before in enumerate(previous.tolist()):
        sessions[index] = begun if before < 0 else sessions[before]
        begun += before < 0
    return sessions


def _previous_by_session(keys: Sequence[str | None]) -> NDArray[np.int64]:
    last: dict[str, int] = {}
    previous = np.full(len(keys), -1, np.int64)
    for index, key in enumerate(keys):
        if key is not None:
            previous[index] = last.get(key, -1)
            last[key] = index
    return previous
