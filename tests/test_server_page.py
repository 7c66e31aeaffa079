"""The live page in Chromium: sizes, themes, keyboard, credentials, updates, many engines."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from browser_world import browser, large_world, load_engines, login, needs_browser, open_page, shown
from lmetric._core import __version__
from lmetric.server.http.running import REPLACED
from lmetric.why import number
from server_world import FakeEngine, World, reset, world

pytestmark = [needs_browser, pytest.mark.asyncio(loop_scope="module")]
UPDATED = "Number(document.documentElement.dataset.updates || 0) >= 2"
SIZES = [(1920, 1080), (1280, 800), (768, 1024), (390, 844)]
ALTERNATIVES = """() => [...document.querySelectorAll('#alternatives tbody tr')].map((row) => ({
  name: row.firstChild.textContent, chosen: row.classList.contains('chosen'),
  bars: [...row.querySelectorAll('b')].map((bar) => Number(bar.style.transform.slice(7, -1))),
  texts: [...row.querySelectorAll('em')].map((text) => text.textContent),
}))"""
# Pixels of a chart in about the color of its last line, which covers the first one.
COLORED = """(chart) => {
  const canvas = document.querySelectorAll('#charts canvas')[chart];
  const color = getComputedStyle(document.documentElement).getPropertyValue('--b').trim();
  const wanted = [1, 3, 5].map((start) => parseInt(color.slice(start, start + 2), 16));
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 128 && wanted.every((value, part) => Math.abs(data[i + part] - value) < 40)) count += 1;
  }
  return count;
}"""


SPY = """async () => {
  const { Charts } = await import("/ui/charts.js");
  const { draw } = Charts.prototype;
  Charts.prototype.draw = function () { window.seenCharts = this; draw.call(this); };
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    """A browser for all tests: `open_page` gives each a context of its own, with empty storage."""
    async with browser() as started:
        yield started


@contextlib.asynccontextmanager
async def traffic(it: World) -> AsyncIterator[None]:
    """Requests with shared prompt starts, until the end of the block."""

    async def client(number: int) -> None:
        turn = 0
        while True:
            turn += 1
            prompt = f"system {number % 2} " * 80 + f"turn {turn}"
            await it.post({"model": "tiny", "prompt": prompt, "stream": True})
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(client(number)) for number in range(3)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await it.settled()


async def fits(page: Any) -> None:
    """Nothing is wider than the window."""
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def shows_alternatives(page: Any, record: dict[str, Any]) -> None:
    """The open dialog has the record's best engines, with bars in proportion to their values."""
    rows = await page.evaluate(ALTERNATIVES)
    best = record["best"]
    assert len(best) == 4
    chosen = [each["name"] for each in rows if each["chosen"]]
    assert chosen == [f"{record['instance']} ✓"]
    assert [each["name"].removesuffix(" ✓") for each in rows] == [each["instance"] for each in best]
    values = [[each["score"], *each["terms"].values()] for each in best]
    assert len(values[0]) >= 3
    for column in range(len(values[0])):
        most = max(abs(row[column]) for row in values) or 1.0
        for row, drawn in zip(values, rows, strict=True):
            assert drawn["bars"][column] == pytest.approx(abs(row[column]) / most, abs=0.001)
            assert drawn["texts"][column] == number(row[column])
    assert max(row["bars"][0] for row in rows) == 1


async def test_why_a_request_went_to_its_engine(chromium: Any) -> None:
    async with world(4, policy="lmetric") as it, traffic(it):
        load_engines(it)
        async with open_page(chromium, it.url, viewport={"width": 1280, "height": 800}) as page:
            await shown(page, UPDATED)
            await shown(page, "document.querySelectorAll('#list tbody a').length > 3")
            assert "4 of 4 usable" in await page.inner_text("#counts")
            assert await page.locator("#rows .row:visible").count() == 4
            assert await page.locator("#charts canvas").count() == 7
            assert await page.inner_text("#now dd:first-of-type") != "–"
            # By keyboard: a request, its reasons, and back.
            await page.focus("#list tbody a")
            await page.keyboard.press("Enter")
            await shown(page, "document.getElementById('because').textContent.startsWith('Because e')")
            assert "new prefill tokens x batch size" in await page.inner_text("#because")
            label = (await page.evaluate("location.hash")).removeprefix("#request=")
            _, body = await it.get(f"/debug/decisions/{label}")
            record = orjson.loads(body)
            await shows_alternatives(page, record)
            kinds = "[...document.querySelectorAll('#timeline rect')].map((box) => box.getAttribute('class'))"
            assert await page.evaluate(kinds) == [part["kind"] for part in record["timeline"]]
            assert record["timeline"][0]["kind"] == "prefill"
            await page.keyboard.press("Escape")
            assert not await page.evaluate("document.getElementById('details').open")
            await shown(page, "location.hash === ''")
            # The table by keyboard: the second engine is the hot one.
            await page.focus("#table")
            await page.keyboard.press("ArrowDown")
            await page.keyboard.press("ArrowDown")
            assert (await page.inner_text("#chosen-engine span")).strip() == "e1"
            assert "e1: usable" in await page.inner_text("#tile-text")
            assert "Hot: e1" in await page.inner_text("#hot")
            # Paused, the page stays as it is, even if a frame was due.
            await page.evaluate(
                "() => { window.requestAnimationFrame = (call) => { window.frame = call; }; }"
            )
            await shown(page, "window.frame !== undefined")
            before = await page.evaluate("document.documentElement.dataset.updates")
            await page.keyboard.press("p")
            await page.evaluate("window.frame(0)")
            assert await page.evaluate("document.documentElement.dataset.updates") == before
            await page.evaluate("() => { window.requestAnimationFrame = (call) => call(0); }")
            await asyncio.sleep(1.3)
            assert await page.evaluate("document.documentElement.dataset.updates") == before


async def test_a_lone_point_of_a_chart_is_a_dot(chromium: Any) -> None:
    async with world(1) as it:
        assert (await it.post())[0] == 200
        async with open_page(chromium, it.url, viewport={"width": 1280, "height": 800}) as page:
            await shown(page, "document.querySelectorAll('#list tbody tr').length === 1")
            # The charts of times: only the third has a value, of one group of seconds.
            await shown(page, f"({COLORED})(2) >= 12")
            assert [await page.evaluate(f"({COLORED})({chart})") for chart in (0, 1)] == [0, 0]


async def test_a_phone_in_the_dark(chromium: Any) -> None:
    async with world(4, policy="lmetric") as it, traffic(it):
        phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True}
        async with open_page(chromium, it.url, **phone) as page:
            await shown(page, UPDATED)
            await fits(page)
            dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            await page.emulate_media(color_scheme="light")
            assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
            await shown(page, "document.querySelectorAll('#list tbody a').length > 0")
            await page.tap("#list tbody a")
            await shown(page, "document.getElementById('because').textContent.startsWith('Because')")
            await fits(page)


