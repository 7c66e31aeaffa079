"""An emulated vLLM: HTTP API, metrics, load header and KV events of a modeled engine, without a
GPU.

It runs alone (``python -m lmetric_lab.emulated --port 8000``), in an event loop
(`EngineServer`) or as child processes (`lmetric_lab.embedded`). Its words depend only on all
earlier tokens, so any engine can continue the answer of another. An answer ends at the requested
length, or at a stop string or stop token. Sampling parameters and tools are accepted without
effect.
"""

from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.server import EngineServer, run_engine

__all__ = ["EngineOptions", "EngineServer", "run_engine"]
