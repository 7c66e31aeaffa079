"""Prompts as tokens in the server: matched prompts, text prompts, and tokenizer threads."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric.config import ServerConfig
from lmetric.server import Server
from lmetric.server.api.request import LARGE_BODY, ParsedRequest
from lmetric.tokens.errors import TokenizerError
from lmetric.tokens.prompt import PromptTokenizer, Text, Tokens
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.server import EngineServer
from server_world import Request, World, decision_id, world
from token_folders import CHATML, INST, byte_level, metaspace, write_folder

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), byte_level(), CHATML)


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"model": "tiny", "messages": messages, **more}


async def record(w: World, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    """Returns the decision record of a successful request."""
    status, headers, answer = await w.post(body, path)
    assert status == 200, answer
    got = w.server.fleet.models[0].router.explain(decision_id(headers))
    assert got is not None
    return got


def asked(w: World) -> list[Request]:
    """Returns the requests of clients at the engine."""
    return [request for request in w.engines[0].requests if request.path != "/tokenize"]


async def test_chats_and_completions_are_matched_by_token(folder: Path) -> None:
    tokenizer = PromptTokenizer.load(folder)
    async with world(1, tokenizer=str(folder), block_size=4) as w:
        first = chat("What is a router?")
        tokens = tokenizer.chat(first)
        assert (await record(w, first))["prompt_tokens"] == len(tokens)
        longer = chat("What is a router?", "It sends requests on.", "Why?")
        got = await record(w, longer)
        # All full blocks that both share: the first prompt ends where the answer continues.
        assert got["predicted_cached_tokens"] == len(tokens) // 4 * 4
        text = {"model": "tiny", "prompt": "<|im_start|>user\nWhat is a router?<|im_end|>\n"}
        got = await record(w, text, "/v1/completions")
        ids = tokenizer.completion(text["prompt"])
        assert got["prompt_tokens"] == len(ids)
        assert got["predicted_cached_tokens"] == len(ids) // 4 * 4
        # Token ids take another path, and match the same blocks.
        ids_given = {"model": "tiny", "prompt": ids.tolist()}
        assert (await record(w, ids_given, "/v1/completions"))["predicted_cached_tokens"] == len(ids) // 4 * 4
        assert not w.server.fleet.models[0].tokenizers.text_prompts


async def test_several_prompts_count_as_load(folder: Path) -> None:
    async with world(1, tokenizer=str(folder)) as w:
        body = {"model": "tiny", "prompt": ["the router", "word " * 400]}
        alone = len(PromptTokenizer.load(folder).completion("the router"))
        assert (await record(w, body, "/v1/completions"))["prompt_tokens"] > alone + 200


async def test_what_cannot_be_predicted_is_matched_as_text_and_counted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", metaspace(), INST)
    async with world(1, tokenizer=str(folder)) as w:
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        odd = [
            {"model": "tiny", "messages": [{"role": "stranger", "content": "hi"}]},
            {"model": "tiny", "messages": [{"role": "user", "content": [image]}]},
            chat("x", truncate_prompt_tokens=1),
        ]
        for body in odd:
            status, _, _ = await w.post(body, CHAT)
            assert status == 200
        assert len(asked(w)) == 3
        assert w.server.fleet.models[0].tokenizers.text_prompts == {
            "template": 1,
            "media": 1,
            "truncation": 1,
        }
        _, metrics = await w.get("/metrics")
        assert b'lmetric_text_prompts_total{model="tiny",reason="media"} 1.0' in metrics
        # The engine judges requests that no engine accepts.
        assert (await w.post({"model": "tiny", "messages": [{"content": "x"}]}, CHAT))[0] == 200
        assert w.server.fleet.models[0].tokenizers.text_prompts["shape"] == 1


# As DeepSeek's template: each system message is added to a text of all of them.
JOINS = (
    "{%- set ns = namespace(system='') %}"
    "{%- for message in messages %}{%- if message.role == 'system' %}"
    "{%- set ns.system = ns.system + message.content %}"
    "{%- endif %}{%- endfor %}{{ ns.system }}"
)


async def test_a_template_that_copies_its_text_for_each_message_is_stopped(tmp_path: Path) -> None:
    """60,000 messages once kept one of the two threads busy for minutes."""
    folder = write_folder(tmp_path / "m", byte_level(), JOINS)

    def systems(count: int) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "system", "content": "a router "}] * count}

    async with world(1, tokenizer=str(folder)) as w:
        counted = w.server.fleet.models[0].tokenizers.text_prompts
        assert (await w.post(systems(100), CHAT))[0] == 200
        assert counted == {}
        assert (await w.post(systems(12_000), CHAT))[0] == 200  # 650 million characters
        assert counted == {"template": 1}


async def test_a_text_of_many_megabytes_is_not_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 MB once took 4 GB of memory, above the limit of the shipped unit and manifest."""
    monkeypatch.setattr("lmetric.server.http.tokenizing.MOST_TEXT_BYTES", 100_000)
    folder = write_folder(tmp_path / "m", byte_level(), CHATML)
    async with world(1, tokenizer=str(folder)) as w:
        counted = w.server.fleet.models[0].tokenizers.text_prompts
        # Bytes count, not characters.
        for length, expected in ((20_000, {}), (20_200, {"length": 4})):
            for word in ("abcd ", "日ab"):
                body = {"model": "tiny", "prompt": word * length}
                assert (await w.post(body, "/v1/completions"))[0] == 200
                assert (await w.post(chat(word * (length - 100)), CHAT))[0] == 200
            assert counted == expected


