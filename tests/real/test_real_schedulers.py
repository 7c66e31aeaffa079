"""vLLM engines with the schedulers of lmetric-vllm: same answers, bounded steps, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import pytest

from lmetric.profiles.budget import budgets
from lmetric_lab.calibrate import Calibrator
from router_world import served
from split_world import COMPLETIONS, equal
from test_real_lora import ADAPTERS, RANK, write_adapter
from test_real_pd import fetched, outcomes
from test_real_router import until_exact
from test_real_split import SHAPES, asked, cutting, request
from vllm_process import BIDIRECTIONAL, ENVIRONMENT, MODEL, VllmEngine, environment, model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
ENVIRON = {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'integrations' / 'vllm'}"}
Start = Callable[..., list[VllmEngine]]
# Few slots and little memory: requests wait, and running ones go back.
CROWDED: dict[str, Any] = {
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 100,
    "max_model_len": 3072,
    "scheduling_policy": "fcfs",
    "kv_events_config": None,
}
SLO: dict[str, Any] = {
    "scheduler_cls": "lmetric_vllm.SloScheduler",
    "additional_config": {"lmetric": {"token_slo_ms": 20}},
}
BOOST: dict[str, Any] = {
    "scheduler_cls": "lmetric_vllm.UniBoostScheduler",
    "additional_config": {"lmetric": {"bin_tokens": 32, "hysteresis_seconds": 0.01}},
}
COLOR = {"structured_outputs": {"choice": ["red", "green", "blue"]}}


def requests(count: int) -> list[dict[str, Any]]:
    """Short and long prompts, some with a common prefix, some bound to a grammar."""
    rng = random.Random(5)
    shared = " ".join(f"w{rng.randrange(500)}" for _ in range(120))
    bodies = []
    for number in range(count):
        words = rng.choice([5, 20, 60, 300])
        prompt = (shared if number % 3 == 0 else "") + " ".join(
            f"v{rng.randrange(500)}" for _ in range(words)
        )
        body = {"prompt": prompt, "max_tokens": rng.choice([4, 30, 90]), "ignore_eos": True}
        if number % 10 == 0:
            body = {"prompt": prompt, "max_tokens": 8} | COLOR
        if number % 7 == 0:
            body["vllm_xargs"] = {"token_slo_ms": 5}
        bodies.append(body)
    return bodies


async def answers(engine: VllmEngine, bodies: list[dict[str, Any]]) -> list[str]:
    """The greedy answers, all requests at once."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def one(body: dict[str, Any]) -> str:
            whole = {"model": MODEL, "temperature": 0, **body}
            async with session.post(f"{engine.url}/v1/completions", json=whole) as answer:
                found = await answer.json()
                assert answer.status == 200, found
                return str(found["choices"][0]["text"])

        return await asyncio.gather(*map(one, bodies))


