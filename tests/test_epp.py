"""The endpoint picker speaks the protocol of the Gateway API Inference Extension.

The tests are its gateway. `test_epp_envoy.py` has a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
import orjson
import pytest

from epp_world import (
    DESTINATION,
    PROMPT,
    TRUSTED,
    WHOLE,
    answer_body,
    answer_head,
    answered,
    changed,
    exchange,
    picking,
    request_body,
    request_head,
    request_trailers,
    with_modes,
    with_subset,
)
from lmetric.server.api.paths import AUDIO
from lmetric.server.api.request import LARGE_BODY
from lmetric.server.api.stored import Holder
from lmetric.server.epp import stream as epp_stream
from lmetric.server.epp.ext_proc_pb2 import HealthCheckRequest, HealthCheckResponse
from lmetric.server.epp.picker import SERVICE
from server_world import event, token
from test_server_audio import KIND, form
from test_server_messages import START, TEXT, ends
from waiting import PATIENCE_SECONDS, until


async def test_a_pick_is_in_header_and_metadata_and_its_answer_is_counted() -> None:
    async with picking(2) as world, exchange(world.target) as stream:
        place, fields, body = await stream.ask()
        assert place.split(",") == [world.places[0], world.places[1]], "the engine, and one fallback"
        assert fields["x-request-id"]
        assert orjson.loads(body) == PROMPT
        assert (world.in_flight(), world.running()) == (1, {"e0": 1, "e1": 0})
        added = await answered(stream)
        assert added["x-lmetric-instance"] == "e0"
        await world.settled()
        assert world.running() == {"e0": 0, "e1": 0}
        stats = world.stats()
        assert (stats["finished"], stats["cached_tokens"]) == (1, 4)
        assert not world.engines[0].requests, "the gateway sends the request, not the picker"


async def test_bodies_come_and_go_in_parts() -> None:
    big = {**PROMPT, "prompt": "word " * 50_000}
    data = orjson.dumps(big)
    async with picking() as world, exchange(world.target) as stream:
        await stream.send(request_head())
        for start in range(0, len(data), 16_384):
            await stream.send(request_body(data[start : start + 16_384], False))
        await stream.send(request_body(b"", True))
        _, fields, body = await stream.picked()
        assert body == data
        assert "content-length" not in fields, "it has not changed"
        await answered(stream)


async def test_a_stream_is_counted_token_by_token() -> None:
    async with picking() as world, exchange(world.target) as stream:
        await stream.ask({**PROMPT, "stream": True})
        await stream.send(answer_head(200, content_type="text/event-stream"))
        assert (await stream.next()).HasField("response_headers")
        await stream.send(answer_body(token("a"), False))
        part = (await stream.next()).response_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (token("a"), False)
        (relay,) = world.server.front.relays
        await until(lambda: relay.committed)
        assert world.stats()["finished"] == 0
        rest = token("b", "length") + event(b"[DONE]")
        await stream.send(answer_body(rest, True))
        assert await stream.body("response_body") == rest
        await world.settled()
        assert (world.stats()["finished"], world.stats()["output_tokens"]) == (1, 2)


@pytest.mark.parametrize("begun", [START + TEXT, START], ids=["text", "start"])
@pytest.mark.parametrize("pieces", [1, 2])
async def test_an_aborted_message_passes_and_blames_no_engine(begun: bytes, pieces: int) -> None:
    """The router cannot withhold what the gateway has."""
    async with picking() as world, exchange(world.target) as stream:
        asked = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
        await stream.ask({**asked, "stream": True}, request_head("/v1/messages"))
        await stream.send(answer_head(200, content_type="text/event-stream"))
        assert (await stream.next()).HasField("response_headers")
        parts = [begun, ends(None)] if pieces == 2 else [begun + ends(None)]
        for part in parts:
            await stream.send(answer_body(part, False))
            sent = (await stream.next()).response_body.response.body_mutation.streamed_response
            assert (sent.body, sent.end_of_stream) == (part, False)
        await stream.send(answer_body(b"", True))
        assert await stream.body("response_body") == b""
        await world.settled()
        assert world.stats()["retries"] == 0
        assert {kind: count for kind, count in world.stats()["failed"].items() if count} == {
            "engine_error": 1
        }
        (engine,) = world.server.fleet.engines()
        assert engine.healthy


@pytest.mark.parametrize("trailers", [False, True])
async def test_requests_with_trailers_and_without_a_body(trailers: bool) -> None:
    async with picking() as world, exchange(world.target) as stream:
        if not trailers:
            await stream.send(request_head("/v1/models", "GET", ends=True))
            answer = (await stream.next()).immediate_response
            assert (answer.status.code, orjson.loads(answer.body)["data"][0]["id"]) == (200, "tiny")
            return
        await stream.send(request_head(), request_body(orjson.dumps(PROMPT), False), request_trailers())
        assert (await stream.next()).HasField("request_headers")
        part = (await stream.next()).request_body.response.body_mutation.streamed_response
        assert not part.end_of_stream, "the trailers end the request"
        assert (await stream.next()).HasField("request_trailers")
        await answered(stream)


async def test_buffered_bodies() -> None:
    async with picking() as world, exchange(world.target) as stream:
        await stream.send(with_modes(request_head(), "BUFFERED", "STREAMED"))
        assert (await stream.next()).HasField("request_headers")
        await stream.send(request_body(orjson.dumps(PROMPT), True))
        message = await stream.next()
        common = message.request_body.response
        assert changed(common.header_mutation)[DESTINATION] == world.places[0]
        assert message.dynamic_metadata.fields["envoy.lb"].struct_value.fields
        assert not common.HasField("body_mutation"), "the gateway still has the body"
        await stream.send(answer_head(200, content_type="application/json"), answer_body(WHOLE, True))
        assert (await stream.next()).HasField("response_headers")
        assert not (await stream.next()).response_body.response.HasField("body_mutation")
        await world.settled()
        assert (world.stats()["finished"], world.stats()["cached_tokens"]) == (1, 4)


@pytest.mark.parametrize("ends", [False, True])
async def test_trailers_behind_a_buffered_body(ends: bool) -> None:
    """Envoy waits for the answer to the body before it sends the trailers."""
    async with picking() as world, exchange(world.target) as stream:
        await stream.send(with_modes(request_head(), "BUFFERED", "FULL_DUPLEX_STREAMED"))
        assert (await stream.next()).HasField("request_headers")
        await stream.send(request_body(orjson.dumps(PROMPT), ends))
        assert (await stream.next()).HasField("request_body")
        await stream.send(request_trailers())
        assert (await stream.next()).HasField("request_trailers")
        await answered(stream)


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (("NONE", "STREAMED"), "request_body_mode is NONE; set FULL_DUPLEX_STREAMED or BUFFERED"),
        (("BUFFERED", "NONE"), "response_body_mode is NONE; set FULL_DUPLEX_STREAMED or STREAMED"),
        (("BUFFERED", "BUFFERED"), "response_body_mode is BUFFERED; set FULL_DUPLEX_STREAMED or STREAMED"),
    ],
)
async def test_modes_that_do_not_show_request_and_answer_are_refused(
    modes: tuple[str, str], expected: str
) -> None:
    """Without the parts of answers, each request counts as canceled, and no engine as busy."""
    async with picking() as world, exchange(world.target) as stream:
        await stream.send(with_modes(request_head(), *modes))
        status, _, error = await stream.refused()
        assert (status, error["code"]) == (500, "gateway_configuration")
        assert error["message"].startswith(expected)


@pytest.mark.parametrize("modes", [("NONE", "NONE"), ("NONE", "STREAMED")])
async def test_the_mode_of_answers_counts_for_requests_without_a_body(modes: tuple[str, str]) -> None:
    async with picking() as world, exchange(world.target) as stream:
        model = world.server.fleet.models[0].name
        world.server.front.stored.responses.add("", "resp_1", Holder(model, "e0"))
        head = request_head("/v1/responses/resp_1", "GET", ends=True)
        await stream.send(with_modes(head, *modes))
        if modes[1] == "NONE":
            status, _, error = await stream.refused()
            assert (status, error["code"]) == (500, "gateway_configuration")
            assert error["message"].startswith("response_body_mode is NONE")
        else:
            assert (await stream.next()).HasField("request_headers")


# -- refusals --------------------------------------------------------------------------------------


async def test_no_usable_engine_is_503_with_a_time() -> None:
    async with picking(health={"interval": 0.05, "down_after": 1}) as world:
        await world.engines[0].stop()
        await until(lambda: not world.server.fleet.ready())
        async with exchange(world.target) as stream:
            await stream.send(request_head(), request_body(orjson.dumps(PROMPT), True))
            status, fields, error = await stream.refused()
            assert (status, error["type"], fields["retry-after"]) == (503, "overloaded_error", "2")


@pytest.mark.parametrize(
    ("body", "head", "expected"),
    [
        (b'{"model": "ti', {}, (400, "not valid JSON")),
        ({**PROMPT, "model": "huge"}, {}, (404, "'huge' is unknown")),
        ({**PROMPT, "prompt": "x" * 3000}, {}, (413, "longer than 2000 bytes")),
        (PROMPT, {"path": "/sleep"}, (404, "unknown path /sleep")),
        (PROMPT, {"method": "PUT"}, (405, "PUT is not allowed")),
        ([1], {"x_gateway_model_name_rewrite": "tiny"}, (400, "must be a JSON object, not a list")),
    ],
)
async def test_bad_requests_get_the_error_of_serve(body: Any, head: Any, expected: tuple[int, str]) -> None:
    async with picking(limits={"max_body_bytes": 2000}) as world, exchange(world.target) as stream:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        await stream.send(request_head(**head))
        await stream.send(request_body(data[:1500], False), request_body(data[1500:], True))
        status, fields, error = await stream.refused()
        assert status == expected[0]
        assert expected[1] in error["message"]
        assert fields["content-type"] == "application/json"
        assert world.in_flight() == 0


async def test_a_body_that_does_not_end_is_408() -> None:
    async with picking(timeouts={"body": 0.1}) as world, exchange(world.target) as stream:
        await stream.send(request_head(), request_body(b'{"model"', False))
        status, _, error = await stream.refused()
        assert (status, error["message"]) == (408, "the body is incomplete after 0.1 s: 8 bytes received")


async def test_overload_is_429_with_a_time() -> None:
    admission = {"room_seconds": 0.001, "max_waiting": 1}
    tenants = {"t": {"max_concurrent": 1, "max_waiting": 0}}
    async with picking(admission=admission, tenants=tenants, forwarded=TRUSTED) as world:
        async with exchange(world.target) as first, exchange(world.target) as second:
            await first.ask(head=request_head(x_gateway_inference_fairness_id="t"))
            head = request_head(x_tenant="t")
            await second.send(head, request_body(orjson.dumps(PROMPT), True))
            status, fields, error = await second.refused()
            assert (status, error["code"]) == (429, "queue_full")
            assert int(fields["retry-after"]) >= 1
        await world.settled()


async def test_a_held_request_is_picked_later() -> None:
    async with picking(tenants={"t": {"max_concurrent": 1}}, forwarded=TRUSTED) as world:
        async with exchange(world.target) as first, exchange(world.target) as second:
            await first.ask(head=request_head(x_tenant="t"))
            body = orjson.dumps({**PROMPT, "stream": True})
            await second.send(request_head(x_tenant="t"), request_body(body, True))
            await until(lambda: world.server.fleet.models[0].router.waiting == 1)
            await answered(first)
            place, _, _ = await second.picked()
            assert place == world.places[0]
        await world.settled()


async def test_api_keys_are_checked_and_do_not_reach_engines(tmp_path: Any) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("a-secret-key-of-team-a: team-a\n")
    async with picking(auth={"keys_file": keys}) as world:
        async with exchange(world.target) as stream:
            await stream.send(request_head(authorization="Bearer wrong"))
            assert (await stream.refused())[0] == 401
        async with exchange(world.target) as stream:
            head = request_head(authorization="Bearer a-secret-key-of-team-a")
            await stream.send(head, request_body(orjson.dumps(PROMPT), True))
            mutation = (await stream.next()).request_headers.response.header_mutation
            assert "authorization" in mutation.remove_headers


# -- fields of the gateway -------------------------------------------------------------------------


async def test_the_gateway_renames_the_model() -> None:
    async with picking() as world, exchange(world.target) as stream:
        head = request_head(x_gateway_model_name_rewrite="tiny", content_length="99")
        _, fields, body = await stream.ask({**PROMPT, "model": "alias"}, head)
        assert orjson.loads(body) == PROMPT
        assert int(fields["content-length"]) == len(body)
        await answered(stream)


@pytest.mark.parametrize("size", [1, LARGE_BODY])
async def test_a_renamed_body_keeps_its_other_members(size: int) -> None:
    rest = b'"prompt":"%b","seed":18446744073709551616,"x":1,"x":2}' % (b"a" * size)
    async with picking() as world, exchange(world.target) as stream:
        head = request_head(x_gateway_model_name_rewrite="tiny")
        _, _, body = await stream.ask(b'{"model":"alias",' + rest, head)
        assert body == b'{"model":"tiny",' + rest
        await answered(stream)


async def test_the_shape_of_a_renamed_body_is_checked_before_it_is_parsed() -> None:
    body = b'{"model":"alias","prompt":"x","a":[' + b"[]," * 400_000  # a parser would report its end
    async with picking() as world, exchange(world.target) as stream:
        await stream.send(request_head(x_gateway_model_name_rewrite="tiny"), request_body(body, True))
        status, _, error = await stream.refused()
        assert status == 400
        assert "lists and objects" in error["message"]


async def test_the_gateway_renames_the_model_of_a_form() -> None:
    given = form(("model", b"alias"), ("file", b"abc"))
    fields = {"content_type": KIND.decode(), "x_gateway_model_name_rewrite": "tiny"}
    head = request_head(AUDIO[0], **fields)
    async with picking() as world, exchange(world.target) as stream:
        _, _, body = await stream.ask(given, head)
        assert body == given.replace(b"alias", b"tiny")
        await answered(stream)
        async with exchange(world.target) as other:
            await other.send(head, request_body(form(("file", b"abc")), True))
            status, _, error = await other.refused()
            assert (status, error["param"]) == (400, "model")


async def test_an_objective_is_a_priority_and_a_class() -> None:
    admission = {"classes": {"fast": {"ttft_seconds": 5.0}}, "ttft_seconds": 100.0}
    async with picking(policy="bs + 0 * priority", admission=admission) as world:
        world.server.fleet.objectives["fast"] = 7
        seen = []
        real = world.server.front.placement._start
        world.server.front.placement._start = lambda it, now: (
            seen.append((it.client_request.slo_class, it.asked.priority)),
            real(it, now),
        )  # type: ignore[method-assign]
        async with exchange(world.target) as stream:
            _, fields, _ = await stream.ask(head=request_head(x_gateway_inference_objective="fast"))
            assert seen == [("fast", -7.0)], "engines serve lower numbers first"
            assert "x-vllm-priority" not in fields
            await answered(stream)


async def test_a_sheddable_request_does_not_wait() -> None:
    async with picking(tenants={"t": {"max_concurrent": 1}}, forwarded=TRUSTED) as world:
        world.server.fleet.objectives["batch"] = -1
        async with exchange(world.target) as first, exchange(world.target) as second:
            await first.ask(head=request_head(x_tenant="t"))
            head = request_head(x_tenant="t", x_llm_d_inference_objective="batch")
            await second.send(head, request_body(orjson.dumps(PROMPT), True))
            assert (await second.refused())[0] == 429
            assert world.server.fleet.models[0].router.waiting == 0
        await world.settled()


async def test_a_sheddable_request_takes_no_place_from_requests_that_wait() -> None:
    tenants = {"t": {"max_concurrent": 1}, "u": {"max_concurrent": 1}}
    admission = {"max_waiting": 2, "room_seconds": 1000.0}
    async with picking(tenants=tenants, admission=admission, forwarded=TRUSTED) as world:
        model = world.server.fleet.models[0]
        world.server.fleet.objectives["batch"] = -1
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(exchange(world.target)) for _ in range(5)]
            await streams[0].ask(head=request_head(x_tenant="t"))
            await streams[1].ask(head=request_head(x_tenant="u"))
            body = request_body(orjson.dumps(PROMPT), True)
            for waiting in streams[2:4]:
                await waiting.send(request_head(x_tenant="t"), body)
            await until(lambda: model.router.waiting == 2)
            await streams[4].send(request_head(x_tenant="u", x_llm_d_inference_objective="batch"), body)
            assert (await streams[4].refused())[0] == 429
            model.held.release(time.monotonic())
            assert (model.router.waiting, model.held.waiting()) == (2, {"t": 2})
        await world.settled()


async def test_the_engine_that_served_gets_the_counts() -> None:
    async with picking(2, policy="least_requests") as world, exchange(world.target) as stream:
        place, _, _ = await stream.ask()
        first, second = place.split(",")
        head = answer_head(200, content_type="application/json")
        head.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": second})
        await stream.send(head)
        added = changed((await stream.next()).response_headers.response.header_mutation)
        name = f"e{world.places.index(second)}"
        assert added["x-lmetric-instance"] == name
        model = world.server.fleet.models[0]
        busy = dict(zip(model.router.instances(), model.router.indicators()["bs"], strict=True))
        assert (busy[name], sum(busy.values())) == (1, 1)
        assert world.running() == {"e0": 0, "e1": 0, name: 1}
        await stream.send(answer_body(WHOLE, True))
        assert await stream.body("response_body") == WHOLE
        await world.settled()
        assert world.running() == {"e0": 0, "e1": 0}
        stats = world.stats()
        assert (stats["finished"], stats["retries"]) == (1, 1)
        assert world.server.picker is not None
        assert world.server.picker.shared.counts["fallbacks"] == 1
        assert first != second


def served(place: str) -> Any:
    """The head of an answer, and the engine that gave it."""
    head = answer_head(200, content_type="application/json")
    head.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": place})
    return head


async def test_only_engines_that_refused_are_blamed() -> None:
    """By now, the policy prefers another engine than the gateway's second one."""
    async with (
        picking(3, policy="least_requests") as world,
        exchange(world.target) as stream,
        exchange(world.target) as other,
    ):
        names = {place: f"e{number}" for number, place in enumerate(world.places)}
        first, second = (await stream.ask())[0].split(",")
        await other.ask(head=with_subset(request_head(), [second]))
        await stream.send(served(second))
        await stream.next()
        assert {each.name for each in world.server.fleet.engines() if not each.healthy} == {names[first]}
        assert world.running() == {name: 2 * (name == names[second]) for name in names.values()}
        model = world.server.fleet.models[0]
        assert model.retried == {"refused": 1}
        assert world.stats()["retries"] - model.hedging.uncounted["retries"] == 1


