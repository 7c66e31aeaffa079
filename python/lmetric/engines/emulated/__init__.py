"""An emulated vLLM: HTTP API, metrics, load header and KV events of a modeled engine, without a
GPU.

It runs alone (``python -m lmetric.engines.emulated --port 8000``), in an event loop
(`EngineServer`) or as child processes (`lmetric.engines.embedded`). Its words depend only on all
earlier tokens, so any engine can continue the answer of another. An answer ends at the requested
length, or at a stop string or stop token. Sampling parameters and tools are accepted without
effect.
"""

from lmetric.engines.emulated.errors import EngineStartError
from lmetric.engines.emulated.options import EngineOptions
from lmetric.engines.emulated.server import EngineServer, run_engine

__all__ = ["EngineOptions", "EngineServer", "EngineStartError", "run_engine"]
