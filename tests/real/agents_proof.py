"""Agent programs on two real vLLM engines with small caches: each arm plays the same seeded agents.

    TEST_VLLM_VENV=/tmp/vllm python tests/real/agents_proof.py OUT.csv --agents 6 9 --seeds 1

Agents share a system prompt and begin with 1,200 tokens of their own. Each further turn adds about
200 tokens to the context, waits for a short answer and then for a tool. A third of the agents fork
once: a subagent continues the whole context, and its parent waits. Requests have no headers, except
that some arms learn the ends. Each row of the file is one run; a second call plays only the runs
that the file does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))  # test_server_process

from router_world import served
from test_server_process import RUN_TUNED
from vllm_process import BLOCK, MODEL, VllmEngine, cpu_tier, environment, kv_bytes, model

SIZE = (8, 512)  # layers and hidden size: a cold context costs over ten warm turns
SYSTEM_TOKENS, FIRST_TOKENS, TURNS, NEW_TOKENS, ANSWER_TOKENS = 512, 1200, 12, 200, 6
END_TOKENS = FIRST_TOKENS + (TURNS - 1) * NEW_TOKENS + TURNS * ANSWER_TOKENS  # without the system prompt
SLEEP_MEDIAN, SLEEP_SIGMA = 0.5, 1.4  # log-normal, seconds
START_SECONDS = 0.5  # between the starts of two agents
# A cache holds three agents at their end. The pressure at the end is the number of agents over six;
# the mean context is about 70% of the last one.
GPU_BLOCKS = (SYSTEM_TOKENS + 3 * END_TOKENS) // BLOCK + 3
ENGINE: dict[str, Any] = {"num_gpu_blocks_override": GPU_BLOCKS, "max_model_len": 6144}
TIER = cpu_tier(2 * GPU_BLOCKS * BLOCK * kv_bytes(*SIZE))  # twice the engine's cache
SETTINGS = "min_tokens=256,max_hold_seconds=3600"


@dataclass(frozen=True)
class Arm:
    """A policy: the router's flags, whether requests name their session, and whether the last
    request of an agent says so."""

    flags: Sequence[str]
    sessions: bool = False
    final: bool = False


def programs(kind: str, settings: str = SETTINGS, policy: str = "lmetric") -> list[str]:
    """Flags of a policy with a kind of admission."""
    return ["--policy", policy, "--programs", kind, "--programs-settings", settings]


def unheld(policy: str) -> list[str]:
    """Flags of a policy without admission."""
    return ["--policy", policy, "--programs", "none"]


ARMS = {
    "default": Arm(programs("auto", policy="total_delay")),
    "lmetric": Arm(unheld("lmetric")),
    "llmd_scorers": Arm(unheld("llmd_scorers")),
    "linear": Arm(unheld("linear")),
    "round_robin": Arm(unheld("round_robin")),
    "sticky": Arm(unheld("session_affinity"), sessions=True),
    "admit": Arm(programs("admit")),
    "admit, ends reported": Arm(programs("admit"), final=True),
}


@dataclass(frozen=True)
class Turn:
    """New prompt tokens, length of the answer, and seconds until the turn begins."""

    tokens: tuple[int, ...]
    answer: int
    sleep: float
    last: bool  # the answer ends by a stop string; other answers end at max_tokens


@dataclass(frozen=True)
class Agent:
    """A scripted agent. After turn `fork`, a subagent continues its context."""

    turns: tuple[Turn, ...]
    fork: int | None
    subagent: tuple[Turn, ...]


def scripted(seed: int, number: int) -> Agent:
    """Agent `number` of a seed."""
    rng = random.Random(f"{seed} {number}")

    def turns(count: int, first: int = NEW_TOKENS) -> tuple[Turn, ...]:
        return tuple(
            Turn(
                tuple(rng.randrange(5, 2000) for _ in range(rng.randint(tokens - 40, tokens + 40))),
                rng.randint(ANSWER_TOKENS - 3, ANSWER_TOKENS + 3),
                SLEEP_MEDIAN * rng.lognormvariate(0, SLEEP_SIGMA),
                turn == count - 1,
            )
            for turn, tokens in enumerate([first] + [NEW_TOKENS] * (count - 1))
        )

    mine = turns(TURNS, FIRST_TOKENS)
    return Agent(mine, rng.randrange(3, TURNS - 2) if number % 3 == 2 else None, turns(2))


@dataclass
class Answer:
    """A request with its answer."""

    prompt: list[int]
    tokens: list[int]
    cached: int
    text: str


@dataclass
class Play:
    """Agents that play against a server."""

    session: aiohttp.ClientSession
    url: str
    names_sessions: bool = False
    tells_ends: bool = False
    pauses: bool = True
    answers: dict[str, Answer] = field(default_factory=dict)  # by agent and turn
    seconds: dict[int, float] = field(default_factory=dict)  # job completion time by agent
    needed: list[tuple[float, int]] = field(default_factory=list)  # time, change of the live contexts

    async def ask(self, name: str, context: list[int], turn: Turn) -> list[int]:
        """Plays a turn; returns the context after it."""
        if self.pauses:
            await asyncio.sleep(turn.sleep)
        prompt = [*context, *turn.tokens]
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True}
        body |= {"max_tokens": turn.answer, "return_token_ids": True}
        if turn.last:  # the first letter behind the least tokens ends it
            body |= {"max_tokens": turn.answer + 16, "min_tokens": turn.answer, "stop": list("eai ")}
        if self.names_sessions:
            body["session_id"] = name.partition(":")[0].partition("+")[0]
        headers = {"x-session-final": "true"} if self.tells_ends and turn.last else {}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            told = await response.json()
            assert response.status == 200, told
        (choice,) = told["choices"]
        cached = (told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        self.answers[name] = Answer(prompt, choice["token_ids"], cached, choice["text"])
        return [*prompt, *choice["token_ids"]]

    async def agent(self, number: int, agent: Agent) -> None:
        """Plays an agent with its subagent."""
        started = time.monotonic()
        context = system_prompt()
        for index, turn in enumerate(agent.turns):
            self.needed.append((time.monotonic(), len(turn.tokens)))
            context = await self.ask(f"{number}:{index:02}", context, turn)
            if index == agent.fork:
                child = context
                for step, each in enumerate(agent.subagent):
                    child = await self.ask(f"{number}+:{index:02}.{step}", child, each)
        self.seconds[number] = time.monotonic() - started
        self.needed.append((time.monotonic(), -sum(len(turn.tokens) for turn in agent.turns)))

    def pressure(self, engines: int) -> tuple[float, float]:
        """Mean and maximum of the tokens that live agents need, over those of all caches. Answers
        and subagents are not counted."""
        events = sorted(self.needed)
        live, area, most = SYSTEM_TOKENS * engines, 0.0, 0
        for (begin, change), (end, _) in itertools.pairwise(events):
            live += change
            most = max(most, live)
            area += live * (end - begin)
        capacity = engines * GPU_BLOCKS * BLOCK
        return area / (events[-1][0] - events[0][0]) / capacity, most / capacity


def system_prompt() -> list[int]:
    """The tokens that all agents begin with."""
    rng = random.Random("system")
    return [rng.randrange(5, 2000) for _ in range(SYSTEM_TOKENS)]


def fewest(answers: Iterable[Answer]) -> list[tuple[int, int]]:
    """Prompt tokens, and those of them that a cache without an end finds, by request."""
    seen: set[int] = set()
    counted = []
    for answer in answers:
        chain, value = [], 0
        tokens = [*answer.prompt, *answer.tokens[:-1]]  # the last token's KV is not computed
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            value = hash((value, *tokens[end - BLOCK : end]))
            chain.append(value)
        most = (len(answer.prompt) - 1) // BLOCK
        found = next((n for n in range(most) if chain[n] not in seen), most)
        seen.update(chain)
        counted.append((len(answer.prompt), found * BLOCK))
    return counted


@dataclass
class Row:
    """The figures of a run."""

    tier: str
    seed: int
    agents: int
    arm: str
    pressure: float  # mean over the run
    max_pressure: float
    jct_mean: float
    jct_p95: float
    recomputed: float  # share of the prompt tokens that a cache without an end would have found
    returns: int  # requests whose context such a cache knows, beyond the system prompt
    cold: int  # returns that found less than half of it
    prompt_tokens: int
    cached_tokens: int
    found_tokens: int  # by a cache without an end
    computed_tokens: int  # as the engines count them
    preemptions: int
    held: int
    longest_hold: float
    different: int  # answers that differ from one engine alone
    seconds: float


async def counters(session: aiohttp.ClientSession, engines: Sequence[VllmEngine]) -> tuple[int, int]:
    """Prompt tokens computed, and preemptions, of all engines since they began."""
    computed = preempted = 0.0
    for engine in engines:
        async with session.get(f"{engine.url}/metrics") as response:
            for line in (await response.text()).splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith("vllm:prompt_tokens_by_source_total") and '"local_compute"' in name:
                    computed += float(value)
                elif name.startswith("vllm:num_preemptions_total"):
                    preempted += float(value)
    return round(computed), round(preempted)


async def emptied(session: aiohttp.ClientSession, engines: Sequence[VllmEngine]) -> None:
    """Empties the caches of idle engines."""
    for engine in engines:
        async with session.post(f"{engine.url}/reset_prefix_cache?reset_external=true") as response:
            assert response.status == 200, await response.text()


async def alone(engine: VllmEngine, seed: int, agents: int) -> dict[str, list[int]]:
    """The answers of one engine that plays one agent after the other, without a router."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        play = Play(session, engine.url, pauses=False)
        for number in range(agents):
            await play.agent(number, scripted(seed, number))
    return {name: answer.tokens for name, answer in play.answers.items()}


