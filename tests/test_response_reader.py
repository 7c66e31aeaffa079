"""The reader of responses as a protocol: what it writes by itself, and what it tells its sink of."""

import gc
import weakref
from typing import Any

from lmetric._core import END, PASS, READY, ResponseReader, Router, WireError
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
    _, ticket = router.route(text="x")
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


def test_what_must_be_framed_anew_is_the_sinks() -> None:
    written: list[bytes] = []
    reader, sink = begun(written.append)
    whole = chunk(token("b"))
    reader.data_received(STREAM_HEAD + chunk(token("a")))
    reader.data_received(whole[:20])
    reader.data_received(whole[20:])
    assert len(written) == 1
    assert not any(flags & PASS for flags, _ in sink.told)
    assert reader.take() == whole


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
