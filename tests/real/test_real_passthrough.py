"""vLLM's further paths: equal answers from vLLM directly and through the router."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric.server.api.paths import AUDIO, RELAYED
from router_world import Served, served
from vllm_process import MODEL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

Start = Callable[..., list[VllmEngine]]
FLAGS: dict[str, Any] = {"environ": {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}, "enable_scale_out": True}
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
RESPONSES = "/v1/responses"

# Paths of the API that vLLM 0.32 serves for this model and the router does not relay, with the
# reasons in docs/reference/engines.md. The router has its own /v1/models.
NOT_RELAYED = {
    *("/v1/models", "/generative_scoring", "/v1/systemone"),
    *("/inference/v1/abort_requests", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/invocations", "/ping", "/health", "/load", "/version", "/metrics", "/kv_event_sources"),
    *("/abort_requests", "/tokenizer_info"),
}
# Pages of vLLM's development mode, and of its operators.
OPERATORS = re.compile(
    "/(server_info|reset_|collective_rpc|sleep|wake_up|is_|release_|pause|resume|init_|start_|stop_|"
    "shutdown_|update_|finish_|weight_|get_world_size|scale_elastic|fault_tolerance)"
)


@dataclass
class Answer:
    status: int
    kind: str
    body: Any


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


_ID = re.compile(r"(resp|msg|rs|chatcmpl|cmpl|generate-tokens|call|fc)[-_][-\w]*[0-9a-f][-\w]*")
_VOLATILE = frozenset(
    {"id", "item_id", "request_id", "created", "created_at", "previous_response_id", "sequence_number"}
)


def steady(value: Any) -> Any:
    """The value without ids and times."""
    if isinstance(value, dict):
        return {
            name: type(each).__name__ if name in _VOLATILE and each is not None else steady(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [steady(each) for each in value]
    return _ID.sub("ID", value) if isinstance(value, str) else value


def events(body: bytes) -> list[Any]:
    """The events of a stream. Several tokens may come in one event, so their parts are joined."""
    found: list[Any] = []
    for block in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        data = lines.get("data")
        if data is None:
            continue
        value = data if data == "[DONE]" else steady(orjson.loads(data))
        if not (found and joined(found[-1][1], value)):
            found.append((lines.get("event"), value))
    return found


def joined(last: Any, value: Any) -> bool:
    """Adds the tokens of an event to the event before, if both have tokens of one answer."""
    if isinstance(last, str) or isinstance(value, str):
        return False
    if value.get("type") == last.get("type") == "response.output_text.delta":
        last["delta"] += value["delta"]
        return True
    [before], [after] = last.get("choices") or [None], value.get("choices") or [None]
    if not before or not after or "token_ids" not in after or before["index"] != after["index"]:
        return False
    before["token_ids"] += after["token_ids"]
    before["finish_reason"] = after["finish_reason"]
    return True


@dataclass
class Sides:
    """One engine, directly and through the router."""

    world: Served
    engine: VllmEngine

    async def ask(self, method: str, url: str, body: Any = None) -> Answer:
        data = None if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"content-type": "application/json"} if data is not None else {}
        async with self.world.session.request(method, url, data=data, headers=headers) as response:
            got = await response.read()
            kind = response.content_type
            if kind == "application/json":
                return Answer(response.status, kind, orjson.loads(got))
            return Answer(response.status, kind, got)

    async def direct(self, method: str, path: str, body: Any = None) -> Answer:
        return await self.ask(method, self.engine.url + path, body)

    async def routed(self, method: str, path: str, body: Any = None) -> Answer:
        return await self.ask(method, self.world.url + path, body)

    async def equal(self, path: str, body: Any, status: int = 200) -> Answer:
        """Sends a POST both ways; the answers must be equal. Returns the router's answer."""
        await self.direct("POST", path, body)  # both answers below find the prefix in the cache
        one, two = await self.direct("POST", path, body), await self.routed("POST", path, body)
        same(one, two)
        assert two.status == status, (path, body, two)
        return two


def same(direct: Answer, routed: Answer) -> None:
    assert (direct.status, direct.kind) == (routed.status, routed.kind), (direct, routed)
    if isinstance(direct.body, bytes):
        assert events(routed.body) == events(direct.body)
    else:
        assert steady(routed.body) == steady(direct.body)


@asynccontextmanager
async def sides(start: Start) -> AsyncIterator[Sides]:
    [engine] = start(1, **FLAGS)
    async with served([engine], "--policy", "round_robin") as world:
        yield Sides(world, engine)


