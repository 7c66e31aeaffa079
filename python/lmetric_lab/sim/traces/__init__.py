"""Traces of real services: formats, columns, slices, and a writer."""

from lmetric_lab.errors import TraceError
from lmetric_lab.sim.traces.formats import FORMATS, TraceFormat
from lmetric_lab.sim.traces.load import load_trace, recognise
from lmetric_lab.sim.traces.summary import TraceSummary, ideal_hit_tokens, summarize_trace
from lmetric_lab.sim.traces.trace import FINISH, BadLine, Trace
from lmetric_lab.sim.traces.write import write_trace

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
