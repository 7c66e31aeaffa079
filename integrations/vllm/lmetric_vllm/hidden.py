"""`HiddenStatesConnector`: hidden states of a share of the requests, as training data of lengths.

    vllm serve MODEL --speculative-config '{"method": "extract_hidden_states", ...}' \\
        --kv-transfer-config '{"kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "lmetric_vllm", ...}'

vLLM caches the states of one layer; the connector writes a few of each finished request.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
)
from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.request import RequestStatus

from lmetric.lengths.files import STATES_FORMAT
from lmetric_vllm.checks import check_collection
from lmetric_vllm.folder import EVERY, StatesFolder, is_collected, name_of
from lmetric_vllm.settings import read_connector_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.lmetric")

MOST_PENDING = 64
"""Requests whose states wait for the disk; further ones are left out, so memory stays bounded."""

# An aborted request has no length that a predictor could learn.
ENDED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


@dataclass(frozen=True)
class FinishedRequest:
    """A request that ended, as the worker needs it to write its states."""

    req_id: str
    prompt_tokens: int
    answer_tokens: int
    block_ids: list[int]


class _Copied:
    """In place of a CUDA event: the copy has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes the states of a share of the requests, after 0, 20, 40, ... generated tokens.

    Clients choose nothing: neither the requests nor the files. No prompt or answer is written.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_collection(type(self).__name__, vllm_config)
        settings = read_connector_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._share = settings.share
        self._folder = StatesFolder(settings.shared_storage_path, settings.max_bytes)
        super().__init__(vllm_config, role, kv_cache_config)
        # One thread: it alone adds to the folder, so the limit holds.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmetric-states")
        self._ended: list[FinishedRequest] = []
        self._logged: set[str] = set()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = ExampleHiddenStatesConnectorMetadata(pending_saves=self._ended)
        self._ended = []
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # A request that was preempted ends without its states if its last tokens come after that.
        has_states = request.num_computed_tokens >= request.num_prompt_tokens + request.num_output_tokens - 1
        if (
            request.status not in ENDED
            or not (has_states and request.num_output_tokens)
            or not is_collected(request.request_id, self._share)
        ):
            return False, None
        self._ended.append(
            FinishedRequest(
                request.request_id, request.num_prompt_tokens, request.num_output_tokens, list(block_ids)
            )
        )
        return True, None

    def _submit_async_write(self, pending: FinishedRequest) -> None:
        if not self._is_tp_rank_zero:
            return
        # The blocks are freed when the event of the copy has come.
        self._req_copy_events[pending.req_id] = _Copied()
        if len(self._req_futures) >= MOST_PENDING:
            self._log_once("the disk is too slow for all states of the share; some are left out")
            return
        states, copied = self._copy(pending)
        self._req_copy_events[pending.req_id] = copied
        future = self._executor.submit(self._write, pending, states, copied)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _copy(self, pending: FinishedRequest) -> tuple[torch.Tensor, Any]:
        """The states in host memory, shape (n, hidden), once the event has come."""
        assert self._kv_cache is not None
        # The state of the last prompt token knows 0 generated tokens.
        at = torch.arange(0, pending.answer_tokens, EVERY) + pending.prompt_tokens - 1
        blocks = torch.tensor(pending.block_ids)[at // self._block_size]
        if self._kv_cache.is_cpu:
            return self._kv_cache[blocks, 0, at % self._block_size], _Copied()
        # On the stream of the model: behind the step that wrote them, before blocks are used again.
        with gpu_sync_allowed():
            where = torch.stack((blocks, at % self._block_size)).to(self._kv_cache.device)
            found = self._kv_cache[where[0], 0, where[1]]
            states = torch.empty_like(found, device="cpu", pin_memory=True)
            states.copy_(found, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return states, copied

    def _write(self, pending: FinishedRequest, states: torch.Tensor, copied: Any) -> None:
        copied.synchronize()
        about = {
            "format": STATES_FORMAT,
            "prompt_tokens": str(pending.prompt_tokens),
            "answer_tokens": str(pending.answer_tokens),
            "every": str(EVERY),
        }
        try:
            if not self._folder.write(name_of(pending.req_id), save({"hidden_states": states}, about)):
                self._log_once("the files have max_bytes; no state is written until some are deleted")
        except OSError as error:
            self._log_once(f"states cannot be written: {error.strerror}")

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("HiddenStatesConnector: %s", text)
