"""Policies from files, modules and entry points, replaced with requests in flight; fallbacks."""

import asyncio
import gzip
import itertools
import os
import pickle
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

import lmetric as lm
from lmetric import plugins
from lmetric.cli.app import build
from lmetric.config import CanaryConfig, PoolSettings
from lmetric.server.background import monitor
from lmetric.server.fleet import policies, policy_files
from lmetric.server.fleet.canary_run import Run
from lmetric.server.fleet.policies import build as build_policy
from lmetric_lab.sim.setups import PolicyChoice
from server_world import FakeEngine, world
from test_server_process import engine, router
from test_server_reload import logged
from test_study import SLICE
from waiting import until

LMETRIC = "def score(p_token, bs):\n    return p_token * (bs + 1)\n"


def fleet(policy: Any, instances: int = 3, **kwargs: Any) -> lm.Router:
    made = lm.Router(policy, **kwargs)
    for i in range(instances):
        made.add_instance(f"e{i}")
    return made


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(LMETRIC)
    return file


def test_functions_are_policies_everywhere() -> None:
    """UX papercut 2: `lm.Router(function)` raised an AttributeError."""

    def mine(p_token: Any, bs: Any) -> Any:
        return p_token * (bs + 1)

    router = fleet(mine, decode_policy=mine)
    assert router.stats()["policy"] == "mine"
    decision, ticket = router.route(lm.Request(range(64)))
    assert decision.scores().tolist() == [64, 64, 64]
    ticket.done(output_tokens=1)
    router.set_policy("vllm")
    router.set_policy(mine)
    router.set_shadow(mine)
    assert router.stats()["policy"] == "mine"
    run, same = (
        lm.simulate("slice", policy=policy, instances=4, guard=False)
        for policy in (mine, "p_token * (bs + 1)")
    )
    assert run.policy == "mine"
    assert (run.instance == same.instance).all()
    with pytest.raises(lm.UnknownNameError, match=r"parameter 'c' is not an indicator.*policy_function"):
        lm.Router(lambda c: c["bs"])
    for wrong in (3, object()):
        with pytest.raises(TypeError, match="is no policy; expected a name, an expression, a"):
            lm.Router(wrong)  # type: ignore[arg-type]


def test_a_decision_explains_itself() -> None:
    """UX papercut 15: `Router.explain` wanted the number of the decision."""
    router = fleet("bs")
    decision, ticket = router.route(lm.Request(range(64)))
    ticket.done(output_tokens=1)
    record = router.explain(decision)
    assert record is not None
    assert record == router.explain(decision.id)
    assert record["instance"] == decision.instance


# Policies by name.


def test_a_function_in_a_file_decides_as_the_same_expression(mine: Path) -> None:
    one, other = fleet(f"{mine}:score"), fleet("p_token * (bs + 1)")
    for i in range(60):
        text = f"prompt {i % 7} " * 50
        now = time.monotonic()
        got, got_ticket = one.route(lm.Request(text=text), now=now)
        expected, expected_ticket = other.route(lm.Request(text=text), now=now)
        assert got.scores().tolist() == expected.scores().tolist()
        if i % 3:
            got_ticket.segment_done(now=now)
            expected_ticket.segment_done(now=now)


def test_a_reference_may_name_any_kind_of_policy(tmp_path: Path) -> None:
    file = tmp_path / "kinds.py"
    file.write_text(
        "import lmetric as lm\n"
        "text = 'bs'\n"
        "expression = lm.BS + lm.Q_BS\n"
        "policy = lm.Policy('bs', name='named')\n"
        "function = lm.policy_function(lambda c: c['bs'], reads=['bs'], name='by hand')\n"
        "def columns(c): return c['bs']\n"
        "number = 3\n"
    )
    for name in ("text", "expression", "policy", "function"):
        made = fleet(f"{file}:{name}")
        assert made.route(lm.Request(text="x"))[0].instance.startswith("e")
    assert fleet(f"{file}:policy").stats()["policy"] == "named"
    with pytest.raises(lm.UnknownNameError, match=r"parameter 'c' is not an indicator.*policy_function"):
        lm.Router(f"{file}:columns")
    with pytest.raises(lm.BadValueError, match=r"expected a function, an lmetric\.Policy or an expression"):
        lm.Router(f"{file}:number")


