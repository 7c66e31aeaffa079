"""Checks at the engine's start: versions, and features that the schedulers were not tested with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERSIONS = ("0.32",)  # of vLLM, tested


class NotSupportedError(ValueError):
    """The engine has a version or a feature for which the scheduler was not tested."""


def check_engine(name: str, config: VllmConfig) -> None:
    """Refuses an engine for which the scheduler `name` was not tested.

    Raises:
        NotSupportedError: the version or the feature, and what to do.
    """
    without = f"start it without --scheduler-cls lmetric_vllm.{name}"
    if not vllm.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
        tested = " and ".join(VERSIONS)
        raise NotSupportedError(
            f"lmetric_vllm.{name} is tested with vLLM {tested}, and this engine is vLLM {vllm.__version__}; "
            f"{without}, or install a version of lmetric-vllm for it"
        )
    for used, feature in _untested(config):
        if used:
            raise NotSupportedError(
                f"lmetric_vllm.{name} is not tested with {feature}; {without}, or without that"
            )


def _untested(config: VllmConfig) -> list[tuple[Any, str]]:
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    connector = transfer.kv_connector if transfer is not None else None
    return [
        (config.speculative_config is not None, "speculative decoding (--speculative-config)"),
        (
            parallel.data_parallel_size > 1,
            f"data-parallel ranks (--data-parallel-size {parallel.data_parallel_size})",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism (--pipeline-parallel-size)"),
        (connector is not None, f"the KV connector {connector} (--kv-transfer-config)"),
        (config.model_config.runner_type != "generate", f"the runner {config.model_config.runner_type}"),
        (config.model_config.is_encoder_decoder, "encoder-decoder models"),
    ]
