"""One sentence that says why a request went to its instance, from the decision record.

`because` is a pure function. It needs nothing but a `lmetric.records.DecisionRecord`, so it works
for live records and for stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Terms = Mapping[str, float | None]
# The text of a score: the quantity and its values, such as "120 x 3 = 360".
Arithmetic = Callable[[Terms, float], str]

# Names of indicators in sentences; the other names stay as they are.
WORDS: Mapping[str, str] = {
    "bs": "requests",
    "q_bs": "waiting requests",
    "r_bs": "running requests",
    "p_token": "new prefill tokens",
    "p_seconds": "seconds of new prefill",
    "tokens": "context tokens",
    "decode_tokens": "decoding context tokens",
    "decode_bs": "decoding requests",
    "kv_hit": "cached share of the prompt",
    "kv_usage": "KV cache in use",
    "hit_tokens": "cached tokens",
    "new_tokens": "uncached prompt tokens",
    "queued_prefill_tokens": "queued prompt tokens",
    "remaining_tokens": "output tokens to come",
    "predicted_ttft_seconds": "predicted seconds to the first token",
    "index_blocks": "cached blocks",
    "cache_free_tokens": "free cache tokens",
    "recompute_ratio": "recomputed per new token",
}
MIN_SHOWN_SECONDS = 0.01  # shorter waits in the router are none for people
# Policies that prefer the instance with the longest cached prefix, unless load forbids it.
_HOLDERS = frozenset(
    {"filter", "aibrix_prefix", "cache_aware", "prefix_spill", "ray_prefix", "dynamo_two_tier", "preble"}
)
# Of them, the policies that follow a cached share only above a threshold. While the fleet is out of
# balance, their score is the number of requests.
_BY_THRESHOLD = frozenset({"cache_aware", "ray_prefix", "dynamo_two_tier"})


def because(record: Mapping[str, Any], formula: str | None = None) -> str:
    """Returns why the request went to its instance, as one sentence that starts with "because".

    Args:
        record: a decision record (`Router.explain`). Absent fields count as None.
        formula: the score expression of a policy without a name, for the sentence.
    """
    tried: Sequence[str] = record.get("tried") or [record["instance"]]
    first = tried[0]
    parts = [_choice(record, first, formula), *_conditions(record)]
    if len(tried) > 1 and record["instance"] != first:
        parts.append(f"{_list(tried[:-1])} did not serve it, so {record['instance']} was next")
    if (decode := record.get("decode_instance")) is not None and decode != record["instance"]:
        parts.append(f"{decode} continues after the handoff")
    if (holder := record.get("fetch_instance")) is not None:
        start, end = record.get("fetch_from_token"), record.get("fetch_to_token")
        tokens = f" ({number(end - start)} tokens)" if start is not None and end is not None else ""
        parts.append(f"its cached prefix is fetched from {holder}{tokens}")
    parts += _waited(record)
    parts += _on_trial(record)
    parts += _renamed(record)
    return f"because {'; '.join(parts)}."


def _choice(record: Mapping[str, Any], name: str, formula: str | None) -> str:
    """Returns the main clause: what was best about the instance, and the next best instance."""
    best: Sequence[Mapping[str, Any]] = record.get("best") or []
    scores = {each["instance"]: each["score"] for each in best if each["score"] is not None}
    if record.get("unscored"):
        return f"the policy scored no engine, and {name} had the fewest requests"
    if record.get("guard_balance_only"):
        return f"the hot-spot guard would have excluded every engine, and {name} had the least load"
    own = scores.get(name)
    if own is None:
        return f"{name} was the only engine that may serve it"
    if len(scores) == 1:
        return f"{name} was the only engine with a score"
    terms = {candidate["instance"]: candidate["terms"] for candidate in best}
    most = record.get("prefer") == "max"
    others = {each: score for each, score in scores.items() if each != name}
    following = (max if most else min)(others, key=lambda each: others[each])
    policy = record["policy"]
    if policy in ("round_robin", "random"):
        return f"it was {name}'s turn" if policy == "round_robin" else f"{name} was drawn at random"
    if policy == "session_affinity":
        return _session(terms, name, own)
    if policy in _HOLDERS:
        return _holder(record, terms, name, following, own)
    described = _described(policy, formula, most)
    better = others[following] > own if most else others[following] < own
    if better:
        text = f"{name} was drawn by its {described[2]} {_score(described[1], terms, name, own)}"
        return f"{text}; the best engine {following} had {number(others[following])}"
    text = f"{name} had the {described[0]}: {_score(described[1], terms, name, own)}"
    if (tied := _others(record, "tied")) > 0:
        others_tied = f"{tied} other engine{'s' if tied > 1 else ''}"
        return f"{text}, as {others_tied} had{_tie(record)}"
    if policy == "power_of_two":
        return f"{text}, of two drawn engines; the other, {following}, had {number(others[following])}"
    return f"{text}; next best {following}: {number(others[following])}"


def _others(record: Mapping[str, Any], key: str) -> int:
    return (record.get(key) or 1) - 1


def _tie(record: Mapping[str, Any]) -> str:
    """Returns the clause about the choice between instances with equal scores."""
    drawn_from = record.get("drawn_from")
    if drawn_from is None:
        return ""
    if drawn_from == 1:
        return "; the policy's tie-breaks decided"
    if drawn_from == record["tied"]:
        return "; the tie was broken at random"
    return f"; the policy's tie-breaks left {drawn_from} engines, and the choice was random"


def _session(terms: Mapping[str, Terms], name: str, own: float) -> str:
    # Without a session key, the score is the number of requests.
    if own == (terms.get(name) or {}).get("bs") and own == math.floor(own):
        return f"it has no session, and {name} had the fewest requests: {number(own)}"
    return f"its session belongs to {name}, by the hash of both names"


def _holder(
    record: Mapping[str, Any], terms: Mapping[str, Terms], name: str, following: str, score: float
) -> str:
    """Returns the main clause for a policy that prefers the largest cached share of the prompt."""
    own, holder = terms.get(name) or {}, record.get("holder")
    hit, requests = _hit(own), own.get("bs")
    # As in the terms: less what loading from lower tiers costs.
    most = holder["saved_tokens"] / record["prompt_tokens"] if holder is not None else 0.0
    if hit and hit >= most * (1 - 1e-9):  # the core rounds another way
        text = f"{name} had the largest cached share of the prompt: {hit:.0%}"
        return f"{text}; next best {following}: {_hit(terms.get(following) or {}) or 0:.0%}"
    why = f"{name} had the least load" if requests is None else f"{name} had {_count(requests)}"
    policy = record["policy"]
    # Preble follows a cached share above a half.
    by_load = most > 0.5 if policy == "preble" else policy not in _BY_THRESHOLD or score == requests
    if holder is None or not by_load:
        same = _others(record, "drawn_from")
        tie = f"; {same} other{'s' if same > 1 else ''} had the same" if same else ""
        return f"no engine had enough of the prompt in its cache, and {why}{tie}"
    if requests is None or holder["bs"] > requests:
        why += f", and {holder['instance']} with {most:.0%} of the prompt in its cache had too much load"
        return f"{why} ({number(holder['bs'])})"
    return f"{why}; {holder['instance']} had the largest cached share of the prompt, {most:.0%}, and " + (
        _count(holder["bs"])
    )


def _count(requests: float) -> str:
    return f"{number(requests)} request{'' if requests == 1 else 's'}"


def _hit(terms: Terms) -> float | None:
    """Returns the cached share of the prompt, 0 to 1; None: unknown."""
    if (hit := terms.get("kv_hit")) is not None:
        return hit
    cached, fresh = terms.get("hit_tokens"), terms.get("new_tokens")
    if cached is None or fresh is None or cached + fresh <= 0:
        return None
    return cached / (cached + fresh)


def _score(arithmetic: Arithmetic | None, terms: Mapping[str, Terms], name: str, own: float) -> str:
    values = terms.get(name)
    if arithmetic is None or values is None:
        return number(own)
    try:
        return arithmetic(values, own)
    except (KeyError, TypeError, ZeroDivisionError):  # a term is absent
        return number(own)


def _described(policy: str, formula: str | None, most: bool) -> tuple[str, Arithmetic | None, str]:
    """Returns the superlative, the arithmetic and the noun of a policy's score."""
    known = _POLICIES.get(policy)
    if known is not None:
        return known
    rank = "highest" if most else "lowest"
    noun = f"value of {formula}" if formula and policy == "expression" else f"score of {policy}"
    return f"{rank} {noun}", _listed, noun


