"""Requests in two segments through the server, with SGLang's bootstrap protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pd_world import BODY, PROMPT, Pd, pd, sglang

ONE_AND_TWO = [sglang("prefill"), sglang("decode"), sglang("decode")]


def waiting(w: Pd, name: str = "p0") -> int:
    """Requests with a segment that waits for another segment."""
    rooms: Any = w.engines[name]._api._rooms  # type: ignore[union-attr]
    return int(rooms.waiting)


async def test_both_legs_run_at_once() -> None:
    async with pd(*ONE_AND_TWO, decode_policy="round_robin") as w:
        engines = w.server.fleet.models[0].engines
        assert [engine.role for engine in engines.values()] == ["prefill", "decode", "decode"]
        alone = await w.alone()
        for number in range(4):
            text = await (w.stream if number % 2 else w.text)()
            assert text == alone
        status, headers, said = await w.post()
        assert (status, headers["x-lmetric-prefill"]) == (200, "p0")
        assert headers["x-lmetric-instance"] in ("d0", "d1")
        assert said["usage"]["completion_tokens"] == 20
        assert w.load("p0")["generation_tokens"] == 5
        assert w.load("d0")["generation_tokens"] + w.load("d1")["generation_tokens"] == 100
        texts = await asyncio.gather(*(w.stream(BODY | {"prompt": f"{n} {PROMPT}"}) for n in range(12)))
        assert "<" not in "".join(texts)
        await w.until(lambda: waiting(w) == 0)


async def test_a_client_that_leaves_frees_both() -> None:
    slow = [sglang("prefill", clock_speed=0.02), sglang("decode")]
    async with pd(*slow) as w:
        asking = asyncio.create_task(w.stream(BODY))
        await w.until(lambda: w.busy("p0") == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await w.until(lambda: w.busy("p0") + w.busy("d0") + waiting(w) == 0)
    slow = [sglang("prefill"), sglang("decode", clock_speed=0.02)]
    async with pd(*slow) as w:
        asking = asyncio.create_task(w.stream(BODY | {"max_tokens": 500}))
        await w.until(lambda: w.busy("d0") == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await w.until(lambda: w.busy("p0") + w.busy("d0") + waiting(w) == 0)


async def test_a_decode_engine_that_fails_leaves_no_prefill_hanging() -> None:
    bad = sglang("decode", fail_status=503)
    async with pd(sglang("prefill"), bad, sglang("decode"), decode_policy="round_robin") as w:
        alone = await w.alone()
        for _ in range(3):
            status, headers, said = await w.post()
            assert (status, headers["x-lmetric-instance"], said["choices"][0]["text"]) == (200, "d1", alone)
        await w.until(lambda: w.busy("p0") + waiting(w) == 0)
        # And an engine that is gone.
        await w.kill("d0")
        for _ in range(3):
            assert await w.text() == alone
        await w.until(lambda: w.busy("p0") + waiting(w) == 0)
    async with pd(sglang("prefill"), bad) as w:
        status, _, said = await w.post()
        assert status == 503, said
        await w.until(lambda: w.busy("p0") + waiting(w) == 0)


async def test_a_prefill_engine_that_fails() -> None:
    bad = sglang("prefill", fail_status=503)
    async with pd(bad, sglang("prefill"), sglang("decode"), policy="round_robin") as w:
        alone = await w.alone()
        for _ in range(3):
            status, headers, said = await w.post()
            assert (status, headers["x-lmetric-prefill"], said["choices"][0]["text"]) == (200, "p1", alone)
        await w.until(lambda: w.busy("d0") == 0)
        await w.kill("p1")
        status, _, said = await w.post()
        assert status in (502, 503)
        # Only engines for single segments are left.
        await w.kill("p0")
        await w.post()
        status, _, said = await w.post()
        assert (status, said["error"]["code"]) == (503, "no_engine")
        assert "only prefill engines or only decode engines are usable" in said["error"]["message"]


async def test_what_cannot_be_cut_is_refused() -> None:
    async with pd(sglang("prefill"), sglang("decode")) as w:
        for body, path in ((BODY | {"n": 2}, "/v1/completions"), ({"input": "a"}, "/v1/embeddings")):
            status, _, said = await w.post(body, path)
            assert (status, said["error"]["type"]) == (400, "invalid_request_error")
            assert "prefill and decode engines" in said["error"]["message"]
        status, _, said = await w.post(BODY | {"bootstrap_room": 3})
        assert (status, said["error"]["param"]) == (400, "bootstrap_room")
        assert w.busy("p0") + w.busy("d0") + waiting(w) == 0


@pytest.mark.parametrize(
    ("roles", "config", "why"),
    [({"p0": "decode"}, {}, "started as prefill")],
)
async def test_what_does_not_fit_is_found_at_the_start(
    roles: dict[str, str], config: dict[str, Any], why: str
) -> None:
    async with pd(sglang("prefill"), sglang("decode"), roles=roles, **config) as w:
        engine = w.server.fleet.models[0].engines["p0"]
        assert not engine.healthy
        assert why in str(engine.last_error)
