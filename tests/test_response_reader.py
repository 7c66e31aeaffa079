"""The reader of responses as a protocol: bytes it writes itself, events for its sink."""

import gc
import json
import weakref
from typing import Any

import numpy as np

from lmetric._core import END, OUT, PASS, READY, UNSEEN, Request, ResponseReader, Router, WireError
from server_world import STREAM_HEAD, STREAM_TAIL, chunk, token


class Sink:
    """Commits as soon as it may, to `write`."""

    def __init__(self, reader: ResponseReader, write: Any) -> None:
        self.reader, self.write = reader, write
        self.told: list[tuple[int, bytes]] = []
        self.errors: list[Exception] = []

    def received(self, flags: int, data: bytes) -> None:
        self.told.append((flags, data))
        if flags & READY:
            self.write(self.reader.commit(b"", False, self.write))

    def failed(self, error: Exception) -> None:
        self.errors.append(error)


def begun(write: Any, **more: Any) -> tuple[ResponseReader, Sink]:
    reader = ResponseReader()
    sink = Sink(reader, write)
    reader.begin(sink, **more)
    return reader, sink


def test_what_may_pass_is_written_as_it_came_and_nobody_is_asked() -> None:
    written: list[bytes] = []
    router = Router()
    router.add_instance("a")
    _, ticket = router.route(Request(text="x"))
    reader, sink = begun(written.append, ticket=ticket)
    reader.data_received(STREAM_HEAD)
    reader.data_received(chunk(token("a")))
    assert (len(written), len(sink.told)) == (1, 2)
    pieces = [chunk(token("b")), chunk(token("c")) + chunk(token("d")), chunk(b": comment\n\n")]
    for piece in pieces:
        reader.data_received(piece)
    assert all(sent is piece for sent, piece in zip(written[1:], pieces, strict=True))
    assert len(sink.told) == 2
    assert (reader.tokens, router.stats()["output_tokens"], reader.pieces) == (4, 4, 5)
    reader.data_received(STREAM_TAIL)
    assert sink.told[2:] == [(PASS | END, STREAM_TAIL)]
    assert not sink.errors


def test_what_must_be_framed_anew_is_written_and_nobody_is_asked() -> None:
    written: list[bytes] = []
    reader, sink = begun(written.append)
    whole = chunk(token("b"))
    reader.data_received(STREAM_HEAD + chunk(token("a")))
    reader.data_received(whole[:20])
    assert len(written) == 1
    reader.data_received(whole[20:])
    assert written[1:] == [whole]
    assert not any(flags & (PASS | OUT) for flags, _ in sink.told)


def test_a_fault_goes_to_the_sink_and_not_to_the_loop() -> None:
    def write(data: bytes) -> None:
        if data == piece:
            raise RuntimeError("a bug")

    piece = chunk(token("b"))
    reader, sink = begun(write)
    reader.data_received(STREAM_HEAD + chunk(token("a")))
    reader.data_received(piece)
    reader.data_received(b"no chunk")
    assert [type(error) for error in sink.errors] == [RuntimeError, WireError]


def test_what_is_called_may_call_back() -> None:
    def write(data: bytes) -> None:
        seen.append(reader.pieces)
        if data == piece:
            assert reader.detach() is sink

    seen: list[int] = []
    piece = chunk(token("b"))
    reader, sink = begun(write)
    reader.data_received(STREAM_HEAD + chunk(token("a")))
    reader.data_received(piece)
    assert seen == [1, 2]
    assert reader.detach() is None


def test_bytes_without_a_sink_are_unasked_for() -> None:
    class Connection(ResponseReader):
        count = 0

        def unasked(self) -> None:
            self.count += 1

    connection = Connection("arguments", "of its own")
    connection.data_received(b"x")
    assert (connection.count, connection.pieces) == (1, 0)


def test_a_reader_keeps_nobody_alive_that_it_let_go() -> None:
    class Client:
        def write(self, data: bytes) -> None:
            pass

    client = Client()
    reader, sink = begun(client.write)
    reader.data_received(STREAM_HEAD + chunk(token("a")))
    seen = [weakref.ref(client), weakref.ref(sink)]
    reader.detach()
    del client, sink
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


def noted(text: str, ids: list[int] | None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}
    event = {"id": "cmpl-1", "created": 7, "model": "tiny", "choices": [choice | more.pop("choice", {})]}
    return b"data: " + json.dumps(event | more).encode() + b"\n\n"


def test_a_stream_is_observed_while_it_passes() -> None:
    written: list[bytes] = []
    reader, sink = begun(written.append, observe=True)
    prompt, ids, text, frame = reader.observed()
    assert (prompt, ids.tolist(), text, frame) == (None, [], "", {})
    first = noted("a\u00e9", [1, 2], choice={"prompt_token_ids": [5, 4294967295]})
    reader.data_received(STREAM_HEAD + chunk(first))
    piece = chunk(noted("b", [3])) + chunk(b": ping\n\n")
    reader.data_received(piece)
    assert written[1] is piece
    assert (len(sink.told), reader.observed_over, reader.unseen) == (1, False, None)
    reader.data_received(chunk(noted("c", [4], "stop")))
    prompt, ids, text, frame = reader.observed()
    assert prompt is not None
    assert prompt.dtype == ids.dtype == np.uint32
    assert (prompt.tolist(), ids.tolist(), text) == ([5, 4294967295], [1, 2, 3, 4], "a\u00e9bc")
    assert frame == {"id": "cmpl-1", "created": 7, "model": "tiny"}
    assert reader.observed_prompt is not None
    assert reader.observed_prompt.tolist() == prompt.tolist()
    assert (reader.observed_tokens, reader.observed_over, reader.unseen) == (4, True, None)
    reader.begin(sink)
    assert (reader.observed_tokens, reader.observed_over, reader.observed_prompt) == (0, False, None)