@pytest.mark.parametrize("width", [390, 1440])
async def test_the_page_opens_with_what_is_wrong(chromium: Any, width: int) -> None:
    async with world(2, policy="lmetric", health={"interval": 60}) as it:
        size = {"width": width, "height": 844}
        for engine in it.server.fleet.models[0].engines.values():
            engine.failed("refused", "no connection: Connection refused")
        assert (await it.post())[0] == 503
        async with open_page(chromium, it.url, viewport=size) as page:
            await shown(page, UPDATED)
            await shown(page, "document.querySelectorAll('#problem-list .warn').length === 1")
            await fits(page)
            above = "document.getElementById('problems').getBoundingClientRect().top < 200"
            assert await page.evaluate(above)
            bad = await page.inner_text("#problem-list .bad")
            assert re.match(r"e0, e1: down since \d\d:\d\d:\d\d: no connection: Connection refused", bad)
            assert "Fix: start the engine" in bad
            refused = await page.inner_text("#problem-list .warn")
            assert refused.startswith("1 request refused in the last 5 minutes: 503 no_engine")
            about = await page.inner_text("#about")
            assert "tiny · policy lmetric" in about
            assert "p_token * (bs" in about
            assert f"version {__version__}" in about
            assert (await page.inner_text("#list tbody tr td:last-child")) == "503 no_engine"
            await page.click("#help-link")
            assert await page.evaluate("location.hash") == "#help"


@pytest.mark.parametrize("width", [390, 1440])
async def test_requests_that_do_not_stream_have_their_end_to_end_time(chromium: Any, width: int) -> None:
    async with world(1) as it:
        assert (await it.post())[0] == 200
        async with open_page(chromium, it.url, viewport={"width": width, "height": 844}) as page:
            await shown(page, "document.querySelectorAll('#list tbody tr').length === 1")
            cells = dict(
                zip(
                    await page.locator("#now dt").all_inner_texts(),
                    await page.locator("#now dd span").all_inner_texts(),
                    strict=True,
                )
            )
            assert cells["TTFT p50"] == cells["TPOT p50"] == "–"
            assert cells["End to end p50"].endswith("s")
            status = await page.inner_text("#list tbody tr td:last-child")
            assert re.fullmatch(r"200 in [\d.]+ (µs|ms|s)", status)
            assert "End-to-end time" in await page.inner_text("#charts")
            await fits(page)


