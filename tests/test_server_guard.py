"""The hot-spot guard in the server: alarms in logs and metrics, effect on placement, on and off."""

from collections import Counter

import structlog

from server_world import World, world

HOT = {"model": "tiny", "prompt": "the same long prefix of everybody " * 200}


async def send_hot(it: World, requests: int) -> Counter[str]:
    """Sends the hot prompt over and over, one at a time: its one holder is always idle again."""
    served: Counter[str] = Counter()
    for number in range(requests):
        body = {**HOT, "prompt": HOT["prompt"] + f"question {number}"}
        status, headers, _ = await it.post(body)
        assert status == 200
        served[headers["x-lmetric-instance"]] += 1
    return served


async def test_a_hot_spot_is_told_and_spread() -> None:
    with structlog.testing.capture_logs() as logs:
        async with world(4, policy="lmetric") as it:
            assert max((await send_hot(it, 40)).values()) == 40, "its cache draws every request"
            await it.until(lambda: any(entry.get("what") == "suspected" for entry in logs))
            spread = await send_hot(it, 40)
            assert len(spread) > 1, "the guard takes the holder out of the choice"
            await it.until(lambda: any(entry.get("what") == "filtering" for entry in logs))
            _, metrics = await it.get("/metrics")
    alarm = next(entry for entry in logs if entry.get("what") == "suspected")
    assert (alarm["model"], alarm["holders"], alarm["instances"]) == ("tiny", 1, 4)
    assert alarm["log_level"] == "warning"
    assert b'lmetric_guard_events_total{event="suspected",model="tiny"}' in metrics


async def test_off_it_lets_the_cache_draw_everything() -> None:
    with structlog.testing.capture_logs() as logs:
        async with world(4, policy="lmetric", guard=False, admin=True) as it:
            await send_hot(it, 40)
            pool = it.server.fleet.pools[0]
            assert pool.router.tick()[0] == []
            assert len(await send_hot(it, 20)) == 1
            status, _, answer = await it.post({"on": True}, path="/admin/guard")
            assert (status, answer) == (200, {"guard": True})
            assert pool.router.stats()["guard_on"]
    assert not any(entry.get("event") == "hot-spot guard" for entry in logs)