async def test_a_record_names_only_engines_that_the_gateway_tried(tmp_path: Any) -> None:
    """The core router places the request on each engine that it prefers to the answering one."""
    records = {"path": str(tmp_path)}
    async with picking(8, policy="least_requests", records=records) as world:
        async with exchange(world.target) as stream:
            first, second = (await stream.ask())[0].split(",")
            other = [place for place in world.places if place not in (first, second)][3]
            await answered(stream, head=served(other))
        await world.settled()
        model = world.server.fleet.models[0]
        assert world.stats()["retries"] > 1
        assert world.stats()["retries"] == model.hedging.uncounted["retries"]
        assert not any(world.stats()["failed"].values())
        names = [f"e{world.places.index(place)}" for place in (first, other)]
    (path,) = tmp_path.glob("records-*.jsonl")
    lines = map(orjson.loads, path.read_bytes().splitlines())
    (record,) = (line for line in lines if line["type"] == "request")
    assert (record["tried"], record["retries"], record["instance"]) == (names, 1, names[1])


@pytest.mark.parametrize("tries", [1, 2, 3])
async def test_engines_that_the_gateway_cannot_have_tried_are_not_blamed(tries: int) -> None:
    """Envoy skips an engine of the list that it does not know yet."""
    epp = {"fallbacks": 2}
    async with picking(3, policy="least_requests", epp=epp) as world, exchange(world.target) as stream:
        *before, last = (await stream.ask())[0].split(",")
        names = {place: f"e{number}" for number, place in enumerate(world.places)}
        head = answer_head(200, content_type="application/json")
        reported = {"upstream.address": last, "upstream.request_attempt_count": tries}
        head.attributes["envoy.filters.http.ext_proc"].update(reported)
        await stream.send(head)
        await stream.next()
        assert world.running() == {name: int(name == names[last]) for name in names.values()}
        down = {each.name for each in world.server.fleet.engines() if not each.healthy}
        assert down == ({names[place] for place in before} if tries == 3 else set())
        assert world.server.picker is not None
        counts = world.server.picker.shared.counts
        assert (counts["fallbacks"], counts["not_followed"]) == (int(tries == 3), int(tries < 3))


