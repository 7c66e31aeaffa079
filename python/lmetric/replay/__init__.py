"""Sends a trace to an OpenAI-compatible server as it once arrived, and reports what its clients saw."""

from lmetric.replay.client import Client, Record, ReplayError
from lmetric.replay.player import Player
from lmetric.replay.report import Report, Slo, Spread, summarize

__all__ = ["Client", "Player", "Record", "ReplayError", "Report", "Slo", "Spread", "summarize"]