async def preemptions(engine: VllmEngine) -> float:
    """Requests that the engine took back since its start."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as page:
        lines = (await page.text()).splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_preemptions_total")]
    return sum(found)


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "lora"])
async def test_answers_are_those_of_vllm(vllm_engines: Start, tmp_path: Path, adapted: bool) -> None:
    bodies, lora = requests(300), {}
    if adapted:
        # No requests of the base model: on CPU, vLLM applies an adapter to those in the same step
        # (vllm-project/vllm#48421).
        lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": RANK}
        base = model(environment())
        folders = {name: write_adapter(tmp_path / name, base, seed) for name, seed in ADAPTERS.items()}
        lora["lora_modules"] = [f"{name}={folder}" for name, folder in folders.items()]
        bodies = [body | {"model": list(ADAPTERS)[n // 3 % 2]} for n, body in enumerate(bodies)]
    (stock,) = vllm_engines(**CROWDED, **lora)
    expected = await answers(stock, bodies)
    for flags in (SLO, BOOST):
        (engine,) = vllm_engines(environ=ENVIRON, **CROWDED, **lora, **flags)
        got = await answers(engine, bodies)
        differ = [number for number, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
        assert not differ, f"{flags['scheduler_cls']}: answers {differ[:10]} differ"
        if flags is BOOST:
            assert await preemptions(engine) > 0, "no request went back: the test compares nothing"


@pytest.mark.parametrize("flags", [SLO, BOOST], ids=["slo", "uniboost"])
async def test_answers_whose_kv_comes_from_another_engine(
    vllm_engines: Start, tmp_path: Path, flags: dict[str, Any]
) -> None:
    """Requests are cut inside the prompt, at its end, or inside the answer, more at once than have
    slots. Both engines have the scheduler."""
    # Blocks for all: first segments keep theirs until they are fetched.
    crowded = CROWDED | {"kv_transfer_config": BIDIRECTIONAL, "num_gpu_blocks_override": 512}
    engines = vllm_engines(2, environ=ENVIRON, **crowded, **flags)
    bodies = [request(COMPLETIONS, *shape, return_token_ids=True) for shape in SHAPES * 5]
    transferred = 0.0
    for fraction in (0.3, 0.8):
        split = {"kind": "force", "fraction": fraction}
        async with cutting(engines, tmp_path, split=split) as world:
            got = await asyncio.gather(*(asked(world, COMPLETIONS, body) for body in bodies))
            for body, said in zip(bodies, got, strict=True):
                equal(said, await asked(world, COMPLETIONS, body, engines[0].url))
            found = await outcomes(world)
            assert set(found) <= {"transferred"}, found
            transferred += found["transferred"]
        bodies = [body | {"cache_salt": "again"} for body in bodies]
    assert transferred > len(bodies)
    assert await fetched(engines) > 0


async def test_long_prompts_wait_for_decodes(vllm_engines: Start) -> None:
    """Long prompts beside a chat: the longest gap of the chat's stream with the scheduler is less
    than half of vLLM's own. The time between tokens depends on the machine: it is the geometric
    mean of a decode step and vLLM's gap."""
    # The larger model computes a prompt of 4,000 tokens in more than the time of 100 decode steps.
    flags: dict[str, Any] = {
        "model": model(environment(), 8, 512),
        "max_num_batched_tokens": 4096,
        "scheduling_policy": "fcfs",
        "kv_events_config": None,
    }
    (engine,) = vllm_engines(**flags)
    decode = min([fmean(await gaps(engine, prompts=0)) for _ in range(3)])
    stock = await longest_gap(engine)
    assert stock > 16 * decode, "the prompts are too short: the test compares nothing"
    slo_ms = (decode * stock) ** 0.5 * 1e3
    slo = SLO | {"additional_config": {"lmetric": {"token_slo_ms": slo_ms}}}
    (engine,) = vllm_engines(environ=ENVIRON, **flags, **slo)
    longest = await longest_gap(engine)
    assert longest < stock / 2, f"decode {decode:g}, stock {stock:g}, SLO {slo_ms / 1e3:g}, got {longest:g} s"


async def test_the_recommended_budget_shortens_gaps(vllm_engines: Start) -> None:
    """The same without another scheduler, with the budget that `calibrate` recommends."""
    flags: dict[str, Any] = {
        "model": model(environment(), 8, 512),
        "max_num_seqs": 8,
        "scheduling_policy": "fcfs",
        "kv_events_config": None,
    }
    (engine,) = vllm_engines(**flags, max_num_batched_tokens=4096)
    async with Calibrator(engine.url, budget_tokens=60_000, max_batch=8) as calibrator:
        profile = (await calibrator.run()).profile
    assert (profile.max_sequences, profile.max_batch_tokens) == (8, 4096)
    decode = min([fmean(await gaps(engine, prompts=0)) for _ in range(3)])
    stock = await longest_gap(engine)
    assert stock > 16 * decode, "the prompts are too short: the test compares nothing"
    budget = next(budgets(profile, (decode * stock) ** 0.5))  # for two decodes
    assert budget.batch_tokens is not None
    assert 8 < budget.batch_tokens < 2048
    (engine,) = vllm_engines(**flags, max_num_batched_tokens=budget.batch_tokens)
    longest = await longest_gap(engine)
    assert longest < stock / 2, f"decode {decode:g}, stock {stock:g}, {budget}, got {longest:g} s"


async def longest_gap(engine: VllmEngine) -> float:
    """Longest time between two tokens of a stream beside long prompts, in seconds: the lowest of
    three streams. A stream before them fills the scheduler's table."""
    return min([max(await gaps(engine, prompts=3)) for _ in range(4)][1:])


