"""vLLM's further paths: batches, render and derender, token ids, and stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

import lmetric as lm
from constants import with_constants
from lmetric._core import INTERNAL_FIELDS
from lmetric.config import Limits
from lmetric.server.api.paths import RELAYED, stored_response
from lmetric.server.api.stored import Holder, StoredResponses
from lmetric.tokens.prompt import PromptTokenizer
from lmetric_lab.emulated.text import TOKENIZER_PATH
from server_world import (
    SSE,
    STREAM_HEAD,
    FakeEngine,
    Request,
    World,
    chunk,
    decision_id,
    event,
    hang,
    plain,
    says,
    usage,
    world,
)
from test_server_isolation import ALICE, BOB, keys, tenants
from test_server_kv import connected, emulated, routed

assert keys  # a fixture

BATCH = "/v1/chat/completions/batch"
GENERATE = "/inference/v1/generate"
RESPONSES = "/v1/responses"
# The first event of a response in the background.
OPENING = {"type": "response.created", "response": {"status": "in_progress", "background": True}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


GENERATED = {"choices": [{"index": 0, "token_ids": [5], "finish_reason": "length"}]}
# Each path with a body as clients send it. The bodies of answers of /render have null fields.
BODIES: dict[str, dict[str, Any]] = {
    BATCH: {"messages": [[user("a")], [user("b"), user("c")]], "max_tokens": 3},
    GENERATE: {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}, "kv_transfer_params": None},
    "/v1/chat/completions/render": {"messages": [user("a")]},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/messages/render": {"messages": [user("a")], "max_tokens": 3},
    "/v1/responses/render": {"input": "a"},
    "/v1/chat/completions/derender": {
        "generate_response": {"kv_transfer_params": None, **GENERATED},
        "chat_request": {"messages": [user("a")]},
    },
    "/v1/completions/derender": {"generate_responses": [GENERATED], "stream": False},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_reaches_an_engine_as_it_is(path: str) -> None:
    async with world(1) as w:
        body = {"model": "tiny", **BODIES[path]}
        status, headers, _ = await w.post(body, path + "?a=b")
        assert status == 200
        assert "x-lmetric-decision" in headers
        [request] = w.engines[0].requests
        assert (request.method, request.path) == ("POST", path + "?a=b")
        assert request.body == orjson.dumps(body)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (BATCH, "kv_transfer_params"),
        (BATCH, "vllm_xargs.kv_transfer_params"),
        (BATCH, "metadata[1].kv_transfer_params"),
        (GENERATE, "kv_transfer_params"),
        (GENERATE, "sampling_params.extra_args.kv_transfer_params"),
        (GENERATE, "sampling_params.extra_args.kv_cache_report_mode"),
        ("/v1/chat/completions/render", "kv_transfer_params"),
        ("/v1/responses/render", "ec_transfer_params"),
        ("/v1/chat/completions/derender", "generate_response.kv_transfer_params"),
        ("/v1/chat/completions/derender", "chat_request.vllm_xargs.kv_transfer_params"),
        ("/v1/chat/completions/derender", "generate_chunk.kv_transfer_params"),
        ("/v1/completions/derender", "generate_responses[1].kv_transfer_params"),
        ("/v1/completions/derender", "completion_request.kv_transfer_params"),
    ],
)
async def test_kv_transfers_of_clients_are_refused_wherever_they_nest(path: str, place: str) -> None:
    async with world(1) as w:
        body = orjson.loads(orjson.dumps({"model": "tiny", **BODIES[path]}))
        at = body
        *outer, name = place.split(".")
        for each in outer:
            each, _, index = each.partition("[")
            at = at.setdefault(each, [{}, {}] if index else {})
            if index:
                at.append({})
                at = at[int(index.rstrip("]"))]
        at[name] = {"do_remote_prefill": True}
        assert name in INTERNAL_FIELDS
        status, _, answer = await w.post(body, path)
        assert status == 400
        assert answer["error"]["param"] == place
        assert "not accepted from clients" in answer["error"]["message"]
        assert not w.engines[0].requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (BATCH, {"messages": [user("a")]}, None),
        (BATCH, {"messages": []}, None),
        (BATCH, {"messages": "a"}, None),
        (GENERATE, {"token_ids": [1.5]}, None),
        (GENERATE, {"token_ids": "a"}, None),
        (GENERATE, {"token_ids": [1], "stream": 1}, None),
        (GENERATE, {"token_ids": [1], "cache_salt": 1}, None),
        ("/v1/completions/derender", {"model": 1}, "model"),
    ],
)
async def test_the_engine_judges_all_but_the_model(
    path: str, body: dict[str, Any], param: str | None
) -> None:
    """``param``: what the router refuses; None: the body reaches the engine."""
    async with world(1) as w:
        status, _, answer = await w.post({"model": "tiny", **body}, path)
        if param is None:
            [request] = w.engines[0].requests
            assert orjson.loads(request.body) == {"model": "tiny", **body}
        else:
            assert (status, answer["error"]["param"]) == (400, param)
            assert not w.engines[0].requests


async def test_a_batch_counts_with_all_its_conversations() -> None:
    async with world([FakeEngine(behave=hang)], policy="lmetric") as w:
        [model] = w.server.fleet.models
        tokens = []
        for messages in ([[user("a" * 4000)]], [[user("a" * 4000)]] * 5):
            task = asyncio.create_task(w.post({"messages": messages, "stream": True}, BATCH))
            await w.engines[0].asked(len(tokens) + 1)
            tokens.append(float(model.router.indicators()["tokens"][0]))
            task.cancel()
            await w.settled()
        assert 4.5 < tokens[1] / tokens[0] < 5.5


async def test_a_batch_is_matched_by_the_tokens_of_its_first_conversation() -> None:
    folder = TOKENIZER_PATH.parent
    first, second = [user("river castle " * 200)], [user("winter " * 100)]
    tokens = len(PromptTokenizer.load(folder).chat({"messages": first}))
    async with world(2, policy="lmetric", tokenizer=str(folder)) as w:
        [model] = w.server.fleet.models
        for messages, path in ((first, "/v1/chat/completions"), ([first, second], BATCH)):
            status, headers, _ = await w.post({"messages": messages}, path)
            assert status == 200
        record = model.router.explain(decision_id(headers))
        assert record is not None
        assert record["predicted_cached_tokens"] == (tokens - 1) // 16 * 16
        assert tokens + 50 < record["prompt_tokens"] < tokens + 400
        assert not model.tokenizers.text_prompts


async def test_token_ids_match_the_prefix_that_a_completion_cached() -> None:
    ids = list(range(640))
    async with world(2, policy="lmetric") as w:
        for path in (GENERATE, "/v1/completions"):
            seen = []
            for _ in range(3):
                body = {"token_ids": ids, "sampling_params": {}} if path == GENERATE else {"prompt": ids}
                status, headers, _ = await w.post({"model": "tiny", **body}, path)
                assert status == 200
                record = w.server.fleet.models[0].router.explain(decision_id(headers))
                assert record is not None
                seen.append((record["instance"], record["predicted_cached_tokens"], record["prompt_tokens"]))
            first = (0 if path == GENERATE else 624, 640)  # the last block is computed again
            assert seen[0][1:] == first
            assert len({each[0] for each in seen}) == 1
            assert [each[1:] for each in seen[1:]] == [(624, 640)] * 2
        # Prompts with images match nothing, because their placeholders have equal token ids.
        body = {"token_ids": ids, "sampling_params": {}, "features": {"mm_hashes": {"image": ["x"]}}}
        _, headers, _ = await w.post(body, GENERATE)
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert (record["predicted_cached_tokens"], record["prompt_tokens"]) == (0, 641)


async def test_a_stream_of_token_ids_is_forwarded_and_counted() -> None:
    events = [
        {"request_id": "g", "choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": None}]},
        {"request_id": "g", "choices": [{"index": 0, "token_ids": [3], "finish_reason": "length"}]},
    ]
    sent = [chunk(event(each)) for each in events]
    told = chunk(event({"choices": [], "usage": usage(3, 3)}) + event(b"[DONE]")) + b"0\r\n\r\n"
    whole = FakeEngine(behave=says(STREAM_HEAD, *sent, told, then="keep"))
    cut = says(STREAM_HEAD, sent[0], b"0\r\n\r\n")
    async with world([whole]) as w:
        body = {"token_ids": [1, 2, 3], "stream": True, "sampling_params": {}}
        status, headers, got = await w.post(body, GENERATE)
        assert status == 200
        expected = b"".join(event(each) for each in events) + event({"choices": [], "usage": usage(3, 3)})
        assert got == expected + event(b"[DONE]")
        await w.settled()
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert record["output_tokens"] == 3
        whole.behave = cut
        _, _, got = await w.post(body, GENERATE)
        assert b"in the middle of its answer" in got


@pytest.mark.parametrize("stream", [False, True])
async def test_an_emulated_engine_answers_token_ids_as_a_completion(stream: bool) -> None:
    async with emulated() as engine, routed(engine) as w:
        await connected(w)
        prompt = list(range(100, 164))
        fields = {"model": "tiny", "stream": stream, "stream_options": {"include_usage": True}}
        fields |= {} if stream else {"stream_options": None}
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 5}, "return_token_ids": True}
        status, headers, got = await w.post(fields | body, GENERATE)
        assert status == 200
        router = w.server.fleet.models[0].router
        await w.until(lambda: router.cached_tokens(lm.Request(token_ids=prompt))[0] == 48)  # KV events
        other = {"prompt": prompt, "max_tokens": 5, "return_token_ids": True}
        _, _, expected = await w.post(fields | other, "/v1/completions")

        def summary(answer: Any) -> tuple[list[int], list[str], list[int], list[Any]]:
            parts = [answer]
            if stream:
                assert answer.endswith(b"data: [DONE]\n\n")
                parts = [orjson.loads(each[6:]) for each in answer.split(b"\n\n")[:-2]]
            choices = [choice for part in parts for choice in part["choices"]]
            holders = [*parts, *choices]
            return (
                [token for choice in choices for token in choice["token_ids"]],
                [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
                next(each["prompt_token_ids"] for each in holders if each.get("prompt_token_ids")),
                [part["usage"]["completion_tokens"] for part in parts if part.get("usage")],
            )

        assert summary(got) == summary(expected)
        assert summary(got)[1:] == (["length"], prompt, [5])
        await w.settled()
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert record["output_tokens"] == 5
        # The completion hit what the request with token ids left in the cache.
        record = w.server.fleet.models[0].router.explain(decision_id(headers) + 1)
        assert record is not None
        assert record["cached_tokens"] == record["predicted_cached_tokens"] == 48
        wrong = {"token_ids": prompt, "sampling_params": {"n": 2}}
        assert (await w.post({"model": "tiny", **wrong}, GENERATE))[0] == 400
        wrong = {"token_ids": [10**9], "sampling_params": {}}
        assert (await w.post({"model": "tiny", **wrong}, GENERATE))[0] == 400


async def test_only_paths_with_a_salt_reach_engines_salted(keys: Path) -> None:
    async with tenants(keys, 1, "alice") as w:
        for path, body in BODIES.items():
            status, _, _ = await w.post({"model": "tiny", **body}, path, ALICE)
            assert status == 200
            assert ("cache_salt" in w.engines[0].requests[-1].json) == (path in (BATCH, GENERATE)), path


# Stored responses.


class Responses(FakeEngine):
    """An engine with a store of responses, as vLLM 0.32 with VLLM_ENABLE_RESPONSES_API_STORE."""

    def __init__(self, output: Sequence[str] = ()) -> None:
        super().__init__()
        self.output = output
        self.stored: dict[str, Any] = {}
        self.refuse: int | None = None

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        path, _, query = request.path.partition("?")
        if not path.startswith(RESPONSES):
            return await super()._answer(request, writer)
        self.requests.append(request)
        if path == RESPONSES:
            writer.write(self._create(request.json))
            return True
        name, _, action = path.removeprefix(f"{RESPONSES}/").partition("/")
        if request.method == "DELETE":
            writer.write(plain(405, {"detail": "Method Not Allowed"}))
        elif name not in self.stored:
            writer.write(plain(404, self._unknown(name)))
        elif action == "cancel":
            writer.write(plain(400, {"error": {"message": "Cannot cancel a synchronous response."}}))
        elif "stream=true" in query:
            done = event({"type": "response.completed", "response": self.stored[name]})
            writer.write(STREAM_HEAD + chunk(done) + b"0\r\n\r\n")
        else:
            writer.write(plain(200, self.stored[name]))
        return True

    @staticmethod
    def _unknown(name: str) -> dict[str, Any]:
        return {"error": {"message": f"Response with id '{name}' not found.", "code": 404}}

    def _create(self, body: dict[str, Any]) -> bytes:
        previous = body.get("previous_response_id")
        if self.refuse is not None:
            return plain(self.refuse, {"error": {"message": "no", "code": self.refuse}})
        if previous is not None and previous not in self.stored:
            return plain(404, self._unknown(previous))
        response = {"id": body["request_id"], "engine": self.name, "output": self.output, "usage": None}
        if body.get("store", True):
            self.stored[body["request_id"]] = response
        if not body.get("stream"):
            return plain(200, response)
        created = event({"type": "response.created", "response": response})
        return STREAM_HEAD + chunk(created) + chunk(event({"type": "response.completed"})) + b"0\r\n\r\n"


async def created(w: World, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    status, _, answer = await w.post({"model": "tiny", "input": "a", **fields}, RESPONSES, headers)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


class Numbering(Responses):
    """An engine that numbers its responses, and ignores the router's IDs."""

    def _create(self, body: dict[str, Any]) -> bytes:
        return super()._create({**body, "request_id": f"own-{len(self.stored)}"})


