"""A gateway limits a request to a subset of the engines. Policy, retries and roles stay in it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp import ClientSession

import lmetric as lm
from epp_world import (
    DESTINATION,
    PROMPT,
    PickerWorld,
    answer_head,
    answered,
    exchange,
    picking,
    request_body,
    request_head,
    with_subset,
)
from lmetric.server.api.stored import Holder
from lmetric.server.fleet import engine_addresses
from lmetric.server.fleet.engine_addresses import address_of, shortest
from lmetric.server.fleet.subset import shortest_of_subset
from waiting import until


async def pick(world: PickerWorld, inside: Any) -> str:
    """Returns the names of the picked engines of a whole request."""
    async with exchange(world.target) as stream:
        place, _, _ = await stream.ask(head=with_subset(request_head(), inside))
        await answered(stream)
    await world.settled()
    return " ".join(f"e{world.places.index(each)}" for each in place.split(","))


@pytest.mark.parametrize("form", ["list", "text", "addresses"])
async def test_only_engines_of_the_subset_are_picked(form: str) -> None:
    async with picking(3, policy="least_requests") as world:
        inside: Any = world.places[1:]
        if form == "text":
            inside = ",".join(inside)
        for _ in range(4):
            assert await pick(world, inside) in ("e1 e2", "e2 e1"), "no fallback is outside either"
        if form == "addresses":
            assert await pick(world, ["127.0.0.1"]), "an address without a port allows all its ports"


async def test_a_subset_follows_engines_that_join_and_leave() -> None:
    async with picking(2, policy="least_requests", admin={"enabled": True}) as world, ClientSession() as http:
        (model,) = world.server.fleet.models
        engines, inside = f"http://127.0.0.1:{world.server.port}/admin/engines", world.places[1:]
        again = {"url": model.engines["e1"].config.url, "name": "again", "model": model.name}
        for request, status in (
            (http.delete(f"{engines}/e1"), 503),
            (http.post(engines, json=again), None),
            (http.delete(f"{engines}/again"), 503),
        ):
            async with request as answer:
                assert answer.status == 200, await answer.text()
            if status is None:
                await until(lambda: model.engines["again"].unusable is None)
                assert await pick(world, inside) == "e1"
                continue
            async with exchange(world.target) as stream:
                head = with_subset(request_head(), inside)
                await stream.send(head, request_body(orjson.dumps(PROMPT), True))
                assert (await stream.refused())[0] == status
        await world.settled()


async def test_a_subset_reads_its_own_engines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of 10,000 engines took some milliseconds of each request."""
    async with picking(8, policy="least_requests") as world:
        read: list[str] = []

        def counted(engine: Any) -> str:
            read.append(engine.name)
            return address_of(engine)

        monkeypatch.setattr(engine_addresses, "address_of", counted)
        assert await pick(world, world.places[3:4]) == "e3"
        assert set(read) <= {"e3"}


async def test_a_subset_takes_the_best_of_its_engines() -> None:
    async with picking(3, policy="least_requests") as world:
        async with exchange(world.target) as first, exchange(world.target) as second:
            head = with_subset(request_head(), world.places[1:])
            one, _, _ = await first.ask(head=head)
            other, _, _ = await second.ask(head=head)
            assert {one.split(",")[0], other.split(",")[0]} == set(world.places[1:])
        await world.settled()


async def test_turns_of_round_robin_stay_in_the_subset() -> None:
    async with picking(4) as world:
        inside = [world.places[1], world.places[3]]
        firsts = [(await pick(world, inside)).split()[0] for _ in range(4)]
        assert firsts == ["e1", "e3", "e1", "e3"]


async def test_a_policy_that_prefers_the_maximum_picks_the_highest_score() -> None:
    async with picking(3, policy="llmd_scorers") as world:
        async with exchange(world.target) as first:
            assert (await first.ask(head=with_subset(request_head(), [world.places[1]])))[0] == world.places[
                1
            ]
            async with exchange(world.target) as second:
                place, _, _ = await second.ask(head=with_subset(request_head(), world.places[1:]))
                assert place == f"{world.places[2]},{world.places[1]}", "the idle one, then the busy one"
        await world.settled()


