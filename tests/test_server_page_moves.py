"""The live page in Chromium while requests move between real emulated engines."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest

from browser_world import browser, needs_browser, open_page, shown
from moves_world import LONG, at_token, move, moving, place
from pd_world import Pd, nixl, pd
from split_world import COMPLETIONS, asked, body_of
from test_pull_server import heated, pulling

pytestmark = [needs_browser, pytest.mark.nightly]
VIEW = {"viewport": {"width": 1280, "height": 900}}
PART = re.compile(r"([\w-]+): (\w+) from")
BOXES = """() => [...document.querySelectorAll('#timeline rect')].map((box) => ({
  kind: box.getAttribute('class'), y: Number(box.getAttribute('y')),
  from: Number(box.getAttribute('x')), to: Number(box.getAttribute('x')) + Number(box.getAttribute('width')),
}))"""


async def opened(w: Pd, page: Any, link: str) -> dict[str, Any]:
    """Opens the request of a link, and checks the drawn timeline. Returns its decision record."""
    await shown(page, f"document.querySelector({link!r}) !== null")
    label = (await page.get_attribute(link, "href")).removeprefix("#request=")
    await page.click(link)
    await shown(page, "document.getElementById('because').textContent.startsWith('Because')")
    async with w.client.get(f"{w.url}/debug/decisions/{label}") as answer:
        record: dict[str, Any] = await answer.json()
    parts = record["timeline"]
    boxes = await page.evaluate(BOXES)
    assert [box["kind"] for box in boxes] == [part["kind"] for part in parts]
    # Engines have a line each, and each box is as long as its part.
    lines = {part["engine"]: box["y"] for part, box in zip(parts, boxes, strict=True)}
    assert len(set(lines.values())) == len(lines)
    assert [box["y"] for box in boxes] == [lines[part["engine"]] for part in parts]
    start, end = parts[0]["from_seconds"], max(part["to_seconds"] for part in parts)
    left, right = boxes[0]["from"], max(box["to"] for box in boxes)
    for part, box in zip(parts, boxes, strict=True):
        for key, edge in (("from_seconds", "from"), ("to_seconds", "to")):
            drawn = (box[edge] - left) / (right - left)
            assert drawn == pytest.approx((part[key] - start) / (end - start), abs=0.02), (part, box)
    changes = sum(one["engine"] != other["engine"] for one, other in itertools.pairwise(parts))
    assert await page.locator("#timeline line.link").count() == changes
    said = await page.get_attribute("#timeline svg", "aria-label")
    assert PART.findall(said) == [(part["engine"], part["kind"]) for part in parts]
    await page.keyboard.press("Escape")
    return record


def ways(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(part["engine"], part["kind"]) for part in record["timeline"]]


async def test_a_handoff() -> None:
    prefill, decode = nixl("prefill", clock_speed=2.0), nixl("decode", clock_speed=2.0)
    async with browser() as chromium, pd(prefill, decode) as w, open_page(chromium, w.url, **VIEW) as page:
        await shown(page, "!document.getElementById('no-events').hidden")
        await w.stream()
        await shown(page, "document.getElementById('events').textContent.includes('p0 hands off to d0')")
        assert await page.locator("#events .kind").all_inner_texts() == ["handoff"]
        assert not await page.is_visible("#no-events")
        for link in ("#events a", "#list tbody a"):
            record = await opened(w, page, link)
            assert ways(record)[0] == ("p0", "prefill")
            assert ways(record)[-1] == ("d0", "decode")
            assert "d0 continues after the handoff" in record["because"]


async def test_a_migration() -> None:
    async with browser() as chromium, moving() as w, open_page(chromium, w.url, **VIEW) as page:
        body = body_of(COMPLETIONS, LONG, stream=True, max_tokens=120)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        source = place(await at_token(w, 10))
        assert await move(w, 10)
        ((_, target),) = (await task)["record"]["migrations"]
        await shown(page, "document.getElementById('events').textContent.includes('migration')")
        text = await page.inner_text("#events li")
        assert re.search(rf"{source} → {target}, \d+ tokens", text), text
        for link in ("#events a", "#list tbody a"):
            record = await opened(w, page, link)
            assert ways(record) == [(source, "prefill"), (source, "decode"), (target, "decode")]


async def test_a_prefix_fetch() -> None:
    async with browser() as chromium, pulling() as w, open_page(chromium, w.url, **VIEW) as page:
        holder = await heated(w)
        said = await asked(w, COMPLETIONS, body_of(COMPLETIONS, LONG * 2 + "and then?", stream=True))
        target = said["headers"]["x-lmetric-instance"]
        await shown(page, "document.getElementById('events').textContent.includes('fetch')")
        text = await page.inner_text("#events li")
        assert f"{target} fetches a prefix from {holder}: fetched" in text
        for link in ("#events a", "#list tbody a"):
            record = await opened(w, page, link)
            assert ways(record) == [(holder, "fetch"), (target, "prefill"), (target, "decode")]
            assert f"its cached prefix is fetched from {holder}" in record["because"]