async def gaps(engine: VllmEngine, *, prompts: int) -> list[float]:
    """Seconds between the tokens of a stream, while this number of long prompts arrives."""
    found: list[float] = []
    begun = asyncio.Event()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def chat() -> None:
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
            last = 0.0
            async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        if last:
                            found.append(now - last)
                            begun.set()
                        last = now

        async def prompt() -> None:
            await begun.wait()
            tokens = [random.randrange(100, 1000) for _ in range(4000)]
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
            async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

        await asyncio.gather(chat(), *(prompt() for _ in range(prompts)))
    return found


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """Plans of the schedulers in `scheduler_steps.py`, by case."""
    command = [environment() / "bin" / "python", ROOT / "tests" / "real" / "scheduler_steps.py"]
    environ = os.environ | ENVIRONMENT | ENVIRON
    done = subprocess.run(
        [*command, model(environment())], env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", ["remote", "remote, asynchronous"])
def test_a_request_replaces_another_when_its_kv_has_arrived(planned: dict[str, Any], case: str) -> None:
    """Not when vLLM would only fetch its KV, for which it needs no slot."""
    assert planned[case] == {
        "full": {"planned": ["first"], "back": 0},
        "fetching": {"planned": ["second"], "back": 0},
        "arrived": {"planned": ["remote"], "back": 1},
        "tokens": {"remote": 200, "second": 200},
    }


def test_requests_whose_kv_has_arrived_are_admitted_by_rank(planned: dict[str, Any]) -> None:
    assert planned["order"] == {
        "fetching": {"planned": [], "back": 0},
        "arrived": {"planned": ["leads"], "back": 0},
    }


def test_a_fetch_gets_the_memory_that_a_prompt_leaves(planned: dict[str, Any]) -> None:
    """The blocks of the prompt's last step are not counted twice."""
    assert planned["fetch"] == [
        {"planned": ["prompt"], "back": 1, "fetches": True},
        {"planned": ["first", "prompt"], "back": 0, "fetches": True},
    ]


def test_requests_are_tried_again_when_blocks_are_free(planned: dict[str, Any]) -> None:
    """No running request came, ended, or changed its rank meanwhile."""
    assert planned["sending"] == {
        "full": {"planned": ["first"], "back": 0},
        "sent": {"planned": ["leads"], "back": 1},
    }


def test_the_kept_order_is_that_of_sorting_all_in_each_step(planned: dict[str, Any]) -> None:
    for case, found in planned["kept"].items():
        assert found["kept"] > found["steps"] / 2, f"{case}: {found}: the order is not kept"
        assert found["back"] > 10, f"{case}: {found}: too few go back"
        assert found["differ"] == 0, case


def test_no_request_goes_back_during_a_pause(planned: dict[str, Any]) -> None:
    assert planned["paused"] == {
        "paused": {"planned": ["first"], "back": 0},
        "resumed": {"planned": ["leads"], "back": 1},
    }


def test_no_request_goes_back_for_an_adapter_that_cannot_be_loaded(planned: dict[str, Any]) -> None:
    found = planned["adapters"]
    assert found["other"] == {"planned": ["first", "second"], "back": 0}
    assert found["loaded"]["back"] == 1
    assert "loaded" in found["loaded"]["planned"]


def test_a_request_replaces_another_when_its_grammar_is_ready(planned: dict[str, Any]) -> None:
    assert planned["grammar"] == {
        "compiling": {"planned": ["first"], "back": 0},
        "ready": {"planned": ["leads"], "back": 1},
    }


def test_a_request_replaces_another_in_the_step_in_which_its_work_doubles(planned: dict[str, Any]) -> None:
    """Between such steps, the scheduler keeps the order of the requests."""
    waits = planned["waits"]
    assert waits["steps"] == waits["due"] > 16


def test_two_requests_replace_two_in_a_step(planned: dict[str, Any]) -> None:
    assert planned["two"] == {"planned": ["fourth", "third"], "back": 2}


def test_a_request_replaces_two_whose_memory_it_needs(planned: dict[str, Any]) -> None:
    assert planned["large"] == {"planned": ["leads"], "back": 2}


def test_no_request_goes_back_for_blocks_that_a_request_before_it_takes(planned: dict[str, Any]) -> None:
    assert planned["sharing"] == [{"planned": ["first", "shares"], "back": 0}] * 2


def test_no_request_goes_back_for_blocks_that_another_holds(planned: dict[str, Any]) -> None:
    """vLLM keeps duplicates of blocks, so who holds a block does not always hold the blocks before
    it. The blocks behind them count from the next step on."""
    long, short = planned["mixed"]
    assert long["holders"] == short["holders"] == [2] * 9 + [1] * 3 + [2] * 3 + [1] * 3
    waits = {"planned": ["fills", "first", "mixed"], "back": 0}
    assert long["steps"] == [waits] * 3
    assert short["steps"][0] == waits
    assert short["steps"][1]["back"] == 1
    assert "leads" in short["steps"][1]["planned"]


def test_a_skipped_request_keeps_its_place_among_equals_back_in_the_queue(planned: dict[str, Any]) -> None:
    assert planned["skipped"] == ["first", "second", "third", "fourth"]


def test_a_requests_own_time_is_not_cut_below_a_quarter(planned: dict[str, Any]) -> None:
    assert planned["own times"] == pytest.approx({"0.001": 0.0125, "20": 0.02, "x" * 9: 0.05})


def test_no_request_goes_back_while_a_prompt_takes_all_tokens_of_a_step(planned: dict[str, Any]) -> None:
    found = planned["full steps"]
    assert found["full"] == {"planned": ["first", "long"], "back": 0}
    assert found["room"] == {"planned": ["leads", "long"], "back": 1}


def test_no_request_goes_back_for_an_image_that_cannot_be_encoded(planned: dict[str, Any]) -> None:
    """vLLM bounds what a step encodes, and what the encoder's cache holds."""
    exchanged = {"planned": ["leads", "prompt"], "back": 1}
    waits = {"planned": ["first", "prompt"], "back": 0}
    last = {case: found["last"] for case, found in planned["images"].items()}
    assert last == {
        "room": exchanged,
        "step used up": waits,
        "cache full": waits,
        "in the cache": exchanged,
    }
    assert {case: found["next"] for case, found in planned["images"].items()} == dict.fromkeys(
        last, exchanged
    )


def test_the_times_of_images_are_not_those_of_tokens(planned: dict[str, Any]) -> None:
    """Or the steps of text after them would get few tokens."""
    assert planned["encoded steps"] == [1, 1]


def test_the_step_in_which_requests_go_back_admits_the_request_in_their_place(
    planned: dict[str, Any],
) -> None:
    """With little memory and common beginnings of prompts."""
    for case, found in planned["memory"].items():
        assert found["made"] > 50, f"{case}: too few exchanges: the test compares nothing"
        assert found["missed"] == 0, case


def test_an_engine_with_other_blocks_than_of_full_attention_is_refused(planned: dict[str, Any]) -> None:
    """The flag is named only if it makes the engine's layers those of full attention."""
    hybrid, windows, some_windows, diffusion, _, _, full = planned["refused, boosts"]
    flag = "or with --disable-hybrid-kv-cache-manager"
    assert "groups of layers are: FullAttention, Mamba;" in hybrid
    assert "groups of layers are: SlidingWindow;" in windows
    assert "groups of layers are: FullAttention, SlidingWindow;" in some_windows
    assert [flag in reason for reason in (hybrid, windows, some_windows)] == [False, False, True]
    assert "UniBoostScheduler is not tested with diffusion models" in diffusion
    assert full is None


def test_an_engine_whose_prompts_are_not_cut_anywhere_is_refused(planned: dict[str, Any]) -> None:
    prompts, images, blocks, plain = planned["refused"]
    assert "lmetric_vllm.SloScheduler needs prompts that are cut at any token" in prompts
    assert "whole prompts (--no-enable-chunked-prefill)" in prompts
    assert "whole images (--disable-chunked-mm-input" in images
    assert "whole blocks (--mamba-cache-mode align" in blocks
    assert plain is None
    *_, prompts, images, _ = planned["refused, boosts"]
    assert "lmetric_vllm.UniBoostScheduler needs prompts that are cut at any token" in prompts
    assert "whole images (--disable-chunked-mm-input" in images


def test_an_engine_with_encodings_of_others_is_refused(planned: dict[str, Any]) -> None:
    outputs, cache = planned["refused, encoders"]
    assert "SloScheduler is not tested with encoder outputs of other engines (--ec-transfer" in outputs
    assert "SloScheduler is not tested with another encoder cache (--ec-manager-config)" in cache


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The package as pip installs it, with its entry point."""
    target, venv = tmp_path_factory.mktemp("installed"), environment()
    command = [venv / "bin" / "uv", "pip", "install", "--no-deps", "--python", venv / "bin" / "python"]
    subprocess.run([*command, "--target", target, ROOT / "integrations" / "vllm"], check=True)
    return {"PYTHONPATH": f"{ROOT / 'python'}:{target}"}


async def test_the_router_knows_the_engines(vllm_engines: Start, installed: dict[str, str]) -> None:
    """Recognition, with and without KV events, and the load of each step."""
    crowded = {name: value for name, value in CROWDED.items() if name != "kv_events_config"}
    (slo,) = vllm_engines(environ=installed, **crowded, **SLO)
    async with served([slo], "--set", "load.interval=600") as world:
        await until_exact(world)
        engine = (await world.engines())[slo.name]
        known = engine["capabilities"]["scheduler"]
        assert (known["name"], known["settings"]) == ("SloScheduler", {"token_slo_ms": "20"})
        assert known["version"]
        # Of twelve requests that bypass the router, some wait for memory.
        body = {"max_tokens": 200, "ignore_eos": True}
        prompts = [" ".join(f"z{number}{word}" for word in range(150)) for number in range(12)]
        others = asyncio.create_task(answers(slo, [{"prompt": prompt} | body for prompt in prompts]))

        async def shows() -> bool:
            (indicators,) = (await world.page("/debug/indicators")).values()
            seen = indicators[slo.name]
            return bool(
                (seen["reported_running"] or 0) >= 1
                and (seen["reported_waiting"] or 0) >= 1
                and seen["queued_prefill_tokens"] > 100
                and seen["kv_usage"] > 0
            )

        await world.until(shows, seconds=120)
        await others

        async def idle() -> bool:
            counts = [await world.indicator(name) for name in ("reported_running", "queued_prefill_tokens")]
            return all(count[slo.name] == 0 for count in counts)

        await world.until(idle)

        async def counted() -> bool:
            reports = (await world.engines())[slo.name]["load"]["reports"]
            return bool(reports.get("kv_events", 0) > 20 and reports.get("/metrics", 0) <= 1)

        await world.until(counted)
        status = (await world.engines())[slo.name]["kv_events"]["ranks"]["0"]
        assert (status["state"], status["gaps"], status["resyncs"], status["skipped"]) == ("live", 0, 0, {})

    (boost,) = vllm_engines(environ=installed, **CROWDED, **BOOST)
    async with served([boost], "--priority", "uniboost") as world:

        async def known_as_boost() -> bool:
            scheduler = (await world.engines())[boost.name]["capabilities"]["scheduler"]
            return bool(scheduler and scheduler["name"] == "UniBoostScheduler")

        await world.until(known_as_boost, seconds=30)
        engine = (await world.engines())[boost.name]
        assert (
            engine["priority"] == "sent as the tenant's handicap and gamma; its scheduler computes the order"
        )


async def test_the_router_sets_handicaps_and_gamma(vllm_engines: Start, installed: dict[str, str]) -> None:
    """Requests of a tenant with a handicap end after the later requests of another tenant, and the
    engine gets the router's gamma."""
    (boost,) = vllm_engines(environ=installed, **(CROWDED | {"max_num_seqs": 1}), **BOOST)
    flags = ("--priority", "uniboost")
    tenants = ("--set", "tenants.bulk.handicap_seconds=1000", "--set", "tenants.chat.weight=1")
    async with served([boost], *flags, *tenants) as world:
        await asyncio.sleep(12)  # the gamma is read each 10 s
        ended: list[str] = []

        async def ask(tenant: str, number: int, **more: Any) -> None:
            headers = {"x-tenant": tenant}
            body = {"model": MODEL, "prompt": f"{tenant} {number}", "max_tokens": 20, "ignore_eos": True}
            async with world.session.post(
                f"{world.url}/v1/completions", json=body | more, headers=headers
            ) as answer:
                assert answer.status == 200, await answer.text()
            ended.append(tenant)

        first = asyncio.create_task(ask("chat", 0, max_tokens=2500))
        await asyncio.sleep(0.3)
        # A client's own handicap does not count.
        cheat = {"vllm_xargs": {"boost_handicap_seconds": -1e6}}
        bulk = [asyncio.create_task(ask("bulk", number, **cheat)) for number in range(10)]
        await asyncio.sleep(0.3)
        await asyncio.gather(first, *bulk, *(ask("chat", number) for number in range(1, 11)))
        assert ended == ["chat"] * 11 + ["bulk"] * 10
    assert boost.log.read_text().count("the router sends gamma") == 1


@pytest.fixture(scope="module")
def changes() -> list[str]:
    """The changes that both packages make in the environment of vLLM: `+ NAME==VERSION`."""
    venv = environment()
    command = [venv / "bin" / "uv", "pip", "install", "--dry-run", "--python", venv / "bin" / "python"]
    done = subprocess.run([*command, ROOT, ROOT / "integrations" / "vllm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.strip() for line in done.stderr.splitlines() if line.startswith((" + ", " - ", " ~ "))]
    assert any(line.startswith("+ lmetric-vllm") for line in found), done.stderr
    return found


def test_the_package_changes_no_version_of_vllms(changes: list[str]) -> None:
    """Both packages go into vLLM's environment, and only add to it."""
    assert not [line for line in changes if not line.startswith("+ ")]


def test_pip_check_finds_nothing_more_with_the_packages(changes: list[str], tmp_path: Path) -> None:
    """In an environment over vLLM's, which stays as it is."""
    below, python = environment() / "bin" / "python", tmp_path / "bin" / "python"

    def run(*words: Path | str) -> list[str]:
        return subprocess.run(words, capture_output=True, text=True, timeout=300).stdout.splitlines()

    run(below, "-m", "venv", "--without-pip", tmp_path)
    (own,), (packages,) = (
        run(each, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))") for each in (python, below)
    )
    (Path(own) / "below.pth").write_text(packages)
    before = run(python, "-m", "pip", "check")
    # The router's wheel needs a build; its metadata say what it requires.
    router = distribution("lmetric-router").read_text("METADATA")
    assert router is not None
    (information := Path(own) / "lmetric_router-0.dist-info").mkdir()
    (information / "METADATA").write_text(router)
    more = [line.removeprefix("+ ") for line in changes if "lmetric" not in line]
    install = [environment() / "bin" / "uv", "pip", "install", "--no-deps", "--python", python]
    subprocess.run([*install, *more, ROOT / "integrations" / "vllm"], check=True, timeout=300)
    listed = " ".join(run(python, "-m", "pip", "list"))
    assert all(name in listed for name in ("lmetric-router", "lmetric-vllm", "vllm", "orjson"))
    broken = set(run(python, "-m", "pip", "check")) - set(before)
    assert not broken - {"No broken requirements found."}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"scheduler_cls": SLO["scheduler_cls"]}, "lmetric.token_slo_ms: missing"),
        (SLO | {"additional_config": {"lmetric": {"token_slo_ms": 20, "profile": "nothing"}}}, "nothing"),
        (
            SLO | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding",
        ),
        (SLO | {"data_parallel_size": 2}, "data-parallel ranks"),
        (BOOST | {"scheduling_policy": "priority"}, "--scheduling-policy fcfs"),
        (
            BOOST | {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "the KV connector ExampleConnector",
        ),
    ],
)
def test_an_engine_that_was_not_tested_does_not_start(
    vllm_engines: Start, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match="ended") as refused:
        vllm_engines(environ=ENVIRON, **(CROWDED | flags))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (
            "integrations/vllm",
            "lmetric_vllm.SloScheduler",
            "ImportError: lmetric_vllm.SloScheduler needs lmetric-router",
        ),
        (
            "python:integrations/vllm",
            "vllm.__version__ = '0.34.0'; from lmetric_vllm.checks import check_engine as c; c('X', Mock())",
            "lmetric_vllm.X is tested with vLLM 0.32 and 0.33, and this engine is vLLM 0.34.0",
        ),
    ],
    ids=["no core", "another version"],
)
def test_an_environment_that_does_not_fit_is_named(path: str, code: str, message: str) -> None:
    environ = {"PYTHONPATH": ":".join(str(ROOT / part) for part in path.split(":")), "HOME": str(Path.home())}
    run = f"import vllm, lmetric_vllm; from unittest.mock import Mock; {code}"
    command = [environment() / "bin" / "python", "-c", run]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 1
    assert message in done.stderr