@pytest.mark.parametrize("other", ["another engine", "a hop of a mesh", "a draining engine"])
async def test_an_engine_outside_the_pick_blames_none_and_ends_no_answer(
    other: str, monkeypatch: Any
) -> None:
    """Such as the engine of Envoy's `fallback_policy`, or the address of a sidecar."""
    monkeypatch.setattr(epp_stream, "IDLE_SECONDS", 0.2)
    async with picking(3, policy="least_requests") as world, exchange(world.target) as stream:
        place, _, _ = await stream.ask()
        (third,) = set(world.places) - set(place.split(","))
        names = {place: f"e{number}" for number, place in enumerate(world.places)}
        first, engine = names[place.split(",")[0]], world.server.fleet.models[0].engines[names[third]]
        engine.draining = other == "a draining engine"
        engine.hold()
        await stream.send(served("10.9.9.9:1" if "mesh" in other else third))
        added = changed((await stream.next()).response_headers.response.header_mutation)
        counted = {"another engine": engine.name, "a hop of a mesh": first}.get(other)
        assert world.running() == {name: int(name == counted) for name in names.values()}
        assert added.get("x-lmetric-instance") == counted
        await stream.send(answer_body(WHOLE[:9], False))
        await asyncio.sleep(0.5)
        await stream.send(answer_body(WHOLE[9:], True))
        assert await stream.body("response_body") == WHOLE
        if counted is None:  # a gateway that does not end such a stream
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await stream.call.code() is grpc.StatusCode.ABORTED
            assert await stream.call.details() == "the request has ended"
        else:
            await stream.end()
        await world.settled()
        assert all(each.healthy for each in world.server.fleet.engines())
        assert world.stats()["finished"] == int(counted is not None)
        failed = {kind: count for kind, count in world.stats()["failed"].items() if count}
        assert failed == ({"cancelled": 1} if other == "a draining engine" else {})
        assert world.server.picker is not None
        counts = world.server.picker.shared.counts
        outcome = "unknown" if "mesh" in other else "not_followed"
        assert (counts[outcome], counts["fallbacks"]) == (1, 0)


