"""Prompts to tokens: the cache changes no result, and chats are rendered as engines render them."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from turn_guard import of_reference

from lmetric._core import FAST_TOKENIZER
from lmetric.server.api.paths import RELAYED
from lmetric.server.api.request import parse
from lmetric.tokens.errors import NotPredictable, TokenizerError
from lmetric.tokens.hub import find_folder
from lmetric.tokens.prompt import PromptTokenizer
from lmetric.tokens.template import ChatTemplate, TemplateError
from lmetric.tokens.verify import NotVerifiable, verify
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.server import EngineServer
from lmetric_lab.emulated.text import TOKENIZER_PATH
from token_folders import (
    CHATML,
    INST,
    KINDS,
    byte_level,
    make_folder,
    metaspace,
    shipped_folder,
    write_folder,
)

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_folder(tmp_path_factory.mktemp("model"), kind)
        return made[kind]

    return folder_of


INDENTED = "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}"


def nested(levels: int, values: list[Any]) -> dict[str, Any]:
    inner: Any = values
    for _ in range(levels):
        inner = {"a": inner}
    return {"function": inner}


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([nested(190, [1] * 32_000)], "on average"),
        ([nested(190, [1])] * 158, "on average"),
        ([{"function": {}}] * 10 + [nested(1, [1] * 100_000)], "more than 100,000 values"),
    ],
)
def test_an_indent_makes_no_prompt_many_times_longer(tools: list[Any], why: str) -> None:
    template = ChatTemplate(INDENTED, "t")
    began = time.thread_time()
    with pytest.raises(TemplateError, match=why):
        template.render([], tools=tools, variables={})
    assert of_reference(time.thread_time() - began) < 0.05, "about 5 ms on an idle machine"


def test_tools_of_agents_are_indented() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested(9, [schema] * 20)}}] * 60
    text = ChatTemplate(INDENTED, "t").render([], tools=tools, variables={})
    assert text == "".join(json.dumps(tool, indent=4) for tool in tools)


def test_bodies_whose_template_indents_are_rendered_in_a_thread_earlier(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a" * 40_000}]}).encode()
    call = parse(RELAYED["/v1/chat/completions"], body)
    for source, at_once in ((CHATML, True), (INDENTED, False)):
        folder = write_folder(tmp_path / str(at_once), byte_level(), source)
        assert (len(call.body) <= PromptTokenizer.load(folder).rendered_bytes) is at_once


@pytest.mark.parametrize("field", ["add_special_tokens", "add_generation_prompt", "continue_final_message"])
@pytest.mark.parametrize("value", ["false", "0", 0, None])
def test_a_flag_that_is_not_a_bool_is_not_read(
    folder_of: Callable[[str], Path], field: str, value: Any
) -> None:
    """Engines read some texts and numbers as false."""
    ours = _loaded(folder_of("byte-level"), 1 << 20)
    with pytest.raises(NotPredictable, match=field) as raised:
        ours.chat_text({"messages": [{"role": "user", "content": "a"}], field: value})
    assert raised.value.reason == "shape"


# Texts of all kinds: words, spaces in odd places, other scripts, special tokens that users write.
LONG = "a stretch of words that is long enough to be remembered by itself, wherever it may come to stand; "
PIECES = st.sampled_from(
    [
        *(LONG, LONG, LONG + "<|im_start|>", "<s>" + LONG),
        *(
            "the router",
            " sends",
            "  ",
            "\n",
            "\n\n",
            "\t",
            " ",
            "a",
            "don't",
            "12345",
            "日本語",
            "é",
            "e\u0301",
            "🙂",
            "ﬁ½",
        ),
        *(
            "<|im_start|>",
            "<|im_end|>",
            "<s>",
            "</s>",
            "[INST]",
            "<unk>",
            "<think>",
            "<left>",
            "<right>",
            "<norm>",
        ),
        *("<|im_", "start|>", "[IN", "</", "▁", "user", "{}", "\u200b", "\u00a0"),
    ]
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """A conversation that grows turn by turn; at times an earlier message changes or is dropped."""
    messages: list[dict[str, Any]] = []
    turns = []
    for _ in range(draw(st.integers(1, 6))):
        if messages and draw(st.integers(0, 4)) == 0:
            messages[draw(st.integers(0, len(messages) - 1))]["content"] = draw(TEXTS)
        if len(messages) > 2 and draw(st.integers(0, 6)) == 0:
            del messages[0]
        messages.append({"role": "user", "content": draw(TEXTS)})
        turns.append([dict(message) for message in messages])
        messages.append({"role": "assistant", "content": draw(TEXTS)})
    return turns


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=conversations(), text=TEXTS, small=st.booleans())
def test_remembered_tokens_are_those_of_the_whole_text(
    folder_of: Callable[[str], Path], kind: str, turns: list[list[dict[str, Any]]], text: str, small: bool
) -> None:
    """With a large cache or a cache that is too small: the library's ids for the whole text."""
    folder = folder_of(kind)
    ours = _loaded(folder, 2_000 if small else 1 << 20)
    library = _library(folder)
    assert ours.encoder.whole_because is None
    for messages in turns:
        prompt = ours.chat_text({"messages": messages})
        tokens = ours.encode(prompt)
        assert tokens is not None
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == library.encode(prompt.text, add_special_tokens=False).ids
    for special in (False, True):
        expected = library.encode(text, add_special_tokens=special).ids
        assert ours.completion(text, add_special_tokens=special).tolist() == expected
        assert ours.completion(text, add_special_tokens=special).tolist() == expected
    assert ours.encoder.stats()["bytes"] <= (2_000 if small else 1 << 20)