async def test_the_page_asks_for_a_token_and_shows_a_tenant_only_its_own(
    chromium: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-alice: alice\nsk-bob: bob\n")
    closed = {"auth": {"keys_file": str(keys)}, "admin": {"token": "root-token"}}
    async with world(2, **closed) as it:
        for key in ("sk-alice", "sk-bob", "sk-bob"):
            await it.post(headers={"authorization": f"Bearer {key}"})
        async with open_page(chromium, it.url) as page:
            for token, hidden, requests in (
                ("wrong", None, 0),
                ("sk-alice", True, 1),
                ("root-token", False, 3),
            ):
                await shown(page, "!document.getElementById('login').hidden")
                await login(page, token)
                if hidden is None:
                    await shown(page, "document.getElementById('why').textContent.includes('unknown')")
                    continue
                await shown(page, UPDATED)
                await shown(page, f"document.querySelectorAll('#list tbody tr').length === {requests}")
                assert await page.evaluate("document.getElementById('fleet').hidden") == hidden
                assert await page.evaluate("Object.keys(localStorage).length") == 0
                await page.evaluate("sessionStorage.clear()")
                await page.reload()


async def test_events_without_the_names_of_engines(chromium: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-alice: alice\n")
    closed = {"auth": {"keys_file": str(keys)}, "errors": {"show_engines": False}}
    engines = [FakeEngine(behave=reset), FakeEngine()]
    async with world(engines, **closed) as it:
        await it.post(headers={"authorization": "Bearer sk-alice"})
        async with open_page(chromium, it.url) as page:
            await shown(page, "!document.getElementById('login').hidden")
            await login(page, "sk-alice")
            await shown(page, "document.querySelectorAll('#events li').length === 1")
            assert "an engine failed (reset), next another engine" in await page.inner_text("#events")


async def test_another_login_shows_nothing_of_the_first(chromium: Any, tmp_path: Path) -> None:
    """The charts had the points of both viewers, and the engines stayed in the document."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-alice: alice\n")
    closed = {"auth": {"keys_file": str(keys)}, "admin": {"token": "root-token"}}
    async with world(2, **closed) as it, open_page(chromium, it.url) as page:
        await shown(page, "!document.getElementById('login').hidden")
        await login(page, "root-token")
        await shown(page, UPDATED)
        await page.evaluate(SPY)
        await shown(page, "window.seenCharts && window.seenCharts.points.length > 1")
        assert await page.locator("#rows .row:visible").count() == 2
        last = await page.evaluate("window.seenCharts.points.at(-1)[0]")

        await page.keyboard.press("p")  # paused

        async def refuse(route: Any) -> None:
            await route.fulfill(status=401, json={"error": {"message": "the token has ended"}})

        await page.route("**/debug/live", refuse)
        running = it.server.front.running
        phase, running.phase = running.phase, REPLACED  # its streams end
        await shown(page, "!document.getElementById('login').hidden")
        running.phase = phase
        await page.unroute("**/debug/live")
        await login(page, "sk-alice")
        await shown(page, "document.getElementById('status').textContent.includes('your own')")
        await page.evaluate(SPY)
        await shown(page, "window.seenCharts && window.seenCharts.points.length")
        await shown(page, f"window.seenCharts.points.at(-1)[0] > {last}")
        assert await page.evaluate("window.seenCharts.points[0][0]") > last - 1
        for part in ("rows", "hot", "problem-list", "events"):
            assert await page.evaluate(f"document.getElementById('{part}').textContent") == ""
        assert await page.evaluate("document.getElementById('about').hidden")
        # After a step back of the clock, the chart goes on.
        await page.evaluate("window.seenCharts.points = []")
        for points, expected in (
            ([[90], [91], [92]], [90, 91, 92]),
            ([[91], [92], [90.5]], [90, 90.5]),
            ([[92], [90.5], [91.5]], [90, 90.5, 91.5]),
        ):
            await page.evaluate("(points) => window.seenCharts.add(points)", points)
            assert await page.evaluate("window.seenCharts.points.map(([at]) => at)") == expected


@pytest.mark.nightly
@pytest.mark.parametrize("engines", [4, 1000])
async def test_four_sizes(chromium: Any, engines: int, tmp_path: Path) -> None:
    """Four sizes, light and dark. The screenshots stay in the test's folder."""
    async with large_world(engines) as it, traffic(it):
        load_engines(it)
        for width, height in SIZES:
            for scheme in ("light", "dark"):
                size = {"width": width, "height": height}
                async with open_page(chromium, it.url, viewport=size, color_scheme=scheme) as page:
                    await shown(page, UPDATED, 30)
                    await fits(page)
                    assert f"of {engines} usable" in (await page.inner_text("#counts")).replace(",", "")
                    assert "Hot: e1 with batch 40" in await page.inner_text("#hot")
                    # Only the rows in sight are in the document.
                    assert await page.locator("#rows .row").count() < 40
                    file = tmp_path / f"{engines}_{width}_{scheme}.png"
                    await page.screenshot(path=file, full_page=True)
                    assert file.stat().st_size > 20_000


@pytest.mark.nightly
async def test_a_thousand_engines_update_within_a_frame_budget(chromium: Any) -> None:
    async with large_world(1000) as it, traffic(it):
        load_engines(it)
        async with open_page(chromium, it.url, viewport={"width": 1400, "height": 1000}) as page:
            await shown(page, "Number(document.documentElement.dataset.updates || 0) >= 8", 40)
            took = float(await page.evaluate("document.documentElement.dataset.updateMilliseconds"))
            assert took < 250, f"{took} ms for an update"  # a defect, not a slow machine
            await page.focus("#table")
            await page.keyboard.press("End")
            last = await page.inner_text("#chosen-engine span")
            assert last == "e999"
            await page.fill("#filter", "e77")
            await shown(page, "document.getElementById('table').getAttribute('aria-rowcount') === '12'")