def test_a_module_is_found_and_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "plugged"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scores.py").write_text("def score(bs):\n    return bs\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = fleet("plugged.scores:score")
    assert made.route(lm.Request(text="x"))[0].scores().tolist() == [0, 0, 0]
    later = package / "scores.py"
    later.write_text("def score(bs):\n    return bs + 7\n")
    os.utime(later, ns=(1, time.time_ns() + 10**10))  # byte code is matched by whole seconds
    made.set_policy("plugged.scores:score")
    assert made.route(lm.Request(text="x"))[0].scores().min() >= 7
    assert plugins.file_of("plugged.scores:score") == later
    sys.modules.pop("plugged.scores")


def test_threads_load_a_changed_module_while_its_old_function_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load during another one got the old function, for ever; the old one lost its globals."""
    package = tmp_path / "threaded"
    package.mkdir()
    (package / "__init__.py").write_text("from threaded import factors, scores\n")
    (package / "factors.py").write_text("")
    scores = package / "scores.py"
    text = "import time\nFACTOR = None\ntime.sleep(0)\nFACTOR = 1\ndef score():\n    return FACTOR\n"
    scores.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def load(number: int = 0) -> Any:
        time.sleep(0.1 * number)
        return plugins.load_object("threaded.scores:score")

    old = load()
    # Of the same size, in the same second: byte code could be stale.
    scores.write_text(text.replace("sleep(0)", "sleep(1)").replace("FACTOR = 1", "FACTOR = 2"))
    with ThreadPoolExecutor() as threads:
        loads = [threads.submit(load, number) for number in range(2)]
        while not all(each.done() for each in loads):
            assert old() == 1
    assert [each.result()() for each in loads] == [2, 2]
    newest = sys.modules["threaded.scores"]
    assert sys.modules["threaded"].scores is newest
    assert newest.score() == 2
    scores.write_text("raise ValueError")
    with pytest.raises(lm.BadValueError):
        load()
    assert sys.modules["threaded.scores"] is newest
    # A package keeps the modules in it.
    for _ in range(2):
        assert plugins.load_object("threaded:factors") is sys.modules["threaded.factors"]
    (package / "__init__.py").write_text("")
    assert plugins.load_object("threaded:factors") is sys.modules["threaded.factors"]
    for name in ("threaded", "threaded.factors", "threaded.scores"):
        del sys.modules[name]


def test_a_module_that_ends_the_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would end a server, which reads its policies again when their files change."""
    for folder in ("ends", "within"):
        (tmp_path / folder).mkdir()
    (tmp_path / "within" / "ends.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "ends" / "__init__.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "ends" / "scores.py").write_text("def score(bs):\n    return bs\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("within.ends", "ends.scores"):
        with pytest.raises(lm.BadValueError, match="cannot be loaded: SystemExit: 3"):
            lm.Router(f"{module}:score")
    assert plugins.file_of("ends.scores:score") is None


def test_an_entry_point_is_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sold.py").write_text(LMETRIC)
    info = tmp_path / "sold-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sold\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lmetric.policies]\nsold_score = sold:score\nbroken = sold:none\nends = ends:score\n"
    )
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert fleet("sold_score").stats()["policy"] == "sold_score"
    assert isinstance(lm.Policy.from_config("sold_score"), lm.PolicyFunction)
    with pytest.raises(lm.UnknownNameError):
        lm.Policy.from_config("sold_score", references=False)
    with pytest.raises(lm.BadValueError, match="'broken': sold:none cannot be loaded: AttributeError"):
        lm.Router("broken")
    with pytest.raises(lm.BadValueError, match="'ends': ends:score cannot be loaded: SystemExit: 3"):
        lm.Router("ends")


