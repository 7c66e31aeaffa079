"""Lets vLLM 0.32's OffloadingConnector run on the CPU build, which lacks only its copy kernels.

Part of this repository, under its license. Scheduler side, KV events, metrics and HTTP parameters
are vLLM's own; blocks are copied by torch, at once. Name it with `spec_name` and `spec_module_path`
in `kv_connector_extra_config`, with this folder in PYTHONPATH.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class TorchWorker(OffloadingWorker):
    """Copies blocks between the KV cache and a buffer for each of its tensors."""

    def __init__(self, caches: Any, blocks_per_chunk: int, chunks: int) -> None:
        self.caches, self.blocks_per_chunk = caches, blocks_per_chunk
        self.device = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in caches.tensors]
        self.host = [
            torch.zeros((chunks, t.page_size_bytes * blocks_per_chunk), dtype=torch.int8)
            for t in caches.tensors
        ]
        self.done: list[TransferResult] = []

    def _copy(self, job: int, gpu: Any, cpu: Any, *, store: bool) -> bool:
        start, copied = time.monotonic(), 0
        block = chunk = 0
        for group, (size, first) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=False)):
            if not size:
                continue
            skipped = first % self.blocks_per_chunk  # blocks of the first chunk before the first block
            for at in range(size):
                device = int(gpu.block_ids[block + at])
                host = int(cpu.block_ids[chunk + (skipped + at) // self.blocks_per_chunk])
                part = (skipped + at) % self.blocks_per_chunk
                for ref in self.caches.group_data_refs[group]:
                    width = self.caches.tensors[ref.tensor_idx].page_size_bytes
                    used = ref.page_size_bytes
                    far = self.host[ref.tensor_idx][host][part * width : part * width + used]
                    near = self.device[ref.tensor_idx][device][:used]
                    far.copy_(near) if store else near.copy_(far)
                    copied += used
            block += size
            chunk += -(-(skipped + size) // self.blocks_per_chunk)
        seconds = time.monotonic() - start
        self.done.append(
            TransferResult(job_id=job, success=True, transfer_size=copied, transfer_time=seconds)
        )
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies blocks to host memory."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies blocks back."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Returns the copies since the last call."""
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Does nothing: copies are done when they are submitted."""

    def shutdown(self) -> None:
        """Does nothing: there is no thread."""


class CpuBuildSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading with copies by torch."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Returns the worker, made on the first call."""
        if not self._worker:
            self._worker = TorchWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker
