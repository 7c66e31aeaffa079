"""A canary and a shadow before engines: arms, commands, states, results."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.table import Table
from structlog.testing import capture_logs

import lmetric as lm
from constants import configured
from lmetric.canary import Outcome
from lmetric.canary.client import lines
from lmetric.config import CanaryConfig, ServerConfig
from lmetric.record_files import read_records
from lmetric.server.background.policy_watch import replace_changed
from lmetric.server.fleet.canary import (
    CAUSES,
    TRANSITIONS,
    Canary,
    CanaryError,
    Event,
    State,
)
from lmetric.server.fleet.canary_run import CanaryRequest, Run
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.policies import Policies
from lmetric.server.observe import trials as trial_metrics
from server_world import STREAM_HEAD, FakeEngine, World, answer, chunk, says, token, world

FILE = """
import numpy as np

def first(bs):
    return np.arange(len(bs), dtype=float)

def last(bs):
    return -np.arange(len(bs), dtype=float)

calls = []

def broken(bs):
    calls.append(bs)
    if len(calls) > 1:  # the first call is the server's test call
        raise RuntimeError("a defect")
    return -np.arange(len(bs), dtype=float)
"""


@pytest.fixture
def mine(tmp_path: Path) -> dict[str, Any]:
    """Settings with named policies: the first engine, the last engine, and a failing policy."""
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    names = ("first", "last", "broken")
    return {
        "policy": "first",
        "policies": {name: f"{file}:{name}" for name in names},
        "policy_fallback": "least_requests",
        "policy_time_limit_seconds": 1.0,
        "admin": {"enabled": True},
    }


QUICK = {"policy": "last", "share": 0.5, "salt": "s", "warmup_seconds": 0}


async def send(world: World, session: str | None, **more: Any) -> str:
    """Sends a stream; returns the engine that answered."""
    body = {"model": "tiny", "prompt": f"hello {session}", "stream": True, **more}
    if session is not None:
        body["user"] = session
    status, headers, _ = await world.post(body)
    assert status == 200
    return str(headers["x-lmetric-instance"])


async def command(world: World, verb: str, **body: Any) -> tuple[int, Any]:
    status, _, answer = await world.post(body, f"/admin/canary/{verb}")
    return status, answer


async def state(world: World) -> Any:
    status, body = await world.get("/admin/canary")
    assert status == 200
    (found,) = orjson.loads(body)
    return found


# States.


def model_of(mine: dict[str, Any]) -> Any:
    with configured({"model": "tiny", **mine}) as config:
        fleet = Fleet(config)
        fleet.build()
        (model,) = fleet.models
        return model


def to(canary: Canary, wanted: State) -> None:
    """Brings a canary to a state."""
    config = CanaryConfig.model_validate(QUICK)
    steps = {
        State.OFF: [],
        State.RUNNING: [lambda: canary.start(config)],
        State.PROMOTED: [lambda: canary.start(config), canary.promote],
        State.ROLLED_BACK: [lambda: canary.start(config), canary.roll_back],
    }
    for step in steps[wanted]:
        step()
    assert canary.state is wanted


def test_metrics_have_each_state_and_cause() -> None:
    assert (*State,) == trial_metrics.STATES
    assert trial_metrics.CAUSES == CAUSES


@pytest.mark.parametrize("before", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_each_event_in_each_state(mine: dict[str, Any], before: State, event: Event) -> None:
    model = model_of(mine)
    canary = model.try_policies().canary
    to(canary, before)
    policy = model.router.stats()["policy"]
    commands = {
        Event.START: lambda: canary.start(CanaryConfig.model_validate(QUICK)),
        Event.PROMOTE: canary.promote,
        Event.ROLL_BACK: canary.roll_back,
        Event.CONFIGURE: lambda: canary.configure(None, policy_changed=True),
    }
    after = TRANSITIONS.get((before, event))
    if after is None:
        with pytest.raises(CanaryError, match="tiny: "):
            commands[event]()
        assert canary.state is before
        assert model.router.stats()["policy"] == policy
    else:
        commands[event]()
        assert canary.state is after
    assert model.try_policies().on is (canary.state is State.RUNNING)


def test_the_policy_of_all_requests_follows_the_state(mine: dict[str, Any]) -> None:
    model = model_of(mine)
    canary = model.try_policies().canary
    router = model.router
    to(canary, State.RUNNING)
    assert model.policies.settings.policy == "first"
    canary.promote()
    assert model.policies.settings.policy == "last"
    assert router.stats()["policy"].endswith("last")
    canary.roll_back()
    assert model.policies.settings.policy == "first"
    assert router.stats()["policy"].endswith("first")


def test_a_promotion_that_was_replaced_is_not_rolled_back(mine: dict[str, Any]) -> None:
    model = model_of(mine)
    canary = model.try_policies().canary
    to(canary, State.PROMOTED)
    model.install(type(model.policies)(model.policies.settings.model_copy(update={"policy": "vllm"})))
    with pytest.raises(CanaryError, match="the policy has changed since the promotion"):
        canary.roll_back()
    assert model.policies.settings.policy == "vllm"


def test_a_promotion_installs_what_ran_as_the_canary(mine: dict[str, Any]) -> None:
    """Its file may have changed since: then all requests would get code that was not tested."""
    model = model_of(mine)
    canary = model.try_policies().canary
    to(canary, State.RUNNING)
    file = Path(mine["policies"]["last"].partition(":")[0])
    file.write_text(FILE.replace("-np.arange", "np.arange"))
    tested = canary.built
    canary.promote()
    assert model.policies.first is tested


async def test_a_promotion_loads_no_file_and_the_next_look_does(mine: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "decode.py"
    file.write_text("def score(bs):\n    return bs\n")
    model = model_of({**mine, "decode_policy": f"{file}:score"})
    to(model.try_policies().canary, State.RUNNING)
    file.write_text("def score(q_bs):\n    return q_bs\n")
    model.try_policies().canary.promote()
    assert model.policies.decode.policy.reads == ["bs"]
    await replace_changed(model)
    assert model.policies.decode.policy.reads == ["q_bs"]
    assert model.policies.settings.policy == "last"


async def test_a_reload_begins_trials_where_none_were_configured(mine: dict[str, Any]) -> None:
    async with world(2, **mine) as w:
        (model,) = w.server.fleet.models
        assert model.trials is None
        on_trial = {"canary": QUICK, "shadow": {"policy": "vllm"}}
        config = ServerConfig.model_validate(w.server.config.model_dump() | on_trial)
        await w.server.apply(w.server.prepare(config))
        assert model.trials is not None
        assert model.trials.canary.running
        assert model.trials.shadow.config == config.shadow
        await w.server.apply(w.server.prepare(config.model_copy(update={"canary": None, "shadow": None})))
        assert not model.trials.on


@pytest.mark.parametrize("key", ["policy", "canary", "shadow"])
async def test_a_changed_file_restarts_the_comparison(mine: dict[str, Any], tmp_path: Path, key: str) -> None:
    file = tmp_path / "edited.py"
    file.write_text("def score(bs):\n    return bs\n")
    edited = f"{file}:score"
    settings = {**mine, "canary": QUICK, "shadow": {"policy": "vllm"}}
    settings[key] = edited if key == "policy" else settings[key] | {"policy": edited}
    async with world(2, **settings) as w:
        trials = w.server.fleet.models[0].try_policies()
        run, built = trials.canary.run, trials.shadow.built
        trials.shadow.outcomes["agreed"] = 5
        await w.server._monitor._watch_policies()
        assert trials.canary.run is run, "nothing has changed"
        file.write_text("def score(q_bs):\n    return q_bs\n")
        await w.server._monitor._watch_policies()
        assert trials.canary.running
        assert (trials.canary.run is run) is (key == "shadow"), "a canary does not compare the shadow"
        assert trials.shadow.built is not built
        assert not trials.shadow.outcomes
        run = trials.canary.run
        file.write_text("broken")
        await w.server._monitor._watch_policies()
        assert trials.canary.run is run, "the old policies stay in use"


async def test_a_changed_file_restarts_a_canary_that_a_command_started(
    mine: dict[str, Any], tmp_path: Path
) -> None:
    """Its results were gone and its sessions moved back, also if another file had changed."""
    own, shadow = tmp_path / "own.py", tmp_path / "shadow.py"
    for file in (own, shadow):
        file.write_text("def score(bs):\n    return bs\n")
    settings = {**mine, "policy": f"{own}:score", "shadow": {"policy": f"{shadow}:score"}}
    async with world(2, **settings) as w:
        assert (await command(w, "start", policy="last", share=0.5))[0] == 200
        canary, config = w.server.fleet.models[0].try_policies().canary, w.server.config
        run, built = canary.run, canary.built
        shadow.write_text("def score(q_bs):\n    return q_bs\n")
        await w.server._monitor._watch_policies()
        other = config.shadow.model_copy(update={"policy": f"{own}:score"})
        await w.server.apply(w.server.prepare(config.model_copy(update={"shadow": other})))
        assert (canary.state, canary.run) == (State.RUNNING, run)
        own.write_text("def score(q_bs):\n    return q_bs\n")
        with capture_logs() as logs:
            await w.server._monitor._watch_policies()
        assert [line["event"] for line in logs if "canary" in line["event"]] == [
            "canary starts again: the code of a policy has changed",
            "canary started",
        ]
        assert canary.running
        assert canary.run is not run
        assert canary.run.salt == run.salt, "sessions keep their arms"
        assert canary.built is built
        own.write_text("def score(p_token):\n    return p_token\n")
        run = canary.run
        await w.server.apply(w.server.prepare(config))
        assert canary.running
        assert canary.run is not run
        await w.server.apply(w.server.prepare(config.model_copy(update={"policy": "vllm"})))
        assert canary.state is State.OFF


async def test_the_code_of_a_configured_canary_restarts_no_other(
    mine: dict[str, Any], tmp_path: Path
) -> None:
    """A canary that a command started keeps its own code, too."""
    files = {name: tmp_path / f"{name}.py" for name in ("configured", "started")}
    for file in files.values():
        file.write_text("def score(bs):\n    return bs\n")
    named = {name: f"{file}:score" for name, file in files.items()}
    settings = {**mine, "policies": mine["policies"] | named, "canary": QUICK | {"policy": "configured"}}
    async with world(2, **settings) as w:
        (model,) = w.server.fleet.models
        canary, config = model.try_policies().canary, w.server.config
        canary.roll_back()
        assert (await command(w, "start", policy="started", share=0.5))[0] == 200
        run, built = canary.run, canary.built
        for file in files.values():
            file.write_text("def score(q_bs):\n    return q_bs\n")
        await w.server._monitor._watch_policies()
        assert model.policies.canary.policy.reads == ["q_bs"]
        await w.server.apply(w.server.prepare(config))
        other = {**config.policies, "configured": "p_token"}
        await w.server.apply(w.server.prepare(config.model_copy(update={"policies": other})))
        assert model.policies.canary.formula == "p_token"
        assert canary.running
        assert (canary.run, canary.built) == (run, built)


async def test_another_definition_of_a_canarys_name_restarts_it(mine: dict[str, Any]) -> None:
    async with world(2, **mine, canary=QUICK) as w:
        canary, config = w.server.fleet.models[0].try_policies().canary, w.server.config
        run = canary.run
        named = {**config.policies, "broken": "bs"}
        await w.server.apply(w.server.prepare(config.model_copy(update={"policies": named})))
        assert canary.run is run
        await w.server.apply(
            w.server.prepare(config.model_copy(update={"policies": {**named, "last": "q_bs"}}))
        )
        assert canary.running
        assert canary.run is not run
        assert canary.built.formula == "q_bs"


def test_a_reload_leaves_a_canary_alone_unless_its_settings_change(mine: dict[str, Any]) -> None:
    model = model_of(mine | {"canary": QUICK})
    canary, settings = model.try_policies().canary, model.settings
    assert canary.running
    run = canary.run
    model.try_policies().configure(model.policies)
    assert canary.run is run
    canary.configure(settings.canary, policy_changed=True)
    assert canary.running
    assert canary.run is not run, "it starts again against the new policy"
    canary.roll_back()
    model.try_policies().configure(model.policies)
    assert canary.state is State.ROLLED_BACK
    other = settings.model_copy(update={"canary": settings.canary.model_copy(update={"share": 0.2})})
    model.try_policies().configure(type(model.policies)(other))
    assert canary.running
    assert canary.run.config.share == 0.2
    model.try_policies().configure(type(model.policies)(settings.model_copy(update={"canary": None})))
    assert canary.state is State.OFF


@pytest.mark.parametrize(
    ("before", "level"),
    [
        (State.OFF, None),
        (State.RUNNING, "warning"),
        (State.PROMOTED, "info"),
        (State.ROLLED_BACK, None),
    ],
)
def test_a_reload_warns_only_of_a_canary_that_it_ends(
    mine: dict[str, Any], before: State, level: str | None
) -> None:
    canary = model_of(mine).try_policies().canary
    to(canary, before)
    with capture_logs() as logs:
        canary.configure(None, policy_changed=True)
    ended = [each["log_level"] for each in logs if each["event"] == "canary ended by the configuration"]
    assert ended == ([level] if level else [])


# Bad input.


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"canary": {"policy": "vllm", "share": 1.5}}, "canary.share.*less than 1"),
        ({"canary": {"policy": "vllm", "share": 0}}, "canary.share.*greater than 0"),
        ({"canary": {"share": 0.5}}, "canary.policy"),
    ],
)
def test_bad_settings_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)" + message.replace(".", r"\.", 1)):
        ServerConfig.model_validate(section)


@pytest.mark.parametrize("key", ["canary", "shadow"])
def test_an_unknown_policy_stops_the_start(key: str) -> None:
    with pytest.raises(lm.LmetricError, match=rf"{key}\.policy: .*vlllm.*did you mean.*vllm"):
        model_of({key: {"policy": "vlllm"}})


async def test_commands_with_bad_input(mine: dict[str, Any]) -> None:
    async with world(2, **mine) as w:
        for body, part in (
            ({"policy": "last", "share": 1.5}, "share"),
            ({"policy": "last", "share": 0}, "share"),
            ({"share": 0.5}, "policy"),
            ({"policy": "vlllm"}, "did you mean"),
            ({"policy": "x.py:score"}, "Python objects are not accepted"),
            ({"policy": "last", "shares": 0.5}, "shares"),
        ):
            status, answered = await command(w, "start", **body)
            assert status == 400, body
            assert part in answered["error"]["message"]
        for verb, message in (("promote", "start one first"), ("rollback", "nothing to roll back")):
            status, answered = await command(w, verb)
            assert (status, answered["error"]["code"]) == (409, "canary_state")
            assert message in answered["error"]["message"]
        assert (await command(w, "rollback", force=True))[0] == 400
        assert (await command(w, "start", model="other", policy="last"))[0] == 404
        assert (await command(w, "stop"))[0] == 404
        assert (await w.get("/admin/canary/start"))[0] == 405
        assert (await state(w))["state"] == "off"


async def test_the_pages_need_the_admin_token(mine: dict[str, Any]) -> None:
    async with world(1, **mine | {"admin": {"enabled": True, "token": "t"}}) as w:
        assert (await w.get("/admin/canary"))[0] in (401, 403)
        assert (await command(w, "start", policy="last"))[0] in (401, 403)


async def test_the_policy_is_not_replaced_beneath_a_canary(mine: dict[str, Any]) -> None:
    async with world(1, **mine) as w:
        await command(w, "start", **QUICK)
        async with w.client.put(w.url + "/admin/policy", json={"policy": "vllm"}) as answered:
            assert answered.status == 400
            assert "a canary runs" in (await answered.json())["error"]["message"]


# Requests.


async def test_sessions_stay_in_their_arm_and_results_are_counted(mine: dict[str, Any]) -> None:
    async with world(2, **mine) as w:
        assert {await send(w, f"s{i}") for i in range(8)} == {"e0"}
        assert (await command(w, "start", **QUICK))[0] == 200
        arms = {f"s{i}": await send(w, f"s{i}") for i in range(60)}
        assert {await send(w, name) for name in arms for _ in range(1) if arms[name] == "e1"} == {"e1"}
        assert 15 <= sum(arm == "e1" for arm in arms.values()) <= 45
        await w.settled()
        found = await state(w)
        run, canary = found["canary"], sum(arm == "e1" for arm in arms.values())
        assert run["requests"] == {"stable": 60 - canary, "canary": 2 * canary}
        assert run["keys"] == {"session": 60 + canary}
        assert run["errors"] == {"stable": 0, "canary": 0}
        assert run["metrics"]["ttft_seconds"]["canary"] > 0
        text = (await w.get("/metrics"))[1].decode()
        assert 'lmetric_canary_state{model="tiny",state="running"} 1.0' in text
        assert f'lmetric_canary_requests{{arm="canary",model="tiny"}} {2 * canary}.0' in text
        assert 'lmetric_canary_share{model="tiny"} 0.5' in text


async def test_requests_without_a_session_are_split_by_their_beginning(mine: dict[str, Any]) -> None:
    async with world(2, **mine | {"canary": QUICK | {"prefix_tokens": 4}}) as w:
        for i in range(20):
            engines = {await send(w, None, prompt=f"prefix number {i:04} {rest}") for rest in ("a", "bb")}
            assert len(engines) == 1, "four tokens, 16 bytes, decide"
        assert (await state(w))["canary"]["keys"] == {"prefix": 40}


async def test_running_requests_finish_in_their_arm(mine: dict[str, Any]) -> None:
    """Both ends of a canary while its requests run: nothing is lost, and no result is counted."""
    gate = asyncio.Event()

    async def gated(engine: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        await gate.wait()
        return await answer(engine, request, writer)

    for verb, after in (("promote", "e1"), ("rollback", "e0")):
        gate.clear()
        async with world([FakeEngine(behave=gated), FakeEngine(behave=gated)], **mine) as w:
            await command(w, "start", **QUICK)
            running = [asyncio.create_task(send(w, f"s{i}")) for i in range(30)]
            await w.until(lambda w=w: w.in_flight() == 30)
            with_results(w)
            assert (await command(w, verb))[0] == 200
            gate.set()
            engines = await asyncio.gather(*running)
            assert {"e0", "e1"} == set(engines)
            assert {await send(w, f"s{i}") for i in range(10)} == {after}
            # A reload brings the configured policy back, and says so.
            reported = await w.server.apply(w.server.prepare(w.server.config))
            assert reported["changed"] == (["policy"] if verb == "promote" else [])
            assert (await w.server.apply(w.server.prepare(w.server.config)))["changed"] == []
            await w.settled()
            assert (await state(w))["canary"]["requests"] == {"stable": 20, "canary": 20}, "no further one"


def with_results(w: World) -> None:
    """Gives the running canary 20 sessions in each arm."""
    run = w.server.fleet.models[0].try_policies().canary.run
    assert run is not None
    for bucket in range(20):
        for arm in (False, True):
            run.comparison.add(arm, bucket, Outcome(error=False, e2e_seconds=1.0))


async def test_a_canary_without_results_is_not_promoted(mine: dict[str, Any]) -> None:
    """ux.md 3.9: `promote` 2 s after `start`, with no request in either arm, succeeded."""
    async with world(2, **mine) as w:
        await command(w, "start", **QUICK)
        for _ in range(2):
            status, answer = await command(w, "promote")
            assert status == 409
            assert "no results to promote: 0 sessions in the stable arm" in answer["error"]["message"]
            assert "at least 20 in each" in answer["error"]["message"]
        assert (await state(w))["state"] == "running"
        with_results(w)
        assert (await command(w, "promote"))[0] == 200


@pytest.mark.parametrize("end", ["promote", "rollback", "undo"])
async def test_a_canary_that_has_ended_shows_when_and_nothing_live(end: str, mine: dict[str, Any]) -> None:
    async with world(2, **mine) as w:
        await command(w, "start", **QUICK)
        with_results(w)
        live = lines(await state(w))
        assert (live[0], type(live[-1])) == ("tiny: running", Table)
        before = time.time()
        for verb in ("promote", "rollback") if end == "undo" else (end,):
            assert (await command(w, verb))[0] == 200
        first = await state(w)
        assert before <= first["canary"]["ended_at"] <= time.time()
        assert first["canary"]["seconds"] == (await state(w))["canary"]["seconds"], "it has ended"
        head, now, past, *rest = lines(first)
        assert isinstance(head, str)
        verb = "promoted" if end == "promote" else "rolled back by command"
        assert re.fullmatch(rf"tiny: {verb} at \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC", head)
        if end == "promote":
            assert now == "last decides all requests; before, it was first"
            assert past == "the canary last had 20 stable, 20 canary requests"
            assert rest == [], "no table"
        else:
            assert now == "first decides all requests"
            assert str(past).startswith("results of the canary last until then")
            assert [type(each) for each in rest] == [Table]
        text = (await w.get("/metrics"))[1]
        assert b"lmetric_canary_value{" not in text
        assert b'lmetric_canary_requests{arm="canary",model="tiny"} 20.0' in text


async def test_of_several_commands_at_once_one_wins(mine: dict[str, Any]) -> None:
    async with world(2, **mine) as w:
        for verb, body in (("start", QUICK), ("promote", {})):
            if verb == "promote":
                with_results(w)
            answers = await asyncio.gather(*(command(w, verb, **body) for _ in range(6)))
            assert sorted(status for status, _ in answers) == [200, 409, 409, 409, 409, 409]
        mixed = await asyncio.gather(command(w, "start", **QUICK), command(w, "rollback"))
        assert mixed[0][0] == 200
        assert (await state(w))["state"] == "rolled_back"


async def test_a_slow_canary_is_rolled_back(mine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmetric.server.fleet.canary.CHECK_SECONDS", 0.1)

    async def slow(engine: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.05)
        return await answer(engine, request, writer)

    with capture_logs() as log:
        async with world([FakeEngine(), FakeEngine(behave=slow)], **mine) as w:
            await rolled_back(w)
    (line,) = [each for each in log if each["event"] == "canary rolled back"]
    assert (line["log_level"], line["model"]) == ("error", "tiny")


async def rolled_back(w: World) -> None:
    """Sends traffic to a canary with a slow engine until it is rolled back."""
    text = (await w.get("/metrics"))[1].decode()
    assert 'lmetric_canary_rollbacks_total{cause="ttft",model="tiny"} 0.0' in text
    await command(w, "start", **QUICK)
    for round_ in range(20):
        await asyncio.gather(*(send(w, f"{round_} {i}") for i in range(25)))
        if (await state(w))["state"] != "running":
            break
    await w.until(lambda: w.server.fleet.models[0].try_policies().canary.state is State.ROLLED_BACK)
    found = await state(w)
    assert "its mean TTFT is higher by at least" in found["reason"]
    assert found["canary"]["metrics"]["ttft_seconds"]["clear"]
    assert {await send(w, f"s{i}") for i in range(10)} == {"e0"}
    text = (await w.get("/metrics"))[1].decode()
    assert 'lmetric_canary_rollbacks_total{cause="ttft",model="tiny"} 1.0' in text


async def test_a_failing_canary_is_rolled_back(mine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmetric.server.fleet.canary.CHECK_SECONDS", 0.1)
    fails = says(STREAM_HEAD, chunk(token("a")), then="reset")
    settings = mine | {"stream_failover": False, "health": {"ejection": {"enabled": False}}}
    async with world([FakeEngine(), FakeEngine(behave=fails)], **settings) as w:
        await command(w, "start", **QUICK, rollback_ttft_increase=None)
        for i in range(400):
            await w.post({"model": "tiny", "prompt": "hello", "stream": True, "user": f"s{i}"})
            if not w.server.fleet.models[0].try_policies().canary.running:
                break
        await w.until(lambda: w.server.fleet.models[0].try_policies().canary.state is State.ROLLED_BACK)
        assert "its error rate is higher" in (await state(w))["reason"]


def shared(mine: dict[str, Any]) -> Canary:
    canary: Canary = model_of(mine).try_policies().canary
    canary.share()
    return canary


def test_workers_add_up_their_results_and_an_alarm_of_one_ends_all(
    mine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = shared(mine), shared(mine)
    config = CanaryConfig.model_validate(QUICK)
    for canary in (one, two):
        canary.start(config, 0.0)
        assert canary.unsent() is None
    for canary, count in ((one, 3), (two, 4)):
        request = CanaryRequest(canary.run, True, 5)
        for _ in range(count):
            canary.ended(request, 1.0, Outcome(False, 2.0))
    first, second = one.unsent(), two.unsent()
    assert first is not None
    assert second is not None
    one.receive_results(second)
    two.receive_results(first)
    assert one.unsent() is None, "a worker sends only its own results"
    for canary in (one, two):
        assert canary.run is not None
        assert canary.run.comparison.requests == [0, 7]
    monkeypatch.setattr(Run, "alarm", lambda _: ("errors", "it fails"))
    results: list[int] = []
    two.on_alarm = lambda: results.append(1)
    two.look(10.0)
    alarm = two.unsent()
    assert alarm is not None
    one.receive_results(alarm)
    two.receive_results(alarm)
    assert results == [1]
    for canary in (one, two):
        assert (canary.state, canary.reason, canary.rollbacks["errors"]) == (State.ROLLED_BACK, "it fails", 1)
    one.start(CanaryConfig.model_validate({**QUICK, "salt": "t"}), 0.0)
    one.receive_results(first)
    assert one.run is not None
    assert one.run.comparison.requests == [0, 0], "results of another canary"


async def test_a_restarted_canary_drops_results_of_workers_with_the_old_code(
    mine: dict[str, Any], tmp_path: Path
) -> None:
    """Each worker looks at the files at its own time, and the salt stays."""
    file = tmp_path / "edited.py"
    file.write_text("def score(bs):\n    return bs\n")
    settings = {**mine, "policy": f"{file}:score"}
    models = [model_of(settings), model_of(settings)]
    one, two = (model.try_policies().canary for model in models)
    for canary in (one, two):
        canary.share()
        canary.start(CanaryConfig.model_validate(QUICK), 0.0)
    two.ended(CanaryRequest(two.run, True, 5), 1.0, Outcome(False, 2.0))
    file.write_text("def score(q_bs):\n    return q_bs\n")
    await replace_changed(models[0])
    assert one.run is not None
    assert one.run.salt == "s"
    old = two.unsent()
    assert old is not None
    old.alarm = ("ttft", "the old code is slow")
    one.receive_results(old)
    assert (one.state, one.run.comparison.requests) == (State.RUNNING, [0, 0])
    await replace_changed(models[1])
    two.ended(CanaryRequest(two.run, True, 5), time.monotonic(), Outcome(False, 2.0))
    new = two.unsent()
    assert new is not None
    one.receive_results(new)
    assert one.run.comparison.requests == [0, 1], "both workers have the new code"


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("wanted", [each for each in State if each is not State.OFF])
def test_a_worker_that_starts_later_goes_on_with_the_canary(
    mine: dict[str, Any], wanted: State, replaced: bool
) -> None:
    model, later = model_of(mine), model_of(mine)
    one, two = model.try_policies().canary, later.try_policies().canary
    to(one, wanted)
    if replaced and wanted is not State.RUNNING:
        model.install(Policies(model.policies.settings.model_copy(update={"policy": "least_requests"})))
        later.install(Policies(later.policies.settings.model_copy(update={"policy": "least_requests"})))
    copy = one.copy()
    assert copy is not None
    two.give_way(copy)
    two.become(copy)
    now = time.monotonic()
    assert two.shown(now) == one.shown(now)
    assert (two.rollbacks, two.promotions) == (one.rollbacks, one.promotions)
    if wanted is State.PROMOTED and not replaced:
        for canary in (one, two):
            canary.roll_back()
        first, second = one.shown(now)["canary"], two.shown(now)["canary"]
        assert None not in [each.pop("ended_at") for each in (first, second)]
        assert second == first
    elif wanted is State.PROMOTED:
        with pytest.raises(CanaryError, match="the policy has changed since the promotion"):
            two.roll_back()


def test_a_worker_with_another_configuration_keeps_its_canary(mine: dict[str, Any]) -> None:
    one, two = (model_of({**mine, "canary": {**QUICK, "salt": salt}}).try_policies().canary for salt in "ab")
    copy = one.copy()
    assert copy is not None
    two.give_way(copy)
    two.become(copy)
    assert two.running
    assert two.run is not None
    assert two.run.salt == "b"


async def test_records_and_decisions_name_the_arm(mine: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "records"
    settings = mine | {"canary": QUICK, "records": {"path": str(folder)}, "shadow": {"policy": "vllm"}}
    async with world(2, **settings) as w:
        said = set()
        for i in range(12):
            _, headers, _ = await w.post({"model": "tiny", "prompt": "x", "user": f"s{i}"})
            _, body = await w.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
            record = orjson.loads(body)
            assert record["policy"].endswith("last" if record["instance"] == "e1" else "first")
            assert record["arm"] == ("canary" if record["instance"] == "e1" else "stable")
            canary = record["arm"] == "canary"
            assert ("shadow" in record) is not canary, "the shadow scores the stable arm"
            said.add("the canary's policy" in record["because"])
            assert canary or "the shadow vllm" in record["because"]
        assert said == {True, False}
    records = read_records(folder)
    assert {(each["arm"], each["instance"]) for each in records.requests} == {
        ("stable", "e0"),
        ("canary", "e1"),
    }
    assert all(("shadow" in each) is (each["arm"] == "stable") for each in records.requests)
    assert records.fleets[-1]["canary"] == {"policy": "last", "knobs": {}, "share": 0.5}


# Shadows.


async def test_a_shadow_is_counted_and_places_nothing(mine: dict[str, Any]) -> None:
    async with world(2, **mine | {"shadow": {"policy": "last"}}) as w:
        assert {await send(w, f"s{i}") for i in range(10)} == {"e0"}
        assert not w.engines[1].requests
        shadow = (await state(w))["shadow"]
        assert (shadow["agreed"], shadow["differed"], shadow["failed"]) == (0, 10, 0)
        assert shadow["agreement"] == 0.0
        assert shadow["predicted_ttft_seconds"]["shadow"] > 0
        text = (await w.get("/metrics"))[1].decode()
        assert 'lmetric_shadow_requests_total{model="tiny",outcome="differed"} 10.0' in text


async def test_a_failing_shadow_does_not_touch_traffic(mine: dict[str, Any]) -> None:
    async with world(2, **mine | {"shadow": {"policy": "broken"}}) as w:
        assert {await send(w, f"s{i}") for i in range(10)} == {"e0"}
        shadow = (await state(w))["shadow"]
        assert (shadow["agreed"], shadow["differed"], shadow["failed"]) == (0, 0, 10)
        fallbacks = w.server.fleet.models[0].router.policy_fallbacks()
        assert fallbacks["errors"] == 0, "those of the router's own policy"


async def test_a_decision_shows_the_expression_that_decided(tmp_path: Path) -> None:
    """Each record of a policy without a name had the text of the present policy."""
    canary = {"policy": "tokens + 7 * bs", "share": 0.5, "salt": "s", "warmup_seconds": 0}
    async with world(2, policy="p_token + bs", canary=canary, admin={"enabled": True}) as w:

        async def shown(label: str) -> str:
            return str(orjson.loads((await w.get(f"/debug/decisions/{label}"))[1])["because"])

        labels: dict[str, str] = {}
        for number in range(64):
            _, headers, _ = await w.post({"model": "tiny", "prompt": "hello", "user": f"s{number}"})
            label = headers["x-lmetric-decision"]
            arm = orjson.loads((await w.get(f"/debug/decisions/{label}"))[1])["arm"]
            text = "tokens + 7 * bs" if arm == "canary" else "p_token + bs"
            assert f"value of {text}: " in await shown(label)
            labels[arm] = label
            if len(labels) == 2:
                break
        assert set(labels) == {"stable", "canary"}
        assert (await command(w, "rollback"))[0] == 200
        async with w.client.put(w.url + "/admin/policy", json={"policy": "tokens"}) as answered:
            assert answered.status == 200, await answered.text()
        assert "score of expression: " in await shown(labels["stable"])
        assert "value of tokens + 7 * bs: " in await shown(labels["canary"])
        _, headers, _ = await w.post()
        assert "value of tokens: " in await shown(headers["x-lmetric-decision"])
        assert (await command(w, "start", policy="bs * 2", share=0.5))[0] == 200
        assert "score of expression: " in await shown(labels["canary"])
