"""Schedulers for vLLM engines, from the papers behind lmetric-router, and a collector of states.

    vllm serve MODEL --scheduler-cls lmetric_vllm.SloScheduler \\
        --additional-config '{"lmetric": {"token_slo_ms": 50, "profile": "profile.yaml"}}'

Each subclasses vLLM's own scheduler and changes as little of it as possible. The core computes
step times, boosts and gamma. `HiddenStatesConnector` writes hidden states for training.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmetric_vllm.boost import UniBoostScheduler
    from lmetric_vllm.hidden import HiddenStatesConnector
    from lmetric_vllm.slo import SloScheduler

__all__ = ["HiddenStatesConnector", "SloScheduler", "UniBoostScheduler"]

_HOMES = {
    "HiddenStatesConnector": "lmetric_vllm.hidden",
    "SloScheduler": "lmetric_vllm.slo",
    "UniBoostScheduler": "lmetric_vllm.boost",
}


def __getattr__(name: str) -> Any:  # vLLM is imported with the first class
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lmetric_vllm' has no attribute {name!r}; it has {', '.join(__all__)}")