async def test_a_stored_response_that_another_engine_answers_ends_uncounted(capfd: Any) -> None:
    async with picking(2) as world, exchange(world.target) as stream:
        model = world.server.fleet.models[0].name
        world.server.front.stored.responses.add("", "resp_1", Holder(model, "e0"))
        await stream.send(request_head("/v1/responses/resp_1", "GET", ends=True))
        common = (await stream.next()).request_headers.response
        assert changed(common.header_mutation)[DESTINATION] == world.places[0]
        assert "x-lmetric-instance" not in await answered(stream, head=served(world.places[1]))
        await world.settled()
        assert world.running() == {"e0": 0, "e1": 0}
        assert all(each.healthy for each in world.server.fleet.engines())
    assert "internal error" not in "".join(capfd.readouterr())


async def test_load_reports_in_answers_are_read() -> None:
    async with picking() as world, exchange(world.target) as stream:
        _, fields, _ = await stream.ask()
        assert fields["endpoint-load-metrics-format"] == "TEXT"
        report = "TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.25"
        await answered(stream, endpoint_load_metrics=report)
        await world.settled()
        engine = world.server.fleet.models[0].engines["e0"]
        assert engine.load_reports["header"] == 1


async def test_prefill_and_decode_engines_are_named_as_the_sidecar_reads_them() -> None:
    async with picking(2, roles=["prefill", "decode"]) as world, exchange(world.target) as stream:
        place, fields, body = await stream.ask(head=request_head(x_prefiller_host_port="6.6.6.6:6"))
        assert (place, fields["x-prefiller-host-port"]) == (world.places[1], world.places[0])
        assert orjson.loads(body) == PROMPT
        assert world.running() == {"e0": 1, "e1": 1}
        assert (await answered(stream))["x-lmetric-prefill"] == "e0"
        await world.settled()
        assert (world.stats()["finished"], world.in_flight()) == (1, 0)
        assert world.running() == {"e0": 0, "e1": 0}


