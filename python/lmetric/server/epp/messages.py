"""The messages that the picker sends to a gateway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.struct_pb2 import Struct

from lmetric.server.epp.ext_proc_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpStatus,
    ImmediateResponse,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

# The header and the metadata with the chosen engines, and their namespaces (the protocol's names).
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB = "envoy.lb"
SUBSET_HINT = "envoy.lb.subset_hint"
# The engine that computes the prompt, for llm-d's sidecar beside the decode engine.
PREFILLER = "x-prefiller-host-port"
# The extension's longest part of a body. Envoy accepts 64 KiB.
PART_BYTES = 62_000

Field = tuple[str, bytes]

CONTINUE_REQUEST = ProcessingResponse(request_headers=HeadersResponse())
CONTINUE_REQUEST_TRAILERS = ProcessingResponse(request_trailers=TrailersResponse())
CONTINUE_RESPONSE = ProcessingResponse(response_headers=HeadersResponse())
CONTINUE_RESPONSE_BODY = ProcessingResponse(response_body=BodyResponse())
CONTINUE_RESPONSE_TRAILERS = ProcessingResponse(response_trailers=TrailersResponse())


def mutation(fields: Iterable[Field], removed: Sequence[str] = ()) -> HeaderMutation:
    """Returns the change that sets these fields and removes others."""
    return HeaderMutation(
        set_headers=[
            HeaderValueOption(
                header=HeaderValue(key=name, raw_value=value),
                append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in fields
        ],
        remove_headers=removed,
    )


def destination(endpoints: str) -> Struct:
    """Returns the metadata with the chosen engines. ``endpoints``: IP:PORT, best first."""
    metadata = Struct()
    metadata.fields[LB].struct_value.fields[DESTINATION].string_value = endpoints
    return metadata


def picked_at_headers(change: HeaderMutation, endpoints: str) -> ProcessingResponse:
    """Returns the answer to the request's head: its engines and the changed fields."""
    common = CommonResponse(header_mutation=change, clear_route_cache=True)
    return ProcessingResponse(
        request_headers=HeadersResponse(response=common), dynamic_metadata=destination(endpoints)
    )


def picked_at_body(change: HeaderMutation, endpoints: str, new_body: bytes | None) -> ProcessingResponse:
    """Returns the answer to a buffered body. ``new_body``: None: it stays."""
    common = CommonResponse(header_mutation=change, clear_route_cache=True)
    if new_body is not None:
        common.body_mutation.body = new_body
    return ProcessingResponse(
        request_body=BodyResponse(response=common), dynamic_metadata=destination(endpoints)
    )


def request_parts(body: bytes, *, ends: bool) -> Iterator[ProcessingResponse]:
    """Yields the request's body for the engine. ``ends``: no trailers follow."""
    last = max(len(body) - 1, 0) // PART_BYTES * PART_BYTES
    for start in range(0, last + 1, PART_BYTES):
        part = StreamedBodyResponse(
            body=body[start : start + PART_BYTES], end_of_stream=ends and start == last
        )
        yield ProcessingResponse(request_body=_streamed(part))


def response_part(body: bytes, *, ends: bool) -> ProcessingResponse:
    """Returns a part of the engine's answer for the client, unchanged."""
    return ProcessingResponse(response_body=_streamed(StreamedBodyResponse(body=body, end_of_stream=ends)))


def response_head(fields: Iterable[Field]) -> ProcessingResponse:
    """Returns the answer to the head of the engine's answer, with the router's own fields."""
    common = CommonResponse(header_mutation=mutation(fields))
    return ProcessingResponse(response_headers=HeadersResponse(response=common))


def immediate(answer: bytes) -> ProcessingResponse:
    """Returns an answer of the router itself. ``answer``: a whole HTTP/1.1 response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    fields = [field for field in fields_of(lines) if field[0] not in ("content-length", "connection")]
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=int(first.split(b" ")[1])),
            headers=mutation(fields),
            body=body,
            details="lmetric-router",
        )
    )


def fields_of(lines: Iterable[bytes]) -> Iterator[Field]:
    """Yields the fields of header lines, with names in lower case."""
    for line in lines:
        name, _, value = line.partition(b":")
        yield name.decode("latin-1").lower(), value.strip()


def _streamed(part: StreamedBodyResponse) -> BodyResponse:
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=part)))
