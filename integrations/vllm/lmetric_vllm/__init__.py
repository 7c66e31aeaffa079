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
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "lmetric":
                raise
            raise ImportError(
                f"lmetric_vllm.{name} needs lmetric-router in the engine's environment, which has no module "
                f"{error.name}: install the wheel (pip install lmetric-router)"
            ) from error
    raise AttributeError(f"module 'lmetric_vllm' has no attribute {name!r}; it has {', '.join(__all__)}")
