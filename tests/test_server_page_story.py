"""From `serve --embedded 8` to a ranking of policies, as docs/how-to/monitoring.md shows it."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import orjson
import pytest

from browser_world import browser, needs_browser, open_page, shown
from test_server_process import router
from test_server_top import top

pytestmark = [needs_browser, pytest.mark.nightly]
HOT = re.compile(r"Hot: (embedded-\d) with batch (\d+) \(([\d.]+)x the mean of its role\)")
CLI = (sys.executable, "-m", "lmetric.cli")
TRACE = ("--trace", "slice", "--requests", "200", "--max-input-tokens", "20000")
# Chromium and eight engines share the cores of the test, which the simulation does not know.
FIT = ("--max-error", "0.6")


async def test_a_new_user_finds_the_hot_engine_the_reason_and_a_better_policy(tmp_path: Path) -> None:
    records = tmp_path / "records"
    # This policy ignores load until the guard stops it.
    policy = ("--policy", "new_tokens", "--guard")
    async with router("--embedded", "8", *policy, "--records", str(records)) as r:
        await r.listening(120)
        replay = await asyncio.create_subprocess_exec(
            *CLI, "replay", *TRACE, "--target", r.url, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with browser() as chromium, open_page(chromium, r.url) as page:
                async with asyncio.timeout(120):
                    while (found := HOT.match(await page.text_content("#hot") or "")) is None:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert int(found[2]) >= 4
                assert float(found[3]) > 2
                await page.click(f"#list tr:has(td:nth-child(3):text-is('{found[1]}')) a")
                await shown(page, "document.getElementById('because').textContent.startsWith('Because')")
                reason = await page.inner_text("#because")
                label = (await page.evaluate("location.hash")).removeprefix("#request=")
                assert re.search(rf"{found[1]} (had the lowest|was drawn by its) value of new_tokens", reason)
                assert found[1] in await page.inner_text("#alternatives tr.chosen")
            code, out, _ = await top(r.url, "--why", label)
            assert code == 0
            assert " ".join(reason.split()) in " ".join(out.split())
            assert await asyncio.wait_for(replay.wait(), 900) == 0
        finally:
            if replay.returncode is None:
                replay.kill()
                await replay.wait()
        r.process.terminate()
        assert await r.ended() == 0
    whatif = await asyncio.create_subprocess_exec(
        *CLI,
        "whatif",
        str(records),
        "--policy",
        "lmetric,vllm",
        *FIT,
        "--json",
        "-",
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(whatif.communicate(), 900)
    assert whatif.returncode == 0
    ranking = orjson.loads(out)["ranking"]
    assert sorted(each["policy"] for each in ranking) == ["lmetric", "new_tokens", "vllm"]