def _value(terms: Terms, name: str) -> float:
    value = terms[name]
    if value is None:
        raise KeyError(name)
    return value


def _listed(terms: Terms, score: float) -> str:
    """Returns the score with the values of its terms."""
    shown = [f"{words(name)} {number(v)}" for name, v in terms.items() if v is not None]
    return f"{number(score)} ({', '.join(shown)})" if shown else number(score)


def words(indicator: str) -> str:
    """Returns the name of an indicator for people."""
    return WORDS.get(indicator) or indicator.replace("_", " ")


def _product(left: str) -> Arithmetic:
    """Shows a score as work x batch; the second factor is the score divided by the work."""

    def text(terms: Terms, score: float) -> str:
        work = (
            _value(terms, left) - (terms.get("fetch_tokens") or 0.0) + (terms.get("fetch_cost_tokens") or 0.0)
        )
        factor, requests = score / work, terms.get("bs")
        # The request itself counts. The table beside the sentence has the requests without it.
        itself = requests is not None and math.isclose(factor, requests + 1)
        batch = f"({number(requests)} + 1)" if requests is not None and itself else number(factor)
        return f"{number(work)} x {batch} = {number(score)}"

    return text


def _sum(*names: str) -> Arithmetic:
    def text(terms: Terms, score: float) -> str:
        values = [_value(terms, name) for name in names]
        return f"{' + '.join(map(number, values))} = {number(score)}"

    return text


