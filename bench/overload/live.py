"""Overload on emulated engines: two engines, a router over real sockets, and two tenants.

    python bench/overload/live.py [--out bench/overload/live.csv]

The trace and the figures are those of the simulated study (`world.py`), with the workload
`documents` on two engines whose clock is four times as fast. Arms alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import world
import yaml
from world import FLOOD, NEIGHBOR, TTFT_SECONDS, joined, made

from lmetric_lab.demo import running_router
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions
from lmetric_lab.ports import free_ports
from lmetric_lab.replay import Client, Player, Record
from lmetric_lab.sim.prompts import PromptWriter

WORKLOAD, ENGINES, SPEED = "documents", 2, 4.0
SECONDS, WARM_SECONDS = 160.0, 40.0  # of the trace
DEADLINE = TTFT_SECONDS[WORKLOAD] / SPEED
# Load of the tenant and of the other one, over the capacity.
LOADS = [(0.8, 0.0), (1.5, 0.0), (3.0, 0.0), (0.4, 0.4), (0.4, 3.0)]
FIELDS = [
    "load",
    "other",
    "admission",
    "requests",
    "good",
    "refused",
    "late",
    "broken",
    "ttft_p50",
    "ttft_p99",
]


def _name(tenant: int) -> str:
    return f"tenant-{tenant}"


async def play(load: float, other: float, admission: bool, seed: int) -> dict[str, Any]:
    """One run; returns the figures of the tenant. Times are on the engines' clock."""
    most = world.capacity(WORKLOAD, seed) * ENGINES / world.INSTANCES
    tenants = {NEIGHBOR: load, FLOOD: other}
    traces = {t: made(WORKLOAD, share * most, SECONDS, seed, t) for t, share in tenants.items() if share}
    options = EngineOptions(profile="qwen3-30b-a3b-h20", clock_speed=SPEED)
    async with EmbeddedEngines(ENGINES, options, kv_events=True) as engines:
        with tempfile.TemporaryDirectory() as folder:
            config: dict[str, Any] = {"engines": [{"url": url} for url in engines.urls]}
            config["tenants"] = {_name(tenant): {} for tenant in tenants}
            if admission:
                config["admission"] = {"ttft_seconds": DEADLINE}
            path = Path(folder) / "router.yaml"
            path.write_text(yaml.safe_dump(config))
            async with running_router(free_ports(1)[0], ["--config", str(path)]) as url:
                return await drive(url, traces) | {"load": load, "other": other, "admission": admission}


async def drive(url: str, traces: dict[int, Any]) -> dict[str, Any]:
    """Sends the traces of all tenants at once."""
    whole = joined(traces)  # gives the prompts of different tenants different tokens
    async with Client(url) as first:
        players = []
        clients = []
        for tenant in traces:
            client = await Client(url, model=first.model).__aenter__()
            client.session.headers["x-tenant"] = _name(tenant)
            clients.append(client)
            mine = np.flatnonzero(whole.sessions == tenant)
            part = replace(whole.take(mine), sessions=None)
            players.append(Player(part.faster(SPEED), client, PromptWriter(seed=tenant).prompt))
        try:
            limit = (SECONDS / SPEED) + 20.0
            await asyncio.wait_for(asyncio.gather(*(player.run() for player in players)), limit)
        except TimeoutError:
            for player in players:
                player.stop()
        finally:
            for client in clients:
                await client.__aexit__(None, None, None)
    return figures(players[0].records)


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """The figures of the requests that are due after the start."""
    counted = [record for record in records if record.due >= WARM_SECONDS / SPEED]
    ttft = [record.first_token - record.due for record in counted if record.first_token is not None]
    refused = sum(record.error == "http_429" for record in counted)
    late = sum(seconds > DEADLINE for seconds in ttft)
    good = len(ttft) - late
    return {
        "requests": len(counted),
        "good": round(good / len(counted), 4),
        "refused": round(refused / len(counted), 4),
        "late": round(late / len(counted), 4),
        # No first token within the run, or another error.
        "broken": round((len(counted) - len(ttft) - refused) / len(counted), 4),
        "ttft_p50": round(SPEED * float(np.percentile(ttft, 50)), 3) if ttft else "",
        "ttft_p99": round(SPEED * float(np.percentile(ttft, 99)), 3) if ttft else "",
    }


def main() -> None:
    """Plays every load without and with admission; writes one line per run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    for load, other in LOADS:
        for admission in (False, True):
            rows.append(asyncio.run(play(load, other, admission, args.seed)))
            print(rows[-1], flush=True)
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
