"""One answer from several segments: their requests, and the client's answer."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from turn_guard import of_reference

from lmetric._core import TokenEncoder
from lmetric.engines.handover import CHAT, COMPLETIONS, dumps
from lmetric.server.api.parts import Call, Parts, PartsDiffer
from lmetric.server.execution.plan import MergeError
from lmetric.server.execution.transcript import Transcript
from lmetric_lab.emulated.text import TOKENIZER_PATH
from server_world import STREAM_HEAD, chunk, event
from test_response_reader import begun

ENCODER = TokenEncoder(TOKENIZER_PATH.read_bytes())
PROMPT = [74, 393, 81]
IDS = [int(token) for token in ENCODER.encode(" wörld 🙂 a quiet river")]  # type: ignore[union-attr]
TEXT = " wörld 🙂 a quiet river"
CHATTED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 30}
ASKED: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 30}


def joined(path: str = COMPLETIONS, **fields: Any) -> Transcript:
    return Transcript(path, (CHATTED if path == CHAT else ASKED) | fields, PROMPT, ENCODER)


def answer(path: str, ids: list[int], text: str, finish: str = "length", **more: Any) -> dict[str, Any]:
    said = (
        {"message": {"role": "assistant", "content": text, "refusal": None}}
        if path == CHAT
        else {"text": text}
    )
    choice = {
        "index": 0,
        **said,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
    }
    frame = {"id": "x-1", "object": "o", "created": 5, "model": "m", "kv_transfer_params": {"a": 1}}
    return {**frame, "choices": [choice | more], "usage": {"prompt_tokens": 3}}


def sent(leg: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Returns path and body of a segment, as its engine reads them."""
    return leg[0], orjson.loads(dumps(leg[1]))


def text_of(ids: list[int]) -> str:
    return "".join(ENCODER.decode(ids).partition("\ufffd")[:1])


def events(raw: bytes) -> list[Any]:
    return [
        orjson.loads(event.removeprefix(b"data: "))
        for event in raw.split(b"\n\n")
        if event and b"DONE" not in event
    ]


def test_what_legs_are_sent() -> None:
    more = {"temperature": 0.3, "stop_token_ids": [9], "min_tokens": 20, "cache_salt": "s", "stream": True}
    one = joined(stream_options={"include_usage": True}, **more)
    path, leg = sent(one.segment(2))
    same = {"model": "m", "temperature": 0.3, "stop_token_ids": [9], "cache_salt": "s"}
    assert path == COMPLETIONS
    assert leg == {**same, "prompt": PROMPT[:2], "max_tokens": 1, "min_tokens": 1, "stream": False}
    path, leg = sent(one.segment(3))
    assert leg == {**ASKED, **same, "max_tokens": 1, "min_tokens": 1, "stream": False}
    path, leg = sent(one.segment(13))
    assert leg == {
        **ASKED,
        **same,
        "max_tokens": 11,
        "min_tokens": 11,
        "stream": False,
        "return_token_ids": True,
    }
    assert one.segment(1000)[1]["max_tokens"] == 30
    one.take(answer(COMPLETIONS, IDS[:4], text_of(IDS[:4])), 4)
    path, leg = sent(one.segment(12))
    assert leg == {
        **same,
        "prompt": PROMPT + IDS[:3],
        "max_tokens": 7,
        "min_tokens": 7,
        "stream": False,
        "return_token_ids": True,
    }
    path, leg = sent(one.last())
    assert (leg["max_tokens"], leg["min_tokens"], leg["stream"]) == (27, 17, True)
    assert leg["stream_options"] == {"include_usage": True}
    assert leg["prompt"] == PROMPT + IDS[:3]