_LOADED: dict[tuple[Path, int], PromptTokenizer] = {}
_LIBRARY: dict[Path, Tokenizer] = {}


def _loaded(folder: Path, cache_bytes: int) -> PromptTokenizer:
    key = (folder, cache_bytes)
    if key not in _LOADED:
        _LOADED[key] = PromptTokenizer.load(folder, cache_bytes=cache_bytes)
    return _LOADED[key]


def _library(folder: Path) -> Tokenizer:
    if folder not in _LIBRARY:
        _LIBRARY[folder] = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return _LIBRARY[folder]


def test_the_fast_library_is_used_where_it_is_built_in_and_reads_the_tokenizer(
    folder_of: Callable[[str], Path],
) -> None:
    """Reliability M8: a release candidate is in use only in builds that ask for it."""
    fast = {kind: _loaded(folder_of(kind), 1 << 20).encoder.fast for kind in KINDS}
    slow = ["byte-level, prefix space"] if FAST_TOKENIZER else list(KINDS)
    assert [kind for kind, is_fast in fast.items() if not is_fast] == slow


def test_a_new_turn_costs_its_new_text_only(folder_of: Callable[[str], Path]) -> None:
    tokenizer = PromptTokenizer.load(folder_of("byte-level"))

    def new_bytes(*contents: str) -> int:
        roles = ("system", "user", "assistant")
        messages = [{"role": roles[i and 2 - i % 2], "content": text} for i, text in enumerate(contents)]
        before = tokenizer.encoder.stats()["new_bytes"]
        tokenizer.chat({"messages": messages})
        return tokenizer.encoder.stats()["new_bytes"] - before

    first = ["Be brief. " * 500, *(f"Message {i} of some length. " * 20 for i in range(1, 8))]
    assert new_bytes(*first) > 8_000
    assert new_bytes(*first, "The answer. " * 20, "How are you?") < 400
    assert new_bytes(*first, "The answer. " * 20, "How are you?") == 0
    # A change in the past costs the message that changed.
    first[3] = "Message changed. " * 20
    assert 300 < new_bytes(*first, "The answer. " * 20, "How are you?") < 500


def test_long_new_text_is_left_for_a_thread(folder_of: Callable[[str], Path]) -> None:
    tokenizer = PromptTokenizer.load(folder_of("byte-level"))
    text = tokenizer.completion_text({}, "words and words " * 100)
    assert tokenizer.encode(text, at_most=1599) is None
    assert tokenizer.encoder.stats()["new_bytes"] == 0
    whole = tokenizer.encode(text)
    assert whole is not None
    again = tokenizer.encode(text, at_most=0)
    assert again is not None
    assert again.tolist() == whole.tolist()
    huge = tokenizer.completion_text({}, "word " * 250_000)
    assert tokenizer.encode(huge, at_most=1 << 30) is None
    assert len(tokenizer.completion(huge.text)) > 250_000