def test_an_interrupt_of_a_file_in_another_thread_is_an_error(mine: Path) -> None:
    """Ctrl-C is raised in the main thread only; this one would stop the server."""
    mine.write_text("raise KeyboardInterrupt")
    with ThreadPoolExecutor(1) as pool, pytest.raises(lm.LmetricError, match="KeyboardInterrupt"):
        pool.submit(lm.Router, f"{mine}:score").result()
    with pytest.raises(KeyboardInterrupt):
        lm.Router(f"{mine}:score")


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (LMETRIC, "scor", "has no 'scor'; did you mean 'score'"),
        ("1 / 0", "score", r"cannot be loaded: ZeroDivisionError.*mine\.py:1"),
        ("def score(:", "score", "cannot be loaded: SyntaxError"),
        ("raise SystemExit(3)", "score", r"cannot be loaded: SystemExit: 3.*mine\.py:1"),
        ("raise GeneratorExit(3)", "score", r"cannot be loaded: GeneratorExit: 3.*mine\.py:1"),
        ("def score(p_tokens): return 1", "score", "'p_tokens' is not an indicator; did you mean 'p_token'"),
        ("def score(): return 1", "score", "expected one parameter per indicator"),
        (None, "score", "cannot be loaded: FileNotFoundError"),
    ],
)
def test_what_cannot_be_loaded_is_told(mine: Path, content: str | None, name: str, message: str) -> None:
    mine.unlink() if content is None else mine.write_text(content)
    with pytest.raises(lm.LmetricError, match=message):
        lm.Router(f"{mine}:{name}")
    with pytest.raises(lm.LmetricError, match=message):
        lm.Policy.from_config(f"{mine}:{name}")


def test_a_python_policy_has_no_knobs(mine: Path) -> None:
    with pytest.raises(lm.BadValueError, match="knobs"):
        lm.Router(f"{mine}:score", knobs={"x": 1.0})
    with pytest.raises(lm.BadValueError, match="knobs"):
        lm.Policy.from_config(f"{mine}:score", knobs={"x": 1.0})


# Replaced while requests are in flight.


def test_a_policy_is_replaced_and_everything_else_stays(mine: Path) -> None:
    made = fleet("lmetric")
    open_tickets = [made.route(lm.Request(text=f"{i} " * 400))[1] for i in range(9)]
    before = {name: made.stats()[name] for name in ("index_bytes", "in_flight", "decisions")}
    assert (made.stats()["guard_on"], made.guard_reason) == (False, "the default")
    guarded = lm.Policy("bs", guard=True)
    for policy, guard in (
        (guarded, True),
        ("round_robin", False),
        (f"{mine}:score", False),
        ("sibyl", False),
    ):
        made.set_policy(policy)
        assert made.stats()["guard_on"] is guard, policy
    made.set_decode_policy("sibyl", knobs={"alpha": 0.9})
    after = made.stats()
    assert {name: after[name] for name in before} == before
    assert (after["policy"], after["decode_policy"]) == ("sibyl", "sibyl")
    with pytest.raises(lm.UnknownNameError):
        made.set_policy("lmetrik")
    made.set_decode_policy("sibyl_plus")
    with pytest.raises(lm.BadValueError, match="bucket_tokens"):
        made.set_policy("sibyl", knobs={"bucket_tokens": 128})
    assert made.stats()["policy"] == "sibyl"
    for ticket in open_tickets:
        ticket.segment_done()
    assert made.in_flight() == 0


def test_a_guard_that_was_chosen_stays() -> None:
    made = fleet("lmetric", guard=False)
    made.set_policy("p_token * (bs + 1)")
    assert made.stats()["guard_on"] is False
    assert made.guard_reason == "the setting `guard` is off"


# Fallbacks.


def test_a_policy_that_fails_has_a_fallback() -> None:
    broken = True

    def moody(columns: Any) -> Any:
        if broken:
            raise RuntimeError("out of mood")
        return columns["bs"]

    made = fleet(lm.policy_function(moody, reads=["bs"], fallback="p_token * (bs + 1)"))
    same = fleet("p_token * (bs + 1)", guard=False)
    for i in range(5):
        text, now = f"{i % 2} " * 400, time.monotonic()
        got, expected = (each.route(lm.Request(text=text), now=now)[0] for each in (made, same))
        assert got.scores().tolist() == expected.scores().tolist()
    told = made.policy_fallbacks()
    assert (told["errors"], told["overruns"], told["paused"]) == (3, 0, 2)
    assert "out of mood" in told["problem"]
    broken = False
    time.sleep(1.05)
    made.route(lm.Request(text="x"))
    made.route(lm.Request(text="x"))
    assert made.policy_fallbacks() == told
    made.set_policy("bs")
    assert made.policy_fallbacks() == told, "the counts of a replaced policy stay"