@pytest.mark.parametrize("size", [1, 400_000], ids=["short", "long"])
@pytest.mark.parametrize("stream", [False, True])
async def test_engines_may_store_responses_under_ids_of_their_own(stream: bool, size: int) -> None:
    async with world([Numbering(["x" * size]), Numbering(["x" * size])]) as w:
        await created(w, store=False)  # the next one goes to the second engine
        _, headers, answer = await w.post({"model": "tiny", "input": "a", "stream": stream}, RESPONSES)
        assert b'"own-0"' in (answer if stream else orjson.dumps(answer))
        for _ in range(2):
            _, next_headers, _ = await w.post(
                {"model": "tiny", "input": "b", "previous_response_id": "own-0"}, RESPONSES
            )
            assert next_headers["x-lmetric-instance"] == headers["x-lmetric-instance"]
        assert (await ask(w, "GET", f"{RESPONSES}/own-0"))[0] == 200


async def test_no_tenant_reads_a_response_of_another_under_an_id_that_an_engine_repeats(keys: Path) -> None:
    engine = Numbering()
    async with tenants(keys, [engine]) as w:
        await created(w, ALICE)
        engine.stored.clear()  # the engine restarts, and counts from 0
        await created(w, BOB)
        assert (await ask(w, "GET", f"{RESPONSES}/own-0", ALICE))[0] == 404


