"""Runs in an environment with Ray and verl: our load balancer, started by verl's own factory.

python verl_checks.py ROUTER_YAML: prints one JSON line. verl's module of routers is loaded without
the rest of verl, which needs torch. The calls are those of verl's ``LLMServerClient``.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import ray

TRAJECTORIES, TURNS = 16, 3


def router_module() -> Any:
    """Loads verl/workers/rollout/router.py without the packages around it."""
    (place,) = {
        Path(file.locate()).parent
        for file in importlib.metadata.files("verl") or ()
        if str(file) == "verl/__init__.py"
    }  # type: ignore[arg-type]
    for name in ("verl", "verl.utils", "verl.workers", "verl.workers.rollout"):
        package = types.ModuleType(name)
        package.__path__ = [str(place.joinpath(*name.split(".")[1:]))]
        package.__file__ = str(place / "__init__.py")
        sys.modules[name] = package
    return importlib.import_module("verl.workers.rollout.router")


@ray.remote
class Server:
    """Stands for a rollout server."""

    async def generate(self, prompt_ids: list[int]) -> list[int]:
        """Returns the prompt with an answer."""
        await asyncio.sleep(0.2)
        return [*prompt_ids, *range(prompt_ids[0] + 50_000, prompt_ids[0] + 50_100)]


class Client:
    """The calls of verl's ``LLMServerClient``."""

    def __init__(self, balancer: Any) -> None:
        self.balancer = balancer

    async def turn(self, request_id: str, prompt_ids: list[int]) -> tuple[str, list[int]]:
        """Sends one turn. Returns the server's name and the prompt with its answer."""
        given = {"prompt_ids": prompt_ids, "sampling_params": {"max_tokens": 100}, "image_data": None}
        wanted = await self.balancer.require_acquire_fields.remote()
        fields = {name: given[name] for name in wanted if name in given}
        name, server = await self.balancer.acquire_server.remote(request_id=request_id, **fields)
        try:
            return name, await server.generate.remote(prompt_ids)
        finally:
            wanted = await self.balancer.require_release_fields.remote()
            fields = {each: {"request_id": request_id}[each] for each in wanted}
            self.balancer.release_server.remote(server_id=name, **fields)


async def checks(config: str) -> dict[str, Any]:
    """Runs all checks."""
    module = router_module()
    from lmetric.gateways.verl import LmetricLoadBalancer

    protocol = module.RequestLoadBalancer
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    servers = {f"s{number}": Server.remote() for number in range(4)}
    balancer = module.get_router_handle(servers=servers, router_config_path=config)
    client = Client(balancer)
    homes: dict[str, list[str]] = {}

    async def trajectory(number: int) -> None:
        prompt = [number * 100_000 + token for token in range(600)]
        for _ in range(TURNS):
            name, prompt = await client.turn(str(number), prompt)
            homes.setdefault(str(number), []).append(name)

    await asyncio.gather(*map(trajectory, range(TRAJECTORIES)))
    while in_flight := await balancer.get_total_inflight.remote():  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.05)
    await balancer.remove_servers.remote(["s0"])
    without = await balancer.get_all_servers.remote()
    await balancer.clear_sticky_cache.remote()
    later = [(await client.turn(str(number), [1, 2, 3]))[0] for number in range(6)]
    await balancer.remove_servers.remote(without)
    try:
        await client.turn("r", [1])
        empty = ""
    except RuntimeError as error:
        empty = str(error.cause if hasattr(error, "cause") else error)
    return {
        "version": importlib.metadata.version("verl"),
        "missing": [name for name in methods if not hasattr(LmetricLoadBalancer, name)],
        "homes": homes,
        "in_flight": in_flight,
        "without": without,
        "later": later,
        "empty": empty,
    }


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    print(json.dumps(asyncio.run(checks(sys.argv[1]))))