@pytest.mark.parametrize("answers", ["a decode engine", "a prefill engine"])
async def test_a_gateway_that_chooses_the_decode_engine_keeps_the_prefill(answers: str) -> None:
    """Such as Envoy's `fallback_policy`: the list for a prefill/decode pair has one engine."""
    roles = ["prefill", "prefill", "decode", "decode"]
    async with picking(4, roles=roles) as world, exchange(world.target) as stream:
        place, fields, _ = await stream.ask()
        prefill = world.places.index(fields["x-prefiller-host-port"])
        counts = answers == "a decode engine"
        other = ({2, 3} if counts else {0, 1}) - {world.places.index(place), prefill}
        (number,) = other
        await stream.send(served(world.places[number]))
        added = changed((await stream.next()).response_headers.response.header_mutation)
        running = {prefill, number} if counts else set()
        assert world.running() == {f"e{each}": int(each in running) for each in range(4)}
        assert added.get("x-lmetric-instance") == (f"e{number}" if counts else None)
        assert added.get("x-lmetric-prefill") == (f"e{prefill}" if counts else None)
        await stream.send(answer_body(WHOLE, True))
        assert await stream.body("response_body") == WHOLE
        await world.settled()
        assert (world.stats()["finished"], world.stats()["failed"]["cancelled"]) == (counts, not counts)
        assert all(each.healthy for each in world.server.fleet.engines())