def test_a_policy_that_never_returns_is_stopped() -> None:
    def forever(bs: Any) -> Any:
        while True:
            try:
                len(bs)
            except Exception:
                continue

    made = fleet(lm.policy_function(forever, fallback="bs", time_limit_seconds=0.002))
    for _ in range(4):
        assert made.route(lm.Request(text="x"))[0].scores().max() >= 0
    told = made.policy_fallbacks()
    assert (told["errors"], told["overruns"], told["paused"]) == (0, 3, 1)
    assert "its limit is 2.0ms" in told["problem"]
    # Nothing is raised in this thread afterwards.
    for _ in range(200_000):
        pass


def test_a_slow_policy_is_not_interrupted_after_it_has_returned() -> None:
    def slow(bs: Any) -> Any:
        end = time.perf_counter() + 0.004
        while time.perf_counter() < end:
            pass
        return bs

    made = fleet(lm.policy_function(slow, fallback="bs", time_limit_seconds=0.0035))
    for _ in range(40):
        made.route(lm.Request(text="x"))[1].segment_done()
        sum(range(2000))
    told = made.policy_fallbacks()
    assert told["errors"] == 0
    assert told["overruns"] > 0
    assert made.in_flight() == 0


def test_without_a_fallback_a_policy_that_fails_is_an_error() -> None:
    made = fleet(lm.policy_function(lambda bs: 1 / 0, fallback=None))
    with pytest.raises(lm.PolicyError, match="division by zero"):
        made.route(lm.Request(text="x"))
    for limit in (0, -1, 61, float("nan")):
        with pytest.raises(lm.BadValueError, match="time_limit_seconds"):
            lm.policy_function(lambda bs: bs, time_limit_seconds=limit)


def test_the_guard_goes_by_what_the_policy_itself_reads() -> None:
    made = fleet(lm.policy_function(lambda bs: bs, fallback="lmetric"))
    assert made.stats()["guard_on"] is False


# On the command line.