async def test_off_and_other_paths_stay_text(folder: Path) -> None:
    async with world(1, tokenizer="off") as w:
        model = w.server.fleet.models[0]
        assert (model.tokenizers.current, model.tokenizers.note) == (None, "tokenizer: off")
        assert (await record(w, chat("hi")))["prompt_tokens"]
    async with world(1, tokenizer=str(folder)) as w:
        tokenizer = w.server.fleet.models[0].tokenizers.current
        assert tokenizer is not None
        before = tokenizer.encoder.stats()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert (await w.post(body, "/v1/embeddings"))[0] == 200
        assert tokenizer.encoder.stats() == before


async def test_a_tokenizer_that_cannot_be_used(tmp_path: Path, folder: Path) -> None:
    """If the configuration names it, it is an error. If an engine reports it, it is a note."""
    engine = {"url": "http://127.0.0.1:9", "name": "e"}
    config = {"model": "tiny", "engines": [engine], "tokenizer": str(tmp_path / "gone")}
    with pytest.raises(TokenizerError, match="gone: no such folder"):
        Server(ServerConfig.model_validate(config)).fleet.build()
    async with world(1) as w:
        model = w.server.fleet.models[0]
        await model.tokenizers.follow(str(tmp_path))
        assert model.tokenizers.current is None
        assert "no tokenizer.json" in str(model.tokenizers.note)
        await model.tokenizers.follow("a model")
        assert "'a model' is not a folder of this machine; set tokenizer" in str(model.tokenizers.note)
        await model.tokenizers.follow(str(folder))
        assert model.tokenizers.current is not None
        assert model.tokenizers.note is None


