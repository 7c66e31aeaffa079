"""Aliases: names of the configuration that stand for models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import ServerConfig
from lmetric.server.app import Reloads
from lmetric.server.fleet.aliases import Aliases
from server_world import FakeEngine, World, hang, strict, world

SMALL = {"id": "small", "root": "/small", "max_model_len": 1000}
LARGE = {"id": "large", "root": "/large", "max_model_len": 5000}
ALIASES = {"gpt": "large", "mixed": {"small": 3, "large": 1}}


def fakes(*cards: dict[str, Any]) -> list[FakeEngine]:
    return [FakeEngine(cards=[card], behave=strict) for card in cards]


def models(w: World) -> list[str]:
    """The names that the engines got, in the order of the engines."""
    return [request.json["model"] for engine in w.engines for request in engine.requests]


def read_lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.rglob("*.jsonl"))
    return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]


def talk(first: str, turns: int = 1) -> dict[str, Any]:
    """A request of a conversation, which grows by turns."""
    messages = [{"role": "system", "content": "You help. " * 900}, {"role": "user", "content": first}]
    for turn in range(turns):
        messages += [{"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "more"}]
    return {"model": "mixed", "messages": messages}


async def test_the_engine_gets_the_models_name_and_nothing_else_changes() -> None:
    async with world(fakes(LARGE), aliases=ALIASES) as w:
        body = b'{ "prompt":"x",\\n "model" : "gpt", "max_tokens" :1, "unknown": [1.50, "\\\\u00e9"] }'
        status, headers, _ = await w.post(body.replace(b"\\n", b"\n").replace(b"\\\\", b"\\"))
        assert (status, headers["x-lmetric-instance"]) == (200, "e0")
        sent = w.engines[0].requests[0].body
        assert orjson.loads(sent)["model"] == "large"
        assert b'"max_tokens" :1' in sent
        assert b'"unknown": [1.50, "\\u00e9"]' in sent


async def test_aliases_stand_in_the_list_of_models() -> None:
    async with world(fakes(SMALL, LARGE), aliases=ALIASES | {"none": "gone"}) as w:
        cards = {card["id"]: card for card in orjson.loads((await w.get("/v1/models"))[1])["data"]}
        assert list(cards) == ["small", "large", "gpt", "mixed"]
        assert cards["gpt"] | {"id": "large", "root": "/large"} == cards["large"]
        assert (cards["gpt"]["root"], cards["mixed"]["root"]) == ("large", "small")
        assert (cards["gpt"]["max_model_len"], cards["mixed"]["max_model_len"]) == (5000, 1000)
        assert orjson.loads((await w.get("/v1/models/mixed"))[1]) == cards["mixed"]
        assert (await w.get("/v1/models/none"))[0] == 404


async def test_weights_hold_over_many_conversations_and_each_keeps_its_model() -> None:
    aliases = Aliases({"mixed": {"small": 3.0, "large": 1.0}})
    known = {"small", "large"}
    chosen = [aliases.choose("mixed", known, lambda n=n: b"%d" % n) for n in range(10_000)]
    assert abs(chosen.count("large") / 10_000 - 0.25) < 0.01
    again = [aliases.choose("mixed", known, lambda n=n: b"%d" % n) for n in range(10_000)]
    assert again == chosen
    # A third model takes keys, and moves no others.
    more = Aliases({"mixed": {"small": 3.0, "large": 1.0, "new": 1.0}})
    moved = [more.choose("mixed", {*known, "new"}, lambda n=n: b"%d" % n) for n in range(10_000)]
    assert {after for before, after in zip(chosen, moved, strict=True) if before != after} == {"new"}
    assert abs(moved.count("new") / 10_000 - 0.2) < 0.02
    # Without an engine, a model gets none of them.
    assert {aliases.choose("mixed", {"small"}, lambda n=n: b"%d" % n) for n in range(100)} == {"small"}


async def test_a_conversation_keeps_its_model_without_a_session() -> None:
    async with world(fakes(SMALL, LARGE), aliases=ALIASES) as w:
        for number in range(24):
            for turns in range(3):
                status, *_ = await w.post(talk(f"task {number}", turns), path="/v1/chat/completions")
                assert status == 200
        by_first: dict[str, set[str]] = {}
        for engine in w.engines:
            for request in engine.requests:
                by_first.setdefault(request.json["messages"][1]["content"], set()).add(request.json["model"])
        assert all(len(each) == 1 for each in by_first.values())
        assert Counter(next(iter(each)) for each in by_first.values()).keys() == {"small", "large"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
async def test_other_prompts_keep_their_model(path: str) -> None:
    async with world(fakes(SMALL, LARGE), aliases=ALIASES) as w:
        seen: dict[int, set[str | None]] = {}
        for number in range(16):
            for turns in range(3):
                given = talk(f"task {number}", turns)["messages"]
                body: dict[str, Any] = {"model": "mixed", "max_tokens": 5}
                match path:
                    case "/v1/messages":
                        body |= {"system": given[0]["content"], "messages": given[1:]}
                    case "/v1/responses":
                        body |= {"instructions": given[0]["content"], "input": given[1:]}
                    case _:
                        body["prompt"] = f"{number} " * 3000 + "more" * turns
                status, headers, _ = await w.post(body, path=path)
                assert status == 200
                seen.setdefault(number, set()).add(headers["x-lmetric-instance"])
        assert all(len(each) == 1 for each in seen.values())
        assert set.union(*seen.values()) == {"e0", "e1"}


async def test_a_session_keeps_its_model_whatever_it_asks() -> None:
    async with world(fakes(SMALL, LARGE), aliases=ALIASES) as w:
        seen: dict[str, set[str]] = {}
        for number in range(60):
            session = f"s{number % 12}"
            body = {"model": "mixed", "prompt": f"{number}"}
            _, headers, _ = await w.post(body, headers={"x-session-id": session})
            seen.setdefault(session, set()).add(headers["x-lmetric-instance"])
        assert all(len(each) == 1 for each in seen.values())
        assert set.union(*seen.values()) == {"e0", "e1"}


async def test_large_bodies_are_renamed() -> None:
    async with world(fakes(SMALL, LARGE), aliases=ALIASES) as w:
        for size in (10, 600_000):
            status, *_ = await w.post({"prompt": "x" * size, "model": "gpt"})
            assert status == 200
        body = talk("task " + "x" * 600_000, 2)
        names = {(await w.post(body, path="/v1/chat/completions"))[1]["x-lmetric-instance"] for _ in range(4)}
        assert len(names) == 1
        assert models(w).count("large") >= 2


async def test_uploads_are_renamed() -> None:
    form = (
        b'--cut\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\x00\xff gpt\r\n'
        b'--cut\r\ncontent-disposition: form-data; name="model"\r\n\r\ngpt\r\n--cut--\r\n'
    )
    async with world(fakes(LARGE), aliases=ALIASES) as w:
        head = {"content-type": "multipart/form-data; boundary=cut"}
        w.engines[0].behave = None
        await w.post(form, path="/v1/audio/transcriptions", headers=head)
        (request,) = w.engines[0].requests
        assert request.body == form.replace(b"\r\ngpt\r\n", b"\r\nlarge\r\n")


async def test_both_names_are_shown(tmp_path: Path) -> None:
    records = {"path": str(tmp_path)}
    async with world(fakes(LARGE), aliases=ALIASES, records=records) as w:
        await w.post({"model": "gpt", "prompt": "x"})
        await w.post({"model": "large", "prompt": "x"})
        page = (await w.get("/metrics"))[1].decode()
        assert 'lmetric_alias_requests_total{alias="gpt",model="large"} 1' in page
    asked = [line for line in read_lines(tmp_path) if line["type"] == "request"]
    assert [(line["model"], line.get("alias")) for line in asked] == [("large", "gpt"), ("large", None)]


async def test_the_record_of_a_hedge_has_the_alias_too() -> None:
    engines = fakes(LARGE, LARGE)
    engines[0].behave = hang
    async with world(engines, aliases=ALIASES, hedging={"after_seconds": 0.05}) as w:
        status, headers, _ = await w.post({"model": "gpt", "prompt": "x", "stream": True})
        assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        answered = orjson.loads((await w.get(f"/debug/decisions/{headers['x-lmetric-decision']}"))[1])
        first = orjson.loads((await w.get(f"/debug/decisions/{answered['other_attempt']}"))[1])
        assert {first["alias"], answered["alias"]} == {"gpt"}
        assert "; gpt is an alias of large." in first["because"]


async def test_an_alias_without_engine_is_a_problem_with_its_fix() -> None:
    async with world(
        fakes(LARGE, SMALL), aliases={"gpt": "large", "x": "gone", "half": {"small": 1, "no": 1}}
    ) as w:
        problems = orjson.loads((await w.get("/ready"))[1])["warnings"]
        found = {each["reason"]: each["fix"] for each in problems if each["what"] == "alias"}
        assert found == {
            "x: no engine serves gone": "start an engine with that model, or correct the alias",
            "half: no engine serves no": "start an engine with that model, or correct the alias",
        }
        status, _, body = await w.post({"model": "x", "prompt": "x"})
        assert status == 404
        assert body["error"]["message"] == "model 'x' is an alias of 'gone', and no engine serves it"
        assert {(await w.post({"model": "half", "prompt": f"{n}"}))[0] for n in range(8)} == {200}


async def test_a_reload_replaces_the_aliases() -> None:
    async with world(fakes(LARGE, SMALL), aliases={"gpt": "large"}) as w:
        values = w.server.fleet.config.model_dump(exclude_unset=True)
        for aliases in ({"gpt": "small", "new": "large"}, {}):
            config = ServerConfig.model_validate({**values, "aliases": aliases})
            await Reloads(w.server, lambda config=config: config).reload()
            listed = [card["id"] for card in orjson.loads((await w.get("/v1/models"))[1])["data"]]
            assert listed == ["large", "small", *aliases]
            for alias, model in aliases.items():
                assert (await w.post({"model": alias, "prompt": "x"}))[0] == 200
                assert model in models(w)
        assert (await w.post({"model": "gpt", "prompt": "x"}))[0] == 404


async def test_a_model_with_the_name_of_an_alias_keeps_its_name() -> None:
    async with world(fakes(LARGE, SMALL), aliases={"small": "large"}) as w:
        await w.post({"model": "small", "prompt": "x"})
        assert models(w) == ["small"]
        problems = orjson.loads((await w.get("/ready"))[1])["warnings"]
        assert [each["reason"] for each in problems if each["what"] == "alias"] == ["engines serve 'small'"]


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ({"a": "b", "b": "m"}, "aliases.a: it names the alias 'b'; expected names of models"),
        ({"a": "a"}, "aliases.a: it names itself; expected names of models"),
        ({"m": "x"}, "aliases.m: a model has this name; rename the alias"),
        ({"a": {"x": 0}}, "greater than 0"),
        ({"a": {}}, "at least 1 item"),
        ({"a": ""}, "at least 1 character"),
    ],
)
def test_what_cannot_be_an_alias(aliases: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConfig(model="m", aliases=aliases)