async def test_fields_that_come_twice_reach_the_engine() -> None:
    """The gateway would replace both lines by the value that the picker sets."""
    twice = [("tracestate", b"a=1"), ("tracestate", b"b=2"), ("cookie", b"c=1"), ("cookie", b"d=2")]
    async with picking() as world, exchange(world.target) as stream:
        head = request_head(x_prefiller_host_port="6.6.6.6:6")
        for name, value in twice:
            head.request_headers.headers.headers.add(key=name, raw_value=value)
        await stream.send(head, request_body(orjson.dumps(PROMPT), True))
        mutation = (await stream.next()).request_headers.response.header_mutation
        assert not {"tracestate", "cookie"} & {*changed(mutation), *mutation.remove_headers}
        assert mutation.remove_headers == ["x-prefiller-host-port"]
        await stream.body("request_body")
        await answered(stream)


# Fields with addresses or ranks that llm-d's sidecar follows, in both spellings.
STEERING = [
    f"x_{prefix}{name}"
    for name in (
        *("prefiller_host_port", "encoder_hosts_ports", "kv_cache_source_host_port"),
        *("data_parallel_host_port", "data_parallel_rank"),
    )
    for prefix in ("", "llm_d_")
]


@pytest.mark.parametrize("roles", [[None, None], ["prefill", "decode"]], ids=["whole", "disaggregated"])
async def test_clients_do_not_steer_the_sidecar(roles: list[str | None]) -> None:
    """The gateway removes each field that the router itself would not pass to an engine."""
    names = [*STEERING, "x_lmetric_decision", "x_tenant", "te"]
    async with picking(2, roles=roles) as world, exchange(world.target) as stream:
        head = request_head(**dict.fromkeys(names, "6.6.6.6:6"), x_own="1", x_real_ip="192.0.2.1")
        await stream.send(head, request_body(orjson.dumps(PROMPT), True))
        mutation = (await stream.next()).request_headers.response.header_mutation
        assert sorted(mutation.remove_headers) == sorted(name.replace("_", "-") for name in names)
        assert await stream.body("request_body") == orjson.dumps(PROMPT)
        # Gateways remove fields before they set others.
        chosen = changed(mutation).get("x-prefiller-host-port")
        assert chosen == (world.places[0] if "prefill" in roles else None)
        await answered(stream)


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["head", "body", "picked", "answer head", "answer"])
async def test_counts_return_to_zero_wherever_a_stream_ends(at: str, capfd: Any) -> None:
    async with picking() as world:
        async with exchange(world.target) as stream:
            await stream.send(request_head())
            if at != "head":
                await stream.send(request_body(orjson.dumps({**PROMPT, "stream": True}), at != "body"))
            if at not in ("head", "body"):
                await stream.picked()
            if at.startswith("answer"):
                await stream.send(answer_head(200, content_type="text/event-stream"))
                await stream.next()
            if at == "answer":
                await stream.send(answer_body(token("a"), False))
                await stream.next()
            clients = world.server.front.clients
            await until(lambda: bool(clients._clients))
            assert world.running() == {"e0": int(at not in ("head", "body"))}
            stream.call.cancel()
        await world.settled()
        assert world.running() == {"e0": 0}
        await until(lambda: not clients._clients)
        assert world.stats()["finished"] == 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("after", ["picked", "late body", "second head"])
