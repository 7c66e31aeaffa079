"""An emulated vLLM: its HTTP API, metrics, load header and KV events over a modelled engine. No GPU.

Runs alone (``python -m lmetric.engines.emulated --port 8000``), in an event loop (`EngineServer`) or as
children of a process (`lmetric.engines.embedded`). Its text is words whose choice depends on all tokens
before and on nothing else, so any engine continues any other's answer; an answer ends only at the length that
was asked for, or at a stop string or stop token. Sampling parameters and tools are accepted and change
nothing.
"""

from lmetric.engines.emulated.errors import EngineStartError
from lmetric.engines.emulated.options import EngineOptions
from lmetric.engines.emulated.server import EngineServer, run_engine

__all__ = ["EngineOptions", "EngineServer", "EngineStartError", "run_engine"]