def test_simulate_bench_and_study_take_a_file(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        return CliRunner().invoke(build(words[:1]), words)

    done = run("bench", "--policy", "mine.py:score", "--instances", "4", "--prompt-tokens", "100", "--json")
    assert done.exit_code == 0, done.output
    arguments = [
        "study",
        "--policy",
        "mine.py:score",
        "--against",
        "lmetric,round_robin",
        "--out",
        "out",
        "--no-report",
        "--trace",
        "short.jsonl",
    ]
    with gzip.open(SLICE) as lines:
        (tmp_path / "short.jsonl").write_bytes(b"".join(itertools.islice(lines, 100)))
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    rows = [orjson.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_bytes().splitlines()]
    assert len(rows) == 1 + 27  # the maximum load, and the runs
    again = run(*arguments)
    assert "(27 reused)" in again.output
    # Another text is another policy.
    mine.write_text(LMETRIC.replace("+ 1", "+ 2"))
    again = run(*arguments)
    assert "(18 reused)" in again.output
    for wrong, message in (
        (["study"], "missing study file; pass FILE or --policy"),
        (["study", "--against", "all"], "--policy"),
    ):
        done = run(*wrong)
        assert done.exit_code == 2
        assert message in done.output


def test_a_policy_choice_can_be_sent_to_a_worker(mine: Path) -> None:
    (choice,) = PolicyChoice.parse(f"{mine}:score")
    assert pickle.loads(pickle.dumps(choice)).code() == choice.code()
    assert np.isfinite(fleet(choice.build()).route(lm.Request(text="x"))[0].scores()).all()
    assert isinstance(choice.build(), lm.PolicyFunction)


# In the server.


async def put(w: Any, body: dict[str, Any]) -> tuple[int, Any]:
    async with w.client.put(w.url + "/admin/policy", json=body) as response:
        return response.status, orjson.loads(await response.read())


async def test_an_administrator_replaces_the_policy_under_load(mine: Path) -> None:
    named = {"mine": f"{mine}:score", "fewest": {"score": "bs", "then": ["q_bs"]}}
    async with world(2, admin=True, policy="lmetric", policies=named) as w:
        load = [asyncio.create_task(w.post()) for _ in range(20)]
        for policy in (
            "round_robin",
            "mine",
            "fewest",
            "p_token * (bs + 1)",
            {"score": "bs", "prefer": "min"},
        ):
            status, told = await put(w, {"policy": policy})
            assert (status, told[0]["policy"]) == (200, policy)
            assert (await w.post())[0] == 200
        status, told = await put(w, {"policy": "linear", "knobs": {"lam": 0.3}, "decode_policy": "sibyl"})
        assert (status, told[0]["knobs"], told[0]["decode_policy"]) == (200, {"lam": 0.3}, "sibyl")
        assert [status for status, *_ in await asyncio.gather(*load)] == [200] * 20
        model = w.server.fleet.models[0]
        assert model.router.stats()["policy"] == "linear"
        assert model.router.in_flight() == 0
        assert orjson.loads((await w.get("/admin/policy"))[1])[0]["policy"] == "linear"
        for body, message in (
            ({"policy": f"{mine}:score"}, "Python objects are not accepted here"),
            ({"policy": "os:system"}, "Python objects are not accepted here"),
            ({"policy": "lmetrik"}, "did you mean the policy 'lmetric'"),
            ({"policy": "bs +"}, "expected"),
            ({"policy": {"score": "bs", "fn": "x"}}, "unknown key 'fn'"),
            ({"policy": "linear", "knobs": {"lan": 1}}, 'did you mean "lam"'),
            ({"policy": "mine", "knobs": {"x": 1}}, "knobs"),
            ({"policy": 3}, "policy"),
            ({"knobs": {"lam": 1}}, "set policy, decode_policy or both"),
            ({"policy": "bs", "model": "none"}, "none"),
            ({"polcy": "bs"}, "polcy"),
        ):
            status, told = await put(w, body)
            assert status in (400, 404), told
            assert message in told["error"]["message"], told
        assert model.router.stats()["policy"] == "linear"
        assert (await w.post({"policy": "bs"}, "/admin/policy"))[0] == 405
    async with world(1) as w:
        assert (await put(w, {"policy": "bs"}))[0] == 403


async def test_a_failing_policy_falls_back_and_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    # The test call at the start succeeds.
    body = "    calls.append(0)\n    assert len(calls) == 1, 'no idea'\n    return bs\n"
    file.write_text(f"calls = []\ndef score(bs):\n{body}")
    async with world(
        2, policy=f"{file}:score", policy_fallback="round_robin", policy_time_limit_seconds=10
    ) as w:
        for _ in range(5):
            assert (await w.post())[0] == 200
        text = (await w.get("/metrics"))[1].decode()
        assert 'lmetric_policy_fallbacks_total{cause="errors",model="tiny"} 3.0' in text
        assert 'lmetric_policy_fallbacks_total{cause="paused",model="tiny"} 2.0' in text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return bz", "name 'bz' is not defined"),
        ("return bs[:1]", "returned 1 scores for 2 instances"),
        ("return 7", r"it returned 7 \(int\)"),
    ],
)
def test_a_policy_is_called_once_before_it_is_used(tmp_path: Path, body: str, problem: str) -> None:
    """UX papercut 8: an error in the body showed only when the fallback decided."""
    file = tmp_path / "bad.py"
    file.write_text(f"def score(bs):\n    {body}\n")
    with pytest.raises(lm.BadValueError, match=f"a test call on two idle engines failed: .*{problem}"):
        build_policy(PoolSettings(), f"{file}:score", {})


def write(file: Path, text: str) -> None:
    file.write_text(text)