async def test_the_gateway_falls_back_inside_the_subset() -> None:
    async with picking(4, policy="least_requests") as world, exchange(world.target) as stream:
        inside = world.places[2:]
        place, _, _ = await stream.ask(head=with_subset(request_head(), inside))
        first, second = place.split(",")
        assert {first, second} == set(inside)
        head = answer_head(200, content_type="application/json")
        head.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": second})
        added = await answered(stream, head=head)
        assert added["x-lmetric-instance"] == f"e{world.places.index(second)}"
        await world.settled()
        assert world.stats()["retries"] == 1


async def test_prefill_and_decode_are_in_the_subset() -> None:
    roles = ["prefill", "prefill", "decode", "decode"]
    async with picking(4, roles=roles, policy="least_requests") as world:
        for _ in range(3):
            async with exchange(world.target) as stream:
                head = with_subset(request_head(), [world.places[1], world.places[2]])
                place, fields, _ = await stream.ask(head=head)
                assert (place, fields["x-prefiller-host-port"]) == (world.places[2], world.places[1])
                await answered(stream)
        async with exchange(world.target) as stream:
            head = with_subset(request_head(), [world.places[3]])
            await stream.send(head, request_body(orjson.dumps(PROMPT), True))
            status, _, error = await stream.refused()
            assert (status, error["code"]) == (503, "no_engine"), "a subset needs engines of both roles"
        await world.settled()


@pytest.mark.parametrize("subset", [[], ["10.1.2.3:8000"], "dead"])
async def test_a_subset_without_an_engine_is_503(subset: Any) -> None:
    async with picking(2, health={"interval": 0.05, "down_after": 1}) as world:
        if subset == "dead":
            await world.engines[1].stop()
            engines = world.server.fleet.models[0].engines
            await until(lambda: not engines["e1"].healthy)
            subset = [world.places[1]]
        async with exchange(world.target) as stream:
            data = orjson.dumps(PROMPT)
            await stream.send(with_subset(request_head(), subset), request_body(data, True))
            status, fields, error = await stream.refused()
            assert (status, error["code"], fields["retry-after"]) == (503, "no_engine", "2")
            assert "the gateway limits the request to a subset" in error["message"]


async def test_a_stored_response_is_fetched_only_in_the_subset() -> None:
    async with picking(2) as world:
        model = world.server.fleet.models[0].name
        world.server.front.stored.responses.add("", "resp_1", Holder(model, "e0"))
        for inside, status in ((world.places[:1], None), (world.places[1:], 503)):
            async with exchange(world.target) as stream:
                head = request_head("/v1/responses/resp_1", "GET", ends=True)
                await stream.send(with_subset(head, inside))
                if status is None:
                    assert (await stream.next()).HasField("request_headers")
                else:
                    assert (await stream.refused())[0] == status
        await world.settled()


def test_a_set_without_scores_takes_the_fewest_requests() -> None:
    router = lm.Router("bs / (bs - bs)")
    for name in "abcd":
        router.add_instance(name)
    tickets = [router.route(lm.Request(prompt_tokens=8, instances=[name]))[1] for name in "abb"]
    decision, ticket = router.route(lm.Request(prompt_tokens=8, instances=["a", "b"]))
    assert decision.instance == "a", "c and d are idle, and not in the set"
    for each in (*tickets, ticket):
        each.failed("cancelled", retry=False)


def test_names_are_a_sequence() -> None:
    with pytest.raises(TypeError):
        lm.Request(prompt_tokens=8, instances="abc")


@pytest.mark.parametrize(
    ("address", "short"),
    [
        ("[fd00:0:0:0:0:0:0:1]:8000", "[fd00::1]:8000"),
        ("[FD00::1]:8000", "[fd00::1]:8000"),
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("engine:80", "engine:80"),
        ("", ""),
    ],
)
def test_addresses_compare_in_their_shortest_spelling(address: str, short: str) -> None:
    assert shortest(address) == short


@pytest.mark.parametrize("text", ["[0:0::1]:80", "[0:0::1]", "::1", "0:0:0:0:0:0:0:1", "[::1]:80"])
def test_spellings_of_ipv6_in_a_subset_are_one_address(text: str) -> None:
    assert shortest_of_subset(text) == ("[::1]:80" if text.endswith("]:80") else "[::1]")
    assert shortest_of_subset("10.0.0.1") == "10.0.0.1"
