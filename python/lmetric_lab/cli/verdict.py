"""The sentence that ends ``simulate``, ``demo`` and ``replay``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmetric_lab.sim.ranking import Measured, rank

if TYPE_CHECKING:
    from lmetric_lab.replay import ProgramReport

Span = tuple[float, float, float]
"""Mean, minimum and maximum over seeds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The results of one policy.

    Attributes:
        ttft_seconds: mean TTFT; None: no request got a token.
        tpot_seconds: mean TPOT; None: no answer has two tokens.
        requests: number of requests, over all seeds.
        unfinished: number of requests without a complete answer.
        seeds: number of runs.
        first_token_share: share of the requests with a first token when the last one arrived.
    """

    label: str
    ttft_seconds: Span | None
    tpot_seconds: Span | None
    requests: int
    unfinished: int = 0
    seeds: int = 1
    first_token_share: float = 1.0

    def measured(self) -> Measured:
        """The results that decide the place of the policy."""
        ttft, tpot = (None if span is None else span[0] for span in (self.ttft_seconds, self.tpot_seconds))
        return Measured(ttft, tpot, self.unfinished, self.first_token_share)


def sentence(entries: Sequence[Entry]) -> str:
    """Compares the best entry with the second, in the order of study reports."""
    standings = rank(entries, Entry.measured)
    ranked = [standing.policy for standing in standings if standing.policy.ttft_seconds is not None]
    parts = []
    if ranked:
        best, rival = ranked[0], ranked[1] if len(ranked) > 1 else None
        for name in ("TTFT", "TPOT"):
            own = _span(best, name)
            if own is not None:
                other = None if rival is None else _span(rival, name)
                told = _compared(own, other, rival.label) if rival and other else _over_seeds(own, best.seeds)
                parts.append(f"mean {name} {shown(own[0])}{told}")
        parts[0] = f"{best.label}: {parts[0]}"
    for entry in entries:
        if entry.unfinished:
            label = f"{entry.label}: " if len(entries) > 1 or not ranked else ""
            parts.append(f"{label}{entry.unfinished} of {entry.requests} requests did not finish")
    late = [entry.label for entry in entries if not entry.measured().keeps_up]
    if 0 < len(late) < len(entries):  # it explains the order
        parts.append(f"{', '.join(late)} cannot keep up")
    return "; ".join(parts or ["No request got a token"]) + "."


def of_programs(reports: Mapping[str, ProgramReport]) -> str:
    """Compares the run with the shortest mean job completion time with the second.

    All programs must be complete in both, or the times do not compare.
    """
    whole = {name: each for name, each in reports.items() if not each.failed}
    times = {name: each.jct_mean_seconds for name, each in whole.items() if each.jct_mean_seconds is not None}
    parts = []
    if times:
        best, rival, *_ = [*sorted(times, key=times.__getitem__), None]
        share = whole[best].recomputed_share
        text = f"{best}: mean job completion time {shown(times[best])}"
        text += "" if rival is None else _compared((times[best],) * 3, (times[rival],) * 3, rival)
        text += "" if share is None else f", {share:.1%} of the prompt tokens recomputed"
        if rival is not None and share is not None:
            text += f" ({rival}: {whole[rival].recomputed_share or 0.0:.1%})"
        parts.append(text)
    for name, each in reports.items():
        if each.failed:
            parts.append(f"{name}: {each.failed} of {each.failed + each.programs} programs did not finish")
    return "; ".join(parts or ["No program finished"]) + "."


def shown(seconds: float) -> str:
    """A time with its unit: seconds, or milliseconds below one second."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def _span(entry: Entry, name: str) -> Span | None:
    return entry.ttft_seconds if name == "TTFT" else entry.tpot_seconds


def _over_seeds(own: Span, seeds: int) -> str:
    return f" ({shown(own[1])} to {shown(own[2])} over {seeds} seeds)" if seeds > 1 else ""


def _compared(own: Span, other: Span, label: str) -> str:
    difference = own[0] / other[0] - 1 if other[0] else 0.0
    if own == other:
        return f", the same as {label}"
    where = "below" if difference < 0 else "above"
    amount = f"{abs(difference):.0%}" if abs(difference) >= 0.005 else "less than 1%"
    several = own[1] < own[2] or other[1] < other[2]
    overlap = several and own[1] <= other[2] and other[1] <= own[2]
    return f", {amount} {where} {label}" + (" (within the spread over seeds)" if overlap else "")