# While a thread tokenizes.


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Makes tokenizer threads wait."""
    go = threading.Event()
    encode = PromptTokenizer.encode

    def slow(self: PromptTokenizer, text: Text, at_most: int | None = None) -> Tokens | None:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(10)
        return encode(self, text, at_most)

    monkeypatch.setattr(PromptTokenizer, "encode", slow)
    yield go
    go.set()


LONG = "some words that are new " * 3000


async def test_long_new_text_waits_for_a_thread_while_others_pass(
    folder: Path, held: threading.Event
) -> None:
    async with world(1, tokenizer=str(folder)) as w:
        long = asyncio.create_task(w.post(chat(LONG), CHAT))
        await w.until(lambda: w.server.front.relays)
        assert w.in_flight() == 0
        status, _, _ = await w.post(chat("short"), CHAT)
        assert status == 200
        assert not long.done()
        held.set()
        status, headers, _ = await long
        assert status == 200
        got = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert got is not None
        assert got["prompt_tokens"] == len(PromptTokenizer.load(folder).chat(chat(LONG)))


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(
    folder: Path, held: threading.Event
) -> None:
    async with world(1, tokenizer=str(folder)) as w:
        with pytest.raises(aiohttp.ServerTimeoutError):
            async with w.client.post(
                w.url + CHAT, json=chat(LONG), timeout=aiohttp.ClientTimeout(sock_read=0.2)
            ):
                pass
        await w.until(lambda: not w.server.front.relays)
        held.set()
        await asyncio.sleep(0.05)
        assert not asked(w)
        assert w.in_flight() == 0
        assert w.server.metrics.requests.requests["tiny", "", 499] == 1


async def test_a_prompt_that_waits_too_long_ends_at_the_longest_duration(
    folder: Path, held: threading.Event
) -> None:
    async with world(1, tokenizer=str(folder), timeouts={"request": 0.2}) as w:
        status, _, answer = await w.post(chat(LONG), CHAT)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert not w.server.front.relays
        held.set()
        assert not asked(w)


async def test_requests_that_wait_count_and_end_with_the_server(folder: Path, held: threading.Event) -> None:
    limits = {"max_concurrent_requests": 1}
    async with world(1, tokenizer=str(folder), limits=limits) as w:
        waiting = asyncio.create_task(w.post(chat(LONG), CHAT))
        await w.until(lambda: w.server.front.relays)
        status, _, answer = await w.post(chat("short"), CHAT)
        assert (status, answer["error"]["code"]) == (503, "too_many")
        await w.server.stop()
        status, _, answer = await waiting
        assert (status, answer["error"]["type"]) == (503, "overloaded_error")
        held.set()


@pytest.mark.parametrize("text", ["short", LONG], ids=["at once", "in a thread"])
async def test_a_failing_tokenizer_fails_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    async with world(1, tokenizer=str(folder)) as w:
        monkeypatch.setattr(PromptTokenizer, "encode", fail)
        status, _, _ = await w.post(chat(text), CHAT)
        assert status == 200
        assert w.server.fleet.models[0].tokenizers.text_prompts == {"tokenizer": 1}


async def test_no_request_goes_on_without_its_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: with API keys, the router removes the priority that a client sets."""

    def fail(_: ParsedRequest) -> None:
        raise RuntimeError("broken")

    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-alice: alice\n")
    monkeypatch.setattr(ParsedRequest, "apply_changes", fail)
    async with world(1, tokenizer=str(folder), auth={"keys_file": keys}) as w:
        for size in (10, 2 * LARGE_BODY):  # at once, and in a thread
            body = chat("x" * size, priority=-5)
            assert (await w.post(body, CHAT, {"authorization": "Bearer sk-alice"}))[0] == 500
        assert not asked(w)


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": 5}
CHANGED = {"type": "tool_removal", "tool": {"name": ["a"]}}
MALFORMED = [
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 2000}}
                    ],
                }
            ]
        },
    ),
    (MESSAGES, {"messages": [{"role": "user", "content": [RESULT]}]}),
    (MESSAGES, {"tools": [{"name": ["a"]}], "messages": [{"role": "system", "content": [CHANGED]}]}),
    (RESPONSES, {"input": "x", "tools": [{"type": "namespace", "tools": [{"type": "function"}]}]}),
]


@pytest.mark.parametrize(("path", "fields"), MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("size", [10, 100_000], ids=["at once", "in a thread"])
async def test_the_engine_judges_malformed_requests(
    folder: Path, path: str, fields: dict[str, Any], size: int
) -> None:
    """Security: some made an error 500 with a traceback in the log."""
    body = {"model": "tiny", "metadata": {"a": "x" * size}, **fields}
    async with world(1, tokenizer=str(folder)) as w:
        assert (await w.post(body, path))[0] == 200
        assert w.server.fleet.models[0].tokenizers.text_prompts == {"tokenizer": 1}


async def test_an_engine_that_makes_other_tokens_is_approximate(tmp_path: Path) -> None:
    """Identification finds it, by the engine's `/tokenize`.

    The page of engines names the prompt.
    """
    other = tmp_path / "other.jinja"
    other.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    async with EngineServer(
        EngineOptions(port=0, kv_events=True, kv_events_endpoint=f"ipc://{tmp_path}/events")
    ) as engine:
        for template, mode in ((None, "exact"), (str(other), "approximate")):
            engines = [{"url": engine.url, "name": "e0"}]
            async with world(0, engines=engines, chat_template=template) as w:
                (page,) = orjson.loads((await w.get("/debug/engines"))[1])
                assert page["mode"] == mode, page
                assert page["tokenizer"]["compared"]
                if template is None:
                    assert page["tokenizer"]["differs"] is None
                else:
                    assert "tokenizes prompts differently from the router: a chat with" in page["mode_reason"]
                    assert "tokens here" in page["tokenizer"]["differs"]
