"""A router that splits requests between emulated engines, and single engines to compare."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator
from typing import Any

import orjson
from hypothesis import strategies as st

from lmetric.options import SplitAt
from lmetric_lab.emulated import EngineOptions, EngineServer
from pd_world import PROMPT, Pd, nixl, pd
from server_world import decision_id

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Text whose tokens are parts of characters, and words.
PROMPTS = st.lists(
    st.sampled_from(["river", "the", "🙂", "Zürich", "don't", "日本", "\n", "a"]), max_size=60
).map(lambda words: " ".join(words) + " .")


def both(**changes: Any) -> EngineOptions:
    """An engine that allows splits at every token."""
    given = {"kv_bidirectional": True, "kv_load_failure_policy": "recompute", "clock_speed": 20.0}
    return nixl("both", **(given | changes))


def body_of(path: str, prompt: str = PROMPT, **changes: Any) -> dict[str, Any]:
    """Returns a request."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": "emulated", "max_tokens": 24, **asked, **changes}


def forced(at: float | None) -> SplitAt | None:
    """Splits every request at a fraction; None: by the policy."""
    return None if at is None else SplitAt(fraction=at)


@contextlib.asynccontextmanager
async def split(*options: EngineOptions, at: float | None = 0.9, **config: Any) -> AsyncIterator[Pd]:
    """Starts such a router. It splits every request at this fraction."""
    kinds = options or (both(), both(), both())
    given = {"tokenizer": None, "policy": "round_robin", "split": forced(at)}
    async with pd(*kinds, **(given | config)) as world:
        model = world.server.fleet.models[0]
        await world.until(lambda: all(engine.identified for engine in model.engines.values()))
        yield world


def renders_otherwise(world: Pd, name: str) -> None:
    """Makes an engine tokenize chats differently from the router."""
    api = world.engines[name]._api
    render = api._text.render_chat

    def other(messages: Any, **how: Any) -> str:
        return "As it was said: " + str(render(messages, **how))

    text = copy.copy(api._text)
    text.render_chat = other  # type: ignore[method-assign]
    api._text = text


def heard(raw: bytes) -> dict[str, Any]:
    """Returns a stream's text, token ids, usage, end, and fields that must not change."""
    said: dict[str, Any] = {"text": "", "ids": [], "usage": None, "finish": None, "same": set(), "roles": 0}
    *events, end, empty = raw.split(b"\n\n")
    assert (end, empty) == (b"data: [DONE]", b"")
    for event in events:
        chunk = orjson.loads(event.removeprefix(b"data: "))
        if "error" in chunk:
            said["error"] = chunk["error"]
            continue
        assert not chunk.get("kv_transfer_params")
        said["same"].add((chunk["id"].partition("-")[0], chunk["object"], chunk["model"]))
        if not chunk["choices"]:
            said["usage"] = chunk["usage"]
            continue
        (choice,) = chunk["choices"]
        delta = choice.get("delta", choice)
        said["roles"] += "role" in delta
        said["text"] += delta.get("content", delta.get("text")) or ""
        said["ids"] += choice.get("token_ids") or []
        assert said["finish"] is None
        said["finish"] = choice["finish_reason"]
        said["stop"] = choice.get("stop_reason")
    return said


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns a whole answer's text, token ids, usage, end, and fields that must not change."""
    (choice,) = answer["choices"]
    assert not answer.get("kv_transfer_params")  # transfer fields must not reach clients
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {
        "text": text,
        "ids": choice.get("token_ids") or [],
        "usage": answer["usage"],
        "finish": choice["finish_reason"],
        "stop": choice["stop_reason"],
        "same": {(answer["id"].partition("-")[0], answer["object"], answer["model"])},
        "keys": (set(answer), set(choice), set(choice.get("message", ()))),
    }


async def asked(world: Pd, path: str, body: dict[str, Any], url: str | None = None) -> dict[str, Any]:
    """Returns the answer as the client gets it, with the decision record if the router answered."""
    async with world.client.post((url or world.url) + path, json=body) as response:
        raw = await response.read()
        assert response.status == 200, raw
        said = heard(raw) if body.get("stream") else told(orjson.loads(raw))
        if url is None:
            router = world.server.fleet.models[0].router
            said["record"] = router.explain(decision_id(response.headers))
            said["headers"] = dict(response.headers)
    return said


async def alone(world: Pd, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of a single engine."""
    async with EngineServer(EngineOptions(port=0, clock_speed=100.0)) as engine:
        return await asked(world, path, body, engine.url)


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Checks that two answers are equal for a client, except for the cached tokens."""
    for name in ("text", "ids", "finish", "stop", "same", "roles", "keys"):
        assert one.get(name) == other.get(name), name
    usages = [
        said["usage"] and {k: v for k, v in said["usage"].items() if "details" not in k}
        for said in (one, other)
    ]
    assert usages[0] == usages[1]
