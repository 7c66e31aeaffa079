"""The parts of a request on the engines that it used, from its decision record.

`timeline` is a pure function, as `lmetric.why.because` is. The live page draws its parts, and
`lmetric-router top --why` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

# wait: held by the router. prefill: until the first token. answer: until the end of an answer
# without a known first token.
PartKind = Literal["wait", "fetch", "prefill", "decode", "answer"]
_MOVES = frozenset({"handoff", "migration", "failover", "retry"})


class Part(TypedDict):
    """A part of a request. Times: seconds since the decision, negative before it."""

    engine: str | None  # None: the router
    kind: PartKind
    from_seconds: float
    to_seconds: float


def timeline(record: Mapping[str, Any]) -> list[Part]:
    """Returns the parts of a request, by start.

    Args:
        record: a decision record (`Router.explain`), with the key ``events`` of
            ``/debug/decisions/ID`` if it has any. Absent fields count as None.
    """
    tried = record.get("tried") or [record["instance"]]
    moves = [
        (event["after_seconds"], event["kind"], event["target"])
        for event in record.get("events") or []
        if event["kind"] in _MOVES and event.get("target") is not None
    ]
    following, handoff = record.get("decode_instance"), record.get("handoff_seconds")
    if not moves and following is not None and handoff is not None:  # the event is too old
        moves.append((handoff, "handoff", following))
    end = max(
        record.get("e2e_seconds") or 0.0, record.get("ttft_seconds") or 0.0, *(at for at, *_ in moves), 0.0
    )
    first = record.get("ttft_seconds")
    if first is None:  # an answer in one piece: the prefill engine's part ends at the handoff
        first = next((at for at, kind, _ in moves if kind == "handoff"), None)
    parts: list[Part] = []

    def add(engine: str | None, kind: PartKind, start: float, stop: float) -> None:
        if stop > start:
            parts.append({"engine": engine, "kind": kind, "from_seconds": start, "to_seconds": stop})

    def serve(engine: str, start: float, stop: float) -> None:
        if first is None:
            add(engine, "answer", start, stop)
        else:
            add(engine, "prefill", start, min(stop, first))
            add(engine, "decode", max(start, first), stop)

    add(None, "wait", -(record.get("held_seconds") or 0.0), 0.0)
    start = 0.0
    if (holder := record.get("fetch_instance")) is not None:
        start = record.get("fetch_seconds") or 0.0
        add(holder, "fetch", 0.0, start)
    engine = tried[0]
    for at, _, target in moves:
        serve(engine, start, at)
        start, engine = max(start, at), target
    serve(engine, start, end)
    return parts
