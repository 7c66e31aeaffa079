"""The callback of the benchmark: our strategy if LMETRIC_POLICY is set, else LiteLLM's own one.

It writes the seconds of each choice of a deployment to the file LMETRIC_TIMES, one per line. Both
sides are timed in the same way, from LiteLLM's call until the deployment is known.
"""

import functools
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger

from lmetric.gateways.litellm import LmetricStrategy

_times = Path(os.environ["LMETRIC_TIMES"])


def _write(seconds: float) -> None:
    with _times.open("a") as file:
        file.write(f"{seconds:.7f}\n")


def _timed(choose: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(choose)
    async def run(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        chosen = await choose(*args, **kwargs)
        _write(time.perf_counter() - begun)
        return chosen

    return run


strategy: CustomLogger
if policy := os.environ.get("LMETRIC_POLICY"):
    LmetricStrategy.async_get_available_deployment = _timed(LmetricStrategy.async_get_available_deployment)
    strategy = LmetricStrategy(policy, tokenizer=os.environ.get("LMETRIC_TOKENIZER"))
else:
    litellm.Router.async_get_available_deployment = _timed(litellm.Router.async_get_available_deployment)
    strategy = CustomLogger()
