"""Plays the scripted agents of `agents_proof.py` in the simulator, beside the measured runs.

    python tests/real/agents_replay.py OUT.csv PROFILE.yaml

PROFILE.yaml is what `lmetric-router calibrate` makes of one of the engines. For each seed and
number of agents, the table has the mean job completion time of each arm relative to `admit`,
measured and simulated.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from agents_proof import GPU_BLOCKS, START_SECONDS, SYSTEM_TOKENS, Turn, scripted
from lmetric.profiles import Profile, load_profile
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import prepare
from vllm_process import BLOCK

ENGINES = 2
SETTINGS = {"min_tokens": 256, "max_hold_seconds": 3600.0, "sessions": False}
# By arm of the measured runs: settings of the simulator.
ARMS: dict[str, dict[str, Any]] = {
    "default": {"programs": {"kind": "auto", **SETTINGS}},
    "lmetric": {"policy": "lmetric", "programs": "none"},
    "llmd_scorers": {"policy": "llmd_scorers", "programs": "none"},
    "linear": {"policy": "linear", "programs": "none"},
    "round_robin": {"policy": "round_robin", "programs": "none"},
    "sticky": {"policy": "session_affinity", "programs": "none"},
    "admit": {"policy": "lmetric", "programs": {"kind": "admit", **SETTINGS}},
    "admit, ends reported": {
        "policy": "lmetric",
        "programs": {"kind": "admit", **SETTINGS},
        "session_final": True,
    },
    "ThunderAgent-like": {
        "policy": "lmetric",
        "programs": {"kind": "thunder_agent", "min_tokens": 256, "sessions": False},
        "session_final": True,
    },
}
STOP, UNKNOWN = 0, -1  # of `Trace.finish`


class Script:
    """The requests of all agents of a seed."""

    def __init__(self, seed: int, agents: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.joins: list[tuple[int, int]] = []
        self._ids = 0
        system = self._new(SYSTEM_TOKENS // BLOCK)
        for number in range(agents):
            agent = scripted(seed, number)
            stream, tokens, last, child = list(system), SYSTEM_TOKENS, -1, -1
            for index, turn in enumerate(agent.turns):
                last, tokens = self._turn(number, turn, stream, tokens, last, child)
                child = -1
                if index == agent.fork:
                    branch, held, child = list(stream), tokens, last
                    for each in agent.subagent:
                        child, held = self._turn(number, each, branch, held, child)

    def _new(self, count: int) -> list[int]:
        first = self._ids
        self._ids += max(0, count)
        return list(range(first, self._ids))

    def _turn(
        self, number: int, turn: Turn, stream: list[int], tokens: int, previous: int, child: int = -1
    ) -> tuple[int, int]:
        """Adds a request behind `previous` and, if there is one, a subagent's last request. Returns
        its number and the tokens of the context after it."""
        prompt = tokens + len(turn.tokens)
        stream += self._new(prompt // BLOCK - len(stream))
        part = self._new(int(prompt % BLOCK > 0))
        awaited = [each for each in (previous, child) if each >= 0]
        before = max((self.rows[each]["at"] for each in awaited), default=number * START_SECONDS)
        if child >= 0:
            self.joins.append((len(self.rows), child))
        self.rows.append(
            {
                "at": before + turn.sleep,
                "prompt": prompt,
                "output": turn.answer,
                "ids": stream[: prompt // BLOCK] + part,
                "previous": previous,
                "think": 0.0 if previous < 0 else turn.sleep,
                "agent": number,
                "finish": STOP if turn.last else UNKNOWN,
            }
        )
        tokens = prompt + turn.answer
        stream += self._new(tokens // BLOCK - len(stream))
        return len(self.rows) - 1, tokens

    def trace(self) -> Trace:
        """The requests as a trace, in order of their earliest arrival."""
        order = sorted(range(len(self.rows)), key=lambda i: self.rows[i]["at"])
        place = {row: number for number, row in enumerate(order)} | {-1: -1}
        rows = [self.rows[i] for i in order]

        def column(name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.array([row[name] for row in rows], np.int64)

        return Trace(
            name="scripted agents",
            arrival_seconds=np.array([row["at"] for row in rows]),
            input_tokens=column("prompt"),
            output_tokens=column("output"),
            hash_offsets=np.cumsum([0, *(len(row["ids"]) for row in rows)]).astype(np.int64),
            hash_ids=np.concatenate([np.array(row["ids"], np.uint64) for row in rows]),
            block_tokens=BLOCK,
            sessions=column("agent"),
            previous=np.array([place[row["previous"]] for row in rows], np.int64),
            think_seconds=np.array([row["think"] for row in rows]),
            joins=np.array([(place[a], place[b]) for a, b in self.joins], np.int64).reshape(-1, 2),
            programs=column("agent"),
            finish=column("finish"),
        )


def played(script: Trace, arm: str, profile: Profile, seed: int) -> Run:
    """Simulates an arm."""
    return simulate(
        prepare(script, profile),
        instances=ENGINES,
        profile=profile,
        admission="vllm",
        cached_answers=True,
        seed=seed,
        **ARMS[arm],
    )


def job_seconds(run: Run) -> float:
    """Mean time from an agent's start to its last answer."""
    assert run.programs is not None
    agents = np.unique(run.programs)
    return statistics.fmean(
        float(run.finished_seconds[run.programs == agent].max()) - agent * START_SECONDS for agent in agents
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("measured", type=Path, help="the CSV file of agents_proof.py")
    parser.add_argument("profile", help="name or file of a profile")
    given = parser.parse_args()
    profile = load_profile(given.profile).model_copy(
        update={"cache_blocks": GPU_BLOCKS, "block_tokens": BLOCK}
    )
    measured: dict[tuple[int, int], dict[str, tuple[float, float]]] = defaultdict(dict)
    with given.measured.open() as file:
        for row in csv.DictReader(file):
            if not row["tier"]:
                key = int(row["seed"]), int(row["agents"])
                measured[key][row["arm"]] = float(row["jct_mean"]), float(row["recomputed"])
    print("seed agents arm: JCT over admit (s), recomputed; the same simulated")
    for (seed, agents), arms in sorted(measured.items()):
        script = Script(seed, agents).trace()
        runs = {arm: played(script, arm, profile, seed) for arm in {*arms, "admit"}}
        found = {arm: job_seconds(run) for arm, run in runs.items()}
        for arm in ARMS:
            if arm not in arms or "admit" not in arms:
                continue
            shown = runs[arm].summary().programs
            assert shown is not None
            print(
                f"{seed} {agents} {arm}: {arms[arm][0] / arms['admit'][0]:.2f} ({arms[arm][0]:.0f}), "
                f"{arms[arm][1]:.1%}; {found[arm] / found['admit']:.2f} ({found[arm]:.0f}), "
                f"{shown.recomputed_share:.1%}"
            )


if __name__ == "__main__":
    main()