def test_where_cuts_would_be_wrong_texts_are_tokenised_whole(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<word>", single_word=True, normalized=False)])
    ours = PromptTokenizer.load(write_folder(tmp_path / "m", tokenizer))
    assert "single word" in str(ours.encoder.whole_because)
    assert "tokenized as a whole" in ours.notes[0]
    text = "<|im_start|>a<word> <word>b <|im_end|>"
    assert ours.completion(text).tolist() == tokenizer.encode(text).ids


def test_added_tokens_of_the_configuration_count(tmp_path: Path) -> None:
    decoder = {
        str(byte_level().get_vocab_size()): {"content": "<|later|>", "special": True, "normalized": False}
    }
    folder = write_folder(tmp_path / "m", byte_level(), added_tokens_decoder=decoder)
    tokens = PromptTokenizer.load(folder).completion("a<|later|>b").tolist()
    assert tokens[1] == byte_level().get_vocab_size()
    assert len(tokens) == 3


# Chats.


def chat(folder: Path, **request: Any) -> str:
    return PromptTokenizer.load(folder).chat_text(request).text


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"b": 1, "a": "ü<"}'}}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"messages": [USER]}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ({"messages": [USER], "add_generation_prompt": False}, "<|im_start|>user\nHi<|im_end|>\n"),
        (
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "So  "}], "continue_final_message": True}
            | {"add_generation_prompt": False},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSo  ",
        ),
        (  # parts of text are joined by lines; what is empty is left out
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "", "b")]}
                ]
            },
            "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n",
        ),
        (  # arguments become an object; no content is empty content; recent reasoning stays
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
                    {"role": "tool", "tool_call_id": "c1", "content": "[]"},
                ],
            },
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n\n<tool_call>\n"
            '{"name": "weather", "arguments": {"b": 1, "a": "ü<"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n[]\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (  # tools: the engine's order of fields, absent ones as null
            {"messages": [USER], "tools": [WEATHER | {"type": "function"}]},
            '<|im_start|>system\n# Tools\n<tools>\n{"type": "function", "function": {"name": "weather", '
            '"description": null, "parameters": {"type": "object"}}}\n</tools><|im_end|>\n'
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_chats_as_text(folder_of: Callable[[str], Path], request_: dict[str, Any], expected: str) -> None:
    assert chat(folder_of("byte-level"), **request_) == expected


def test_a_template_that_wants_parts_gets_parts(folder_of: Callable[[str], Path]) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "c1"},
        {"role": "assistant", "content": [{"type": "text", "text": " ok "}, {"type": "text", "text": "so"}]},
    ]
    expected = (
        '<s>[INST] Hi [/INST][TOOL_CALLS] [{"arguments": {"b": 1, "a": "ü<"}, "name": "weather"}]</s>'
        "[TOOL_RESULTS] 21[/TOOL_RESULTS] ok so</s>"
    )
    assert chat(folder_of("metaspace first"), messages=messages) == expected


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"messages": [{"role": "system", "content": [{"type": "image_url"}]}]}, "media"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "media"),
        ({"messages": [{"content": "x"}]}, "shape"),
        ({"messages": ["x"]}, "shape"),
        ({"messages": [{"role": 3, "content": "x"}]}, "shape"),
        ({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": ["x"]}]}, "shape"),
        ({"messages": [USER], "tools": [{}]}, "shape"),
        ({"messages": [{"role": "stranger", "content": "x"}]}, "template"),
        ({"messages": [USER], "chat_template": "{{ 1 }}"}, "template"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "template"),
        ({"messages": [USER], "truncate_prompt_tokens": 5}, "truncation"),
    ],
)
def test_what_cannot_be_predicted_is_said_to_be_so(
    folder_of: Callable[[str], Path], request_: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotPredictable) as caught:
        chat(folder_of("metaspace first"), **request_)
    assert caught.value.reason == reason


