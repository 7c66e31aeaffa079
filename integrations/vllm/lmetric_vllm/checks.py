"""Checks at the engine's start: versions, and features that the classes were not tested with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

VERSIONS = ("0.32", "0.33")  # of vLLM, tested
CONNECTORS = ("NixlConnector",)  # of KV, tested with the schedulers


class NotSupportedError(ValueError):
    """The engine has a version or a feature for which the class was not tested."""


def check_engine(name: str, config: VllmConfig) -> None:
    """Refuses an engine for which the scheduler `name` was not tested.

    Raises:
        NotSupportedError: the version or the feature, and what to do.
    """
    transfer = config.kv_transfer_config
    connector = transfer.kv_connector if transfer is not None else None
    untested = [
        (config.speculative_config is not None, "speculative decoding (--speculative-config)"),
        (
            connector not in (None, *CONNECTORS),
            f"the KV connector {connector} (--kv-transfer-config), only with {', '.join(CONNECTORS)}",
        ),
    ]
    _check(name, config, "--scheduler-cls", untested)


def check_cuts(name: str, scheduler: Scheduler) -> None:
    """Refuses an engine that cannot cut a prompt at any token, as the scheduler `name` needs.

    `SloScheduler` gives a step few tokens. `UniBoostScheduler` takes requests back for the tokens
    that a step has left. A whole prompt may need more.

    Raises:
        NotSupportedError: the feature, and what to do.
    """
    scheduling = scheduler.scheduler_config
    images = "vLLM sets it for models whose image tokens attend to each other"
    for used, feature in (
        # Prompts longer than a step's tokens would wait until nothing decodes.
        (not scheduling.enable_chunked_prefill, "whole prompts (--no-enable-chunked-prefill)"),
        # vLLM begins an image at the start of a step, and computes what fits: wrong answers.
        (scheduling.disable_chunked_mm_input, f"whole images (--disable-chunked-mm-input; {images})"),
        # vLLM rounds a step's tokens of a prompt down to blocks: to none, in each step.
        (
            scheduler.need_mamba_block_aligned_split,
            "whole blocks (--mamba-cache-mode align, the default of hybrid models with prefix caching)",
        ),
    ):
        if used:
            raise NotSupportedError(
                f"lmetric_vllm.{name} needs prompts that are cut at any token, and this engine computes "
                f"{feature}; start it without --scheduler-cls for lmetric_vllm.{name}, or without that"
            )


def check_blocks(name: str, scheduler: Scheduler) -> None:
    """Refuses an engine whose requests hold other blocks than one for each `block_size` tokens, as
    the scheduler `name` counts them.

    Raises:
        NotSupportedError: the groups of layers, and what to do.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    # Not its subclasses, which give blocks back or hold more.
    if [type(manager) for manager in managers] == [FullAttentionManager]:
        return
    types, full = {type(manager) for manager in managers}, {FullAttentionManager}
    # Else vLLM keeps the windows (all layers have them), or does not start (Mamba).
    is_local = full < types <= full | {SlidingWindowManager, ChunkedLocalAttentionManager}
    flag = ", or with --disable-hybrid-kv-cache-manager" if is_local else ""
    kinds = ", ".join(type(manager).__name__.removesuffix("Manager") for manager in managers) or "none"
    raise NotSupportedError(
        f"lmetric_vllm.{name} counts the KV blocks of full attention alone, and this model's groups of "
        f"layers are: {kinds}; start it without --scheduler-cls for lmetric_vllm.{name}{flag}"
    )


def check_collection(name: str, config: VllmConfig) -> None:
    """Refuses an engine that does not keep the states of one layer, or for which the connector
    `name` was not tested.

    Raises:
        NotSupportedError: the version or the feature, and what to do.
    """
    # The drafter of hidden states then counts one token of a step that gave two.
    repeats = "it repeats tokens in answers (vllm-project/vllm#56417); add --no-async-scheduling"
    asynchronous = config.scheduler_config.async_scheduling, f"asynchronous scheduling: {repeats}"
    _check(name, config, "--kv-transfer-config", [asynchronous])
    speculative = config.speculative_config
    found: Sequence[int] = ()
    if speculative is not None and speculative.method == "extract_hidden_states":
        draft = speculative.draft_model_config.hf_config
        found = getattr(draft, "eagle_aux_hidden_state_layer_ids", None) or ()
    if len(found) != 1:
        raise NotSupportedError(
            f"lmetric_vllm.{name} needs --speculative-config with the method extract_hidden_states and one "
            f"layer in eagle_aux_hidden_state_layer_ids, got {len(found)} layers"
        )


def _check(name: str, config: VllmConfig, flag: str, untested: list[tuple[bool, str]]) -> None:
    without = f"start it without {flag} for lmetric_vllm.{name}"
    if not vllm.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
        tested = " and ".join(VERSIONS)
        raise NotSupportedError(
            f"lmetric_vllm.{name} is tested with vLLM {tested}, and this engine is vLLM {vllm.__version__}; "
            f"{without}, or install a version of lmetric-vllm for it"
        )
    for used, feature in (*untested, *_untested(config)):
        if used:
            raise NotSupportedError(
                f"lmetric_vllm.{name} is not tested with {feature}; {without}, or without that"
            )


def _untested(config: VllmConfig) -> list[tuple[Any, str]]:
    parallel = config.parallel_config
    # vLLM sets the size to 1 in ranks of dense models. The index stays, so rank 1 ends the start.
    ranks = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    return [
        (ranks > 1, "data-parallel ranks (--data-parallel-size)"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism (--pipeline-parallel-size)"),
        (
            config.ec_transfer_config is not None,
            "encoder outputs of other engines (--ec-transfer-config)",
        ),
        (
            config.ec_manager_config.encoder_cache_manager_cls is not None,
            "another encoder cache (--ec-manager-config)",
        ),
        (config.model_config.runner_type != "generate", f"the runner {config.model_config.runner_type}"),
        (config.model_config.is_encoder_decoder, "encoder-decoder models"),
        (config.model_config.is_diffusion, "diffusion models"),
    ]
