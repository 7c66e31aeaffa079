"""Stored responses that clients made through another router of the fleet."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from lmetric.server.api.replica_pages import STORED_PATH
from lmetric.server.background import stored_search
from lmetric.server.observe.problems import FIXES
from server_world import World
from test_server_passthrough import RESPONSES, Responses, ask, created
from test_server_replicas import two

ALICE, BOB = ({"x-tenant": name} for name in ("alice", "bob"))
TENANTS = {"tenants": {"alice": {}, "bob": {}}}


async def test_a_chain_goes_on_through_another_router_at_the_same_engine() -> None:
    async with two([Responses() for _ in range(3)], **TENANTS) as (a, b):
        last = await created(a, ALICE)
        for turn in range(6):
            here = (b, a)[turn % 2]
            following = await created(here, ALICE, previous_response_id=last["id"])
            assert following["engine"] == last["engine"]
            last = following
        path = f"{RESPONSES}/{last['id']}"
        assert (await ask(b, "GET", path, ALICE))[2] == last
        # Another tenant's response is unknown, also at the router that it was made through.
        answers = [await ask(each, "GET", path, BOB) for each in (a, b)]
        assert [status for status, _, _ in answers] == [404, 404]
        assert {got["error"]["code"] for _, _, got in answers} == {"response_not_found"}
        body = {"model": "tiny", "input": "b", "previous_response_id": last["id"]}
        for each in (a, b):
            status, _, answer = await each.post(body, RESPONSES, BOB)
            assert (status, answer["error"]["code"]) == (404, "response_not_found")
            await each.settled()


async def test_an_unknown_response_is_asked_for_once_and_then_unknown() -> None:
    async with two([Responses()]) as (a, b):
        unknown = "resp_" + "0" * 32
        status, _, answer = await ask(a, "GET", f"{RESPONSES}/{unknown}")
        assert (status, answer["error"]["code"]) == (404, "response_not_found")
        body = {"model": "tiny", "input": "b", "previous_response_id": unknown}
        assert (await a.post(body, RESPONSES))[0] == 404
        assert not a.server.front.stored.others._searches
        # Long IDs are not sent.
        body["previous_response_id"] = "x" * 300
        assert (await a.post(body, RESPONSES))[0] == 404
        await a.settled()
        await b.settled()


async def hang(*_: object, **__: object) -> bytes:
    await asyncio.sleep(3600)
    return b""


async def test_a_router_that_does_not_answer_delays_only_unknown_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_search, "ANSWER_SECONDS", 0.2)
    async with two([Responses()]) as (a, b):
        made, theirs = await created(a), await created(b)
        monkeypatch.setattr(a.server.front.replicas, "call", hang)
        async with asyncio.timeout(0.19):
            await created(a, previous_response_id=made["id"])
        # A client would take a 404 as final.
        path = f"{RESPONSES}/{theirs['id']}"
        status, headers, answer = await ask(a, "GET", path)
        assert (status, answer["error"]["code"]) == (503, "replicas_unreachable")
        assert headers["retry-after"] == "1"
        body = {"model": "tiny", "input": "b", "previous_response_id": theirs["id"]}
        status, _, answer = await a.post(body, RESPONSES)
        assert (status, answer["error"]["code"]) == (503, "replicas_unreachable")
        await a.settled()


@pytest.mark.parametrize("step_seconds", [0, 3600, -3600])
async def test_a_router_that_is_gone_is_not_waited_for(
    step_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the wall clock is set meanwhile."""
    async with two([Responses()]) as (a, b):
        path = f"{RESPONSES}/resp_{0:032x}"
        await b.server.stop()
        await a.until(lambda: any(each.lost_at for each in a.server.front.replicas.addresses.values()))
        asked = []
        wall_clock = time.time
        monkeypatch.setattr(time, "time", lambda: wall_clock() + step_seconds)

        async def lost(*_: object, page: str = "", **__: object) -> bytes:
            asked.append(page)
            return await hang()  # a machine that is off resets no connection

        monkeypatch.setattr(stored_search, "ANSWER_SECONDS", 0.05)
        monkeypatch.setattr(a.server.front.replicas, "call", lost)
        assert (await ask(a, "GET", path))[0] == 503
        assert any(asked)
        asked.clear()
        monkeypatch.setattr(stored_search, "GONE_SECONDS", 0.0)
        assert (await ask(a, "GET", path))[0] == 404
        assert not any(asked)