def test_templates_know_what_hugging_face_gives_them(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}\n"
        "  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ {'k': m.content} | tojson }}{{ [1, 2] | tojson(indent=1) }}|{{ strftime_now('%Y')|length }}|\n"
        "{% generation %}{{ eos_token }}{% endgeneration %}{% endfor %}"
    )
    folder = write_folder(tmp_path / "m", byte_level(), template)
    text = chat(folder, messages=[{"role": "user", "content": "<é'>"}, USER])
    assert text == '{"k": "<é\'>"}[\n 1,\n 2\n]|4|\n<|im_end|>'


@pytest.mark.parametrize(
    ("template", "content_format"),
    [
        (CHATML, "string"),
        (INST, "openai"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "string"),
        ("{% for m in messages[1:] %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% set x = messages %}{% for m in x %}{% for p in m.content|list %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in other %}{% for p in m.content %}x{% endfor %}{% endfor %}", "string"),
    ],
)
def test_the_form_of_contents_is_read_from_the_template(
    tmp_path: Path, template: str, content_format: str
) -> None:
    tokenizer = PromptTokenizer.load(write_folder(tmp_path / "m", byte_level(), template))
    assert tokenizer._files.template is not None
    assert tokenizer._files.template.content_format == content_format


def test_named_templates_and_files(tmp_path: Path) -> None:
    tool = {"messages": [USER], "tools": [WEATHER]}
    folder = write_folder(tmp_path / "list", byte_level(), None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat(folder, messages=[USER]) == "plain"
    assert chat(folder, **tool) == "tools"
    (folder / "chat_template.jinja").write_text("file")
    assert chat(folder, **tool) == "file"
    own = tmp_path / "own.jinja"
    own.write_text("given")
    assert PromptTokenizer.load(folder, chat_template=str(own)).chat_text(tool).text == "given"


def test_folders_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    def refused(folder: Path, says: str, **more: Any) -> None:
        with pytest.raises(TokenizerError, match=says):
            PromptTokenizer.load(folder, **more)

    refused(tmp_path / "absent", "absent: no such folder")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tekken.json").touch()
    refused(tmp_path / "empty", r"no tokenizer.json \(tekken.json cannot be used; lmetric-router tokenizer")
    (tmp_path / "empty" / "tokenizer.json").write_text('{"model": 3}')
    refused(tmp_path / "empty", "empty/tokenizer.json: ")
    folder = write_folder(tmp_path / "m", metaspace(), "{% for %}")
    refused(folder, r"tokenizer_config.json: chat_template: line 1: ")
    refused(folder, "gone.jinja: No such file", chat_template=str(tmp_path / "gone.jinja"))
    (folder / "tokenizer_config.json").write_text("{")
    refused(folder, "tokenizer_config.json: not JSON")
    dropout = json.loads((folder / "tokenizer.json").read_text())
    dropout["model"]["dropout"] = 0.1
    (folder / "tokenizer.json").write_text(json.dumps(dropout))
    (folder / "tokenizer_config.json").write_text("{}")
    refused(folder, "dropout")


def test_without_a_template_completions_work(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", byte_level(), None)
    tokenizer = PromptTokenizer.load(folder)
    assert tokenizer.completion("the router").tolist() == byte_level().encode("the router").ids
    assert "no chat template" in tokenizer.notes[0]
    with pytest.raises(NotPredictable):
        tokenizer.chat({"messages": [USER]})


def test_a_model_is_found_by_folder_or_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--Owner--Name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    assert find_folder("Owner/Name") is None
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert find_folder("Owner/Name") is None, "no tokenizer.json"
    (snapshot / "tokenizer.json").touch()
    assert find_folder("Owner/Name") == snapshot
    assert find_folder(str(tmp_path)) == tmp_path
    for other in ("Owner/Other", "Name", "../Name", "a/b/c", ""):
        assert find_folder(other) is None


RECORDED = json.loads((Path(__file__).parent / "data" / "vllm_prompts.json").read_text())


@pytest.mark.parametrize("template", ["chatml", "inst"])
@pytest.mark.parametrize("number", range(len(RECORDED["requests"])))
def test_recorded_requests_have_the_tokens_of_vllm(
    tmp_path_factory: pytest.TempPathFactory, template: str, number: int
) -> None:
    """Bugs 37: requests of chats, /v1/messages and /v1/responses, rendered by vLLM itself.

    `tests/real/record_prompts.py` records them.
    """
    path, body = RECORDED["requests"][number]
    expected = RECORDED["tokens"][template][number]
    source = {"chatml": CHATML, "inst": INST}[template]
    tokenizer = shipped(tmp_path_factory.getbasetemp() / template, source)
    predict = {
        "/v1/chat/completions": tokenizer.chat,
        "/v1/messages": tokenizer.messages,
        "/v1/responses": tokenizer.responses,
    }[path]
    if expected is not None:  # vLLM refuses the others
        assert predict(body).tolist() == expected


@functools.cache
def shipped(folder: Path, template: str) -> PromptTokenizer:
    return PromptTokenizer.load(shipped_folder(folder, template))


AGENT = {"messages": [{"role": "user", "content": "hi"}]}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("messages", {"messages": [{"role": "user", "content": [IMAGE_BLOCK]}]}, "media"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE_BLOCK]}]}]},
            "media",
        ),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "shape"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "shape"),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "shape"),
        ("messages", AGENT | {"tools": [{"name": "f"}]}, "shape"),
        ("messages", {"messages": "x"}, "shape"),
        ("responses", {"input": "x", "previous_response_id": "r"}, "history"),
        ("responses", {"input": "x", "truncation": "auto"}, "truncation"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "shape"),
        ("responses", {"input": [{"type": "reasoning", "encrypted_content": "A", "summary": []}]}, "shape"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "media",
        ),
        ("responses", {"input": 3}, "shape"),
        ("responses", {"input": "x", "chat_template_kwargs": {"tokenize": True}}, "template"),
    ],
)
def test_agents_requests_that_cannot_be_predicted_are_said_to_be_so(
    folder_of: Callable[[str], Path], path: str, body: dict[str, Any], reason: str
) -> None:
    tokenizer = PromptTokenizer.load(folder_of("byte-level"))
    with pytest.raises(NotPredictable) as caught:
        getattr(tokenizer, path)(body)
    assert caught.value.reason == reason


