"""The header fields of a gateway's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lmetric.server.epp import messages
from lmetric.server.epp.ext_proc_pb2 import HeaderMap, ProcessingRequest

_STATUS = ":status"


def _named(name: str) -> tuple[str, str]:
    """Returns the names of a field of the extension: the present one, and the older one."""
    return f"x-llm-d-{name}", f"x-gateway-{name}"


OBJECTIVE = _named("inference-objective")
FAIRNESS_ID = _named("inference-fairness-id")
MODEL_REWRITE = _named("model-name-rewrite")
TENANT = "x-tenant"


_TENANT_FIELDS = (*FAIRNESS_ID, TENANT)  # the gateway's own names first
# Fields that the gateway writes itself.
_OF_GATEWAY = frozenset(
    {
        *("host", "connection", "transfer-encoding"),
        *("x-forwarded-for", "x-forwarded-proto", "x-forwarded-host"),
        *FAIRNESS_ID,
    }
)


class RequestFields:
    """The head of a client's request, as a gateway reports it.

    ``for_router``: its fields, and fields of `serve` for those of the extension. The fairness ID is
    a tenant, of a trusted gateway alone: others pass on what clients write. The name of an
    InferenceObjective is an SLO class and a priority. Other fields of the client have precedence.

    Args:
        headers: of the message.
        objectives: priorities by the names of InferenceObjectives; a higher one is served first.
        is_class: whether a model has an SLO class of this name.
        is_trusted: whether the gateway sets or removes the fields with a tenant.
    """

    def __init__(
        self,
        headers: HeaderMap,
        objectives: Mapping[str, int],
        is_class: Callable[[str], bool],
        *,
        is_trusted: bool,
    ) -> None:
        self.method = self.path = ""
        self.target = b""
        self._fields: dict[str, bytes] = {}
        self.for_router: list[tuple[bytes, bytes]] = []
        tenants: dict[str, bytes] = {}
        for name, value in _pairs(headers):
            if name in _TENANT_FIELDS:
                tenants[name] = value  # the last one: gateways add theirs behind the client's
                self._fields.setdefault(name, value)
                continue
            if name.startswith(":"):
                if name == ":method":
                    self.method = value.decode("latin-1")
                elif name == ":path":
                    self.target = value
                    self.path = value.partition(b"?")[0].decode("latin-1")
                elif name == ":authority":
                    self.for_router.append((b"host", value))
                continue
            self._fields.setdefault(name, value)
            self.for_router.append((name.encode("latin-1"), value))
        objective = self._first(OBJECTIVE)
        name = "" if objective is None else objective.decode("latin-1")
        self.priority = objectives.get(name, 0)
        if self.priority:  # engines serve lower numbers first
            self._add(b"x-vllm-priority", b"%d" % -self.priority)
        if name and is_class(name):
            self._add(b"x-slo-class", name.encode("latin-1"))
        tenant = next((tenants[name] for name in _TENANT_FIELDS if name in tenants), None)
        if tenant is not None and is_trusted:
            self.for_router.append((TENANT.encode(), tenant))

    def _first(self, names: tuple[str, ...]) -> bytes | None:
        return next((self._fields[name] for name in names if name in self._fields), None)

    def _add(self, name: bytes, value: bytes) -> None:
        if name.decode() not in self._fields:
            self.for_router.append((name, value))

    @property
    def model(self) -> str | None:
        """The model that the gateway sets in place of the body's; None: it sets none."""
        model = self._first(MODEL_REWRITE)
        return None if model is None else model.decode("utf-8", "replace")

    def changes(self, head: bytes, *, with_length: bool) -> tuple[list[messages.Field], list[str]]:
        """Returns the fields that the gateway must set for the engine, and those to remove.

        ``head``: the HTTP/1.1 head that the router would send to the engine. It lacks the fields
        that clients must not send, such as those that steer a sidecar: the gateway removes all
        fields of the client that are not in it. ``with_length``: the body has another length than
        the client's.
        """
        first, *lines = head.split(b"\r\n")
        target = first.split(b" ")[1]
        changed: list[messages.Field] = [] if target == self.target else [(":path", target)]
        own = _grouped((name.decode("latin-1"), value) for name, value in self.for_router)
        kept = _grouped(messages.fields_of(lines))
        for name, values in kept.items():
            if name == "content-length":
                if with_length:
                    changed.append((name, values[0]))
            elif name not in _OF_GATEWAY and own.get(name) != values:
                changed.append((name, (b"; " if name == "cookie" else b", ").join(values)))
        removed = [name for name in self._fields if name not in kept and name not in _OF_GATEWAY]
        return changed, removed


def _grouped(fields: Iterable[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    """Returns the values of each field, in order."""
    found: dict[str, list[bytes]] = {}
    for name, value in fields:
        found.setdefault(name, []).append(value)
    return found


def of_answer(headers: HeaderMap) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Returns the status and the fields of an engine's answer."""
    status, fields = 0, []
    for name, value in _pairs(headers):
        if name == _STATUS:
            status = int(value)
        elif not name.startswith(":"):
            fields.append((name.encode("latin-1"), value))
    return status, fields


class AnsweringEngine(NamedTuple):
    """The engine that answers, as its gateway reports it.

    ``address``: IP:PORT. ``tries``: engines that the gateway tried; None: not reported.
    """

    address: str
    tries: int | None = None


def answering_engine(message: ProcessingRequest) -> AnsweringEngine | None:
    """Returns the engine that answers; None: the gateway does not report it.

    It reports metadata, as the extension has it, or Envoy's attributes `upstream.address` and
    `upstream.request_attempt_count`.
    """
    metadata = message.metadata_context.filter_metadata
    if messages.LB in metadata:
        reported = metadata[messages.LB].fields
        if messages.SERVED in reported:
            return AnsweringEngine(str(reported[messages.SERVED].string_value))
    for attributes in message.attributes.values():
        fields = attributes.fields
        if "upstream.address" in fields and (address := str(fields["upstream.address"].string_value)):
            counted = "upstream.request_attempt_count" in fields
            tries = fields["upstream.request_attempt_count"].number_value if counted else None
            return AnsweringEngine(address, None if tries is None else int(tries))
    return None


def _pairs(headers: Any) -> Iterator[tuple[str, bytes]]:
    """Yields the fields of a header map. Older gateways send values as text."""
    for header in headers.headers:
        yield header.key.lower(), header.raw_value or header.value.encode("latin-1", "replace")