async def test_searches_of_invented_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_search, "MOST_SEARCHES", 3)
    most = 0
    async with two([Responses()]) as (a, _):
        replicas, search = a.server.front.replicas, a.server.front.stored.others
        sent = replicas.call

        async def counted(*args: object, **more: object) -> bytes:
            nonlocal most
            most = max(most, search._searches.total())
            await asyncio.sleep(0.05)
            return await sent(*args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(replicas, "call", counted)
        paths = [f"{RESPONSES}/resp_{number:032x}" for number in range(20)]
        answers = await asyncio.gather(*(ask(a, "GET", path) for path in paths))
        codes = {(status, answer["error"]["code"]) for status, _, answer in answers}
        assert codes == {(404, "response_not_found"), (503, "too_many_searches")}
        assert most == 3
        await a.settled()


async def test_a_tenant_has_a_share_of_the_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_search, "TENANT_SEARCHES", 2)
    async with two([Responses()], **TENANTS) as (a, b):
        theirs = await created(b, BOB)
        replicas = a.server.front.replicas
        sent = replicas.call

        async def of_alice(*args: object, page: str = "", **more: object) -> bytes:
            return await (hang() if "alice" in page else sent(*args, page=page, **more))  # type: ignore[arg-type]

        monkeypatch.setattr(replicas, "call", of_alice)
        paths = [f"{RESPONSES}/resp_{number:032x}" for number in range(4)]
        asking = asyncio.gather(*(ask(a, "GET", path, ALICE) for path in paths))
        await a.until(lambda: a.server.front.stored.others._searches["alice"] == 2)
        assert (await ask(a, "GET", f"{RESPONSES}/{theirs['id']}", BOB))[0] == 200
        # An operator has other routers to look after for the first, and a client for the second.
        said = sorted((got["error"]["code"], got["error"]["message"]) for _, _, got in await asking)
        silent = "1 of 1 routers that may know the response do not answer; retry"
        many = "too many requests search other routers for stored responses; retry"
        assert said == [("replicas_unreachable", silent)] * 2 + [("too_many_searches", many)] * 2
        assert "restart" not in FIXES["replicas_unreachable"]
        assert "client" in FIXES["too_many_searches"]


@pytest.mark.parametrize("page", [b"", b"[]", b'{"model": 1, "engine": 2}', b"null", b"x" * 9000])
async def test_a_strange_answer_of_another_router_is_no_answer(
    page: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two([Responses()]) as (a, b):
        made = await created(b)

        async def strange(*_: object, **__: object) -> bytes:
            return page

        monkeypatch.setattr(a.server.front.replicas, "call", strange)
        assert (await ask(a, "GET", f"{RESPONSES}/{made['id']}"))[0] == 503


async def page(w: World, query: str, token: str) -> int:
    headers = {"authorization": f"Bearer {token}"}
    return (await ask(w, "GET", STORED_PATH + query, headers))[0]


async def test_only_routers_read_the_page() -> None:
    async with two([Responses()], {"token": "among-us"}) as (a, _):
        made = await created(a)
        query = f"?tenant=&id={made['id']}"
        assert await page(a, query, "among-us") == 200
        assert await page(a, query, "guess") == 401
        for bad in ("", "?tenant=a", "?id=a", "?tenant=a&id=b&id=c", "?tenant=a&id=b&more=c"):
            assert await page(a, bad, "among-us") == 400


def test_the_documents_have_the_limits_of_searches() -> None:
    page = " ".join((Path(__file__).parent.parent / "docs" / "how-to" / "deploying.md").read_text().split())
    limits = (
        f"{stored_search.MOST_SEARCHES} requests ({stored_search.TENANT_SEARCHES} of a tenant) already ask"
    )
    silence = f"a router does not answer within {stored_search.ANSWER_SECONDS:g} s"
    assert f"If no answer names the response and {silence}, the client gets a 503" in page
    assert f"It also gets a 503 if {limits}" in page
    assert f"gone after {stored_search.GONE_SECONDS:g} s" in page
