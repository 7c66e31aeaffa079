"""Sends a trace to an OpenAI-compatible server and reports the latencies of its clients."""

from lmetric_lab.replay.client import Client, Record, ReplayError
from lmetric_lab.replay.player import Player
from lmetric_lab.replay.programs import ProgramReport, summarize_programs
from lmetric_lab.replay.report import Report, summarize
from lmetric_lab.sim.summary import Slo, Spread

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