async def test_messages_in_a_wrong_order_leave_nothing_in_flight(after: str) -> None:
    """Security F17: the client's side ended, and the ticket stayed."""
    limits = {"max_body_bytes": 1000}
    async with picking(timeouts={"body": 0.2}, limits=limits) as world, exchange(world.target) as stream:
        await stream.ask()
        if after == "picked":
            await stream.send(request_body(b"x" * 900, False), request_body(b"x" * 900, True))
        elif after == "late body":
            await asyncio.sleep(0.4)  # longer than timeouts.body, whose timer ran on
        elif after == "second head":
            await stream.send(request_head())
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await stream.call.code() is grpc.StatusCode.ABORTED
            assert "request_headers came twice" in await stream.call.details()
            return
        assert world.in_flight() == 1
        await answered(stream)
        await world.settled()
        assert world.stats()["finished"] == 1


async def test_streams_that_begin_or_end_no_request_are_ended(monkeypatch: Any) -> None:
    """Security F17: a stream without a message was kept without a limit."""
    monkeypatch.setattr(epp_stream, "IDLE_SECONDS", 0.2)
    async with picking() as world, exchange(world.target) as silent, exchange(world.target) as done:
        await done.send(request_head(path="/unknown"))
        await done.refused()
        for call, reason in ((silent.call, "no request_headers"), (done.call, "the request has ended")):
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await call.code() is grpc.StatusCode.ABORTED
            assert reason in await call.details()
        assert world.server.picker is not None
        await until(lambda: world.server.picker.shared.streams == 0)