async def test_the_router_relays_what_vllm_serves_for_clients(vllm_engines: Start) -> None:
    """Every POST path of vLLM is relayed, or in the list of those that are not."""
    [engine] = vllm_engines(1, **FLAGS)
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/openapi.json") as response:
        paths: dict[str, Any] = (await response.json())["paths"]
    served_paths = {path: sorted(map(str.upper, methods)) for path, methods in paths.items()}
    stored = {
        "/v1/responses/{response_id}": ["GET"],
        "/v1/responses/{response_id}/cancel": ["POST"],
    }
    assert {path: served_paths[path] for path in stored} == stored, "there is no DELETE"
    left = {path for path in served_paths if path not in RELAYED and path not in stored}
    assert {path for path in left if not OPERATORS.match(path)} <= NOT_RELAYED
    pooling = {"/v1/embeddings", "/pooling", "/classify", "/v1/score", "/score"}
    reranking = {"/v1/rerank", "/v2/rerank", "/rerank"}
    others = pooling | reranking | set(AUDIO)
    assert RELAYED.keys() - served_paths.keys() <= others, "only other models have these"


async def test_new_paths_answer_as_vllm_does(vllm_engines: Start) -> None:
    async with sides(vllm_engines) as both:
        chat = {"model": MODEL, "messages": [user("Tell me of the river.")], "max_tokens": 8}
        greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        # Batches.
        batch = {"model": MODEL, "max_tokens": 6, "temperature": 0}
        batch["messages"] = [[user("river"), user("garden")], [user("castle")], [user("winter")]]
        answer = await both.equal(f"{CHAT}/batch", batch)
        assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2]
        record = await both.world.page("/metrics")
        assert "lmetric_requests_total" in record
        for wrong in ({"n": 2}, {"stream": True}, {"model": "other"}, {"use_beam_search": True}):
            direct = await both.direct("POST", f"{CHAT}/batch", batch | wrong)
            routed = await both.routed("POST", f"{CHAT}/batch", batch | wrong)
            assert direct.status == routed.status, wrong
            if "model" not in wrong:
                same(direct, routed)
        # Render.
        rendered = await both.equal(f"{CHAT}/render", chat | greedy)
        await both.equal("/v1/completions/render", {"model": MODEL, "prompt": ["river", "castle"]})
        await both.equal("/v1/messages/render", chat)
        await both.equal(f"{RESPONSES}/render", {"model": MODEL, "input": "river"})
        # Token ids: the body is the rendered one, with its null fields.
        body = rendered.body
        assert body["kv_transfer_params"] is None
        generated = await both.equal(GENERATE, body)
        text = await both.equal(GENERATE, body | {"output_mode": "text"})
        assert text.body["choices"][0]["text"]
        assert len(generated.body["choices"][0]["token_ids"]) == 8
        stream = await both.equal(
            GENERATE, body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        assert stream.kind == "text/event-stream"
        ids = [
            i for _, e in events(stream.body) if e != "[DONE]" for c in e["choices"] for i in c["token_ids"]
        ]
        assert ids == generated.body["choices"][0]["token_ids"]
        sampled = body["sampling_params"]
        await both.equal(
            GENERATE, body | {"sampling_params": sampled | {"n": 2, "seed": 3, "temperature": 1}}
        )
        await both.equal(GENERATE, body | {"token_ids": [10_000_000]}, 400)
        await both.equal(GENERATE, body | {"sampling_params": sampled | {"temperature": -1}}, 400)
        # Derender, whole and chunk by chunk.
        ask = {"model": MODEL, "prompt_tokens": len(body["token_ids"]), "prompt_token_ids": body["token_ids"]}
        asked = ask | {"chat_request": chat}
        derendered = await both.equal(f"{CHAT}/derender", asked | {"generate_response": generated.body})
        direct_chat = (await both.direct("POST", CHAT, chat | greedy)).body
        content = derendered.body["choices"][0]["message"]["content"]
        assert content == direct_chat["choices"][0]["message"]["content"]
        state, said = None, ""
        for part in stream.body.split(b"\n\n"):
            if not part.startswith(b"data: {"):
                continue
            piece = {"stream": True, "generate_chunk": orjson.loads(part[6:]), "stream_state": state}
            answer = await both.equal(f"{CHAT}/derender", asked | piece)
            state = answer.body["stream_state"]
            said += "".join(c["delta"].get("content") or "" for c in answer.body["chunk"]["choices"])
        assert said == content
        [completion] = (
            await both.routed("POST", "/v1/completions/render", {"model": MODEL, "prompt": "river"})
        ).body
        completion["sampling_params"]["max_tokens"] = 4
        whole = (await both.routed("POST", GENERATE, completion)).body
        await both.equal(
            "/v1/completions/derender",
            {"model": MODEL, "generate_responses": [whole], "completion_request": {"prompt": "river"}},
        )
        await both.equal(f"{CHAT}/derender", {"model": MODEL}, 400)
        # Transfers between engines are refused, where vLLM would obey them.
        for path, wrong in (
            (GENERATE, body | {"kv_transfer_params": {"do_remote_decode": True}}),
            (
                GENERATE,
                body | {"sampling_params": sampled | {"extra_args": {"kv_transfer_params": {"a": 1}}}},
            ),
            (f"{CHAT}/batch", batch | {"kv_transfer_params": {}}),
            (f"{CHAT}/derender", asked | {"generate_response": generated.body | {"kv_transfer_params": {}}}),
        ):
            refused = await both.routed("POST", path, wrong)
            assert refused.status == 400
            assert "not accepted from clients" in refused.body["error"]["message"]


async def test_token_ids_hit_the_cache_of_a_chat(vllm_engines: Start) -> None:
    """The router predicts the cached tokens of /inference/v1/generate exactly."""
    async with sides(vllm_engines) as both:
        chat = {"model": MODEL, "messages": [user("signal letter market " * 80)], "max_tokens": 2}
        await both.routed("POST", CHAT, chat)
        body = (await both.routed("POST", f"{CHAT}/render", chat)).body
        world = both.world
        async with world.session.post(f"{world.url}{GENERATE}", json=body) as response:
            answer = await response.json()
            record = await world.record(response.headers)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 100
        assert record["predicted_cached_tokens"] == cached
        assert record["prompt_tokens"] == len(body["token_ids"]) == answer["usage"]["prompt_tokens"]


async def test_stored_responses_answer_as_vllm_does(vllm_engines: Start) -> None:
    async with sides(vllm_engines) as both:
        body = {"model": MODEL, "input": "river", "max_output_tokens": 8, "temperature": 0}
        answer = await both.equal(RESPONSES, body)
        path = f"{RESPONSES}/{answer.body['id']}"
        assert re.fullmatch(r"resp_[0-9a-f]{32}", answer.body["id"])
        got = await both.routed("GET", path)
        assert (got.status, got.body) == (200, answer.body)
        assert got.body == (await both.direct("GET", path)).body, "under the same id"
        for method, further in (("POST", "/cancel"), ("DELETE", ""), ("GET", "?stream=false")):
            one, two = await both.direct(method, path + further), await both.routed(method, path + further)
            assert (one.status, one.kind, one.body) == (two.status, two.kind, two.body), (method, further)
        unknown = f"{RESPONSES}/resp_0"
        for method in ("GET", "POST"):
            further = "/cancel" if method == "POST" else ""
            one, two = (
                await both.direct(method, unknown + further),
                await both.routed(method, unknown + further),
            )
            assert one.status == two.status == 404
            assert one.body["error"]["param"] == two.body["error"]["param"] == "response_id"
        # Chains.
        following = body | {"input": "and then?"}
        first = (await both.direct("POST", RESPONSES, body)).body["id"]
        one = await both.direct("POST", RESPONSES, following | {"previous_response_id": first})
        two = await both.routed("POST", RESPONSES, following | {"previous_response_id": answer.body["id"]})
        same(one, two)
        assert two.status == 200
        assert two.body["usage"]["input_tokens"] > answer.body["usage"]["input_tokens"]
        one = await both.direct("POST", RESPONSES, following | {"previous_response_id": "resp_0"})
        two = await both.routed("POST", RESPONSES, following | {"previous_response_id": "resp_0"})
        assert one.status == two.status == 404
        # Background: the ID comes at once, and the stream of events can be read again.
        for stream in (False, True):
            work = body | {"background": True, "stream": stream, "max_output_tokens": 64}
            made = await both.routed("POST", RESPONSES, work)
            same(await both.direct("POST", RESPONSES, work), made)
            name = events_ids(made.body) if stream else made.body["id"]

            async def ended(name: str = name) -> bool:
                answer = await both.routed("GET", f"{RESPONSES}/{name}")
                return answer.body["status"] in ("completed", "incomplete")

            await both.world.until(ended, seconds=60)
            if stream:
                again = await both.routed("GET", f"{RESPONSES}/{name}?stream=true&starting_after=2")
                assert events(again.body) == events(made.body)[3:]
        answers = []
        for way in (both.direct, both.routed):
            work = body | {"background": True, "max_output_tokens": 3000}
            name = (await way("POST", RESPONSES, work)).body["id"]
            answers.append(await way("POST", f"{RESPONSES}/{name}/cancel"))
            # vLLM 0.32 says "incomplete" if the abort ends the generation before its task.
            assert (await way("GET", f"{RESPONSES}/{name}")).body["status"] in ("cancelled", "incomplete")
        same(*answers)
        # Streams, and responses that are not stored.
        await both.equal(RESPONSES, body | {"stream": True})
        kept = await both.routed("POST", RESPONSES, body | {"store": False})
        assert (await both.routed("GET", f"{RESPONSES}/{kept.body['id']}")).status == 404
        assert (await both.direct("GET", f"{RESPONSES}/{kept.body['id']}")).status == 404


def events_ids(body: bytes) -> str:
    """The id of a streamed response."""
    first = orjson.loads(body.partition(b"data: ")[2].partition(b"\n")[0])
    return str(first["response"]["id"])