async def ask(
    w: World, method: str, path: str, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    async with w.client.request(method, w.url + path, headers=headers) as response:
        got = await response.read()
        low = {name.lower(): value for name, value in response.headers.items()}
        return response.status, low, orjson.loads(got) if response.content_type == "application/json" else got


async def test_a_stored_response_is_found_on_its_engine() -> None:
    async with world([Responses() for _ in range(3)]) as w:
        made = [await created(w) for _ in range(6)]
        assert sorted(each["engine"] for each in made) == ["e0", "e0", "e1", "e1", "e2", "e2"]
        for each in made:
            path = f"{RESPONSES}/{each['id']}"
            status, headers, got = await ask(w, "GET", path)
            assert (status, got) == (200, each)
            assert headers["x-lmetric-instance"] == each["engine"]
            assert headers["x-request-id"]
            status, headers, got = await ask(w, "GET", f"{path}?stream=true&starting_after=1")
            assert status == 200
            assert headers["content-type"] == SSE.decode()
            assert each["id"].encode() in got
            assert (await ask(w, "POST", f"{path}/cancel"))[0] == 400
            assert (await ask(w, "DELETE", path))[0] == 405, "as the engine answers"
            assert (await ask(w, "GET", path))[0] == 200
            for _ in range(3):
                following = await created(w, previous_response_id=each["id"])
                assert following["engine"] == each["engine"]
        engine = next(e for e in w.engines if e.name == made[0]["engine"])
        seen = {(request.method, request.path) for request in engine.requests}
        path = f"{RESPONSES}/{made[0]['id']}"
        assert {("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")} <= seen
        assert ("GET", f"{path}?stream=true&starting_after=1") in seen


async def test_a_stream_is_found_by_the_id_of_its_first_event() -> None:
    async with world([Responses(), Responses()]) as w:
        _, _, got = await w.post({"model": "tiny", "input": "a", "stream": True}, RESPONSES)
        first = orjson.loads(got.partition(b"data: ")[2].partition(b"\n")[0])["response"]
        status, _, answer = await ask(w, "GET", f"{RESPONSES}/{first['id']}")
        assert (status, answer["engine"]) == (200, first["engine"])


async def test_a_response_belongs_to_the_tenant_that_made_it(keys: Path) -> None:
    async with tenants(keys, [Responses(), Responses()]) as w:
        mine = await created(w, ALICE)
        path = f"{RESPONSES}/{mine['id']}"
        assert (await ask(w, "GET", path, ALICE))[0] == 200
        unknown = "resp_" + "0" * len(mine["id"].removeprefix("resp_"))
        sent = sum(len(engine.requests) for engine in w.engines)
        for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            theirs = await ask(w, method, path + end, BOB)
            nobodys = await ask(w, method, f"{RESPONSES}/{unknown}{end}", BOB)
            assert theirs[0] == nobodys[0] == 404
            assert (
                orjson.dumps(theirs[2]).decode().replace(mine["id"], unknown)
                == orjson.dumps(nobodys[2]).decode()
            )
            assert theirs[2]["error"]["code"] == "response_not_found"
            assert theirs[1].keys() == nobodys[1].keys()
        body = {"model": "tiny", "input": "b"}
        status, _, answer = await w.post(body | {"previous_response_id": mine["id"]}, RESPONSES, BOB)
        assert (status, answer["error"]["code"]) == (404, "response_not_found")
        # Nobody can overwrite a response by choosing its id.
        status, _, answer = await w.post(body | {"request_id": mine["id"]}, RESPONSES, BOB)
        assert (status, answer["error"]["param"]) == (400, "request_id")
        # Engines take the last `store`, which is too long for the router's short reading.
        twice = b'{"input": "b", "request_id": "%b", "store": false, "store": 1.%b}'
        status, _, answer = await w.post(twice % (mine["id"].encode(), b"0" * 4200), RESPONSES, BOB)
        assert (status, answer["error"]["param"]) == (400, "request_id")
        assert sum(len(engine.requests) for engine in w.engines) == sent
        assert (await ask(w, "GET", path))[0] == 401
        assert (await ask(w, "GET", path, ALICE))[2] == mine


async def test_without_tenants_clients_may_choose_ids() -> None:
    async with world([Responses()]) as w:
        assert (await created(w, request_id="mine/1 é"))["id"] == "mine/1 é"
        assert (await ask(w, "GET", f"{RESPONSES}/mine%2F1%20%C3%A9"))[0] == 404, "the engine's own answer"
        assert w.engines[0].requests[-1].path.endswith("/mine%2F1%20%C3%A9")
        status, _, answer = await w.post({"input": "a", "request_id": "x" * 257}, RESPONSES)
        assert (status, answer["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize("why", ["not stored", "refused"])
async def test_what_no_engine_stored_is_unknown(why: str) -> None:
    engine = Responses()
    async with world([engine]) as w:
        if why == "refused":
            engine.refuse = 400
            await w.post({"model": "tiny", "input": "a"}, RESPONSES)
            name = engine.requests[-1].json["request_id"]
            assert len(w.server.front.stored.responses) == 0
        else:
            status, _, _ = await w.post({"input": "a", "store": False, "request_id": "x"}, RESPONSES)
            assert status == 200
            name = "x"
        assert (await ask(w, "GET", f"{RESPONSES}/{name}"))[0] == 404
        assert engine.requests[-1].method == "POST", "the router answered"


async def test_the_oldest_responses_are_forgotten(keys: Path) -> None:
    limits = {"max_stored_responses": 4, "max_stored_responses_per_tenant": 3}
    async with tenants(keys, [Responses()], limits=limits) as w:
        alices = [(await created(w, ALICE))["id"] for _ in range(4)]

        async def known(names: list[str], headers: dict[str, str]) -> list[bool]:
            return [(await ask(w, "GET", f"{RESPONSES}/{name}", headers))[0] == 200 for name in names]

        assert await known(alices, ALICE) == [False, True, True, True]
        bobs = [(await created(w, BOB))["id"] for _ in range(2)]
        assert await known(bobs, BOB) == [True, True]
        assert await known(alices, ALICE) == [False, False, True, True]


async def test_the_answer_if_the_engine_is_gone() -> None:
    async with world([Responses(), Responses()], health={"interval": 3600}) as w:
        one, two = await created(w), await created(w)
        [model] = w.server.fleet.models
        engines = {engine.name: engine for engine in w.engines}
        # It does not answer.
        await engines[one["engine"]].stop()
        status, headers, answer = await ask(w, "GET", f"{RESPONSES}/{one['id']}")
        assert (status, answer["error"]["code"]) == (502, "refused")
        assert headers["retry-after"] == "1"
        assert one["engine"] in answer["error"]["message"]
        body = {"model": "tiny", "input": "b", "previous_response_id": one["id"]}
        sent = len(engines[two["engine"]].requests)
        for _ in range(2):  # the second time, the router knows that the engine is down
            status, _, answer = await w.post(body, RESPONSES)
            assert status in (502, 503)
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert "previous_response_id" in answer["error"]["message"]
        assert len(engines[two["engine"]].requests) == sent, "no other engine is tried"
        # It was removed.
        model.remove(two["engine"])
        for status, _, answer in (
            await ask(w, "GET", f"{RESPONSES}/{two['id']}"),
            await w.post(body | {"previous_response_id": two["id"]}, RESPONSES),
        ):
            assert (status, answer["error"]["code"]) == (404, "response_not_found")
            assert "was removed" in answer["error"]["message"]


async def test_a_draining_engine_shows_its_responses_and_starts_none() -> None:
    async with world([Responses(), Responses()]) as w:
        one = await created(w)
        engine = w.server.fleet.models[0].engines[one["engine"]]
        engine.draining = True
        engine.hold()
        assert (await ask(w, "GET", f"{RESPONSES}/{one['id']}"))[0] == 200
        body = {"model": "tiny", "input": "b", "previous_response_id": one["id"]}
        status, headers, answer = await w.post(body, RESPONSES)
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert "draining" in answer["error"]["message"]
        assert headers["retry-after"]


async def test_a_response_is_continued_by_the_model_that_made_it() -> None:
    small, large = Responses(), Responses()
    large.model = "large"
    async with world([small, large]) as w:
        one = await created(w)
        body = {"model": "large", "input": "b", "previous_response_id": one["id"]}
        status, _, answer = await w.post(body, RESPONSES)
        assert (status, answer["error"]["param"]) == (400, "previous_response_id")
        assert "'tiny', not 'large'" in answer["error"]["message"]


@pytest.mark.parametrize("behave", ["hang", "cut"])
async def test_an_engine_that_fails_while_a_response_is_read(behave: str) -> None:
    class Failing(Responses):
        async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
            if request.method != "GET" or not request.path.startswith(RESPONSES):
                return await super()._answer(request, writer)
            if behave == "hang":
                await self.until_left(writer)
            else:
                writer.write(STREAM_HEAD + chunk(event(OPENING)))
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.transport.abort()
            return False

    async with world([Failing()], timeouts={"first_byte": 0.3}) as w:
        one = await created(w)
        status, _, answer = await ask(w, "GET", f"{RESPONSES}/{one['id']}?stream=true")
        if behave == "hang":
            assert (status, answer["error"]["code"]) == (504, "timeout")
            await w.until(lambda: w.engines[0].left)
        else:
            assert status == 200
            begun, _, end = answer.partition(b"event: error\ndata: ")
            assert begun == event(OPENING)
            error = orjson.loads(end)
            assert (error["type"], error["code"]) == ("error", "reset")
            assert "in the middle of its answer" in error["message"]


async def test_a_client_that_leaves_ends_the_request_at_the_engine() -> None:
    class Hanging(Responses):
        async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
            if request.method == "GET" and request.path.startswith(RESPONSES):
                self.requests.append(request)
                await self.until_left(writer)
                return False
            return await super()._answer(request, writer)

    async with world([Hanging()]) as w:
        one = await created(w)
        task = asyncio.create_task(ask(w, "GET", f"{RESPONSES}/{one['id']}"))
        await w.engines[0].asked(2)
        task.cancel()
        await w.until(lambda: w.engines[0].left)


async def test_a_server_that_stops_ends_requests_for_stored_responses() -> None:
    class Endless(Responses):
        async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
            if request.method != "GET" or not request.path.startswith(RESPONSES):
                return await super()._answer(request, writer)
            self.requests.append(request)
            writer.write(STREAM_HEAD + chunk(event(OPENING)))
            await self.until_left(writer)
            return False

    async with world([Endless()]) as w:
        one = await created(w)
        async with w.client.get(f"{w.url}{RESPONSES}/{one['id']}?stream=true") as response:
            assert b"response.created" in await response.content.readany()
            await w.server.stop()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await w.until(lambda: w.engines[0].left)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("PUT", "/x", "GET, DELETE"), ("POST", "/x", "GET, DELETE"), ("GET", "/x/cancel", "POST")],
)
async def test_other_methods_are_refused(method: str, path: str, allow: str) -> None:
    async with world(1) as w:
        status, headers, _ = await ask(w, method, RESPONSES + path)
        assert (status, headers["allow"]) == (405, allow)
        for unknown in ("/x/y", "//cancel", "/x/cancel/y"):
            assert (await ask(w, "GET", RESPONSES + unknown))[0] == 404


async def test_browsers_may_read_stored_responses() -> None:
    async with world([Responses()], cors={"origins": ["http://a.example"]}) as w:
        one = await created(w)
        fields = {"origin": "http://a.example", "access-control-request-method": "DELETE"}
        status, headers, _ = await ask(w, "OPTIONS", f"{RESPONSES}/{one['id']}", fields)
        assert (status, headers["access-control-allow-methods"]) == (204, "GET, DELETE")
        _, headers, _ = await ask(w, "GET", f"{RESPONSES}/{one['id']}", {"origin": "http://a.example"})
        assert headers["access-control-allow-origin"] == "http://a.example"


def test_the_paths_of_stored_responses() -> None:
    def methods(path: str) -> tuple[str, ...] | None:
        found = stored_response(path)
        return None if found is None else found.methods

    assert methods("/v1/responses/resp_1") == ("GET", "DELETE")
    assert methods("/v1/responses/resp_1/cancel") == ("POST",)
    for other in (*RELAYED, "/v1/responses/", "/v1/responses/a/b", "/v1/responses//cancel", "/v1/models/a"):
        assert methods(other) is None, other


def test_the_map_of_responses_keeps_to_its_limits() -> None:
    limits = with_constants(Limits, max_stored_responses=50, max_stored_responses_per_tenant=20)
    stored, order = StoredResponses(limits), []

    def expected() -> list[tuple[str, str]]:
        kept: list[tuple[str, str]] = []
        for each in order:
            if each in kept:
                kept.remove(each)
            own = [other for other in kept if other[0] == each[0]]
            if len(own) >= 20:
                kept.remove(own[0])
            elif len(kept) >= 50:
                kept.pop(0)
            kept.append(each)
        return kept

    for number in range(400):
        # Some ids come again, and tenants have different shares.
        each = (f"t{(number * number) % 7 % 5}", str(number % 90))
        stored.add(*each, Holder("tiny", f"e{number}"))
        order.append(each)
    kept = expected()
    assert len(stored) == len(kept) <= 50
    for each in set(order):
        assert (stored.get(*each) is not None) == (each in kept)
    for each in kept:
        stored.forget(*each)
        stored.forget(*each)
    assert len(stored) == 0
    assert not stored._of_tenant


# The pinned instance of a request, in the library.


def _router() -> lm.Router:
    router = lm.Router("round_robin")
    for name in ("a", "b", "c"):
        router.add_instance(name)
    return router


def test_a_pinned_request_goes_to_its_instance_or_nowhere() -> None:
    router = _router()
    request = lm.Request(prompt_tokens=10, instances=["b"])
    assert request.instances == ["b"]
    assert 'instances=["b"]' in repr(request)
    for _ in range(4):
        decision, ticket = router.route(request, now=1.0)
        assert decision.instance == "b"
        assert decision.ranking() == ["b"]
        assert ticket.failed("refused", now=1.0) is None, "no other instance may take it"
    refused: list[tuple[str, Callable[[], object]]] = [
        ("is not healthy", lambda: router.update_instance("b", healthy=False)),
        ("is draining", lambda: router.update_instance("b", healthy=True, draining=True)),
        ("is not in the router", lambda: router.remove_instance("b")),
    ]
    for why, change in refused:
        change()
        with pytest.raises(lm.NoInstanceError, match=f'instance "b" {why}'):
            router.route(request, now=2.0)
    assert router.in_flight() == 0


def test_the_page_lists_every_relayed_path() -> None:
    """docs/reference/engines.md: the table has all paths, with their use of cache_salt."""
    page = (Path(__file__).parents[1] / "docs/reference/engines.md").read_text()
    section = page.partition("## Relayed paths")[2].partition("**Parts of a prompt.**")[0]
    words = {"yes": "salt", "no": "refused", "not needed": "no_cache", "vLLM": "salt_by_kind"}
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| `")]
    told = {path.strip("` "): row[-1] for row in rows for path in row[0].split(",")}
    assert {path: words[salt] for path, salt in told.items()} == {
        path: each.isolated_by for path, each in RELAYED.items()
    }