async def test_streams_are_bounded() -> None:
    """Security F17: each costs memory before its request is counted."""
    limits = {"max_concurrent_requests": 1}
    async with picking(limits=limits) as world, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(exchange(world.target)) for _ in range(258)]
        for stream in streams:
            await stream.send(request_head())
        codes = [asyncio.ensure_future(stream.call.code()) for stream in streams]
        await until(lambda: any(code.done() for code in codes))
        assert {code.result() for code in codes if code.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.mark.parametrize("length", [None, str(len(WHOLE))])
async def test_streams_of_gateways_that_do_not_end_them_are_ended(
    length: str | None, monkeypatch: Any
) -> None:
    """With its length, an answer ends before the gateway's message about its end."""
    monkeypatch.setattr(epp_stream, "IDLE_SECONDS", 0.2)
    async with picking() as world, exchange(world.target) as stream:
        await stream.ask()
        fields = {} if length is None else {"content_length": length}
        await stream.send(answer_head(200, content_type="application/json", **fields))
        await stream.send(answer_body(WHOLE, True))
        assert (await stream.next()).HasField("response_headers")
        assert await stream.body("response_body") == WHOLE
        await world.settled()
        assert world.stats()["finished"] == 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await stream.call.code() is grpc.StatusCode.ABORTED
        assert await stream.call.details() == "the request has ended"


@pytest.mark.parametrize("method", ["Process", "Check"])
async def test_bytes_that_are_no_message_are_not_logged(method: str, capfd: Any, caplog: Any) -> None:
    """Security F17: gRPC logged a traceback with the bytes for each."""
    async with picking() as world, grpc.aio.insecure_channel(world.target) as channel:
        if method == "Process":
            stream = channel.stream_stream(f"/{SERVICE}/Process")()
            await stream.write(b"\xffSECRET")
            code = await stream.code()
        else:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(b"\xffSECRET")
            code = caught.value.code()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "SECRET" not in caplog.text + capfd.readouterr().err


async def test_a_gateway_that_only_ends_its_side_ends_the_request() -> None:
    async with picking() as world, exchange(world.target) as stream:
        await stream.ask()
        await stream.end()
        await world.settled()
        assert world.stats()["finished"] == 0


async def test_an_engine_that_does_not_answer_ends_the_stream() -> None:
    limits = {"first_byte": 0.2, "answer": 0.2, "request": 0.2}
    async with picking(timeouts=limits) as world, exchange(world.target) as stream:
        await stream.ask()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await stream.call.code() is grpc.StatusCode.ABORTED
        await world.settled()


async def test_a_gateway_that_sends_no_parts_blames_no_engine(monkeypatch: Any) -> None:
    """Its client may not read: then Envoy stops reading from the engine."""
    async with (
        picking(timeouts={"between_chunks": 0.1, "slow_client": 0.5}) as world,
        exchange(world.target) as stream,
    ):
        blamed: list[Any] = []
        model = world.server.fleet.models[0]
        monkeypatch.setattr(model, "blame", lambda *given, **_: blamed.append(given))
        await stream.ask({**PROMPT, "stream": True})
        began = time.monotonic()
        await stream.send(answer_head(200, content_type="text/event-stream"), answer_body(token("a"), False))
        assert (await stream.next()).HasField("response_headers")
        assert (await stream.next()).HasField("response_body")
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await stream.call.code() is grpc.StatusCode.ABORTED
        assert time.monotonic() - began > 0.5
        await world.settled()
        assert blamed == []
        failed = {kind: count for kind, count in world.stats()["failed"].items() if count}
        assert failed == {"cancelled": 1}


async def test_an_abort_during_a_write_sends_nothing_twice() -> None:
    """The gateway does not read: the last write waits when the time limit ends the request."""
    limits = {"first_byte": 0.2, "answer": 0.2, "request": 0.2}
    async with picking(timeouts=limits) as world, exchange(world.target) as stream:
        await stream.ask()
        await stream.send(answer_body(b"x" * (3 << 20), False))
        await world.settled()
        assert world.running() == {"e0": 0}
        got = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(grpc.aio.AioRpcError):  # the end, if it is not OK
                while (message := await stream.call.read()) is not grpc.aio.EOF:
                    got.append(message)
            assert await stream.call.code() is grpc.StatusCode.ABORTED
        assert len(got) <= 1


async def test_errors_of_engines_pass_and_count() -> None:
    async with picking() as world, exchange(world.target) as stream:
        await stream.ask()
        body = b'{"error": {"message": "too long"}}'
        head = answer_head(400, content_type="application/json", content_length=str(len(body)))
        await stream.send(head, answer_body(body, True))
        assert (await stream.next()).HasField("response_headers")
        assert await stream.body("response_body") == body
        await world.settled()
        assert world.stats()["failed"]["engine_error"] == 1


async def test_a_stop_refuses_what_waits_and_ends_what_runs() -> None:
    async with (
        picking(tenants={"t": {"max_concurrent": 1}}, forwarded=TRUSTED) as world,
        exchange(world.target) as first,
        exchange(world.target) as second,
    ):
        await first.ask(head=request_head(x_tenant="t"))
        await second.send(request_head(x_tenant="t"), request_body(orjson.dumps(PROMPT), True))
        await until(lambda: world.server.fleet.models[0].router.waiting == 1)
        await world.server.stop()
        status, _, error = await second.refused()
        assert (status, error["code"]) == (503, "shutting_down")


# -- health and pages ------------------------------------------------------------------------------


async def test_health_services() -> None:
    async with (
        picking(health={"interval": 0.05, "down_after": 1}) as world,
        grpc.aio.insecure_channel(world.target) as channel,
    ):
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )

        async def of(name: str) -> str:
            answer = await check(HealthCheckRequest(service=name))
            return HealthCheckResponse.ServingStatus.Name(answer.status)

        names = ("liveness", "readiness", SERVICE, "")
        assert [await of(name) for name in names] == ["SERVING"] * 4
        assert await of("other") == "SERVICE_UNKNOWN"
        await world.engines[0].stop()
        await until(lambda: not world.server.fleet.ready())
        assert [await of(name) for name in names] == ["SERVING", *["NOT_SERVING"] * 3]
