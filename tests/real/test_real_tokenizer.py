"""A model whose engine does not use its tokenizer.json: red before the export, exact after it."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmetric_lab.emulated.text import TOKENIZER_PATH
from router_world import served
from test_real_doctor import doctor, outcomes, red, seen
from vllm_process import BLOCK, MODEL, VllmEngine, environment, model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

EXPORT = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"


async def test_doctor_and_router_reach_exact_after_the_export(
    vllm_engines: Callable[..., list[VllmEngine]], tmp_path: Path
) -> None:
    # The class of Qwen2 has another pre-tokenizer than this file.
    raw = tmp_path / "raw"
    shutil.copytree(model(environment()), raw)
    shutil.copy(TOKENIZER_PATH, raw / "tokenizer.json")
    (engine,) = vllm_engines(1, model=str(raw))

    code, said = await doctor(engine.url)
    (found,) = said["engines"]
    assert set(red(found)) == {"tokenizer"}
    command = f"lmetric-router tokenizer {raw} --out DIR"
    assert command in red(found)["tokenizer"]
    assert "tokens here" in red(found)["tokenizer"]
    assert (code, found["good_for"]) == (1, "approximate")

    out = tmp_path / "exported"
    words = command.replace("DIR", str(out)).split()[1:]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", EXPORT, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, error = await asyncio.wait_for(process.communicate(), 120)
    assert told.decode() == f"tokenizer: {out}\n", error.decode()

    code, said = await doctor(engine.url, "--tokenizer", str(out))
    (found,) = said["engines"]
    assert outcomes(found)["tokenizer"] == "pass"
    assert "exported with transformers" in seen(found, "tokenizer")
    assert (code, found["good_for"]) == (0, "exact")

    async with served([engine]) as world:
        assert (await world.engines())[engine.name]["mode"] == "approximate"
    async with served([engine], "--set", f"tokenizer={out}") as world:
        page = (await world.engines())[engine.name]
        assert page["mode"] == "exact", page
        words = "The  router sends 12345 requests,\n\ndon't wait. " * 20  # raw and rebuilt differ
        prompt = [{"role": "user", "content": words}]
        for _ in range(2):
            answer = await world.client.chat.completions.with_raw_response.create(
                model=MODEL, messages=prompt, max_tokens=1
            )
            record = await world.record(answer.headers)
            usage = answer.parse().usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert record["prompt_tokens"] == usage.prompt_tokens
            cached = usage.prompt_tokens_details.cached_tokens
            assert record["predicted_cached_tokens"] == cached
        assert cached >= 5 * BLOCK
