"""The hot-spot guard in the server: alarms in logs and metrics, effect on placement, on and off."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import structlog

from server_world import World, world

SCORED_NO_ENGINE = "policy scored no engine; used the engine with the fewest requests"


def logged(logs: Iterable[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    return [entry for entry in logs if entry["event"] == event]


HOT = {"model": "tiny", "prompt": "the same long prefix of everybody " * 200}


async def send_hot(it: World, requests: int) -> Counter[str]:
    """Sends the hot prompt repeatedly, one at a time, so its only holder is always idle again."""
    served: Counter[str] = Counter()
    for number in range(requests):
        body = {**HOT, "prompt": HOT["prompt"] + f"question {number}"}
        status, headers, _ = await it.post(body)
        assert status == 200
        served[headers["x-lmetric-instance"]] += 1
    return served


async def test_a_hot_spot_is_told_and_spread() -> None:
    with structlog.testing.capture_logs() as logs:
        async with world(4, policy="lmetric", guard=True) as it:
            # Its cache draws every request, until the guard acts.
            assert max((await send_hot(it, 40)).values()) > 20
            await it.until(lambda: any(entry.get("what") == "suspected" for entry in logs))
            spread = await send_hot(it, 40)
            assert len(spread) > 1, "the guard takes the holder out of the choice"
            await it.until(lambda: any(entry.get("what") == "filtering" for entry in logs))
            _, metrics = await it.get("/metrics")
    alarm = next(entry for entry in logs if entry.get("what") == "suspected")
    assert (alarm["model"], alarm["holders"], alarm["instances"]) == ("tiny", 1, 4)
    assert alarm["log_level"] == "info", "nobody can act on it"
    assert b'lmetric_guard_events_total{event="suspected",model="tiny"}' in metrics


async def test_off_it_lets_the_cache_draw_everything() -> None:
    with structlog.testing.capture_logs() as logs:
        async with world(4, policy="lmetric", guard=False, admin=True) as it:
            await send_hot(it, 40)
            model = it.server.fleet.models[0]
            assert model.router.tick()[0] == []
            assert len(await send_hot(it, 20)) == 1
            status, _, answer = await it.post({"on": True}, path="/admin/guard")
            assert (status, answer) == (200, {"guard": True})
            assert model.router.stats()["guard_on"]
    assert not any(entry.get("event") == "hot-spot guard" for entry in logs)


async def test_what_an_administrator_switched_stays_when_policies_are_replaced() -> None:
    async with world(2, policy="lmetric", guard=True, admin=True) as it:
        router = it.server.fleet.models[0].router
        assert router.stats()["guard_on"]
        assert (await it.post({"on": False}, path="/admin/guard"))[0] == 200
        await it.server.apply(it.server.prepare(it.server.config))
        assert not router.stats()["guard_on"]
        answer = await it.client.put(it.url + "/admin/policy", json={"policy": "planner"})
        assert [(each["guard"], each["guard_reason"]) for each in await answer.json()] == [
            (False, "the setting `guard` is off")
        ]


async def test_an_expression_has_the_guard_as_the_policy_of_that_score_has() -> None:
    """Rust B4: LMETRIC's score as an expression has the guard, and the log reports it."""
    with structlog.testing.capture_logs() as logs:
        async with world(4, policy="p_token * (bs + 1)", guard=True) as it:
            assert max((await send_hot(it, 40)).values()) > 20
            await it.until(lambda: any(entry.get("what") == "suspected" for entry in logs))
            assert len(await send_hot(it, 40)) > 1, "the guard takes the holder out of the choice"


@pytest.mark.parametrize(
    ("config", "guard", "why"),
    [
        ({"policy": "lmetric"}, "off", "the default"),
        ({"policy": "p_token * (bs + 1)"}, "off", "the default"),
        ({"policy": {"score": "p_token", "guard": True}}, "on", "policy expression declares guard: on"),
        ({"policy": "lmetric", "guard": True}, "on", "the setting `guard` is on"),
        (
            {"policy": {"score": "p_token", "guard": True}, "guard": False},
            "off",
            "the setting `guard` is off",
        ),
    ],
)
async def test_the_log_says_at_the_start_whether_the_guard_is_on(
    config: dict[str, Any], guard: str, why: str
) -> None:
    """Rust B4: with the reason, once."""
    with structlog.testing.capture_logs() as logs:
        async with world(1, **config):
            pass
    [start] = [entry for entry in logs if entry["event"] == "listening"]
    assert [(model["guard"], model["guard_reason"]) for model in start["models"]] == [(guard, why)]


async def test_settings_of_the_guard_come_from_the_configuration() -> None:
    """Fidelity gap 12: if the guard needs more requests than there are, it suspects no prefix."""
    settings = {"min_requests": 1000, "period_seconds": 0.01}
    with structlog.testing.capture_logs() as logs:
        async with world(4, policy="lmetric", guard=settings) as it:
            await send_hot(it, 40)
            assert it.server.fleet.models[0].router.tick()[0] == []
            _, metrics = await it.get("/metrics")
    assert b'lmetric_guard_suspected{model="tiny"} 0.0' in metrics
    assert not any(entry["event"] == "hot-spot guard" for entry in logs)


async def test_a_policy_that_scores_nobody_serves_and_says_so() -> None:
    """UX scores absent: 200 by the fewest requests, counted, logged once a minute and at start."""
    with structlog.testing.capture_logs() as logs:
        async with world(2, policy="p_token / bs", guard={"period_seconds": 0.05}) as it:
            for _ in range(3):  # one at a time: the fleet is idle each time
                status, _, answer = await it.post()
                assert status == 200, answer
            assert logged(logs, "policy scores no engine")
            await it.until(lambda: logged(logs, SCORED_NO_ENGINE))
            await it.post()
            model = it.server.fleet.models[0]
            _, at = model.logged[SCORED_NO_ENGINE]
            it.server._monitor._log_growth(model, at + 59.0)
            assert len(logged(logs, SCORED_NO_ENGINE)) == 1
            it.server._monitor._log_growth(model, at + 60.0)
            _, metrics = await it.get("/metrics")
    (warning,) = logged(logs, "policy scores no engine")
    assert "p_token / bs) scores no instance of an idle fleet" in warning["reason"]
    assert warning["log_level"] == "warning"
    first, second = logged(logs, SCORED_NO_ENGINE)
    assert (first["decisions"] + second["decisions"], second["total"]) == (4, 4)
    assert b'lmetric_unscored_total{model="tiny"} 4.0' in metrics
    assert b'lmetric_no_instance_total{model="tiny"} 0.0' in metrics
