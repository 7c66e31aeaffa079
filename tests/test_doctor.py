"""`lmetric-router doctor` on emulated engines: all verdicts, green and red (real: tests/real)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.config import EngineConfig, PoolSettings
from lmetric.doctor import CHECKS, Examination, Level, Target, Verdict, examine
from lmetric.doctor.subject import Subject
from lmetric.doctor.token_gaps import MIN_GAPS, check_token_gaps
from lmetric.engines.vllm import Vllm
from lmetric.profiles import load_profile
from lmetric.profiles.roofline import as_yaml
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions, EngineServer
from lmetric_lab.emulated.text import CHAT_TEMPLATE_PATH, TOKENIZER_PATH

EVENTS = {"kv_events_endpoint": "tcp://*:0", "kv_events_replay_endpoint": "tcp://*:0"}

EVENTS_RED = ["kv_events", "block_hashes"]
# Without a goal for the time between tokens, there is no check of it.
GOOD = {name: "not offered" if name == "handover" else "pass" for name in CHECKS if name != "token_gaps"}


@contextlib.asynccontextmanager
async def served(options: Iterable[EngineOptions]) -> AsyncIterator[list[str]]:
    """Engines in this process: their URLs. A process for each one takes a second of CPU time."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for each in options:
            engine = EngineServer(each.model_copy(update={"port": 0}))
            urls.append((await stack.enter_async_context(engine)).url)
        yield urls


def outcomes(found: Examination) -> dict[str, str]:
    return {name: str(verdict.outcome) for name, verdict in found.verdicts.items()}


@dataclass
class Case:
    """An engine with options and settings: checks that `exact` lacks, and part of the reason."""

    wanting: list[str]
    says: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def cases(other: Path, busy: str) -> dict[str, Case]:
    """By name. `other` is another model's folder, `busy` an address without a listener."""
    return {
        "good": Case([]),
        "no events": Case(EVENTS_RED, "--kv-events-endpoint", {"kv_events": False}),
        "events unwanted": Case(EVENTS_RED, "off in the configuration", settings={"kv_events": "off"}),
        "other topic": Case(EVENTS_RED, "topic '', not 'other'", settings={"kv_events": {"topic": "other"}}),
        "other port": Case(EVENTS_RED, "no connection to", settings={"kv_events": {"endpoint": busy}}),
        "no events at the configured port": Case(
            EVENTS_RED,
            f"--kv-events-endpoint 'tcp://*:{busy.rpartition(':')[2]}'",
            {"kv_events": False},
            {"kv_events": {"endpoint": busy}},
        ),
        "connects": Case(EVENTS_RED, busy, {"kv_events_endpoint": busy}),
        "block size": Case(["block_hashes"], "16 tokens", settings={"block_size": 32}),
        "untold": Case(["cached_tokens"], "--no-cached-tokens", {"cached_tokens": False}),
        "no metrics": Case(["load", "cancel"], "--no-metrics", {"metrics": False}),
        "stale metrics": Case(["load", "cancel"], "did not show", {"metrics_every_seconds": 60}),
        "no tokenizer": Case(["tokenizer"], "off", settings={"tokenizer": "off"}),
        "other tokenizer": Case(["tokenizer"], str(other), settings={"tokenizer": str(other)}),
        "no tokenize": Case([], options={"tokenize": False}),
        "a stand-in for SGLang": Case([], options={"api": "sglang", "order": "priority"}),
        "fails": Case(list(CHECKS)[1:10], "set to fail", {"fail_status": 500}),
    }


async def test_what_is_wrong_is_red_and_nothing_else(tmp_path: Path, unused_tcp_port: int) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(TOKENIZER_PATH, other)
    template = CHAT_TEMPLATE_PATH.read_text()
    (other / CHAT_TEMPLATE_PATH.name).write_text(template.replace("assistant", "the assistant"))
    all_cases = cases(other, f"tcp://127.0.0.1:{unused_tcp_port}")
    # Each serves a model of its own: engines of one model share an index, and so a block size.
    options = [
        EngineOptions(clock_speed=20, model=name, **EVENTS | case.options) for name, case in all_cases.items()
    ]
    async with served(options) as urls:
        targets = [
            Target(EngineConfig(url=url), None, PoolSettings(**case.settings))
            for url, case in zip(urls, all_cases.values(), strict=True)
        ]
        for (name, case), found in zip(all_cases.items(), await examine(targets), strict=True):
            assert found.wanting(Level.EXACT) == case.wanting, (name, found)
            if case.wanting:
                first = found.verdicts[case.wanting[0]]
                assert case.says in f"{first.seen} {first.remedy}", (name, first)
            else:
                assert outcomes(found) == GOOD
                assert not any(found.wanting(level) for level in Level)