async def run(
    engines: Sequence[VllmEngine],
    arm: str,
    seed: int,
    agents: int,
    right: dict[str, list[int]],
    tier: str = "",
) -> Row:
    """Plays agents against one arm, from empty caches."""
    chosen = ARMS[arm]
    async with aiohttp.ClientSession() as session:
        await emptied(session, engines)
        before = await counters(session, engines)
        block = f"block_size={BLOCK}"
        async with served(engines, "--experimental", "--set", block, *chosen.flags, run=RUN_TUNED) as world:

            async def exact() -> bool:
                known = (await world.engines()).values()
                return all(each["healthy"] and each["mode"] == "exact" for each in known)

            await world.until(exact, seconds=60)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(timeout=timeout) as client:
                play = Play(client, world.url, chosen.sessions, chosen.final)

                async def later(number: int) -> None:
                    await asyncio.sleep(number * START_SECONDS)
                    await play.agent(number, scripted(seed, number))

                started = time.monotonic()
                await asyncio.gather(*(later(number) for number in range(agents)))
                seconds = time.monotonic() - started
            (told,) = (await world.page("/debug/programs")).values()
        after = await counters(session, engines)
    asked = [play.answers[name] for name in sorted(play.answers)]
    counted = fewest(asked)
    prompt, found = sum(tokens for tokens, _ in counted), sum(known for _, known in counted)
    returns = [
        (answer.cached, known)
        for answer, (_, known) in zip(asked, counted, strict=True)
        if known > SYSTEM_TOKENS
    ]
    times = sorted(play.seconds.values())
    pressure, max_pressure = play.pressure(len(engines))
    return Row(
        tier=tier,
        seed=seed,
        agents=agents,
        arm=arm,
        pressure=round(pressure, 3),
        max_pressure=round(max_pressure, 3),
        jct_mean=round(statistics.fmean(times), 2),
        jct_p95=round(statistics.quantiles(times, n=20, method="inclusive")[-1], 2),
        recomputed=round((found - sum(answer.cached for answer in asked)) / prompt, 4),
        returns=len(returns),
        cold=sum(cached < known / 2 for cached, known in returns),
        prompt_tokens=prompt,
        cached_tokens=sum(answer.cached for answer in asked),
        found_tokens=found,
        computed_tokens=after[0] - before[0],
        preemptions=after[1] - before[1],
        held=told["held"] if told else 0,
        longest_hold=round(told["longest_hold_seconds"], 2) if told else 0.0,
        different=sum(play.answers[name].tokens != right[name] for name in play.answers),
        seconds=round(seconds, 1),
    )


