"""The fleet on which decisions are timed: instances with a million cached blocks, and prompts that
hit.

As in real traffic, all prompts share a beginning that every instance holds. They continue with a
part that one or two instances hold, and end with a tenth that is new.

The fleet has token ids only; each
subject computes its own hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmetric._core import Router

BLOCK = 16
INSTANCES = 256
SHARED_BLOCKS = 32
# Blocks of a prompt -> number of such prompts. Nine tenths of each prompt are stored: together
# about a million pairs.
PROMPTS = {64: 1500, 512: 500, 2048: 400}
SECOND_COPY = 10  # Interval of the prompts that two instances hold.


@dataclass
class Prompt:
    """A prompt and the instances that hold its first nine tenths."""

    tokens: NDArray[np.uint32]
    hashes: NDArray[np.uint64]  # The engine's names of its stored blocks, shared blocks first.
    holders: list[int]


class Fleet:
    """Prompts by length in blocks, and the blocks of each instance."""

    def __init__(
        self, prompts: Mapping[int, int] = PROMPTS, seed: int = 0, instances: int = INSTANCES
    ) -> None:
        rng = np.random.default_rng(seed)
        ids = lambda count: rng.integers(0, 150_000, count, dtype=np.uint32)  # noqa: E731
        names = lambda count: rng.integers(1, 2**63, count, dtype=np.uint64)  # noqa: E731
        self.rng = rng
        self.names = [f"engine-{i}" for i in range(instances)]
        self.shared = ids(SHARED_BLOCKS * BLOCK)
        self.shared_hashes = names(SHARED_BLOCKS)
        self.prompts: dict[int, list[Prompt]] = {}
        turn = 0
        for blocks, count in prompts.items():
            for i in range(count):
                tokens = np.concatenate([self.shared, ids((blocks - SHARED_BLOCKS) * BLOCK)])
                hashes = np.concatenate([self.shared_hashes, names(blocks * 9 // 10 - SHARED_BLOCKS)])
                holders = [turn % instances]
                if i % SECOND_COPY == 0:
                    holders.append((turn + 101) % instances)
                turn += 1
                self.prompts.setdefault(blocks, []).append(Prompt(tokens, hashes, holders))

    def stored(self) -> list[tuple[int, int | None, NDArray[np.uint64], NDArray[np.uint32]]]:
        """Returns the reports that engines would send: instance, parent block, names of the blocks,
        their tokens."""
        events: list[tuple[int, int | None, NDArray[np.uint64], NDArray[np.uint32]]] = []
        for instance in range(len(self.names)):
            events.append((instance, None, self.shared_hashes, self.shared))
        parent = int(self.shared_hashes[-1])
        for prompts in self.prompts.values():
            for prompt in prompts:
                own = prompt.hashes[SHARED_BLOCKS:]
                tokens = prompt.tokens[SHARED_BLOCKS * BLOCK : len(prompt.hashes) * BLOCK]
                events += [(instance, parent, own, tokens) for instance in prompt.holders]
        return events

    def pairs(self) -> int:
        """Returns the number of stored (instance, block) pairs."""
        return sum(len(hashes) for _, _, hashes, _ in self.stored())

    def router(self, policy: str = "lmetric", **options: object) -> Router:
        """Returns this project's router over the fleet, fed by the engines' reports."""
        router = Router(policy, block_size=BLOCK, kv_source="exact", index_bytes=1 << 30, **options)  # type: ignore[arg-type]
        for i, name in enumerate(self.names):
            router.add_instance(name)
            router.report_load(name, waiting=float(i % 3), running=float(i % 17), kv_usage=i % 10 / 10)
        for instance, parent, hashes, tokens in self.stored():
            router.blocks_stored(self.names[instance], hashes, tokens, parent=parent)
        return router