def test_a_chat_goes_on_as_a_completion() -> None:
    one = joined(CHAT, chat_template_kwargs={"a": 1}, top_p=0.5)
    path, leg = sent(one.segment(5))
    assert path == CHAT
    assert leg == {
        **CHATTED,
        "chat_template_kwargs": {"a": 1},
        "top_p": 0.5,
        "max_tokens": 3,
        "max_completion_tokens": 3,
        "stream": False,
        "return_token_ids": True,
    }
    told = answer(CHAT, IDS[:3], text_of(IDS[:3])) | {"prompt_token_ids": [7, 8, 9, 10]}
    one.take(told, 3)
    # The engine's own tokens of the prompt replace the router's.
    path, leg = sent(one.last())
    assert (path, leg["prompt"]) == (COMPLETIONS, [7, 8, 9, 10, *IDS[:2]])
    assert leg == {
        "model": "m",
        "top_p": 0.5,
        "prompt": leg["prompt"],
        "max_tokens": 28,
        "stream": False,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_seam(path: str) -> None:
    for cut in range(1, len(IDS)):
        one = joined(path, max_tokens=len(IDS), stream=True, return_token_ids=True)
        kept = one.take(answer(path, IDS[: cut + 1], text_of(IDS[: cut + 1])), cut + 1)
        if cut == len(IDS) - 1:
            assert (kept.ids, kept.finish) == (IDS, "length")
            continue
        assert (kept.ids, kept.finish) == (IDS[:cut], None)
        said = events(one.opening() + one.chunk(kept))
        for n in range(cut, len(IDS), 2):
            last = n + 2 >= len(IDS)
            choice = {
                "index": 0,
                "token_ids": IDS[n : n + 2],
                "text": "",
                "finish_reason": "stop" if last else None,
            }
            said += events(one.chunk(one.more(choice)))
        choices = [chunk["choices"][0] for chunk in said]
        deltas = [choice.get("delta", choice) for choice in choices]
        # The token that stops the answer has no text.
        assert "".join(d.get("content", d.get("text")) for d in deltas) == ENCODER.decode(IDS[:-1])
        assert [t for choice in choices for t in choice.get("token_ids", [])] == IDS
        assert [choice["finish_reason"] for choice in choices][-1] == "stop"
        assert one.closing() == b"data: [DONE]\n\n"


# The second text has tokens that are no text on their own: their lengths do not add up to its
# length.
@pytest.mark.parametrize("text", [" a quiet river", " a 🙂🙂 river"])
def test_log_probabilities_are_joined(text: str) -> None:
    def logprobs(ids: list[int]) -> dict[str, Any]:
        words = [ENCODER.decode([token]) for token in ids]
        at = [sum(map(len, words[:n])) for n in range(len(words))]
        numbers = [-token / 100 for token in ids]
        return {"tokens": words, "token_logprobs": numbers, "top_logprobs": None, "text_offset": at}

    ids = [int(t) for t in ENCODER.encode(text)]  # type: ignore[union-attr]
    first = len(ids) - 1
    one = joined(logprobs=0, max_tokens=len(ids))
    assert one.segment(5)[1]["logprobs"] == 0
    one.take(answer(COMPLETIONS, ids[:first], text_of(ids[:first]), logprobs=logprobs(ids[:first])), first)
    assert one.last()[1]["logprobs"] == 0
    rest = ids[first - 1 :]
    made = one.take(answer(COMPLETIONS, rest, "", logprobs=logprobs(rest)), 99)
    told = orjson.loads(one.answer(made))
    assert told["choices"][0]["logprobs"] == logprobs(ids)
    assert told["choices"][0]["text"] == text
    assert (told["usage"]["completion_tokens"], told["usage"]["total_tokens"]) == (len(ids), len(ids) + 3)
    assert told["kv_transfer_params"] is None
    assert told["choices"][0]["token_ids"] is None


@pytest.mark.parametrize("names", [False, True], ids=["texts", "ids"])
@pytest.mark.parametrize("forwarded", [False, True])
@pytest.mark.parametrize("stop", [None, "not there"])
def test_offsets_of_a_stream_go_on(forwarded: bool, names: bool, stop: str | None) -> None:
    """Each engine counts from the start of its own stream, chunk by chunk."""

    def named(token: int) -> str:
        return f"token_id:{token}" if names else ENCODER.decode([token])

    def logprobs(ids: list[int], at: int) -> dict[str, Any]:
        tokens = [named(token) for token in ids]
        offsets = [at + sum(map(len, tokens[:n])) for n in range(len(tokens))]
        return {"tokens": tokens, "token_logprobs": [0.0] * len(ids), "text_offset": offsets}

    ids = [int(t) for t in ENCODER.encode(" a quiet river and a small boat")]  # type: ignore[union-attr]
    one = joined(logprobs=0, max_tokens=99, stream=True, stop=stop, return_tokens_as_token_ids=names)
    given = answer(COMPLETIONS, ids[:3], text_of(ids[:3]), logprobs=logprobs(ids[:3], 0))
    one.take(given, 3, whole=True)
    if forwarded:
        one._logprobs = None  # only its tokens are recorded
    found = []
    for first in (3, 7):  # the engines that continue
        for n in range(first, first + 4, 2):
            at = sum(len(named(token)) for token in ids[first:n])
            choice = {"token_ids": ids[n : n + 2], "logprobs": logprobs(ids[n : n + 2], at)}
            made = one.more({"index": 0, "text": "", "finish_reason": None, **choice})
            assert made.logprobs is not None
            found += made.logprobs["text_offset"]
    assert found == logprobs(ids, 0)["text_offset"][3 : 3 + len(found)]


@pytest.mark.parametrize(
    ("path", "told", "why", "failed"),
    [
        (COMPLETIONS, answer(COMPLETIONS, IDS[:3], "x"), "differs from the text of its tokens", False),
        (COMPLETIONS, answer(COMPLETIONS, IDS[:3], "", finish="abort"), "finish_reason abort", True),
        (COMPLETIONS, answer(COMPLETIONS, [], "", token_ids=None), "return_token_ids", False),
        *(
            (COMPLETIONS, answer(COMPLETIONS, [], "", token_ids=ids), "invalid token ids", False)
            for ids in (["a", 2], [-1], [1 << 32], [1.5], [None], [{}], [True])
        ),
        (CHAT, answer(CHAT, [], "", message="a"), "not a JSON object", False),
        (COMPLETIONS, {"choices": []}, "exactly one choice", False),
        (
            CHAT,
            answer(CHAT, [], "", message={"content": None, "tool_calls": [1]}),
            "parses its answers",
            False,
        ),
        (
            CHAT,
            answer(CHAT, [], "", message={"content": None, "reasoning": "a"}),
            "parses its answers",
            False,
        ),
    ],
)
def test_what_cannot_be_joined(path: str, told: dict[str, Any], why: str, failed: bool) -> None:
    one = joined(path)
    with pytest.raises(MergeError, match=why) as raised:
        one.take(told, 3)
    assert raised.value.failed == failed
    assert not one.begun


@pytest.mark.parametrize(
    "logprobs", [{"text_offset": [None]}, {"text_offset": 3}, {"text_offset": [0], "tokens": [1]}]
)
def test_log_probabilities_that_cannot_be_joined(logprobs: dict[str, Any]) -> None:
    one = joined()
    with pytest.raises(MergeError, match="invalid log probabilities"):
        one.take(answer(COMPLETIONS, IDS[:1], text_of(IDS[:1]), logprobs=logprobs), 3)


def test_an_answer_that_is_over() -> None:
    for ids, finish, asked in ((IDS[:3], "stop", 5), (IDS[:3], "length", 5), (IDS[:3], "length", 3)):
        one = joined(max_tokens=3 if asked == 3 else 30)
        said = text_of(ids[:-1] if finish == "stop" else ids)
        made = one.take(answer(COMPLETIONS, ids, said, finish=finish), asked)
        assert (made.ids, made.finish, made.text) == (ids, finish, said)
        assert (one.over, one.finish) == (True, finish)
    one = joined()
    one.take(answer(COMPLETIONS, IDS[:3], text_of(IDS[:3])), 3)  # a segment that ends as planned
    assert (one.over, one.finish) == (False, None)
    shown = joined(include_stop_str_in_output=True)
    assert shown.take(answer(COMPLETIONS, IDS[:3], text_of(IDS[:3]), finish="stop"), 5).text == text_of(
        IDS[:3]
    )


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    one = joined(CHAT, stream=True, stream_options=options)
    one.cached = {"cached_tokens": 2}
    kept = one.take(answer(CHAT, IDS[:3], text_of(IDS[:3])), 3)
    opening, chunk = events(one.opening() + one.chunk(kept))
    assert opening["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    assert chunk["usage"]["completion_tokens"] == 2
    (closing,) = events(one.closing())
    assert (closing["choices"], closing["usage"]["prompt_tokens_details"]) == ([], {"cached_tokens": 2})


@pytest.mark.parametrize("reasoning", ["a quiet river", "🙂 wörld 🙂", "", "other"])
def test_the_tokens_of_the_reasoning_are_counted_by_its_text(reasoning: str) -> None:
    said = "a quiet river" if reasoning == "other" else reasoning
    ids = [
        [int(token) for token in ENCODER.encode(text)]  # type: ignore[union-attr]
        for text in ("<think>", said, "</think>", " to the end 🙂")
    ]
    it = joined(CHAT, stream=True, stream_options={"include_usage": True})
    it.parts = Parts(reasoning, " to the end 🙂")
    it.output_ids = [token for part in ids for token in part]
    (end,) = events(it.closing())
    known = reasoning not in ("", "other")
    details = {"reasoning_tokens": len(ids[1])} if known else None
    assert end["usage"].get("completion_tokens_details") == details


FRAGMENTS = st.lists(
    st.fixed_dictionaries(
        {"index": st.integers(0, 3)},
        optional={
            "id": st.none() | st.text("aé", max_size=2),
            "function": st.none()
            | st.fixed_dictionaries(
                {},
                optional={
                    "name": st.none() | st.text("aé", max_size=3),
                    "arguments": st.none() | st.text("aé", max_size=5),
                },
            ),
        },
    ),
    max_size=12,
)


@given(fragments=FRAGMENTS, sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_tool_calls_added_at_once_are_those_added_one_by_one(
    fragments: list[dict[str, Any]], sizes: list[int]
) -> None:
    deltas, left = [], fragments
    for size in sizes:
        deltas, left = [*deltas, left[:size]], left[size:]
    one, all_at_once = Parts("thought", "text"), Parts("thought", "text")
    seen: list[Call] = []  # by a rule without order, or lists
    for each in fragments:
        if each["index"] > len(seen):
            with pytest.raises(PartsDiffer):
                all_at_once.add_calls(deltas)
            with pytest.raises(PartsDiffer):
                one.add({"tool_calls": fragments})
            return
        seen += [Call()] * (each["index"] == len(seen))
        known, function = seen[each["index"]], each.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        added = Call(known.id or each.get("id") or "", known.name + name, known.arguments + arguments)
        seen[each["index"]] = added
    for calls in deltas:
        one.add({"tool_calls": calls})
    all_at_once.add_calls(deltas)
    assert one == all_at_once == Parts("thought", "text", seen)


def test_the_time_to_read_a_tool_call_grows_with_its_length() -> None:
    """80,000 fragments took 7 s of the event loop: each one copied all of the call."""
    pieces = ["0123456789" * 5] * 80_000
    reader, _ = begun(lambda data: None, observe=True)
    reader.data_received(STREAM_HEAD)
    for at in range(0, len(pieces), 1000):
        calls = ({"index": 0, "function": {"arguments": each}} for each in pieces[at : at + 1000])
        choices = ({"index": 0, "delta": {"tool_calls": [call]}, "token_ids": [5]} for call in calls)
        reader.data_received(chunk(b"".join(event({"choices": [choice]}) for choice in choices)))
    it = joined(CHAT, stream=True)
    began = time.thread_time()
    it.observe(reader)
    assert of_reference(time.thread_time() - began) < 1
    assert it.parts == Parts(calls=[Call(arguments="".join(pieces))])
