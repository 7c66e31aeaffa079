"""The scheduler on the engine's page of metrics: `lmetric_scheduler_info`.

vLLM loads `SchedulerInfo` by the entry point `vllm.stat_logger_plugins` of this package, in the
process of the API server.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from lmetric_vllm.settings import BoostSettings, SloSettings, read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SETTINGS: dict[str, type[SloSettings] | type[BoostSettings]] = {
    "SloScheduler": SloSettings,
    "UniBoostScheduler": BoostSettings,
}
_LABELS = ("scheduler", "version", *SloSettings.model_fields, *BoostSettings.model_fields)


@functools.cache
def _gauge() -> Gauge:
    return Gauge(
        "lmetric_scheduler_info",
        "The scheduler of lmetric-vllm, and its settings",
        _LABELS,
        multiprocess_mode="mostrecent",
    )


class SchedulerInfo(StatLoggerBase):
    """Shows the engine's scheduler if it is one of this package's."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        chosen = vllm_config.scheduler_config.scheduler_cls
        path = chosen if isinstance(chosen, str) else getattr(chosen, "__qualname__", "")
        name = path.rpartition(".")[2]
        if name not in SETTINGS:
            return
        settings = read_settings(SETTINGS[name], vllm_config.additional_config)
        given = settings.model_dump(exclude_none=True)
        labels = {"scheduler": name, "version": version("lmetric-vllm"), **given}
        # Settings without a value have an empty label.
        _gauge().labels(*(_text(labels.get(label, "")) for label in _LABELS)).set(1)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Records nothing."""

    def log_engine_initialized(self) -> None:
        """Logs nothing."""


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
