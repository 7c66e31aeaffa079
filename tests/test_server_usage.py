"""Usage by day, tenant and model, and the files with which usage and budgets survive a restart."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import signal
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pytest
from pyarrow import parquet

from lmetric._core import BadValueError
from lmetric.config import ConfigError
from lmetric.server.api import openapi
from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.http.pages.table import PAGES
from lmetric.server.observe.usage import DAY_ROWS, DAYS, OTHER_MODELS, Row, UsageTable
from server_world import STREAM_HEAD, FakeEngine, World, answer, chunk, plain, token, world
from test_server_budgets import ask, budget, left, tenants
from test_workers import serving, workers_of
from waiting import until

ADMIN_ON = {"enabled": True}
WINDOWS = (budget("requests", 10, "month"), budget("total_tokens", 1000, "day", time_zone="UTC"))


async def usage(w: World, query: str = "") -> Any:
    status, page = await w.get(f"/admin/usage{query}")
    assert status == 200, page
    return page.decode() if "csv" in query else orjson.loads(page)


async def test_usage_counts_answered_requests_by_tenant_and_model() -> None:
    async with world(1, tenants={"a": {}, "b": {}}, admin=ADMIN_ON) as w:
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        for tenant, body in (("a", {}), ("a", {"stream": True}), ("b", {}), ("", {})):
            assert (await ask(w, tenant, **body))[0] == 200

        async def refuse(_: FakeEngine, __: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(plain(400, {"error": {"message": "no"}}))
            return True

        w.engines[0].behave = refuse
        assert (await ask(w))[0] == 400
        rows = await usage(w)
        if datetime.now(UTC).strftime("%Y-%m-%d") != day:
            pytest.skip("the day ended meanwhile")
        router = socket.gethostname()  # with its port, unless the configuration lets the system choose
        one: dict[str, Any] = {"router": router, "model": "tiny", "key": "", "day": day}
        one |= {"requests": 1, "input_tokens": 10, "output_tokens": 3}
        assert rows == [
            {**one, "tenant": "", "cached_tokens": 4},
            {**one, "tenant": "a", "requests": 2, "input_tokens": 20, "cached_tokens": 4, "output_tokens": 6},
            {**one, "tenant": "b", "cached_tokens": 4},
        ]
        table = [*csv.reader(io.StringIO(await usage(w, "?format=csv")))]
        assert table[0] == [
            "router",
            "day",
            "tenant",
            "key",
            "model",
            "requests",
            "input_tokens",
            "cached_tokens",
            "output_tokens",
        ]
        assert table[2] == [router, day, "a", "", "tiny", "2", "20", "4", "6"]
        status, file = await w.get("/admin/usage?format=parquet")
        assert status == 200
        read: Any = parquet.read_table(pyarrow.BufferReader(file))
        assert read.to_pylist() == rows
        _, text = await w.get("/metrics")
        assert b'lmetric_usage_tokens_total{kind="cached",model="tiny",tenant="a"} 4.0' in text
        assert b'lmetric_usage_requests_total{model="tiny",tenant="a"} 2.0' in text
        documented = openapi.document(PAGES.values())["paths"]["/admin/usage"]["get"]["responses"]["200"]
        answered = set()
        for query in ("json", "csv", "parquet"):
            async with w.client.get(f"{w.url}/admin/usage?format={query}") as response:
                answered.add(response.content_type)
        assert answered == set(documented["content"])
        for query in ("?format=xml", "?format=csv&format=json", "?day=1"):
            assert (await w.get(f"/admin/usage{query}"))[0] == 400


async def test_a_restart_keeps_budgets_and_usage(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    settings: dict[str, Any] = {
        "tenants": tenants(*WINDOWS),
        "admin": ADMIN_ON,
        "state_folder": str(folder),
    }
    async with world(1, **settings) as w:
        for _ in range(3):
            assert (await ask(w))[0] == 200
        before = await usage(w)
        # Also without a proper end: the files follow the counts.
        await until(lambda: any(b'"a"' in each.read_bytes() for each in folder.glob("usage-*.json")))
    async with world(1, **settings) as w:
        assert await usage(w) == before
        _, headers, _ = await ask(w)
        assert (left(headers, "requests"), left(headers)) == (6, 1000 - 4 * 13)


@pytest.mark.parametrize("content", [b"", b"x", b"[1]", b'{"columns": 1}', bytes(range(256))])
async def test_a_broken_file_is_set_aside_and_the_counts_begin_at_zero(
    tmp_path: Path, content: bytes
) -> None:
    for name in ("budgets.bin", "usage-2026-01-31.json"):
        (tmp_path / name).write_bytes(content)
    settings: dict[str, Any] = {
        "tenants": tenants(*WINDOWS),
        "admin": ADMIN_ON,
        "state_folder": str(tmp_path),
    }
    async with world(1, **settings) as w:
        assert await usage(w) == []
        _, headers, _ = await ask(w)
        assert left(headers, "requests") == 9
    assert (tmp_path / "budgets.broken").read_bytes() == content
    assert (tmp_path / "usage-2026-01-31.broken").read_bytes() == content
    async with world(1, **settings) as w:
        assert len(await usage(w)) == 1


async def test_a_folder_that_is_not_usable_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"state_folder: cannot use .*file: "):
        async with world(1, state_folder=str(file)):
            pass


def test_old_days_are_dropped_and_bad_files_refused() -> None:
    table = UsageTable()
    days = [
        (datetime(2026, 1, 1) + timedelta(days=number)).strftime("%Y-%m-%d") for number in range(DAYS + 1)
    ]
    for day in days[:-1]:
        table.add_rows([Row(day, "a", "", "m", (1, 2, 3, 4))])
    assert [row.day for row in table.rows()] == days[:-1]
    saved = table.save()
    assert set(saved) == {f"usage-{day}.json" for day in days[:-1]}
    assert table.save() == {}, "nothing has changed"
    table.add_rows([Row(days[-1], "a", "", "m", (1, 2, 3, 4))])
    assert [row.day for row in table.rows()] == days[1:]
    later = table.save()
    assert later.pop(f"usage-{days[0]}.json") is None
    last = later.pop(f"usage-{days[-1]}.json")
    assert last is not None
    assert days[-1] == "2027-02-05"
    assert not later
    other = UsageTable()
    for day in days[1:-1]:
        other.restore(saved[f"usage-{day}.json"] or b"")
    other.restore(last)
    assert other.rows() == table.rows()
    for broken in (last[:-4], last.replace(b"2,3", b"-2,3"), last.replace(b"02-0", b"13-0")):
        with pytest.raises(BadValueError, match="saved usage"):
            UsageTable().restore(broken)


def test_a_clock_that_was_wrong_for_a_while_loses_no_usage() -> None:
    table = UsageTable()
    days = [*(f"20{year}-11-29" for year in (26, 30, 26)), "1970-01-01", "2026-11-29", "2026-11-30"]
    for day in days:
        table.add_rows([Row(day, "a", "", "m", (1, 2, 3, 4))])
    counts = {row.day: row.counts[0] for row in table.rows()}
    assert counts == {"2026-11-29": 3, "2030-11-29": 1, "1970-01-01": 1, "2026-11-30": 1}
    assert None not in table.save().values(), "no file is removed"
    assert table._size == len(table.rows())


@pytest.mark.parametrize("wrong", ["1970-01-01", "2030-01-01"])
def test_a_wrong_day_takes_the_place_of_one_day_alone(wrong: str) -> None:
    table = UsageTable()
    days = [(datetime(2026, 1, 1) + timedelta(days=number)).strftime("%Y-%m-%d") for number in range(DAYS)]
    for day in (*days, wrong, wrong, days[-1]):
        table.add_rows([Row(day, "a", "", "m", (1, 2, 3, 4))])
    counts = {row.day: row.counts[0] for row in table.rows()}
    assert counts == dict.fromkeys(days[1:], 1) | {wrong: 2, days[-1]: 2}
    assert table._size == DAYS


def test_ever_new_models_fill_no_table() -> None:
    table = UsageTable()
    for number in range(DAY_ROWS + 5):
        table.add_rows([Row("2027-02-04", "a", "", f"m{number}", (1, 2, 3, 4))])
    rows = table.rows()
    assert len(rows) == DAY_ROWS + 1
    assert {row.model: row.counts for row in rows}[OTHER_MODELS] == (5, 10, 15, 20)


def test_ever_new_subjects_and_tenants_of_tokens_fill_no_table() -> None:
    table = UsageTable()
    for number in range(4 * DAY_ROWS):
        table.add_rows([Row("2027-02-04", f"t{number // 2}", f"{number:012x}", "m", (1, 2, 3, 4))])
    rows = table.rows()
    assert len(rows) == 2 * DAY_ROWS + 1
    further = {row.tenant: row.counts[0] for row in rows if row.model == OTHER_MODELS}
    assert further[f"t{DAY_ROWS // 2}"] == 2, "of both of its subjects"
    assert further[OTHER_TENANTS] == DAY_ROWS
    assert sum(row.counts[0] for row in rows) == 4 * DAY_ROWS, "all count"


async def test_workers_share_budgets_and_usage_and_a_killed_server_loses_less_than_a_second(
    tmp_path: Path,
) -> None:
    limits = "tenants={acme: {budgets: [{counts: requests, limit: 5, per: month}]}}"
    flags = ("--set", limits, "--set", f"state_folder={tmp_path}")
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3}
    async with serving(*flags, behave=answer) as (process, client, _):
        asked = [await client.post("/v1/completions", body, **{"x-tenant": "acme"}) for _ in range(4)]
        assert [status for status, _ in asked] == [200] * 4
        async with asyncio.timeout(60):
            rows: list[dict[str, Any]] = []
            while sum(row["requests"] for row in rows) < 4:
                await asyncio.sleep(0.05)
                rows = await client.get("/admin/usage")
        assert [row["input_tokens"] for row in rows] == [40]
        # A killed worker loses no count of a budget.
        old = workers_of(process)
        os.kill(old[0], signal.SIGKILL)
        await until(lambda: len(workers_of(process)) == 2 and workers_of(process) != old)
        await asyncio.sleep(1.0)  # what the documentation promises
        process.process.kill()
        await process.ended()
    cut = ("--set", "timeouts.drain=0.3", "--set", "timeouts.drain_grace=0")
    async with serving(*flags, *cut, behave=answer) as (process, client, engines):
        asked = [await client.post("/v1/completions", body, **{"x-tenant": "acme"}) for _ in range(3)]
        assert [status for status, _ in asked] == [200, 429, 429]
        assert (await client.get("/admin/usage"))[0]["requests"] >= 4

        # Requests that the end of the drain cuts are used. With several workers, their usage came
        # after the last message to the supervisor.
        async def slow(_: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(STREAM_HEAD + chunk(token("a")))
            await asyncio.sleep(60)
            return False

        engines[0].behave = slow
        streams = [await client.stream() for _ in range(4)]
        await asyncio.gather(*(each.content.readany() for each in streams))
        process.process.terminate()
        await process.ended()
    assert requests_in(tmp_path) - requests_in(tmp_path, "acme") == 4


def requests_in(folder: Path, tenant: str | None = None) -> int:
    """Returns the requests in the files of usage: of one tenant, or of all."""
    table = UsageTable()
    for file in folder.glob("usage-*.json"):
        table.restore(file.read_bytes())
    return sum(row.counts[0] for row in table.rows() if tenant in (None, row.tenant))