async def test_a_watched_file_replaces_the_policy(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "FILE_WATCH_SECONDS", 0.2)
    async with world(2, policy=f"{mine}:score") as w:
        stats = w.server.fleet.models[0].router.stats
        assert stats()["policy"] == f"{mine}:score"
        write(mine, "import lmetric as lm\nscore = lm.Policy('bs', name='second')\n")
        await w.until(lambda: stats()["policy"] == "second")
        for wrong in ("def score(:", "def score(bs):\n    return bz\n"):
            write(mine, wrong)
            with capture_logs() as logs:
                await w.until(lambda logs=logs: [line for line in logs if line["log_level"] == "error"])  # type: ignore[misc]
            assert stats()["policy"] == "second"
        assert (await w.post())[0] == 200
        write(mine, "import lmetric as lm\nscore = lm.Policy('bs', name='third')\n")
        await w.until(lambda: stats()["policy"] == "third")


FIRST = "import numpy as np\n\ndef score(bs):\n    return np.arange(len(bs), dtype=float)\n"


async def test_a_reload_installs_a_file_that_could_not_be_loaded_before(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports a helper that is deployed later: the model showed a policy that did not decide."""
    monkeypatch.syspath_prepend(mine.parent)
    write(mine, FIRST)
    async with world(2, policy=f"{mine}:score", policy_time_limit_seconds=1.0) as w:
        (model,) = w.server.fleet.models

        async def engines() -> set[str]:
            return {(await w.post())[1]["x-lmetric-instance"] for _ in range(4)}

        assert await engines() == {"e0"}
        write(mine, "from deployed_later import score\n")
        with capture_logs() as logs:
            await w.server._monitor._watch_policies()
        assert [line["log_level"] for line in logs] == ["error"]
        assert await engines() == {"e0"}
        write(mine.with_name("deployed_later.py"), FIRST.replace("np.arange", "-np.arange"))
        await w.server.apply(w.server.prepare(w.server.config))
        assert await engines() == {"e1"}
        # A reload without a change neither installs nor shows what another import would give.
        sys.modules["deployed_later"].score = lambda q_bs: q_bs  # type: ignore[attr-defined]
        await w.server.apply(w.server.prepare(w.server.config))
        assert model.policies.first.policy.reads == ["bs"]  # type: ignore[union-attr]
        assert await engines() == {"e1"}
    del sys.modules["deployed_later"]


async def test_a_file_replaces_the_policies_of_all_models_after_a_reload(mine: Path) -> None:
    write(mine, FIRST)
    async with world([FakeEngine(), FakeEngine(model="other")], policy=f"{mine}:score") as w:
        await w.server.apply(w.server.prepare(w.server.config))  # builds the policies of both models once
        write(mine, "import lmetric as lm\nscore = lm.Policy('bs', name='second')\n")
        await w.server._monitor._watch_policies()
        assert [each.router.stats()["policy"] for each in w.server.fleet.models] == ["second", "second"]


class Gate:
    """Code that waits for turns of the event loop: code in the loop's own thread gets none."""

    def __init__(self, folder: Path) -> None:
        self._waits, self._opened, self.passed = (folder / name for name in ("waits", "opened", "passed"))

    @property
    def code(self) -> str:
        """Code that waits. Without turns it goes on after some 10 s."""
        return (
            "import pathlib, time\n"
            "def wait():\n"
            f"    pathlib.Path({str(self._waits)!r}).touch()\n"
            "    for _ in range(10_000):\n"
            f"        if pathlib.Path({str(self._opened)!r}).exists():\n"
            f"            return pathlib.Path({str(self.passed)!r}).touch()\n"
            "        time.sleep(0.001)\n"
        )

    async def __aenter__(self) -> "Gate":
        self._task = asyncio.create_task(self._open())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _open(self) -> None:
        await until(self._waits.exists)
        for _ in range(3):
            await asyncio.sleep(0.001)
        self._opened.touch()


SLOW = "import time\ntime.sleep(1.0)\ndef score(q_bs):\n    return q_bs\n"
WAITS = "wait()\ndef score(q_bs):\n    return q_bs\n"
ENDLESS = "def score(bs):\n    wait()\n    while True:\n        pass\n"


@pytest.mark.parametrize("way", ["watch", "put", "canary", "promote"])
@pytest.mark.parametrize(("text", "works"), [(WAITS, True), (ENDLESS, False)])
async def test_the_load_of_a_policy_blocks_no_request(
    mine: Path, monkeypatch: pytest.MonkeyPatch, way: str, text: str, works: bool
) -> None:
    """Imports and a test call of up to 5 s stopped all streams: peers took the router for lost."""
    monkeypatch.setattr(policy_files, "REHEARSAL_SECONDS", 2.0)
    own, named = mine.with_name("own.py"), f"{mine}:score"
    gate = Gate(mine.parent)
    write(own, LMETRIC)
    settings = {"policy": f"{own}:score", "policies": {"named": named}, "admin": {"enabled": True}}
    async with world(2, **settings) as w:
        (model,) = w.server.fleet.models
        first, canary = model.policies.first, model.try_policies().canary
        if way == "promote":
            monkeypatch.setattr(Run, "too_few", lambda _: None)
            canary.start(CanaryConfig(policy="named", share=0.5))
        write(own if way == "watch" else mine, gate.code + text)
        async with gate:
            if way == "watch":
                await w.server._monitor._watch_policies()
            elif way == "put":
                async with w.client.put(w.url + "/admin/policy", json={"policy": "named"}) as answer:
                    assert answer.status == (200 if works else 400), await answer.text()
            elif way == "canary":
                status, _, body = await w.post({"policy": "named", "share": 0.5}, "/admin/canary/start")
                assert status == (200 if works else 400), body
            else:
                status, _, body = await w.post({}, "/admin/canary/promote")
                assert status == 200, body
        assert gate.passed.exists() is (way != "promote"), "what the canary has built is not loaded again"
        if way == "promote":
            assert model.policies.first is canary.built
            return
        assert (model.policies.first is first) is (way == "canary" or not works)
        assert canary.running is (way == "canary" and works)


async def test_policies_that_were_replaced_during_a_load_stay(mine: Path) -> None:
    """The changed file is loaded at the next look, and commands build the policies anew."""
    other = mine.with_name("other.py")
    slow_text = SLOW.replace("1.0", "0.4")
    write(other, slow_text)
    settings = {"policies": {"slow": f"{other}:score"}, "admin": {"enabled": True}}
    async with world(2, policy=f"{mine}:score", **settings) as w:
        (model,) = w.server.fleet.models

        async def put(**body: Any) -> int:
            async with w.client.put(w.url + "/admin/policy", json=body) as answer:
                return answer.status

        write(mine, slow_text)
        watch = asyncio.create_task(w.server._monitor._watch_policies())
        await asyncio.sleep(0.1)
        model.install(policies.Policies(model.policies.settings.model_copy(update={"policy": "vllm"})))
        await watch
        assert model.router.stats()["policy"] == "vllm"
        slow = asyncio.create_task(put(policy="slow"))
        await asyncio.sleep(0.1)
        model.install(policies.Policies(model.policies.settings.model_copy(update={"decode_policy": "vllm"})))
        assert await slow == 200
        assert model.policies.settings.policy == "slow"
        assert model.policies.settings.decode_policy == "vllm"
        slow = asyncio.create_task(put(policy="slow"))
        await asyncio.sleep(0.1)
        assert await put(policy="vllm") == 200
        assert slow.done(), "commands follow each other"
        assert model.policies.settings.policy == "vllm"
        slow = asyncio.create_task(put(policy="slow"))
        await asyncio.sleep(0.1)
        assert (await w.post({"policy": "bs", "share": 0.5}, "/admin/canary/start"))[0] == 200
        assert await slow == 400
        assert model.policies.settings.policy == "vllm"
        model.try_policies().canary.roll_back()
        start = asyncio.create_task(w.post({"policy": "slow", "share": 0.5}, "/admin/canary/start"))
        await asyncio.sleep(0.1)
        named = {"policies": {"slow": "bs"}}
        model.install(policies.Policies(model.policies.settings.model_copy(update=named)))
        assert (await start)[0] == 200
        assert model.try_policies().canary.built.formula == "bs"  # type: ignore[union-attr]


async def test_a_reload_builds_each_policy_once(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def counted(settings: Any, policy: Any, knobs: Any) -> Any:
        built.append(policy)
        return build_policy(settings, policy, knobs)

    monkeypatch.setattr(policies, "build", counted)
    models = [{"name": "other", "policy": "bs"}]
    async with world(1, model="tiny", policy=f"{mine}:score", models=models) as w:
        built.clear()
        await w.server.apply(
            w.server.prepare(w.server.config.model_copy(update={"decode_policy": "lmetric"}))
        )
        # Those of `tiny` at the top level, and those of `other`.
        assert built == [f"{mine}:score", "lmetric", "bs", "lmetric"]
        assert [model.policies.settings.policy for model in w.server.fleet.models] == ["bs", f"{mine}:score"]


def test_a_build_seeks_each_file_once(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look may find another file, and runs the packages of a module again."""
    sought = []
    file_of = plugins.file_of

    def counted(text: str) -> Path | None:
        sought.append(text)
        return file_of(text)

    monkeypatch.setattr(plugins, "file_of", counted)
    other = mine.with_name("other.py")
    write(other, LMETRIC)
    settings = {"policy": f"{mine}:score", "canary": {"policy": f"{other}:score", "share": 0.5}}
    built = policies.Policies(PoolSettings.model_validate(settings))
    assert [*built.files] == [mine, other]
    assert sought == [f"{mine}:score", f"{other}:score"]


async def test_sighup_replaces_the_policy(tmp_path: Path) -> None:
    async with engine() as fake:
        config = tmp_path / "config.yaml"

        def write(policy: str) -> None:
            values = {"policy": policy, "engines": [{"url": fake.url, "name": "e0"}]}
            config.write_text(yaml.safe_dump(values))

        write("lmetric")
        async with router("--config", str(config)) as process:
            await process.listening()
            write("round_robin")
            process.process.send_signal(signal.SIGHUP)
            assert "round_robin" in await logged(process, "policies replaced")
            write("rond_robin")
            process.process.send_signal(signal.SIGHUP)
            assert "round_robin" in await logged(process, "cannot reload the configuration")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return 7", r"it returned 7 \(int\); expected 2 numbers, one score per instance \(FILE:1\)"),
        ("return 'x'", r"it returned 'x' \(str\); expected 2 numbers, .* \(FILE:1\)"),
        ("return None", r"it returned None \(NoneType\); expected 2 numbers, .* \(FILE:1\)"),
        ("return [[1.0], [2.0]]", r"it returned \[\[1.0\], \[2.0\]\] \(list\); expected 2 numbers"),
        ("return bs[:1]", r"it returned 1 scores for 2 instances; expected 2 numbers, .* \(FILE:1\)"),
        ("return 1 / 0", r"ZeroDivisionError: division by zero \(FILE:2\)"),
    ],
)
def test_a_wrong_result_is_shown_with_file_and_line(tmp_path: Path, body: str, problem: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(f"def score(bs):\n    {body}\n")
    router = lm.Router(f"{file}:score")
    for name in ("a", "b"):
        router.add_instance(name)
    with pytest.raises(lm.PolicyError, match=problem.replace("FILE", re.escape(str(file)))):
        router.route(lm.Request(text="x"))


def test_a_class_is_no_policy(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("class Best:\n    def score(self, bs):\n        return bs\n")
    with pytest.raises(lm.BadValueError, match=r"it is a class; expected a function, an lmetric.Policy"):
        lm.Router(f"{file}:Best")


def test_scores_may_be_any_array_of_numbers(tmp_path: Path) -> None:
    """A reversed array has a negative stride."""
    file = tmp_path / "reversed.py"
    file.write_text("import numpy as np\ndef score(bs):\n    return np.arange(len(bs))[::-1]\n")
    router = lm.Router(f"{file}:score")
    for name in ("a", "b"):
        router.add_instance(name)
    assert router.route(lm.Request(text="x"))[0].instance == "b"
