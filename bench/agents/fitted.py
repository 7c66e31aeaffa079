"""The synthetic workload `coding-agents` beside the recorded sessions that it is fitted to.

    python bench/agents/fitted.py sessions.jsonl.xz         # statistics of both, side by side
    python bench/agents/fitted.py sessions.jsonl.xz --fit   # the fitted part of the description

The public sessions are those of kv-cache-tester (Apache-2.0), with one session per line. For the
results of policies on both, run recorded.py with the file and with coding-agents.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
import yaml
from numpy.typing import NDArray
from scipy import stats

from lmetric_lab.defaults import CODING_AGENTS
from lmetric_lab.packed import open_packed
from lmetric_lab.sim.agents import AgentsTrace
from lmetric_lab.sim.synthetic import read_synthetic
from lmetric_lab.sim.traces import FINISH, Trace, load_trace, summarize_trace

Floats = NDArray[np.float64]
BLOCK_TOKENS = 64
REWRITTEN = 0.7  # a turn is rewritten if less of the previous prompt stays
COMPACTED = 0.6  # a rewritten turn is compacted if its prompt is shorter than this share
STOP, TOOL_CALLS = FINISH.index("stop"), FINISH.index("tool_calls")
FEW = (0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
MANY = (
    0, 0.01, 0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.985, 0.99,
    0.995, 0.998, 0.999, 0.9995, 1,
)  # fmt: skip
LONGEST = 900_000  # max_context_tokens; a session is not compacted if it is drawn as the limit
# First prompts of resumed sessions, in tokens: from the first to the second, and above.
RESUMED, LARGE = 40_000, 200_000


@dataclass(frozen=True, slots=True)
class Turns:
    """The main agents of a trace.

    Attributes:
        first: tokens of the first prompts, by session.
        counts: turns, by session.
        longest: tokens of the longest prompts, by session.
        outputs: tokens of all answers.
        session: session of each turn after the first, as all below.
        before, after, answer: tokens of the previous prompt, the prompt, and the previous answer.
        shared: tokens of the previous prompt that the prompt begins with.
        gap: seconds from the previous answer; NaN: not recorded.
        person, tool: who sends the turn, by the finish reason of the previous answer.
    """

    first: Floats
    counts: Floats
    longest: Floats
    outputs: Floats
    session: NDArray[np.int64]
    before: Floats
    after: Floats
    answer: Floats
    shared: Floats
    gap: Floats
    person: NDArray[np.bool_]
    tool: NDArray[np.bool_]

    @property
    def rewritten(self) -> NDArray[np.bool_]:
        """Turns that lose a part of the context, compacted ones included."""
        return self.shared < REWRITTEN * self.before

    @property
    def compacted(self) -> NDArray[np.bool_]:
        """Rewritten turns with a much shorter prompt."""
        return self.rewritten & (self.after < COMPACTED * self.before)


def turns_of(trace: Trace) -> Turns:
    """The turns of a trace without subagents."""
    assert trace.previous is not None
    assert trace.sessions is not None
    assert trace.think_seconds is not None
    assert trace.finish is not None
    later = np.flatnonzero(trace.previous >= 0)
    before = trace.previous[later]
    count = int(trace.sessions.max()) + 1
    longest = np.zeros(count)
    np.maximum.at(longest, trace.sessions, trace.input_tokens)
    first = np.zeros(count)
    # In the order of arrival, so the last assignment is that of the first request.
    first[trace.sessions[::-1]] = trace.input_tokens[::-1]
    return Turns(
        first=first,
        counts=np.bincount(trace.sessions).astype(float),
        longest=longest,
        outputs=trace.output_tokens.astype(float),
        session=trace.sessions[later],
        before=trace.input_tokens[before].astype(float),
        after=trace.input_tokens[later].astype(float),
        answer=trace.output_tokens[before].astype(float),
        shared=np.array(list(_shared(trace, before, later)), float),
        gap=np.where(trace.finish[before] < 0, np.nan, trace.think_seconds[later]),
        person=trace.finish[before] == STOP,
        tool=trace.finish[before] == TOOL_CALLS,
    )


def _shared(trace: Trace, before: NDArray[np.int64], later: NDArray[np.int64]) -> Iterator[int]:
    """Tokens of the whole blocks that both prompts of each pair begin with."""
    for one, two in zip(before.tolist(), later.tolist(), strict=True):
        a = trace.hash_ids[trace.hash_offsets[one] : trace.hash_offsets[one + 1]]
        b = trace.hash_ids[trace.hash_offsets[two] : trace.hash_offsets[two + 1]]
        n = min(len(a), len(b))
        differ = a[:n] != b[:n]
        yield trace.block_tokens * int(differ.argmax() if differ.any() else n)


@dataclass(frozen=True, slots=True)
class Subagents:
    """Subagents by session, and tokens of their first prompts, turns, and new tokens of a turn."""

    per_session: list[int]
    first: list[int]
    turns: list[int]
    new: list[int]


def recorded(lines: Iterable[bytes]) -> tuple[Trace, Trace, Subagents]:
    """The recorded sessions, the same sessions without subagents, and the subagents."""
    found = Subagents([], [], [], [])
    with TemporaryDirectory() as folder:
        whole, alone = Path(folder) / "all.jsonl", Path(folder) / "main.jsonl"
        with whole.open("wb") as one, alone.open("wb") as two:
            for line in lines:
                session = orjson.loads(line)
                children = [each for each in session["requests"] if each["type"] == "subagent"]
                session["requests"] = [each for each in session["requests"] if each["type"] != "subagent"]
                found.per_session.append(len(children))
                for child in children:
                    calls = child["requests"]
                    found.first.append(calls[0]["in"])
                    found.turns.append(len(calls))
                    found.new.extend(b["in"] - a["in"] - a["out"] for a, b in pairwise(calls))
                one.write(line)
                two.write(orjson.dumps(session) + b"\n")
        return load_trace(whole), load_trace(alone), found


def synthetic(seed: int) -> tuple[Trace, Trace, Subagents]:
    """As `recorded`, of the description in the package."""
    described = read_synthetic(str(CODING_AGENTS), seed=seed, block_tokens=BLOCK_TOKENS)
    assert isinstance(described, AgentsTrace)
    alone = described.model_copy(update={"fork_share": 0.0}).make()
    # Without people and rewrites, a request that shares nothing is the first one of a subagent.
    forks = described.model_copy(update={"rewrites": None, "people": None}).make()
    assert forks.previous is not None
    assert forks.sessions is not None
    later = np.flatnonzero(forks.previous >= 0)
    shared = dict(zip(later.tolist(), _shared(forks, forks.previous[later], later), strict=True))
    found = Subagents([0] * (int(forks.sessions.max()) + 1), [], [], [])
    runs: dict[int, int] = {}  # the subagent of its last request
    for row, same in shared.items():
        before = int(forks.previous[row])
        prompt, answer = int(forks.input_tokens[before]), int(forks.output_tokens[before])
        if same == 0:
            runs[row] = len(found.first)
            found.per_session[int(forks.sessions[row])] += 1
            found.first.append(int(forks.input_tokens[row]))
            found.turns.append(1)
        elif before in runs and same > REWRITTEN * prompt:
            runs[row] = runs.pop(before)
            found.turns[runs[row]] += 1
            found.new.append(int(forks.input_tokens[row]) - prompt - answer)
    return described.make(), alone, found


def between_sessions(values: Floats, session: NDArray[np.int64]) -> tuple[float, float]:
    """Standard deviations of a random effect of the session, and within sessions."""
    groups = [values[session == each] for each in np.unique(session)]
    sizes = np.array([len(each) for each in groups], float)
    within = sum(float(((each - each.mean()) ** 2).sum()) for each in groups) / (len(values) - len(groups))
    means = np.array([each.mean() for each in groups])
    outer = float((sizes * (means - values.mean()) ** 2).sum()) / (len(groups) - 1)
    size = (len(values) - (sizes**2).sum() / len(values)) / (len(groups) - 1)
    return float(np.sqrt(max(0.0, (outer - within) / size))), float(np.sqrt(within))


def logs(gaps: Floats) -> Floats:
    """Logarithms of gaps; below half a second, differences have no meaning."""
    return np.log(np.maximum(0.5, gaps))


def new_tokens(turns: Turns) -> Floats:
    """New prompt tokens of the turns whose context grows, answers included; at least 1."""
    return np.maximum(1, (turns.after - turns.before)[~turns.rewritten])


def statistics(trace: Trace, alone: Trace, subagents: Subagents) -> dict[str, list[float]]:
    """The rows of the table: the name with its columns, and the values."""
    turns = turns_of(alone)
    tools, people = turns.gap[turns.tool], turns.gap[turns.person]
    rewritten, compacted = turns.rewritten, turns.compacted
    forked = np.array(subagents.per_session) > 0
    ratio = (turns.after / turns.before)[rewritten & ~compacted]

    def spread(values: Any, *shares: float) -> list[float]:
        return [float(np.mean(values)), *np.quantile(values, shares or (0.1, 0.5, 0.9, 0.99)).tolist()]

    # The time that a session would take with instant answers.
    total = np.bincount(turns.session, np.nan_to_num(turns.gap))
    alone_by_people = np.bincount(turns.session, turns.person, len(turns.first)) == 0
    return {
        "sessions, requests": [len(turns.first), len(trace)],
        "prompt tokens that an endless cache has, %": [100 * summarize_trace(trace).ideal_hit_ratio],
        "turns of a session: mean, p10, p50, p90, p99": spread(turns.counts),
        "first prompt, tokens: mean, p10, p50, p90, p99": spread(turns.first),
        "longest prompt of a session, tokens: mean, p10, p50, p90, p99": spread(turns.longest),
        "prompt, tokens: mean, p10, p50, p90, p99": spread(trace.input_tokens),
        "new tokens of a turn, answer included: mean, p10, p50, p90, p99": spread(new_tokens(turns)),
        "answer, tokens: mean, p10, p50, p90, p99": spread(turns.outputs),
        "gap after a tool call, s: mean, p50, p90, p99, p99.9": spread(tools, 0.5, 0.9, 0.99, 0.999),
        "gap before a person's turn, s: mean, p50, p90, p99, p99.9": spread(people, 0.5, 0.9, 0.99, 0.999),
        "log of a gap after a tool call: deviation between and within sessions": list(
            between_sessions(logs(tools), turns.session[turns.tool])
        ),
        "log of a gap before a person's turn: deviation between and within sessions": list(
            between_sessions(logs(people), turns.session[turns.person])
        ),
        "log of new tokens: deviation between and within sessions": list(
            between_sessions(np.log(new_tokens(turns)), turns.session[~rewritten])
        ),
        "gaps of a session together, s: mean, p10, p50, p90, p99": spread(total),
        "turns that a person sends, %; sessions without such turns, %": [
            100 * turns.person.mean(),
            100 * alone_by_people.mean(),
        ],
        "turns with a rewritten context, %: after tools, after people": [
            100 * rewritten[~turns.person].mean(),
            100 * rewritten[turns.person].mean(),
        ],
        "sessions with a rewritten context, %": [100 * len(set(turns.session[rewritten])) / len(turns.first)],
        "tokens that a rewritten context keeps: mean, p10, p50, p90": spread(
            turns.shared[rewritten], 0.1, 0.5, 0.9
        ),
        "compacted turns, %": [100 * compacted.mean()],
        "prompt before it is compacted, tokens: mean, p10, p50, p90": spread(
            turns.before[compacted], 0.1, 0.5, 0.9
        ),
        "compacted prompt to previous prompt: mean, p10, p50, p90": spread(
            (turns.after / turns.before)[compacted], 0.1, 0.5, 0.9
        ),
        "other rewritten prompt to previous prompt: mean, p10, p50, p90": spread(ratio, 0.1, 0.5, 0.9),
        "sessions with subagents, %; subagents of such a session": [
            100 * forked.mean(),
            float(np.sum(subagents.per_session) / max(1, forked.sum())),
        ],
        "subagents: turns, first prompt in tokens, new tokens of a turn (means)": [
            float(np.mean(each)) if each else float("nan")
            for each in (subagents.turns, subagents.first, subagents.new)
        ],
    }


def quantiles(values: Any, shares: Iterable[float] = FEW, least: float = 0) -> dict[str, Any]:
    """A description of a distribution, with three significant digits."""
    shares = tuple(shares)
    rounded = [float(f"{each:.3g}") for each in np.maximum(least, np.quantile(values, shares))]
    return {"quantiles": {s: int(v) if v == int(v) else v for s, v in zip(shares, rounded, strict=True)}}


def without_factor(values: Floats, between: float, within: float) -> Floats:
    """Values whose product with the factor of a session is spread as `values` are.

    The logarithms keep their median; their deviation is that within sessions.
    """
    middle = float(np.median(values))
    power = within / float(np.hypot(between, within))
    return np.asarray(middle * (values / middle) ** power)


def compaction_sizes(turns: Turns) -> dict[float, int]:
    """Quantiles of the prompt size at which sessions are compacted (Kaplan-Meier).

    A stretch between two rewrites or to the end of the session ends with a compaction, or says
    only that the size was not yet reached. Sessions that begin with large prompts are left out.
    """
    begins_small = turns.first[turns.session] < LARGE
    small = turns.first < LARGE
    last = np.zeros(len(turns.first))
    last[turns.session] = turns.after  # by arrival: the last prompt stays
    seen = stats.CensoredData(
        uncensored=turns.before[turns.compacted & begins_small],
        right=np.concatenate((turns.before[turns.rewritten & ~turns.compacted & begins_small], last[small])),
    )
    curve = stats.ecdf(seen).cdf
    sizes: dict[float, float] = {0: 40_000, 0.51: LONGEST, 1: LONGEST}
    for share in (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.45, 0.5):
        sizes[share] = round(float(curve.quantiles[np.searchsorted(curve.probabilities, share)]), -3)
    return {share: int(sizes[share]) for share in sorted(sizes)}


def fit(turns: Turns, subagents: Subagents) -> dict[str, Any]:
    """The fields of `AgentsTrace` that are fitted."""
    rewritten, compacted, person = turns.rewritten, turns.compacted, turns.person
    other = rewritten & ~compacted
    own = np.maximum(1, turns.after - turns.before - turns.answer)[~rewritten]
    growth = between_sessions(np.log(new_tokens(turns)), turns.session[~rewritten])
    tools = between_sessions(logs(turns.gap[turns.tool]), turns.session[turns.tool])
    people = between_sessions(logs(turns.gap[person]), turns.session[person])
    large, fresh = turns.first >= LARGE, turns.first < RESUMED
    resumed = ~large & ~fresh
    by_people = np.bincount(turns.session, person) / np.bincount(turns.session)
    ratio = turns.after / turns.before
    forked = np.array(subagents.per_session) > 0
    return {
        "first_tokens": quantiles(turns.first[fresh]),
        "turns": quantiles(turns.counts[fresh]),
        "kinds": [
            {
                "share": round(float(kind.mean()), 3),
                "first_tokens": quantiles(turns.first[kind]),
                "turns": quantiles(turns.counts[kind]),
            }
            for kind in (resumed, large)
        ],
        "input_tokens": quantiles(without_factor(own, *growth), MANY, 1),
        "input_sigma": round(growth[0], 2),
        "output_tokens": quantiles(turns.outputs, MANY, 1),
        "gap_seconds": quantiles(without_factor(np.maximum(0.01, turns.gap[turns.tool]), *tools), MANY),
        "gap_sigma": round(tools[0], 2),
        "people": {
            # By turns, not by sessions: long sessions have fewer turns of people.
            "share": quantiles(by_people[turns.session]),
            "gap_seconds": quantiles(without_factor(np.maximum(0.01, turns.gap[person]), *people), MANY),
            "gap_sigma": round(people[0], 2),
            "rewrite_share": round(float(other[person].mean()), 3),
        },
        "rewrites": {
            "share": round(float(other[~person].mean()), 4),
            "kept_tokens": quantiles(turns.shared[rewritten]),
            "ratio": quantiles(ratio[other]),
            "compact_at_tokens": {"quantiles": compaction_sizes(turns)},
            "compact_ratio": quantiles(ratio[compacted]),
        },
        "fork_share": round(float(forked.mean()), 3),
        "subagent_turns": quantiles(subagents.turns, (0, 0.1, 0.5, 0.9, 1)),
        "subagent_first_tokens": quantiles(subagents.first, (0, 0.1, 0.5, 0.9, 1)),
        "subagent_input_tokens": quantiles(subagents.new, least=1),
    }


def shown(value: float) -> str:
    """Three significant digits, or a whole number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Prints the statistics as a Markdown table, or the fitted fields as YAML."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic workload")
    parser.add_argument("--fit", action="store_true", help="print the fitted fields of the description")
    options = parser.parse_args()
    with open_packed(options.file) as file:
        real = recorded(file)
    if options.fit:
        print(
            yaml.safe_dump(
                fit(turns_of(real[1]), real[2]), sort_keys=False, default_flow_style=None, width=108
            )
        )
        return
    print("| | recorded | `coding-agents` |\n| --- | --- | --- |")
    made = statistics(*synthetic(options.seed))
    for name, values in statistics(*real).items():
        print(f"| {name} | {' · '.join(map(shown, values))} | {' · '.join(map(shown, made[name]))} |")


if __name__ == "__main__":
    main()