def _queue(terms: Terms, score: float) -> str:
    waiting, running = _value(terms, "q_bs"), _value(terms, "r_bs")
    return f"4 x {number(waiting)} + {number(running)} = {number(score)}"


def _plain(_: Terms, score: float) -> str:
    return number(score)


_POLICIES: Mapping[str, tuple[str, Arithmetic | None, str]] = {
    "lmetric": (
        "least new prefill tokens x batch size",
        _product("p_token"),
        "new prefill tokens x batch size",
    ),
    "lmetric_pull": (
        "least prefill and fetch tokens x batch size",
        _product("p_token"),
        "prefill and fetch tokens x batch size",
    ),
    "lmetric_seconds": (
        "least seconds of new prefill x batch size",
        _product("p_seconds"),
        "seconds of new prefill x batch size",
    ),
    "total_delay": (
        "least delay of all requests in prefill tokens",
        _listed,
        "delay of all requests in prefill tokens",
    ),
    "planner": (
        "least prefill and fetch tokens x batch weight",
        _product("p_token"),
        "prefill and fetch tokens x batch weight",
    ),
    "always_worst": (
        "most new prefill tokens x batch size",
        _product("p_token"),
        "new prefill tokens x batch size",
    ),
    "least_requests": ("fewest requests", _plain, "requests"),
    "power_of_two": ("fewer requests", _plain, "requests"),
    "ils_requests": ("fewest decoding requests", _plain, "decoding requests"),
    "ils": ("fewest decoding context tokens", _plain, "decoding context tokens"),
    "vllm": ("least 4 x waiting + running requests", _queue, "4 x waiting + running requests"),
    "least_tokens": ("fewest context tokens", _plain, "context tokens"),
    "least_prefill": (
        "fewest queued + uncached prompt tokens",
        _sum("queued_prefill_tokens", "new_tokens"),
        "queued + uncached prompt tokens",
    ),
    "star_dispatch": (
        "fewest context + coming output tokens",
        _sum("tokens", "remaining_tokens"),
        "context + coming output tokens",
    ),
    "sibyl": (
        "fewest expected context tokens at the handoff",
        _sum("handoff_running_tokens", "handoff_arrived_tokens", "handoff_coming_tokens"),
        "expected context tokens at the handoff",
    ),
    "simulation": (
        "shortest predicted time to the first token",
        lambda _, score: f"{number(score)} s",
        "predicted time to the first token",
    ),
}


def _conditions(record: Mapping[str, Any]) -> list[str]:
    """Returns the clauses about the guard, the filter, and instances that were left out."""
    found = []
    if excluded := record.get("guard_excluded"):
        found.append(f"the hot-spot guard excluded {number(excluded)} engine{'s' if excluded > 1 else ''}")
    if record.get("filter_waived"):
        found.append("the policy's filter left no engine, so it was ignored")
    if filtered := record.get("filtered"):
        found.append(f"the policy's filter excluded {number(filtered)} engine{'s' if filtered > 1 else ''}")
    if left_out := record.get("left_out"):
        found.append(f"{number(left_out)} engine{'s' if left_out > 1 else ''} had no score")
    return found


def _waited(record: Mapping[str, Any]) -> list[str]:
    """Returns the clause about the priority level of the request, and its wait."""
    if (level := record.get("level")) is None:
        return []
    held, aged = record.get("held_seconds") or 0.0, record.get("aged_levels") or 0
    if held < MIN_SHOWN_SECONDS:
        return [f"it had level {level} and did not wait"]
    raised = f", which aging had raised to {level + aged}" if aged else ""
    return [f"it waited {number(held)} s at level {level}{raised}"]


def _on_trial(record: Mapping[str, Any]) -> list[str]:
    """Returns the clauses about policies on trial."""
    found = [f"the canary's policy {record['policy']} decided"] if record.get("arm") == "canary" else []
    if (shadow := record.get("shadow")) is not None:
        instance, first = shadow["instance"], (record.get("tried") or [record["instance"]])[0]
        choice = "agreed" if instance == first else f"preferred {instance}"
        found.append(f"the shadow {shadow['policy']} {'failed' if instance is None else choice}")
    return found


def _renamed(record: Mapping[str, Any]) -> list[str]:
    """Returns the clauses about an alias and a fallback that gave the request its model."""
    first, model = record.get("fallback_from"), record.get("model")
    alias = record.get("alias")
    found = [] if alias is None else [f"{alias} is an alias of {first or model}"]
    if first is not None:
        found.append(f"{first} did not serve it ({record['fallback_reason']}), and {model} is a fallback")
    return found


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def number(value: float) -> str:
    """Returns a number for people: whole numbers in full, others with three significant digits."""
    if not math.isfinite(value):
        return str(value)
    if abs(value - round(value)) < 1e-6 * max(1.0, abs(value)):
        return f"{round(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