async def costs(engine: VllmEngine) -> tuple[float, float]:
    """Seconds of a cold prompt of an agent's last turn, and of the turn behind it, warm."""
    rng = random.Random("costs")
    turns = [Turn(tuple(rng.randrange(5, 2000) for _ in range(count)), ANSWER_TOKENS, 0.0, False)
             for count in (END_TOKENS, NEW_TOKENS)]  # fmt: skip
    async with aiohttp.ClientSession() as session:
        play, taken, context = Play(session, engine.url), [], system_prompt()
        for name, turn in zip(("cold", "warm"), turns, strict=True):
            began = time.monotonic()
            context = await play.ask(name, context, turn)
            taken.append(time.monotonic() - began)
        await emptied(session, [engine])
    return taken[0], taken[1]


def main() -> None:
    """Plays the runs that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="CSV file with one row per run; rows are added")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--agents", nargs="+", type=int, default=[4, 6, 9, 12])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--tier", action="store_true", help="engines with a CPU tier")
    given = parser.parse_args()
    tier = "cpu" if given.tier else ""
    names = [each.name for each in fields(Row)]
    done = set()
    if given.out.exists():
        with given.out.open() as file:
            done = {(r["tier"], int(r["seed"]), int(r["agents"]), r["arm"]) for r in csv.DictReader(file)}
    else:
        given.out.write_text(",".join(names) + "\n")
    venv = environment()
    flags = ENGINE | (TIER if given.tier else {})
    environ = flags.pop("environ", {})
    with tempfile.TemporaryDirectory() as folder:
        engines = [VllmEngine(venv, model(venv, *SIZE), Path(folder), dict(flags), environ) for _ in range(2)]
        try:
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.wait()
            cold, warm = asyncio.run(costs(engines[0]))
            print(f"cold {cold:.2f} s, warm {warm:.2f} s: {cold / warm:.1f}x", flush=True)
            for seed in given.seeds:
                right = reference(given.out, engines[0], seed, max(given.agents))
                for agents in given.agents:
                    # A random order, so that a slow hour of the machine meets no arm alone.
                    for arm in random.Random(f"{seed} {agents}").sample(given.arms, len(given.arms)):
                        if (tier, seed, agents, arm) in done:
                            continue
                        row = asdict(asyncio.run(run(engines, arm, seed, agents, right, tier)))
                        with given.out.open("a", newline="") as file:
                            csv.DictWriter(file, names).writerow(row)
                        print(row, flush=True)
        finally:
            for engine in engines:
                engine.stop()


def reference(out: Path, engine: VllmEngine, seed: int, agents: int) -> dict[str, list[int]]:
    """The right answers of a seed, kept beside the CSV file."""
    file = out.with_name(f"{out.stem}-answers-{seed}-{agents}.json")
    if not file.exists():
        file.write_text(json.dumps(asyncio.run(alone(engine, seed, agents))))
    kept: dict[str, list[int]] = json.loads(file.read_text())
    return kept


if __name__ == "__main__":
    main()