def test_what_only_the_router_asked_for_is_hidden_and_nobody_is_asked() -> None:
    written: list[bytes] = []
    reader, sink = begun(written.append, observe=True, hide_ids=True)
    secret = noted("a", [1], prompt_token_ids=[5], kv_transfer_params={"host": "10.0.0.1"})
    shown = noted("a", None, prompt_token_ids=None, kv_transfer_params=None)
    reader.data_received(STREAM_HEAD + chunk(secret))
    assert written[0].endswith(chunk(shown))
    reader.data_received(chunk(secret) + chunk(secret))
    assert written[1:] == [chunk(shown + shown)]
    assert [flags for flags, _ in sink.told] == [READY]
    assert reader.observed_tokens == 3


def test_what_cannot_be_observed_passes_on_and_the_sink_is_told_once() -> None:
    written: list[bytes] = []
    reader, sink = begun(written.append, observe=True, hide_ids=True)
    reader.data_received(STREAM_HEAD + chunk(noted("a", [1])))
    unknown = chunk(noted("b", None))
    reader.data_received(unknown)
    assert sink.told[1:] == [(PASS | UNSEEN, unknown)]
    assert reader.unseen == "the engine does not tell token ids (return_token_ids)"
    reader.data_received(chunk(noted("c", [3])))
    assert written[1:] == [chunk(noted("c", None))]
    assert (reader.observed_tokens, reader.observed()[2], len(sink.told)) == (1, "a", 2)


def test_events_of_an_answer_that_python_merges() -> None:
    reader, sink = begun(None, http11=False)
    sink.received = lambda flags, data: sink.told.append((flags, data))  # type: ignore[method-assign]
    reader.data_received(STREAM_HEAD + chunk(token("a")))
    assert sink.told[-1][0] == READY
    assert reader.commit_events() == [token("a")[6:-2]]
    assert reader.events() == []
    reader.data_received(chunk(b": ping\r\n\r\ndata:1\rdata: 2\r\r") + chunk(token("b")))
    assert sink.told[-1][0] == OUT
    assert reader.events() == [b": ping", b"1\n2", token("b")[6:-2]]
    reader.data_received(STREAM_TAIL)
    assert sink.told[-1][0] & END
    assert b"[DONE]" not in reader.events()
    assert reader.keep_alive


def test_events_of_a_stream_that_ends_with_its_connection() -> None:
    reader, sink = begun(None, http11=False)
    sink.received = lambda flags, data: sink.told.append((flags, data))  # type: ignore[method-assign]
    reader.data_received(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + token("a"))
    assert len(reader.commit_events()) == 1
    reader.data_received(token("b"))
    assert sink.told[-1][0] == OUT
    assert reader.events() == [token("b")[6:-2]]


def in_pieces(data: bytes) -> list[bytes]:
    return [data[at : at + 60_000] for at in range(0, len(data), 60_000)]


def test_an_event_for_python_is_whole_however_long_it_is() -> None:
    """vLLM's first event repeats the prompt's token ids. Its first part was READY."""
    first = noted("a", [1], choice={"prompt_token_ids": [12345] * 100_000})
    reader, sink = begun(None, http11=False, require_finish=True)
    sink.received = lambda flags, data: sink.told.append((flags, data))  # type: ignore[method-assign]
    assert reader.commit_events() == []
    reader.data_received(STREAM_HEAD)
    pieces = in_pieces(chunk(first) + chunk(token("b")))
    for piece in pieces:
        reader.data_received(piece)
    assert [flags for flags, _ in sink.told] == [0] * len(pieces) + [READY]
    assert reader.tokens == 2
    assert reader.commit_events() == [first[6:-2], token("b")[6:-2]]
    second = noted("c", [2], choice={"prompt_token_ids": [54321] * 100_000})
    for piece in in_pieces(chunk(second)):
        reader.data_received(piece)
    assert reader.events() == [second[6:-2]]
    assert not sink.errors


def test_an_event_for_python_that_is_too_long_is_a_fault() -> None:
    reader, sink = begun(None, http11=False, require_finish=True)
    reader.commit_events()
    reader.data_received(STREAM_HEAD)
    for piece in in_pieces(chunk(noted("a", [1], more=" " * (8 << 20)))):
        if not sink.errors:
            reader.data_received(piece)
    (error,) = sink.errors
    assert isinstance(error, WireError)
    assert "an event of more than 8388608 bytes" in str(error)
    assert {flags for flags, _ in sink.told} == {0}
