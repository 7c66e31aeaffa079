"""Traces of real services: formats, columns, slices, and a writer."""

from lmetric.sim.traces.formats import FORMATS, TraceFormat
from lmetric.sim.traces.load import load_trace, recognise
from lmetric.sim.traces.summary import TraceSummary, ideal_hit_tokens, summarize_trace
from lmetric.sim.traces.trace import FINISH, BadLine, Trace, TraceError
from lmetric.sim.traces.write import write_trace

__all__ = [
    "FINISH",
    "FORMATS",
    "BadLine",
    "Trace",
    "TraceError",
    "TraceFormat",
    "TraceSummary",
    "ideal_hit_tokens",
    "load_trace",
    "recognise",
    "summarize_trace",
    "write_trace",
]
