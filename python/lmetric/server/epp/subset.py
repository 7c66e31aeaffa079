"""The engines to which a gateway limits a request, in its messages."""

from __future__ import annotations

from lmetric.server.epp import messages
from lmetric.server.epp.ext_proc_pb2 import Metadata
from lmetric.server.fleet.subset import Subset, shortest_of_subset


def subset_of(metadata: Metadata) -> Subset | None:
    """Returns the subset in a message; None: it has none. An empty list is a subset."""
    hint = metadata.filter_metadata
    if messages.SUBSET_HINT not in hint:
        return None
    fields = hint[messages.SUBSET_HINT].fields
    if messages.SUBSET not in fields:
        return None
    value = fields[messages.SUBSET]
    if value.HasField("list_value"):
        texts = [entry.string_value for entry in value.list_value.values]
    else:
        texts = value.string_value.split(",")
    return Subset(shortest_of_subset(text.strip()) for text in texts if text.strip())