async def test_engines_that_connect_to_us(unused_tcp_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    options = [EngineOptions(kv_events_endpoint=endpoint, kv_events_topic=topic) for topic in ("a@", "b@")]
    async with served(options) as urls:
        settings = PoolSettings(kv_events={"endpoint": endpoint, "bind": True})
        found = await examine([Target(EngineConfig(url=url), None, settings) for url in urls])
    assert [each.wanting(Level.EXACT) for each in found] == [[], []], found


async def test_engines_of_one_model_with_two_block_sizes() -> None:
    options = [EngineOptions(block_tokens=size, clock_speed=20, **EVENTS) for size in (16, 64)]
    async with served(options) as urls:
        found = await examine([Target(EngineConfig(url=url)) for url in urls])
    assert sorted(each.wanting(Level.EXACT) for each in found) == [[], ["block_hashes"]]


async def test_every_data_parallel_rank_is_examined() -> None:
    options = EngineOptions(ranks=3, clock_speed=20, **EVENTS)
    async with EngineServer(options.model_copy(update={"port": 0})) as engine:
        [good] = await examine([Target(EngineConfig(url=engine.url))])
        assert outcomes(good) == GOOD, good
        assert "on each of 3 ranks" in good.verdicts["block_hashes"].seen
        assert good.verdicts["kv_events"].seen.count("tcp://") == 3
        assert "--thorough also tests the queue" in good.verdicts["priority"].seen
        # The second rank's port is not that of the first plus one.
        first = engine.description()["kv_events_endpoint"].replace("*", "127.0.0.1")
        settings = PoolSettings(kv_events={"endpoint": first})
        [bad] = await examine([Target(EngineConfig(url=engine.url), None, settings)])
    assert bad.wanting(Level.EXACT) == ["kv_events"], bad
    assert bad.verdicts["kv_events"].seen.startswith("rank 1: no connection to")


@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_an_entry_for_a_rank_is_examined_alone(api: str) -> None:
    given = {"api": api, "ranks": 2, "clock_speed": 20, "order": "priority", **EVENTS}
    options = EngineOptions.model_validate(given)
    async with EngineServer(options.model_copy(update={"port": 0})) as engine:
        targets = [Target(EngineConfig(url=engine.url, data_parallel_rank=rank)) for rank in (0, 1, 7)]
        first, second, none = await examine(targets)
        endpoints = []
        for found, rank in ((first, 0), (second, 1)):
            assert found.engine.endswith(f"-dp{rank}")
            assert outcomes(found) == GOOD, found
            assert found.verdicts["kv_events"].seen.count("tcp://") == 1
            endpoints.append(found.verdicts["kv_events"].seen.partition("from ")[2])
        assert endpoints[0] != endpoints[1]
        assert none.verdicts["model"].seen == "data_parallel_rank: 7: the engine has the ranks 0, 1"


@pytest.mark.parametrize(
    ("ahead", "outcome", "told"),
    [(0.0, "pass", "behind"), (0.6, "pass", "ahead of"), (5.0, "fail", "ahead of"), (-5.0, "fail", "behind")],
)
async def test_the_clock_is_told_by_events_and_else_by_the_date(
    ahead: float, outcome: str, told: str
) -> None:
    options = [EngineOptions(clock_ahead_seconds=ahead, clock_speed=20, **more) for more in (EVENTS, {})]
    async with served(options) as urls:
        by_events, by_date = await examine([Target(EngineConfig(url=url)) for url in urls])
    assert str(by_events.verdicts["clock"].outcome) == outcome, by_events
    assert "by the times in its KV events" in by_events.verdicts["clock"].seen
    assert told in by_events.verdicts["clock"].seen
    assert str(by_date.verdicts["clock"].outcome) == outcome, by_date
    assert "by its Date" in by_date.verdicts["clock"].seen


async def test_the_order_of_the_queue_is_tried_where_that_is_asked_for() -> None:
    # Steps of 50 ms: five engines in this process keep up with their clocks on a busy machine, too.
    expected = {
        "pass accepted, lower values first, and its queue follows them": {
            "order": "priority",
            "max_sequences": 8,
        },
        "fail accepted, but the queue ignores them: an urgent request overtook 0 of the 12": {
            "max_sequences": 12
        },
        "pass accepted, lower values first; order not tested: 64 concurrent requests caused no queue": {},
        "pass accepted, lower values first; order not tested: refused: The engine is currently busy": {
            "max_sequences": 4,
            "max_queued_requests": 2,
        },
        "pass accepted, higher values first, and its queue follows them": {
            "api": "sglang",
            "order": "priority",
            "max_sequences": 8,
        },
        "not offered its queue ignores priorities": {"api": "sglang"},
    }
    async with served(EngineOptions(clock_speed=0.2, **options) for options in expected.values()) as urls:
        targets = [Target(EngineConfig(url=url)) for url in urls]
        tried = await examine(targets, thorough=True)
    for said, one in zip(expected, tried, strict=True):
        verdict = one.verdicts["priority"]
        assert f"{verdict.outcome} {verdict.seen}".startswith(said), verdict


async def test_times_between_tokens_are_compared_with_the_goal() -> None:
    # Beside the chat, a prompt of 40,000 tokens takes 10 steps of 0.4 to 0.7 s; others take 9 ms.
    async with EmbeddedEngines(2, EngineOptions(clock_speed=4)) as engines, aiohttp.ClientSession() as http:
        used, idle = engines.urls
        chat = {"prompt": "Hi", "max_tokens": 100_000, "stream": True}
        async with http.post(f"{used}/v1/completions", json=chat) as streaming:
            await streaming.content.readline()
            for number in range(3):
                body = {"prompt": [number, *range(500)] * 80, "max_tokens": 1}
                async with http.post(f"{used}/v1/completions", json=body) as response:
                    assert response.status == 200
            gaps = 0
            while gaps < MIN_GAPS:
                gaps += (await streaming.content.readline()).startswith(b"data: {")

        async def verdict(url: str, millis: float, profile: str | None = None) -> Verdict:
            settings = PoolSettings(profile=profile)
            target = Target(EngineConfig(url=url), None, settings, token_seconds=millis / 1e3)
            (found,) = await examine([target])
            assert found.level is Level.APPROXIMATE
            return found.verdicts["token_gaps"]

        late, unknown, good, none = (
            await verdict(used, 100, "independent-sim"),
            await verdict(used, 100),
            await verdict(used, 750),
            await verdict(idle, 100),
        )
    assert (late.outcome, unknown.outcome) == ("fail", "fail")
    assert re.match(
        r"P99 of [\d,]+ gaps since its start: 500 to 750 ms, goal 100 ms; at least [\d.]+% of the gaps are",
        late.seen,
    )
    budgets = re.findall(r"(\d+) beside (\d+) decodes \(prompt tokens/s (-\d+)%\)", late.remedy or "")
    assert [(int(decodes), int(price) < 0) for _, decodes, price in budgets] == [
        (64, True),
        (128, True),
        (256, True),
    ]
    assert "--max-num-batched-tokens" in (late.remedy or "")
    assert f"lmetric-router calibrate {used} --max-sequences N --out" in (unknown.remedy or "")
    assert (good.outcome, none.outcome) == ("pass", "not offered")
    assert "0 gaps since its start" in none.seen


@pytest.mark.parametrize(
    ("counts", "millis", "outcome", "says"),
    [
        ({}, 60, "not offered", "has no vllm:inter_token_latency_seconds"),
        ({"0.05": 1000}, 60, "not offered", "has no vllm:inter_token_latency_seconds"),
        ({"0.05": 99, "+Inf": 99}, 60, "not offered", "99 gaps since its start; the 99th percentile needs"),
        ({"0.05": 990, "0.075": 1000, "+Inf": 1000}, 50, "pass", "up to 50 ms"),
        ({"0.05": 989, "0.075": 1000, "+Inf": 1000}, 50, "fail", "50 to 75 ms"),
        ({"0.05": 989, "0.075": 1000, "+Inf": 1000}, 60, "not offered", "do not tell"),
        ({"0.05": 989, "0.075": 1000, "+Inf": 1000}, 75, "pass", "50 to 75 ms"),
        ({"0.05": 989, "0.075": 989, "+Inf": 1000}, 60, "fail", "over 75 ms"),
        ({"0.05": 989, "0.075": 989, "+Inf": 1000}, 5000, "not offered", "do not tell"),
        ({"0.05": 989, "+Inf": 1000}, 10, "fail", "at least 1.1% of the gaps are longer"),
    ],
)
def test_a_histogram_tells_as_much_as_its_buckets(
    counts: dict[str, int], millis: float, outcome: str, says: str
) -> None:
    name = "vllm:inter_token_latency_seconds_bucket"
    # Two models, whose gaps count together.
    page = "".join(
        f'{name}{{engine="0",le="{bound}",model_name="{model}"}} {part}\n'
        for bound, count in counts.items()
        for model, part in (("a", count // 2), ("b", count - count // 2))
    )
    settings = PoolSettings(profile="independent-sim")
    target = Target(EngineConfig(url="http://127.0.0.1:9"), None, settings, millis / 1e3)
    subject = Subject(target, client=None, adapter=Vllm())  # type: ignore[arg-type]
    check_token_gaps(subject, page.encode())
    verdict = subject.verdicts["token_gaps"]
    assert (verdict.outcome, says in verdict.seen) == (outcome, True), verdict


@pytest.mark.parametrize(
    ("millis", "max_sequences", "says"),
    [
        (100, 256, "--max-num-batched-tokens"),
        (
            1000,
            256,
            "by independent-sim.yaml, all steps hold the goal with 4096 tokens: look for preemptions",
        ),
        (1, 256, "no --max-num-batched-tokens holds it beside 256 decodes: lower --max-num-seqs"),
        (600, 3600, "no --max-num-batched-tokens holds it beside 3600 decodes: lower --max-num-seqs"),
    ],
)
def test_advice_has_an_effect(millis: float, max_sequences: int, says: str, tmp_path: Path) -> None:
    """The advice was the profile's own budget, if all steps hold the goal with it."""
    profile = load_profile("independent-sim").model_copy(update={"max_sequences": max_sequences})
    file = tmp_path / "independent-sim.yaml"
    file.write_text(as_yaml(profile))
    page = f'vllm:inter_token_latency_seconds_bucket{{le="{millis / 1e3}"}} 1\n'
    page += 'vllm:inter_token_latency_seconds_bucket{le="+Inf"} 1000\n'
    settings = PoolSettings(profile=str(file))
    target = Target(EngineConfig(url="http://127.0.0.1:9"), None, settings, millis / 1e3)
    subject = Subject(target, client=None, adapter=Vllm())  # type: ignore[arg-type]
    check_token_gaps(subject, page.encode())
    verdict = subject.verdicts["token_gaps"]
    assert verdict.outcome == "fail"
    assert (verdict.remedy or "").replace(f"{tmp_path}/", "").startswith(says), verdict


async def test_two_engines_that_hand_over() -> None:
    pairs = [
        EngineOptions(clock_speed=20, model=model, kv_connector="nixl", role=role)
        for model, role in (("a", "prefill"), ("a", "decode"), ("b", "both"), ("c", "both"))
    ]
    halves = [EngineOptions(clock_speed=20, model="d", api="sglang", role=r) for r in ("prefill", "decode")]
    bare = EngineOptions(clock_speed=20, model="e")
    async with served([*pairs, *halves, bare]) as urls:
        configs = [EngineConfig(url=url) for url in urls[:-1]]
        configs.append(EngineConfig(url=urls[-1], role="decode"))
        found = await examine([Target(config) for config in configs])
    verdicts = [each.verdicts["handover"] for each in found]
    outcomes = ["pass", "pass", "not offered", "not offered", "pass", "pass", "fail"]
    assert [verdict.outcome for verdict in verdicts] == outcomes, verdicts
    assert "the answer equals the answer of one engine" in verdicts[0].seen
    assert "no second engine is given" in verdicts[2].seen
    assert "--kv-connector nixl" in str(verdicts[-1].remedy)
    assert "handover" in found[-1].wanting(Level.LOAD)
    assert "handover" not in found[2].wanting(Level.LOAD)


async def test_both_ways_with_a_policy_that_never_answers() -> None:
    both = {"kv_connector": "nixl", "kv_bidirectional": True, "clock_speed": 20.0}
    expected = {"fail": "pass", "recompute": "fail"}
    for policy, outcome in expected.items():
        options = [EngineOptions(**both, kv_load_failure_policy=policy)] * 2
        async with served(options) as urls:
            found = await examine([Target(EngineConfig(url=url)) for url in urls])
        for each in found:
            verdict = each.verdicts["handover"]
            assert verdict.outcome == outcome, verdict
            if outcome == "fail":
                assert "never answered" in verdict.seen
                assert '"fail"' in str(verdict.remedy)


async def test_one_that_hands_over_something_else() -> None:
    """Fetched too late, nothing tells but the text."""
    options = [
        EngineOptions(clock_speed=20, kv_connector="nixl", role=role, **late)
        for role, late in (("prefill", {"kv_lease_seconds": 1e-6}), ("decode", {}))
    ]
    async with served(options) as urls:
        found = await examine([Target(EngineConfig(url=url)) for url in urls])
    for each in found:
        verdict = each.verdicts["handover"]
        assert (verdict.outcome, "differs from the answer of one engine" in verdict.seen) == ("fail", True)


@pytest.fixture
def dead() -> Iterator[str]:
    """Where nobody listens, and nobody will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_the_command(dead: str, tmp_path: Path) -> None:
    app = build(["doctor"])
    shown = CliRunner().invoke(app, ["doctor", dead])
    assert shown.exit_code == 1
    assert "FAIL reachable: no connection: Connect" in shown.output
    said = CliRunner().invoke(app, ["doctor", "--json", "--require", "load", dead])
    assert said.exit_code == 1
    found = json.loads(said.stdout)
    assert (found["require"], found["good"]) == ("load", False)
    assert found["engines"][0]["good_for"] is None
    file = tmp_path / "router.yaml"
    file.write_text(yaml.safe_dump({"engines": [{"url": dead, "name": "first"}]}))
    named = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert named.exit_code == 1
    assert "first" in named.stdout


async def test_an_engine_that_hangs_is_not_one_that_does_not_run(dead: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # the system accepts, and nobody answers
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        hangs, gone = await examine([Target(EngineConfig(url=each)) for each in (url, dead)])
    verdict = hangs.verdicts["reachable"]
    assert verdict.seen == "GET /health: no answer within 5 s, but it accepts connections: it hangs"
    assert verdict.remedy == "restart the engine, after a look at its log"
    assert gone.verdicts["reachable"].remedy == f"start the engine, or correct the URL {dead}"


@pytest.mark.parametrize("columns", [None, "80", "60", "200"])
def test_the_table_fits_the_width_that_there_is(dead: str, columns: str | None) -> None:
    """UX C2: at 80 columns, headings had one letter a line and addresses were broken. Piped, the
    table was 152 columns wide and ignored COLUMNS."""
    addresses = [f"127.0.0.{number}:{dead.rpartition(':')[2]}" for number in range(1, 8)]
    urls = [f"http://{address}" for address in addresses]
    done = CliRunner().invoke(build(["doctor"]), ["doctor", *urls], env={"COLUMNS": columns})
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    table = lines[: lines.index(addresses[0])]  # then come the verdicts, engine by engine
    assert max(map(len, table)) <= int(columns or 80)
    for name in (*CHECKS, "good for"):
        assert any(line.strip().startswith(name) for line in table), name
    headings = [line for line in table if line.split()[:1] == ["check"]]
    assert [each for line in headings for each in line.split()[1:]] == addresses
    assert len(headings) == {None: 3, "80": 3, "60": 4, "200": 1}[columns]
    assert sum(line.split()[:2] == ["reachable", "FAIL"] for line in table) == len(headings)


async def test_the_exit_code_is_explained(dead: str) -> None:
    """UX C10: `doctor` exited with 1, with all checks green, without naming `exact` as required."""

    first: list[str] = []
    whole: list[str] = []

    def shown(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(build(["doctor"]), ["doctor", *arguments], env={"COLUMNS": "200"})
        first[:] = done.stdout.splitlines()[:4]
        whole[:] = [done.stdout]
        return done.exit_code, done.stderr

    host = dead.removeprefix("http://")
    options = [EngineOptions(clock_speed=20, kv_events=False)] * 2
    async with served(options) as urls:
        await asyncio.to_thread(shown, urls[0], "--verbose")
        assert "--kv-connector" in whole[0]
        code, said = await asyncio.to_thread(shown, *urls, dead)
        assert "--kv-connector" not in whole[0]  # no engine has a role, so nobody asked for one
        names = ", ".join(url.removeprefix("http://") for url in urls)
        assert code == 1
        # The report leads with what works now.
        assert first[0] == f"usable now: approximate ({names})"
        assert first[1].startswith("  for exact: add --kv-events-endpoint 'tcp://*:5557'")
        assert first[2] == f"not usable ({host})"
        assert first[3].startswith("  cause: reachable: no connection: Connect")
        missing = "exact required, missing: kv_events, block_hashes (or pass --require approximate)"
        assert f"\n{names}: good for approximate; {missing}\n" in said
        assert f"\n{host}: good for nothing; exact required, missing: reachable, model, role," in said
        assert said.count("--require") == 1
        code, said = await asyncio.to_thread(shown, urls[0], "--require", "approximate")
        assert (code, "required" in said) == (0, False)