def test_system_messages_are_merged_if_the_template_wants_one_in_front(tmp_path: Path) -> None:
    """As vLLM finds it out: a template that fails on a later system message, or needs a filter."""
    later = {"role": "system", "content": "later"}
    body = {"system": "first", "messages": [*AGENT["messages"], later, *AGENT["messages"]]}
    plain = "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
        "{% endif %}[{{ m.role }} {{ m.content }}]{% endfor %}"
    )
    in_place = write_folder(tmp_path / "plain", byte_level(), plain)
    assert PromptTokenizer.load(in_place).messages_text(body).text == (
        "[system first][user hi][system later][user hi]"
    )
    merged = write_folder(tmp_path / "strict", byte_level(), strict)
    assert PromptTokenizer.load(merged).messages_text(body).text == "[system firstlater][user hi][user hi]"


@pytest.mark.parametrize(
    ("template", "effort"),
    [
        ("{{ reasoning_effort }}{{ enable_thinking }}", "noneFalse"),
        ("{% if reasoning_effort == 'high' %}high{% else %}low{% endif %}", "low"),
        (
            "{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}",
            "low",
        ),
    ],
)
def test_disabled_thinking_is_an_effort_that_the_template_knows(
    tmp_path: Path, template: str, effort: str
) -> None:
    folder = write_folder(tmp_path, byte_level(), template)
    text = PromptTokenizer.load(folder).messages_text(AGENT | {"thinking": {"type": "disabled"}}).text
    assert text == effort


async def test_a_running_engine_agrees(tmp_path: Path) -> None:
    """The emulated engine's folder against its own `/tokenize`, then another chat template."""
    engine = TOKENIZER_PATH.parent
    async with EngineServer(EngineOptions(port=0)) as server, aiohttp.ClientSession() as client:

        async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
            async with client.post(server.url + path, json=body) as response:
                return response.status, await response.read()

        ours = PromptTokenizer.load(engine)
        assert await verify(ours, post) == []
        (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        other = PromptTokenizer.load(engine, chat_template=str(tmp_path / "t.jinja"))
        differences = await verify(other, post)
        assert {difference.kind for difference in differences} == {"chat"}
        assert "tokens here" in str(differences[0])
        with pytest.raises(NotVerifiable, match="404"):
            await verify(ours, lambda path, body: post("/no" + path, body))
