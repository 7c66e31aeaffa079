"""Sends a trace to an OpenAI-compatible server and reports the latencies of its clients."""

from lmetric.replay.client import Client, Record, ReplayError
from lmetric.replay.player import Player
from lmetric.replay.programs import ProgramReport, summarize_programs
from lmetric.replay.report import Report, summarize
from lmetric.sim.summary import Slo, Spread

__all__ = [
    "Client",
    "Player",
    "ProgramReport",
    "Record",
    "ReplayError",
    "Report",
    "Slo",
    "Spread",
    "summarize",
    "summarize_programs",
]
