"""Breaks one of three engines behind a router, in each way, while clients check every answer.

    python bench/chaos/run.py --out FILE.csv [--subjects lmetric vllm-ca ...] [--faults killed ...]
    python bench/chaos/run.py --storm 600 --seed 1

The first form writes one row per router and fault. A request is lost if its client got an error,
a broken or wrong answer, or none within 30 s. The second form sets faults at random from a seed,
one engine at a time, before our router only. It fails if a request is lost, if a count remains, or
if an hour's storm adds over 8 MiB to the router's memory after its first 40%. A request that meets
faults of two engines may end with an error. After two failures of the same kind, the router takes
it for their cause, and tries no third engine.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))

from engines import EngineProcess
from faults import FAULTS, Fault
from growth import growth_of, leaks
from line_up import SUBJECTS
from routers import Router, fleet, routed, samples, settled
from traffic import Asked, Traffic

RATE = 15.0  # requests per second
BEFORE, DURING, AFTER = 2.0, 5.0, 4.0  # seconds
RECOVERY_SECONDS = 3.0  # from a fault's end until the router sends its engine requests again


@dataclass
class Row:
    """The answers of a router to its clients during a fault."""

    subject: str
    fault: str
    requests: int
    right: int
    wrong: int
    error: int
    broken: int
    late: int
    lost: int
    recovery_seconds: float  # from the fault to the last end of a lost request
    slowest_first_token_seconds: float
    in_flight_at_end: str  # as the router counts; empty: it does not say
    example: str  # of a lost request


async def play(subject: str, fault: Fault, engines: Sequence[EngineProcess], seed: int, python: Path) -> Row:
    """Plays one fault of the first engine."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        routed(subject, engines, session, python) as router,
    ):
        traffic = Traffic([router.url], seed, RATE)
        sending = asyncio.create_task(traffic.run(BEFORE + DURING + AFTER, session))
        await asyncio.sleep(BEFORE)
        began = time.monotonic()
        await fault.begin(engines[0])
        await asyncio.sleep(DURING)
        await fault.end(engines[0])
        await sending
        left = await settled(router, session)
        await traffic.judge([engines[1].direct_url], session)
    return row_of(subject, fault, traffic, began, left)


def row_of(subject: str, fault: Fault, traffic: Traffic, began: float, left: str) -> Row:
    """The figures of a run."""
    outcomes = traffic.outcomes()
    lost = [asked for asked in traffic.asked if asked.outcome != "right"]
    firsts = [asked.first_token_seconds for asked in traffic.asked if asked.first_token_seconds is not None]
    return Row(
        subject=subject,
        fault=fault.name,
        requests=len(traffic.asked),
        **{name: outcomes[name] for name in ("right", "wrong", "error", "broken", "late")},
        lost=len(lost),
        recovery_seconds=round(max((asked.ended - began for asked in lost), default=0.0), 2),
        slowest_first_token_seconds=round(max(firsts, default=0.0), 2),
        in_flight_at_end=left,
        example=_example(lost),
    )


def _example(lost: Sequence[Asked]) -> str:
    return f"{lost[0].kind}, {lost[0].outcome}: {lost[0].note}"[:160].replace("\n", " ") if lost else ""


@dataclass(frozen=True)
class Broken:
    """A fault of an engine, in seconds on the monotonic clock."""

    engine: str
    began: float
    ended: float


def met_two(asked: Asked, faults: Sequence[Broken]) -> bool:
    """Whether two engines were broken or recovered while a request ran."""
    met = {
        fault.engine
        for fault in faults
        if fault.began <= asked.ended and asked.began <= fault.ended + RECOVERY_SECONDS
    }
    return len(met) > 1


async def memory_of(router: Router, session: aiohttp.ClientSession) -> float:
    """Its memory without the KV index and the token cache, which fill for hours, MiB."""
    async with session.get(f"{router.url}/metrics") as response:
        page = await response.text()
    caches = [samples(page, f"lmetric_{name}_bytes") for name in ("index", "token_cache")]
    return router.rss_mib() - sum(value for found in caches for value in found.values()) / 2**20


async def storm(
    seconds: float, seed: int, names: Sequence[str]
) -> tuple[Traffic, str, list[Broken], list[float]]:
    """Sets faults at random. Returns the traffic, the count at the end, the faults, and the
    router's memory after each fault, MiB."""
    rng = random.Random(seed)
    done: list[Broken] = []
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    python = Path(sys.executable)
    async with (
        fleet(seed) as engines,
        aiohttp.ClientSession(connector=connector) as session,
        routed("lmetric", engines, session, python) as router,
    ):
        traffic = Traffic([router.url], seed, RATE)
        began = time.monotonic()
        sending = asyncio.create_task(traffic.run(seconds, session))
        memory: list[float] = []
        while time.monotonic() - began < seconds - 3:
            fault, engine = FAULTS[rng.choice(names)], rng.choice(engines)
            broke = time.monotonic()
            await fault.begin(engine)
            await asyncio.sleep(rng.uniform(0.2, 4.0))
            await fault.end(engine)
            done.append(Broken(engine.name, broke, time.monotonic()))
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            memory.append(await memory_of(router, session))
        await sending
        left = await settled(router, session)
        await traffic.judge([engine.direct_url for engine in engines], session)
    return traffic, left, done, memory


def main() -> None:
    """Plays faults, or a storm of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file with one row per router and fault")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--storm", type=float, metavar="SECONDS", help="faults at random for this long")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        help="the rivals' Python (bench/rivals/install.sh)",
    )
    given = parser.parse_args()
    if given.storm:
        traffic, left, done, memory = asyncio.run(storm(given.storm, given.seed, given.faults))
        failed = [asked for asked in traffic.asked if asked.outcome != "right"]
        lost = [asked for asked in failed if asked.outcome != "error" or not met_two(asked, done)]
        for asked in lost:
            print(asked)
        outcomes = dict(traffic.outcomes())
        growth = growth_of(memory, len(traffic.asked))
        grown = "not judged: too few requests" if growth is None else f"{growth:+.1f} MiB after the warm-up"
        print(
            f"{len(done)} faults, {outcomes}, {len(lost)} lost, in flight {left}, memory {grown} "
            f"({memory[0]:.1f} to {memory[-1]:.1f} MiB)"
        )
        sys.exit(bool(lost) or left != "0" or leaks(growth))
    asyncio.run(matrix(given.out, given.subjects or ["lmetric"], given.faults, given.seed, given.python))


async def matrix(
    out: Path | None, subjects: Sequence[str], faults: Sequence[str], seed: int, python: Path
) -> None:
    """Plays each fault before each router."""
    rows: list[Row] = []
    async with fleet(seed) as engines:
        for fault in faults:
            for subject in subjects:
                row = await play(subject, FAULTS[fault], engines, seed, python)
                rows.append(row)
                print(asdict(row), flush=True)
    if out is not None:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
