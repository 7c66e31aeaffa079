"""The shared memory of workers: models that are removed, and budgets of many API keys."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from lmetric._core import BadValueError, BudgetReservation, Request
from lmetric.config import ServerConfig
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.observe.budgets import TenantBudgets
from lmetric.server.worker import memory
from lmetric.server.worker.channel import Channel
from lmetric.server.worker.worker import MOST_SENDERS, Results, Start, Worker

BUDGET = {"counts": "requests", "limit": 5, "per": "second", "per_key": True}
CONFIG = {"engines": ["http://127.0.0.1:1"], "tenants": {"a": {"budgets": [BUDGET]}}}


@asynccontextmanager
async def workers(number: int) -> AsyncIterator[list[tuple[Worker, Fleet]]]:
    """Yields workers with their fleets, without servers."""

    async def answer(name: str, value: Any) -> None:
        raise AssertionError(name)

    config = ServerConfig.model_validate(CONFIG)
    descriptor, made, channels = memory.make(), [], []
    for each in range(number):
        for end in socket.socketpair():
            channels.append(await Channel.open(end, answer))
        start = Start(config, (), each, each, ((),) * number, False, descriptor, "", b"secret", None)
        worker, fleet = Worker(start, channels[-1]), Fleet(config)
        fleet.number_model = worker.number_model
        fleet.on_model_made.append(worker.join)
        fleet.on_model_removed.append(worker.forget)
        made.append((worker, fleet))
    try:
        yield made
    finally:
        for channel in channels:
            await channel.close()
        os.close(descriptor)


async def test_a_model_that_returns_after_all_workers_removed_it_has_programs() -> None:
    async with workers(2) as both:
        for _ in range(2):
            made = [fleet.model("m") for _, fleet in both]
            for _ in range(3):
                for worker, _ in both:
                    await worker._publish()
            assert [model.router.has_programs_of_workers for model in made] == [True, True]
            for model, (_, fleet) in zip(made, both, strict=True):
                model.unserved_since = 0.0
                fleet.forget_unserved(time.monotonic() + 1e6)
                assert fleet.models == []


async def test_results_of_a_new_worker_count_also_if_its_process_has_an_earlier_id() -> None:
    """IDs of processes come back. Here, all workers have the same one."""
    async with workers(3) as [(old, _), (new, _), (other, _)]:
        other._early = None
        for number, worker in ((7, old), (1, new)):
            other.receive_results(Results(worker._process, number, {}))
        assert sorted(other._received.values()) == [1, 7]


async def test_the_messages_of_ended_workers_are_forgotten() -> None:
    async with workers(1) as [(worker, _)]:
        worker._early = None
        for process in range(1, 2 * MOST_SENDERS):
            for sender in (0, process):
                worker.receive_results(Results(sender, process, {}))
        assert len(worker._received) == MOST_SENDERS
        assert worker._received[0] == 2 * MOST_SENDERS - 1
        worker.receive_results(Results(0, 1, {}))  # an old one comes again
        assert worker._received[0] == 2 * MOST_SENDERS - 1


async def test_a_model_without_engines_stays_while_requests_wait_for_it() -> None:
    async with workers(1) as [(_, fleet)]:
        model = fleet.model("m")
        model.router.add_instance("e")
        model.router.set_admission({"tenants": {"t": {"max_concurrent": 1}}, "room_seconds": math.inf})
        request = Request(prompt_tokens=10, tenant="t")
        arrivals = [model.router.arrive(request) for _ in range(2)]
        assert [each.verdict for each in arrivals if each is not None] == ["free", "held"]
        model.unserved_since = 0.0
        fleet.forget_unserved(time.monotonic() + 1e6)
        assert fleet.models == [model]
        for each in arrivals:
            assert each is not None
            each.drop()
        fleet.forget_unserved(time.monotonic() + 1e6)
        assert fleet.models == []


async def test_a_model_for_which_the_memory_has_no_room_is_not_made() -> None:
    def refuse(_: Any) -> None:
        raise BadValueError("no room")

    async with workers(1) as [(_, fleet)]:
        fleet.on_model_made.append(refuse)
        for _ in range(2):
            with pytest.raises(BadValueError, match="no room"):
                fleet.model("m")
        assert (fleet.models, fleet.models_made) == ([], 0)


async def test_budgets_without_room_are_logged_once_until_there_is_room_again() -> None:
    async with workers(1) as [(worker, _)]:
        budgets = TenantBudgets(ServerConfig.model_validate(CONFIG).tenants, worker.board)
        worker.tidy_budgets = budgets.tidy
        for _ in range(2):
            with capture_logs() as log:
                now = time.monotonic()
                for key in range(30_000):
                    made = budgets.core.reserve("a", ("m", f"key {key}", ""), (1, 1), (now, now))
                    assert isinstance(made, BudgetReservation)
                    made.keep()
                for _ in range(3):
                    await worker._publish()
            assert [each["event"] for each in log] == [
                "this worker counts some budgets alone: the shared memory is full"
            ]
            await asyncio.sleep(2.1)  # all windows have passed
            with capture_logs() as log:
                for _ in range(500):
                    await worker._publish()
            assert log == []
            assert budgets.tidy() is None
